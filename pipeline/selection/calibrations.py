"""The ways to calibrate p-values, one record each: among which known documents an audited one is ranked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.config.selection import SelectionConfig
from pipeline.selection.conformal import Grid, calibrate, ranks
from pipeline.selection.groups import calibrate_by_group, ranks_by_group
from pipeline.selection.passes import Batch

Ranking = tuple[Callable[[Batch], np.ndarray], int | Grid]
"""A function from a batch to its ranks, and the number of calibration documents or grid that they refer to."""

UNIT = 62  # p-values are multiples of 2^-62


def _pooled(selection: SelectionConfig, seed: int, known: Batch) -> Ranking:
    calibration = calibrate(known.first)

    def rank(batch: Batch) -> np.ndarray:
        return ranks(batch.first, calibration, selection.direction, batch.draws(selection, seed))

    return rank, calibration.size


def _by_group(selection: SelectionConfig, seed: int, known: Batch) -> Ranking:
    assert known.groups is not None  # the configuration names their columns
    groups = calibrate_by_group(known.first, known.groups)

    def rank(batch: Batch) -> np.ndarray:
        assert batch.groups is not None
        return ranks_by_group(batch.first, batch.groups, groups, selection.direction, batch.draws(selection, seed))

    return rank, groups.grid


@dataclass(frozen=True, slots=True)
class Calibration:
    """A way to calibrate p-values: which columns it reads, and what its p-values are."""

    name: str
    ranking: Callable[[SelectionConfig, int, Batch], Ranking] = _pooled
    grouped: bool = False  # ranks a document among those of its group: reads their groups
    weighted: bool = False  # counts calibration documents by weights: reads them
    conditional: bool = False  # for the calibration documents at hand, and not on average over sets of them

    @property
    def plain(self) -> bool:
        """Whether p-values are k / (n + 1) against all n calibration documents."""
        return not (self.grouped or self.weighted or self.conditional)

    @property
    def ranks_together(self) -> bool:
        """Whether all documents are ranked among the same ones, each counted once."""
        return not (self.grouped or self.weighted)

    @property
    def valid_on_average(self) -> bool:
        """Whether each p-value by itself is proved to be valid on average over calibration sets."""
        return not (self.weighted or self.conditional)

    def delta(self, selection: SelectionConfig) -> Fraction | None:
        """The share of calibration sets for which the guarantee may fail, exact; None where it is an average."""
        return Fraction(repr(selection.delta)) if self.conditional else None

    def regridded(self, selection: SelectionConfig, n: int) -> Grid | None:
        """The p-values of the ranks among n documents, where they are not those that `ranking` refers to."""
        delta = self.delta(selection)
        return None if delta is None else simes_grid(n, delta)


CALIBRATIONS = {
    calibration.name: calibration
    for calibration in (
        Calibration("pooled"),
        Calibration("by_group", _by_group, grouped=True),
        Calibration("conditional", conditional=True),
        Calibration("weighted", weighted=True),
    )
}


def calibration_of(name: str) -> Calibration:
    """The calibration of a name, as a configuration or an answer holds it."""
    return CALIBRATIONS[name]


def simes_grid(n: int, delta: Fraction) -> Grid:
    """The p-values of Bates et al. 2023 (Annals of Statistics 51(1), section 3), by their Simes adjustment.

    A null document's conformal rank K has, given the calibration documents, P(K <= k) = U_(k), the k-th
    smallest of n uniform variables. Their theorem replaces k / (n + 1) by b_k for constants
    b_1 <= ... <= b_n with P(U_(1) <= b_1, ..., U_(n) <= b_n) >= 1 - delta. The Simes constants, from Sarkar's
    (2008) generalised Simes inequality with s = max(1, n // 2), are

        b_(n+1-i) = 1 - (delta i (i-1)...(i-s+1) / (n (n-1)...(n-s+1)))^(1/s), i = 1..n, and b_(n+1) = 1.

    Guaranteed: if the calibration documents and the null audit documents are independent draws of one
    distribution without ties, then with probability 1 - delta over the calibration documents (it is an
    equality before rounding) every null p-value is, given them, independent of the others and
    P(p <= t) <= t for all t. On that event BH's FDR given the calibration documents is at most alpha times
    the share of nulls. Ties in the scores are conservative.

    The price is the smallest p-value: 1 - delta^(1/s), about 2 ln(1/delta) / n, instead of 1 / (n + 1).

    Each b_k is computed in float64, enlarged by more than its error and rounded up to a multiple of 2^-62, so
    it is exact to work with and never below the theorem's.

    Args:
        n: calibration documents, >= 1.
        delta: share of calibration sets for which the guarantee may fail, in (0, 1).

    Returns:
        a grid of n + 1 ranks, the same ranks as the uniform grid's: use `RankCounts.over`.
    """
    s = max(1, n // 2)
    i = np.arange(n, s, -1)  # from i to i - 1 the ratio of products changes by (i - s) / i; it is 1 at i = n
    logs = np.concatenate([[0.0], np.cumsum(np.log((i - s) / i))])  # at i = n, n - 1, ..., s
    numerators = np.full(n + 1, 1 << UNIT, dtype=np.int64)
    numerators[: logs.size] = _raised(logs, s, delta)
    return Grid(np.maximum.accumulate(numerators), np.array(1 << UNIT), n, delta=delta)


def smallest_simes(n: int, delta: Fraction) -> Fraction:
    """The smallest p-value of `simes_grid`, alone: 1 - delta^(1/s), rounded up; n >= 1."""
    return Fraction(int(_raised(np.zeros(1), max(1, n // 2), delta)[0]), 1 << UNIT)


def _raised(logs: np.ndarray, s: int, delta: Fraction) -> np.ndarray:
    """The b_k of the logarithms of their products, rounded up to whole multiples of 2^-62: int64."""
    log_delta = math.log1p(delta - 1) if delta > Fraction(1, 2) else math.log(delta)  # exact to an ulp near 1 too
    bounds = -np.expm1((log_delta + logs) / s)
    error = (np.arange(logs.size) + 16) * 2.0**-52  # relative; a running sum of one sign loses half an ulp a term
    raised = np.ceil(np.ldexp(bounds * (1 + error), UNIT))
    return np.minimum(raised, 2.0**UNIT).astype(np.int64)
