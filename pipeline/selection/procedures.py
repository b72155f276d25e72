"""The selection procedures: from rank counts to a decision that says what it promises.

A procedure is one function `(counts, alpha) -> Decision`, one entry of `TERMS` and one of `PROCEDURES`; one that
also reads documents of known membership is `(counts, alpha, known) -> Decision` and stands in `WITH_KNOWN_MEMBERS`.
Plugins add theirs with `@procedure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from typing import get_args

from pipeline.config.selection import Procedure
from pipeline.detectors.plugins import Registry, display_module
from pipeline.errors import UserError, nearest
from pipeline.selection import proportion
from pipeline.selection.evalues import dependence_factor
from pipeline.selection.promises import TERMS, Guarantee, Terms, terms_of
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.step_up import ONE, harmonic_bound, step_up


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a procedure, and its terms. The audit documents at ranks 1..`rank` are selected.

    `rank` is k* in 0..grid.size, 0 when nothing is selected; the selection holds documents at p = 1, and so
    quarantined ones, only when it is the last. `null_proportion` is the pi0 in use, shown in (0, 1];
    `details` are finite numbers for the report, such as the estimate of pi0 before it was clipped.
    """

    procedure: str
    alpha: Fraction
    rank: int
    n_selected: int
    null_proportion: float
    guarantee: Guarantee
    assumption: str
    promise: str
    details: dict[str, float]
    n: int  # calibration documents
    factor: Fraction  # BH ran at alpha / factor: pi0 as used, or what dependence costs
    largest_p: Fraction  # the p-value of `rank`, exact; 0 when nothing is selected

    @property
    def threshold(self) -> float | None:
        """The largest p-value that is selected, in (0, 1], that of rank k*; None when nothing is selected."""
        return float(self.largest_p) if self.rank else None


def decide(
    procedure: str,
    counts: RankCounts,
    alpha: Fraction,
    known_members: RankCounts | None = None,
    lambda_: Fraction | None = None,
) -> Decision:
    """Select by a named procedure; exact, a function of the counts alone.

    What is guaranteed is in `TERMS[procedure]`, is adapted to the calibration by `terms_of`, and is carried
    by the decision.

    Args:
        procedure: a key of `PROCEDURES` or `WITH_KNOWN_MEMBERS`.
        counts: of the m >= 1 audit documents, quarantined ones at the last rank, where p = 1.
        alpha: the exact decimal that the user wrote, in (0, 1).
        known_members: for `WITH_KNOWN_MEMBERS` only: rank counts, over the same grid, of documents for which
            the null is known not to hold: `seen` in direction members, `unseen` in direction clean.
        lambda_: of Storey's estimate, in (0, 1), for `storey` only; None: `proportion.default_lambda`.

    Raises:
        UserError: an unknown procedure, alpha outside (0, 1), no audit documents, or no known members where they
            are needed.
        ValueError: known members that were ranked over another grid.
    """
    if procedure not in PROCEDURES and procedure not in WITH_KNOWN_MEMBERS:
        raise UserError(f"unknown procedure {procedure!r}; {nearest(procedure, [*PROCEDURES, *WITH_KNOWN_MEMBERS])}")
    if not 0 < alpha < 1:
        raise UserError(f"alpha must be in (0, 1), got {float(alpha):g}")
    if counts.m == 0:
        raise UserError("no audit documents")
    if procedure == "storey":
        return _storey(counts, alpha, lambda_)
    if procedure in PROCEDURES:
        return PROCEDURES[procedure](counts, alpha)
    needs_known(procedure, known_members.m if known_members is not None else 0)
    assert known_members is not None
    if not known_members.grid.same_as(counts.grid):
        raise ValueError("the known members must be ranked over the grid of the audit documents")
    return WITH_KNOWN_MEMBERS[procedure](counts, alpha, known_members)


def needs_known(procedure: str, count: int) -> None:
    """Refuse a procedure that takes known members where there are none.

    Raises:
        UserError: `count`, of documents that are known not to be nulls, is 0.
    """
    if not count:
        raise UserError(
            f"procedure {procedure} needs documents that are known not to be nulls "
            "(direction members: corpus.seen; direction clean: corpus.unseen), and there are none"
        )


def strict(decision: Decision, counts: RankCounts, lambda_: Fraction | None = None) -> Decision:
    """The answer that holds in finite samples: the decision itself if it does, otherwise Storey's.

    Guaranteed: FDR <= alpha under the assumption that the returned decision carries.
    """
    return decision if decision.guarantee == "finite-sample" else _storey(counts, decision.alpha, lambda_)


