"""Procedure `bound`: the longest list of which at most a share alpha is wrong, at a stated confidence."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

from pipeline.config.selection import SelectionConfig
from pipeline.selection.bounds import bounds_of_lists, fewest_in_list
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.conformal import RankCounts
from pipeline.selection.folds import Answer, Query, SelectionInput
from pipeline.selection.guarantees import EXCHANGEABLE, Guarantee
from pipeline.selection.procedures.record import ONLY_POOLED, Decision, LastRank, Procedure, decision
from pipeline.selection.ranked import count_ranks, judge_ranks, of_decision
from pipeline.wording import percentage


def decide_by_bound(counts: RankCounts, alpha: Fraction, confidence: Fraction) -> Decision:
    """Procedure `bound`: the longest list, with its guarantee."""
    made = decision("bound", counts, alpha, bounds_of_lists(counts, confidence).longest(alpha))
    return replace(made, promise=guarantee_of_bound(confidence).promise)


def guarantee_of_bound(confidence: Fraction) -> Guarantee:
    """The guarantee of procedure `bound` at a confidence in (0, 1), which applies to this one list, not on average."""
    sure, rest = percentage(confidence), percentage(1 - confidence)
    return Guarantee(
        "finite-sample",
        EXCHANGEABLE,
        f"With {sure} confidence the share of wrong documents (those for which the null holds) in this one list is at "
        f"most alpha, for any number of documents: of audits with fresh documents, at most {rest} would give a list "
        "with a larger share. That is no average, and no single document is proven to be selected rightly.",
    )


def _answer(question: SelectionInput) -> Query[Answer]:
    selection, level = question.selection, question.level
    rank, against = calibration_of(selection.calibration).ranking(selection, question.seed, question.known)
    counts = yield from count_ranks(rank, against, question)
    alpha, confidence = level.alpha, level.confidence
    decided = decide_by_bound(counts, alpha, confidence)
    answer = of_decision(decided, counts, partial(judge_ranks, rank, against, decided.rank), question)
    return replace(answer, factor=None, resolution=lambda m: (fewest_in_list(counts.n, m, alpha, confidence), None))


def _curve(procedure: Procedure, selection: SelectionConfig, answer: Answer) -> LastRank:
    assert answer.counts is not None
    return bounds_of_lists(answer.counts, selection.exact_confidence).longest


BOUND = Procedure(
    "bound",
    guarantee_of_bound(Fraction(95, 100)),
    answer=_answer,
    curve=_curve,
    per_list=True,
    refuses=ONLY_POOLED,
)
