"""Mergeable counts of non-negative float32 values, from which a threshold is found as if they were sorted.

The bit patterns of non-negative float32 values, read as integers, are in the order of the values. So 65,536
counters of their high 16 bits say in which few bins a threshold can lie, and 65,536 counters of the low 16 bits of
each such bin say where: two passes over the data, in memory that does not depend on how many values there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 1 << 16
MOST_BINS = 16  # bins that one second pass counts; more than two are rare
_INFINITY = 0x7F800000
_ONE = 0x3F800000


@dataclass(frozen=True, slots=True, eq=False)
class HighCounts:
    """How many values have each high half of their bit pattern.

    `counts` is int64, (65536,); index h counts values in [`lower(h)`, `upper(h)`]. Summaries add up, so order,
    grouping and retries cannot matter.
    """

    counts: np.ndarray

    @classmethod
    def empty(cls) -> HighCounts:
        """No values yet."""
        return cls(np.zeros(BINS, dtype=np.int64))

    @classmethod
    def of(cls, values: np.ndarray) -> HighCounts:
        """Count float32 values of any order, >= 0, infinity included.

        Raises:
            ValueError: not float32, negative (-0.0 too), or NaN.
        """
        return cls(np.bincount(_bits(values) >> 16, minlength=BINS))

    def __add__(self, other: HighCounts) -> HighCounts:
        """The counts of both; exact, commutative and associative."""
        return HighCounts(self.counts + other.counts)

    def with_quarantined(self, q: int) -> HighCounts:
        """The same with q more values at 1.0: documents that could not be scored are hypotheses with p = 1."""
        counts = self.counts.copy()
        counts[_ONE >> 16] += q
        return HighCounts(counts)

    @property
    def m(self) -> int:
        """Number of values."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True, eq=False)
class LowCounts:
    """How many values of a few high bins have each low half of their bit pattern.

    `counts` is int64, (len(bins), 65536), in the order of `bins`.
    """

    bins: tuple[int, ...]
    counts: np.ndarray

    @classmethod
    def empty(cls, bins: tuple[int, ...]) -> LowCounts:
        """No values yet, of these high bins."""
        return cls(bins, np.zeros((len(bins), BINS), dtype=np.int64))

    @classmethod
    def of(cls, values: np.ndarray, bins: tuple[int, ...]) -> LowCounts:
        """Count those of the values that lie in `bins`; as `HighCounts.of` otherwise."""
        bits = _bits(values)
        high = bits >> 16
        counts = np.empty((len(bins), BINS), dtype=np.int64)
        for row, h in enumerate(bins):
            counts[row] = np.bincount(bits[high == h] & 0xFFFF, minlength=BINS)
        return cls(bins, counts)

    def __add__(self, other: LowCounts) -> LowCounts:
        """The counts of both; exact, commutative and associative.

        Raises:
            ValueError: the two counted different bins.
        """
        if self.bins != other.bins:
            raise ValueError(f"cannot merge counts of bins {self.bins} and {other.bins}")
        return LowCounts(self.bins, self.counts + other.counts)

    def with_quarantined(self, q: int) -> LowCounts:
        """As `HighCounts.with_quarantined`."""
        counts = self.counts.copy()
        if _ONE >> 16 in self.bins:
            counts[self.bins.index(_ONE >> 16), _ONE & 0xFFFF] += q
        return LowCounts(self.bins, counts)


def rounded_up(values: np.ndarray) -> np.ndarray:
    """float32, each the least that is not below its float64: a p-value so rounded is still a p-value."""
    values = np.asarray(values, dtype=np.float64)
    nearest = values.astype(np.float32)
    return np.where(nearest < values, np.nextafter(nearest, np.float32(np.inf)), nearest)


def lower(h: int) -> float:
    """The least value of high bin h, exact."""
    return value_of(h << 16)


def upper(h: int) -> float:
    """The greatest value of high bin h, exact."""
    return value_of(h << 16 | 0xFFFF)


def value_of(bits: int) -> float:
    """The float32 value of a bit pattern, exact; infinity for patterns from 0x7F800000 upwards."""
    return float(np.uint32(min(bits, _INFINITY)).view(np.float32))


def _bits(values: np.ndarray) -> np.ndarray[Any, np.dtype[np.uint32]]:
    values = np.ascontiguousarray(values)
    if values.dtype != np.float32:
        raise ValueError(f"values must be float32, got {values.dtype}")
    bits = values.view(np.uint32).ravel()
    if bits.size and bits.max() > _INFINITY:
        raise ValueError("values must not be negative or NaN")
    return bits
