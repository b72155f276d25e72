"""AdaDetect: learn the weights of the detectors from the documents, with a finite-sample guarantee."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.combined import Level, calibrating_halves, count_combined, levelled
from pipeline.selection.conformal import POOL_SIZE, RankCounts, Sample, calibrate, ranks
from pipeline.selection.folds import Answer, Fold, Query, RoleScores, SelectionInput
from pipeline.selection.guarantees import EXCHANGEABLE, ON_AVERAGE, SHARE, Guarantee, adapted
from pipeline.selection.pool_score import PoolScore, center_and_scale, fit_pool, standardised_scores
from pipeline.selection.procedures.record import (
    ONLY_AVERAGES,
    LastRank,
    Options,
    Procedure,
    applied_to,
    decide,
    procedure_of,
)
from pipeline.selection.ranked import by_ranks
from pipeline.wording import documents

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

MAX_ITERATIONS = 300
RIDGE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class AdaScore:
    """A learnt score with plain arrays: the same bits for the same row in any shard.

    With z = (score - center) / scale, clipped to [-8, 8], the features are z_1..z_d, then z_i z_j for i <= j.
    The center is the median of the training documents, the scale half the range of their central 68%.
    """

    center: np.ndarray  # (detectors,)
    scale: np.ndarray  # (detectors,)
    coefficients: np.ndarray  # (features,)

    def score(self, matrix: np.ndarray) -> np.ndarray:
        """Scores of documents; higher: more similar to audit documents that are not nulls, in both directions.

        Args:
            matrix: scores, (documents, detectors).

        Returns:
            float64, (documents,). Rank it with `ranks(..., "members")` for either direction of the selection.
        """
        total = np.zeros(np.shape(matrix)[0])
        columns = list(standardised_scores(matrix, self.center, self.scale).T)
        for coefficient, feature in zip(self.coefficients, _features(columns), strict=True):
            total += coefficient * feature
        return total


def fit_score(calibration: np.ndarray, mixture: np.ndarray) -> AdaScore:
    """Learn to distinguish calibration documents from a mixture of further calibration and audit documents.

    AdaDetect (Marandon, Lei, Mary & Roquain 2024, section 3): split the calibration documents in two halves, train
    on the first half against the second half and the audit documents together, then rank the audit documents' score
    among the second half's and apply BH.

    Guaranteed: FDR <= (share of nulls) alpha in finite samples, if the null audit documents and the calibration
    documents are exchangeable given the others, because training cannot distinguish the second half from the audit
    documents. Therefore `mixture` must treat both equally: all of them, or a `Sample` of both by the hash of their ids.
    The order of its rows does not affect the result. Ties among scores only lower the FDR. The model affects only the
    power, not the guarantee.

    The model is logistic regression on scores, squares and products, which is optimal for two normal populations. Of
    five models simulated on five kinds of members at shares .05 to .5 (linear; with squares; with balanced classes;
    with products; boosted trees) only this one found, at every share, members that differ in any one of six detectors
    (power .76 at share .2, trees .13, linear .09). Trees were never better: their steps tie the highest scores.
    Products cost some power if members are few and squares are sufficient (.23 for .33).

    Args:
        calibration: scores of the first half, (documents, detectors).
        mixture: scores of documents of the second half and of audit documents, in any order.

    Raises:
        UserError: no documents on one of the two sides.
    """
    # slow import, needed only here
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    if not len(calibration) or not len(mixture):
        raise UserError(
            f"adadetect needs calibration documents in both halves, got {len(calibration)} to learn from "
            f"and {len(mixture)} in the mixture: take learn: pool, or give more calibration documents"
        )
    rows = np.concatenate([_sorted(calibration), _sorted(mixture)])
    labels = np.repeat([0, 1], [len(calibration), len(mixture)])
    center, scale = center_and_scale(rows)
    features = np.stack(_features(list(standardised_scores(rows, center, scale).T)), axis=1)
    # one thread: the same sums on every machine, and faster
    with _libraries().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # may only cost power
        fitted = LogisticRegression(max_iter=MAX_ITERATIONS).fit(features, labels)
    return AdaScore(center, scale, fitted.coef_[0])


def fit_discriminant(sought: np.ndarray, pool: np.ndarray) -> AdaScore:
    """Learn to distinguish known members (or non-members) from the unordered pool of calibration and audit documents.

    Fisher's linear discriminant: the pooled covariance of both sides plus 1e-6, on standardized scores.

    Guaranteed: FDR <= (share of nulls) alpha in finite samples by BH on the ranks of the audit documents' score among
    those of ALL calibration documents, and <= alpha by Storey's (Marandon, Lei, Mary & Roquain 2024), for any `sought`,
    if the null audit documents and the calibration documents are exchangeable given `sought` and the others: the score
    is a symmetric function of calibration and audit documents. `sought` affects only the power. With fewer than a
    hundred such documents a linear score has more power than a quadratic one.

    Args:
        sought: scores of known members (direction clean: known non-members), (documents, detectors).
        pool: scores of calibration and audit documents, all of them or a `Sample`, in any order.

    Raises:
        UserError: no documents on one of the two sides.
    """
    from threadpoolctl import threadpool_limits

    if not len(sought) or not len(pool):
        raise UserError(
            f"adadetect needs documents to learn from and documents to rank, got {len(sought)} and {len(pool)}"
        )
    rows, known = _sorted(pool), _sorted(sought)
    center, scale = center_and_scale(rows)
    sides = [standardised_scores(side, center, scale) for side in (known, rows)]
    means = [side.mean(axis=0) for side in sides]
    centred = np.concatenate([side - mean for side, mean in zip(sides, means, strict=True)])
    width = rows.shape[1]
    with threadpool_limits(1):  # the same sums on every machine
        covariance = centred.T @ centred / max(1, len(centred) - 2) + RIDGE * np.eye(width)
        linear = np.linalg.solve(covariance, means[0] - means[1])
    return AdaScore(center, scale, np.concatenate([linear, np.zeros(width * (width + 1) // 2)]))


@cache
def _libraries() -> ThreadpoolController:
    """The threaded libraries of a fit, including sklearn's; searching for them takes longer than a small fit."""
    import sklearn.linear_model  # noqa: F401 - loads its libraries
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _features(columns: list[np.ndarray]) -> list[np.ndarray]:
    products = [x * y for i, x in enumerate(columns) for y in columns[i:]]
    return [*columns, *products]


