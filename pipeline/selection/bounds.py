"""What one list is worth: how many of its documents can be wrong, at a stated confidence; a function of rank counts.

An `Envelope` says how many of k nulls can lie at small ranks, with a stated probability. Given n calibration documents
and k null audit documents exchangeable with them, all (n + k)! / (n! k!) orders of the two kinds are as likely. So the
nulls' counts over the n + 1 ranks are multinomial with Dirichlet(1, ..., 1) probabilities, whatever the scores are
(Polya's urn; Gazin, Blanchard & Roquain 2024), and an envelope can be computed without any data. The proof of what
follows for lists is in docs/guarantee.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from pipeline.selection.conformal import RankCounts

DRAWS = 10_000
SEED = 20260522
UNLUCKY = 1e-3
"""Probability that a simulation gives an envelope below the true one."""
EXACT_RANKS, EXACT_WORK = 4_000, 2_000_000
"""Up to so many calibration documents, and so many of them times nulls, an envelope is counted and not simulated."""
PRECISION = 1e-3
"""By how much of itself a counted envelope may lie above the least one."""
ROUNDS = 200
"""Most steps of the search for a counted envelope; each halves the interval, so that 60 reach the precision."""
LEAST_DELTA = 1e-9
"""Above the rounding error of a counted probability: a smaller 1 - confidence is not counted."""
LOWEST, HIGHEST = 0.01, 0.99
ENOUGH = 10
"""Documents expected at the lowest level, of nulls and of calibration: below that the envelope would be all noise."""
STEP = 1.03
"""Levels lie a rank apart, or by this factor where that is more."""
EXACT = 64
GROWTH = 1.02
"""Numbers of nulls above EXACT are rounded up to powers of this."""


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """How many of k nulls lie at ranks 1..j at most, at every level j at once, with probability 1 - delta.

    It is k t + h sqrt(t (1 - t)), t = j / (n + 1), with the least h that makes it so.
    """

    n: int
    m: int
    depth: int  # the lowest level is LOWEST / 2^depth
    delta: Fraction  # 1 - confidence
    levels: np.ndarray  # int64, ascending ranks in 1..n

    @classmethod
    def of(cls, n: int, m: int, confidence: Fraction) -> Envelope:
        """The envelope for up to m nulls against n calibration documents; the confidence is in (0, 1), exact."""
        depth = max(0, math.floor(math.log2(LOWEST / (ENOUGH * (1 / m + 1 / (n + 1))))))
        return cls(n, m, depth, 1 - confidence, _levels(n, depth))

    def most(self, k: int) -> np.ndarray:
        """Nulls at ranks up to each level, at most, int64; of k nulls or fewer. It grows with k."""
        if k == 0:
            return np.zeros(self.levels.size, dtype=np.int64)
        k = min(self.m, _GRID[bisect_left(_GRID, k)])
        return _limits(k, self.levels / (self.n + 1), _height(self.n, self.depth, k, self.delta))


def _limits(k: int, t: np.ndarray, height: float | np.ndarray) -> np.ndarray:
    """The whole part of k t + height sqrt(t (1 - t)), at most k; a hair above it, so that no rounding lowers it."""
    return np.floor(np.minimum(k, (k * t + height * np.sqrt(t * (1 - t))) * (1 + 1e-12))).astype(np.int64)


@lru_cache(maxsize=64)
def _levels(n: int, depth: int) -> np.ndarray:
    """The ranks at which the nulls are counted: close to 0 and to 1 all, between them by factors of STEP."""
    size = n + 1
    first, last = math.ceil(size * LOWEST / 2**depth), math.floor(size * HIGHEST)
    levels, j = [], first
    while j <= last:
        levels.append(j)
        near = min(j, size - j)
        j += max(1, math.floor(near * (STEP - 1)))
    return np.array(levels or [min(n, first)], dtype=np.int64)


@lru_cache(maxsize=1)
def _chances(n: int, depth: int) -> np.ndarray:
    """Dirichlet(1, ..., 1) weights of the ranks between levels, broken off one after the other: (levels, DRAWS)."""
    rng = np.random.default_rng([SEED, n, depth])
    levels = _levels(n, depth)
    gaps = np.diff(levels, prepend=0)
    return np.stack([rng.beta(gap, n + 1 - level, DRAWS) for gap, level in zip(gaps, levels, strict=True)])


@lru_cache(maxsize=4096)
def _height(n: int, depth: int, k: int, delta: Fraction) -> float:
    """The h for which P(more than k t + h sqrt(t (1 - t)) of k nulls at ranks 1..j, at any level j) is at most delta.

    t = j / (n + 1). Infinite where a simulation has too few draws to tell, or a count too few digits.
    """
    if delta < LEAST_DELTA:
        return math.inf
    if n <= EXACT_RANKS and n * k <= EXACT_WORK:
        return _exact_height(n, depth, k, float(delta))
    return _simulated_height(n, depth, k, delta)


def _exact_height(n: int, depth: int, k: int, delta: float) -> float:
    """By counting: k nulls and n calibration documents stand in one of (n + k)! / (n! k!) orders, all as likely."""
    levels = _levels(n, depth)
    t = levels / (n + 1)

    def failing(heights: np.ndarray) -> np.ndarray:
        kept = probability_of_keeping(n, k, levels, _limits(k, t, heights[:, None]))
        return np.log(np.maximum(1 - kept, 1e-300))

    target = math.log(delta)
    if failing(np.zeros(1))[0] <= target:  # no relative precision is ever reached on the way down to 0
        return 0.0
    low, high = 0.0, k * math.sqrt((1 - t[0]) / t[0])  # the higher one allows all k nulls at every level
    tries = min(high, 3 * math.sqrt(k * (n + 1 + k) / (n + 2))) * np.array([0.8, 0.9, 1.0, 1.2])
    at_low, at_high = 0.0, -700.0
    for _ in range(ROUNDS):  # `high` suffices after any number of them
        if high - low <= PRECISION * high:
            break
        tries = tries[(tries > low) & (tries < high)]
        for height, log_p in zip(tries.tolist(), failing(tries).tolist(), strict=True):
            if log_p <= target and height < high:
                high, at_high = height, log_p
            if log_p > target and height > low:
                low, at_low = height, log_p
        between = low + (high - low) * (at_low - target) / (at_low - at_high)  # where a line meets the target
        near = PRECISION / 2.2 * high
        tries = np.array([between - near, between + near, (low + high) / 2])
    return high


def probability_of_keeping(n: int, k: int, levels: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """P(of k nulls, those at ranks 1..j are at most the limit of each level j): (rows,) of limits (rows, levels)."""
    orders = np.zeros((len(limits), k + 1))  # of the ranks so far, by how many nulls they hold; scaled
    orders[:, 0] = 1
    log_scale = np.zeros(len(limits))
    before = 0
    for j, limit in zip([*levels.tolist(), n + 1], [*limits.T, np.full(len(limits), k)], strict=True):
        for rank in range(before, j):
            np.cumsum(orders, axis=1, out=orders)
            if rank % 8 == 0:  # a rank multiplies by k + 1 at most
                scale = orders.max(axis=1)
                orders /= scale[:, None]
                log_scale += np.log(scale)
        for row, most in zip(orders, limit.tolist(), strict=True):
            row[most + 1 :] = 0
        before = j
    log_all = math.lgamma(n + k + 1) - math.lgamma(n + 1) - math.lgamma(k + 1)
    return np.asarray(orders[:, k] * np.exp(log_scale - log_all))


def _simulated_height(n: int, depth: int, k: int, delta: Fraction) -> float:
    """By Polya's urn: Dirichlet weights, and a multinomial of k nulls with them; O(levels) a draw, whatever n and k."""
    place = _place(delta)
    if place > DRAWS:
        return math.inf
    rng = np.random.default_rng([SEED, n, depth, k])
    nulls = np.zeros(DRAWS, dtype=np.int64)
    largest = np.full(DRAWS, -np.inf)
    for j, chance in zip(_levels(n, depth).tolist(), _chances(n, depth), strict=True):
        nulls += rng.binomial(k - nulls, chance)
        t = j / (n + 1)
        np.maximum(largest, (nulls - k * t) / math.sqrt(t * (1 - t)), out=largest)
    return float(np.sort(largest)[place - 1])


@lru_cache(maxsize=64)
def _place(delta: Fraction) -> int:
    """Which of the ordered draws to take, from 1, so that it is below the true quantile with probability UNLUCKY."""
    from scipy.special import bdtrc

    return bisect_left(range(DRAWS), -UNLUCKY, key=lambda below: -bdtrc(below, DRAWS, 1 - float(delta))) + 1


def _grid() -> tuple[int, ...]:
    numbers = list(range(1, EXACT + 1))
    while numbers[-1] < 2**60:
        numbers.append(math.ceil(numbers[-1] * GROWTH))
    return tuple(numbers)


_GRID = _grid()


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
