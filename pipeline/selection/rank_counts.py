"""The mergeable summary that a selection reads: how many audit documents have each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.selection.conformal import Grid


@dataclass(frozen=True, slots=True, eq=False)
class RankCounts:
    """How many audit documents have each rank.

    `counts` is int64, read-only: index k - 1 holds the number of audit documents at rank k of the grid. By
    default the grid is uniform: `counts` has length n + 1, n is the number of calibration documents, and
    rank k is the p-value k / (n + 1). Summaries add up, so the shard order, the grouping and retries of a
    distributed count cannot matter.

    Raises:
        ValueError: counts that are not integers, not one-dimensional, negative, of fewer than two ranks, or
            of another length than the grid.
    """

    counts: np.ndarray
    spacing: Grid | None = None  # None: uniform

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts)
        if counts.ndim != 1 or counts.size < 2 or counts.dtype.kind not in "iu":
            raise ValueError(f"counts must be n + 1 >= 2 integers, got shape {counts.shape} of {counts.dtype}")
        if counts.min() < 0:
            raise ValueError("counts must not be negative")
        if self.spacing is not None and self.spacing.size != counts.size:
            raise ValueError(f"counts must be one a rank, got {counts.size} for {self.spacing.size} ranks")
        array = counts.astype(np.int64)
        array.flags.writeable = False
        object.__setattr__(self, "counts", array)

    @classmethod
    def empty(cls, against: int | Grid) -> RankCounts:
        """No audit documents yet, against n >= 1 calibration documents or over a grid."""
        if isinstance(against, Grid):
            return cls(np.zeros(against.size, dtype=np.int64), against)
        return cls(np.zeros(against + 1, dtype=np.int64))

    @classmethod
    def of(cls, ranks: np.ndarray, against: int | Grid) -> RankCounts:
        """Count ranks of any order, against n calibration documents (1..n + 1) or over a grid (1..size).

        Raises:
            ValueError: a rank outside its limits.
        """
        size = against.size if isinstance(against, Grid) else against + 1
        ranks = np.asarray(ranks, dtype=np.int64)
        if ranks.size and (ranks.min() < 1 or ranks.max() > size):
            raise ValueError(f"ranks must be in 1..{size}, got {ranks.min()}..{ranks.max()}")
        return cls(np.bincount(ranks - 1, minlength=size), against if isinstance(against, Grid) else None)

    @property
    def grid(self) -> Grid:
        """The p-values of the ranks."""
        return Grid.uniform(self.n) if self.spacing is None else self.spacing

    @property
    def n(self) -> int:
        """Number of calibration documents."""
        return self.counts.size - 1 if self.spacing is None else self.spacing.n

    @property
    def m(self) -> int:
        """Number of audit documents, quarantined ones included."""
        return int(self.counts.sum())

    def at_most(self, k: int) -> int:
        """Number of audit documents at ranks 1..k (R_k); 0 for k = 0."""
        return int(self.counts[:k].sum())

    def __add__(self, other: RankCounts) -> RankCounts:
        """The counts of both; exact, commutative and associative.

        Raises:
            ValueError: the two were ranked against different numbers of calibration documents, or over
                different grids.
        """
        if not isinstance(other, RankCounts):
            return NotImplemented
        if self.n != other.n:
            raise ValueError(f"cannot merge counts against {self.n} and {other.n} calibration documents")
        if self.spacing is not other.spacing and not self.grid.same_as(other.grid):
            raise ValueError("cannot merge counts over two different sets of p-values")
        return RankCounts(self.counts + other.counts, self.spacing)

    def with_quarantined(self, q: int) -> RankCounts:
        """The same with q more audit documents at p = 1: they could not be scored, and they are hypotheses.

        Raises:
            ValueError: q is negative.
        """
        if q < 0:
            raise ValueError(f"the number of quarantined documents must not be negative, got {q}")
        counts = self.counts.copy()
        counts[-1] += q
        return RankCounts(counts, self.spacing)

    def over(self, grid: Grid) -> RankCounts:
        """The same documents with the p-values of another grid of as many ranks, such as a `simes_grid`."""
        return RankCounts(self.counts, grid)
