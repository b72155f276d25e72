"""The calibration documents whose scores are nearest to those of some audited ones, found a score shard at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.selection.passes import Batch

NEIGHBOURS = 5


@dataclass(slots=True, eq=False)
class Neighbours:
    """For each of some documents, the calibration documents of those seen so far that are nearest to it by score.

    Of several at one distance the first in the order of the shards count.
    """

    scores: np.ndarray  # float64, (documents,)
    groups: np.ndarray | None  # object, (documents,), where documents are ranked in their group alone
    distance: np.ndarray  # float64, (documents, NEIGHBOURS), ascending, inf where there is none
    nearest: np.ndarray  # float64, as `distance`: their scores
    ids: np.ndarray  # object, as `distance`

    @classmethod
    def of(cls, scores: np.ndarray, groups: np.ndarray | None) -> Neighbours:
        """Nobody yet."""
        shape = len(scores), NEIGHBOURS
        return cls(scores, groups, np.full(shape, np.inf), np.zeros(shape), np.full(shape, None, dtype=object))

    def add(self, scores: np.ndarray, groups: np.ndarray | None, ids: Callable[[np.ndarray], list[str]]) -> None:
        """Take in calibration documents.

        Args:
            scores: float64, (others,).
            groups: object, (others,), where these have groups.
            ids: of documents by their places, ascending.
        """
        if self.groups is None or groups is None:
            self._add(np.arange(len(self.scores)), np.arange(len(scores)), scores, ids)
            return
        for group in dict.fromkeys(self.groups.tolist()):
            self._add(np.flatnonzero(self.groups == group), np.flatnonzero(groups == group), scores, ids)

    def _add(
        self, here: np.ndarray, there: np.ndarray, scores: np.ndarray, ids: Callable[[np.ndarray], list[str]]
    ) -> None:
        """Take in calibration documents, by their places, as neighbours of some documents, by theirs."""
        if not here.size or not there.size:
            return
        there = there[np.argsort(scores[there], kind="stable")]
        ordered, wanted = scores[there], self.scores[here]
        window = np.searchsorted(ordered, wanted)[:, None] + np.arange(-NEIGHBOURS, NEIGHBOURS)
        inside = (window >= 0) & (window < there.size)
        window = window.clip(0, there.size - 1)
        distance = np.where(inside, np.abs(ordered[window] - wanted[:, None]), np.inf)
        every = np.concatenate([self.distance[here], distance], axis=1)
        best = np.argsort(every, axis=1, kind="stable")[:, :NEIGHBOURS]
        fresh = best >= NEIGHBOURS
        places = np.take_along_axis(there[window], np.where(fresh, best - NEIGHBOURS, 0), axis=1)
        fresh &= np.isfinite(np.take_along_axis(every, best, axis=1))
        kept = np.where(best < NEIGHBOURS, best, 0)
        names = np.take_along_axis(self.ids[here], kept, axis=1)
        chosen = np.unique(places[fresh])
        if chosen.size:
            new = np.array(ids(chosen), dtype=object)
            names[fresh] = new[np.searchsorted(chosen, places[fresh])]
        self.ids[here] = names
        self.nearest[here] = np.where(fresh, scores[places], np.take_along_axis(self.nearest[here], kept, axis=1))
        self.distance[here] = np.take_along_axis(every, best, axis=1)

    def pairs(self) -> list[list[tuple[str, float]]]:
        """Of each document (id, score) of its neighbours, the nearest first."""
        return [
            [(name, float(score)) for name, score in zip(names, scores, strict=True) if name is not None]
            for names, scores in zip(self.ids.tolist(), self.nearest.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """By which score a selection ranks documents, and among which calibration documents."""

    name: str  # a detector; a procedure where it fuses several
    of: Callable[[Batch], np.ndarray]  # float64, (documents,)
    calibrating: np.ndarray  # bool, of all documents of the null role that are scored, in the order of the shards
    grouped: bool  # whether only documents of a document's group count


def groups_of(table: pa.Table) -> np.ndarray:
    """The groups of documents: object, (documents,)."""
    return np.array(table["group"].to_pylist(), dtype=object)
