"""TD4Eval: fusion of several detectors by a weighted Cauchy combination of their p-values."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np

from pipeline.errors import UserError
from pipeline.selection.combined import calibrating_halves, count_combined, levelled
from pipeline.selection.conformal import Grid, RankCounts, calibrate, ranks
from pipeline.selection.folds import Answer, Fold, Judge, Query, RoleScores, SelectionInput, search_values
from pipeline.selection.guarantees import NULLS, SHARE, Guarantee
from pipeline.selection.procedures.bh import BH
from pipeline.selection.procedures.record import (
    ONLY_AVERAGES,
    Options,
    Procedure,
    Rule,
    applied_to,
    decide,
    procedure_of,
)
from pipeline.selection.ranked import by_ranks, judge_ranks, resolution_at
from pipeline.selection.step_up import ONE, step_up
from pipeline.selection.thresholds import NO_VALUE, Holds, Threshold, find_place, pattern_value

Weights = Literal["rejections", "equal", "random", "max"]

UNIT_BITS = 61
"""Bits of the largest term of the statistic as an integer; the sum of the weights, rounded, may be a little above 1."""

AT_ONCE = 1 << 14
"""Number of documents that are fused together, small enough for the cache of a processor."""

ROUNDING = 2.0**-46
"""Relative error of a fused p-value as a multiple of 1 / (2(n + 1)), for each of its multiples: 64 units of float64."""


def _answer(question: SelectionInput) -> Query[Answer]:
    """Fuse p-values with weights from the audited documents; with `reconformal`, with symmetric weights."""
    selection, known, quarantined = question.selection, question.known, question.quarantined
    calibrate(known.first)
    repaired = yield from _symmetric(question)
    if selection.reconformal:
        return repaired
    alpha, n = question.level.alpha, len(known.matrix)
    rank = partial(_rank_each, _sorted_columns(known.matrix), selection.direction)
    counts = yield from _count_each(rank, n, known.matrix.shape[1], quarantined)
    weights = fusion_weights([c.at_most(step_up(c, alpha)) for c in counts], selection.weights, question.seed)
    judge, threshold = yield from _fused(rank, n, weights, counts, alpha, quarantined)
    stated = TD4EVAL.terms
    used, _ = applied_to(selection)
    return Answer(
        judge=judge,
        n_calibration=n,
        m=counts[0].m,
        threshold=threshold,
        guarantee=stated.guarantee,
        assumption=stated.assumption,
        promise=stated.promise,
        resolution=partial(resolution_at, Grid.uniform(n), Rule(used, alpha), ONE),
        strict=repaired.strict,
        factor=1.0,
        weights=weights.tolist(),
        fused=lambda batch: statistic(rank(batch), n, weights),
        dependence=question.dependence,
    )


def _fused(
    rank: Callable[[RoleScores], np.ndarray],
    n: int,
    weights: np.ndarray,
    counts: Sequence[RankCounts],
    alpha: Fraction,
    quarantined: int,
) -> Query[tuple[Judge, float | None]]:
    """Selection by fused p-values, and the largest selected one; ranks if only one detector has weight."""
    weighted = np.flatnonzero(weights).tolist()
    if len(weighted) == 1:  # its p-values are not clipped
        (column,) = weighted
        last = step_up(counts[column], alpha)
        judge = partial(judge_ranks, lambda batch: rank(batch)[:, column], n, last)
        return judge, float(Fraction(last, n + 1)) if last else None

    if not weighted:
        return (lambda batch: (np.ones(len(batch.matrix)), np.zeros(len(batch.matrix), dtype=bool))), None

    def places(batch: RoleScores) -> np.ndarray:
        return fused_places(rank(batch), n, weights)

    cut = yield from search_values(find_fused_threshold(alpha, n, quarantined), places)

    def judge_fused(batch: RoleScores) -> tuple[np.ndarray, np.ndarray]:
        p = p_at(places(batch), n)
        return p, p <= (0.0 if cut.value is None else cut.value)

    return judge_fused, cut.value


def _symmetric(question: SelectionInput) -> Query[Answer]:
    """Fusion with valid p-values in finite samples: `symmetric_weights` on split calibration documents."""
    question, level = yield from levelled(question)
    selection, known, seed = question.selection, question.known, question.seed
    alpha, d = question.level.alpha, known.matrix.shape[1]
    reference = calibrating_halves(question)
    n = int(reference.sum())
    if len(known.matrix) < 4 or not n:
        least = "4 calibration documents" if len(known.matrix) < 4 else "2 calibration documents in some group"
        raise UserError(f"selection {selection.name}: td4eval needs at least {least}")
    rank = partial(_rank_each, _sorted_columns(known.matrix[reference]), selection.direction)
    ranking = known.where(~reference)
    calibration_ranks = rank(ranking)
    audit = yield from _count_each(lambda batch: rank(level(batch)), n, d, question.quarantined)
    calibration = [RankCounts.of(calibration_ranks[:, i], n) for i in range(d)]
    weights = symmetric_weights(audit, calibration, alpha, selection.weights, seed)

    def fused(batch: RoleScores) -> np.ndarray:
        return statistic(rank(batch), n, weights)

    counted = yield from count_combined(fused, level, ranking, question)
    counts = counted.counts
    decided = decide(selection.step_up, counts, alpha, lambda_=selection.exact_lambda)
    answer = yield from by_ranks(decided, counts, counted.ranking, question, "td4eval, reconformal", halved=True)
    return replace(answer, groups=counted.groups, weights=weights.tolist(), fused=lambda batch: fused(level(batch)))


def _sorted_columns(matrix: np.ndarray) -> list[np.ndarray]:
    return [calibrate(column) for column in matrix.T]


def _rank_each(calibration: list[np.ndarray], direction: Any, batch: RoleScores) -> np.ndarray:
    """Ranks for each detector, int64, (documents, detectors)."""
    columns = [ranks(c, known, direction) for c, known in zip(batch.matrix.T, calibration, strict=True)]
    return np.stack(columns, axis=1)


def _count_each(
    rank: Callable[[RoleScores], np.ndarray], n: int, detectors: int, quarantined: int
) -> Query[list[RankCounts]]:
    def count(batch: RoleScores) -> np.ndarray:
        return np.stack([RankCounts.of(column, n).counts for column in rank(batch).T])

    counts = yield Fold(count)
    if counts is None:
        counts = np.zeros((detectors, n + 1), dtype=np.int64)
    return [RankCounts(row).with_quarantined(quarantined) for row in counts]


def _inner(options: Options) -> tuple[Procedure, bool]:
    if options.reconformal:
        return procedure_of(options.step_up), True
    return (BH if options.detectors == 1 else TD4EVAL), False


TD4EVAL = Procedure(
    "td4eval",
    Guarantee(
        "heuristic",
        "None is known that would do: the weights are chosen by the audited documents that they then judge, so not "
        f"even detectors that are independent of one another for those {NULLS} keep the share of wrong ones down.",
        f"{SHARE} is not guaranteed to stay at or below alpha. With six independent detectors and no document to be "
        "found, this procedure selected some in 47% of simulated audits of one document and in 41% of those of 20, at "
        "alpha = 0.1, where 10% are due. The strict answer beside this one ranks the fused statistic anew and holds.",
    ),
    answer=_answer,
    inner=_inner,
    several=True,
    fuses_p=True,
    smooths=True,
    weighs=True,
    refuses=ONLY_AVERAGES,
    refuses_heuristic={"by_group": "takes calibration pooled, or by_group with reconformal: true, got by_group"},
)


def fusion_weights(rejections: Sequence[int], kind: Weights, seed: int = 0) -> np.ndarray:
    """Weights of the detectors, from the number of audit documents that BH selects with each.

    `rejections` is TD4Eval's choice, R_k / sum R; `equal`, `random` (normalized uniform numbers) and `max` (only the
    first detector with the most rejections) are its ablations.

    Returns:
        float64, (detectors,), with sum 1; all zero if no detector rejects anything, and then nothing is selected.
    """
    counts = np.asarray(rejections, dtype=np.float64)
    if kind == "rejections":
        raw = counts
    elif kind == "equal":
        raw = np.ones_like(counts)
    elif kind == "random":
        raw = np.random.default_rng(seed).random(counts.size)
    else:
        raw = (np.arange(counts.size) == counts.argmax()).astype(np.float64)
    return raw / raw.sum() if counts.any() else np.zeros_like(counts)


def statistic(ranks: np.ndarray, n: int, weights: np.ndarray) -> np.ndarray:
    """The weighted Cauchy statistic of each document: T = sum_k w_k tan(pi (1/2 - p_k)).

    p_k is the rank over n + 1, clipped to [1 / (2(n + 1)), 1 - 1 / (2(n + 1))]. Terms come from one table, in multiples
    of a power of two below 2^-60 (n + 1), and are added as integers: documents with the same terms have the same bits
    in any shard and in any order of the detectors, and opposite terms cancel.

    Args:
        ranks: integers in 1..n + 1, (documents, detectors).
        n: number of calibration documents of the ranks.
        weights: (detectors,), >= 0, with a sum of at most 1.

    Returns:
        float64, (documents,); higher is more evidence against the null.
    """
    tables, unit = _tables(n, weights)
    return np.concatenate([_sum_terms(ranks[some], tables, unit) for some in _parts(len(ranks))])


def _tables(n: int, weights: np.ndarray) -> tuple[dict[int, np.ndarray], float]:
    """The terms of each detector with a weight by rank, int64, (n + 2,), in units of the second value."""
    table = _tangents(n)
    unit = math.ldexp(1.0, math.frexp(table[0])[1] - UNIT_BITS)
    columns = np.flatnonzero(weights).tolist()
    return {column: np.rint(weights[column] * table / unit).astype(np.int64) for column in columns}, unit


def _sum_terms(ranks: np.ndarray, tables: Mapping[int, np.ndarray], unit: float) -> np.ndarray:
    total = np.zeros(len(ranks), dtype=np.int64)
    for column, table in tables.items():
        total += np.take(table, ranks[:, column])
    return total * unit


def _parts(documents: int) -> list[slice]:
    """Parts of documents that are computed together, at least one."""
    return [slice(begin, begin + AT_ONCE) for begin in range(0, max(1, documents), AT_ONCE)]


def _tangents(n: int) -> np.ndarray:
    """tan(pi (1/2 - p)) at the clipped p of each rank, exactly antisymmetric: float64, (n + 2,), descending."""
    rank = np.arange(n + 2)  # 0, which no document has, is taken for a p below all
    nearer = np.maximum(np.minimum(rank, n + 1 - rank), 0.5)  # to either end
    size = 1 / np.tan(np.pi * nearer / (n + 1))
    table: np.ndarray = np.select([2 * rank < n + 1, 2 * rank > n + 1], [size, -size], 0.0)
    return table


def fuse(ranks: np.ndarray, n: int, weights: np.ndarray) -> np.ndarray:
    """Fused p-values: arctan2(1, T) / pi with T from `statistic`, `rounded_up`.

    Guaranteed: nothing. The p-values are uniform for nulls if the detectors are independent and the weights fixed, or
    if all weight is on one detector that was chosen beforehand; for correlated detectors only the far tail is nearly
    correct (Liu & Xie 2020), and BH on many documents uses the body. In a simulation with six equicorrelated (.5)
    detectors the FDR is .089 for (share of nulls) alpha = .075. Weights from the same documents that are selected
    increase it further: a single null document is selected by six independent detectors with probability
    1 - (1 - alpha)^6, .47 at alpha = .1.

    Args:
        ranks: as in `statistic`.
        n: number of calibration documents.
        weights: result of `fusion_weights`; all zero gives p = 1.

    Returns:
        float64, (documents,), in (0, 1].
    """
    if not np.any(weights):
        return np.ones(ranks.shape[0])
    return p_at(fused_places(ranks, n, weights), n)


def fused_places(ranks: np.ndarray, n: int, weights: np.ndarray) -> np.ndarray:
    """The places of the fused p-values of `fuse`, for counting: uint32, (documents,).

    A place is twice the bit pattern of the next float32 value, less 1 for a multiple of 1 / (2(n + 1)) below it.
    """
    tables, unit = _tables(n, weights)
    places = [
        p_value_places(np.arctan2(1.0, _sum_terms(ranks[some], tables, unit)) / np.pi, n) for some in _parts(len(ranks))
    ]
    return np.concatenate(places)


def rounded_up(p: np.ndarray, n: int) -> np.ndarray:
    """Round p-values up to the next float32 value or multiple of 1 / (2(n + 1)), so that no exact tie is lost.

    BH can tie only at a rational p. With rational weights i T lies in the field of the roots of unity of order
    2(n + 1), and so does (i T + 1) / (i T - 1) = exp(2 pi i p), a root of unity if p is rational. All roots of unity in
    that field have this order, so p is a multiple of 1 / (2(n + 1)): k / (n + 1) where all detectors give rank k, and
    others, such as 1/2 where two of them are opposite. A p-value within the rounding errors of such a multiple is that
    multiple. Above 2^23 / p calibration documents float32 values no longer tell all multiples apart, and p is rounded
    up to the largest of them.

    Args:
        p: float64, (documents,), in [0, 1].
        n: number of calibration documents.

    Returns:
        float64, (documents,): each value is a float32 value or the nearest float to a multiple of 1 / (2(n + 1)).
    """
    return p_at(p_value_places(np.asarray(p, dtype=np.float64), n), n)


def p_value_places(p: np.ndarray, n: int) -> np.ndarray:
    """The places of p-values, float64 in [0, 1], `rounded_up`: uint32, (documents,)."""
    grid = 2 * (n + 1)
    up = p.astype(np.float32)
    bits = up.view(np.uint32)
    bits += up < p  # the bits of the next float32 value
    places, exact = bits * np.uint32(2), p * grid
    last = np.ceil(up * np.float64(grid))
    last -= 1  # the largest multiple below each
    near = np.flatnonzero(last >= exact - min(0.25, ROUNDING * grid * (grid + 1)))
    exact = exact[near]
    places[near[last[near] >= exact - np.minimum(0.25, ROUNDING * exact * (exact + 1))]] -= np.uint32(1)
    return places


def p_at(places: np.ndarray, n: int) -> np.ndarray:
    """The p-values at places: float64, (documents,)."""
    p = ((places + (places & np.uint32(1))) >> np.uint32(1)).view(np.float32).astype(np.float64)
    odd, grid = np.flatnonzero(places & np.uint32(1)), 2 * (n + 1)
    p[odd] = (np.ceil(p[odd] * grid) - 1) / grid
    return p


def find_fused_threshold(
    alpha: Fraction, n: int, quarantined: int = 0
) -> Generator[Callable[[np.ndarray], Any], Any, Threshold]:
    """BH's threshold of fused p-values distributed over shards: the largest p with m p <= alpha R(p).

    R(p) is the number of p-values up to p. The folds are those of `thresholds.find_place`, over `fused_places`.

    Guaranteed: equal to sorting the values and comparing in exact rationals, m p alpha_den <= alpha_num R.

    Args:
        alpha: exact, in (0, 1).
        n: number of calibration documents.
        quarantined: further hypotheses at p = 1, which are never selected.
    """

    def rule(count: int) -> Holds:
        m = count + quarantined

        def holds(place: int, before: Sequence[int], reached: Sequence[int]) -> bool:
            numerator, denominator = _value_at(place, n).as_integer_ratio()
            return m * numerator * alpha.denominator <= alpha.numerator * reached[0] * denominator

        return holds

    last = yield from find_place(lambda places: [places], rule)
    return NO_VALUE if last is None else Threshold(float(_value_at(last[0], n)), last[1][0])


def _value_at(place: int, n: int) -> Fraction:
    """The exact value at a place: a float32 value, or the largest multiple of 1 / (2(n + 1)) below it."""
    value = Fraction(pattern_value((place + 1) // 2))
    return value if place % 2 == 0 else Fraction(math.ceil(value * 2 * (n + 1)) - 1, 2 * (n + 1))


def symmetric_weights(
    audit: Sequence[RankCounts], calibration: Sequence[RankCounts], alpha: Fraction, kind: Weights, seed: int = 0
) -> np.ndarray:
    """Weights that are independent of which documents are audited, which makes reconformal fusion exact.

    Calibration documents are split (`conformal.halves`): one half, the reference, gives the ranks for each detector;
    the other is ranked like the audit documents. BH then runs on audit and calibration documents together, at the level
    (n + m) / (n + m / alpha), which gives BH's threshold at alpha on the audit documents if the n calibration p-values
    are evenly spaced. Its rejections are those for `fusion_weights` times 1 + n alpha / m, plus noise. If no detector
    rejects anything the weights are equal.

    Guaranteed: T is one function of a document, and the function is invariant when audit and calibration documents
    swap places. So the ranks of the audit documents' T among the calibration documents' T are those of AdaDetect
    (Marandon, Lei, Mary & Roquain 2024) with T as its score, and BH on them has FDR <= (share of nulls) alpha in
    finite samples, if the null audit documents and the calibration documents are exchangeable given the others.

    Args:
        audit: rank counts of the m audit documents against the reference half, one per detector, with quarantined
            documents at p = 1.
        calibration: rank counts of the n documents of the other half, against the same reference half.
        alpha: exact alpha of the selection.
        kind: as in `fusion_weights`.
        seed: as in `fusion_weights`.

    Returns:
        float64, (detectors,), with sum 1.
    """
    m, n = audit[0].m, calibration[0].m
    level = Fraction(n + m) / (n + m / alpha)
    pooled = [a + c for a, c in zip(audit, calibration, strict=True)]
    rejections = [counts.at_most(step_up(counts, level)) for counts in pooled]
    return fusion_weights(rejections, kind, seed) if any(rejections) else fusion_weights([1] * len(rejections), "equal")