def _bh(counts: RankCounts, alpha: Fraction) -> Decision:
    """Benjamini & Hochberg 1995: FDR <= (share of nulls) alpha under exchangeability."""
    return decision("bh", counts, alpha, step_up(counts, alpha), ONE, {})


def _by(counts: RankCounts, alpha: Fraction) -> Decision:
    """Benjamini & Yekutieli 2001: BH at alpha / H_m; FDR <= (share of nulls) alpha, any dependence."""
    harmonic = harmonic_bound(counts.m)
    rank = step_up(counts, alpha / harmonic)
    return decision("by", counts, alpha, rank, ONE, {"harmonic_sum": float(harmonic)}, harmonic)


def _ebh(counts: RankCounts, alpha: Fraction) -> Decision:
    """Wang & Ramdas 2022 on conformal e-values: FDR <= (share of nulls) alpha, any dependence."""
    factor = dependence_factor(counts.grid, counts.m, alpha)
    rank = step_up(counts, alpha / factor)
    return decision("ebh", counts, alpha, rank, ONE, {"dependence_factor": float(factor)}, factor)


def _storey(counts: RankCounts, alpha: Fraction, lambda_: Fraction | None = None) -> Decision:
    """Storey, Taylor & Siegmund 2004, pi0 uncapped: FDR <= alpha under exchangeability, lambda fixed beforehand."""
    cut = proportion.default_lambda(counts.grid) if lambda_ is None else lambda_
    return _adaptive("storey", counts, alpha, proportion.storey(counts, cut), {"lambda": float(cut)})


def _bky(counts: RankCounts, alpha: Fraction) -> Decision:
    """Benjamini, Krieger & Yekutieli 2006, definition 6: two stages of BH at alpha / (1 + alpha).

    The first selects r1; the second uses pi0 = (m - r1) / m. With r1 = 0 the second selects nothing either; with
    r1 = m everything is selected, which pi0 = 1/m does. They prove FDR <= alpha for independent p-values;
    conformal ones share their calibration documents, so here it holds in the limit.
    """
    level = alpha / (1 + alpha)
    first = counts.at_most(step_up(counts, level))
    pi0 = Fraction(max(1, counts.m - first), counts.m)
    rank = step_up(counts, level, pi0)
    return decision("bky", counts, alpha, rank, pi0, {"first_stage": first}, pi0 * (1 + alpha))


def _quantile(counts: RankCounts, alpha: Fraction) -> Decision:
    """BH at alpha / pi0, pi0 from `proportion.slope` (PTDI, eq. 47): FDR <= alpha in the limit."""
    return _adaptive("quantile", counts, alpha, proportion.slope(counts), {})


def _kernel(counts: RankCounts, alpha: Fraction) -> Decision:
    """BH at alpha / pi0, pi0 from `proportion.kernel`, at most 1: no guarantee, see there."""
    estimate = proportion.kernel(counts)
    return _adaptive("kernel", counts, alpha, Fraction(min(1.0, estimate)), {"null_proportion_unclipped": estimate})


def _ptdi(counts: RankCounts, alpha: Fraction) -> Decision:
    """PTDI (Liu et al. 2026): BH at alpha / pi0, pi0 from `proportion.jkbb`; FDR <= alpha in the limit."""
    estimate = proportion.jkbb(counts)
    details = {
        "null_proportion_unclipped": estimate.unclipped,
        "bandwidth": estimate.bandwidth,
        "c": estimate.c,
    }
    return _adaptive("ptdi", counts, alpha, Fraction(estimate.pi0), details)


def _known_members(counts: RankCounts, alpha: Fraction, known: RankCounts) -> Decision:
    """BH at alpha / pi0, pi0 from `proportion.known_members`: no guarantee, see there."""
    estimate = proportion.known_members(counts, known)
    details = {"null_proportion_unclipped": estimate.unclipped, "theta": estimate.theta, "known_members": known.m}
    return _adaptive("known_members", counts, alpha, estimate.pi0, details)


def decide_by_scores(counts: RankCounts, alpha: Fraction, estimate: proportion.KnownMembers, known: int) -> Decision:
    """BH at alpha / pi0, pi0 from `proportion.known_scores` (PTDI, eqs. 16-17): FDR <= alpha in the limit, see there.

    Args:
        counts: of the m >= 1 audit documents.
        alpha: exact, in (0, 1).
        estimate: from the scores of the same documents.
        known: how many documents are known not to be nulls.
    """
    details = {"null_proportion_unclipped": estimate.unclipped, "theta": estimate.theta, "known_members": known}
    return _adaptive("ptdi_known_members", counts, alpha, estimate.pi0, details)


