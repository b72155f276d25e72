"""What selection computes of one score shard; the results of all shards merge in any order.

A shard's table is reduced to small arrays; the driver never holds a column of the whole corpus but the
calibration scores and, a bounded part at a time, the keys of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.audit.records import Record
from pipeline.errors import UserError

HISTOGRAM_BINS = 60

DUPLICATES = "quarantine/duplicate_id.parquet"
"""Of a run directory: the documents whose id stands in an earlier shard, which only all shards together tell."""


@dataclass(frozen=True, slots=True)
class Span:
    """Smallest and largest score of each detector column seen so far; empty columns are absent."""

    low: dict[str, float]
    high: dict[str, float]

    def __add__(self, other: Span) -> Span:
        """The span of both."""
        low = {c: min(self.low.get(c, np.inf), other.low.get(c, np.inf)) for c in {*self.low, *other.low}}
        high = {c: max(self.high.get(c, -np.inf), other.high.get(c, -np.inf)) for c in {*self.high, *other.high}}
        return Span(low, high)

    def edges(self, column: str) -> np.ndarray:
        """Edges of equal bins over the column's span, float64, HISTOGRAM_BINS + 1."""
        low, high = self.low.get(column, 0.0), self.high.get(column, 1.0)
        if high <= low:
            low, high = low - 0.5, high + 0.5
        return np.linspace(low, high, HISTOGRAM_BINS + 1)


def scores_of(table: pa.Table, column: str, name: str) -> np.ndarray:
    """One detector's scores, float64, (documents,).

    Raises:
        UserError: the column holds something that is not a finite number.
    """
    values = table[column].to_numpy()
    if values.size and not np.isfinite(values).all():
        raise UserError(
            f"{name}: column {column!r} holds {np.count_nonzero(~np.isfinite(values))} scores that are no number"
        )
    return np.asarray(values, dtype=np.float64)


def span_of(table: pa.Table, columns: Iterable[str], name: str) -> Span:
    """The span of a shard's scores."""
    values = {column: scores_of(table, column, name) for column in columns}
    filled = {column: v for column, v in values.items() if v.size}
    return Span({c: float(v.min()) for c, v in filled.items()}, {c: float(v.max()) for c, v in filled.items()})


def histogram(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Counts of scores in bins, int64."""
    return np.histogram(scores, bins=edges)[0].astype(np.int64)


class ScoreHistogram(Record):
    """How the scores of each role are spread: `selection/<name>/scores.json`."""

    column: str = Field(description="The detector column.")
    edges: list[float] = Field(description="Edges of the bins, ascending; one more than there are bins.")
    roles: dict[str, list[int]] = Field(description="Documents in each bin, by role.")


def documents_schema(detectors: Sequence[str]) -> pa.Schema:
    """Columns of `selection/NAME/documents/*.parquet`: verdict, scores that the selection read, and place."""
    verdict = [("doc_id", pa.string()), ("p_value", pa.float64()), ("selected", pa.bool_())]
    scores = [(detector, pa.float64()) for detector in detectors]
    return pa.schema([*verdict, *scores, ("source", pa.string()), ("row", pa.int64())])
