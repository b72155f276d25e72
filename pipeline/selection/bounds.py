"""Confidence bounds for one list: how many of its documents can be wrong; computed from rank counts.

An `Envelope` bounds how many of k nulls have small ranks, with a stated probability. Given n calibration documents and
k null audit documents exchangeable with them, all (n + k)! / (n! k!) orders of the two kinds are equally likely. So the
nulls' counts over the n + 1 ranks are multinomial with Dirichlet(1, ..., 1) probabilities for any scores (Polya's urn;
Gazin, Blanchard & Roquain 2024), and an envelope can be computed without data. The proof for lists is in
docs/guarantee.md.
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
"""Probability that a simulated envelope is below the true one."""
EXACT_RANKS, EXACT_WORK = 4_000, 2_000_000
"""Maximum calibration documents, and their product with nulls, for which an envelope is counted and not simulated."""
PRECISION = 1e-3
"""Relative excess of a counted envelope over the smallest one."""
ROUNDS = 200
"""Maximum steps of the search for a counted envelope; each halves the interval, so that 60 reach the precision."""
LEAST_DELTA = 1e-9
"""Minimum 1 - confidence of a counted envelope; it exceeds the rounding error of a counted probability."""
LOWEST, HIGHEST = 0.01, 0.99
ENOUGH = 10
"""Minimum expected documents at the lowest level, nulls and calibration: with fewer the envelope is only noise."""
STEP = 1.03
"""Levels differ by one rank, or by this factor if that is more."""
EXACT = 64
GROWTH = 1.02
"""Numbers of nulls above EXACT are rounded up to powers of this number."""


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """Maximum number of k nulls at ranks 1..j, simultaneously for every level j, with probability 1 - delta.

    It is k t + h sqrt(t (1 - t)), t = j / (n + 1), with the smallest valid h.
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
        """Maximum nulls at ranks up to each level, int64, of at most k nulls. It increases with k."""
        if k == 0:
            return np.zeros(self.levels.size, dtype=np.int64)
        k = min(self.m, _GRID[bisect_left(_GRID, k)])
        return _limits(k, self.levels / (self.n + 1), _height(self.n, self.depth, k, self.delta))


def _limits(k: int, t: np.ndarray, height: float | np.ndarray) -> np.ndarray:
    """The integer part of k t + height sqrt(t (1 - t)), at most k, protected against rounding down."""
    return np.floor(np.minimum(k, (k * t + height * np.sqrt(t * (1 - t))) * (1 + 1e-12))).astype(np.int64)


@lru_cache(maxsize=64)
def _levels(n: int, depth: int) -> np.ndarray:
    """The ranks at which the nulls are counted: all close to 0 and to 1, between them by factors of STEP."""
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
    """Dirichlet(1, ..., 1) weights of the ranks between levels, by stick breaking: (levels, DRAWS)."""
    rng = np.random.default_rng([SEED, n, depth])
    levels = _levels(n, depth)
    gaps = np.diff(levels, prepend=0)
    return np.stack([rng.beta(gap, n + 1 - level, DRAWS) for gap, level in zip(gaps, levels, strict=True)])


@lru_cache(maxsize=4096)
def _height(n: int, depth: int, k: int, delta: Fraction) -> float:
    """The h for which P(more than k t + h sqrt(t (1 - t)) of k nulls at ranks 1..j, at any level j) is at most delta.

    t = j / (n + 1). Infinite if a simulation has too few draws, or a count too few digits.
    """
    if delta < LEAST_DELTA:
        return math.inf
    if n <= EXACT_RANKS and n * k <= EXACT_WORK:
        return _exact_height(n, depth, k, float(delta))
    return _simulated_height(n, depth, k, delta)


def _exact_height(n: int, depth: int, k: int, delta: float) -> float:
    """By counting: all (n + k)! / (n! k!) orders of k nulls and n calibration documents are equally likely."""
    levels = _levels(n, depth)
    t = levels / (n + 1)

    def failing(heights: np.ndarray) -> np.ndarray:
        kept = probability_of_keeping(n, k, levels, _limits(k, t, heights[:, None]))
        return np.log(np.maximum(1 - kept, 1e-300))

    target = math.log(delta)
    if failing(np.zeros(1))[0] <= target:  # no relative precision can be reached for 0
        return 0.0
    low, high = 0.0, k * math.sqrt((1 - t[0]) / t[0])  # `high` allows all k nulls at every level
    tries = min(high, 3 * math.sqrt(k * (n + 1 + k) / (n + 2))) * np.array([0.8, 0.9, 1.0, 1.2])
    at_low, at_high = 0.0, -700.0
    for _ in range(ROUNDS):  # `high` is valid after any number of rounds
        if high - low <= PRECISION * high:
            break
        tries = tries[(tries > low) & (tries < high)]
        for height, log_p in zip(tries.tolist(), failing(tries).tolist(), strict=True):
            if log_p <= target and height < high:
                high, at_high = height, log_p
            if log_p > target and height > low:
                low, at_low = height, log_p
        between = low + (high - low) * (at_low - target) / (at_low - at_high)  # linear interpolation of the target
        near = PRECISION / 2.2 * high
        tries = np.array([between - near, between + near, (low + high) / 2])
    return high


