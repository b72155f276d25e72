"""Ids that stand in an earlier shard too: one reading of all keys, spread over temporary files by their values."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import numpy as np

from pipeline.errors import UserError

AT_ONCE = 1 << 19
"""Keys that are compared at a time, about; 40 bytes each."""

_MOST_FILES = 512  # open at a time: of more than 2.7e8 keys, more are compared at a time
_RECORD = np.dtype([("key", np.int64), ("place", np.int64)])
_POSITION_BITS = 32  # of a place: the shard's number stands above the position in it


def repeated_ids(shards: Iterable[tuple[int, np.ndarray]], total: int, at_once: int = AT_ONCE) -> dict[int, np.ndarray]:
    """Positions, by number of the shard, of keys that stand earlier in the shard or in an earlier one.

    Args:
        shards: number and keys (int64) of each, in any order.
        total: keys of all shards, about.
        at_once: keys that are compared at a time, about.

    Returns:
        int64 arrays, ascending, of the shards that have any.

    Raises:
        UserError: there is no space for temporary files.
    """
    parts = max(1, min(_MOST_FILES, -(-total // at_once)))
    repeats: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for records in _parts(shards, parts):
        order = np.lexsort((records["place"], records["key"]))
        keys, places = records["key"][order], records["place"][order]
        later = places[1:][keys[1:] == keys[:-1]]
        numbers, positions = later >> _POSITION_BITS, later & ((1 << _POSITION_BITS) - 1)
        for number in np.unique(numbers):
            repeats[int(number)].append(positions[numbers == number])
    return {number: np.sort(np.concatenate(some)) for number, some in repeats.items()}


def _parts(shards: Iterable[tuple[int, np.ndarray]], parts: int) -> Iterator[np.ndarray]:
    """All keys with their places, those of equal value in the same part."""
    if parts == 1:
        yield np.concatenate([np.empty(0, dtype=_RECORD), *(_records(number, keys) for number, keys in shards)])
        return
    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(tempfile.TemporaryFile(prefix="seenset-ids-")) for _ in range(parts)]
            for number, keys in shards:
                _spread(_records(number, keys), files)
            for file in files:
                file.seek(0)
                yield np.frombuffer(file.read(), dtype=_RECORD)
                file.close()
        except OSError as error:
            raise UserError(
                f"no space to compare ids in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a larger disk"
            ) from None


def _records(number: int, keys: np.ndarray) -> np.ndarray:
    records = np.empty(keys.size, dtype=_RECORD)
    records["key"] = keys
    records["place"] = np.arange(keys.size) | (number << _POSITION_BITS)
    return records


def _spread(records: np.ndarray, files: Sequence[IO[bytes]]) -> None:
    part = records["key"] % len(files)
    ends = np.cumsum(np.bincount(part, minlength=len(files)))[:-1]
    for file, some in zip(files, np.split(records[np.argsort(part, kind="stable")], ends), strict=True):
        file.write(some.tobytes())
