"""Folds of the audit shards, each reading of which several selections share, and the answers of selections."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.config.selection import SelectionConfig
from pipeline.selection import knockoff
from pipeline.selection.blocks import Dependence
from pipeline.selection.bounds import Bound
from pipeline.selection.conformal import RankCounts, tie_draws
from pipeline.selection.guarantees import GroupWeight, GuaranteeKind, StrictAnswer
from pipeline.selection.schedule import Level
from pipeline.selection.smoothing import Smoothing
from pipeline.selection.version_scores import VersionPart

Judge = Callable[["RoleScores"], tuple[np.ndarray, np.ndarray]]
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RoleScores:
    """Documents of one role or shard, in order."""

    matrix: np.ndarray  # float64, (documents, detectors), finite
    groups: pa.ChunkedArray | None
    keys: np.ndarray  # int64 hashes of the ids, (documents,)
    versions: VersionPart | None = None  # of documents with versions
    place: np.ndarray | None = None  # int, (documents,), as in `RankCounts.of`; None: documents are independent
    teaches: np.ndarray | None = None  # bool, (documents,): whether a score may be learnt from each; None: from all

    @property
    def first(self) -> np.ndarray:
        """Scores of the first detector."""
        return self.matrix[:, 0]

    def where(self, mask: np.ndarray) -> RoleScores:
        """The documents of a bool mask, without versions or what depends on other documents."""
        groups = None if self.groups is None else self.groups.filter(pa.array(mask))
        return RoleScores(self.matrix[mask], groups, self.keys[mask])

    def draws(self, selection: SelectionConfig, seed: int) -> np.ndarray | None:
        """Random numbers that order equal scores; None if ties count against selection."""
        return tie_draws(self.keys, seed) if selection.ties == "random" else None


@dataclass(frozen=True, slots=True)
class SelectionInput:
    """A configured selection and its inputs."""

    selection: SelectionConfig
    level: Level  # its error rate, or that of its slot in a schedule of scans
    seed: int  # for random ties, splits and random weights
    known: RoleScores  # documents of the null role
    others: RoleScores  # documents that are known not to be nulls; may be empty
    quarantined: int  # audit documents without scores; hypotheses at p = 1
    dependence: Dependence | None = None  # of documents on one another; None: they are independent
    key: bytes = b""  # of the draws of smoothed ranks


@dataclass(frozen=True, slots=True)
class Basis:
    """The basis of the numbers of an answer's resolution."""

    halved: bool = False  # half of the known documents train the score, and the others calibrate
    grouped: bool = False  # p-values are calibrated within groups
    share: float | None = None  # share of nulls estimated by the procedure; None: 1
    sentence: str | None = None  # the whole text, if calibration documents do not matter
    one_of_each: bool = False  # one document of each block of dependent ones calibrates


PLAIN = Basis()
"""Basis of a procedure that assumes a share of nulls of 1 and calibrates on all known documents."""