def _sorted(matrix: np.ndarray) -> np.ndarray:
    """Rows in lexicographic order, so that sums do not depend on the input order."""
    rows = np.asarray(matrix, dtype=np.float64)
    return rows[np.lexsort(rows.T)]


_ALSO_GIVEN = (
    f"{EXCHANGEABLE} They are so also given the known documents that the score is learnt from (direction members: "
    "trained on; direction clean: never trained on), which hold no copy of any of them."
)


def _answer(question: SelectionInput) -> Query[Answer]:
    """Learn a score that is invariant when a null document and a calibration document swap places, and rank by it."""
    selection = question.selection
    calibrate(question.known.first)
    question, level = yield from levelled(question)
    known, n_known = question.known, len(question.others.matrix)
    pooled = selection.learn == "pool" and not n_known
    halved = not (n_known or pooled)
    first = calibrating_halves(question) if halved else np.zeros(len(known.keys), dtype=bool)
    learnt = yield from (_learn_from_pool(question, level) if pooled else _learn(question, first, level))
    counted = yield from count_combined(lambda batch: learnt.score(batch.matrix), level, known.where(~first), question)
    counts = counted.counts
    inner, _ = applied_to(selection)
    stated = adapted(_guarantee(n_known > 0, inner.estimates), counts.grid)
    decided = decide(inner.name, counts, question.level.alpha, lambda_=selection.exact_lambda)
    details = {**decided.details, **({"known_members": float(n_known)} if n_known else {})}
    decided = replace(decided, assumption=stated.assumption, promise=stated.promise, details=details)
    answer = yield from by_ranks(decided, counts, counted.ranking, question, "adadetect", halved)
    if isinstance(learnt, PoolScore):
        answer = replace(answer, weights=learnt.weights.tolist() if learnt.weights.size > 1 else None)
    return replace(answer, groups=counted.groups, fused=lambda batch: learnt.score(level(batch).matrix))


def _learn(question: SelectionInput, first: np.ndarray, level: Level) -> Query[AdaScore]:
    """Learn a score from known members, or without any from the calibration documents at `first`, a bool mask."""
    seed, known, others = question.seed, question.known, question.others
    sample = Sample.draw(known.keys[~first], known.matrix[~first], seed)
    audited = yield Fold(lambda batch: Sample.draw(*_one_of_each_block(level(batch)), seed))
    sample = sample if audited is None else sample + audited
    if len(others.matrix):
        return fit_discriminant(others.matrix, sample.rows)
    return fit_score(known.matrix[first], sample.rows)


def _learn_from_pool(question: SelectionInput, level: Level) -> Query[PoolScore]:
    """Learn a score from the unordered pool of calibration and audited documents."""
    seed, known = question.seed, question.known
    sign = 1.0 if question.selection.direction == "members" else -1.0
    sample = Sample.draw(known.keys, known.matrix, seed, POOL_SIZE)
    audited = yield Fold(lambda batch: Sample.draw(*_one_of_each_block(level(batch)), seed, POOL_SIZE))
    return fit_pool((sample if audited is None else sample + audited).rows, sign)


