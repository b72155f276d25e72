"""The selected documents of a selection, sorted and written in pieces, and the data of its figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import PurePath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline.config.selection import SelectionConfig
from pipeline.corpus.keys import make_excerpts
from pipeline.corpus.shard import Shard
from pipeline.run.records import Record
from pipeline.selection.bounds import bounds_of_lists
from pipeline.selection.folds import Answer, RoleScores
from pipeline.selection.procedures import procedure_of
from pipeline.store.external_sort import SortedRows, write_pieces
from pipeline.store.files import Store

ALPHAS = tuple(Fraction(k, 100) for k in (*range(1, 51), *range(55, 100, 5)))
MOST_GROUPS = 1000
"""Maximum number of groups that are counted, since no figure can show more."""

STRENGTH = ("_fused", "_score")
"""Sort columns that `with_strength` appends; they are not written to files."""

SMOOTHED = ("conformal_rank", "rank_draw", "smoothed_p")
"""Columns of the selected documents of a selection by smoothed ranks: k, u with U = (u + 1/2) / 2^64, and p."""

ORDER = ("p_value", *STRENGTH, "source", "row")
"""Columns by which selected documents are sorted, the smallest p-value first; source and row identify a document."""


class AlphaCurve(Record):
    """Results of the same p-values for other values of alpha: `selection/<name>/alphas.json`."""

    alphas: list[float] = Field(description="Values of alpha, ascending; includes the requested one.")
    n_selected: list[int] = Field(description="Documents selected at each, by the procedure of the selection.")
    right_at_least: list[int] | None = Field(
        description="Of these, the members (with direction clean, non-members), at least; true of all of them at once "
        "with the confidence of the bound. Null where no theorem covers the selection."
    )
    confidence: float | None = Field(description="Of `right_at_least`; null without it.")


class GroupCounts(Record):
    """Counts of scored and selected documents by group: `selection/<name>/groups.json`."""

    n_scored: dict[str, int] = Field(description="Audited documents with a score, by group.")
    n_selected: dict[str, int] = Field(description="Selected documents, by group.")


def alpha_curve(selection: SelectionConfig, answer: Answer, n_selected: int, quarantined: int) -> AlphaCurve | None:
    """The curve of an answer; None where p-values do not decide, themselves depend on alpha, or are smoothed.

    Args:
        selection: the question.
        answer: its answer; its bound is None where no bound is drawn.
        n_selected: number of documents selected at the requested alpha.
        quarantined: number of audited documents without a score, which are never selected.
    """
    counts = answer.counts
    if counts is None or answer.smoothing is not None:  # the list of each alpha would need its own reading
        return None
    bounds = None if answer.bound is None else bounds_of_lists(counts, selection.exact_confidence)
    procedure = procedure_of(selection.procedure)
    last = None if procedure.curve is None else procedure.curve(procedure, selection, answer)
    if last is None:
        return None
    alphas = sorted({*ALPHAS, selection.exact_alpha})
    ranks = [answer.rank if alpha == selection.exact_alpha else last(alpha) for alpha in alphas]
    unlisted = [quarantined if rank == counts.grid.size else 0 for rank in ranks]
    selected = [counts.at_most(rank) - without for rank, without in zip(ranks, unlisted, strict=True)]
    selected[alphas.index(selection.exact_alpha)] = n_selected
    right = None
    if bounds is not None:
        right = [max(0, size - bounds.wrong_at(rank)) for size, rank in zip(selected, ranks, strict=True)]
    return AlphaCurve(
        alphas=[float(alpha) for alpha in alphas],
        n_selected=selected,
        right_at_least=right,
        confidence=None if right is None else selection.confidence,
    )


def histogram(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Counts of scores in bins, int64."""
    return np.histogram(scores, bins=edges)[0].astype(np.int64)


class ScoreHistogram(Record):
    """The distribution of the scores of each role: `selection/<name>/scores.json`."""

    column: str = Field(description="The detector column.")
    edges: list[float] = Field(description="Edges of the bins, ascending; one more than there are bins.")
    roles: dict[str, list[int]] = Field(description="Documents in each bin, by role.")


@dataclass(frozen=True, slots=True)
class GroupTally:
    """Counts of documents by group; where there are more than MOST_GROUPS groups, only so many are kept."""

    scored: Counter[str] = field(default_factory=Counter)
    selected: Counter[str] = field(default_factory=Counter)

    @classmethod
    def count(cls, groups: pa.ChunkedArray, selected: np.ndarray) -> GroupTally:
        """Count one shard from the groups of its documents, null for none, and bool (documents,)."""
        kinds = (groups, groups.filter(pa.array(selected)))
        return cls(*(Counter(some.drop_null().to_pylist()) for some in kinds))

    def __add__(self, other: GroupTally) -> GroupTally:
        """The sum of both counts."""
        if len(self.scored) > MOST_GROUPS:
            return self
        return GroupTally(self.scored + other.scored, self.selected + other.selected)

    def record(self) -> GroupCounts | None:
        """The counts by name of the group; None where there are no groups, or too many."""
        if not 0 < len(self.scored) <= MOST_GROUPS:
            return None
        scored, selected = ({name: kind[name] for name in sorted(self.scored)} for kind in (self.scored, self.selected))
        return GroupCounts(n_scored=scored, n_selected=selected)


