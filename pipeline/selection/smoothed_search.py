"""The limit of a selection by smoothed p-values, found in folds of the audited documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.selection.conformal import RankCounts
from pipeline.selection.folds import Fold, Query, RoleScores
from pipeline.selection.smoothing import (
    OTHER_DRAWS,
    CellDocuments,
    Cells,
    Divisors,
    Limit,
    OtherDraws,
    Parts,
    Rank,
    Smoothing,
    draws,
    last_draw,
    last_rank,
    redraw,
)
from pipeline.selection.step_up import ONE

MOST_GATHERED = 1 << 20
"""Maximum documents whose numbers are held at once."""
EDGES = 1 << 10
"""Intervals into which more documents than that are counted first."""


def smooth(counts: RankCounts, last: int, share: Fraction, rank: Rank, drawing: tuple[bytes, int]) -> Query[Smoothing]:
    """Find the limit of a step-up selection by smoothed p-values: p <= share R, R documents up to p, greatest R.

    Without draws, the limit is at least that of whole ranks and at most `Limit.highest`. One fold gathers the documents
    whose cells reach between the two. If these are too many, it counts them in intervals of p instead, and further
    folds gather the intervals that can hold the limit, from the top, so that memory does not grow with the documents.

    Args:
        counts: counts of whole ranks, with quarantined documents.
        last: last rank that whole ranks select; 0 for none.
        share: alpha / (m pi0), exact.
        rank: ranks of a batch.
        drawing: the key of the draws, and the number of quarantined documents, which are at p = 1 and never listed.
    """
    key, quarantined = drawing
    n_whole, divisors = counts.at_most(last), Divisors.of_grid(counts.grid)
    if last == counts.grid.size:
        n_whole -= quarantined
        none = OtherDraws([n_whole] * OTHER_DRAWS, [0] * OTHER_DRAWS, [0] * OTHER_DRAWS)
        return Smoothing(key, counts.grid, divisors, ONE, n_whole, n_whole, last, none, rank)
    limit = Limit(Cells.of_counts(counts, divisors, quarantined), share)
    lowest, highest = limit.at(n_whole), limit.highest()
    p, n_selected = lowest, n_whole
    parts: Parts | None = {}
    if limit.touched(highest) > limit.whole(lowest):
        search = _Search(rank, divisors, key, lowest, highest)
        p, n_selected, parts = yield from search.run(limit)
    others = None if parts is None else redraw(limit, highest, parts, p, key)
    largest = last_rank(counts, divisors, p, parts)
    return Smoothing(key, counts.grid, divisors, p, n_selected, n_whole, largest, others, rank)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The search for a limit in folds; see `smooth`."""

    rank: Rank
    divisors: Divisors
    key: bytes
    lowest: Fraction
    highest: Fraction

    def run(self, limit: Limit) -> Query[tuple[Fraction, int, Parts | None]]:
        """The limit, the documents up to it, and its parts; None: not known."""
        before, all_touched = limit.whole(self.lowest), limit.touched(self.highest)
        if all_touched - before <= MOST_GATHERED:
            drawn = yield Fold(self.gather)
            end, count = limit.descend(self.highest, lambda p: before + drawn.up_to(p))
            parts = {}
            for cells in limit.cells:
                if (place := cells.straddling(end)) is not None:
                    here = (drawn.of == cells.number) & (drawn.places == place)
                    last = last_draw(end, place, cells.divisor)
                    selected = drawn.numbers[here] <= np.uint64(max(0, last))
                    parts[cells.number] = int(np.count_nonzero(selected)) if last >= 0 else 0
            return end, count, parts
        end, count = yield from self._narrow(limit, before)
        only = len(limit.cells) == 1
        return end, count, {limit.cells[0].number: count - limit.whole(end)} if only else None

    def _narrow(self, limit: Limit, before: int) -> Query[tuple[Fraction, int]]:
        """The limit and the documents up to it, where too many documents are undecided to hold all of them."""
        ends = [self.lowest + (self.highest - self.lowest) * step / EDGES for step in range(EDGES + 1)]
        counted = yield Fold(lambda batch: self.count(batch, ends))
        reached: list[int] = (before + np.cumsum(counted)).tolist()
        top, p = EDGES, self.highest
        while top:
            bottom = top - 1
            while bottom and reached[top] - reached[bottom - 1] <= MOST_GATHERED:
                bottom -= 1
            p = min(p, limit.at(reached[top]))
            if p > ends[bottom]:
                p, count = yield from self._within(limit, (ends[bottom], reached[bottom]), p)
                if p > ends[bottom]:
                    return p, count
            top = bottom
        return self.lowest, reached[0]

    def _within(self, limit: Limit, least: tuple[Fraction, int], p: Fraction) -> Query[tuple[Fraction, int]]:
        """Descend from p to the limit or to `least`, a p-value and the documents up to it."""
        drawn = yield Fold(lambda batch: self.gather(batch, (least[0], p)))
        return limit.descend(p, lambda at: least[1] + drawn.up_to(at), least[0])

    def gather(self, batch: RoleScores, ends: tuple[Fraction, Fraction] | None = None) -> CellDocuments:
        """The documents of the undecided cells; those with p-values above the first end and up to the second."""
        ranks = self.rank(batch)
        inside = np.flatnonzero(self._undecided(ranks))
        drawn = CellDocuments.of_ranks(self.divisors, ranks[inside], draws(self.key, batch.keys[inside]))
        return drawn if ends is None else drawn.take(drawn.bins(ends) == 1)

    def count(self, batch: RoleScores, ends: Sequence[Fraction]) -> np.ndarray:
        """Number of documents of the undecided cells up to the first end, and between the others: int64, (ends,)."""
        bins = self.gather(batch).bins(ends)
        return np.bincount(bins[bins < len(ends)], minlength=len(ends))

    def _undecided(self, ranks: np.ndarray) -> np.ndarray:
        """Whether the cells of ranks end above the lowest limit and begin below the highest: bool, (documents,)."""
        places, of = self.divisors.places, self.divisors.of
        first, last = self.divisors.whole(self.lowest), self.divisors.touched(self.highest)
        return ((places > first[of]) & (places <= last[of]))[ranks - 1]
