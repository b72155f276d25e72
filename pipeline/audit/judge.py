"""The verdict on a collection, from the scores of a run: was it trained on, and what that rests on."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.audit.block_counts import count_of, other_failures, summaries_of
from pipeline.audit.collection import MOST_DOCUMENTS, Collection, read_collection
from pipeline.audit.conclusion import Conclusion, bound_condition, conclude, supported_of
from pipeline.audit.diagnostics import run_blind_test
from pipeline.audit.scored import Scored
from pipeline.audit.select import Each
from pipeline.audit.summary import BlindDiagnostic, Diagnostic, Summary, unsettled
from pipeline.audit.verdict import LEVEL, BlockKind, BlockTest, CollectionVerdict, MemberCount, Statement
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, display_name
from pipeline.report.wording.conclusion import CONTRADICTED
from pipeline.selection.collection import FOLDS, PERMUTATIONS, Blocks, PermutationTest, permutation_test
from pipeline.selection.digits import beside, decimal, percentage

OUTSIDE = "This verdict is outside the schedule of scans: its rates are of this scan alone, and add up over scans."
NO_TEST = (
    "No permutation test was made: only labels of blocks of like size are permuted, and no class of size has blocks of "
    "both roles."
)

UNGROUPED = (
    "No count is stated: a count requires independent documents, and the groups of these are ignored (blocks: family). "
    "The permutation test takes documents of one group to be independent."
)

CALIBRATING = (
    "Unseen documents that depend on each other (groups, near copies) are blocks: one document of each calibrates the "
    "count, drawn by a hash of its id."
)


def judge_collection(
    config: AuditConfig, scored: Scored, limit: int | None, each: Each, blocks: BlockKind | None = None
) -> CollectionVerdict:
    """Was the collection of a run's audited documents trained on? By the selections' counts and a permutation test.

    docs/methods.md, section 3.13, defines both and what is made of them and the blind test.

    Args:
        config: of the run.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.
        each: reads the shards.
        blocks: what moves whole; by default groups where documents have one.

    Raises:
        UserError: no unseen documents, too few for a permutation test, or damaged scores.
    """
    collection = read_collection(config, scored, each, blocks)
    made = collection.blocks(config.seed)
    result = permutation_test(made, config.seed)
    blind = run_blind_test(scored, "unseen", config).diagnostic
    answers = summaries_of(scored.store, config)
    counts = [count_of(selection, summary, collection, blind.ok, config.seed) for selection, summary in answers]
    first = next(iter(counts), None)
    evidence = _Evidence(
        test=None if result is None else _test_record(result, collection, made),
        blind=blind,
        first=answers[0][1] if answers else None,
        counts=[count for count in counts if count is not None and bound_condition(count.conclusion) is not None],
        withheld=first is not None and bound_condition(first.conclusion) is None and first.at_least > 0,
        ungrouped=collection.ungrouped,
        direction=_direction(made.differences),
    )
    conclusion, reasons = evidence.conclude()
    answer: Statement = "not shown"
    if evidence.shown:
        answer = "not supported" if conclusion == "contradicted" else "trained on"
    elif conclusion == "contradicted" and evidence.withheld:
        answer = "not supported"
    sampled = sum(receipt.n_scored for receipt in scored.of("audit")) > MOST_DOCUMENTS
    return CollectionVerdict(
        run=scored.store.url,
        model=_model_name(config),
        limit=limit,
        seed=config.seed,
        answer=answer,
        supported=supported_of(conclusion),
        reasons=reasons,
        sentences=[
            *_sentences(_model_name(config), answer, evidence, limit, sampled),
            *([OUTSIDE] if config.series is not None else []),
        ],
        level=LEVEL,
        counts=evidence.counts,
        test=evidence.test,
        blind=blind,
        direction=evidence.direction,
    )


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What a verdict is made of."""

    test: BlockTest | None
    blind: BlindDiagnostic
    first: Summary | None  # of the first selection that seeks members
    counts: list[MemberCount]  # that may be stated
    withheld: bool  # whether the count of the first selection is above zero and may not be stated
    ungrouped: bool  # whether the blocks ignore groups
    direction: Diagnostic

    @property
    def by_test(self) -> bool:
        return self.test is not None and self.test.p_value <= LEVEL

    @property
    def count(self) -> MemberCount | None:
        """The count that the verdict reads: that of the first selection, where it may be stated."""
        name = None if self.first is None else self.first.name
        return next((count for count in self.counts if count.selection == name), None)

    @property
    def by_count(self) -> bool:
        return self.count is not None and self.count.at_least > 0

    @property
    def shown(self) -> bool:
        return self.by_test or self.by_count

    @property
    def condition(self) -> str | None:
        """The condition under which the verdict is stated, as `bound_condition` gives it; of groups first."""
        condition = bound_condition(self.conclude()[0], self.blind.outcome != "not tested")
        if condition is None or not self.ungrouped:
            return condition
        return ", and ".join(["provided documents of one group are independent", *([condition] if condition else [])])

    def conclude(self) -> tuple[Conclusion, list[str]]:
        """The conclusion of the checks of the verdict, and the reasons why it is not supported.

        The test is for whole blocks, so near copies take nothing from it; what else contradicts the first selection
        contradicts the verdict.
        """
        others = [] if self.first is None else other_failures(self.first)
        if self.blind.ok is False:
            return "contradicted", [self.blind.sentence]
        if others:
            return "contradicted", others
        if self.withheld and not self.by_test and self.first is not None:
            return "contradicted", [f"A check contradicts selection {self.first.name}: see its answer."]
        supported: bool | None = self.blind.ok
        if self.by_count and not self.by_test and self.count is not None:
            supported = self.count.supported
        conclusion = conclude([supported])
        return conclusion, [unsettled(self.blind)] if conclusion == "inconclusive" else []


