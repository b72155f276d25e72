"""Benjamini & Hochberg's step-up procedure, and its two forms for any dependence between documents."""

from __future__ import annotations

from fractions import Fraction

from pipeline.selection.conformal import RankCounts
from pipeline.selection.guarantees import EXCHANGEABLE, OF_NULLS, ON_AVERAGE, ONE_BY_ONE, SHARE, Guarantee
from pipeline.selection.procedures.record import Decision, Factor, Given, Procedure, Rule, decision, exact_curve
from pipeline.selection.procedures.versions import BY_STEP_UP
from pipeline.selection.step_up import ONE, dependence_factor, harmonic_bound, step_up

MOST_COUNTED = 1_000_000
"""Maximum calibration documents for which the factor of `ebh` is computed from the grid; above, it is that of `by`."""

_KEPT = f"{SHARE} is at most alpha{OF_NULLS}, for any number of documents"


def bh(counts: RankCounts, alpha: Fraction) -> Decision:
    """Benjamini & Hochberg 1995: FDR <= (share of nulls) alpha under exchangeability."""
    return decision("bh", counts, alpha, step_up(counts, alpha), ONE, {})


def _by(given: Given) -> Decision:
    """Benjamini & Yekutieli 2001: BH at alpha / H_m; FDR <= (share of nulls) alpha, any dependence."""
    counts, alpha = given.counts, given.alpha
    harmonic = harmonic_bound(counts.m)
    rank = step_up(counts, alpha / harmonic)
    return decision("by", counts, alpha, rank, ONE, {"harmonic_sum": float(harmonic)}, harmonic)


def _ebh(given: Given) -> Decision:
    """Wang & Ramdas 2022 on conformal e-values: FDR <= (share of nulls) alpha, any dependence."""
    counts, alpha = given.counts, given.alpha
    factor = dependence_factor(counts.grid, counts.m, alpha)
    rank = step_up(counts, alpha / factor)
    return decision("ebh", counts, alpha, rank, ONE, {"dependence_factor": float(factor)}, factor)


def _dependence(rule: Rule, n: int, m: int) -> Fraction:
    return harmonic_bound(m) if n > MOST_COUNTED else dependence_factor(rule.grid(n), m, rule.alpha)


BH = Procedure(
    "bh",
    Guarantee("finite-sample", EXCHANGEABLE, f"{_KEPT}. {ON_AVERAGE}"),
    lambda given: bh(given.counts, given.alpha),
    curve=exact_curve,
    smooths=True,
    weighs=True,
    versions=BY_STEP_UP,
)
BY = Procedure(
    "by",
    Guarantee("finite-sample", ONE_BY_ONE, f"{_KEPT} and any dependence between them. {ON_AVERAGE}"),
    _by,
    factor=Factor(lambda rule, n, m: harmonic_bound(m)),
    curve=exact_curve,
    smooths=True,
)
EBH = Procedure(
    "ebh",
    Guarantee(
        "finite-sample",
        ONE_BY_ONE,
        f"{_KEPT} and any dependence between them; whatever procedure by selects is selected here too. {ON_AVERAGE}",
    ),
    _ebh,
    factor=Factor(_dependence, steps=True),
    curve=exact_curve,
)
