"""Weighted calibration: calibration documents are weighted by their similarity to the audited documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.config.selection import Direction
from pipeline.errors import UserError
from pipeline.selection.conformal import Grid, RankCounts, calibrate, refuse_nan

LEVELS = 1 << 20
"""Weights are integers in 1..LEVELS, relative to the largest: sums are exact, in any order."""

PRECISION = 10
"""Bits of a p-value after its first bit: rounding up increases it by less than 1 in 2^PRECISION."""

MOST = 1 << 30
"""Maximum number of calibration documents: sums of their weights stay below 2^51 and are exact in float64."""

FEWEST_EFFECTIVE = 50
"""Minimum effective number of calibration documents: with fewer, a few documents dominate and support no guarantee."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightedCalibration:
    """The calibration scores, their weights, and the possible p-values of documents."""

    scores: np.ndarray  # float64, (n,), ascending
    reached: np.ndarray  # int64, (n + 1,): cumulative weight of the first i scores
    effective: float  # (sum w)^2 / sum w^2, in [1, n]
    grid: Grid

    @property
    def total(self) -> int:
        """The total weight of the calibration documents."""
        return int(self.reached[-1])


def weight_levels(weights: np.ndarray, largest: float) -> np.ndarray:
    """Convert weights to integers relative to the largest.

    Args:
        weights: float, (documents,), finite and >= 0; values above `largest` are clipped.
        largest: > 0.

    Returns:
        int64, (documents,), in 1..LEVELS.
    """
    return np.clip(np.round(np.asarray(weights, np.float64) / largest * LEVELS), 1, LEVELS).astype(np.int64)


def calibrate_weighted(scores: np.ndarray, weights: np.ndarray) -> WeightedCalibration:
    """Sort the calibration scores and cumulate their weights, once, for `ranks_by_weight`.

    Args:
        scores: shape (n,), n >= 1, scores of the null role's documents.
        weights: int64, (n,), from `weight_levels`, on the same scale as those of the audited documents.

    Raises:
        UserError: no calibration documents, a NaN among their scores, or more than 2^30 of them.
    """
    values, parts = np.asarray(scores, dtype=np.float64).ravel(), np.asarray(weights, dtype=np.int64)
    ascending = calibrate(values)
    if values.size > MOST:
        raise UserError(f"calibration weighted takes at most {MOST:,} calibration documents, got {values.size:,}")
    reached = np.concatenate([[0], np.cumsum(parts[np.argsort(values, kind="stable")])])
    squares = math.fsum((parts.astype(np.float64) ** 2).tolist())
    total = int(reached[-1])
    return WeightedCalibration(ascending, reached, total**2 / squares, weighted_grid(total, values.size))


def weighted_grid(total: int, n: int) -> Grid:
    """The p-values of weighted calibration: numbers with PRECISION + 1 binary digits from 1 / (total + 1) to 1.

    A weighted p-value depends on the weight of its document, so an audit has as many different p-values as documents.
    Each is rounded up to this grid: it remains valid, and the rank counts of an audit have the same few ten thousand
    entries for any number of documents.
    """
    octaves = (total + 1).bit_length()
    mantissas = np.arange(1 << PRECISION, 2 << PRECISION, dtype=np.int64)
    numerators = (mantissas[None, :] << np.arange(octaves, dtype=np.int64)[:, None]).ravel()
    one = np.int64(1) << np.int64(octaves + PRECISION)
    return Grid(np.append(numerators, one), np.array(one), n, weighted=True)


def ranks_by_weight(
    scores: np.ndarray,
    weights: np.ndarray,
    calibration: WeightedCalibration,
    direction: Direction,
    draws: np.ndarray | None = None,
) -> np.ndarray:
    """Rank in the grid of each audit document's weighted conformal p-value (Tibshirani et al. 2019).

    With calibration scores s_i of weights w_i, a document of score s and weight w has, in direction `members`,

        p = (sum of w_i 1{s_i >= s} + w) / (sum of w_i + w),

    and in direction `clean` the same with s_i <= s; with draws a random share of equal scores and of the document
    itself counts. p is rounded up to `weighted_grid`; with equal weights the unrounded p is k / (n + 1) of `ranks`.

    Guaranteed: if the weight of every document is the density ratio of audited null documents to calibration documents
    at the features of the weight, then P(p <= t) <= t for a null document, for every t. BH on such p-values is proved
    asymptotically (Jin & Candes 2023); in simulations it kept its level at every size. With estimated weights nothing
    is proved.

    Args:
        scores: shape (documents,), finite or infinite.
        weights: int64, (documents,), from `weight_levels`, on the same scale as those of the calibration.
        calibration: result of `calibrate_weighted`.
        direction: `members` or `clean`.
        draws: as in `ranks`.

    Returns:
        int64, (documents,), in 1..grid.size.

    Raises:
        UserError: a NaN among the scores.
    """
    values = np.asarray(scores, dtype=np.float64)
    refuse_nan(values, "audit")
    left = calibration.reached[np.searchsorted(calibration.scores, values, side="left")]
    right = calibration.reached[np.searchsorted(calibration.scores, values, side="right")]
    more, as_extreme = (
        (calibration.total - right, calibration.total - left) if direction == "members" else (left, right)
    )
    weight = np.asarray(weights, dtype=np.int64)
    if draws is None:
        above: np.ndarray = as_extreme + weight
    else:
        share = (draws + np.uint64(1)).astype(np.float64) / 2.0**32
        above = more + share * (as_extreme - more + weight)
    return _places(above / (calibration.total + weight), calibration.grid)


def least_ranks(weights: np.ndarray, calibration: WeightedCalibration) -> np.ndarray:
    """Rank of the smallest possible p-value of each document, w / (sum of w_i + w): int64, (documents,)."""
    weight = np.asarray(weights, dtype=np.int64)
    return _places(weight / (calibration.total + weight), calibration.grid)


def _places(p: np.ndarray, grid: Grid) -> np.ndarray:
    return np.searchsorted(grid.values, p, side="left").astype(np.int64) + 1


def weighted_resolution(least: RankCounts, alpha: Fraction, factor: Fraction) -> tuple[int, int]:
    """Minimum number of documents of a selection, and approximate calibration documents needed to select 1%.

    The R documents with the smallest possible p-values are selected if the last of these is at most
    alpha R / (factor m). The second number assumes more calibration documents with the same weights.

    Args:
        least: counts of `least_ranks` of the m audit documents, with those without scores at p = 1.
        alpha: exact, in (0, 1).
        factor: BH runs at alpha / factor.

    Returns:
        the fewest documents, above m where nothing can be selected; calibration documents, >= 1.
    """
    m, grid = least.m, least.grid
    occupied = np.flatnonzero(least.counts)
    reached = np.cumsum(least.counts)[occupied].tolist()
    needs = [math.ceil(grid.p(int(k) + 1) * m * factor / alpha) for k in occupied]
    within = (need for need, here in zip(needs, reached, strict=True) if need <= here)
    fewest = next(within, max(m + 1, min(needs)))
    hundredth = max(1, m // 100)
    p = grid.p(int(occupied[np.searchsorted(reached, hundredth)]) + 1)
    level = alpha * hundredth / (factor * m)
    if p == 1:
        return fewest, 1 if level >= 1 else least.n
    return fewest, max(1, math.ceil(least.n * (1 / level - 1) * p / (1 - p)))
