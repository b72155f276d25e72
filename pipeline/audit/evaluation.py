"""Documents of known membership: how well each detector tells them apart, and how well their words alone do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from pipeline.audit.blind import (
    LEAST,
    OF_PICTURES,
    PASSING,
    SAMPLED_SHARDS,
    TOLERANCE,
    WORDS,
    settled_by,
)
from pipeline.audit.detection import (
    CONFIDENCE,
    RATES,
    DetectorScores,
    Estimate,
    detection,
    roc,
    too_few_untrained,
)
from pipeline.audit.evaluated_documents import COMPARED, ByRole, Numbers, blocks_of_roles, known_documents, words_alone
from pipeline.audit.records import Record, VersionedRecord
from pipeline.audit.scored import Scored
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import display_name
from pipeline.detectors.registry import parse_detectors
from pipeline.selection.conformal import mix

BLIND = "blind (words alone)"
"""The row of the classifier that knows only the words; no score column has such a name."""

BLIND_PICTURES = "blind (pictures alone)"
"""The same of the classifier that knows pictures and their files."""

MOST_GROUPS = 100

Curve = tuple[np.ndarray, np.ndarray]
"""FPR and TPR at every threshold, float64, (thresholds + 1,)."""


class DetectorEvaluation(Record):
    """How well one detector tells seen from unseen documents."""

    detector: str = Field(description=f"Score column, or {BLIND}: a classifier that never saw the model.")
    group: str | None = Field(description="Group of the documents that are compared; null for all documents.")
    n_seen: int = Field(description="Seen documents that are compared.")
    n_unseen: int = Field(description="Unseen documents that are compared.")
    auc: Estimate = Field(description="Area under the ROC curve, in [0, 1]; 0.5 is chance.")
    tpr: dict[str, Estimate] = Field(
        description="Share of the seen documents at or above a threshold, by the largest share of unseen ones there."
    )


class ComparedDocuments(Record):
    """The documents of one role: how many were read, and how many of them are compared."""

    role: Role = Field(description="seen or unseen.")
    n_in: int = Field(description="Documents read.")
    n_compared: int = Field(description="Documents that have scores and that no adapter was trained on.")
    n_quarantined: int = Field(description="Documents that could not be scored, or repeat an id.")
    reasons: dict[str, int] = Field(description="Why they were quarantined, and how many for each reason.")
    n_finetuned: int = Field(description="Scored documents that adapters were trained on, and near copies of them.")
    n_truncated: int = Field(description="Scored documents that were cut to max_tokens.")


class Evaluation(VersionedRecord):
    """How well each detector tells documents of known membership apart: `evaluation/evaluation.json`."""

    run: str = Field(description="The run directory.")
    model: str = Field(description="The model that was asked.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")
    seed: int = Field(description="Seed of the halves that the classifier is trained on.")
    confidence: float = Field(description="Confidence of the intervals.")
    resamples: int = Field(0, description="Bootstrap samples of each interval; 0: no interval is made by resampling.")
    documents: list[ComparedDocuments] = Field(description="How many documents of each role there are.")
    n_shared: int = Field(description="Seen documents with the same normalised text as an unseen one.")
    notices: list[str] = Field(description="What a reader of the figures must know.")
    rows: list[DetectorEvaluation] = Field(
        description="The figures: of all documents the classifier on the words, then each detector; then by group."
    )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """An evaluation, and the ROC curve of each of its detectors over all documents."""

    evaluation: Evaluation
    curves: dict[str, Curve]


def evaluate_scores(config: AuditConfig, scored: Scored, limit: int | None) -> Evaluated:
    """Compare the scores of the seen with those of the unseen documents, for every detector and in every group.

    AUC and TPR with 95% intervals, as `pipeline.audit.detection` says. The first row is of a classifier that knows only
    the words: whatever it finds is no membership. It is asked about at most 5,000 documents of each role. Documents of
    one group or family of near copies (`halvings.blocks_among`) count as one unit of an interval.

    Args:
        config: of the run.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.

    Raises:
        UserError: no document of a role has a score, a file is gone, or scores are damaged.
    """
    columns = [detector.column for detector in parse_detectors(config.detectors)]
    kinds = {role: known_documents(scored, role, columns) for role in COMPARED}
    blocks = blocks_of_roles(kinds, config.near_copies)
    held = words_alone(scored, kinds, blocks, config.seed)
    blind = BLIND_PICTURES if config.corpus.has_pictures else BLIND
    if held is not None:
        for role in COMPARED:
            kinds[role].scores[blind] = held.scores[role]
    names = [*([blind] if held else []), *columns]
    grouped, dropped = _groups(kinds)
    rows = [
        _blind_row(kinds, blind, group, held.auc) if name == blind and held else _row(kinds, name, group, blocks)
        for group in (None, *grouped)
        for name in names
    ]
    evaluation = Evaluation(
        run=scored.store.url,
        model=display_name(config.model),
        limit=limit,
        seed=config.seed,
        confidence=CONFIDENCE,
        documents=[_documents(scored, role, kinds[role].groups.size) for role in COMPARED],
        n_shared=int(kinds["seen"].keys.equal(kinds["unseen"].keys).sum()),
        notices=[],
        rows=rows,
    )
    notices = [
        *_notices(evaluation),
        *_about_intervals(kinds, columns[0], blocks),
        *([f"{dropped:,} smaller groups are left out of the table."] if dropped else []),
    ]
    curves = {name: roc(*(kinds[role].of(name, None) for role in COMPARED)) for name in names}
    return Evaluated(evaluation.model_copy(update={"notices": notices}), curves)


def _groups(kinds: ByRole) -> tuple[list[str], int]:
    """The largest groups by name, at most MOST_GROUPS, and how many others there are."""
    sizes = Counter[str]()
    for kind in kinds.values():
        sizes.update(group for group in kind.groups.tolist() if group is not None)
    largest = sorted(sizes, key=lambda group: (-sizes[group], group))[:MOST_GROUPS]
    return sorted(largest), len(sizes) - len(largest)


def _sample(kinds: ByRole, name: str, group: str | None, blocks: Numbers) -> DetectorScores:
    inside = {role: np.ones(kind.groups.size, dtype=bool) for role, kind in kinds.items()}
    if group is not None:
        inside = {role: kind.groups == group for role, kind in kinds.items()}
    seen, unseen = (kinds[role].of(name, group) for role in COMPARED)
    numbers = np.concatenate([blocks[role][inside[role]] for role in COMPARED])
    keys = np.concatenate([kinds[role].keys.text[inside[role]] for role in COMPARED])
    return DetectorScores(seen, unseen, numbers, mix(keys.view(np.uint64)))


def _row(kinds: ByRole, name: str, group: str | None, blocks: Numbers) -> DetectorEvaluation:
    sample = _sample(kinds, name, group, blocks)
    figures = detection([sample])
    return DetectorEvaluation(
        detector=name,
        group=group,
        n_seen=sample.trained.size,
        n_unseen=sample.untrained.size,
        auc=figures.auc,
        tpr={f"{rate:g}": figures.tpr[rate] for rate in RATES},
    )


def _blind_row(kinds: ByRole, name: str, group: str | None, auc: Estimate) -> DetectorEvaluation:
    """The classifier's row: its AUC over all documents is the mean of those of the halves; no other has an interval."""
    seen, unseen = (kinds[role].of(name, group) for role in COMPARED)
    figures = detection([DetectorScores(seen, unseen)])
    return DetectorEvaluation(
        detector=name,
        group=group,
        n_seen=seen.size,
        n_unseen=unseen.size,
        auc=auc if group is None else Estimate(figures.auc.value, None, None),
        tpr={f"{rate:g}": Estimate(figures.tpr[rate].value, None, None) for rate in RATES},
    )


