"""What judging score shards came to: the selected documents of each, and their total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pipeline.audit.drawn import GroupTally
from pipeline.audit.selected import ORDER
from pipeline.corpus.excerpts import excerpts_of
from pipeline.corpus.shard import Shard
from pipeline.store.pieces import SortedRows

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
        return cls(rows, np.zeros_like(part.ranks), np.zeros_like(part.histogram), GroupTally({}), {})

    def add(self, part: Judged) -> None:
        """Add the documents of a shard."""
        self.selected.add(part.selected)
        self.ranks = self.ranks + part.ranks
        self.histogram = self.histogram + part.histogram
        self.groups = self.groups + part.groups
        self.files.update(part.files)
