"""The selected documents of a selection: sorted and written in pieces, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.audit.drawn import GroupTally
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.keys import excerpts_of
from pipeline.corpus.shard import Shard
from pipeline.selection.passes import Answer, Batch
from pipeline.store.files import Store
from pipeline.store.pieces import SortedRows, write_pieces

STRENGTH = ("_fused", "_score")
"""Columns of sorting alone, which `with_strength` appends; no file holds them."""

ORDER = ("p_value", *STRENGTH, "source", "row")
"""Columns by which selected documents ascend, the smallest p-value first; no two documents share source and row."""


def with_strength(
    rows: pa.Table, selection: SelectionConfig, answer: Answer, batch: Batch, selected: np.ndarray
) -> pa.Table:
    """Rows with the columns `STRENGTH`: what orders documents of equal p-values, ascending from the most member-like.

    `_fused` is the one score of all detectors where the procedure makes one (td4eval: its fused statistic; adadetect:
    its discriminant), otherwise 0. `_score` is the score of the detector of the largest weight, the first of equal
    ones, or of the first detector: the highest first in direction members, the lowest first in direction clean. For
    ktd that is W.

    Args:
        rows: of the selected documents of a shard.
        selection: its configuration.
        answer: to it.
        batch: the documents of the shard.
        selected: bool, which of these are selected.
    """
    batch = Batch(batch.matrix[selected], None, batch.keys[selected])
    column = int(np.argmax(answer.weights)) if answer.weights else 0
    sign = -1.0 if selection.direction == "members" else 1.0
    fused = np.zeros(len(rows)) if answer.fused is None else -np.asarray(answer.fused.of(batch), np.float64)
    for name, values in zip(STRENGTH, (fused, sign * batch.matrix[:, column]), strict=True):
        rows = rows.append_column(name, pa.array(values + 0.0))  # never -0.0
    return rows


def write_selected(store: Store, folder: str, selected: SortedRows, clean: bool) -> dict[str, str]:
    """Write the selected documents of a selection.

    Args:
        store: the run directory.
        folder: of the selection.
        selected: their rows.
        clean: whether the list of clean documents is written too, as Parquet and as indices for a harness.

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
    """Write the selected as `{"task": [indices]}`, which lm-evaluation-harness takes for --samples.

    A task is an input file, by its name without endings; an index is a row of it.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for piece in selected.pieces():
        for source in piece["source"].unique().to_pylist():
            here = piece.filter(pc.equal(piece["source"], source))
            rows.setdefault(PurePath(source).name.split(".")[0], []).append(here["row"].to_numpy())
    return store.write_json(name, {task: np.sort(np.concatenate(rows[task])).tolist() for task in sorted(rows)})


EXCERPT = 200
"""Characters of a selected document's beginning, at most."""


def with_excerpts(judged: Sequence[Judged], shard: Shard) -> list[Judged]:
    """The verdicts on a shard with how their selected documents begin; its texts are read once for all selections."""
    keys: dict[int, int] = {}
    for one in judged:
        keys.update(zip(one.selected["row"].to_pylist(), one.selected["text_key"].to_pylist(), strict=True))
    excerpts = dict(zip(keys, excerpts_of(shard, list(keys), list(keys.values()), EXCERPT), strict=True))
    columns = [pa.array([excerpts[row] for row in one.selected["row"].to_pylist()], pa.string()) for one in judged]
    return [
        replace(one, selected=one.selected.append_column("excerpt", column))
        for one, column in zip(judged, columns, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Judged:
    """What judging a shard gives back to the driver."""

    selected: pa.Table  # one row a selected document
    ranks: np.ndarray  # int64 counts of p-values at k / (n_calibration + 1)
    histogram: np.ndarray  # int64 counts of the first detector's scores
    groups: GroupTally
    files: dict[str, str]  # SHA-256 of the file of the shard's verdicts, by name


@dataclass(slots=True)
class Total:
    """What judging all shards came to; they are added in any order, and the selected rows are not held in memory."""

    selected: SortedRows
    ranks: np.ndarray
    histogram: np.ndarray
    groups: GroupTally
    files: dict[str, str]

    @classmethod
    def like(cls, part: Judged) -> Total:
        """Nothing yet, in the shape of a part."""
        rows = SortedRows(part.selected.schema, ORDER)
        return cls(rows, np.zeros_like(part.ranks), np.zeros_like(part.histogram), GroupTally(), {})

    def add(self, part: Judged) -> None:
        """Add the documents of a shard."""
        self.selected.add(part.selected)
        self.ranks = self.ranks + part.ranks
        self.histogram = self.histogram + part.histogram
        self.groups = self.groups + part.groups
        self.files.update(part.files)
