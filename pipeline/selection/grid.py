"""The p-values that documents can have, in exact arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The p-values that an audit's documents can have, ascending; rank k = 1..size stands for the k-th.

    One group calibrated on n documents has the `uniform` grid k / (n + 1). Calibration by group pools the
    grids of its groups (`groups.pool`), and calibration-conditional p-values have a grid of their own
    (`conditional.simes_grid`). Every procedure reads counts over a grid and nothing else, so each runs on all.

    p-values may repeat; the last is 1, which is where quarantined documents are counted.
    """

    numerators: np.ndarray  # int64, (size,), read-only
    denominators: np.ndarray  # int64, (size,) or one for all, (); at most 2^62
    n: int  # calibration documents, of all groups
    groups: int = 1
    delta: Fraction | None = None  # given: valid for all but this share of calibration sets, else on average over them
    weighted: bool = False  # whether calibration documents count by weights, so that a rank is no number of documents

    def __post_init__(self) -> None:
        for name in ("numerators", "denominators"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def uniform(cls, n: int) -> Grid:
        """P = k / (n + 1), k = 1..n + 1: the conformal p-values against n >= 1 calibration documents."""
        return cls(np.arange(1, n + 2), np.array(n + 1), n)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.numerators.size

    @property
    def values(self) -> np.ndarray:
        """The p-values as float64, (size,), each the nearest float to the exact one."""
        return self.numerators / self.denominators

    def p(self, k: int) -> Fraction:
        """The exact p-value of rank k; 0 for k = 0."""
        if k == 0:
            return Fraction(0)
        denominator = self.denominators if self.denominators.ndim == 0 else self.denominators[k - 1]
        return Fraction(int(self.numerators[k - 1]), int(denominator))

    def at_most(self, p: Fraction) -> int:
        """How many ranks have a p-value of at most p, exact."""
        if self.denominators.ndim == 0:
            reach = p.numerator * int(self.denominators) // p.denominator
            return int(np.searchsorted(self.numerators, min(reach, int(self.denominators)), side="right"))

        def excess(k: int) -> int:
            return int(self.numerators[k]) * p.denominator - p.numerator * int(self.denominators[k])

        return bisect_right(range(self.size), 0, key=excess)

    def same_as(self, other: Grid) -> bool:
        """Whether ranks mean the same in both."""
        return self is other or (
            (self.n, self.groups, self.delta) == (other.n, other.groups, other.delta)
            and self.weighted == other.weighted
            and np.array_equal(self.numerators, other.numerators)
            and np.array_equal(self.denominators, other.denominators)
        )
