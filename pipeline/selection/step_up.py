"""Step-up selection on rank counts, decided in integers: no tie is lost to rounding."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from pipeline.selection.conformal import Grid
from pipeline.selection.rank_counts import RankCounts

EXACT_HARMONIC = 128
EULER_GAMMA = 0.5772156649015329
ONE = Fraction(1)


def step_up(counts: RankCounts, alpha: Fraction, pi0: Fraction = ONE) -> int:
    """The largest rank that is selected: k* = max{k : R_k > 0 and m p_k pi0 <= alpha R_k}, or 0.

    p_k is the p-value of rank k, k / (n + 1) on the uniform grid, and R_k the number of audit documents at
    ranks 1..k; those at ranks <= k* are selected. This is Benjamini & Hochberg's (1995) step-up procedure at
    level alpha / pi0.

    Guaranteed with pi0 = 1: FDR <= alpha (true share of nulls), if the null audit documents and the
    calibration documents are exchangeable given the scores of the others: such p-values are positively
    dependent (PRDS; Bates et al. 2023; Marandon et al. 2024). Without ties it is an equality when
    alpha (n + 1) / m is an integer. With an estimated pi0 the guarantee is that of the estimator.

    The condition says k <= g(k) with g(k) = #{j : p_j <= alpha R_k / (m pi0)}, which never falls as k grows.
    So k* is the greatest fixed point of g, and k -> g(k) from the last rank downwards ends there, in a few
    steps of exact integers; at most one a rank.

    Args:
        counts: of the m audit documents; m = 0 selects nothing.
        alpha: exact, > 0.
        pi0: exact, > 0; above 1 it makes the selection stricter.

    Returns:
        k* in 0..grid.size; 0 when nothing is selected.
    """
    m, grid = counts.m, counts.grid
    if m == 0:
        return 0
    reached = np.cumsum(counts.counts)
    share = alpha / (m * pi0)
    k = grid.size
    while k > 0:
        allowed = grid.at_most(share * int(reached[k - 1]))
        if allowed == k:
            break
        k = allowed
    return k


@lru_cache(maxsize=256)
def harmonic_bound(m: int) -> Fraction:
    """1 + 1/2 + ... + 1/m, never below it: exact to m = 128, above that a bound within 1e-14 of it.

    The bound is ln m + gamma + 1/(2m) - 1/(12 m^2) + 1/(120 m^4), which exceeds the sum because the terms
    of this expansion alternate and envelop it, enlarged by more than its floating-point error. BY divides
    alpha by it, so that the error can only select less. Needs m >= 1.
    """
    if m <= EXACT_HARMONIC:
        return sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0))
    x = float(m)
    terms = (math.log(x), EULER_GAMMA, 1 / (2 * x), -1 / (12 * x**2), 1 / (120 * x**4))
    return Fraction(math.fsum(terms) * (1 + 4 * math.ulp(1.0)))


def minimum_selectable(against: int | Grid, m: int, alpha: Fraction, pi0: Fraction | float = ONE) -> int:
    """The fewest documents that a selection can hold if it holds any: ceil(pi0 m p_1 / alpha), exact.

    p_1 is the smallest p-value, 1 / (n + 1) against n calibration documents, so fewer documents than this
    can never pass `step_up`, however strong the evidence. A result above m says that nothing can be selected
    at all.

    Args:
        against: calibration documents, >= 1, or the grid of p-values.
        m: audit documents, >= 1.
        alpha: exact, in (0, 1).
        pi0: null proportion, > 0; a float is taken at its exact binary value.
    """
    smallest = against.p(1) if isinstance(against, Grid) else Fraction(1, against + 1)
    return math.ceil(Fraction(pi0) * m * smallest / alpha)
