"""Run a configured selection: calibrate on known documents, then judge audit documents shard by shard.

`answer` is a generator. For each pass over the audit shards it yields an `Ask`: what to compute of a shard, and how to
merge two results. The merged result is sent back to it. So the same code runs in one process and on a cluster, and
several selections share their passes (`pipeline.selection.passes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from pipeline.config.selection import ESTIMATING, SelectionConfig
from pipeline.detectors.knockoff import simultaneous_draws
from pipeline.errors import UserError
from pipeline.selection import fusion, knockoff
from pipeline.selection.adadetect import fit_discriminant, fit_score
from pipeline.selection.bounds import bound_of, decide_by_bound, fewest_in_list
from pipeline.selection.conditional import simes_grid
from pipeline.selection.conformal import calibrate, p_values, ranks
from pipeline.selection.grid import Grid
from pipeline.selection.groups import calibrate_by_group, ranks_by_group
from pipeline.selection.moments import Moments
from pipeline.selection.passes import Answer, Ask, Asking, Batch, FusedScore, Judge, search_values
from pipeline.selection.procedures import Decision, decide, decide_by_scores, needs_known, strict
from pipeline.selection.promises import (
    NOTHING_PROVED,
    SPECIAL_TERMS,
    StrictAnswer,
    filter_terms,
    learnt_terms,
)
from pipeline.selection.proportion import KnownMembers, known_scores
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.resolution import Basis, Rule, known_needed
from pipeline.selection.schedule import Level, Slot, decide_in_slot, in_slot
from pipeline.selection.split import Sample, halves
from pipeline.selection.step_up import minimum_selectable, step_up
from pipeline.selection.weighted import calibrate_weighted, least_ranks, ranks_by_weight, weighted_resolution


def answer(
    selection: SelectionConfig, seed: int, known: Batch, others: Batch, quarantined: int, slot: Slot | None = None
) -> Asking[Answer]:
    """Decide a selection; a generator of the passes that it needs, which returns the answer.

    The answer carries its guarantee and the assumption of that guarantee.

    Args:
        selection: its configuration.
        seed: of the run; for random ties, splits and random weights.
        known: the null role's documents.
        others: documents that are known not to be nulls; may be empty.
        quarantined: audit documents without scores; hypotheses at p = 1.
        slot: the place in a schedule of scans, whose level stands for the selection's alpha; None: in no schedule.

    Raises:
        UserError: no calibration documents where they are needed, groups without any, no audit documents, or a
            selection that the rule of the schedule does not cover.
    """
    level = Level.of(selection, slot)
    plain = _weighted if selection.calibration == "weighted" else _ranked
    kinds = {"td4eval": _td4eval, "ktd": _ktd, "adadetect": _adadetect, "bound": _bounded}
    decided = yield from kinds.get(selection.procedure, plain)(selection, level, seed, known, others, quarantined)
    if decided.counts is None:
        return in_slot(decided, level, selection)
    bound = bound_of(selection, decided.counts, decided.rank, quarantined, level.confidence)
    return in_slot(replace(decided, bound=bound), level, selection)


def _ranked(
    selection: SelectionConfig, level: Level, seed: int, known: Batch, others: Batch, quarantined: int
) -> Asking[Answer]:
    rank, against = _ranking(selection, seed, known)
    counts = yield from _count(rank, against, quarantined)
    member_counts = RankCounts.of(rank(others), against) if len(others.matrix) else None
    if selection.calibration == "conditional":
        against = simes_grid(counts.n, Fraction(repr(selection.delta)))
        counts = counts.over(against)
        member_counts = member_counts.over(against) if member_counts is not None else None
    lambda_ = selection.exact_lambda
    if selection.procedure == "ptdi_known_members":
        estimate = yield from _known_scores(known.first, others.first, quarantined)
        decision = decide_by_scores(counts, level.alpha, estimate, len(others.matrix))
    elif level.slot is not None and level.slot.rule != "spend":
        decision = decide_in_slot(counts, level.slot)
    else:
        decision = decide(selection.procedure, counts, level.alpha, member_counts, lambda_)
    return _of_decision(decision, counts, partial(_judge_ranks, rank, against, decision.rank), lambda_=lambda_)


def _known_scores(known: np.ndarray, others: np.ndarray, quarantined: int) -> Asking[KnownMembers]:
    """PTDI's estimate of the share of nulls, of the mean scores of known and audited documents."""
    needs_known("ptdi_known_members", others.size)
    centre = float(np.median(known))
    audit = yield Ask(lambda batch: Moments.of(batch.first, centre))
    audit = audit if audit is not None else Moments.of(others[:0], centre)
    return known_scores(Moments.of(known, centre), Moments.of(others, centre), audit, quarantined)