def _one_of_each_block(batch: RoleScores) -> tuple[np.ndarray, np.ndarray]:
    """Keys and scores of the audited documents that a score may be learnt from: one of each block in `Blocks.learning`.

    Several would draw the score to their block, as if its documents were members that are like one another.
    """
    if batch.teaches is None:
        return batch.keys, batch.matrix
    return batch.keys[batch.teaches], batch.matrix[batch.teaches]


def _guarantee(known_members: bool, estimated: bool) -> Guarantee:
    """The guarantee of adadetect.

    Args:
        known_members: whether the score was learnt from known members (direction clean: known non-members).
        estimated: whether the share of nulls is estimated, by Storey.
    """
    stated = ADADETECT.terms
    if known_members:
        stated = replace(stated, assumption=_ALSO_GIVEN)
    if estimated:
        promise = (
            f"{SHARE} is at most alpha, for any number of documents and whatever the classifier learnt, with the "
            f"share of nulls estimated from the audit itself. {ON_AVERAGE}"
        )
        stated = replace(stated, promise=promise)
    return stated


def _curve(procedure: Procedure, selection: SelectionConfig, answer: Answer) -> LastRank | None:
    inner, _ = applied_to(selection)
    return None if inner.curve is None else inner.curve(inner, selection, answer)


def _inner(options: Options) -> tuple[Procedure, bool]:
    return procedure_of(options.step_up), not (options.known_members or options.learn == "pool")


def learnt_from_known(n: int, role: str) -> str:
    """States what a score is learnt from where documents are given that are known not to be nulls.

    Args:
        n: number of these documents.
        role: their role.
    """
    return (
        f"The score is learnt from {n:,} known {role} document{'s' * (n != 1)} and the unordered pool of all others; "
        "learn is of selections without such documents."
    )


FEW_DOCUMENTS = 10
"""Calibration documents below which a score learnt from the pool is announced with its expected power."""

_AUDITS, _MOST_AUDITED, _MEMBERS = 20, 200, Fraction(1, 5)
_HIGHER, _OTHERS = 2.5, 1.0  # shift of made-up members by one detector and by the others, in standard deviations


@dataclass(frozen=True, slots=True)
class PoolQuestion:
    """What the power of a score learnt from the pool depends on, as far as it is known before scoring."""

    n: int  # calibration documents
    m: int  # audited documents
    detectors: tuple[str, ...]
    alpha: Fraction
    step_up: str

    @classmethod
    def of(cls, selection: SelectionConfig, n: int, m: int) -> PoolQuestion:
        """The numbers of a configured selection."""
        return cls(n, m, tuple(selection.detectors), selection.exact_alpha, selection.step_up)

    def note(self) -> str | None:
        """States that one detector teaches nothing, or that too few documents calibrate; None where neither holds."""
        if len(self.detectors) == 1:
            return f"With one detector there is nothing to learn: learn: pool ranks by {self.detectors[0]}."
        if not 0 < self.n < FEW_DOCUMENTS or self.m == 0:
            return None
        return (
            f"Expect little of learn: pool with {documents(self.n)} to calibrate on: of made-up members, {_HIGHER:g} "
            f"standard deviations higher by one of {len(self.detectors)} detectors, {_OTHERS:g} by the others, and "
            f"{float(_MEMBERS):.0%} of the audited documents, it finds {expected_power(self):.0%}."
        )


@cache
def expected_power(question: PoolQuestion) -> float:
    """The average share of members found in 20 made-up audits with fixed draws.

    A fifth of the audited documents, at most 200, are members, 2.5 standard deviations higher by one detector and 1 by
    the others, which correlate by .5.
    """
    n, m, width = question.n, min(question.m, _MOST_AUDITED), len(question.detectors)
    rng, members = np.random.default_rng(0), max(1, round(m * _MEMBERS))
    higher, powers = np.r_[_HIGHER, np.full(width - 1, _OTHERS)], []
    for _ in range(_AUDITS):
        rows = (rng.normal(size=(n + m, 1)) + rng.normal(size=(n + m, width))) / np.sqrt(2)
        rows[n : n + members] += higher
        learnt = fit_pool(rows)
        places = ranks(learnt.score(rows[n:]), calibrate(learnt.score(rows[:n])), "members")
        decided = decide(question.step_up, RankCounts.of(places, n), question.alpha)
        powers.append(float(np.mean(places[:members] <= decided.rank)))
    return float(np.mean(powers))


ADADETECT = Procedure(
    "adadetect",
    Guarantee(
        "finite-sample",
        EXCHANGEABLE,
        f"{SHARE} is at most alpha times the true share of nulls, for any number of documents and whatever the "
        f"classifier learnt. {ON_AVERAGE}",
    ),
    answer=_answer,
    curve=_curve,
    inner=_inner,
    several=True,
    learns=True,
    smooths=True,
    reads_sought=True,
    weighs=True,
    refuses=ONLY_AVERAGES,
)
