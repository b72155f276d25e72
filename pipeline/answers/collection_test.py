"""The verdict on a collection, from the scores of a run: whether the model was trained on it, and the evidence.

For documents with versions, all published indices are redrawn, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.answers import verdict_text as wording
from pipeline.answers.scored_collection import (
    MOST_DOCUMENTS,
    Collection,
    count_members,
    member_summaries,
    other_failures,
    read_collection,
)
from pipeline.answers.verdict import (
    LEVEL,
    BlockKind,
    BlockTest,
    CollectionVerdict,
    MemberCount,
    Statement,
    VersionsTest,
)
from pipeline.checks.blind import NO_BLIND_TEST, after_blind
from pipeline.checks.diagnostic import BlindDiagnostic, Diagnostic
from pipeline.checks.shuffle import AS_DRAWN, ShuffleDiagnostic, read_version_draws
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, display_name
from pipeline.config.selection import SelectionConfig
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.results.document_checks import run_blind_test
from pipeline.results.summary import Summary, unsettled
from pipeline.run.conclusion import bound_condition, conclude
from pipeline.run.conclusion_text import CONTRADICTED, ONLY_SCORES
from pipeline.run.scored import Scored, ShardMap
from pipeline.selection.collection import PERMUTATIONS, Blocks, PermutationTest, permutation_test
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.selection.version_scores import (
    REDRAWS,
    VersionPart,
    VersionScores,
    log_e_values,
    pooled_residuals,
    redraw_p_value,
    version_ranks,
)
from pipeline.stages.events import VERSIONS, VERSIONS_TYPE
from pipeline.store.receipts import Receipt
from pipeline.wording import sample_of


def judge_collection(
    config: AuditConfig, scored: Scored, limit: int | None, each: ShardMap, blocks: BlockKind | None = None
) -> CollectionVerdict:
    """Decide whether the collection of audited documents was trained on, by selection counts and a permutation test.

    docs/methods.md, section 3.13, defines both, and the verdict from them and the blind test.

    Args:
        config: configuration of the run.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.
        each: reads the shards.
        blocks: kind of the units that are permuted; by default groups where documents have one.

    Raises:
        UserError: no unseen documents, too few for a permutation test, or damaged scores.
    """
    collection = read_collection(config, scored, each, blocks)
    blind = run_blind_test(scored, "unseen", config).diagnostic
    setting = Setting(
        run=scored.store.url,
        model=audited_model(config),
        limit=limit,
        seed=config.seed,
        sampled=sum(receipt.n_scored for receipt in scored.of("audit")) > MOST_DOCUMENTS,
        scheduled=config.series is not None,
    )
    return judge_scores(collection, member_summaries(scored.store, config), blind, setting)


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts that a verdict states of its run, and the settings of its random draws."""

    run: str
    model: str
    limit: int | None
    seed: int
    sampled: bool  # whether the audited documents are a sample
    scheduled: bool  # whether the run is a scan of a schedule


