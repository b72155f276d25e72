"""Answers from the ranks of audit documents among calibration documents: shared functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np

from pipeline.errors import UserError
from pipeline.selection.calibrations import Ranking, calibration_of
from pipeline.selection.conformal import Grid, RankCounts, p_values
from pipeline.selection.folds import Answer, Basis, Fold, Judge, Query, RoleScores, SelectionInput
from pipeline.selection.group_weights import boosted
from pipeline.selection.guarantees import GroupWeight, StrictAnswer
from pipeline.selection.procedures.bh import bh
from pipeline.selection.procedures.estimating import storey, storey_cut, strict
from pipeline.selection.procedures.record import Decision, Rule, decide, procedure_of
from pipeline.selection.smoothed_search import smooth
from pipeline.selection.smoothing import Smoothing
from pipeline.selection.step_up import minimum_selectable

MOST_KNOWN = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """The ranks of one score with the calibration of a selection, and how many audit documents have each."""

    ranking: Ranking
    counts: RankCounts  # with quarantined documents, at the last rank
    groups: list[GroupWeight] | None = None  # None: p-values are not divided by weights of groups
    regridded: Grid | None = None  # of the p-values, if it is not that of the ranks


def count_calibrated(question: SelectionInput) -> Query[Counted]:
    """Count the ranks of the first score, with the calibration and the weights of groups of the selection.

    Raises:
        UserError: no audit documents, or as the calibration.
    """
    selection, calibration = question.selection, calibration_of(question.selection.calibration)
    if selection.boost is not None:
        ranking, scored, groups = yield from boosted(question, partial(_count_scored, question))
        return Counted(ranking, _with_quarantined(scored, question), groups)
    rank, against = calibration.ranking(selection, question.seed, question.known)
    regridded = calibration.regridded(selection, against.n if isinstance(against, Grid) else against)
    counts = yield from count_ranks(rank, against, question, regridded)
    return Counted((rank, against), counts, None, regridded)


def ranked(question: SelectionInput, deciding: Callable[[RankCounts], Query[Decision]] | None = None) -> Query[Answer]:
    """Decide by the ranks of one detector's scores with the calibration of the selection.

    Args:
        question: the selection and its inputs.
        deciding: generator of folds that the decision needs; None: none.
    """
    level, others = question.level, question.others
    counted = yield from count_calibrated(question)
    (rank, against), counts, regridded = counted.ranking, counted.counts, counted.regridded
    known = RankCounts.of(rank(others), against) if len(others.matrix) else None
    if regridded is not None:
        against = regridded
        counts, known = counts.over(regridded), known.over(regridded) if known is not None else None
    if deciding is not None:
        decided = yield from deciding(counts)
    else:
        decided = decide(question.selection.procedure, counts, level.alpha, known, question.selection.exact_lambda)
    answer = yield from by_ranks(decided, counts, (rank, against), question)
    return replace(answer, groups=counted.groups)


def by_ranks(
    decided: Decision,
    counts: RankCounts,
    ranking: Ranking,
    question: SelectionInput,
    strict_name: str | None = None,
    halved: bool = False,
) -> Query[Answer]:
    """The answer of a decision from whole ranks, or that of its step-up on smoothed ranks, if the selection has those.

    The share of nulls and the cost of dependence remain those of whole ranks.

    Args:
        decided: the decision from `counts`.
        counts: counts of the audit documents.
        ranking: ranks of a batch, and their grid.
        question: the selection and its inputs.
        strict_name: as in `of_decision`.
        halved: as in `of_decision`.
    """
    rank, against = ranking
    if question.selection.ranks == "whole":
        judge: Judge = partial(judge_ranks, rank, against, decided.rank)
        return of_decision(decided, counts, judge, question, strict_name, halved)
    share = decided.alpha / (counts.m * decided.factor)
    made = yield from smooth(counts, decided.rank, share, rank, (question.key, question.quarantined))
    decided = replace(
        decided,
        rank=made.last,
        n_selected=made.n_selected,
        largest_p=made.limit,
        assumption=f"{decided.assumption} {SMOOTHED}",
    )
    judge = partial(judge_smoothed, made, against)
    answer = of_decision(decided, counts, judge, question, strict_name, halved)
    return replace(answer, smoothing=made)


SMOOTHED = (
    "The numbers that smooth the ranks, which are hashes of ids, are as good as random: they have nothing to do with "
    "the scores."
)
"""The further assumption of smoothed ranks."""


def judge_smoothed(made: Smoothing, against: int | Grid, batch: RoleScores) -> tuple[np.ndarray, np.ndarray]:
    """P-values of the whole ranks of documents, and whether their smoothed p-values are up to the limit."""
    audit_ranks = made.rank(batch)
    return p_values(audit_ranks, against), made.judge(audit_ranks, batch.keys)


def count_ranks(
    rank: Callable[[RoleScores], np.ndarray],
    against: int | Grid,
    question: SelectionInput,
    regridded: Grid | None = None,
) -> Query[RankCounts]:
    """Count the ranks of the audit documents, with quarantined ones at the last rank.

    Args:
        rank: returns the ranks of the documents of a shard.
        against: number of calibration documents, or the grid of the ranks.
        question: the selection.
        regridded: the grid of the p-values, if it is another.

    Raises:
        UserError: no audit documents.
    """
    return _with_quarantined((yield from _count_scored(question, rank, against, regridded)), question)


def _with_quarantined(counts: RankCounts, question: SelectionInput) -> RankCounts:
    counts = counts.with_quarantined(question.quarantined)
    if counts.m == 0:
        raise UserError("no audit documents")
    return counts


def _count_scored(
    question: SelectionInput,
    rank: Callable[[RoleScores], np.ndarray],
    against: int | Grid,
    regridded: Grid | None = None,
) -> Query[RankCounts]:
    """As `count_ranks`, without quarantined documents."""
    part = None
    if question.dependence is not None:
        grid = regridded or (against if isinstance(against, Grid) else Grid.uniform(against))
        part = question.dependence.part(storey_cut(grid, question.selection.exact_lambda)[0])

    def count(batch: RoleScores) -> RankCounts:
        assert part is None or batch.place is not None
        return RankCounts.of(rank(batch), against, batch.place, part)

    counts = yield Fold(count)
    return counts if counts is not None else RankCounts.empty(against)


def judge_ranks(
    rank: Callable[[RoleScores], np.ndarray], against: int | Grid, last: int, batch: RoleScores
) -> tuple[np.ndarray, np.ndarray]:
    """P-values of documents, and whether their ranks are at most `last`."""
    audit_ranks = rank(batch)
    return p_values(audit_ranks, against), audit_ranks <= last


def of_decision(
    decided: Decision,
    counts: RankCounts,
    judge: Judge,
    question: SelectionInput,
    strict_name: str | None = None,
    halved: bool = False,
) -> Answer:
    """The answer of a decision from rank counts; `strict_name`: name of its strict answer, if not the procedure."""
    lambda_ = question.selection.exact_lambda
    safe, grid, procedure = strict(decided, counts, lambda_), counts.grid, procedure_of(decided.procedure)
    rule = Rule(procedure, decided.alpha, grid.delta, halved)
    estimated = procedure.estimates or decided.null_proportion != 1  # the only indication for procedures of plugins
    share = float(decided.factor) if procedure.factor.uncapped else decided.null_proportion
    return Answer(
        judge=judge,
        n_calibration=counts.n,
        m=counts.m,
        threshold=decided.threshold,
        null_proportion=decided.null_proportion,
        guarantee=decided.guarantee,
        assumption=decided.assumption,
        promise=decided.promise,
        details=decided.details,
        resolution=partial(resolution_at, grid, rule, decided.factor),
        strict=StrictAnswer(strict_name or safe.procedure, safe.n_selected, safe.threshold, safe.guarantee),
        factor=float(decided.factor),
        basis=Basis(halved, grid.groups > 1, share if estimated else None),
        counts=counts,
        rank=decided.rank,
        n_bh=bh(counts, decided.alpha).n_selected if estimated else None,
        dependence=question.dependence,
        nulls=_nulls(counts, lambda_) if estimated and not (procedure.by_blocks and counts.kept is not None) else None,
    )


def _nulls(counts: RankCounts, lambda_: Fraction | None) -> tuple[Fraction, Fraction]:
    """The cut and the estimate of `storey`, as a number of nulls among the documents that were compared."""
    compared = Fraction(1) if counts.kept is None else Fraction(counts.kept.compared, counts.kept.scored)
    return storey_cut(counts.grid, lambda_)[0], storey(counts, lambda_) * counts.m * compared


def resolution_at(grid: Grid, rule: Rule, factor: Fraction, m: int) -> tuple[int, int]:
    """Minimum number of m documents that can be selected, and the known documents needed to select 1%."""
    largest = Fraction(1) if grid.weighting is None else grid.weighting.largest
    return minimum_selectable(grid, m, rule.alpha, factor), known_needed(rule, m, max(1, m // 100), factor / largest)


def fewest_selectable(rule: Rule, known: int, m: int, factor: Fraction | None = None) -> int:
    """Minimum number of documents of a nonempty selection of m audited documents.

    Args:
        rule: rule of the selection.
        known: number of documents of the null role.
        m: audited documents, >= 1.
        factor: divisor of alpha; default: that of the procedure at a share of nulls of 1.
    """
    n = rule.calibrating(known)
    factor = rule.procedure.factor.at_one(rule, n, m) if factor is None else factor
    return math.ceil(factor * m * rule.smallest(n) / rule.alpha)


def fewest_at_best(rule: Rule, known: int, m: int) -> int:
    """As `fewest_selectable`, at the smallest share of nulls that the procedure can estimate; a lower bound."""
    factor = rule.procedure.factor.least or rule.procedure.factor.at_one
    return max(1, fewest_selectable(rule, known, m, factor(rule, rule.calibrating(known), m)))


def factor_at(rule: Rule, m: int, share: Fraction) -> Fraction:
    """The divisor of alpha of a procedure that estimates this share of nulls."""
    return share * rule.procedure.factor.at_one(rule, 0, m)


def known_needed(rule: Rule, m: int, selectable: int, factor: Fraction | None = None) -> int:
    """Documents of the null role that are needed for a selection of `selectable` of m audited documents.

    It is the smallest sufficient number, if more documents never increase the minimum. That holds for every procedure
    except `ebh`, whose factor has steps. At most `MOST_KNOWN`, above which the smallest p-value of calibration
    conditional does not decrease.

    Args:
        rule: rule of the selection.
        m: audited documents, >= 1.
        selectable: number of selected documents, >= 1.
        factor: as in `fewest_selectable`.
    """
    divisor = rule.procedure.factor
    fixed = None if divisor.steps else factor

    def suffices(known: int) -> bool:
        n = rule.calibrating(known)
        divided_by = divisor.at_one(rule, n, m) if fixed is None else fixed
        return divided_by * m * rule.smallest(n) <= rule.alpha * selectable

    high = 1
    while high < MOST_KNOWN and not suffices(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