def _documents(scored: Scored, role: Role, n_compared: int) -> ComparedDocuments:
    receipts, reasons = scored.of(role), scored.quarantined(role)
    return ComparedDocuments(
        role=role,
        n_in=sum(receipt.n_in for receipt in receipts),
        n_compared=n_compared,
        n_quarantined=reasons.total(),
        reasons=dict(sorted(reasons.items())),
        n_finetuned=scored.n_finetuned(role),
        n_truncated=sum(receipt.n_truncated for receipt in receipts),
    )


def _notices(evaluation: Evaluation) -> Iterator[str]:
    """What a reader must know before the figures."""
    if evaluation.limit is not None:
        yield f"This is a sample: only the first {evaluation.limit:,} documents of each role were read."
    yield about_words(evaluation.rows[0])
    yield from _about_sample(evaluation)
    if evaluation.n_shared:
        yield (
            f"{evaluation.n_shared:,} seen documents have the same text as an unseen one: their labels contradict "
            "each other. They are compared all the same."
        )
    seen, unseen = (entry.n_compared for entry in evaluation.documents)
    blunt = [f"{rate:.0%}" for rate in RATES if rate * unseen < 1]
    if blunt:
        yield (
            f"With {unseen:,} unseen documents a false positive rate of {' or '.join(blunt)} allows no false positive: "
            "the TPR there is the share of seen documents above every unseen one."
        )
    if seen + unseen and min(seen, unseen) < LEAST:
        yield f"Fewer than {LEAST} documents of one kind are compared: the figures are too uncertain to rely on."


