"""What a selection asks of the audit shards and what it answers; several at once share each pass over them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.config.selection import SelectionConfig
from pipeline.selection import knockoff
from pipeline.selection.bounds import Bound
from pipeline.selection.conformal import RankCounts, tie_draws
from pipeline.selection.guarantees import GuaranteeKind, StrictAnswer
from pipeline.selection.schedule import Level
from pipeline.selection.versions import VersionPart

Judge = Callable[["Batch"], tuple[np.ndarray, np.ndarray]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents of one role or shard, in order."""

    matrix: np.ndarray  # float64, (documents, detectors), finite
    groups: pa.ChunkedArray | None
    keys: np.ndarray  # int64 hashes of the ids, (documents,)
    weights: np.ndarray | None = None  # int64, (documents,), from `weight_levels`; of calibration weighted
    versions: VersionPart | None = None  # of documents with versions

    @property
    def first(self) -> np.ndarray:
        """Scores of the first detector."""
        return self.matrix[:, 0]

    def draws(self, selection: SelectionConfig, seed: int) -> np.ndarray | None:
        """The numbers that order equal scores at random; None where ties count against selection."""
        return tie_draws(self.keys, seed) if selection.ties == "random" else None


@dataclass(frozen=True, slots=True)
class SelectionInput:
    """A configured selection, and what it is asked of."""

    selection: SelectionConfig
    level: Level  # its error rate, which is that of its slot in a schedule of scans
    seed: int  # for random ties, splits and random weights
    known: Batch  # the null role's documents
    others: Batch  # documents that are known not to be nulls; may be empty
    quarantined: int  # audit documents without scores; hypotheses at p = 1


@dataclass(frozen=True, slots=True)
class Basis:
    """What the numbers of an answer's resolution refer to."""

    halved: bool = False  # half of the known documents are learnt from, and the others calibrate
    grouped: bool = False  # p-values are of the documents of each group
    share: float | None = None  # of nulls, as the procedure estimated it; None where it takes 1
    sentence: str | None = None  # all that there is to say, where calibration documents do not matter


PLAIN = Basis()
"""Of a procedure that takes a share of nulls of 1 and calibrates on all known documents."""

EMPTY = Batch(np.empty((0, 1)), None, np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Ask:
    """One pass over the audit shards: a function of each, and how two of its results become one."""

    of_shard: Callable[[Batch], Any]
    merge: Callable[[Any, Any], Any] = operator.add


Asking = Generator[Ask, Any, T]


@dataclass(frozen=True, slots=True, eq=False)
class FusedScore:
    """One score of several detectors, by which a selection ranks documents."""

    of: Callable[[Batch], np.ndarray]  # float64, (documents,), higher is more evidence against the null
    calibrating: np.ndarray  # bool, of the null role's documents: those that the others are ranked among


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The decision on the audit documents, and its guarantee."""

    judge: Judge  # a batch -> p-values float64 in (0, 1] and bool selected, both (documents,)
    n_calibration: int
    m: int  # audit documents, quarantined ones included
    guarantee: GuaranteeKind
    assumption: str
    promise: str
    resolution: Callable[[int], tuple[int, int | None]]  # m -> fewest selectable, known documents needed for 1%
    strict: StrictAnswer
    threshold: float | None = None  # the largest p-value selected; None where p-values do not decide
    null_proportion: float = 1.0
    details: dict[str, float] = field(default_factory=dict)
    factor: float | None = None  # a p-value is selected up to alpha R / (factor m), R as many as it selects
    weights: list[float] | None = None
    symmetry: knockoff.SignSymmetry | None = None  # of the signs that the knockoff filter reads
    basis: Basis = PLAIN  # what `resolution` refers to
    counts: RankCounts | None = None  # where ranks decide: of the audit documents
    rank: int = 0  # where ranks decide: of the last that is selected
    n_bh: int | None = None  # documents that bh selects, which bears clusters; None where nothing was estimated
    bound: Bound | None = None  # of the selected, those without scores left out
    effective: float | None = None  # number of calibration documents that as much rests on; of calibration weighted
    fused: FusedScore | None = None  # where several detectors are ranked by one score
    versions: int | None = None  # of a document, at most; None where documents have none

    @property
    def places(self) -> int:
        """The number of p-values on the uniform grid, where documents are ranked together."""
        return self.versions or self.n_calibration + 1


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


def search_values(
    passes: Generator[Callable[[np.ndarray], Any], Any, T], values: Callable[[Batch], np.ndarray]
) -> Asking[T]:
    """Run the passes of a search for a threshold, such as `find_fused_threshold`, over the values of every shard.

    Args:
        passes: yields a function of values, float, (documents,), and is sent its merged result; returns the threshold.
        values: of the documents of a shard.
    """
    counts = None
    while True:
        try:
            count = passes.send(counts)
        except StopIteration as end:
            return end.value
        counts = yield Ask(partial(lambda count, batch: count(values(batch)), count))
