"""Answer a selection by the ranks of audit documents among calibration documents: what procedures share."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np

from pipeline.errors import UserError
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.conformal import p_values
from pipeline.selection.evalues import largest_e_rank
from pipeline.selection.grid import Grid
from pipeline.selection.passes import Answer, Ask, Asking, Basis, Batch, Judge, SelectionInput
from pipeline.selection.procedures.bh import bh
from pipeline.selection.procedures.estimating import strict
from pipeline.selection.procedures.record import Decision, Rule, decide, decision, procedure_of
from pipeline.selection.promises import StrictAnswer
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.resolution import known_needed
from pipeline.selection.schedule import Slot, level_of_prds
from pipeline.selection.step_up import minimum_selectable


def ranked(
    question: SelectionInput, deciding: Callable[[RankCounts], Asking[Decision]] | None = None
) -> Asking[Answer]:
    """Decide by the ranks of one detector's scores, as the calibration of the selection gives them.

    Args:
        question: of a selection whose calibration is not weighted.
        deciding: a generator of the passes that the decision needs; None: it needs none.
    """
    selection, level, others = question.selection, question.level, question.others
    calibration = calibration_of(selection.calibration)
    rank, against = calibration.ranking(selection, question.seed, question.known)
    counts = yield from count_ranks(rank, against, question.quarantined)
    known = RankCounts.of(rank(others), against) if len(others.matrix) else None
    if (grid := calibration.regridded(selection, counts.n)) is not None:
        against = grid
        counts, known = counts.over(grid), known.over(grid) if known is not None else None
    lambda_ = selection.exact_lambda
    if deciding is not None:
        decided = yield from deciding(counts)
    elif level.slot is not None and level.slot.rule != "spend":
        decided = decide_in_slot(counts, level.slot)
    else:
        decided = decide(selection.procedure, counts, level.alpha, known, lambda_)
    return of_decision(decided, counts, partial(judge_ranks, rank, against, decided.rank), lambda_=lambda_)


def decide_in_slot(counts: RankCounts, slot: Slot) -> Decision:
    """Select by rule prds or e-lond.

    Guaranteed: over all scans of the schedule FDR <= alpha, for prds if the p-values of all scans together are PRDS,
    for e-lond if each null document is, taken by itself, exchangeable with its calibration documents. A scan's list
    alone has no such promise at its level, as `before` is itself made of scores.

    Args:
        counts: of the m >= 1 audit documents, quarantined ones at the last rank.
        slot: of rule prds or e-lond.

    Raises:
        UserError: no audit documents.
    """
    if counts.m == 0:
        raise UserError("no audit documents")
    if slot.rule == "prds":
        return bh(counts, level_of_prds(slot, counts.m))
    factor, rank = largest_e_rank(counts, slot.level, slot.before)
    return decision("ebh", counts, slot.level, rank, details={"dependence_factor": float(factor)}, factor=factor)


def count_ranks(rank: Callable[[Batch], np.ndarray], against: int | Grid, quarantined: int) -> Asking[RankCounts]:
    """Count the ranks of the audit documents, quarantined ones at the last."""
    counts = yield Ask(lambda batch: RankCounts.of(rank(batch), against))
    return (counts if counts is not None else RankCounts.empty(against)).with_quarantined(quarantined)


def judge_ranks(
    rank: Callable[[Batch], np.ndarray], against: int | Grid, last: int, batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    """P-values of documents, and whether their ranks are at most `last`."""
    audit_ranks = rank(batch)
    return p_values(audit_ranks, against), audit_ranks <= last


def of_decision(
    decided: Decision,
    counts: RankCounts,
    judge: Judge,
    strict_name: str | None = None,
    lambda_: Fraction | None = None,
    halved: bool = False,
) -> Answer:
    """The answer of a decision from rank counts; `strict_name` is that of its strict answer, if not its procedure's."""
    safe, grid, procedure = strict(decided, counts, lambda_), counts.grid, procedure_of(decided.procedure)
    rule = Rule(procedure, decided.alpha, grid.delta, halved)
    estimated = procedure.estimates or decided.null_proportion != 1  # of a plugin's procedure nothing else tells
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
    )


def resolution_at(grid: Grid, rule: Rule, factor: Fraction, m: int) -> tuple[int, int]:
    """The fewest of m documents that can be selected, and the known documents needed to select 1%."""
    return minimum_selectable(grid, m, rule.alpha, factor), known_needed(rule, m, max(1, m // 100), factor)