def _about_sample(evaluation: Evaluation) -> Iterator[str]:
    """What the classifier's row leaves out, and which documents it counts; nothing without such a row."""
    row = evaluation.rows[0]
    if not is_blind(row.detector):
        return
    yield f'The TPR of the row "{row.detector}" has no interval: ten classifiers score the documents.'
    counts = [
        (counted, entry.n_compared, entry.role)
        for entry, counted in zip(evaluation.documents, (row.n_seen, row.n_unseen), strict=True)
    ]
    if all(counted == compared for counted, compared, _ in counts):
        each = " and ".join(f"{counted:,} {role}" for counted, _, role in counts)
        yield f'The row "{row.detector}" counts all of the {each} documents that are compared.'
        return
    each = " and ".join(f"{counted:,} of the {compared:,} {role}" for counted, compared, role in counts)
    yield (
        f'The row "{row.detector}" counts {each} documents that are compared: the first ones of at most '
        f"{SAMPLED_SHARDS} shards of each role, evenly spaced over its files."
    )


def _about_intervals(kinds: ByRole, column: str, blocks: Numbers) -> Iterator[str]:
    """What the intervals over all documents are over, and which figures have none."""
    seen, unseen = (np.unique(blocks[role]).size for role in COMPARED)
    units = "documents"
    if seen + unseen < sum(kind.groups.size for kind in kinds.values()):
        units = "blocks"
        yield (
            "Documents of one group, and near copies, may depend on one another: the intervals over all documents are "
            f"over {seen:,} seen and {unseen:,} unseen blocks (groups, families of near copies, single documents), and "
            "those of the TPR count one document of each, drawn by a hash of its text."
        )
    if {*kinds["seen"].groups.tolist()} & {*kinds["unseen"].groups.tolist()} - {None}:
        yield "Groups with seen and unseen documents are taken as given: their documents count one by one."
    _, independent = _sample(kinds, column, None, blocks).independent
    yield from too_few_untrained(independent.size, f"unseen {units}")


def is_blind(detector: str) -> bool:
    """Whether a row is of a classifier that never saw the model."""
    return detector in (BLIND, BLIND_PICTURES)


def about_words(row: DetectorEvaluation) -> str:
    """What the classifier's row says of the documents; what it means that there is none."""
    if not is_blind(row.detector):
        return (
            f"Fewer than {LEAST} seen or unseen documents, or too few groups: whether a classifier tells them apart "
            "was not tested."
        )
    by = WORDS if row.detector == BLIND else OF_PICTURES
    value, low, high = row.auc.value, row.auc.low, row.auc.high
    assert value is not None  # there are documents of both kinds
    if low is None or high is None:
        return (
            f"Whether a classifier that never saw the model tells seen from unseen documents by their {by} cannot be "
            f"determined: there are too few groups for an interval of its AUC ({value:.3f}; 0.5 is chance)."
        )
    interval = f"AUC {value:.3f}, 95% interval {low:.3f} to {high:.3f}; 0.5 is chance"
    if low > 0.5 + TOLERANCE:
        return (
            f"A classifier that never saw the model tells seen from unseen documents by their {by} ({interval}): they "
            "differ in more than membership. A detector may have found that difference, and these figures do not say "
            "how much of what it finds is membership."
        )
    if high > 0.5 + PASSING:
        return (
            f"Whether a classifier that never saw the model tells seen from unseen documents by their {by} cannot "
            f"be determined from so few documents ({interval}): the test is inconclusive. "
            f"{settled_by('seen', 'unseen', by)}"
        )
    return (
        f"A classifier that never saw the model hardly tells seen from unseen documents by their {by}: with an AUC of "
        f"at most {0.5 + PASSING:g} ({interval}). That speaks for these documents; it does not prove that they differ "
        "in membership alone."
    )
