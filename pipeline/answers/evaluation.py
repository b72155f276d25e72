"""Documents of known membership: how well each detector, or a classifier on words alone, distinguishes them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from pipeline.answers.detection import (
    CONFIDENCE,
    RATES,
    Area,
    Detection,
    DetectorScores,
    Estimate,
    area_interval,
    detection,
    effective_blocks,
    roc,
)
from pipeline.checks.blind import dependent_blocks, sample_documents
from pipeline.checks.classifier import Shown, classifier_input, hold_out
from pipeline.checks.held_out_auc import LEAST, Compared
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import display_name
from pipeline.corpus.keys import KEY_COLUMNS, Keys
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.run.records import Record, VersionedRecord
from pipeline.run.scored import Scored, doubtful_inputs, finite_scores
from pipeline.selection.conformal import mix

COMPARED: tuple[Role, Role] = ("seen", "unseen")

BLIND = "blind (words alone)"
"""The row of the classifier that knows only the words; no score column has such a name."""

BLIND_PICTURES = "blind (pictures alone)"
"""The row of the classifier that knows only the pictures and their files."""

MOST_GROUPS = 100

Curve = tuple[np.ndarray, np.ndarray]
"""FPR and TPR at every threshold, float64, (thresholds + 1,)."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownDocuments:
    """The compared documents of one role, in the order of their shards."""

    scores: dict[str, np.ndarray]  # by column; float64, (documents,); NaN where the classifier was not applied
    groups: np.ndarray  # str or None, (documents,)
    keys: Keys
    row: np.ndarray  # int64, (documents,), ascending within a shard
    spans: dict[str, tuple[int, int]]  # shard -> positions of its documents: first, and one beyond the last

    def place(self, shard: str, row: int) -> int | None:
        """Position of a row of a shard; None where it is not compared."""
        start, stop = self.spans[shard]
        place = start + int(np.searchsorted(self.row[start:stop], row))
        return place if place < stop and self.row[place] == row else None

    def column_scores(self, column: str, group: str | None) -> np.ndarray:
        """A column's scores, without NaN, of all documents or of one group."""
        values = self.scores[column] if group is None else self.scores[column][self.groups == group]
        return values[~np.isnan(values)]


ByRole = dict[Role, KnownDocuments]
Numbers = dict[Role, np.ndarray]
"""Block number of each document, by role: int64, (documents,)."""


def known_documents(scored: Scored, role: Role, columns: Sequence[str]) -> KnownDocuments:
    """The scored documents of a role.

    Raises:
        UserError: there are none, or scores are damaged.
    """
    receipts = scored.of(role)
    tables = [scored.table(receipt, ["row", *KEY_COLUMNS, *columns]) for receipt in receipts]
    ends = np.cumsum([0, *(len(table) for table in tables)]).tolist()
    if not ends[-1]:
        raise UserError(f"evaluate compares seen with unseen documents, and no {role} document has a score")
    scores = {
        column: np.concatenate([finite_scores(t, column, r.data) for r, t in zip(receipts, tables, strict=True)])
        for column in columns
    }
    keys = Keys.joined(map(Keys.of_table, tables))
    return KnownDocuments(
        scores=scores,
        groups=np.array(keys.group.to_pylist(), dtype=object),
        keys=keys,
        row=np.concatenate([table["row"].to_numpy() for table in tables]),
        spans={receipt.shard: span for receipt, span in zip(receipts, itertools.pairwise(ends), strict=True)},
    )


@dataclass(frozen=True, slots=True, eq=False)
class WordsAlone:
    """Results of the classifier on the words."""

    scores: dict[Role, np.ndarray]  # mean percentile of each document in the halves that tested it; NaN: not tested
    auc: Estimate


def words_alone(scored: Scored, kinds: ByRole, blocks: Numbers, seed: int) -> WordsAlone | None:
    """Train a classifier on the words of one half of the documents and test it on the other half, ten times.

    Args:
        scored: score shards of the run.
        kinds: the compared documents.
        blocks: result of `blocks_of_roles`.
        seed: seed of the halves.

    Returns:
        None with fewer than `LEAST` documents or `held_out_auc.LEAST_BLOCKS` blocks of a role, or without texts.
    """
    if not all(shard.has_text for shard in scored.shards.values()):
        return None
    places: dict[Role, list[int]] = {}
    texts: dict[Role, list[Shown]] = {}
    for role, kind in kinds.items():
        shards = [scored.shards[receipt.shard] for receipt in scored.of(role)]
        sample = [(kind.place(shard.id, one.row), classifier_input(one)) for shard, one in sample_documents(shards)]
        places[role] = [place for place, _ in sample if place is not None]
        texts[role] = [text for place, text in sample if place is not None]
    if min(len(of_role) for of_role in texts.values()) < LEAST:
        return None
    block = np.concatenate([blocks[role][places[role]] for role in COMPARED])
    compared = Compared.of(np.arange(block.size) < len(texts["seen"]), block)
    held = hold_out([*texts["seen"], *texts["unseen"]], compared, seed)
    if held is None:
        return None
    from scipy.stats import rankdata  # costs half a second, and no run without labels needs it

    percentiles = np.zeros(block.size)
    for inside, values in held.halves():
        percentiles[inside] += rankdata(values) / values.size / len(held.scores)
    scores = {role: np.full(kind.groups.size, np.nan) for role, kind in kinds.items()}
    for role, values in zip(COMPARED, np.split(percentiles, [len(texts["seen"])]), strict=True):
        scores[role][places[role]] = values
    value, error = held.auc()
    blocks_of_half = effective_blocks(compared) / 2
    return WordsAlone(scores, Estimate(value, *area_interval([Area(value, error, blocks_of_half, 1.0)])))


