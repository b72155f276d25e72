"""Mean and variance of scores that are spread over shards: exact sums, the same in any order."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MANTISSA = 53
LOW_BITS = 26  # of a mantissa; halves of it add up exactly in int64


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers there are, their exact sum and the exact sum of their squares, each square rounded to float64.

    Sums are of the numbers less a centre, which is the same for all shards and near their mean, so that the squares
    lose nothing that matters.
    """

    count: int
    centre: float
    total: Fraction
    squares: Fraction

    @classmethod
    def of(cls, values: np.ndarray, centre: float) -> Moments:
        """The moments of float64 numbers, finite, any shape."""
        with np.errstate(over="ignore"):
            apart = np.asarray(values, dtype=np.float64).ravel() - centre
            squared = np.minimum(apart * apart, np.finfo(np.float64).max)
        return cls(apart.size, centre, exact_sum(apart), exact_sum(squared))

    def __add__(self, other: Moments) -> Moments:
        """The moments of both; exact, commutative and associative.

        Raises:
            ValueError: they are about different centres.
        """
        if self.centre != other.centre:
            raise ValueError(f"cannot merge moments about {self.centre} and {other.centre}")
        return Moments(self.count + other.count, self.centre, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """The mean; the centre without any number."""
        return self.centre + float(self.total / self.count) if self.count else self.centre

    @property
    def variance(self) -> float:
        """The sample variance; 0 of fewer than two numbers."""
        if self.count < 2:
            return 0.0
        return max(0.0, float((self.squares - self.total**2 / self.count) / (self.count - 1)))


def exact_sum(values: np.ndarray) -> Fraction:
    """The sum of finite float64 numbers without any rounding, so that their order cannot matter.

    Numbers of one binary exponent are whole multiples of one unit, of at most 53 bits, whose two halves are added as
    integers.
    """
    fractions, exponents = np.frexp(np.asarray(values, dtype=np.float64).ravel())
    whole = np.ldexp(fractions, MANTISSA).astype(np.int64)
    high, low = whole >> LOW_BITS, whole & ((1 << LOW_BITS) - 1)
    kinds, places = np.unique(exponents, return_inverse=True)
    sums = np.zeros((2, kinds.size), dtype=np.int64)
    np.add.at(sums[0], places, high)
    np.add.at(sums[1], places, low)
    total = Fraction(0)
    for exponent, top, bottom in zip(kinds.tolist(), *sums.tolist(), strict=True):
        total += ((top << LOW_BITS) + bottom) * Fraction(2) ** (exponent - MANTISSA)
    return total
