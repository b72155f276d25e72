"""Run a configured selection: calibrate on known documents, then judge audit documents shard by shard.

`answer` is a generator. For each pass over the audit shards it yields an `Ask`: what to compute of a shard, and how to
merge two results. The merged result is sent back to it. So the same code runs in one process and on a cluster, and
`together` lets several selections share their passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection import fusion, knockoff
from pipeline.selection.adadetect import fit_score
from pipeline.selection.conditional import simes_grid
from pipeline.selection.conformal import calibrate, p_values, ranks
from pipeline.selection.grid import Grid
from pipeline.selection.groups import calibrate_by_group, ranks_by_group
from pipeline.selection.procedures import Decision, decide, strict
from pipeline.selection.promises import SPECIAL_TERMS, Guarantee, StrictAnswer
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.split import Sample, halves
from pipeline.selection.step_up import calibration_needed, minimum_selectable, step_up

Judge = Callable[["Batch"], tuple[np.ndarray, np.ndarray]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents of one role or shard, in order."""

    matrix: np.ndarray  # float64, (documents, detectors), finite
    groups: pa.ChunkedArray | None
    keys: np.ndarray  # int64 hashes of the ids, (documents,)

    @property
    def first(self) -> np.ndarray:
        """Scores of the first detector."""
        return self.matrix[:, 0]


NOBODY = Batch(np.empty((0, 1)), None, np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Ask:
    """One pass over the audit shards: a function of each, and how two of its results become one."""

    of_shard: Callable[[Batch], Any]
    merge: Callable[[Any, Any], Any] = operator.add


Asking = Generator[Ask, Any, T]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The decision on the audit documents, and its terms."""

    judge: Judge  # a batch -> p-values float64 in (0, 1] and bool selected, both (documents,)
    n_calibration: int
    m: int  # audit documents, quarantined ones included
    threshold: float | None  # the largest p-value selected; None for the knockoff filter
    null_proportion: float
    guarantee: Guarantee
    assumption: str
    promise: str
    details: dict[str, float]
    resolution: Callable[[int], tuple[int, int]]  # m -> fewest selectable, calibration needed for 1%
    strict: StrictAnswer
    factor: float | None = None  # a p-value is selected up to alpha R / (factor m), R as many as it selects
    weights: list[float] | None = None
    symmetry: knockoff.SignSymmetry | None = None  # of the signs that the knockoff filter reads


def answer(selection: SelectionConfig, seed: int, known: Batch, others: Batch, quarantined: int) -> Asking[Answer]:
    """Decide a selection; a generator of the passes that it needs, which returns the answer.

    The answer carries its guarantee and the assumption of that guarantee.

    Args:
        selection: its configuration.
        seed: of the run; for random ties, splits and random weights.
        known: the null role's documents.
        others: documents that are known not to be nulls; may be empty.
        quarantined: audit documents without scores; hypotheses at p = 1.

    Raises:
        UserError: no calibration documents where they are needed, groups without any, no audit documents.
    """
    kind = {"td4eval": _td4eval, "ktd": _ktd, "adadetect": _adadetect}.get(selection.procedure, _ranked)
    return kind(selection, seed, known, others, quarantined)


def together(
    asking: Sequence[Asking[Answer]], run_pass: Callable[[Sequence[tuple[int, Ask]]], dict[int, Any]]
) -> list[Answer]:
    """Decide several selections at once: each pass over the shards serves all that still need one.

    Args:
        asking: from `answer`.
        run_pass: given (index of the selection, ask) of this pass, returns the merged result of each; an index
            without any shard is absent.
    """
    answers: dict[int, Answer] = {}
    results: dict[int, Any] = dict.fromkeys(range(len(asking)))
    while len(answers) < len(asking):
        asks: list[tuple[int, Ask]] = []
        for index, generator in enumerate(asking):
            if index not in answers:
                try:
                    asks.append((index, generator.send(results.get(index))))
                except StopIteration as done:
                    answers[index] = done.value
        results = run_pass(asks) if asks else {}
    return [answers[index] for index in range(len(asking))]


def _ranked(selection: SelectionConfig, seed: int, known: Batch, others: Batch, quarantined: int) -> Asking[Answer]:
    rank, against = _ranking(selection, seed, known)
    counts = yield from _count(rank, against, quarantined)
    member_counts = RankCounts.of(rank(others), against) if len(others.matrix) else None
    if selection.calibration == "conditional":
        against = simes_grid(counts.n, Fraction(repr(selection.delta)))
        counts = counts.over(against)
        member_counts = member_counts.over(against) if member_counts is not None else None
    decision = decide(selection.procedure, counts, selection.exact_alpha, member_counts)
    return _of_decision(decision, counts, partial(_judge_ranks, rank, against, decision.rank))


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
) -> Answer:
    """The answer of a decision from rank counts; `strict_name` is that of its strict answer, if not its procedure's."""
    safe = strict(decision, counts)
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
        resolution=partial(_resolution, counts.grid, decision.alpha, decision.factor),
        strict=StrictAnswer(strict_name or safe.procedure, safe.n_selected, safe.threshold, safe.guarantee),
        factor=float(decision.factor),
        weights=weights,
    )


