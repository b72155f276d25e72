"""Near-duplicates: documents that share most of their runs of five words, detected by sketches of 128 bytes.

In scripts without blanks between words, and in pieces longer than any word, runs of eight characters take the place of
runs of five words.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import unicodedata
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.config.corpus import NEAR_SHARE
from pipeline.corpus.scripts import LONGEST_WORD, by_characters, has_unspaced, is_unspaced, word_pattern
from pipeline.errors import UserError

SKETCH = 128
"""Bytes of a sketch: one for each of 128 random orders of all runs."""

SKETCH_KIND = "MinHash of runs of 5 words, 128 orders, a byte each, 1"
"""Version of the sketches, for fingerprints: sketches of another version must not be compared with these."""

SKETCH_TYPE = pa.binary(SKETCH)

BLOCK = 1 << 16
"""Number of sketches per read."""

_WORDS, _LETTERS = 5, 8
"""Words of a run, or characters. A text with fewer is one run: its only near-duplicates are equal texts."""

_LETTER = "\x1f"  # before a unit that is a character
_WORD = re.compile(r"\w+")
_NO_WORD = re.compile(r"\W")
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")  # soft hyphens, joiners, direction
_CHARACTERS = 1 << 20  # approximate characters of text that are split into words together
_AT_ONCE = 1 << 10  # runs that are hashed together, small enough for the CPU cache

_LEAST_RECALL = 0.95  # share of pairs at the threshold that become candidates; larger above it
_WIDEST_BAND = 7  # bytes: with one more byte they fit a uint64
_BUCKET = 32  # neighbours that a document is compared with if more documents share its band
_AT_A_TIME = 1 << 12  # documents whose candidates are compared together

_PART = 1 << 13  # sketches that are read together


def sketch(text: str) -> bytes:
    """The sketch of a text, from which the share of common runs of two texts can be estimated.

    The runs are all sequences of 5 words, normalised (NFKC, case folded, without punctuation and white space), as a
    set. A character of a script without blanks between words counts as 5/8 of a word, as does one of a longer word than
    any in a text that consists of such (`pipeline.corpus.scripts`). In each of 128 random orders the sketch keeps a
    byte of the hash of the first run (MinHash, Broder 1997; one byte, Li & Konig 2010): for two texts with a share s of
    common runs, the byte is equal with probability s + (1 - s) / 256. The same text gives the same bytes on every
    machine.

    Args:
        text: not empty.

    Returns:
        128 bytes, equal for texts that are equal when normalised.
    """
    return sketches_of_texts([text])[0]


def sketches_of_texts(texts: Sequence[str]) -> list[bytes]:
    """The `sketch` of each of several texts, much faster than separate calls."""
    multiplier, summand = (values[:, None] for values in _orders())
    minimum = np.full((len(texts), SKETCH), np.iinfo(np.uint32).max, dtype=np.uint32)
    for first, some in _together(texts):
        for number, hashes in _hashes("\n".join(map(_normal_words, some)).encode("utf-8", "surrogatepass")):
            begins = np.flatnonzero(np.diff(number, prepend=-1))
            values = multiplier * _mixed(hashes)
            values += summand
            places = slice(first + int(number[0]), first + int(number[-1]) + 1)
            np.minimum(minimum[places], np.minimum.reduceat(values, begins, axis=1).T, out=minimum[places])
    minimum *= np.uint32(0x9E3779B1)  # the high bits of the minimum of many hashes are small
    return list(map(bytes, (minimum >> np.uint32(24)).astype(np.uint8)))


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3, before the affine orders: uint32, both as in datasketch."""
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return np.asarray(hashes ^ (hashes >> np.uint32(16)))


