"""The mergeable summary that a selection reads: how many audit documents have each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RankCounts:
    """How many audit documents have each conformal rank.

    `counts` is int64, read-only, of length n + 1: index k - 1 holds the number of audit documents at rank k,
    k = 1..n + 1, where n is the number of calibration documents and rank k is the p-value k / (n + 1).
    Summaries add up, so the shard order, the grouping and retries of a distributed count cannot matter.

    Raises:
        ValueError: counts that are not integers, not one-dimensional, negative, or of fewer than two ranks.
    """

    counts: np.ndarray

    def __post_init__(self) -> None:
        given = np.asarray(self.counts)
        if given.ndim != 1 or given.size < 2 or given.dtype.kind not in "iu":
            raise ValueError(f"counts must be n + 1 >= 2 integers, got shape {given.shape} of {given.dtype}")
        if given.min() < 0:
            raise ValueError("counts must not be negative")
        own = given.astype(np.int64)
        own.flags.writeable = False
        object.__setattr__(self, "counts", own)

    @classmethod
    def empty(cls, n: int) -> RankCounts:
        """No audit documents yet, against n >= 1 calibration documents."""
        return cls(np.zeros(n + 1, dtype=np.int64))

    @classmethod
    def of(cls, ranks: np.ndarray, n: int) -> RankCounts:
        """Count ranks of any order; integers in 1..n + 1.

        Raises:
            ValueError: a rank outside 1..n + 1.
        """
        ranks = np.asarray(ranks, dtype=np.int64)
        if ranks.size and (ranks.min() < 1 or ranks.max() > n + 1):
            raise ValueError(f"ranks must be in 1..{n + 1}, got {ranks.min()}..{ranks.max()}")
        return cls(np.bincount(ranks - 1, minlength=n + 1))

    @property
    def n(self) -> int:
        """Number of calibration documents."""
        return self.counts.size - 1

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
            ValueError: the two were ranked against different numbers of calibration documents.
        """
        if not isinstance(other, RankCounts):
            return NotImplemented
        if self.n != other.n:
            raise ValueError(f"cannot merge counts against {self.n} and {other.n} calibration documents")
        return RankCounts(self.counts + other.counts)

    def with_quarantined(self, q: int) -> RankCounts:
        """The same with q more audit documents at p = 1: they could not be scored, and they are hypotheses.

        Raises:
            ValueError: q is negative.
        """
        if q < 0:
            raise ValueError(f"the number of quarantined documents must not be negative, got {q}")
        counts = self.counts.copy()
        counts[-1] += q
        return RankCounts(counts)
