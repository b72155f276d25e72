"""Similarity of sampled continuations to the actual text (SaMIA, Kaneko et al. 2024; docs/methods.md, section 1.6).

Words are separated by white space and case-sensitive; in scripts without blanks between words every character is one
(`pipeline.corpus.scripts`), as in multilingual ROUGE. The published code compares candidates of up to 1024 tokens for
any length of the reference, which inflates recall; here a candidate is cut to the reference's number of words by
default. Of runs of n words it divides by the number of words, and here by that of the runs (Lin 2004).
"""

from __future__ import annotations

import math
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.corpus.scripts import by_characters, count_units, cut_units, units
from pipeline.detectors.arguments import Count, Share
from pipeline.detectors.base import Continued, Evidence, Pass, WrittenNeeds, detector

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["recall", "precision"]
CandidateWords = Literal["reference", "all"]


def composed_words(text: str, characters: bool) -> list[str]:
    """The words of a text, composed (Unicode NFC): a model may write a character otherwise than the document.

    Args:
        text: any text.
        characters: whether characters of scripts without blanks count as words.
    """
    return units(unicodedata.normalize("NFC", text), characters)


def rouge(candidate: Sequence[str], reference: Sequence[str], n: int = 1, kind: Kind = "recall") -> float:
    """ROUGE-N of two lists of words, in [0, 1]: common n-grams, with the smaller of both multiplicities.

    recall: divided by the n-grams of the reference (Lin 2004; SaMIA, eq. 1); precision: by those of the candidate. 0
    for a candidate without n-grams, NaN for a reference without n-grams.
    """
    given, wanted = _ngrams(candidate, n), _ngrams(reference, n)
    if not wanted:
        return math.nan
    return (wanted & given).total() / max(1, (wanted if kind == "recall" else given).total())


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
    """Mean ROUGE-N of sampled continuations, higher = more member-like (SaMIA, eq. 5).

    Args:
        candidates: continuations, at least one.
        reference: text after the prefix in the document.
        n: words per n-gram.
        kind: denominator of the common n-grams.
        candidate_words: `reference` cuts a candidate to the reference's number of words, `all` uses all of it.
        compressed: multiply each by the bytes of zlib.compress(candidate as UTF-8), for its compared part from the
            first word to the last (SaMIA * zlib): repetitive text counts less.

    Returns:
        In [0, 1], or in bytes if compressed; NaN for a reference of fewer than n words.
    """
    characters = by_characters(reference)
    count = count_units(reference, characters) if candidate_words == "reference" else None
    words, scores = composed_words(reference, characters), []
    for candidate in candidates:
        text = cut_words(candidate, count, characters)
        size = len(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)) if compressed else 1
        scores.append(rouge(composed_words(text, characters), words, n, kind) * size)
    return sum(scores) / len(scores)


def cut_words(text: str, count: int | None, characters: bool = False) -> str:
    """The text from its first word to word `count` or the last, with unchanged whitespace.

    Args:
        text: any text.
        count: maximum number of words; None: all.
        characters: whether characters of scripts without blanks count as words.
    """
    return text.strip() if count is None else text[: cut_units(text, count, characters)].lstrip()


def prefix_and_reference(text: str, ratio: float = 0.5) -> tuple[str, str]:
    """The first int(ratio * words) words of a text, and the rest; both without whitespace around them."""
    characters = by_characters(text)
    end = cut_units(text, int(ratio * count_units(text, characters)), characters)
    return text[:end].strip(), text[end:].strip()


def continuation_needs(
    draws: int,
    prefix_ratio: float,
    candidate_words: CandidateWords,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> WrittenNeeds:
    """The needed continuations of a detector with these arguments; equal ones are drawn once for all detectors."""
    continued = Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)
    return {Pass("generate", continued=continued): [str(draws)]}


@detector(needs=continuation_needs, also={"samia_zlib": {"compressed": True}})
def samia(
    evidence: Evidence,
    draws: Count = 10,
    prefix_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5,
    n: Count = 1,
    kind: Kind = "recall",
    candidate_words: CandidateWords = "reference",
    temperature: Annotated[float, Field(ge=0)] = 1.0,
    top_k: Count | None = 50,
    top_p: Share = 1.0,
    *,
    compressed: bool = False,
) -> Tensor:
    """Mean ROUGE-N of `draws` sampled continuations of the document's prefix, in [0, 1] (SaMIA, eq. 5).

    `samia_zlib` multiplies each draw's ROUGE-N by the bytes of the compressed draw, >= 0 (SaMIA, eq. 7).
    """
    import torch

    settings: Any = {"n": n, "kind": kind, "candidate_words": candidate_words, "compressed": compressed}
    continued = Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)
    scores = [samia_score(d.texts[:draws], d.reference, **settings) for d in evidence.continuations[continued]]
    return torch.tensor(scores, dtype=torch.float64)