EMPTY = RoleScores(np.empty((0, 1)), None, np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Fold:
    """One fold of the audit shards: a function of a shard, and a function that merges two results."""

    of_shard: Callable[[RoleScores], Any]
    merge: Callable[[Any, Any], Any] = operator.add


Query = Generator[Fold, Any, T]
"""Yields a fold, is sent its result merged over all shards, perhaps yields the next one, and returns the answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The decision on the audit documents, and its guarantee."""

    judge: Judge  # a batch -> p-values float64 in (0, 1] and bool selected, both (documents,)
    n_calibration: int
    m: int  # audit documents, including quarantined ones
    guarantee: GuaranteeKind
    assumption: str
    promise: str
    resolution: Callable[[int], tuple[int, int | None]]  # m -> minimum number selectable, known documents needed for 1%
    strict: StrictAnswer
    threshold: float | None = None  # the largest selected p-value; None if p-values do not decide
    null_proportion: float = 1.0
    details: dict[str, float] = field(default_factory=dict)
    factor: float | None = None  # p-values up to alpha R / (factor m) are selected, R their number
    weights: list[float] | None = None
    groups: list[GroupWeight] | None = None  # by name; None: p-values are not divided by weights of groups
    symmetry: knockoff.SignSymmetry | None = None  # of the signs of the knockoff filter
    basis: Basis = PLAIN  # basis of `resolution`
    counts: RankCounts | None = None  # of the audit documents, if ranks decide
    rank: int = 0  # last selected rank, if ranks decide
    n_bh: int | None = None  # number selected by bh, which is robust to clusters; None if nothing was estimated
    dependence: Dependence | None = None  # of documents on one another; None: they are independent
    nulls: tuple[Fraction, Fraction] | None = None
    """Cut and estimate, by Storey, of the number of nulls among the compared documents; None where documents are
    independent, or the procedure does not estimate their share or allows for dependent documents."""
    bound: Bound | None = None  # of the selected documents with scores
    fused: Callable[[RoleScores], np.ndarray] | None = None
    """The score combined from several detectors that ranks documents: float64, (documents,), higher is more evidence
    against the null."""
    versions: int | None = None  # maximum number per document; None if documents have no versions
    smoothing: Smoothing | None = None  # of smoothed ranks; None: ranks are whole

    @property
    def grid_size(self) -> int:
        """Number of p-values on the uniform grid, if all documents are ranked together."""
        return self.versions or self.n_calibration + 1


def run_queries(
    queries: Sequence[Query[Answer]], run_folds: Callable[[Sequence[tuple[int, Fold]]], dict[int, Any]]
) -> list[Answer]:
    """Decide several selections together: each reading of the shards is shared by all unfinished selections.

    Args:
        queries: generators from `answer`.
        run_folds: maps (index of the selection, fold) to the merged result of each; an index is absent if
            there are no shards.
    """
    answers: dict[int, Answer] = {}
    results: dict[int, Any] = dict.fromkeys(range(len(queries)))
    while len(answers) < len(queries):
        folds: list[tuple[int, Fold]] = []
        for index, generator in enumerate(queries):
            if index not in answers:
                try:
                    folds.append((index, generator.send(results.get(index))))
                except StopIteration as done:
                    answers[index] = done.value
        results = run_folds(folds) if folds else {}
    return [answers[index] for index in range(len(queries))]


def fold_once(fold: Fold) -> Query[Any]:
    """The query of one fold: its result, None if there are no shards."""
    return (yield fold)


def over(view: Callable[[RoleScores], RoleScores], query: Query[T]) -> Query[T]:
    """Run a query on another view of the documents, such as their combined score."""
    result = None
    while True:
        try:
            fold = query.send(result)
        except StopIteration as done:
            return done.value
        result = yield Fold(partial(_of_view, view, fold), fold.merge)


def _of_view(view: Callable[[RoleScores], RoleScores], fold: Fold, batch: RoleScores) -> Any:
    return fold.of_shard(view(batch))


def together(first: Query[S], second: Query[T]) -> Query[tuple[S, T]]:
    """Run two queries at once, so that each reading of the shards answers a fold of both."""
    queries: list[Query[Any]] = [first, second]
    answers: dict[int, Any] = {}
    results: dict[int, Any] | None = None
    while True:
        folds: dict[int, Fold] = {}
        for place, query in enumerate(queries):
            if place not in answers:
                try:
                    folds[place] = query.send(None if results is None else results.get(place))
                except StopIteration as done:
                    answers[place] = done.value
        if not folds:
            return answers[0], answers[1]
        results = yield Fold(partial(_of_shard, folds), partial(_merged, folds))


def _of_shard(folds: dict[int, Fold], batch: RoleScores) -> dict[int, Any]:
    return {place: fold.of_shard(batch) for place, fold in folds.items()}


def _merged(folds: dict[int, Fold], one: dict[int, Any], other: dict[int, Any]) -> dict[int, Any]:
    return {place: fold.merge(one[place], other[place]) for place, fold in folds.items()}


def search_values(
    search: Generator[Callable[[np.ndarray], Any], Any, T], values: Callable[[RoleScores], np.ndarray]
) -> Query[T]:
    """Run the folds of a threshold search, such as `find_fused_threshold`, over the values of every shard.

    Args:
        search: yields a function of values, float, (documents,), and is sent its merged result; returns the threshold.
        values: returns the values of the documents of a shard.
    """
    counts = None
    while True:
        try:
            count = search.send(counts)
        except StopIteration as end:
            return end.value
        counts = yield Fold(partial(lambda count, batch: count(values(batch)), count))
