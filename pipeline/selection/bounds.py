"""What one list is worth: how many of its documents can be wrong, at a stated confidence; a function of rank counts.

An `Envelope` says how many of k nulls can lie at small ranks; here is what follows for lists. The proof is in
docs/guarantee.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np
from pydantic import Field

from pipeline.selection.envelope import Envelope
from pipeline.selection.rank_counts import RankCounts


@dataclass(frozen=True, slots=True)
class Bound:
    """What holds of one list and of all audited documents, all at once, with probability `confidence`."""

    confidence: Annotated[float, Field(description="Probability with which all of this holds, in (0, 1).")]
    wrong_at_most: Annotated[int, Field(description="Selected documents that are wrong, at most.")]
    right_at_least: Annotated[int, Field(description="Selected members (with direction clean, non-members), at least.")]
    members_at_least: Annotated[
        int, Field(description="Members (with direction clean, non-members) among all audited documents, at least.")
    ]
    published_wrong_at_most: Annotated[
        int, Field(description="The published bound of the wrong ones, which takes all audited documents for nulls.")
    ]


def wrong_in_list(counts: RankCounts, rank: int, confidence: Fraction, unlisted: int = 0) -> Bound:
    """The bound of the list of all audit documents at ranks 1..rank.

    Guaranteed: if the null audit documents and the calibration documents are exchangeable, then with probability
    `confidence` over both, what it says is true, of this and of every other list of this kind at once, so the rank may
    be chosen after looking at the counts. Ties that count against selection only make it safer: were equal scores
    ordered at random, no null's rank would be larger.

    The counts must be of conformal ranks among n calibration documents of one kind, so not of several groups.

    Args:
        counts: of the m >= 1 audit documents, those without a score at the last rank.
        rank: of the last that is listed, 0 for an empty list.
        confidence: in (0, 1), exact.
        unlisted: documents at that rank that are not on the list, such as those without a score.
    """
    sharp = bounds_of_lists(counts, confidence)
    size = counts.at_most(rank) - unlisted
    wrong = min(size, sharp.wrong_at(rank))
    return Bound(
        confidence=float(confidence),
        wrong_at_most=wrong,
        right_at_least=size - wrong,
        members_at_least=counts.m - sharp.nulls,
        published_wrong_at_most=min(size, published_bounds(counts, confidence).wrong_at(rank)),
    )


def fewest_in_list(n: int, m: int, alpha: Fraction, confidence: Fraction) -> int:
    """A number of documents that no list of `ListBounds.longest` falls short of, if it holds any.

    A list that is not everything leaves more than alpha m nulls consistent, else everything would do. So its bound is
    at least that of alpha m nulls at the lowest level, and its length that over alpha. More than m: there is none.

    Args:
        n: calibration documents, >= 1.
        m: audit documents, >= 1.
        alpha: in (0, 1), exact.
        confidence: in (0, 1), exact.
    """
    envelope = Envelope.of(n, m, confidence)
    return max(1, math.ceil(int(envelope.most(math.floor(alpha * m) + 1)[0]) / alpha))


@dataclass(frozen=True, slots=True, eq=False)
class ListBounds:
    """What holds of every list of the audit documents at ranks 1..j, all at once."""

    nulls: int  # at most so many of the audit documents are nulls
    reached: np.ndarray  # int64, (n + 1,): documents at ranks 1..j, at j - 1
    wrong: np.ndarray  # int64, (n + 1,): of these, so many are nulls at most

    def wrong_at(self, rank: int) -> int:
        """Of the documents at ranks 1..rank, nulls at most."""
        return int(self.wrong[rank - 1]) if rank else 0

    def longest(self, alpha: Fraction) -> int:
        """The last rank of the longest list of which at most a share alpha, exact, is wrong; 0 where there is none.

        Guaranteed: as `wrong_in_list`, so the share of wrong documents in this list exceeds alpha with a probability of
        at most 1 - confidence.
        """
        near = np.flatnonzero((self.reached > 0) & (self.wrong <= float(alpha) * self.reached * (1 + 1e-9)))
        for index in near[::-1].tolist():  # rationals decide what floats propose
            if int(self.wrong[index]) <= alpha * int(self.reached[index]):
                return index + 1
        return 0


def bounds_of_lists(counts: RankCounts, confidence: Fraction) -> ListBounds:
    """The bounds of all lists, with the largest number of nulls that the counts are consistent with.

    Args:
        counts: as for `wrong_in_list`.
        confidence: in (0, 1), exact.
    """
    reached = np.cumsum(counts.counts)
    envelope = Envelope.of(counts.n, counts.m, confidence)
    return _lists(reached, envelope, _most_nulls(reached, envelope))


def published_bounds(counts: RankCounts, confidence: Fraction) -> ListBounds:
    """The bounds of Gazin, Blanchard & Roquain (2024), which take all m audit documents for nulls."""
    envelope = Envelope.of(counts.n, counts.m, confidence)
    return _lists(np.cumsum(counts.counts), envelope, counts.m)


def _most_nulls(reached: np.ndarray, envelope: Envelope) -> int:
    """The largest number of nulls k with k <= most_k(j) + m - reached(j) at every level j.

    The right side grows with k, so going down from m to what it allows ends there: no k that fulfils the condition is
    ever passed over.
    """
    m = int(reached[-1])
    above = m - reached[envelope.levels - 1]
    nulls = m
    while True:
        allowed = min(nulls, int((envelope.most(nulls) + above).min()))
        if allowed == nulls:
            return nulls
        nulls = allowed


def _lists(reached: np.ndarray, envelope: Envelope, nulls: int) -> ListBounds:
    """The least of what is known of each list: from the levels below it, the level above it, and its length."""
    most = envelope.most(nulls)
    rank = np.arange(1, reached.size + 1)
    below = np.searchsorted(envelope.levels, rank, side="right")  # levels at or below the rank
    least = np.minimum.accumulate(np.concatenate([[0], most - reached[envelope.levels - 1]]))
    next_most = np.concatenate([most, [nulls]])[np.searchsorted(envelope.levels, rank)]
    return ListBounds(nulls, reached, np.clip(np.minimum(reached + least[below], next_most), 0, None))
