"""Procedures that estimate the share of nulls from documents for which the null is known not to hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from pipeline.errors import UserError
from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.folds import Answer, Fold, Query, SelectionInput
from pipeline.selection.guarantees import ALIKE, IN_THE_LIMIT, ON_AVERAGE, SHARE, UNPROVED, Guarantee
from pipeline.selection.procedures.record import Decision, Factor, Given, Procedure, adaptive, curve_at_factor
from pipeline.selection.ranked import ranked
from pipeline.selection.thresholds import Moments

HALF_BITS = 31  # half the bits of a numerator, which has at most 62


@dataclass(frozen=True, slots=True)
class KnownMembers:
    """A moment estimate of pi0 and its intermediate values."""

    theta: float  # `known_members`: shape of the known ones' density theta (1 - p)^(theta - 1); `known_scores`: 1 / pi0
    unclipped: float  # the raw estimate; it can be negative or exceed 1
    pi0: Fraction  # the estimate if it is in (0, 1], otherwise 1


def known_members(counts: RankCounts, known: RankCounts) -> KnownMembers:
    """A moment estimate of pi0 from p-values, with documents for which the null is known not to hold.

        pi0 = (mean p - mu1) / (mu0 - mu1), theta = 1 / mu1 - 1,

    with mu1 the mean p of the known documents, 1 / (1 + theta) for a density theta (1 - p)^(theta - 1), and mu0
    the mean p of a null document, which is (n + 2) / (2 (n + 1)) for a conformal p and 1/2 only in the limit.
    PTDI's equations use mean scores (`known_scores`; docs/methods.md, section 3.6); mean p-values are robust to a few
    extreme scores. A raw estimate of 0 or less, or theta <= 1, which means that the known documents do not tend to
    small p, gives pi0 = 1.

    Guaranteed: nothing at any fixed m. The estimate is consistent if the hidden documents have the mean p of the
    known ones; if their mean is larger, for example because hidden members were seen less often, it is too high, and
    if it is smaller, too low: then the FDR exceeds alpha.

    By group mu0 is averaged over the groups with the numbers of their calibration documents.

    All means are exact rationals: rounding could change a raw estimate of 0 to a small positive number, which would
    select every document.

    Args:
        counts: counts of m >= 1 audit documents.
        known: counts of m >= 1 documents that are known not to be nulls, over the same grid.
    """
    grid = counts.grid
    mean, mu1 = _mean_p(grid, counts.counts), _mean_p(grid, known.counts)
    mu0 = _mean_p(grid, np.ones(grid.size, dtype=np.int64))
    theta = 1 / mu1 - 1
    unclipped = (mean - mu1) / (mu0 - mu1) if theta > 1 else Fraction(1)
    pi0 = min(unclipped, Fraction(1)) if unclipped > 0 else Fraction(1)
    return KnownMembers(theta=float(theta), unclipped=float(unclipped), pi0=pi0)


def known_scores(null: Moments, known: Moments, audit: Moments, quarantined: int = 0) -> KnownMembers:
    """PTDI's estimate of pi0 from scores, with documents for which the null is known not to hold (eqs. 16-17).

        raw = (mu1 - mu) / (mu1 - mu0)
        Var = (raw^2 s0^2 / n0 + (1 - raw)^2 s1^2 / n1 + s^2 / m) / (mu1 - mu0)^2
        theta = 1 / raw - Var / raw^3, pi0 = 1 / theta

    with mean and sample variance mu0, s0^2 of the n0 calibration documents, mu1, s1^2 of the n1 known ones and mu, s^2
    of the m audited ones. raw <= 0, theta <= 1 or mu0 = mu1 gives pi0 = 1. The published correction is subtracted
    from 1 / raw, so it raises pi0. Quarantined documents have no scores and count as nulls.

    Guaranteed: nothing at any fixed m. The estimate is consistent if the hidden documents have the mean score of the
    known ones, and nulls that of the calibration documents.

    Args:
        null: moments of the calibration documents' scores.
        known: moments of the known documents' scores.
        audit: moments of the audited documents' scores.
        quarantined: number of audited documents without scores.

    Returns:
        `unclipped` is raw.
    """
    difference = known.mean - null.mean
    raw = (known.mean - audit.mean) / difference if difference else 1.0
    if raw <= 0 or not difference or not audit.count:
        return KnownMembers(theta=1.0, unclipped=raw, pi0=Fraction(1))
    parts = (
        raw**2 * null.variance / null.count,
        (1 - raw) ** 2 * known.variance / known.count,
        audit.variance / audit.count,
    )
    theta = 1 / raw - math.fsum(parts) / difference**2 / raw**3
    share = 1 / max(1.0, theta)
    pi0 = (share * audit.count + quarantined) / (audit.count + quarantined)
    return KnownMembers(theta=theta, unclipped=raw, pi0=Fraction(pi0))


def _mean_p(grid: Grid, counts: np.ndarray) -> Fraction:
    """The exact mean p-value of at least one document, from the `counts` at each rank: int64, (grid.size,)."""
    kinds, places = np.unique(np.broadcast_to(grid.denominators, grid.size), return_inverse=True)
    sums = np.zeros((2, kinds.size), dtype=np.int64)  # by halves: products with counts stay below 2^63
    np.add.at(sums[0], places, (grid.numerators >> HALF_BITS) * counts)
    np.add.at(sums[1], places, (grid.numerators & ((1 << HALF_BITS) - 1)) * counts)
    parts = zip(kinds.tolist(), *sums.tolist(), strict=True)
    total = sum((Fraction((high << HALF_BITS) + low, kind) for kind, high, low in parts), Fraction(0))
    return total / int(counts.sum())


def needs_known(procedure: str, count: int) -> None:
    """Refuse a procedure that requires known members if there are none.

    Raises:
        UserError: `count`, the number of documents that are known not to be nulls, is 0.
    """
    if not count:
        raise UserError(
            f"procedure {procedure} needs documents that are known not to be nulls "
            "(direction members: corpus.seen; direction clean: corpus.unseen), and there are none"
        )


def _decide(given: Given) -> Decision:
    """BH at alpha / pi0, pi0 from `known_members`: without guarantee, see `known_members`."""
    known = given.known
    needs_known("known_members", known.m if known is not None else 0)
    assert known is not None
    return _adaptive("known_members", given, known_members(given.counts, known), known.m)


def decide_by_scores(counts: RankCounts, alpha: Fraction, estimate: KnownMembers, known: int) -> Decision:
    """BH at alpha / pi0, pi0 from `known_scores` (PTDI, eqs. 16-17): FDR <= alpha in the limit, see `known_scores`.

    Args:
        counts: counts of the m >= 1 audit documents.
        alpha: exact, in (0, 1).
        estimate: estimate from the scores of the same documents.
        known: number of documents that are known not to be nulls.
    """
    return _adaptive("ptdi_known_members", Given(counts, alpha), estimate, known)


def _adaptive(procedure: str, given: Given, estimate: KnownMembers, known: int) -> Decision:
    details = {"null_proportion_unclipped": estimate.unclipped, "theta": estimate.theta, "known_members": known}
    return adaptive(procedure, given, estimate.pi0, details)


def _answer(question: SelectionInput) -> Query[Answer]:
    return ranked(question, partial(_by_scores, question))


def _by_scores(question: SelectionInput, counts: RankCounts) -> Query[Decision]:
    """Estimate the share of nulls from the mean scores of known and audited documents, in an additional fold."""
    known, others = question.known.first, question.others.first
    needs_known("ptdi_known_members", others.size)
    centre = float(np.median(known))
    audit = yield Fold(lambda batch: Moments.of(batch.first, centre))
    audit = audit if audit is not None else Moments.of(others[:0], centre)
    null, sought = Moments.of(known, centre), Moments.of(others, centre)
    estimate = known_scores(null, sought, audit, question.quarantined)
    return decide_by_scores(counts, question.level.alpha, estimate, others.size)


PTDI_KNOWN_MEMBERS = Procedure(
    "ptdi_known_members",
    Guarantee(
        "asymptotic",
        ALIKE,
        f"{IN_THE_LIMIT}, if the known documents are like the hidden ones; {UNPROVED} {ON_AVERAGE}",
    ),
    answer=_answer,
    factor=Factor(least=lambda rule, n, m: Fraction(0)),
    curve=curve_at_factor,
    reads_sought=True,
    needs_sought=True,
    refuses={
        "by_group": "compares mean scores over all groups and takes calibration pooled or conditional, got by_group; "
        "known_members takes it",
    },
)
KNOWN_MEMBERS = Procedure(
    "known_members",
    Guarantee(
        "heuristic",
        ALIKE,
        f"{SHARE} comes near alpha in simulations where the known documents have the mean p-value of the hidden ones, "
        f"and exceeds it where theirs is smaller; no theorem says more; {UNPROVED} {ON_AVERAGE}",
    ),
    _decide,
    factor=Factor(least=lambda rule, n, m: Fraction(0)),
    curve=curve_at_factor,
    reads_sought=True,
    needs_sought=True,
)