@cache
def _orders() -> np.ndarray:
    """The odd multiplier and the summand of the hashes for each order of all runs: uint32, (2, 128)."""
    rng = np.random.RandomState(1)  # its numbers are the same in every version of NumPy
    factors = rng.randint(0, 1 << 31, SKETCH, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return np.array([factors, rng.randint(0, 1 << 32, SKETCH, dtype=np.uint32)])


def stack_sketches(sketches: Sequence[bytes]) -> np.ndarray:
    """Sketches as an array: uint8, (documents, 128)."""
    return np.frombuffer(b"".join(sketches), dtype=np.uint8).reshape(-1, SKETCH)


def likeness(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Estimated share of common runs of pairs of documents.

    Args:
        first: uint8, (pairs, 128).
        second: uint8, (pairs, 128).

    Returns:
        float64, (pairs,), in [0, 1]; its standard error is at most 0.045, and 0.036 for a share of 0.8.
    """
    equal = np.count_nonzero(first == second, axis=1) / SKETCH
    return np.clip((equal - 1 / 256) / (1 - 1 / 256), 0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class NearDuplicateIndex:
    """An index of documents that finds near-duplicates of other documents without comparing all pairs.

    The sketch is split into bands; documents that share a band are compared (locality-sensitive hashing). The width of
    the bands is such that 95% of the pairs at the threshold, and nearly all above it, are compared. If more than 32
    different sketches share a band, a document is compared with the 32 nearest in their order.
    """

    threshold: float
    sketches: np.ndarray  # uint8, (documents, 128)
    distinct: np.ndarray  # uint8, (different sketches, 128)
    number: np.ndarray  # int32, (documents,): index of each document's sketch in `distinct`
    first: np.ndarray  # int64, (different sketches,): the first document that has it
    width: int  # bytes of a band
    order: list[np.ndarray]  # per band: int32, the different sketches in the order of their keys
    keys: list[np.ndarray]  # per band: uint64, ascending

    @classmethod
    def of(cls, sketches: np.ndarray, threshold: float) -> NearDuplicateIndex:
        """Index documents.

        Args:
            sketches: uint8, (documents, 128).
            threshold: minimum share of common runs, in [0.5, 1].
        """
        first, number = different(_digests(sketches))
        distinct = sketches[first]
        width = band_width(threshold)
        keys = [_keys(distinct, band, width) for band in range(SKETCH // width)]
        order = [np.argsort(key, kind="stable").astype(np.int32) for key in keys]
        ordered = [key[places] for key, places in zip(keys, order, strict=True)]
        return cls(threshold, sketches, distinct, number, first.astype(np.int64), width, order, ordered)

    def near(self, sketches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of given documents and different sketches of the index that are near-duplicates.

        Args:
            sketches: uint8, (others, 128).

        Returns:
            Two int64 arrays of the same length: indices into `sketches`, ascending, and into `distinct`.
        """
        codes = [np.empty(0, dtype=np.int64)]
        for band, (order, ascending) in enumerate(zip(self.order, self.keys, strict=True)):
            for given, place in _candidates(_keys(sketches, band, self.width), ascending, self.width):
                known = order[place].astype(np.int64)
                close = _close(sketches[given], self.distinct[known], self.threshold)
                codes.append(given[close] * len(self.distinct) + known[close])
        given, known = np.divmod(np.unique(np.concatenate(codes)), max(1, len(self.distinct)))
        return given, known

    def matches(self, sketches: np.ndarray) -> np.ndarray:
        """Whether each given document has a near-duplicate in the index: bool, (others,)."""
        matched = np.zeros(len(sketches), dtype=bool)
        matched[self.near(sketches)[0]] = True
        return matched

    def documents(self, places: np.ndarray) -> np.ndarray:
        """Whether each document of the index has one of these different sketches: bool, (documents,)."""
        return np.asarray(np.isin(self.number, places))


def band_width(threshold: float) -> int:
    """Bytes of a band with which 95% of the pairs with this share of common runs have at least one equal band."""
    for width in range(_WIDEST_BAND, 1, -1):
        if 1 - (1 - threshold**width) ** (SKETCH // width) >= _LEAST_RECALL:
            return width
    return 1


class Sketches(Protocol):
    """Sketches of documents, uint8, (documents, 128), as an array or outside of memory."""

    def __len__(self) -> int:
        """Number of documents."""

    def __getitem__(self, documents: Any, /) -> Any:
        """The sketches of some documents, by a slice or int positions: uint8, (some, 128)."""


def near_families(sketches: Sketches, threshold: float = NEAR_SHARE) -> np.ndarray:
    """Number the families of documents: connected components of near-duplicates.

    Args:
        sketches: sketches of the documents; additional memory: about 60 bytes per document.
        threshold: minimum share of common runs, in [0.5, 1].

    Returns:
        int64, (documents,), in 0..families - 1, in the order of their first documents.
    """
    first, number = different(_filled(sketches, _digests))
    labels = np.arange(first.size, dtype=np.int32)  # first sketch of the family of each different sketch
    width = band_width(threshold)
    for band in range(SKETCH // width):
        one, other = _alike(sketches, first, labels, band, width, threshold)
        if one.size:  # existing families are kept
            labels = _joined(labels, one, other)
    rank = np.cumsum(labels == np.arange(labels.size, dtype=np.int32), dtype=np.int64) - 1
    return np.asarray(rank[labels[number]], dtype=np.int64)


def draw_families(
    pool: np.ndarray, family: np.ndarray, count: int, rng: np.random.Generator, lean: np.ndarray | None = None
) -> np.ndarray:
    """Draw at most `count` documents at random, in whole families.

    A family that would exceed `count` is skipped. If every family is one document, exactly min(count, pool) are drawn,
    each set of that size with the same probability.

    Args:
        pool: bool, (documents,), documents to draw from; a family is entirely inside or entirely outside.
        family: int64, (documents,), from `near_families`.
        count: maximum number of documents, >= 0.
        rng: random generator.
        lean: float, (documents,): documents are drawn one after another with odds of exp(lean), a family with the
            mean of its documents; None: equal odds.

    Returns:
        bool, (documents,), a subset of the pool.
    """
    members = np.flatnonzero(pool)
    names, sizes = np.unique(family[members], return_counts=True)
    order = rng.permutation(names.size) if lean is None else _leaning_order(family[members], lean[members], rng)
    totals = np.cumsum(sizes[order])
    fit = int(np.searchsorted(totals, count, side="right"))
    taken = list(order[:fit])
    remaining = count - (int(totals[fit - 1]) if fit else 0)
    for index in order[fit:]:
        if remaining == 0:
            break
        if sizes[index] <= remaining:
            taken.append(index)
            remaining -= int(sizes[index])
    chosen = np.zeros(pool.size, dtype=bool)
    chosen[members[np.isin(family[members], names[np.asarray(taken, dtype=np.int64)])]] = True
    return chosen


def _leaning_order(family: np.ndarray, lean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The family numbers in drawing order: descending lean plus Gumbel noise."""
    codes, sizes = np.unique(family, return_inverse=True, return_counts=True)[1:]
    means = np.bincount(codes, weights=lean) / sizes
    return np.argsort(-(means + rng.gumbel(size=means.size)), kind="stable")


def _alike(
    sketches: Sketches, first: np.ndarray, labels: np.ndarray, band: int, width: int, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of different sketches that share a band, are near-duplicates and are not yet of one family: two int32."""
    keys = _filled(sketches, lambda block: _keys(block, band, width))
    keys = keys if first.size == keys.size else keys[first]
    order = np.argsort(keys, kind="stable").astype(np.int32)
    keys = keys[order]
    one, other = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int32)]
    for begin, end in _candidates(keys, keys, width):
        given, known = order[begin], order[end]
        differing = labels[given] != labels[known]
        given, known = given[differing], known[differing]
        close = _close(sketches[first[given]], sketches[first[known]], threshold)
        one.append(given[close])
        other.append(known[close])
    return np.concatenate(one), np.concatenate(other)


def _joined(labels: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The families of different sketches after joining pairs of them, as the index of their first sketch: int32."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    names, place = np.unique(np.concatenate([labels[one], labels[other]]), return_inverse=True)
    pairs = place.reshape(2, -1)
    graph = coo_array((np.ones(one.size, dtype=bool), (pairs[0], pairs[1])), shape=(names.size, names.size))
    _, begin, component = np.unique(
        connected_components(graph, directed=False)[1], return_index=True, return_inverse=True
    )
    name = np.arange(labels.size, dtype=np.int32)
    name[names] = names[begin[component]]
    return np.asarray(name[labels])


def _filled(sketches: Sketches, values: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply a function to all sketches in parts: uint64, (documents,)."""
    every = np.empty(len(sketches), dtype=np.uint64)
    for start in range(0, len(sketches), BLOCK):
        every[start : start + BLOCK] = values(sketches[start : start + BLOCK])
    return every


def _close(first: np.ndarray, second: np.ndarray, threshold: float) -> np.ndarray:
    """Whether each pair of sketches belongs to near-duplicates: bool, (pairs,)."""
    return np.asarray(likeness(first, second) >= threshold - 1e-9)


def _digests(sketches: np.ndarray) -> np.ndarray:
    """64-bit digest of each sketch, which distinguishes a billion of them: uint64, (documents,)."""
    words = np.ascontiguousarray(sketches).view("<u8")
    whole = np.zeros(len(sketches), dtype=np.uint64)
    for column in words.T:
        whole = (whole ^ column) * np.uint64(0x9E3779B97F4A7C15)
        whole ^= whole >> np.uint64(29)
    return whole


def _keys(sketches: np.ndarray, band: int, width: int) -> np.ndarray:
    """Eight bytes from the start of a band, as uint64: the band, and bytes that order documents that share it."""
    begin = band * width
    columns = sketches[:, begin : begin + 8]
    if begin + 8 > SKETCH:
        columns = np.concatenate([columns, sketches[:, : begin + 8 - SKETCH]], axis=1)
    return np.ascontiguousarray(columns).view(">u8").ravel().astype(np.uint64)


def _candidates(keys: np.ndarray, known: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of given and known documents that share a band, in batches of bounded size; positions in key order."""
    rest = np.uint64((1 << 8 * (8 - width)) - 1)
    for begin in range(0, keys.size, _AT_A_TIME):
        some = keys[begin : begin + _AT_A_TIME]
        start = np.searchsorted(known, some & ~rest, side="left")
        high = np.searchsorted(known, some | rest, side="right")
        crowded = high - start > _BUCKET
        middle = np.searchsorted(known, some[crowded], side="left")
        start[crowded] = np.clip(middle - _BUCKET // 2, start[crowded], high[crowded] - _BUCKET)
        sizes = np.minimum(high - start, _BUCKET)
        given = np.repeat(np.arange(begin, begin + some.size), sizes)
        offset = np.arange(given.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield given, np.repeat(start, sizes) + offset


def _together(texts: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Texts in parts of bounded characters, each with the index of its first text."""
    begin = characters = 0
    for number, text in enumerate(texts):
        characters += len(text)
        if characters >= _CHARACTERS:
            yield begin, texts[begin : number + 1]
            begin, characters = number + 1, 0
    if begin < len(texts):
        yield begin, texts[begin:]


def _hashes(lines: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes of the runs of lines of units separated by blanks, in batches of bounded size.

    Returns:
        The index of each run's line, int64, ascending, and its hash, uint32; every line has a run.
    """
    signs = np.frombuffer(lines, dtype=np.uint8)
    # A text of 16 million units has its places three to eight times in memory.
    places = np.dtype(np.int32 if len(lines) < 2**28 else np.int64)
    gaps = np.flatnonzero((signs == ord(" ")) | (signs == ord("\n"))).astype(places)
    last = np.append(np.flatnonzero(signs[gaps] == ord("\n")), gaps.size)  # unit of each line
    begins, ends = np.append(places.type(0), gaps + places.type(1)), np.append(gaps, places.type(len(lines)))
    first = np.concatenate([[0], last[:-1] + 1])
    stop = _ends_of_runs(lines, begins)
    runs = np.searchsorted(stop, last, side="right") - first  # complete ones of each line
    start = np.cumsum(np.concatenate([[0], np.maximum(1, runs)]))  # run of each line
    for begin in range(0, int(start[-1]), _AT_ONCE):
        run = np.arange(begin, min(begin + _AT_ONCE, int(start[-1])))
        number = np.searchsorted(start, run, side="right") - 1
        unit = first[number] + run - start[number]
        spans = zip(begins[unit].tolist(), ends[np.minimum(stop[unit], last[number])].tolist(), strict=True)
        hashes = [xxhash.xxh32_intdigest(lines[one:other]) for one, other in spans]
        yield number, np.array(hashes, dtype=np.uint32)


def _ends_of_runs(lines: bytes, begins: np.ndarray) -> np.ndarray:
    """The last unit of the run that begins at each unit, of the type of `begins`, whatever its line."""
    places = begins.dtype
    if ord(_LETTER) not in lines:
        return np.arange(begins.size, dtype=places) + places.type(_WORDS - 1)
    signs = np.frombuffer(lines + b"\n", dtype=np.uint8)  # the last unit may be empty
    size = np.where(signs[begins] == ord(_LETTER), np.uint8(_WORDS), np.uint8(_LETTERS))  # a run has 5 times 8
    size = np.cumsum(size, dtype=places)
    wanted = np.append(places.type(0), size[:-1]) + places.type(_WORDS * _LETTERS)
    return np.searchsorted(size, wanted).astype(places)


def _normal_words(text: str) -> str:
    """The units of a text separated by blanks, `_LETTER` before those that are characters."""
    normal = _seen(unicodedata.normalize("NFKC", text).casefold())
    return _words(normal) or " ".join(normal.split())  # a text without letters has runs of its signs


def _seen(text: str) -> str:
    """A text without characters that are not seen."""
    return text if text.isascii() else _UNSEEN.sub("", text)


def _words(text: str) -> str:
    """The units of a text separated by blanks; a long text is split in parts."""
    parts: list[str] = []
    start = 0
    while start < len(text):
        gap = _NO_WORD.search(text, start + _CHARACTERS)
        stop = len(text) if gap is None else gap.start()
        words = _WORD.findall(text, start, stop) if text.isascii() else _words_and_characters(text[start:stop])
        if max(map(len, words), default=0) > LONGEST_WORD and by_characters(text):
            words = [_letters(word) if len(word) > LONGEST_WORD else word for word in words]
        parts += [" ".join(words)] if words else []
        start = stop
    return " ".join(parts)


def _words_and_characters(text: str) -> list[str]:
    """The words of a text, and the characters of scripts without blanks."""
    mixed = has_unspaced(text)
    words = word_pattern(mixed).findall(text)
    return [_LETTER + word if is_unspaced(word) else word for word in words] if mixed else words


def _letters(word: str) -> str:
    """The characters of a word as units separated by blanks."""
    return _LETTER + f" {_LETTER}".join(word)


def different(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number values in the order of their first occurrence.

    Args:
        values: uint64, (values,).

    Returns:
        The index of the first occurrence of each different value, int32, ascending; and the number of each value,
        int32.
    """
    order = np.argsort(values, kind="stable").astype(np.int32)
    rising = values[order]
    begins = np.flatnonzero(np.concatenate([[True], rising[1:] != rising[:-1]])[: rising.size])
    earliest = np.empty(values.size, dtype=np.int32)  # first index of each value
    earliest[order] = np.repeat(order[begins], np.diff(begins, append=rising.size))
    is_first = earliest == np.arange(values.size, dtype=np.int32)
    number = np.cumsum(is_first, dtype=np.int32)[earliest]
    return np.flatnonzero(is_first).astype(np.int32), number - np.int32(1)


class SketchFile:
    """Sketches in an unnamed temporary file: appended in any order, read in the order of `places`."""

    def __init__(self) -> None:
        """Create an empty file."""
        self.size = 0
        self.places = np.empty(0, dtype=np.int64)  # positions of the documents, from `append`
        self._file = tempfile.TemporaryFile(prefix="seenset-sketches-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def append(self, sketches: np.ndarray) -> int:
        """Append sketches, uint8, (documents, 128), and return the position of the first.

        Raises:
            UserError: no space is left for temporary files.
        """
        begin = self.size
        try:
            self._file.write(np.ascontiguousarray(sketches).data)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"no space for sketches in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a larger disk"
            ) from None
        self.size += len(sketches)
        return begin

    def read(self, places: np.ndarray) -> np.ndarray:
        """The sketches at some positions: uint8, (places, 128)."""
        wanted, number = np.unique(places, return_inverse=True)
        sketches = np.empty((wanted.size, SKETCH), dtype=np.uint8)
        begins = np.unique(wanted // _PART, return_index=True)[1]
        for begin, end in itertools.pairwise([*begins, wanted.size]):
            some = wanted[begin:end]
            size = int(some[-1] - some[0] + 1) * SKETCH
            data = os.pread(self._file.fileno(), size, int(some[0]) * SKETCH)
            sketches[begin:end] = np.frombuffer(data, dtype=np.uint8).reshape(-1, SKETCH)[some - some[0]]
        return sketches[number]

    def __len__(self) -> int:
        """Number of documents."""
        return int(self.places.size)

    def __getitem__(self, documents: slice | np.ndarray) -> np.ndarray:
        """The sketches of some documents: uint8, (some, 128)."""
        return self.read(self.places[documents])
