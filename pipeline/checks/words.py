"""Words of the blind test: the tokens of a text in any script, and the features of a classifier that reads them.

A token is a run of letters, digits, combining marks and underscores, as long as blanks separate words; a one-letter
word; and every other sign, such as punctuation, a symbol of code or an emoji. In scripts without blanks between words
(`pipeline.corpus.scripts`), and in runs of more than `LONGEST` letters of any script, a token is a character, a pair or
a triple of neighbours. Parts of joinedCamelCase and snake_case are tokens too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pipeline.corpus.scripts import UNSPACED, has_unspaced, marks

CHARACTERS = 20_000
"""Characters of the beginning of a text that are read."""

LONGEST = 20
"""Letters of the longest run that is one token."""

WINDOWS, WINDOW = 8, 500
"""Parts of a text, spread evenly, and their characters, of which pairs and triples are read."""

WORD_COLUMNS = 1 << 18
SIGN_COLUMNS = 1 << 16
SHARES = ("(share of capitals)", "(share of punctuation)", "(share of line breaks)")
COLUMNS = WORD_COLUMNS + SIGN_COLUMNS + len(SHARES)
"""Features of a text: hashed tokens, single characters, and three shares."""

MEDIAN_OF = 500
"""Maximum number of documents of which the median is taken."""

_AT_ONCE = 256  # texts that are hashed together, which bounds the memory
_HASHES = 1 << 30  # distinguishes the tokens of all documents, and is a multiple of WORD_COLUMNS
_JOINERS = "\u200c\u200d"

_LOWER, _UPPER = "a-zß-öø-ÿα-ωά-ώа-яѐ-џ", "A-ZÀ-ÖØ-ÞΑ-ΩА-ЯЀ-Џ"
_JOINT = re.compile(f"[{_UPPER}_](?<=[{_LOWER}][{_UPPER}]|[^\\W_]_)")
_PART = re.compile(rf"[{_UPPER}]+(?![{_LOWER}])|[{_UPPER}]?[{_LOWER}]+|[^\W_{_LOWER}{_UPPER}\u0e00-\U0010ffff]+")
_BEFORE, _BEHIND = re.compile(r"(?<!\w)\w+\Z"), re.compile(r"\w+")
_WIDEST = 64  # characters before a joint that belong to its word
_PLAIN = re.compile(r"\w+|[^\w\s]")
_ABOVE = re.compile("[\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Patterns of texts other than ASCII, which take some milliseconds to make."""

    joined: re.Pattern[str]  # a combining mark or joiner
    marked: re.Pattern[str]  # tokens of a text with these
    mixed: re.Pattern[str]  # tokens of a text with scripts without blanks, and whole runs of these
    unspaced: re.Pattern[str]  # the beginning of such a run


@cache
def _patterns() -> _Patterns:
    joined = marks() + _JOINERS
    run, word = f"[{UNSPACED}][{UNSPACED}{joined}]*", f"[^\\W{UNSPACED}](?:[^\\W{UNSPACED}]|[{joined}])*"
    return _Patterns(
        re.compile(f"[{marks(0x10000)}{_JOINERS}]"),
        re.compile(rf"\w+(?:[{joined}][\w{joined}]*)?|[^\w\s]"),
        re.compile(rf"{run}|{word}|[^\w\s]"),
        re.compile(f"[{UNSPACED}]"),
    )


def tokens(text: str) -> list[str]:
    """The tokens of a text's beginning, in lower case, in no order.

    A word of more than `LONGEST` letters is a token too, and a run of scripts without blanks is none.
    """
    words, runs = _words_and_runs(text)
    for run in runs:
        words += run
        words += map(str.__add__, run, run[1:])
        words += [run[begin : begin + 3] for begin in range(len(run) - 2)]
    return words


def _words_and_runs(text: str) -> tuple[list[str], list[str]]:
    """Words and signs of a text's beginning, in lower case, and runs of which all characters and pairs are tokens."""
    text = text[:CHARACTERS]
    small = text.lower()
    runs: list[str] = []
    if text.isascii():
        words = _PLAIN.findall(small)
    elif has_unspaced(text):
        every, unspaced = _patterns().mixed.findall(small), _patterns().unspaced
        runs = [run for run in every if unspaced.match(run)]
        words = [word for word in every if not unspaced.match(word)]
    else:
        marked = _patterns().joined.search(small) or _ABOVE.search(small)
        words = (_patterns().marked if marked else _PLAIN).findall(small)
    runs += [word for word in words if len(word) > LONGEST]
    words += _parts(text)
    return words, _in_windows(runs)


