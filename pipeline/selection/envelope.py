"""Where null documents can lie among the ranks: numbers that they exceed nowhere, with a stated probability.

Given n calibration documents and k null audit documents that are exchangeable with them, all (n + k)! / (n! k!) orders
of the two kinds are as likely. So the nulls' counts over the n + 1 ranks are multinomial with Dirichlet(1, ..., 1)
probabilities, whatever the scores are (Polya's urn; Gazin, Blanchard & Roquain 2024), and an envelope can be computed
without any data.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

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
    first, last = max(1, math.ceil(size * LOWEST / 2**depth)), math.floor(size * HIGHEST)
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
        between = low + (high - low) * (at_low - target) / (at_low - at_high)  # where a straight line meets the target
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
    return float(np.partition(largest, place - 1)[place - 1])


@lru_cache(maxsize=64)
def _place(delta: Fraction) -> int:
    """Which of the ordered draws to take, from 1, so that it is below the true quantile with probability UNLUCKY."""
    from scipy.special import bdtrc

    return bisect_left(range(1, DRAWS + 2), -UNLUCKY, key=lambda place: -bdtrc(place - 1, DRAWS, 1 - float(delta))) + 1


def _grid() -> tuple[int, ...]:
    numbers = list(range(1, EXACT + 1))
    while numbers[-1] < 2**60:
        numbers.append(math.ceil(numbers[-1] * GROWTH))
    return tuple(numbers)


_GRID = _grid()
