"""Weighted calibration: documents that differ from the audited ones count as much as they resemble them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.config.selection import Direction
from pipeline.errors import UserError
from pipeline.selection.conformal import Grid, RankCounts, calibrate, refuse_nan

LEVELS = 1 << 20
"""A weight is a whole number of parts of the largest, in 1..LEVELS: sums are exact, in any order."""

PRECISION = 10
"""Bits of a p-value after its first: it is rounded up to one of them, by less than 1 in 2^PRECISION."""

MOST = 1 << 30
"""Calibration documents, at most: sums of their weights stay below 2^51, exact in all that reads them."""

FEWEST_EFFECTIVE = 50
"""Below this effective number of calibration documents a few of them decide all, and the guarantee is not supported."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightedCalibration:
    """The calibration scores, what they weigh, and the p-values that documents can have."""

    scores: np.ndarray  # float64, (n,), ascending
    reached: np.ndarray  # int64, (n + 1,): the weight of the first i scores together
    effective: float  # (sum w)^2 / sum w^2, in [1, n]
    grid: Grid

    @property
    def total(self) -> int:
        """The weight of all calibration documents."""
        return int(self.reached[-1])


def weight_levels(weights: np.ndarray, largest: float) -> np.ndarray:
    """Weights as whole numbers of parts of the largest.

    Args:
        weights: float, (documents,), finite and >= 0; those above `largest` count as it.
        largest: > 0.

    Returns:
        int64, (documents,), in 1..LEVELS.
    """
    return np.clip(np.round(np.asarray(weights, np.float64) / largest * LEVELS), 1, LEVELS).astype(np.int64)


def calibrate_weighted(scores: np.ndarray, weights: np.ndarray) -> WeightedCalibration:
    """Sort the calibration scores and add up their weights, once, for `ranks_by_weight`.

    Args:
        scores: shape (n,), n >= 1, of the null role's documents.
        weights: int64, (n,), from `weight_levels`, of the same scale as those of the audited documents.

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
    """The p-values of weighted calibration: numbers of PRECISION + 1 binary digits from 1 / (total + 1) up to 1.

    A weighted p-value depends on the weight of its own document, so an audit has as many different ones as documents.
    Each is rounded up to this grid: it stays valid, and the counts of ranks that an audit adds up have the same few
    ten thousand places for any number of documents.
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

    and in direction `clean` the same with s_i <= s; with draws a drawn share of the equal ones and of the document
    itself counts. p is rounded up to `weighted_grid`; with equal weights it is k / (n + 1) of
    `ranks` before that.

    Guaranteed: if the weight of every document is the density of audited null documents over that of calibration
    documents at what the weight was computed from, then P(p <= t) <= t for a null document, for every t. BH on such
    p-values is proved as numbers grow (Jin & Candes 2023); in simulations it kept its level at every size. With
    estimated weights nothing is proved.

    Args:
        scores: shape (documents,), finite or infinite.
        weights: int64, (documents,), from `weight_levels`, of the same scale as those of the calibration.
        calibration: from `calibrate_weighted`.
        direction: `members` or `clean`.
        draws: as for `ranks`.

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
    """Rank of the smallest p-value that each document can have, w / (sum of w_i + w): int64, (documents,)."""
    weight = np.asarray(weights, dtype=np.int64)
    return _places(weight / (calibration.total + weight), calibration.grid)


def _places(p: np.ndarray, grid: Grid) -> np.ndarray:
    return np.searchsorted(grid.values, p, side="left").astype(np.int64) + 1


def weighted_resolution(least: RankCounts, alpha: Fraction, factor: Fraction) -> tuple[int, int]:
    """The fewest documents that a selection can hold, and about how many calibration documents 1% would take.

    The R documents of the smallest possible p-values are selected if the last of these is at most
    alpha R / (factor m). Exact, but for the second figure, which takes more calibration documents of the same weights.

    Args:
        least: counts of `least_ranks` of the m audit documents, those without scores at p = 1.
        alpha: exact, in (0, 1).
        factor: BH runs at alpha / factor.

    Returns:
        the fewest documents, above m where nothing can be selected; calibration documents, >= 1.
    """
    m, grid = least.m, least.grid
    occupied = np.flatnonzero(least.counts)
    reached = np.cumsum(least.counts)[occupied].tolist()
    needs = [math.ceil(grid.p(int(k) + 1) * m * factor / alpha) for k in occupied]
    fewest = m + 1
    before = 0
    for need, here in zip(needs, reached, strict=True):
        if max(before + 1, need) <= here:
            fewest = max(before + 1, need)
            break
        before = here
    else:
        fewest = max(fewest, min(needs))
    hundredth = max(1, m // 100)
    p = grid.p(int(occupied[np.searchsorted(reached, hundredth)]) + 1)
    level = alpha * hundredth / (factor * m)
    if p == 1:
        return fewest, 1 if level >= 1 else least.n
    return fewest, max(1, math.ceil(least.n * (1 / level - 1) * p / (1 - p)))