Decide = Callable[[RankCounts, Fraction], Decision]
PROCEDURES: Registry[Decide] = Registry(
    "procedure",
    {
        "bh": _bh,
        "by": _by,
        "ebh": _ebh,
        "storey": _storey,
        "bky": _bky,
        "quantile": _quantile,
        "ptdi": _ptdi,
        "kernel": _kernel,
    },
)

WITH_KNOWN_MEMBERS: dict[str, Callable[[RankCounts, Fraction, RankCounts], Decision]] = {
    "known_members": _known_members,
}


def is_procedure(name: str) -> bool:
    """Whether a selection can name this procedure."""
    return name in PROCEDURES or name in get_args(Procedure)


def check_known(name: str, where: str = "") -> None:
    """Refuse a procedure that nobody has registered.

    Raises:
        UserError: with the near miss, behind `where`.
    """
    if not is_procedure(name):
        known = dict.fromkeys([*get_args(Procedure), *PROCEDURES])
        raise UserError(f"{where}unknown procedure {name!r}; {nearest(name, known)}")


def procedure(*, guarantee: Guarantee, assumption: str, promise: str) -> Callable[[Decide], Decide]:
    """Make a function `(counts, alpha) -> Decision` a procedure that a selection can name.

    Its terms are shown in the report beside every answer; nothing checks that they are true. The function returns
    `decision(...)`, with the last rank that it selects.

    Args:
        guarantee: finite-sample, asymptotic or heuristic.
        assumption: One sentence: what must hold for the promise to hold.
        promise: What then holds.

    Raises:
        UserError: another guarantee, an empty sentence, or a name that is taken.
    """
    if guarantee not in get_args(Guarantee):
        raise UserError(f"guarantee {guarantee!r} is unknown; {nearest(str(guarantee), get_args(Guarantee))}")
    if not assumption.strip() or not promise.strip():
        raise UserError("a procedure needs a sentence that says what it assumes, and one that says what it promises")

    def register(function: Decide) -> Decide:
        name, module = function.__name__, function.__module__
        if name in get_args(Procedure):
            raise UserError(f"procedure {name}: the name is built in; rename the function")

        @wraps(function)
        def guarded(counts: RankCounts, alpha: Fraction) -> Decision:
            try:
                result = function(counts, alpha)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise UserError(f"procedure {name} ({display_module(module)}) raised {text}") from None
            if not isinstance(result, Decision):
                raise UserError(
                    f"procedure {name} ({display_module(module)}) must return decision(...), got {result!r}"
                )
            return result

        PROCEDURES.register(name, guarded, module)
        TERMS.register(name, Terms(guarantee, assumption, promise), module)
        return function

    return register


def _adaptive(
    procedure: str, counts: RankCounts, alpha: Fraction, pi0: Fraction, details: dict[str, float]
) -> Decision:
    """BH at alpha / pi0."""
    rank = step_up(counts, alpha, pi0)
    return decision(procedure, counts, alpha, rank, pi0, {"null_proportion_unclipped": float(pi0), **details})


def decision(
    procedure: str,
    counts: RankCounts,
    alpha: Fraction,
    rank: int,
    pi0: Fraction = ONE,
    details: Mapping[str, float] | None = None,
    factor: Fraction | None = None,
) -> Decision:
    """The decision to select ranks 1..rank, on the procedure's own terms.

    Args:
        procedure: its name.
        counts: of the audit documents.
        alpha: as the procedure was given it.
        rank: the last rank that is selected, 0 for none.
        pi0: the share of nulls that it used.
        details: numbers for the report; what is not finite is left out.
        factor: BH ran at alpha / factor; pi0 by default.
    """
    grid = counts.grid
    terms = terms_of(procedure, grid)
    return Decision(
        procedure=procedure,
        alpha=alpha,
        rank=rank,
        n_selected=counts.at_most(rank),
        null_proportion=min(1.0, float(pi0)),
        guarantee=terms.guarantee,
        assumption=terms.assumption,
        promise=terms.promise,
        details={name: value for name, value in (details or {}).items() if math.isfinite(value)},
        n=counts.n,
        factor=pi0 if factor is None else factor,
        largest_p=grid.p(rank),
    )