def blocks_of_roles(kinds: ByRole, near_copies: float) -> Numbers:
    """The block number of each document, int64, (documents,); documents of one block depend on each other."""
    keys, n_seen = Keys.joined(kinds[role].keys for role in COMPARED), len(kinds["seen"].keys)
    block = dependent_blocks(keys, np.arange(len(keys)) < n_seen, near_copies)
    return dict(zip(COMPARED, np.split(block, [n_seen]), strict=True))


class DetectorEvaluation(Record):
    """How well one detector distinguishes seen from unseen documents."""

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
    n_finetuned: int = Field(description="Scored documents that adapters were trained on, and near-duplicates of them.")
    n_truncated: int = Field(description="Scored documents that were cut to max_tokens.")


class Evaluation(VersionedRecord):
    """How well each detector distinguishes documents of known membership: `evaluation/evaluation.json`."""

    run: str = Field(description="The run directory.")
    model: str = Field(description="The model that scored the documents.")
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
    """An evaluation, the ROC curve of each of its detectors over all documents, and the facts behind its `notices`."""

    evaluation: Evaluation
    curves: dict[str, Curve]
    n_blocks: dict[Role, int]  # blocks of dependent documents
    n_independent: int  # unseen documents that the TPR counts
    shares_groups: bool  # whether a group has documents of both roles
    n_groups_left_out: int  # groups without rows in the table
    higher: Mapping[str, str] = field(default_factory=dict)  # column of external scores -> role with the higher scores
    has_text: bool = True  # whether texts were read, and not scores alone
    units: str = "words"  # or tokens, of texts
    doubts: Sequence[str] = ()  # what readers of the inputs doubt


def evaluate_scores(config: AuditConfig, scored: Scored, limit: int | None) -> Evaluated:
    """Compare the scores of the seen with those of the unseen documents, for every detector and in every group.

    AUC and TPR with 95% intervals, as in `pipeline.answers.detection`. The first row is a classifier that knows only
    the words: what it finds is not membership. It is tested on at most 5,000 documents of each role. Documents of one
    group or family of near-duplicates (`pipeline.checks.held_out_auc.blocks_among`) count as one unit of an interval.

    Args:
        config: configuration of the run.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.

    Raises:
        UserError: no document of a role has a score, a file is missing, or scores are damaged.
    """
    detectors = parse_detectors(config.detectors)
    columns = [detector.column for detector in detectors]
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
        _blind_row(kinds, blind, group, held.auc)
        if name == blind and held
        else _row(name, group, _sample(kinds, name, group, blocks))
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
    return Evaluated(
        evaluation,
        curves={name: roc(*(kinds[role].column_scores(name, None) for role in COMPARED)) for name in names},
        n_blocks={role: np.unique(blocks[role]).size for role in COMPARED},
        n_independent=_sample(kinds, columns[0], None, blocks).independent[1].size,
        shares_groups=bool({*kinds["seen"].groups.tolist()} & {*kinds["unseen"].groups.tolist()} - {None}),
        n_groups_left_out=dropped,
        higher={one.column: str(one.arguments["higher"]) for one in detectors} if config.corpus.scores else {},
        has_text=config.corpus.has_text,
        units=config.corpus.units,
        doubts=doubtful_inputs(scored.receipts, scored.shards),
    )


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
    seen, unseen = (kinds[role].column_scores(name, group) for role in COMPARED)
    numbers = np.concatenate([blocks[role][inside[role]] for role in COMPARED])
    keys = np.concatenate([kinds[role].keys.text[inside[role]] for role in COMPARED])
    return DetectorScores(seen, unseen, numbers, mix(keys.view(np.uint64)))


def _row(name: str, group: str | None, sample: DetectorScores, figures: Detection | None = None) -> DetectorEvaluation:
    figures = figures or detection([sample])
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
    sample = DetectorScores(*(kinds[role].column_scores(name, group) for role in COMPARED))
    figures = detection([sample])
    alone = Estimate(figures.auc.value, None, None) if group is not None else auc
    tpr = {rate: Estimate(estimate.value, None, None) for rate, estimate in figures.tpr.items()}
    return _row(name, group, sample, Detection(alone, tpr))


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


def is_blind(detector: str) -> bool:
    """Whether a row is of a classifier that never saw the model."""
    return detector in (BLIND, BLIND_PICTURES)