def _ranking(selection: SelectionConfig, seed: int, known: Batch) -> tuple[Callable[[Batch], np.ndarray], int | Grid]:
    """A function from a batch to its ranks, and the number of calibration documents or grid that they refer to."""
    if selection.calibration == "by_group":
        if known.groups is None:
            raise UserError(f"selection {selection.name}: calibration by_group needs a group column in the corpus")
        groups = calibrate_by_group(known.first, known.groups)

        def by_group(batch: Batch) -> np.ndarray:
            if batch.groups is None:
                raise UserError(f"selection {selection.name}: the audit documents have no group column")
            group_ranks = ranks_by_group(
                batch.first, batch.groups, groups, selection.direction, selection.ties, batch.keys, seed
            )
            return group_ranks

        return by_group, groups.grid
    calibration = calibrate(known.first)

    def pooled(batch: Batch) -> np.ndarray:
        return ranks(batch.first, calibration, selection.direction, selection.ties, batch.keys, seed)

    return pooled, calibration.size


def _count(rank: Callable[[Batch], np.ndarray], against: int | Grid, quarantined: int) -> Asking[RankCounts]:
    counts = yield Ask(lambda batch: RankCounts.of(rank(batch), against))
    return (counts if counts is not None else RankCounts.empty(against)).with_quarantined(quarantined)


