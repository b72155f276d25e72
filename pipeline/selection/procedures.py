"""The selection procedures: from rank counts to a decision that says what it promises.

A procedure is one function `(counts, alpha) -> Decision`, one entry of `TERMS` and one of `PROCEDURES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from pipeline.errors import UserError, nearest
from pipeline.selection import proportion
from pipeline.selection.step_up import ONE, harmonic_bound, step_up
from pipeline.selection.summary import RankCounts

Guarantee = Literal["finite-sample", "asymptotic", "heuristic"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a procedure promises, in words that need no statistics."""

    guarantee: Guarantee
    assumption: str  # one sentence: what must hold for the promise to hold
    promise: str  # what then holds


@dataclass(frozen=True, slots=True)
class Decision:
    """What a procedure decided, and on what terms. The audit documents at ranks 1..`rank` are selected.

    `rank` is k* in 0..n + 1, 0 when nothing is selected; the selection holds documents at p = 1, and so
    quarantined ones, only when it is n + 1. `null_proportion` is the pi0 in use, shown in (0, 1];
    `details` are finite numbers for the report, such as the estimate of pi0 before it was clipped.
    """

    procedure: str
    alpha: Fraction
    rank: int
    n_selected: int
    null_proportion: float
    guarantee: Guarantee
    assumption: str
    details: dict[str, float]
    n: int  # calibration documents
    factor: Fraction  # BH ran at alpha / factor: pi0 as used, or the harmonic sum

    @property
    def threshold(self) -> float | None:
        """The largest p-value that is selected, k* / (n + 1) in (0, 1]; None when nothing is selected."""
        return self.rank / (self.n + 1) if self.rank else None


_NULLS = "for which the null holds (direction members: never trained on; direction clean: trained on)"
_EXCHANGEABLE = (
    f"The audited documents {_NULLS} and the calibration documents are exchangeable: they come from one "
    "source in one way, and nothing tells one kind from the other."
)
_ONE_BY_ONE = (
    f"Each audited document {_NULLS} is, taken by itself, exchangeable with the calibration documents; how "
    "the audited documents depend on one another is free."
)
_MANY = (
    f"The audited documents {_NULLS} and the calibration documents are exchangeable, and there are so many "
    "of them that the share of nulls is estimated without noticeable error."
)
_SHARE = "The expected share of wrong documents (those for which the null holds) among the selected"
_ON_AVERAGE = (
    "This is an average over repetitions of the whole audit with fresh documents; in this one list the share "
    "may be higher or lower, and no single document is proven to be selected rightly."
)

TERMS: dict[str, Terms] = {
    "bh": Terms(
        "finite-sample",
        _EXCHANGEABLE,
        f"{_SHARE} is at most alpha times the true share of nulls, for any number of documents. {_ON_AVERAGE}",
    ),
    "by": Terms(
        "finite-sample",
        _ONE_BY_ONE,
        f"{_SHARE} is at most alpha times the true share of nulls, for any number of documents and any "
        f"dependence between them. {_ON_AVERAGE}",
    ),
    "storey": Terms(
        "finite-sample",
        _EXCHANGEABLE,
        f"{_SHARE} is at most alpha, for any number of documents, with the share of nulls estimated from the "
        f"audit itself. {_ON_AVERAGE}",
    ),
    "ptdi": Terms(
        "asymptotic",
        _MANY,
        f"{_SHARE} approaches a limit of at most alpha as the numbers of documents grow; for the documents "
        "at hand nothing is promised, and the share can exceed alpha, so the strict answer stands beside "
        f"this one. {_ON_AVERAGE}",
    ),
}

GUARANTEES: dict[str, str] = {
    name: f"{terms.promise} It rests on this assumption: {terms.assumption}" for name, terms in TERMS.items()
}


def decide(procedure: str, counts: RankCounts, alpha: Fraction) -> Decision:
    """Select by a named procedure; exact, a function of the counts alone.

    What is guaranteed is in `TERMS[procedure]` and is carried by the decision.

    Args:
        procedure: a key of `PROCEDURES`.
        counts: of the m >= 1 audit documents, quarantined ones at rank n + 1.
        alpha: the exact decimal that the user wrote, in (0, 1).

    Raises:
        UserError: an unknown procedure, alpha outside (0, 1), or no audit documents.
    """
    if procedure not in PROCEDURES:
        raise UserError(f"unknown procedure {procedure!r}; {nearest(procedure, PROCEDURES)}")
    if not 0 < alpha < 1:
        raise UserError(f"alpha must be in (0, 1), got {float(alpha):g}")
    if counts.m == 0:
        raise UserError("no audit documents")
    return PROCEDURES[procedure](counts, alpha)


def strict(decision: Decision, counts: RankCounts) -> Decision:
    """The answer that holds in finite samples: the decision itself if it does, otherwise Storey's.

    Guaranteed: FDR <= alpha under the assumption that the returned decision carries.
    """
    return decision if decision.guarantee == "finite-sample" else decide("storey", counts, decision.alpha)


def _bh(counts: RankCounts, alpha: Fraction) -> Decision:
    """Benjamini & Hochberg 1995: FDR <= (share of nulls) alpha under exchangeability."""
    return _decision("bh", counts, alpha, step_up(counts, alpha), ONE, {})


def _by(counts: RankCounts, alpha: Fraction) -> Decision:
    """Benjamini & Yekutieli 2001: BH at alpha / H_m; FDR <= (share of nulls) alpha, any dependence."""
    harmonic = harmonic_bound(counts.m)
    rank = step_up(counts, alpha / harmonic)
    return _decision("by", counts, alpha, rank, ONE, {"harmonic_sum": float(harmonic)}, harmonic)


def _storey(counts: RankCounts, alpha: Fraction) -> Decision:
    """Storey, Taylor & Siegmund 2004, pi0 uncapped: FDR <= alpha under exchangeability."""
    pi0 = proportion.storey(counts)
    rank = step_up(counts, alpha, pi0)
    return _decision("storey", counts, alpha, rank, pi0, {"null_proportion_unclipped": float(pi0)})


def _ptdi(counts: RankCounts, alpha: Fraction) -> Decision:
    """PTDI (Liu et al. 2026): BH at alpha / pi0, pi0 from `proportion.jkbb`; FDR <= alpha in the limit."""
    estimate = proportion.jkbb(counts)
    pi0 = Fraction(estimate.pi0)
    details = {
        "null_proportion_unclipped": estimate.unclipped,
        "bandwidth": estimate.bandwidth,
        "c": estimate.c,
    }
    return _decision("ptdi", counts, alpha, step_up(counts, alpha, pi0), pi0, details)


PROCEDURES: dict[str, Callable[[RankCounts, Fraction], Decision]] = {
    "bh": _bh,
    "by": _by,
    "storey": _storey,
    "ptdi": _ptdi,
}


def _decision(
    procedure: str,
    counts: RankCounts,
    alpha: Fraction,
    rank: int,
    pi0: Fraction,
    details: dict[str, float],
    factor: Fraction | None = None,
) -> Decision:
    terms = TERMS[procedure]
    return Decision(
        procedure=procedure,
        alpha=alpha,
        rank=rank,
        n_selected=counts.at_most(rank),
        null_proportion=min(1.0, float(pi0)),
        guarantee=terms.guarantee,
        assumption=terms.assumption,
        details={name: value for name, value in details.items() if math.isfinite(value)},
        n=counts.n,
        factor=pi0 if factor is None else factor,
    )