def with_strength(
    rows: pa.Table, selection: SelectionConfig, answer: Answer, batch: RoleScores, selected: np.ndarray
) -> pa.Table:
    """Append the columns `STRENGTH`, and `SMOOTHED` where ranks are.

    `STRENGTH` is the ascending order of documents with equal p-values, most member-like first.

    `_fused` is the fused score of all detectors where the procedure has one (td4eval: its fused statistic; adadetect:
    its discriminant), otherwise 0. `_score` is the score of the detector with the largest weight (the first of equal
    ones), or of the first detector: descending in direction members, ascending in direction clean. For
    ktd it is W.

    Args:
        rows: rows of the selected documents of a shard.
        selection: its configuration.
        answer: the selection's answer.
        batch: the documents of the shard.
        selected: bool, (documents,), whether each is selected.
    """
    groups = None if batch.groups is None else batch.groups.filter(pa.array(selected))
    batch = RoleScores(batch.matrix[selected], groups, batch.keys[selected])
    column = int(np.argmax(answer.weights)) if answer.weights else 0
    sign = -1.0 if selection.direction == "members" else 1.0
    fused = np.zeros(len(rows)) if answer.fused is None else -np.asarray(answer.fused(batch), np.float64)
    for name, values in zip(STRENGTH, (fused, sign * batch.matrix[:, column]), strict=True):
        rows = rows.append_column(name, pa.array(values + 0.0))  # never -0.0
    drawn = {} if answer.smoothing is None else answer.smoothing.columns(answer.smoothing.rank(batch), batch.keys)
    for name, values in drawn.items():
        rows = rows.append_column(name, pa.array(values))
    return rows


def write_selected(store: Store, folder: str, selected: SortedRows, clean: bool) -> dict[str, str]:
    """Write the selected documents of a selection.

    Args:
        store: the run directory.
        folder: folder of the selection.
        selected: their rows.
        clean: whether the list of clean documents is also written, as Parquet and as indices for a harness.

    Returns:
        The SHA-256 of each file, by name.

    Raises:
        UserError: the run directory cannot be written to.
    """
    schema = pa.schema([field for field in selected.schema if field.name not in STRENGTH])
    files = {}
    for name in (f"{folder}/selected.parquet", f"{folder}/clean.parquet")[: 1 + clean]:
        pieces = (piece.drop_columns(STRENGTH) for piece in selected.pieces())
        files[name] = write_pieces(store, name, schema, pieces)
    if clean:
        indices = f"{folder}/clean_ids.json"
        files[indices] = _write_clean_ids(store, indices, selected)
    return files


def _write_clean_ids(store: Store, name: str, selected: SortedRows) -> str:
    """Write the selected documents as `{"task": [indices]}`, the format of --samples of lm-evaluation-harness.

    A task is an input file, by its name without suffixes; an index is a row of it.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for piece in selected.pieces():
        for source in piece["source"].unique().to_pylist():
            here = piece.filter(pc.equal(piece["source"], source))
            rows.setdefault(PurePath(source).name.split(".")[0], []).append(here["row"].to_numpy())
    with store.replaced(name) as file:
        file.write(b"{")
        for place, task in enumerate(sorted(rows)):
            indices = pa.array(np.sort(np.concatenate(rows[task]))).cast(pa.string())
            together = pa.ListArray.from_arrays(pa.array([0, len(indices)], pa.int32()), indices)
            lines = pc.binary_join(together, ",\n    ")[0].as_py()  # Python objects take ten times the memory
            key = json.dumps(task, ensure_ascii=False)
            file.write(f"{',' if place else ''}\n  {key}: [\n    {lines}\n  ]".encode("utf-8", "replace"))
        file.write(b"\n}\n" if rows else b"}\n")
    return file.sha256


EXCERPT = 200
"""Maximum number of characters of the shown beginning of a selected document."""


def with_excerpts(answers: Sequence[ShardAnswer], shard: Shard) -> list[ShardAnswer]:
    """The verdicts on a shard with the beginning of selected documents; texts are read once for all selections."""
    keys: dict[int, int] = {}
    for one in answers:
        keys.update(zip(one.selected["row"].to_pylist(), one.selected["text_key"].to_pylist(), strict=True))
    excerpts = dict(zip(keys, make_excerpts(shard, list(keys), list(keys.values()), EXCERPT), strict=True))
    columns = [pa.array([excerpts[row] for row in one.selected["row"].to_pylist()], pa.string()) for one in answers]
    return [
        replace(one, selected=one.selected.append_column("excerpt", column))
        for one, column in zip(answers, columns, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    """The answer for one shard, which is returned to the driver."""

    selected: pa.Table  # one row per selected document
    ranks: np.ndarray  # int64 counts of p-values at k / (n_calibration + 1)
    histogram: np.ndarray  # int64 counts of the first detector's scores
    groups: GroupTally
    files: dict[str, str]  # SHA-256 of the file of the shard's verdicts, by name


@dataclass(slots=True)
class Total:
    """The sum over all shards, which are added in any order; selected rows are not held in memory."""

    selected: SortedRows
    ranks: np.ndarray
    histogram: np.ndarray
    groups: GroupTally
    files: dict[str, str]

    @classmethod
    def like(cls, part: ShardAnswer) -> Total:
        """An empty total in the shape of a part."""
        first = ["smoothed_p"] if "smoothed_p" in part.selected.schema.names else []
        rows = SortedRows(part.selected.schema, (*first, *ORDER))
        return cls(rows, np.zeros_like(part.ranks), np.zeros_like(part.histogram), GroupTally(), {})

    def add(self, part: ShardAnswer) -> None:
        """Add the documents of a shard."""
        self.selected.add(part.selected)
        self.ranks = self.ranks + part.ranks
        self.histogram = self.histogram + part.histogram
        self.groups = self.groups + part.groups
        self.files.update(part.files)