def _judge_ranks(
    rank: Callable[[Batch], np.ndarray], against: int | Grid, last: int, batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    audit_ranks = rank(batch)
    return p_values(audit_ranks, against), audit_ranks <= last


def _of_decision(
    decision: Decision,
    counts: RankCounts,
    judge: Judge,
    strict_name: str | None = None,
    weights: list[float] | None = None,
    lambda_: Fraction | None = None,
    halved: bool = False,
) -> Answer:
    """The answer of a decision from rank counts; `strict_name` is that of its strict answer, if not its procedure's."""
    safe, grid = strict(decision, counts, lambda_), counts.grid
    rule = Rule(decision.procedure, decision.alpha, grid.delta, halved)
    estimated = decision.procedure in ESTIMATING or decision.null_proportion != 1
    share = float(decision.factor) if decision.procedure == "storey" else decision.null_proportion  # Storey's: uncapped
    return Answer(
        judge=judge,
        n_calibration=counts.n,
        m=counts.m,
        threshold=decision.threshold,
        null_proportion=decision.null_proportion,
        guarantee=decision.guarantee,
        assumption=decision.assumption,
        promise=decision.promise,
        details=decision.details,
        resolution=partial(_resolution, grid, rule, decision.factor),
        strict=StrictAnswer(strict_name or safe.procedure, safe.n_selected, safe.threshold, safe.guarantee),
        factor=float(decision.factor),
        weights=weights,
        basis=Basis(halved, grid.groups > 1, share if estimated else None),
        counts=counts,
        rank=decision.rank,
        n_bh=decide("bh", counts, decision.alpha).n_selected if estimated else None,
    )


def _bounded(
    selection: SelectionConfig, level: Level, seed: int, known: Batch, others: Batch, quarantined: int
) -> Asking[Answer]:
    rank, against = _ranking(selection, seed, known)
    counts = yield from _count(rank, against, quarantined)
    alpha, confidence = level.alpha, level.confidence
    decision = decide_by_bound(counts, alpha, confidence)
    answer = _of_decision(decision, counts, partial(_judge_ranks, rank, against, decision.rank))
    return replace(answer, factor=None, resolution=lambda m: (fewest_in_list(counts.n, m, alpha, confidence), None))


def _resolution(grid: Grid, rule: Rule, factor: Fraction, m: int) -> tuple[int, int]:
    return minimum_selectable(grid, m, rule.alpha, factor), known_needed(rule, m, max(1, m // 100), factor)


def _weighted(
    selection: SelectionConfig, level: Level, seed: int, known: Batch, others: Batch, quarantined: int
) -> Asking[Answer]:
    if known.weights is None:
        raise UserError(f"selection {selection.name}: calibration weighted needs a weight of every document")
    calibration = calibrate_weighted(known.first, known.weights)
    grid = calibration.grid

    def rank(batch: Batch) -> np.ndarray:
        assert batch.weights is not None
        weights, direction = batch.weights, selection.direction
        return ranks_by_weight(batch.first, weights, calibration, direction, selection.ties, batch.keys, seed)

    def count(batch: Batch) -> np.ndarray:
        assert batch.weights is not None
        both = (rank(batch), least_ranks(batch.weights, calibration))
        return np.stack([RankCounts.of(places, grid).counts for places in both])

    counted = yield Ask(count)
    rows = counted if counted is not None else np.zeros((2, grid.size), dtype=np.int64)
    counts, least = (RankCounts(row, grid).with_quarantined(quarantined) for row in rows)
    decision = decide(selection.procedure, counts, level.alpha)
    return replace(
        _of_decision(decision, counts, partial(_judge_ranks, rank, grid, decision.rank)),
        resolution=lambda _: weighted_resolution(least, decision.alpha, decision.factor),
        strict=NOTHING_PROVED,
        effective=calibration.effective,
    )


def _adadetect(
    selection: SelectionConfig, level: Level, seed: int, known: Batch, others: Batch, quarantined: int
) -> Asking[Answer]:
    calibrate(known.first)
    halved = not len(others.matrix)
    first = halves(known.keys, seed) if halved else np.zeros(len(known.keys), dtype=bool)
    sample = Sample.of(known.keys[~first], known.matrix[~first], seed)
    audited = yield Ask(lambda batch: Sample.of(batch.keys, batch.matrix, seed))
    sample = sample if audited is None else sample + audited
    learnt = fit_score(known.matrix[first], sample.rows) if halved else fit_discriminant(others.matrix, sample.rows)
    calibration = calibrate(learnt.score(known.matrix[~first]))

    def rank(batch: Batch) -> np.ndarray:
        return ranks(learnt.score(batch.matrix), calibration, "members", selection.ties, batch.keys, seed)

    counts = yield from _count(rank, calibration.size, quarantined)
    terms = learnt_terms(not halved, selection.estimates)
    decision = decide(selection.step_up, counts, level.alpha, lambda_=selection.exact_lambda)
    details = {**decision.details, **({} if halved else {"known_members": float(len(others.matrix))})}
    decision = replace(decision, assumption=terms.assumption, promise=terms.promise, details=details)
    judge = partial(_judge_ranks, rank, calibration.size, decision.rank)
    fused = FusedScore(lambda batch: learnt.score(batch.matrix), ~first)
    return replace(_of_decision(decision, counts, judge, "adadetect", halved=halved), fused=fused)


def _td4eval(
    selection: SelectionConfig, level: Level, seed: int, known: Batch, others: Batch, quarantined: int
) -> Asking[Answer]:
    calibrate(known.first)
    repaired = yield from _symmetric(selection, level, seed, known, quarantined)
    if selection.reconformal:
        return repaired
    alpha, n = level.alpha, len(known.matrix)
    rank = partial(_rank_each, _sorted_columns(known.matrix), selection.direction)
    counts = yield from _count_each(rank, n, known.matrix.shape[1], quarantined)
    weights = fusion.weights([c.at_most(step_up(c, alpha)) for c in counts], selection.weights, seed)
    judge, threshold = yield from _fused(rank, n, weights, counts, alpha, quarantined)
    terms = SPECIAL_TERMS["td4eval"]
    return Answer(
        judge=judge,
        n_calibration=n,
        m=counts[0].m,
        threshold=threshold,
        null_proportion=1.0,
        guarantee=terms.guarantee,
        assumption=terms.assumption,
        promise=terms.promise,
        details={},
        resolution=partial(
            _resolution, Grid.uniform(n), Rule("td4eval" if len(counts) > 1 else "bh", alpha), Fraction(1)
        ),
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
        judge = partial(_judge_ranks, lambda batch: rank(batch)[:, column], n, last)
        return judge, float(Fraction(last, n + 1)) if last else None

    def values(batch: Batch) -> np.ndarray:
        return fusion.fuse(rank(batch), n, weights)

    cut = yield from search_values(fusion.find_threshold(alpha, quarantined), values)

    def judge_fused(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        p = values(batch)
        return p.astype(np.float64), p <= np.float32(0 if cut.value is None else cut.value)

    return judge_fused, cut.value


def _symmetric(selection: SelectionConfig, level: Level, seed: int, known: Batch, quarantined: int) -> Asking[Answer]:
    """Fusion whose p-values are valid in finite samples: `fusion.symmetric_weights` on split calibration documents."""
    alpha, d = level.alpha, known.matrix.shape[1]
    if len(known.matrix) < 4:
        raise UserError(f"selection {selection.name}: td4eval needs at least 4 calibration documents")
    reference = halves(known.keys, seed)
    n = int(reference.sum())
    rank = partial(_rank_each, _sorted_columns(known.matrix[reference]), selection.direction)
    calibration_ranks = rank(Batch(known.matrix[~reference], None, known.keys[~reference]))
    audit = yield from _count_each(rank, n, d, quarantined)
    calibration = [RankCounts.of(calibration_ranks[:, i], n) for i in range(d)]
    weights = fusion.symmetric_weights(audit, calibration, alpha, selection.weights, seed)
    statistics = calibrate(fusion.statistic(calibration_ranks, n, weights))

    def place(batch: Batch) -> np.ndarray:
        return ranks(fusion.statistic(rank(batch), n, weights), statistics, "members", selection.ties, batch.keys, seed)

    counts = yield from _count(place, statistics.size, quarantined)
    decision = decide(selection.step_up, counts, alpha, lambda_=selection.exact_lambda)
    judge = partial(_judge_ranks, place, statistics.size, decision.rank)
    decided = _of_decision(decision, counts, judge, "td4eval, reconformal", weights.tolist(), halved=True)
    return replace(decided, fused=FusedScore(lambda batch: fusion.statistic(rank(batch), n, weights), ~reference))


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


def _ktd(
    selection: SelectionConfig, level: Level, seed: int, known: Batch, others: Batch, quarantined: int
) -> Asking[Answer]:
    q, draws = level.alpha, simultaneous_draws(selection.detectors[0]) or 1
    m = quarantined + ((yield Ask(lambda batch: len(batch.matrix))) or 0)
    if m == 0:
        raise UserError("no audit documents")
    cut = yield from search_values(knockoff.find_threshold(q * draws), operator.attrgetter("first"))
    conformal = None
    if len(known.matrix):
        conformal = yield from _ranked(_as_bh(selection), level, seed, known, others, quarantined)
    terms = filter_terms(draws)
    least, sentence = knockoff.fewest(q, m, draws)
    return Answer(
        judge=partial(_judge_knockoff, cut, conformal.judge if conformal is not None else None),
        n_calibration=len(known.matrix),
        m=m,
        threshold=None,
        null_proportion=1.0,
        guarantee=terms.guarantee,
        assumption=terms.assumption,
        promise=terms.promise,
        details={} if cut.value is None else {"smallest_w_selected": cut.value},
        resolution=lambda _: (least, len(known.matrix)),
        strict=conformal.strict if conformal is not None else StrictAnswer("bh", 0, None, "finite-sample"),
        symmetry=knockoff.sign_symmetry(known.first, draws),
        basis=Basis(sentence=sentence),
    )


def _as_bh(selection: SelectionConfig) -> SelectionConfig:
    return selection.model_copy(update={"procedure": "bh"})


def _judge_knockoff(cut: fusion.Threshold, conformal: Judge | None, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    p = conformal(batch)[0] if conformal is not None else np.ones(len(batch.matrix))
    return p, knockoff.is_selected(batch.first, cut)
