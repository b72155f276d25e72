"""The right-boundary procedure (Liang & Nettleton 2012): Storey's estimate at a lambda chosen by the p-values."""

from __future__ import annotations

from fractions import Fraction

from pipeline.selection.conformal import RankCounts
from pipeline.selection.guarantees import IN_THE_LIMIT, MANY, ON_AVERAGE, UNPROVED, Guarantee
from pipeline.selection.procedures.estimating import least_storey, storey_cut
from pipeline.selection.procedures.record import Decision, Factor, Given, Procedure, Rule, adaptive, exact_curve

LAMBDAS = tuple(Fraction(step, 20) for step in range(1, 20))


def right_boundary(counts: RankCounts) -> tuple[Fraction, Fraction]:
    """Storey's estimate of pi0 at the first lambda of .05, .10, ..., .95 where it does not decrease; exact, uncapped.

    The estimate at each lambda is that of `estimating.storey`. It decreases while there are members among the p-values
    above lambda, and stops decreasing when only nulls are left; the last lambda is used if it always decreases. With
    few calibration documents two lambdas may share a p-value, and then the estimate does not decrease.

    Guaranteed: for independent uniform p-values of nulls, BH at alpha / pi0 has FDR <= alpha for every m, since lambda
    is a stopping time of the p-values below it (Liang & Nettleton 2012). Conformal p-values share their calibration
    documents, so for them nothing is guaranteed at any fixed n.

    Args:
        counts: counts of m >= 1 audit documents.

    Returns:
        The estimate, a positive rational that can exceed 1, and its lambda.
    """
    m, grid, below = counts.m, counts.grid, 0
    above, estimate = m, Fraction(0)
    for index, lambda_ in enumerate(LAMBDAS):
        t, cut = storey_cut(grid, lambda_)
        above -= int(counts.counts[below:cut].sum())
        before, estimate, below = estimate, (1 + above) / (m * (1 - t)), cut
        if index and estimate >= before:
            break
    return estimate, lambda_


def _decide(given: Given) -> Decision:
    """BH at alpha / pi0, pi0 from `right_boundary`: FDR <= alpha in the limit."""
    pi0, lambda_ = right_boundary(given.counts)
    return adaptive("right_boundary", given, pi0, {"lambda": float(lambda_)})


def _least(rule: Rule, n: int, m: int) -> Fraction:
    return least_storey(rule.grid(n), m, LAMBDAS[1])  # the first lambda at which the estimate can stop


RIGHT_BOUNDARY = Procedure(
    "right_boundary",
    Guarantee(
        "asymptotic",
        MANY,
        f"{IN_THE_LIMIT}, with the share of nulls estimated above the first p-value beyond which it falls no further; "
        f"{UNPROVED} {ON_AVERAGE}",
    ),
    _decide,
    factor=Factor(least=_least, uncapped=True),
    curve=exact_curve,
)
