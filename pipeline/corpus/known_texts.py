"""Texts and ids that stand in two places: texts shared with known documents, and ids of earlier shards."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import NearDuplicateIndex, likeness
from pipeline.errors import UserError

NAMED_PAIRS = 3
"""Maximum number of pairs of near-duplicates that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownTexts:
    """The texts of some documents, to find others that are equal or near-duplicates."""

    text: np.ndarray  # int64, (documents,): text keys
    index: NearDuplicateIndex

    @classmethod
    def of(cls, text: np.ndarray, sketch: np.ndarray, near_copies: float) -> KnownTexts:
        """Build from the keys of documents.

        Args:
            text: int64, (documents,), text keys.
            sketch: uint8, (documents, 128).
            near_copies: minimum share of common runs of near-duplicates.
        """
        return cls(text, NearDuplicateIndex.of(sketch, near_copies))

    def near(self, keys: Keys) -> np.ndarray:
        """Whether each document is a near-duplicate of one of these: bool, (documents,)."""
        return self.index.matches(keys.sketch)

    def equal(self, keys: Keys) -> np.ndarray:
        """Whether each document has the text of one of these: bool, (documents,)."""
        return np.asarray(np.isin(keys.text, self.text))

    def shared(self, keys: Keys) -> SharedTexts:
        """The texts that documents share with these."""
        given, places = self.index.near(keys.sketch)
        equal = np.isin(self.text, keys.text)
        audited, first = np.unique(given, return_index=True)
        known = self.index.first[places[first]][:NAMED_PAIRS]
        named = audited[:NAMED_PAIRS]
        share = likeness(keys.sketch[named], self.index.sketches[known])
        near = self.index.documents(np.unique(places)) | equal
        pairs = list(zip(named.tolist(), known.tolist(), share.tolist(), strict=True))
        return SharedTexts(len(keys), np.flatnonzero(near), np.flatnonzero(equal), audited.size, pairs)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTexts:
    """The texts that documents share with known ones."""

    n_documents: int
    near: np.ndarray  # int64: places of known documents that have a near-duplicate among these, ascending
    equal: np.ndarray  # int64: the subset with an equal text
    n_near: int  # documents that have a near-duplicate among the known ones
    pairs: list[tuple[int, int, float]]  # the first: place, place among the known, share of common runs


AT_ONCE = 1 << 19
"""Approximate number of keys that are compared at a time; 40 bytes each."""

_MOST_FILES = 512  # open at a time; with more than 2.7e8 keys, more are compared at a time
_RECORD = np.dtype([("key", np.int64), ("place", np.int64)])
_POSITION_BITS = 32  # of a place: the shard's number is in the higher bits


def repeated_ids(shards: Iterable[tuple[int, np.ndarray]], total: int, at_once: int = AT_ONCE) -> dict[int, np.ndarray]:
    """Positions, by shard number, of keys that occur earlier in the shard or in an earlier one.

    Args:
        shards: number and keys (int64) of each, in any order.
        total: approximate number of keys of all shards.
        at_once: approximate number of keys that are compared at a time.

    Returns:
        int64 arrays, ascending, of the shards that have repeated keys.

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