def judge_scores(
    collection: Collection,
    answers: Sequence[tuple[SelectionConfig, Summary]],
    blind: BlindDiagnostic,
    setting: Setting,
) -> CollectionVerdict:
    """The verdict on documents with given scores and blocks.

    Args:
        collection: the documents.
        answers: the selections of the run of direction members, in order.
        blind: the blind test of the unseen documents.
        setting: setting of the run.

    Raises:
        UserError: too few blocks for a permutation test.
    """
    made = collection.blocks(setting.seed)
    result = permutation_test(made, setting.seed)
    counts = [
        count_members(selection, summary, collection, blind.outcome, setting.seed) for selection, summary in answers
    ]
    first, above = next(iter(counts), None), float(made.differences.mean())
    evidence = _Evidence(
        test=None if result is None else _test_record(result, collection, made),
        blind=blind,
        first=answers[0][1] if answers else None,
        counts=[count for count in counts if count is not None and bound_condition(count.conclusion) is not None],
        withheld=first is not None and bound_condition(first.conclusion) is None and first.at_least > 0,
        ungrouped=collection.ungrouped,
        direction=Diagnostic(outcome=_is_above(above), sentence=wording.direction(above)),
    )
    conclusion, reasons = evidence.conclude()
    answer: Statement = "not shown"
    if evidence.shown:
        answer = "not supported" if conclusion == ConclusionValue.CONTRADICTED else "trained on"
    elif conclusion == ConclusionValue.CONTRADICTED and evidence.withheld:
        answer = "not supported"
    return CollectionVerdict(
        run=setting.run,
        model=setting.model,
        limit=setting.limit,
        seed=setting.seed,
        answer=answer,
        conclusion=conclusion,
        reasons=reasons,
        next=evidence.next_step(conclusion),
        sentences=[
            *_sentences(answer, evidence, setting),
            *([wording.OUTSIDE] if setting.scheduled else []),
        ],
        level=LEVEL,
        counts=evidence.counts,
        test=evidence.test,
        blind=blind,
        direction=evidence.direction,
    )


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The parts of a verdict."""

    test: BlockTest | None
    blind: BlindDiagnostic
    first: Summary | None  # summary of the first selection of direction members
    counts: list[MemberCount]  # counts that may be stated
    withheld: bool  # whether the count of the first selection is above zero and may not be stated
    ungrouped: bool  # whether the blocks ignore groups
    direction: Diagnostic  # training raises scores, so lower audited scores have another cause

    @property
    def by_test(self) -> bool:
        return self.test is not None and self.test.p_value <= LEVEL

    @property
    def count(self) -> MemberCount | None:
        """The count of the verdict: that of the first selection, where it may be stated."""
        name = None if self.first is None else self.first.name
        return next((count for count in self.counts if count.selection == name), None)

    @property
    def by_count(self) -> bool:
        return self.count is not None and self.count.at_least > 0

    @property
    def shown(self) -> bool:
        return self.by_test or self.by_count

    def next_step(self, conclusion: ConclusionValue) -> str | None:
        """What to do next: after the blind test of the verdict, else after the checks of the first selection."""
        if conclusion == ConclusionValue.SUPPORTED:
            return None
        return after_blind(self.blind, "unseen") or (None if self.first is None else self.first.next)

    @property
    def shown_by(self) -> tuple[str, str]:
        """What shows that the collection was trained on, and how often it would by chance; empty where nothing does."""
        if self.by_test and self.test is not None:
            return wording.by_p_value(self.test.p_value, None if self.count is None else self.count.confidence)
        if self.by_count and self.count is not None:
            return wording.by_count(self.count.confidence, self.test is not None)
        return "", ""

    @property
    def condition(self) -> str | None:
        """The condition under which the verdict is stated, from `bound_condition`; that on groups comes first."""
        condition = bound_condition(self.conclude()[0], self.blind.tested)
        if condition is None or not self.ungrouped:
            return condition
        return ", and ".join([wording.IF_GROUPED, *([condition] if condition else [])])

    def conclude(self) -> tuple[ConclusionValue, list[str]]:
        """The conclusion of the checks of the verdict, and the reasons why it is not supported.

        The test permutes whole blocks, so near-duplicates do not affect it; any other failed check of the first
        selection contradicts the verdict.
        """
        others = [] if self.first is None else other_failures(self.first)
        if self.blind.outcome == Outcome.FAILED:
            return ConclusionValue.CONTRADICTED, [self.blind.sentence]
        if others:
            return ConclusionValue.CONTRADICTED, others
        if self.withheld and not self.by_test and self.first is not None:
            return ConclusionValue.CONTRADICTED, [wording.see_selection(self.first.name)]
        conclusion = conclude([self.blind.outcome])
        if self.by_count and not self.by_test and self.count is not None:
            conclusion = self.count.conclusion
        return conclusion, [unsettled(self.blind)] if conclusion == ConclusionValue.INCONCLUSIVE else []


def _is_above(above: float) -> Outcome:
    """The check of the direction: whether the mean difference of scores is positive, as training makes it."""
    return Outcome.PASSED if above > 0 else Outcome.FAILED


def _test_record(result: PermutationTest, collection: Collection, made: Blocks) -> BlockTest:
    return BlockTest(
        p_value=result.p_value,
        permutations=PERMUTATIONS,
        auc=result.auc,
        blocks=collection.kind,
        n_audit=int(made.sizes[made.audited].sum()),
        n_unseen=int(made.sizes[~made.audited].sum()),
        n_audit_blocks=int(made.audited.sum()),
        n_unseen_blocks=int((~made.audited).sum()),
        n_mixed=made.n_mixed,
        differences=dict(zip(collection.columns, made.differences.tolist(), strict=True)),
    )


def audited_model(config: AuditConfig) -> str:
    """The audited model, with its adapter."""
    model = config.model
    adapter = model.adapter_shown if isinstance(model, ModelConfig) and model.adapter else None
    return wording.model_with_adapter(display_name(model), adapter)


def _sentences(answer: Statement, evidence: _Evidence, setting: Setting) -> list[str]:
    count, test = evidence.count, evidence.test
    stated = ConclusionValue.CONTRADICTED not in (conclude([evidence.blind.outcome]), evidence.conclude()[0])
    if not stated or (count is None and evidence.withheld):
        counted = [CONTRADICTED]
    elif evidence.ungrouped:
        counted = [wording.UNGROUPED]
    elif count is None:
        counted = [wording.NO_COUNT]
    else:
        bounded = evidence.first is not None and evidence.first.bound is not None
        counted = wording.counted_phrase(count, setting.sampled, evidence.blind.tested, bounded)
    lines = [wording.head(setting.model, answer, evidence.shown_by, evidence.condition), *counted]
    compared = ONLY_SCORES not in evidence.blind.sentence
    lines.append(wording.tested(test, compared) if test is not None else wording.NO_TEST)
    if test is not None and evidence.direction.outcome == Outcome.FAILED:
        lines.append(evidence.direction.sentence)
    lines.append(wording.ASSUMED)
    if setting.limit is not None:
        lines.append(sample_of(setting.limit))
    return lines


def judge_versions(config: AuditConfig, scored: Scored, limit: int | None, each: ShardMap) -> CollectionVerdict:
    """Decide whether the collection of documents with versions was trained on; redrawing all indices is exact.

    The statistic is the sum over documents of the published version's standardised score over all detectors of the run,
    which were fixed before any score was read. E-values multiply: the product with the e-value of later documents, with
    indices of their own, is an e-value of both.

    Args:
        config: configuration of the run.
        scored: its finished score shards.
        limit: the most documents that were read; None when all were.
        each: reads the shards.

    Raises:
        UserError: no document has scores of all its versions, or damaged scores.
    """
    columns = [detector.column for detector in parse_detectors(config.detectors)]
    draws = read_version_draws(config, scored, each)

    def read_scores(receipt: Receipt) -> VersionPart:
        return version_part(scored.table(receipt, ["doc_id", VERSIONS]), config, columns, draws.left_out)

    parts = list(each(scored.of("audit"), read_scores))
    if not sum(len(part.scores.ids) for part in parts):
        raise UserError(f"no document of {scored.store.url} has scores of all its versions")
    setting = Setting(scored.store.url, audited_model(config), limit, config.seed, False, False)
    return judge_parts(parts, setting, draws.diagnostic)


def judge_parts(parts: Sequence[VersionPart], setting: Setting, shuffle: ShuffleDiagnostic | None) -> CollectionVerdict:
    """The verdict on documents with given scores of their versions.

    Args:
        parts: scores by all detectors of the run together; at least one document in all.
        setting: setting of the run.
        shuffle: shuffle check of the documents; None where `seenset mark` drew the published versions.
    """
    scores = pooled_residuals(parts)
    log_e = float(log_e_values(version_ranks(scores, setting.seed, "against"), scores.sizes)[-1])
    above = float(scores.standardised()[scores.offsets[:-1] + scores.published].mean())
    test = VersionsTest(
        p_value=redraw_p_value(scores, setting.seed),
        redraws=REDRAWS,
        e_value=math.exp(min(log_e, math.log(np.finfo(float).max))),
        documents=scores.sizes.size,
        versions=int(scores.sizes.max()),
        above=above,
    )
    answer: Statement = "trained on" if test.p_value <= LEVEL else "not shown"
    contradicted = shuffle is not None and shuffle.outcome == Outcome.FAILED
    if contradicted and answer == "trained on":
        answer = "not supported"
    return CollectionVerdict(
        run=setting.run,
        model=setting.model,
        limit=setting.limit,
        seed=setting.seed,
        answer=answer,
        conclusion=ConclusionValue.CONTRADICTED if contradicted else ConclusionValue.SUPPORTED,
        reasons=[shuffle.sentence] if contradicted and shuffle is not None else [],
        next=AS_DRAWN if contradicted else None,
        sentences=wording.verdict_on_versions(setting.model, answer, test, setting.limit, shuffle),
        level=LEVEL,
        counts=[],
        test=None,
        blind=NO_BLIND_TEST.diagnostic,
        direction=Diagnostic(outcome=_is_above(above), sentence=wording.direction_of_versions(above)),
        versions=test,
    )


def version_part(
    table: pa.Table, config: AuditConfig, wanted: Sequence[str], left_out: frozenset[str] = frozenset()
) -> VersionPart:
    """The scores of all versions of the documents of a score shard.

    Scores of several detectors are standardised within documents and added.

    Args:
        table: table of the shard, with doc_id and the column `VERSIONS`.
        config: configuration of the run whose detectors made the scores.
        wanted: score columns of detectors.
        left_out: ids of documents that are not used.
    """
    columns = [detector.column for detector in parse_detectors(config.detectors)]
    held = {name: pc.struct_field(table[VERSIONS].combine_chunks(), name) for name in VERSIONS_TYPE.names}
    sizes = pc.binary_length(held["digests"]).to_numpy(zero_copy_only=False) // 32
    scores = VersionScores(
        np.zeros(sizes.sum()),
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        held["published"].to_numpy(zero_copy_only=False).astype(np.int64),
        tuple(table["doc_id"].to_pylist()),
        np.frombuffer(b"".join(held["digests"].to_pylist()), dtype=np.uint8).reshape(-1, 32),
    )
    matrix = held["scores"].flatten().to_numpy(zero_copy_only=False).reshape(-1, len(columns))
    each = [replace(scores, scores=np.ascontiguousarray(matrix[:, columns.index(column)])) for column in wanted]
    if len(each) > 1:
        each = [replace(scores, scores=np.sum([one.standardised() for one in each], axis=0))]
    return VersionPart(each[0], held["kinds"], held["forms"], left_out=left_out)
