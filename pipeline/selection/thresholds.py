"""The threshold of a rule on values distributed over shards, computed by counting instead of sorting.

The bit patterns of non-negative float32 values, as integers, have the order of the values. Each value has a place that
follows from a bit pattern, in the order in which a rule accepts values: `INFINITY` minus the bit pattern, for example,
for a rule that accepts large values first. 65,536 counters of the high
halves of the places identify the few bins that can contain the threshold, and 65,536 counters of the low halves in each
such bin locate it: two folds of the data, with memory that does not depend on the number of values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

BINS = 1 << 16
MOST_BINS = 16  # maximum bins of the second fold; more than two are rare
INFINITY = 0x7F800000

Places = Callable[[np.ndarray], Sequence[np.ndarray]]
"""Values of a shard -> places of each kind of value: uint32, (values of the kind,)."""

Holds = Callable[[int, Sequence[int], Sequence[int]], bool]
"""(place, before, reached) -> whether a rule accepts the values up to a place, from the numbers of values of each kind
before the place and up to it. It must be monotone: decreasing in `before` and increasing in `reached`."""

MANTISSA = 53
LOW_BITS = 26  # of a mantissa, whose halves are summed exactly in int64


@dataclass(frozen=True, slots=True)
class Threshold:
    """The threshold of a selection on continuous values: `n_selected` documents are at or beyond `value`.

    `value` is the largest or smallest selected one; None, with 0 selected, if nothing is selected.
    """

    value: float | None
    n_selected: int


NO_VALUE = Threshold(None, 0)


def find_place(
    places: Places, rule: Callable[[int], Holds]
) -> Generator[Callable[[np.ndarray], Any], Any, tuple[int, list[int]] | None]:
    """The last occupied place up to which a rule holds, for values distributed over shards.

    Each `yield` requests one fold of all shards: it yields a function of the values of one shard and receives the sum
    of its results over the shards, or None without shards. Only counters are transferred, not values.

    Guaranteed: equal to sorting the places and trying each from the last one downwards.

    Args:
        places: returns the places of the values of a shard.
        rule: number of all values -> `Holds`.

    Returns:
        The place and the number of values of each kind up to it; None if the rule holds nowhere.
    """
    high = yield partial(_count_high, places)
    if high is None:
        return None
    holds, reached, below = rule(int(high.sum())), np.cumsum(high, axis=1), BINS
    while bins := _candidate_bins(high, reached, holds, below):
        low = yield partial(_count_low, places, bins)
        for h, counts in zip(bins, low, strict=True):
            upto = (reached[:, h] - high[:, h])[:, None] + np.cumsum(counts, axis=1)
            for bits in np.flatnonzero(counts.any(axis=0))[::-1].tolist():
                here = upto[:, bits].tolist()
                if holds(h << 16 | bits, here, here):
                    return h << 16 | bits, here
        below = bins[-1]
    return None


def _candidate_bins(high: np.ndarray, reached: np.ndarray, holds: Holds, below: int) -> list[int]:
    """The bins below `below` that can contain the place, from the last, at most MOST_BINS.

    A place of a bin can hold only if the first place of the bin holds with all values of the bin counted. If the end of
    a bin holds, its last occupied place holds, and the search ends.
    """
    bins: list[int] = []
    for h in np.flatnonzero(high[:, :below].any(axis=0))[::-1].tolist():
        here = reached[:, h].tolist()
        if holds(h << 16, (reached[:, h] - high[:, h]).tolist(), here):
            bins.append(h)
            if len(bins) == MOST_BINS or holds(h << 16 | 0xFFFF, here, here):
                break
    return bins


def _count_high(places: Places, values: np.ndarray) -> np.ndarray:
    """Number of places of each kind with each high half: int64, (kinds, BINS)."""
    return np.stack([np.bincount(kind >> 16, minlength=BINS) for kind in places(values)])


def _count_low(places: Places, bins: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Number of places of each kind in some bins with each low half: int64, (bins, kinds, BINS)."""
    kinds = places(values)
    return np.array([[np.bincount(kind[kind >> 16 == h] & 0xFFFF, minlength=BINS) for kind in kinds] for h in bins])


def bit_patterns(values: np.ndarray) -> np.ndarray:
    """The bit patterns of non-negative float32 values, including infinity: uint32, (values,)."""
    return np.ascontiguousarray(values).view(np.uint32).ravel()


def pattern_value(bits: int) -> float:
    """The float32 value of a bit pattern, exact; infinity for patterns from `INFINITY` upwards."""
    return float(np.uint32(min(bits, INFINITY)).view(np.float32))


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, exact sum, and exact sum of the squares of numbers, each square rounded to float64.

    Sums are of the numbers minus a centre, which is the same for all shards and near their mean, so that the rounding
    of the squares is negligible.
    """

    count: int
    centre: float
    total: Fraction
    squares: Fraction

    @classmethod
    def of(cls, values: np.ndarray, centre: float) -> Moments:
        """The moments of float64 numbers, finite, any shape."""
        with np.errstate(over="ignore"):
            centred = np.asarray(values, dtype=np.float64).ravel() - centre
            squared = np.minimum(centred * centred, np.finfo(np.float64).max)
        return cls(centred.size, centre, exact_sum(centred), exact_sum(squared))

    def __add__(self, other: Moments) -> Moments:
        """The moments of both, with the same centre; exact, commutative and associative."""
        return Moments(self.count + other.count, self.centre, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """The mean; the centre if there are no numbers."""
        return self.centre + float(self.total / self.count) if self.count else self.centre

    @property
    def variance(self) -> float:
        """The sample variance; 0 for fewer than two numbers."""
        if self.count < 2:
            return 0.0
        return max(0.0, float((self.squares - self.total**2 / self.count) / (self.count - 1)))


def exact_sum(values: np.ndarray) -> Fraction:
    """The sum of finite float64 numbers without rounding, which does not depend on their order.

    Numbers with the same binary exponent are integer multiples of one unit, of at most 53 bits, whose two halves are
    added as integers.
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
