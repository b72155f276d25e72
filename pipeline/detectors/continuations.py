"""Similarity of sampled continuations to the actual text, and to the greedy continuation (docs/methods.md, 1.6).

These detectors read the continuations of `samia`; equal sampling settings are drawn once for all detectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pipeline.corpus.scripts import by_characters, count_units
from pipeline.detectors.arguments import Count, Share
from pipeline.detectors.base import Continuations, Continued, Evidence, Pass, detector
from pipeline.detectors.samia import CandidateWords, composed_words, continuation_needs, cut_words

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = range(2, 13)
"""Values of L in Cov_L (arXiv 2508.09603)."""

TOKENS_COMPARED = 100
"""Number of first tokens of a continuation for the edit distance of `cdd` (CDD, arXiv 2402.15938)."""


def coverage_score(candidates: Sequence[str], reference: str, candidate_words: CandidateWords = "reference") -> float:
    """The largest coverage of the reference by a continuation, in [0, 11], higher = more member-like.

    The coverage is the sum over L = 2..12 of the share of the reference's words in a run of at least L words that also
    occurs in the continuation (arXiv 2508.09603, whose program takes the share of the continuation). The share is 0 if
    the reference has fewer than L words.

    Args:
        candidates: continuations, at least one.
        reference: text after the prefix in the document, at least one word.
        candidate_words: as in `samia_score`.
    """
    characters = by_characters(reference)
    words = composed_words(reference, characters)
    count = count_units(reference, characters) if candidate_words == "reference" else None
    cut = [cut_words(candidate, count, characters) for candidate in candidates]
    return max(_coverage(composed_words(candidate, characters), words) for candidate in cut)


def _coverage(candidate: Sequence[str], words: Sequence[str]) -> float:
    total = 0
    for length in LENGTHS:
        runs = set(zip(*(candidate[start:] for start in range(length)), strict=False))
        covered, end = 0, 0  # words counted so far, and the end of the last run
        for start, run in enumerate(zip(*(words[first:] for first in range(length)), strict=False)):
            if run in runs:
                covered += start + length - max(start, end)
                end = start + length
        if not covered:  # there is no longer run either
            break
        total += covered
    return total / len(words)


@detector(needs=continuation_needs)
def coverage(
    evidence: Evidence,
    draws: Count = 10,
    prefix_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5,
    candidate_words: CandidateWords = "reference",
    temperature: Annotated[float, Field(ge=0)] = 1.0,
    top_k: Count | None = 50,
    top_p: Share = 1.0,
) -> Tensor:
    """Largest n-gram coverage of the rest of the document by `draws` continuations, in [0, 11] (arXiv 2508.09603)."""
    import torch

    continued = Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)
    scores = [coverage_score(d.texts[:draws], d.reference, candidate_words) for d in evidence.continuations[continued]]
    return torch.tensor(scores, dtype=torch.float64)


def within_edits(one: Sequence[Any], other: Sequence[Any], most: int) -> bool:
    """Whether the edit distance (insertions, deletions, replacements) of two sequences is at most `most`.

    Only the band of width 2 * most + 1 around the diagonal is computed.
    """
    if abs(len(one) - len(other)) > most:
        return False
    before = [*range(len(other) + 1)]
    for i, item in enumerate(one, 1):
        row = [i] + [most + 1] * len(other)
        for j in range(max(1, i - most), min(len(other), i + most) + 1):
            row[j] = min(before[j - 1] + (item != other[j - 1]), before[j] + 1, row[j - 1] + 1)
        before = row
    return before[-1] <= most


def cdd_score(candidates: Sequence[Sequence[Any]], greedy: Sequence[Any], alpha: float = 0.05) -> float:
    """Share of continuations near the greedy one, in [0, 1], higher = more member-like (CDD, arXiv 2402.15938).

    Near: the edit distance of the first 100 tokens is at most alpha times the largest number of these tokens in any
    continuation, including the greedy one. It is 0 without continuations, or if the greedy one is empty.

    Args:
        candidates: tokens of the continuations.
        greedy: tokens of the greedy continuation.
        alpha: in (0, 1].
    """
    centre, *others = (tokens[:TOKENS_COMPARED] for tokens in (greedy, *candidates))
    if not centre or not others:
        return 0.0
    most = int(alpha * max(map(len, (centre, *others))) + 1e-9)  # 0.07 * 100 is not an integer in binary
    return sum(within_edits(tokens, centre, most) for tokens in others) / len(others)


def _greedy(prefix_ratio: float, candidate_words: CandidateWords) -> Continued:
    return Continued(prefix_ratio, candidate_words, temperature=0.0, top_k=None)


@detector(
    needs=lambda draws, prefix_ratio, candidate_words, temperature, top_k, top_p: {
        **continuation_needs(draws, prefix_ratio, candidate_words, temperature, top_k, top_p),
        Pass("generate", continued=_greedy(prefix_ratio, candidate_words)): ["1"],
    }
)
def cdd(
    evidence: Evidence,
    draws: Count = 10,
    alpha: Share = 0.05,
    prefix_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5,
    candidate_words: CandidateWords = "reference",
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    top_k: Count | None = 50,
    top_p: Share = 1.0,
) -> Tensor:
    """Share of `draws` continuations within alpha of the greedy one, in [0, 1] (CDD, arXiv 2402.15938).

    Tokens are those of the audited model's tokenizer, or words for an endpoint, whose tokenizer is unknown.
    """
    import torch

    def tokens(document: Continuations) -> Callable[[str], Sequence[Any]]:
        characters = by_characters(document.reference)
        count = count_units(document.reference, characters) if candidate_words == "reference" else None
        return lambda text: evidence.tokens(cut_words(text, count, characters))

    drawn = evidence.continuations[Continued(prefix_ratio, candidate_words, temperature, top_k, top_p)]
    likeliest = evidence.continuations[_greedy(prefix_ratio, candidate_words)]
    scores = []
    for document, greedy in zip(drawn, likeliest, strict=True):
        read = tokens(document)
        scores.append(cdd_score([read(text) for text in document.texts[:draws]], read(greedy.texts[0]), alpha))
    return torch.tensor(scores, dtype=torch.float64)
