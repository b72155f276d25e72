"""Duplicates: known documents with texts of other documents, found by keys, and repeated ids of earlier shards."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from pipeline.audit.summary import NearDuplicatePair, OverlapDiagnostic
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import NearDuplicateIndex, likeness
from pipeline.errors import UserError
from pipeline.report.wording.documents import named_pairs, shared_sentence
from pipeline.selection.guarantees import Outcome

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


Ids = Callable[[Sequence[int]], Sequence[str]]
"""Returns the ids of documents of a role by their places."""


def find_shared(
    parts: Sequence[SharedTexts], n_known: int, audit: Ids, known: Ids, role: str, consequence: str = ""
) -> tuple[OverlapDiagnostic, np.ndarray]:
    """Find the texts that the audited documents share with a known role.

    Args:
        parts: shared texts of the audited documents, in their order.
        n_known: total number of known documents.
        audit: ids of audited documents.
        known: ids of known documents.
        role: role of the known documents.
        consequence: the treatment of documents in two roles, a clause that follows "and".

    Returns:
        The check, and whether each known document is shared: bool, (n_known,).
    """
    near, equal = (np.zeros(n_known, dtype=bool) for _ in range(2))
    for part in parts:
        near[part.near] = True
        equal[part.equal] = True
    begins = np.cumsum([0, *(part.n_documents for part in parts)]).tolist()
    first = [(begin + at, *pair) for begin, part in zip(begins, parts, strict=False) for at, *pair in part.pairs]
    pairs = [
        NearDuplicatePair(audit=audit([at])[0], calibration=known([place])[0], share=round(share, 2))
        for at, place, share in first[:NAMED_PAIRS]
    ]
    diagnostic = OverlapDiagnostic(
        outcome=Outcome.PASSED,
        sentence="",
        n_calibration=int(np.count_nonzero(near)),
        n_equal=int(np.count_nonzero(equal)),
        n_audit=sum(part.n_near for part in parts),
        pairs=pairs,
    )
    sentence = shared_sentence(diagnostic, role, consequence)
    return diagnostic.model_copy(update={"sentence": sentence}), near


def shared_error(overlap: OverlapDiagnostic, n_known: int, role: str) -> UserError:
    """The error for calibration documents that are near-duplicates of audited ones.

    Args:
        overlap: an overlap with at least one pair.
        n_known: total number of calibration documents.
        role: role of the calibration documents.
    """
    return UserError(
        f"{overlap.n_calibration} of {n_known} {role} documents are near-duplicates of audit documents "
        f"({overlap.n_equal} of them with the same text; {overlap.n_audit} audit documents; "
        f"first: {named_pairs(overlap.pairs)}); remove them, or set overlap: drop to leave them out of calibration"
    )


def check_calibration_left(overlap: OverlapDiagnostic, n_known: int, role: str) -> None:
    """Check that `overlap: drop` leaves a calibration document; arguments as in `shared_error`.

    Raises:
        UserError: every document of the role is a near-duplicate of an audited one.
    """
    if 0 < n_known == overlap.n_calibration:
        raise UserError(
            f"no calibration documents: all {n_known} {role} documents are near-duplicates of audit documents "
            f"(first: {named_pairs(overlap.pairs)}), and overlap: drop leaves them out; give others to calibrate on"
        )


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
