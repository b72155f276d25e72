"""e-BH with conformal e-values: what a selection must pay for dependence of any kind."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

from pipeline.selection.conformal import Grid
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.step_up import EXACT_HARMONIC, harmonic_bound


def dependence_factor(grid: Grid, m: int, alpha: Fraction) -> Fraction:
    """The factor L for which BH at alpha / L is e-BH with valid e-values (Wang & Ramdas 2022); never below it.

    e-BH selects the R* = max{R : #{e_i >= m / (alpha R)} >= R} largest e-values. Its FDR is at most alpha times the
    share of nulls under any dependence, if E e <= 1 for every null document (their theorem 2). A conformal
    p has P(p <= t) <= t for all t, so for a function e that falls in p over the grid v_1 <= v_2 <= ..., E e(p) is
    at most its value with mass v_k - v_{k-1} at each v_k (summation by parts, v_0 = 0). Two such functions:

    - e(p) = 1 / (p L) at the first K ranks and 0 beyond, with L = sum over k <= K of (1 - v_{k-1} / v_k); on the
      uniform grid L = 1 + 1/2 + ... + 1/K. There E e = 1 without ties. e >= m / (alpha R) says that
      m p L <= alpha R, so e-BH is BH at alpha / L. K is the least with v_{K+1} L > alpha, so that no
      document beyond it could be selected.
    - e(p) = m / (alpha j), j = ceil(p m H / alpha) if that is at most m, else 0, with H = 1 + 1/2 + ... + 1/m:
      E e <= sum over j of m / (alpha j) times alpha / (m H) = 1. e-BH is then BH at alpha / H, which is the
      procedure of Benjamini & Yekutieli (2001).

    The smaller factor is taken. It depends on the grid, m and alpha only, which are fixed before a score is
    read, so the choice costs nothing: `ebh` selects all that `by` does, and more when m exceeds K, about
    alpha (n + 1) / log(alpha (n + 1)).

    Bashari et al.'s (2023) conformal e-values, which select what BH does, are valid only jointly, for
    documents exchangeable with the calibration documents together; these are valid one by one.

    Args:
        grid: the p-values that documents can have.
        m: audit documents, >= 1.
        alpha: exact, in (0, 1).

    Returns:
        a rational >= 1; exact for K <= 128 and m <= 128, otherwise at most 1e-9 above.
    """
    v = grid.values
    shares = 1 - np.concatenate([[0.0], v[:-1] / v[1:]])
    # a margin above the rounding of v and of the running sum: K may be one too large, which is as valid
    beyond = v[1:] * np.cumsum(shares)[:-1] > float(alpha) * (1 + 1e-9)
    last = int(np.argmax(beyond)) + 1 if beyond.any() else grid.size
    if last <= EXACT_HARMONIC:
        p = [grid.p(k) for k in range(last + 1)]
        total = sum((1 - before / here for before, here in pairwise(p)), Fraction(0))
    else:
        total = Fraction(math.fsum(shares[:last])) + Fraction(last, 2**50)  # each share is off by less than 2^-51
    return min(total, harmonic_bound(m))


def largest_e_rank(counts: RankCounts, alpha: Fraction, before: int) -> tuple[Fraction, int]:
    """The factor L and the last rank of e-LOND: the k largest e-values with e_(k) >= m / (alpha (k + before)).

    e is one of the functions of `dependence_factor` at this alpha. It must not depend on `before`: scans may share
    calibration documents, and where earlier ones selected much the p-values of this one are small too, so that a
    function that were fitted to `before` could have a mean above 1. So no document is selected beyond where e is 0,
    which is the largest p-value that e-BH could ever select without `before`.

    With before = 0 this is e-BH. Guaranteed over a schedule with levels alpha_t that sum to alpha: FDR <= alpha under
    any dependence, as a selected null counts 1 / (all selected) <= 1 / (k + before) <= alpha_t e / m, of mean at most
    alpha_t / m (Xu & Ramdas 2024, for one document at a time).

    Args:
        counts: of the m >= 1 audit documents.
        alpha: of this scan, exact, in (0, 1).
        before: documents that earlier scans selected, >= 0.
    """
    m, grid = counts.m, counts.grid
    factor = dependence_factor(grid, m, alpha)
    reached = np.cumsum(counts.counts)
    k = grid.at_most(alpha / factor)
    while k > 0 and int(reached[k - 1]) > 0:
        allowed = min(k, grid.at_most(alpha * (int(reached[k - 1]) + before) / (m * factor)))
        if allowed == k:
            return factor, k
        k = allowed
    return factor, 0
