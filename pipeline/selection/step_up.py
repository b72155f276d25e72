"""Step-up selection on rank counts in exact integers, and e-BH, which is valid under any dependence."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np

from pipeline.selection.conformal import Grid, RankCounts

EXACT_HARMONIC = 128
EULER_GAMMA = 0.5772156649015329
ONE = Fraction(1)


def step_up(counts: RankCounts, alpha: Fraction, pi0: Fraction = ONE) -> int:
    """The largest selected rank: k* = max{k : R_k > 0 and m p_k pi0 <= alpha R_k}, or 0.

    p_k is the p-value of rank k, k / (n + 1) on the uniform grid, and R_k the number of audit documents at
    ranks 1..k; those at ranks <= k* are selected. This is Benjamini & Hochberg's (1995) step-up procedure at
    level alpha / pi0.

    Guaranteed with pi0 = 1: FDR <= alpha (true share of nulls), if the null audit documents and the
    calibration documents are exchangeable given the scores of the others: such p-values are positively
    dependent (PRDS; Bates et al. 2023; Marandon et al. 2024). Without ties it is an equality when
    alpha (n + 1) / m is an integer. With an estimated pi0 the guarantee is that of the estimator.

    The condition is k <= g(k) with g(k) = #{j : p_j <= alpha R_k / (m pi0)}, which is nondecreasing in k. So k*
    is the greatest fixed point of g, and iterating k -> g(k) from the last rank ends there, in a few steps of
    exact integers; at most one per rank.

    Args:
        counts: counts of the m audit documents; m = 0 selects nothing.
        alpha: exact, > 0.
        pi0: exact, > 0; values above 1 make the selection stricter.

    Returns:
        k* in 0..grid.size; 0 if nothing is selected.

    Example:
        >>> from fractions import Fraction
        >>> import numpy as np
        >>> counts = seenset.RankCounts(np.array([3, 0, 1, 0, 0, 0, 0, 0, 0, 1]))
        >>> k = seenset.step_up(counts, Fraction(1, 4))
        >>> k, counts.at_most(k)  # last selected rank, selected documents
        (1, 3)
        >>> seenset.step_up(counts, Fraction(1, 4), pi0=Fraction(1, 2))
        4
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
    """An upper bound of 1 + 1/2 + ... + 1/m: exact to m = 128, above that within 1e-14.

    The bound is ln m + gamma + 1/(2m) - 1/(12 m^2) + 1/(120 m^4), which exceeds the sum because the terms
    of this expansion alternate and envelop it, increased by more than its floating-point error. BY divides
    alpha by it, so that the error can only reduce the selection. Requires m >= 1.
    """
    if m <= EXACT_HARMONIC:
        return sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0))
    x = float(m)
    terms = (math.log(x), EULER_GAMMA, 1 / (2 * x), -1 / (12 * x**2), 1 / (120 * x**4))
    return Fraction(math.fsum(terms) * (1 + 4 * math.ulp(1.0)))


def minimum_selectable(against: int | Grid, m: int, alpha: Fraction, pi0: Fraction | float = ONE) -> int:
    """Minimum number of documents of a nonempty selection: ceil(pi0 m p_1 / alpha), exact.

    p_1 is the smallest p-value, 1 / (n + 1) against n calibration documents, so `step_up` never selects fewer
    documents, for any evidence. A result above m means that nothing can be selected.

    Args:
        against: number of calibration documents, >= 1, or the grid of p-values.
        m: audit documents, >= 1.
        alpha: exact, in (0, 1).
        pi0: null proportion, > 0; a float is used with its exact binary value.
    """
    smallest = against.p(1) if isinstance(against, Grid) else Fraction(1, against + 1)
    return math.ceil(Fraction(pi0) * m * smallest / alpha)


def dependence_factor(grid: Grid, m: int, alpha: Fraction) -> Fraction:
    """An upper bound of the factor L for which BH at alpha / L is e-BH with valid e-values (Wang & Ramdas 2022).

    e-BH selects the R* = max{R : #{e_i >= m / (alpha R)} >= R} largest e-values. Its FDR is at most alpha times the
    share of nulls under any dependence, if E e <= 1 for every null document (their theorem 2). A conformal
    p has P(p <= t) <= t for all t, so for a function e that decreases in p over the grid v_1 <= v_2 <= ..., E e(p) is
    at most its value with mass v_k - v_{k-1} at each v_k (summation by parts, v_0 = 0). Two such functions:

    - e(p) = 1 / (p L) at the first K ranks and 0 beyond, with L = sum over k <= K of (1 - v_{k-1} / v_k); on the
      uniform grid L = 1 + 1/2 + ... + 1/K. There E e = 1 without ties. e >= m / (alpha R) is equivalent to
      m p L <= alpha R, so e-BH is BH at alpha / L. K is the smallest with v_{K+1} L > alpha, so that no
      document beyond it could be selected.
    - e(p) = m / (alpha j), j = ceil(p m H / alpha) if that is at most m, else 0, with H = 1 + 1/2 + ... + 1/m:
      E e <= sum over j of m / (alpha j) times alpha / (m H) = 1. e-BH is then BH at alpha / H, which is the
      procedure of Benjamini & Yekutieli (2001).

    The smaller factor is used. It depends only on the grid, m and alpha, which are fixed before a score is
    read, so the choice is free: `ebh` selects everything that `by` selects, and more if m exceeds K, about
    alpha (n + 1) / log(alpha (n + 1)).

    Bashari et al.'s (2023) conformal e-values, which select the same as BH, are valid only jointly, for
    documents jointly exchangeable with the calibration documents; these are valid individually.

    Args:
        grid: the p-values that documents can have.
        m: audit documents, >= 1.
        alpha: exact, in (0, 1).

    Returns:
        A rational >= 1; exact for K <= 128 and m <= 128, otherwise at most 1e-9 too large.
    """
    v = grid.values
    shares = 1 - np.concatenate([[0.0], v[:-1] / v[1:]])
    # the margin exceeds the rounding of v and of the running sum: K may be one too large, which is also valid
    beyond = v[1:] * np.cumsum(shares)[:-1] > float(alpha) * (1 + 1e-9)
    last = int(np.argmax(beyond)) + 1 if beyond.any() else grid.size
    if last <= EXACT_HARMONIC:
        p = [grid.p(k) for k in range(last + 1)]
        total = sum((1 - before / here for before, here in pairwise(p)), Fraction(0))
    else:
        total = Fraction(math.fsum(shares[:last])) + Fraction(last, 2**50)  # each share has an error below 2^-51
    return min(total, harmonic_bound(m))