def _resolution(grid: Grid, alpha: Fraction, factor: Fraction, m: int) -> tuple[int, int]:
    return minimum_selectable(grid, m, alpha, factor), calibration_needed(m, alpha, max(1, m // 100), factor)


def _adadetect(selection: SelectionConfig, seed: int, known: Batch, others: Batch, quarantined: int) -> Asking[Answer]:
    calibrate(known.first)
    first = halves(known.keys, seed)
    sample = Sample.of(known.keys[~first], known.matrix[~first], seed)
    audited = yield Ask(lambda batch: Sample.of(batch.keys, batch.matrix, seed))
    sample = sample if audited is None else sample + audited
    learnt = fit_score(known.matrix[first], sample.rows)
    calibration = calibrate(learnt.score(known.matrix[~first]))

    def rank(batch: Batch) -> np.ndarray:
        return ranks(learnt.score(batch.matrix), calibration, "members", selection.ties, batch.keys, seed)

    counts = yield from _count(rank, calibration.size, quarantined)
    terms = SPECIAL_TERMS["adadetect"]
    decision = replace(decide("bh", counts, selection.exact_alpha), assumption=terms.assumption, promise=terms.promise)
    judge = partial(_judge_ranks, rank, calibration.size, decision.rank)
    return _of_decision(decision, counts, judge, "adadetect")


def _td4eval(selection: SelectionConfig, seed: int, known: Batch, others: Batch, quarantined: int) -> Asking[Answer]:
    calibrate(known.first)
    repaired = yield from _symmetric(selection, seed, known, quarantined)
    if selection.reconformal:
        return repaired
    alpha, n = selection.exact_alpha, len(known.matrix)
    rank = partial(_rank_each, _sorted_columns(known.matrix), selection.direction)
    counts = yield from _count_each(rank, n, known.matrix.shape[1], quarantined)
    weights = fusion.weights([c.at_most(step_up(c, alpha)) for c in counts], selection.weights, seed)
    fused_threshold = yield from _find_threshold(
        fusion.find_threshold(alpha, quarantined), lambda batch: fusion.fuse(rank(batch), n, weights)
    )

    def judge(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        p = fusion.fuse(rank(batch), n, weights)
        chosen = (
            np.zeros(p.size, dtype=bool) if fused_threshold.value is None else p <= np.float32(fused_threshold.value)
        )
        return p.astype(np.float64), chosen

    terms = SPECIAL_TERMS["td4eval"]
    return Answer(
        judge=judge,
        n_calibration=n,
        m=counts[0].m,
        threshold=fused_threshold.value,
        null_proportion=1.0,
        guarantee=terms.guarantee,
        assumption=terms.assumption,
        promise=terms.promise,
        details={},
        resolution=partial(_resolution, Grid.uniform(n), alpha, Fraction(1)),
        strict=repaired.strict,
        factor=1.0,
        weights=weights.tolist(),
    )


def _symmetric(selection: SelectionConfig, seed: int, known: Batch, quarantined: int) -> Asking[Answer]:
    """Fusion whose p-values are valid in finite samples: `fusion.symmetric_weights` on split calibration documents."""
    alpha, d = selection.exact_alpha, known.matrix.shape[1]
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
    decision = decide("bh", counts, alpha)
    judge = partial(_judge_ranks, place, statistics.size, decision.rank)
    return _of_decision(decision, counts, judge, "td4eval, reconformal", weights.tolist())


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


def _find_threshold(
    passes: Generator[Callable[[np.ndarray], Any], Any, T], values: Callable[[Batch], np.ndarray]
) -> Asking[T]:
    """Run the passes of `fusion.find_threshold` or `knockoff.find_threshold` over the values of every shard."""
    counts = None
    while True:
        try:
            count = passes.send(counts)
        except StopIteration as end:
            return end.value
        counts = yield Ask(partial(_count_values, count, values))


def _count_values(count: Callable[[np.ndarray], Any], values: Callable[[Batch], np.ndarray], batch: Batch) -> Any:
    return count(values(batch))


def _ktd(selection: SelectionConfig, seed: int, known: Batch, others: Batch, quarantined: int) -> Asking[Answer]:
    q = selection.exact_alpha
    m = quarantined + ((yield Ask(lambda batch: len(batch.matrix))) or 0)
    if m == 0:
        raise UserError("no audit documents")
    cut = yield from _find_threshold(knockoff.find_threshold(q), operator.attrgetter("first"))
    conformal = None
    if len(known.matrix):
        conformal = yield from _ranked(_as_bh(selection), seed, known, others, quarantined)
    terms = SPECIAL_TERMS["ktd"]
    least, _ = knockoff.fewest(q, m)
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
        symmetry=knockoff.sign_symmetry(known.first),
    )


def _as_bh(selection: SelectionConfig) -> SelectionConfig:
    return selection.model_copy(update={"procedure": "bh"})


def _judge_knockoff(cut: fusion.Threshold, conformal: Judge | None, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    p = conformal(batch)[0] if conformal is not None else np.ones(len(batch.matrix))
    return p, knockoff.is_selected(batch.first, cut)