def _parts(text: str) -> Iterator[str]:
    """The parts of words that are joined by a change of case or by an underscore."""
    end = 0
    for joint in _JOINT.finditer(text):
        place = joint.start()
        if place < end:
            continue
        before = _BEFORE.search(text[max(0, place - _WIDEST) : place])
        behind = _BEHIND.match(text, place)
        end = behind.end() if behind else place
        for part in _PART.findall((before[0] if before else "") + text[place:end]):
            yield part.lower()


def _in_windows(runs: list[str]) -> list[str]:
    """Runs of a text; of many characters those in `WINDOWS` windows."""
    if sum(map(len, runs)) <= WINDOWS * WINDOW:
        return runs
    text = "\n".join(runs)
    begins = np.linspace(0, len(text) - WINDOW, WINDOWS).astype(int).tolist()
    return [run for begin in begins for run in text[begin : begin + WINDOW].split("\n")]


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The words of documents, for a classifier."""

    features: Any  # sparse float32, (documents, COLUMNS)
    hashes: Any  # sparse bool, (documents, 2^30): which tokens of two characters or more a document has

    def part(self, chosen: np.ndarray) -> Words:
        """The words of some documents, by a bool mask or positions."""
        return Words(self.features[chosen], self.hashes[chosen])

    def with_feature(self, values: np.ndarray) -> Words:
        """The same documents with one more feature: float, (documents,), in [0, 1]."""
        from scipy.sparse import csr_matrix, hstack

        column = csr_matrix(np.asarray(values, dtype=np.float32)[:, None])
        return Words(hstack([self.features, column], "csr", dtype=np.float32), self.hashes)

    @property
    def shared(self) -> float:
        """Median number of distinct tokens of two characters or more that another of these documents has.

        Of more than `MEDIAN_OF` documents it is the median of so many, evenly spread.
        """
        ordered = np.sort(self.hashes.indices)
        common = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        count = self.hashes.shape[0]
        some = self.hashes[np.linspace(0, count - 1, min(MEDIAN_OF, count)).astype(int)]
        return float(np.median(_sums(np.isin(some.indices, common), some.indptr)))


def words_of_parts(blocks: Sequence[Words]) -> Words:
    """The words of documents in several parts, each with features of its own; any part may share a token."""
    from scipy.sparse import hstack

    hashes = sum((block.hashes.astype(np.int32) for block in blocks[1:]), blocks[0].hashes.astype(np.int32))
    return Words(hstack([block.features for block in blocks], "csr", dtype=np.float32), hashes.astype(bool))


def read_words(texts: Sequence[str]) -> Words:
    """The words of texts.

    The features of a text are its hashed counts of tokens, a row of length 1; the square roots of the shares of its
    characters, a row of length 1, by which scripts and styles differ also where no word is repeated; and the square
    roots of its shares of capitals among letters, of punctuation among visible characters, and of line breaks.
    """
    from scipy.sparse import vstack

    parts = [_read(texts[begin : begin + _AT_ONCE]) for begin in range(0, max(1, len(texts)), _AT_ONCE)]
    features, hashes = (vstack([getattr(part, name) for part in parts], "csr") for name in ("features", "hashes"))
    return Words(features, hashes)


def _read(texts: Sequence[str]) -> Words:
    """The words of a few texts."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.preprocessing import normalize

    words: list[list[str]] = []
    runs: list[list[str]] = []
    for text in texts:
        some, others = _words_and_runs(text)
        words.append(some)
        runs.append(others)
    codes, counts, ends = _characters(texts)
    every, longer = _hashed_words(words, codes)
    single, double = _hashed_grams(runs)
    folded = every + single + double
    folded = csr_matrix((folded.data, folded.indices % WORD_COLUMNS, folded.indptr), (len(texts), WORD_COLUMNS))
    folded.sum_duplicates()
    total = np.repeat(np.maximum(1, _sums(counts, ends)), np.diff(ends))
    alphabet = csr_matrix((np.sqrt(counts / total), codes % SIGN_COLUMNS, ends), (len(texts), SIGN_COLUMNS))
    alphabet.sum_duplicates()
    shares = csr_matrix(_shares(codes, counts, ends))
    features = hstack([normalize(folded), alphabet, shares], "csr", dtype=np.float32)
    return Words(features, (longer + double).astype(bool))


def _hashed_words(words: list[list[str]], codes: np.ndarray) -> tuple[Any, Any]:
    """Counts of the words of texts, and of those of two characters or more: sparse, (documents, 2^30).

    Args:
        words: words and signs of each text.
        codes: codes of all characters of the texts.
    """
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction import FeatureHasher

    hasher = FeatureHasher(_HASHES, input_type="string", alternate_sign=False)
    every = hasher.transform(words)
    small = {chr(code).lower() for code in np.unique(codes).tolist()}
    kept = ~np.isin(every.indices, hasher.transform([sorted(sign for sign in small if len(sign) == 1)]).indices)
    ends = np.concatenate([[0], np.cumsum(kept)])[every.indptr].astype(np.int32)
    return every, csr_matrix((every.data[kept], every.indices[kept], ends), every.shape)


