"""Likeness of sampled continuations to the text that came (SaMIA, Kaneko et al. 2024; docs/methods.md, section 1.6).

Words are whitespace-separated and case-sensitive. The published code compares candidates of up to 1024 tokens, however
short the reference, which inflates recall; here a candidate is cut to the reference's number of words unless asked.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pipeline.detectors.base import Continuations, Continued, Evidence, Needs, Pass, detector
from pipeline.detectors.knockoff import number_of_draws
from pipeline.detectors.likelihood import share

Kind = Literal["recall", "precision"]
CandidateWords = Literal["reference", "all"]
_WORD = re.compile(r"\S+")


def rouge(candidate: Sequence[str], reference: Sequence[str], n: int = 1, kind: Kind = "recall") -> float:
    """ROUGE-N of two lists of words, in [0, 1]: n-grams in common, each counted as often as it is in both.

    recall: over the n-grams of the reference (Lin 2004; SaMIA, eq. 2); precision: over those of the candidate. A
    candidate without an n-gram has 0, and a reference without one NaN: there is nothing to find.
    """
    return _overlap(_ngrams(candidate, n), _ngrams(reference, n), kind)


def _overlap(given: Counter[tuple[str, ...]], wanted: Counter[tuple[str, ...]], kind: Kind) -> float:
    if not wanted:
        return math.nan
    if not given:
        return 0.0
    return (wanted & given).total() / (wanted if kind == "recall" else given).total()


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(islice(words, start, None) for start in range(n)), strict=False))


def samia_score(
    candidates: Sequence[str],
    reference: str,
    *,
    n: int = 1,
    kind: Kind = "recall",
    candidate_words: CandidateWords = "reference",
    compressed: bool = False,
) -> float:
    """Mean ROUGE-N of sampled continuations, higher = more member-like (SaMIA, eq. 3).

    Args:
        candidates: The continuations, at least one.
        reference: What follows the prefix in the document.
        n: Words in an n-gram.
        kind: What the n-grams in common are counted over.
        candidate_words: `reference` cuts a candidate to the reference's number of words, `all` takes all of it.
        compressed: Multiply each by the bytes of zlib.compress(candidate as UTF-8), of what is compared of it, from its
            first word to its last (SaMIA * zlib): text that repeats itself counts for less.

    Returns:
        In [0, 1], or in bytes if compressed; NaN for a reference of fewer than n words.
    """
    words = reference.split()
    wanted = _ngrams(words, n)
    scores = []
    for candidate in candidates:
        text = cut_words(candidate, len(words) if candidate_words == "reference" else None)
        size = len(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)) if compressed else 1
        scores.append(_overlap(_ngrams(text.split(), n), wanted, kind) * size)
    return sum(scores) / len(scores)


def cut_words(text: str, count: int | None) -> str:
    """The text from its first word to its count-th or last, the whitespace between them as it is."""
    if count is None:
        return text.strip()
    end = 0
    for word in islice(_WORD.finditer(text), count):
        end = word.end()
    return text[:end].lstrip()


def prefix_and_reference(text: str, ratio: float = 0.5) -> tuple[str, str]:
    """The first int(ratio * words) words of a text, and the rest; both without whitespace around them."""
    words = list(_WORD.finditer(text))
    count = int(ratio * len(words))
    end = words[count - 1].end() if count else 0
    return text[:end].strip(), text[end:].strip()


def open_ratio(value: Any) -> float:
    """A share of a document's words, as a float in (0, 1).

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError("must be a number in (0, 1): a prefix to be given and a rest to be found")
    return float(value)


def _at_least_0(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError("must be a number of at least 0")
    return float(value)


def _top_k(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("must be a whole number of at least 1, or null for no limit")
    return value


def _one_of(literal: Any) -> Any:
    def check(value: Any) -> Any:
        if value not in get_args(literal):
            raise ValueError(f"must be one of {', '.join(get_args(literal))}")
        return value

    return check


_CHECKS = {
    "draws": number_of_draws,
    "prefix_ratio": open_ratio,
    "n": number_of_draws,
    "kind": _one_of(Kind),
    "candidate_words": _one_of(CandidateWords),
    "temperature": _at_least_0,
    "top_k": _top_k,
    "top_p": share,
}


def _needs(
    draws: int,
    prefix_ratio: float,
    n: int,
    kind: Kind,
    candidate_words: CandidateWords,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> Needs:
    continued = Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)
    return {Pass("generate", continued=continued): frozenset({str(draws)})}


@detector(needs=_needs, checks=_CHECKS)
def samia(
    evidence: Evidence,
    draws: int = 10,
    prefix_ratio: float = 0.5,
    n: int = 1,
    kind: Kind = "recall",
    candidate_words: CandidateWords = "reference",
    temperature: float = 1.0,
    top_k: int | None = 50,
    top_p: float = 1.0,
) -> Tensor:
    """Mean ROUGE-N of `draws` sampled continuations of the document's prefix, in [0, 1] (SaMIA, eq. 3)."""
    continued = Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)
    return _scores(evidence.continuations[continued], draws, n, kind, candidate_words, False)


@detector(needs=_needs, checks=_CHECKS)
def samia_zlib(
    evidence: Evidence,
    draws: int = 10,
    prefix_ratio: float = 0.5,
    n: int = 1,
    kind: Kind = "recall",
    candidate_words: CandidateWords = "reference",
    temperature: float = 1.0,
    top_k: int | None = 50,
    top_p: float = 1.0,
) -> Tensor:
    """The same, each draw's ROUGE-N times the bytes of the compressed draw, >= 0 (SaMIA, section 3.3)."""
    continued = Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)
    return _scores(evidence.continuations[continued], draws, n, kind, candidate_words, True)


def _scores(
    found: Sequence[Continuations], draws: int, n: int, kind: Kind, candidate_words: CandidateWords, compressed: bool
) -> Tensor:
    def score(own: Continuations) -> float:
        texts = own.texts[:draws]
        return samia_score(texts, own.reference, n=n, kind=kind, candidate_words=candidate_words, compressed=compressed)

    return torch.tensor([score(own) for own in found], dtype=torch.float64)
