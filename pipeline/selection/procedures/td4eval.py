"""TD4Eval: fusion of several detectors by a weighted Cauchy combination of their p-values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.selection import fusion
from pipeline.selection.conformal import Grid, calibrate, halves, ranks
from pipeline.selection.passes import Answer, Ask, Asking, Batch, FusedScore, Judge, SelectionInput, search_values
from pipeline.selection.procedures.bh import BH
from pipeline.selection.procedures.record import ONLY_POOLED, Options, Procedure, Rule, applied_to, decide, procedure_of
from pipeline.selection.promises import NULLS, SHARE, Terms
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.ranked import count_ranks, judge_ranks, of_decision, resolution_at
from pipeline.selection.step_up import ONE, step_up


def _answer(question: SelectionInput) -> Asking[Answer]:
    """Fuse p-values by weights that the audited documents choose; with `reconformal`, by symmetric ones."""
    selection, known, quarantined = question.selection, question.known, question.quarantined
    calibrate(known.first)
    repaired = yield from _symmetric(question)
    if selection.reconformal:
        return repaired
    alpha, n = question.level.alpha, len(known.matrix)
    rank = partial(_rank_each, _sorted_columns(known.matrix), selection.direction)
    counts = yield from _count_each(rank, n, known.matrix.shape[1], quarantined)
    weights = fusion.weights([c.at_most(step_up(c, alpha)) for c in counts], selection.weights, question.seed)
    judge, threshold = yield from _fused(rank, n, weights, counts, alpha, quarantined)
    terms = TD4EVAL.terms
    used, _ = applied_to(selection)
    return Answer(
        judge=judge,
        n_calibration=n,
        m=counts[0].m,
        threshold=threshold,
        guarantee=terms.guarantee,
        assumption=terms.assumption,
        promise=terms.promise,
        resolution=partial(resolution_at, Grid.uniform(n), Rule(used, alpha), ONE),
        strict=repaired.strict,
        factor=1.0,
        weights=weights.tolist(),
        fused=FusedScore(lambda batch: fusion.statistic(rank(batch), n, weights), np.ones(n, dtype=bool)),
    )


def _fused(
    rank: Callable[[Batch], np.ndarray],
    n: int,
    weights: np.ndarray,
    counts: Sequence[RankCounts],
    alpha: Fraction,
    quarantined: int,
) -> Asking[tuple[Judge, float | None]]:
    """Who is selected by fused p-values, and the largest that is; in exact ranks where one detector decides alone."""
    weighted = np.flatnonzero(weights).tolist()
    if len(weighted) == 1:  # the fused p-value is the detector's, rounded up: at an exact tie it would miss
        (column,) = weighted
        last = step_up(counts[column], alpha)
        judge = partial(judge_ranks, lambda batch: rank(batch)[:, column], n, last)
        return judge, float(Fraction(last, n + 1)) if last else None

    def values(batch: Batch) -> np.ndarray:
        return fusion.fuse(rank(batch), n, weights)

    cut = yield from search_values(fusion.find_threshold(alpha, quarantined), values)

    def judge_fused(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        p = values(batch)
        return p.astype(np.float64), p <= np.float32(0 if cut.value is None else cut.value)

    return judge_fused, cut.value


def _symmetric(question: SelectionInput) -> Asking[Answer]:
    """Fusion whose p-values are valid in finite samples: `fusion.symmetric_weights` on split calibration documents."""
    selection, known, seed = question.selection, question.known, question.seed
    alpha, d = question.level.alpha, known.matrix.shape[1]
    if len(known.matrix) < 4:
        raise UserError(f"selection {selection.name}: td4eval needs at least 4 calibration documents")
    reference = halves(known.keys, seed)
    n = int(reference.sum())
    rank = partial(_rank_each, _sorted_columns(known.matrix[reference]), selection.direction)
    calibration_ranks = rank(Batch(known.matrix[~reference], None, known.keys[~reference]))
    audit = yield from _count_each(rank, n, d, question.quarantined)
    calibration = [RankCounts.of(calibration_ranks[:, i], n) for i in range(d)]
    weights = fusion.symmetric_weights(audit, calibration, alpha, selection.weights, seed)
    statistics = calibrate(fusion.statistic(calibration_ranks, n, weights))

    def place(batch: Batch) -> np.ndarray:
        return ranks(fusion.statistic(rank(batch), n, weights), statistics, "members", batch.draws(selection, seed))

    counts = yield from count_ranks(place, statistics.size, question.quarantined)
    decided = decide(selection.step_up, counts, alpha, lambda_=selection.exact_lambda)
    judge = partial(judge_ranks, place, statistics.size, decided.rank)
    answer = of_decision(decided, counts, judge, "td4eval, reconformal", halved=True)
    fused = FusedScore(lambda batch: fusion.statistic(rank(batch), n, weights), ~reference)
    return replace(answer, weights=weights.tolist(), fused=fused)


def _sorted_columns(matrix: np.ndarray) -> list[np.ndarray]:
    return [calibrate(column) for column in matrix.T]


def _rank_each(calibration: list[np.ndarray], direction: Any, batch: Batch) -> np.ndarray:
    """Ranks by each detector, int64, (documents, detectors)."""
    columns = [ranks(c, known, direction) for c, known in zip(batch.matrix.T, calibration, strict=True)]
    return np.stack(columns, axis=1)


def _count_each(
    rank: Callable[[Batch], np.ndarray], n: int, detectors: int, quarantined: int
) -> Asking[list[RankCounts]]:
    def count(batch: Batch) -> np.ndarray:
        return np.stack([RankCounts.of(column, n).counts for column in rank(batch).T])

    counts = yield Ask(count)
    if counts is None:
        counts = np.zeros((detectors, n + 1), dtype=np.int64)
    return [RankCounts(row).with_quarantined(quarantined) for row in counts]


def _inner(options: Options) -> tuple[Procedure, bool]:
    if options.reconformal:
        return procedure_of(options.step_up), True
    return (BH if options.detectors == 1 else TD4EVAL), False


TD4EVAL = Procedure(
    "td4eval",
    Terms(
        "heuristic",
        "None is known that would do: the weights are chosen by the audited documents that they then judge, so not "
        f"even detectors that are independent of one another for those {NULLS} keep the share of wrong ones down.",
        f"{SHARE} is not promised to stay at or below alpha. With six independent detectors and no document to be "
        "found, this procedure selected some in 47% of simulated audits of one document and in 41% of those of 20, at "
        "alpha = 0.1, where 10% are due. The strict answer beside this one ranks the fused statistic anew and holds.",
    ),
    answer=_answer,
    inner=_inner,
    several=True,
    fuses_p=True,
    refuses=ONLY_POOLED,
)