def _hashed_grams(runs: list[list[str]]) -> tuple[Any, Any]:
    """Counts of the characters of runs, and of their pairs and triples: sparse, (documents, 2^30)."""
    single, longer = zip(*map(_grams, runs), strict=True)
    return _counted(single), _counted(longer)


def _grams(runs: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of the characters of runs, and of the pairs and triples of neighbours in them: int32."""
    code = np.frombuffer("\n".join(runs).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    one = _mixed(code)
    two = _mixed(one[:-1] * np.uint32(31) + code[1:])
    three = _mixed(two[:-1] * np.uint32(31) + code[2:])
    inside = code != ord("\n")
    pairs = inside[:-1] & inside[1:]
    longer = np.concatenate([two[pairs], three[pairs[:-1] & pairs[1:]]])
    return (one[inside] >> np.uint32(2)).astype(np.int32), (longer >> np.uint32(2)).astype(np.int32)


def _counted(hashes: Sequence[np.ndarray]) -> Any:
    """How often each document has each hash: sparse, (documents, 2^30)."""
    from scipy.sparse import csr_matrix

    joined, ends = np.concatenate(hashes), np.cumsum([0, *(some.size for some in hashes)], dtype=np.int32)
    counts = csr_matrix((np.ones(joined.size), joined, ends), (len(hashes), _HASHES))
    counts.sum_duplicates()
    return counts


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3: uint32."""
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return np.asarray(hashes ^ (hashes >> np.uint32(16)))


def word_counts(texts: Sequence[str]) -> Any:
    """The features of `read_words`: sparse, (documents, COLUMNS)."""
    return read_words(texts).features


def character_shares(texts: Sequence[str]) -> np.ndarray:
    """The last features of `read_words`, the square roots of `SHARES`: float64, (documents, 3), in [0, 1]."""
    return _shares(*_characters(texts))


def used_columns(features: Any) -> np.ndarray:
    """The columns that are not zero for all documents, int64, ascending; of an array all."""
    return np.arange(features.shape[1]) if isinstance(features, np.ndarray) else np.unique(features.indices)


def without_zeros(features: Any) -> Any:
    """Features without the columns that are zero for all documents, which cost time in a fit; an array as it is."""
    from scipy.sparse import csr_matrix

    if isinstance(features, np.ndarray):
        return features
    used = np.zeros(features.shape[1], dtype=bool)
    used[features.indices] = True
    number = np.cumsum(used, dtype=np.int32) - np.int32(1)
    return csr_matrix((features.data, number[features.indices], features.indptr), (features.shape[0], int(used.sum())))


def _characters(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The code of each distinct character of each text, its count, and where the texts end: int32, int64, int32."""
    codes, counts, ends = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int64)], [0]
    for text in texts:
        data = text[:CHARACTERS].encode("utf-32-le", "surrogatepass")
        count = np.bincount(np.frombuffer(data, dtype=np.int32))
        codes.append(np.flatnonzero(count).astype(np.int32))
        counts.append(count[codes[-1]])
        ends.append(ends[-1] + codes[-1].size)
    return np.concatenate(codes), np.concatenate(counts), np.array(ends, dtype=np.int32)


def _shares(codes: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The square roots of the shares of `SHARES` of each text: float64, (documents, 3), in [0, 1]."""
    signs, number = np.unique(codes, return_inverse=True)
    kinds = np.array([list(_kinds(chr(sign))) for sign in signs.tolist()], dtype=bool).reshape(-1, 6)[number]
    capital, letter, punctuation, visible, line_break, every = (
        _sums(np.where(kind, counts, 0), ends) for kind in kinds.T
    )
    wholes = np.maximum(1, np.stack([letter, visible, every], axis=1))
    return np.asarray(np.sqrt(np.stack([capital, punctuation, line_break], axis=1) / wholes))


def _kinds(sign: str) -> Iterator[bool]:
    """Whether a character is a capital, a letter, punctuation, visible, a line break, and a character at all."""
    yield sign.isupper()
    yield sign.isalpha()
    yield unicodedata.category(sign).startswith("P")
    yield not sign.isspace()
    yield sign in "\n\r\x0b\x0c\x85\u2028\u2029"
    yield True


def _sums(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The sum of each document's values; `ends` begins with 0."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[ends])
