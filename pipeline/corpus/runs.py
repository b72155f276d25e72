"""The runs of five words of texts, as numbers: hashed together, for texts are many and short."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

GRAM = 5
"""Words in a run. A text of fewer words is one run: it has no near copy but its equals."""

_WORD = re.compile(r"\w+")
_NO_WORD = re.compile(r"\W")
_CHARACTERS = 1 << 20  # of a text whose words are found together, or some more
_AT_ONCE = 1 << 10  # runs that are hashed together: what is made of them stays in a cache


def run_hashes(texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes of the runs of texts, a bounded number at a time.

    Runs are all sequences of 5 words, normalised (NFKC, case folded, without punctuation and white space).

    Args:
        texts: none empty.

    Returns:
        The number of each run's text, int64, ascending, and its hash, uint32; every text has a run.
    """
    for first, some in _together(texts):
        for number, hashes in _hashes("\n".join(map(_normal_words, some)).encode("utf-8", "surrogatepass")):
            yield first + number, hashes


def _together(texts: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Texts in parts of some characters, each with the number of its first."""
    begin = characters = 0
    for number, text in enumerate(texts):
        characters += len(text)
        if characters >= _CHARACTERS:
            yield begin, texts[begin : number + 1]
            begin, characters = number + 1, 0
    if begin < len(texts):
        yield begin, texts[begin:]


def _hashes(lines: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same of lines, whose words have a blank between them."""
    signs = np.frombuffer(lines, dtype=np.uint8)
    gaps = np.flatnonzero((signs == ord(" ")) | (signs == ord("\n")))
    last = np.append(np.flatnonzero(signs[gaps] == ord("\n")), gaps.size)  # word of each line
    begins, ends = np.concatenate([[0], gaps + 1]), np.append(gaps, len(lines))
    first = np.concatenate([[0], last[:-1] + 1])
    start = np.cumsum(np.concatenate([[0], np.maximum(1, last - first - GRAM + 2)]))  # run of each line
    for begin in range(0, int(start[-1]), _AT_ONCE):
        run = np.arange(begin, min(begin + _AT_ONCE, int(start[-1])))
        number = np.searchsorted(start, run, side="right") - 1
        word = first[number] + run - start[number]
        spans = zip(begins[word].tolist(), ends[np.minimum(word + GRAM - 1, last[number])].tolist(), strict=True)
        hashes = [xxhash.xxh32_intdigest(lines[one:other]) for one, other in spans]
        yield number, np.array(hashes, dtype=np.uint32)


def _normal_words(text: str) -> str:
    normal = unicodedata.normalize("NFKC", text).casefold()
    return _words(normal) or " ".join(normal.split())  # a text of signs alone has the runs of its signs


def _words(text: str) -> str:
    """The words of a text with a blank between them, found in a part of a long text at a time."""
    parts: list[str] = []
    start = 0
    while start < len(text):
        gap = _NO_WORD.search(text, start + _CHARACTERS)
        stop = len(text) if gap is None else gap.start()
        parts += [" ".join(words)] if (words := _WORD.findall(text, start, stop)) else []
        start = stop
    return " ".join(parts)