def _test_record(result: PermutationTest, collection: Collection, made: Blocks) -> BlockTest:
    return BlockTest(
        p_value=result.p_value,
        p_values=[result.p_value],
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


def _model_name(config: AuditConfig) -> str:
    model = config.model
    name = display_name(model)
    return (
        name if isinstance(model, EndpointConfig) or not model.adapter else f"{name} with adapter {model.adapter_shown}"
    )


def _direction(differences: np.ndarray) -> Diagnostic:
    """Training raises scores: a difference to lower ones has another cause."""
    mean = float(differences.mean())
    if mean > 0:
        sentence = f"Audited documents score higher than unseen ones, by {mean:.2f} standard deviations on average."
    else:
        sentence = (
            f"Audited documents do not score higher than unseen ones ({mean:+.2f} standard deviations on average over "
            "the detectors): training raises scores, so the test gives p = 1."
        )
    return Diagnostic(ok=mean > 0, sentence=sentence)


def _sentences(model: str, answer: Statement, evidence: _Evidence, limit: int | None, sampled: bool) -> list[str]:
    condition = f", {evidence.condition}" if evidence.condition else ""
    heads = {
        "trained on": f"{model} was trained on documents of this collection{condition}.",
        "not shown": f"It is not shown that {model} was trained on this collection. That is no proof that it was not.",
        "not supported": (
            f"Contradicted: the audited documents differ from the unseen ones; this does not show that {model} was "
            "trained on them."
        ),
    }
    count, test = evidence.count, evidence.test
    stated = "contradicted" not in (conclude([evidence.blind.ok]), evidence.conclude()[0])
    if not stated or (count is None and evidence.withheld):
        counted = [CONTRADICTED]
    elif evidence.ungrouped:
        counted = [UNGROUPED]
    else:
        bounded = evidence.first is not None and evidence.first.bound is not None
        counted = _count_sentences(count, sampled, evidence.blind.outcome != "not tested", bounded)
    lines = [heads[answer], *counted]
    lines.append(_test_sentence(test) if test is not None else NO_TEST)
    if test is not None and not evidence.direction.ok:
        lines.append(evidence.direction.sentence)
    if count is not None and test is not None and stated:
        wrong, level = 1 - Fraction(repr(count.confidence)), Fraction(repr(LEVEL))
        lines.append(
            f"Of collections without a trained document the count is wrong for at most {decimal(wrong)} and "
            f"the test (p <= {LEVEL:g}) for at most {LEVEL:g}; one of the two for at most {decimal(wrong + level)}."
        )
    lines.append(
        "The verdict assumes that nothing but training tells the audited documents from the unseen ones. The blind "
        "test looks for other differences in their words alone, or in thumbnails, colours and files of pictures."
    )
    if limit is not None:
        lines.append(f"This is a sample: only the first {limit:,} documents of each role were read.")
    return lines


def _count_sentences(count: MemberCount | None, sampled: bool, checked: bool, bounded: bool) -> list[str]:
    """The count in words; `bounded`: it is the bound that the selection itself states."""
    if count is None:
        return ["No selection of this run states how many documents were trained on at least."]
    by = f"selection {count.selection}, {', '.join(count.detectors)}"
    sure = f"{percentage(Fraction(repr(count.confidence)))} confidence"
    units = {"document": "documents", "group": "groups", "family": "families of near copies"}[count.unit]
    of = f"{count.n_units:,} {'sampled ' * sampled}audited {units}"
    if not count.at_least:
        return [f"The count shows none: {by} at {sure}, {of}."]
    condition = bound_condition(count.conclusion, checked)
    ending = f", {condition}." if condition else "."
    if count.unit == "document":
        were = "was" if count.at_least == 1 else "were"
        line = f"With {sure} at least {count.at_least:,} of the {of} {were} trained on ({by}){ending}"
        return [line, *([] if bounded else [CALIBRATING])]
    contain = "contains" if count.at_least == 1 else "contain"
    noun = "group" if count.unit == "group" else "family"
    single = "" if count.unit == "group" else "A document without near copies is a family of its own. "
    drawn = "one of its documents, drawn by a hash of its id"
    if count.documents_of_each > 1:
        drawn = f"the mean over {count.documents_of_each:,} of its documents, drawn by a hash of their ids"
    mixed = ""
    if count.n_mixed:
        mixed = f" {count.n_mixed:,} documents are left out, because their {units} stand in both roles."
    return [
        f"With {sure} at least {count.at_least:,} of the {of} {contain} a document that was trained on ({by}){ending}",
        f"{single}The score of a {noun} is {drawn}; its size is assumed to carry no information on its score.{mixed}",
    ]


def _test_sentence(test: BlockTest) -> str:
    kinds = {"group": "groups", "family": "families of near copies"}
    number = len(test.differences)
    read = f"{number} detector{'' if number == 1 else 's'}"
    return (
        f"The permutation test gives p = {beside(test.p_value, LEVEL, kind='g')}: a linear score of {read}, "
        f"cross-fitted in {FOLDS} folds of {test.n_audit_blocks:,} audited and {test.n_unseen_blocks:,} unseen blocks "
        f"({kinds[test.blocks]}; {test.n_audit:,} and {test.n_unseen:,} documents; {PERMUTATIONS:,} permutations of "
        f"whole blocks, refitted for each; AUC {test.auc:.2f})."
    )
