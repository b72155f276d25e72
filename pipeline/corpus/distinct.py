"""Equal values among many, found a part of them at a time: memory holds little besides the values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PART = 1 << 16
"""Values that are sorted at a time, about."""


def different(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number values in the order in which they first stand.

    Args:
        values: uint64, (values,), of any distribution; memory is least where first bytes are as frequent as others.

    Returns:
        The place of the first of each different value, int32, ascending; and for all places the number of their value
        among these, int32.
    """
    earliest = np.arange(values.size, dtype=np.int32)  # the first place of each one's value
    for places in in_parts(values):
        order = np.argsort(values[places], kind="stable")
        rising = values[places[order]]
        begins = np.flatnonzero(np.concatenate([[True], rising[1:] != rising[:-1]])[: rising.size])
        first = places[order[begins]]
        earliest[places[order]] = np.repeat(first, np.diff(begins, append=rising.size))
    is_first = earliest == np.arange(values.size, dtype=np.int32)
    number = np.cumsum(is_first, dtype=np.int32)[earliest]
    return np.flatnonzero(is_first).astype(np.int32), number - np.int32(1)


def in_parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """The places of values, those of equal first byte together, about PART at a time where bytes are spread evenly.

    To sort a part takes memory for that part alone.

    Args:
        values: uint64, (values,).

    Returns:
        int32 arrays, each ascending: together every place once.
    """
    bits = min(8, max(0, values.size // PART).bit_length())
    if not bits:
        yield np.arange(values.size, dtype=np.int32)
        return
    part = np.empty(values.size, dtype=np.uint8)
    for start in range(0, values.size, PART):
        part[start : start + PART] = values[start : start + PART] >> np.uint64(64 - bits)
    for name in range(1 << bits):
        yield np.flatnonzero(part == name).astype(np.int32)