def probability_of_keeping(n: int, k: int, levels: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """P(of k nulls, those at ranks 1..j are at most the limit of each level j): (rows,) of limits (rows, levels)."""
    orders = np.zeros((len(limits), k + 1))  # number of orders of the ranks so far, by number of nulls; scaled
    orders[:, 0] = 1
    log_scale = np.zeros(len(limits))
    before = 0
    for j, limit in zip([*levels.tolist(), n + 1], [*limits.T, np.full(len(limits), k)], strict=True):
        for rank in range(before, j):
            np.cumsum(orders, axis=1, out=orders)
            if rank % 8 == 0:  # each rank multiplies by at most k + 1
                scale = orders.max(axis=1)
                orders /= scale[:, None]
                log_scale += np.log(scale)
        for row, most in zip(orders, limit.tolist(), strict=True):
            row[most + 1 :] = 0
        before = j
    log_all = math.lgamma(n + k + 1) - math.lgamma(n + 1) - math.lgamma(k + 1)
    return np.asarray(orders[:, k] * np.exp(log_scale - log_all))


def _simulated_height(n: int, depth: int, k: int, delta: Fraction) -> float:
    """By Polya's urn: Dirichlet weights, and a multinomial of k nulls with them; O(levels) per draw for any n and k."""
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
    """The order statistic of the draws, from 1, that is below the true quantile with probability UNLUCKY."""
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
    """Bounds on one list and on all audited documents that hold simultaneously with probability `confidence`."""

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
    `confidence` over both, the bound holds simultaneously for this and every other list of this kind, so the rank may
    be chosen after looking at the counts. Ties that count against selection are conservative: with random order of
    equal scores, no null's rank would be larger.

    The counts must be of conformal ranks among n calibration documents of one kind, not of several groups.

    Args:
        counts: counts of the m >= 1 audit documents; those without a score are at the last rank.
        rank: last rank of the list, 0 for an empty list.
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
    """A lower bound on the number of documents of a nonempty list of `ListBounds.longest`.

    If the list is not everything, more than alpha m nulls are consistent with the counts. So its bound is at least that
    of alpha m nulls at the lowest level, and its length is this bound over alpha. More than m: there is no list.

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
    """Bounds that hold simultaneously for every list of the audit documents at ranks 1..j."""

    nulls: int  # maximum number of nulls among the audit documents
    reached: np.ndarray  # int64, (n + 1,): documents at ranks 1..j, at index j - 1
    wrong: np.ndarray  # int64, (n + 1,): maximum number of nulls among these

    def wrong_at(self, rank: int) -> int:
        """Maximum number of nulls among the documents at ranks 1..rank."""
        return int(self.wrong[rank - 1]) if rank else 0

    def longest(self, alpha: Fraction) -> int:
        """The last rank of the longest list of which at most a share alpha (exact) is wrong; 0 if there is none.

        Guaranteed: as in `wrong_in_list`, so the share of wrong documents in this list exceeds alpha with probability
        at most 1 - confidence.
        """
        near = np.flatnonzero((self.reached > 0) & (self.wrong <= float(alpha) * self.reached * (1 + 1e-9)))
        for index in near[::-1].tolist():  # floats give candidates, rationals decide
            if int(self.wrong[index]) <= alpha * int(self.reached[index]):
                return index + 1
        return 0


def bounds_of_lists(counts: RankCounts, confidence: Fraction) -> ListBounds:
    """The bounds of all lists, with the largest number of nulls that the counts are consistent with.

    Args:
        counts: as in `wrong_in_list`.
        confidence: in (0, 1), exact.
    """
    reached = np.cumsum(counts.counts)
    envelope = Envelope.of(counts.n, counts.m, confidence)
    return _lists(reached, envelope, _most_nulls(reached, envelope))


def published_bounds(counts: RankCounts, confidence: Fraction) -> ListBounds:
    """The bounds of Gazin, Blanchard & Roquain (2024), which treat all m audit documents as nulls."""
    envelope = Envelope.of(counts.n, counts.m, confidence)
    return _lists(np.cumsum(counts.counts), envelope, counts.m)


def _most_nulls(reached: np.ndarray, envelope: Envelope) -> int:
    """The largest number of nulls k with k <= most_k(j) + m - reached(j) at every level j.

    The right side increases with k, so iterating it downwards from m ends there: no k that fulfils the condition is
    skipped.
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
    """The smallest bound of each list: from the levels below it, the level above it, and its length."""
    most = envelope.most(nulls)
    rank = np.arange(1, reached.size + 1)
    below = np.searchsorted(envelope.levels, rank, side="right")  # number of levels <= rank
    least = np.minimum.accumulate(np.concatenate([[0], most - reached[envelope.levels - 1]]))
    next_most = np.concatenate([most, [nulls]])[np.searchsorted(envelope.levels, rank)]
    return ListBounds(nulls, reached, np.clip(np.minimum(reached + least[below], next_most), 0, None))
