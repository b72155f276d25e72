"""Smoothed ranks: a p-value anywhere in the cell of its rank, at a number that is drawn from the model and the id.

A conformal p-value takes n + 1 values, so `bh` on m documents selects at least m / (alpha (n + 1)) of them or none.
With U uniform on (0, 1), p = (k - 1 + U) / (n + 1) is uniform for a null document without ties, so nothing of alpha is
lost to the grid. The proof for the procedures that take it is in docs/methods.md, section 2.8.

U is a function of the audited model and the id of the document alone, and is compared in integers. Counts of ranks
bound the limit of the selection from both sides; U is read only in the cells between (`smoothed_search`).
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from pipeline.selection.conformal import Grid, RankCounts, mix
from pipeline.selection.step_up import ONE

CONTEXT = b"seenset ranks 1"
OTHER_DRAWS = 20
_ROUNDING = 1e-12  # relative; exceeds the rounding of a p-value as float64

Rank = Callable[[Any], np.ndarray]
"""Ranks of a batch (`folds.RoleScores`): int64, (documents,)."""


def model_key(digest: str) -> bytes:
    """The key of the draws of a run, 32 bytes, from the content digest of the audited model."""
    return hashlib.sha256(CONTEXT + b"\0model\0" + digest.encode()).digest()


@dataclass(frozen=True, slots=True)
class IdDigest:
    """A digest of a set of ids that does not depend on their order or roles; digests of shards are added."""

    count: int = 0
    sums: tuple[int, ...] = (0,) * 4  # of four hashes of every id, modulo 2^64

    @classmethod
    def of(cls, keys: np.ndarray) -> IdDigest:
        """The digest of ids by their keys, int64, (documents,)."""
        bits = np.asarray(keys, dtype=np.int64).view(np.uint64)
        lanes = (mix(mix(bits) ^ mix(np.array([lane], dtype=np.uint64))) for lane in range(4))
        return cls(bits.size, tuple(int(lane.sum(dtype=np.uint64)) for lane in lanes))

    def __add__(self, other: IdDigest) -> IdDigest:
        """The digest of both sets."""
        sums = tuple((a + b) % (1 << 64) for a, b in zip(self.sums, other.sums, strict=True))
        return IdDigest(self.count + other.count, sums)

    def key(self) -> bytes:
        """The key of the draws of scores whose model has no content digest, 32 bytes."""
        return hashlib.sha256(CONTEXT + b"\0ids\0" + struct.pack("<5Q", self.count, *self.sums)).digest()


def draws(key: bytes, id_keys: np.ndarray) -> np.ndarray:
    """The number u of each document, uint64, (documents,); U = (u + 1/2) / 2^64.

    u is the first 8 bytes, the most significant first, of SHA-256 of the key and the key of the id (8 bytes, the least
    significant first). It depends neither on the seed nor on detectors, settings or scores.

    Args:
        key: from `model_key` or `IdDigest.key`.
        id_keys: int64, (documents,).
    """
    data, seeded = np.asarray(id_keys, dtype="<i8").tobytes(), hashlib.sha256(key)
    digests = []
    for start in range(0, len(data), 8):
        one = seeded.copy()
        one.update(data[start : start + 8])
        digests.append(one.digest()[:8])
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def smoothed_p(grid: Grid, ranks: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """The smoothed p-values (k - 1 + U) / (n + 1), within groups where the grid has some: float64, (documents,).

    Over a grid of p-values that were divided by weights these are the p-values before the division.
    """
    grid, uniform = grid.unweighted, (drawn.astype(np.float64) + 0.5) / 2.0**64
    return (grid.numerators[ranks - 1] - 1 + uniform) / np.broadcast_to(grid.denominators, grid.size)[ranks - 1]


def last_draw(p: Fraction, place: int, divisor: Fraction | int) -> int:
    """The largest u with (place - 1 + (u + 1/2) / 2^64) / divisor <= p, exact, in -1..2^64 - 1."""
    part = p * divisor - (place - 1)
    return max(-1, min((1 << 64) - 1, ((part.numerator << 65) // part.denominator - 1) // 2))


@dataclass(frozen=True, slots=True, eq=False)
class Divisors:
    """What the places of the ranks of a grid are divided by: a document at place k has its p in ((k - 1) / d, k / d).

    d is n + 1 of its group, times the weight of the group if p-values are divided by weights.
    """

    values: tuple[Fraction, ...]  # d, >= 0; 0 only of groups without documents
    of: np.ndarray  # int64, (ranks,): position in `values`
    places: np.ndarray  # int64, (ranks,): k

    @classmethod
    def of_grid(cls, grid: Grid) -> Divisors:
        """Those of a grid: one for each size of groups, or with weights for each group."""
        plain = grid.unweighted
        if plain.denominators.ndim == 0:
            return cls((Fraction(int(plain.denominators)),), np.broadcast_to(np.int64(0), grid.size), plain.numerators)
        if grid.weighting is None:
            sizes, of = np.unique(plain.denominators, return_inverse=True)
            return cls(tuple(map(Fraction, sizes.tolist())), of, plain.numerators)
        groups, first, of = np.unique(grid.weighting.group, return_index=True, return_inverse=True)
        weights = [grid.weighting.weights[group] for group in groups.tolist()]
        divided = [one * size for one, size in zip(weights, plain.denominators[first].tolist(), strict=True)]
        return cls(tuple(divided), of, plain.numerators)

    def whole(self, p: Fraction) -> np.ndarray:
        """The largest place of each that ends at p or before: int64, (divisors,)."""
        return np.array([p * one // 1 for one in self.values], dtype=np.int64)

    def touched(self, p: Fraction) -> np.ndarray:
        """The largest place of each that begins before p: int64, (divisors,)."""
        return np.array([-(-p * one // 1) for one in self.values], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The ranks of a grid with one divisor d: documents at place k have p-values in ((k - 1) / d, k / d)."""

    divisor: Fraction
    number: int  # position of d among the divisors of the grid
    places: np.ndarray  # int64, k, ascending; equal ones are of groups of one size
    reached: np.ndarray  # int64, one longer: scored documents at the ranks before

    @classmethod
    def of_counts(cls, counts: RankCounts, divisors: Divisors, quarantined: int) -> list[Cells]:
        """The cells of a grid with documents, without quarantined ones, by divisor."""
        scored = counts.counts.copy()
        scored[-1] -= quarantined
        if len(divisors.values) == 1:
            return [cls(divisors.values[0], 0, divisors.places, np.concatenate([[0], np.cumsum(scored)]))]
        order = np.lexsort([divisors.places, divisors.of])
        ends = np.searchsorted(divisors.of[order], np.arange(1, len(divisors.values)))
        made = []
        for number, here in enumerate(np.split(order, ends)):
            reached = np.concatenate([[0], np.cumsum(scored[here])])
            if reached[-1]:
                made.append(cls(divisors.values[number], number, divisors.places[here], reached))
        return made

    def up_to(self, place: int) -> int:
        """Documents at places 1..place."""
        return int(self.reached[np.searchsorted(self.places, place, side="right")])

    def at(self, place: int) -> int:
        """Documents at a place."""
        return self.up_to(place) - self.up_to(place - 1)

    def straddling(self, p: Fraction) -> int | None:
        """The place whose cell contains p in its inside; None if p is a multiple of 1 / d."""
        scaled = p * self.divisor
        return None if scaled.denominator == 1 else scaled.numerator // scaled.denominator + 1

    def whole(self, p: Fraction) -> int:
        """Documents of cells that end at p or before."""
        return self.up_to(p * self.divisor // 1)

    def touched(self, p: Fraction) -> int:
        """Documents of cells that begin before p."""
        return self.up_to(-(-p * self.divisor // 1))


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """The limit of a step-up selection: the largest p <= 1 with p <= share R(p), R(p) the scored documents up to p."""

    cells: Sequence[Cells]
    share: Fraction  # alpha / (m pi0), exact

    def whole(self, p: Fraction) -> int:
        """Documents of cells that end at p or before: R(p) is never smaller."""
        return sum(cells.whole(p) for cells in self.cells)

    def touched(self, p: Fraction) -> int:
        """Documents of cells that begin before p: R(p) is never larger."""
        return sum(cells.touched(p) for cells in self.cells)

    def highest(self) -> Fraction:
        """The largest limit that any draw can give."""
        return self.descend(self.at(self.touched(ONE)), self.touched)[0]

    def at(self, count: int) -> Fraction:
        """The limit that a number of documents gives."""
        return min(ONE, self.share * count)

    def descend(
        self, p: Fraction, reached: Callable[[Fraction], int], least: Fraction | None = None
    ) -> tuple[Fraction, int]:
        """Descend from p to the limit.

        p <- min(1, share R(p)) falls to the greatest fixed point, because R does not decrease.

        Args:
            p: at least the limit.
            reached: R.
            least: p from which on not to descend further; None: the limit is reached.

        Returns:
            The limit, or the first value of at most `least`, and the number of documents that gave it.
        """
        while True:
            count = reached(p)
            at = self.at(count)
            if at == p or (least is not None and at <= least):
                return at, count
            p = at


@dataclass(frozen=True, slots=True, eq=False)
class CellDocuments:
    """Documents with their cells and draws, sorted by smoothed p-value up to its rounding."""

    divisors: tuple[Fraction, ...]
    p: np.ndarray  # float64, (documents,), ascending
    of: np.ndarray  # int64, (documents,): position of the divisor of each
    places: np.ndarray  # int64, (documents,)
    numbers: np.ndarray  # uint64, (documents,): u

    @classmethod
    def of_ranks(cls, divisors: Divisors, ranks: np.ndarray, numbers: np.ndarray) -> CellDocuments:
        """Documents by their ranks and draws, in any order."""
        of, places = divisors.of[ranks - 1], divisors.places[ranks - 1]
        values = np.array([float(one) for one in divisors.values])
        p = (places - 1 + (numbers.astype(np.float64) + 0.5) / 2.0**64) / values[of]
        return cls(divisors.values, p, of, places, numbers).take(np.argsort(p, kind="stable"))

    def take(self, some: np.ndarray) -> CellDocuments:
        """Some of the documents, by position or mask."""
        return CellDocuments(self.divisors, *(column[some] for column in self._columns()))

    def __add__(self, other: CellDocuments) -> CellDocuments:
        """The documents of both."""
        pairs = zip(self._columns(), other._columns(), strict=True)
        both = CellDocuments(self.divisors, *(np.concatenate(pair) for pair in pairs))
        return both.take(np.argsort(both.p, kind="stable"))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.p, self.of, self.places, self.numbers

    def exact(self, index: int) -> Fraction:
        """The smoothed p-value of a document."""
        numerator = (int(self.places[index]) - 1 << 65) + 2 * int(self.numbers[index]) + 1
        return Fraction(numerator, 1 << 65) / self.divisors[self.of[index]]

    def up_to(self, p: Fraction) -> int:
        """Documents with smoothed p-values of at most p, exact."""
        ends = float(p) * (1 - _ROUNDING), float(p) * (1 + _ROUNDING)
        first, last = np.searchsorted(self.p, ends, side="left").tolist()
        return first + sum(self.exact(index) <= p for index in range(first, last))

    def bins(self, ends: Sequence[Fraction]) -> np.ndarray:
        """Number of `ends` below each smoothed p-value, exact: int64, (documents,)."""
        limits = np.array([float(end) for end in ends])
        low = np.searchsorted(limits * (1 + _ROUNDING), self.p, side="left")
        high = np.searchsorted(limits * (1 - _ROUNDING), self.p, side="left")
        for index in np.flatnonzero(low != high).tolist():
            low[index] = bisect_left(ends, self.exact(index))
        return low


@dataclass(frozen=True, slots=True)
class OtherDraws:
    """The lists of the same ranks under other draws, compared with the list at hand."""

    n_selected: Annotated[list[int], Field(description="Documents selected under each.")]
    entered: Annotated[list[int], Field(description="Of these, those that are not on the list at hand.")]
    left: Annotated[list[int], Field(description="Documents of the list at hand that are not on it.")]


@dataclass(frozen=True, slots=True, eq=False)
class Smoothing:
    """The limit of a selection by smoothed p-values, and the number that each document draws."""

    key: bytes
    grid: Grid
    divisors: Divisors
    limit: Fraction  # documents with smoothed p-values up to it are selected; 0 for none
    n_selected: int
    n_whole: int  # documents that whole ranks select
    last: int  # largest rank of a selected document; 0 for none
    others: OtherDraws | None  # None: too many documents are near the limit
    rank: Rank

    def judge(self, ranks: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Whether documents are selected, by their ranks and the keys of their ids: bool, (documents,)."""
        of, places = self.divisors.of[ranks - 1], self.divisors.places[ranks - 1]
        whole = self.divisors.whole(self.limit)
        selected = np.asarray(places <= whole[of])
        inside = np.flatnonzero(places == whole[of] + 1)
        for number in np.unique(of[inside]).tolist():
            here = inside[of[inside] == number]
            last = last_draw(self.limit, int(whole[number]) + 1, self.divisors.values[number])
            if last >= 0:
                selected[here] = draws(self.key, keys[here]) <= np.uint64(last)
        return selected

    def columns(self, ranks: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of `selected.parquet`: the rank (by group, within the group), u and the smoothed p-value."""
        numbers = draws(self.key, keys)
        return {
            "conformal_rank": self.divisors.places[ranks - 1],
            "rank_draw": numbers,
            "smoothed_p": smoothed_p(self.grid, ranks, numbers),
        }


Parts = dict[int, int]
"""Position of a divisor -> documents up to the limit in the cell that the limit divides."""


def last_rank(counts: RankCounts, divisors: Divisors, limit: Fraction, parts: Parts | None) -> int:
    """The largest occupied rank of the documents up to a limit; 0 for none."""
    grid, occupied = counts.grid, np.flatnonzero(counts.counts)
    last = int(occupied[: np.searchsorted(occupied, grid.at_most(limit))].max(initial=-1)) + 1
    of, divided = divisors.of[occupied], divisors.whole(limit) + 1
    if parts is not None:
        divided[[number for number in range(divided.size) if not parts.get(number)]] = 0
    return max(last, int(occupied[divisors.places[occupied] == divided[of]].max(initial=-1)) + 1)


def redraw(limit: Limit, highest: Fraction, parts: Parts, here: Fraction, key: bytes) -> OtherDraws:
    """Lists under other draws, from the numbers of documents of cells alone.

    As p falls within a cell, each document up to it stays with the probability of uniform numbers, so that the number
    of those that stay is binomial; no document is drawn by itself.
    """
    rng = np.random.default_rng(list(hashlib.sha256(CONTEXT + b"\0others\0" + key).digest()))
    sizes, entered, left = [], [], []
    for _ in range(OTHER_DRAWS):
        held: dict[int, tuple[int, float, int]] = {}

        def reached(p: Fraction, held: dict[int, tuple[int, float, int]] = held) -> int:
            total = limit.whole(p)
            for cells in limit.cells:
                place = cells.straddling(p)
                if place is None or not cells.at(place):
                    held.pop(cells.number, None)
                    continue
                before = held.get(cells.number, (0, 1.0, 0))
                part = float(p * cells.divisor - (place - 1))
                _, reach, count = before if before[0] == place else (place, 1.0, cells.at(place))
                count = int(rng.binomial(count, min(1.0, part / reach)))
                held[cells.number] = place, part, count
                total += count
            return total

        other, size = limit.descend(highest, reached)
        new, gone = 0, 0
        for cells in limit.cells:
            first = here, parts.get(cells.number, 0)
            second = other, held.get(cells.number, (0, 0.0, 0))[2]
            more, fewer = _differences(cells, first, second, rng)
            new, gone = new + more, gone + fewer
        sizes.append(size)
        entered.append(new)
        left.append(gone)
    return OtherDraws(sizes, entered, left)


def _differences(
    cells: Cells, here: tuple[Fraction, int], there: tuple[Fraction, int], rng: np.random.Generator
) -> tuple[int, int]:
    """Documents that are only up to the second limit, and only up to the first; a limit has its part of its cell."""
    (p, part), (q, other) = here, there
    whole, whole_other = p * cells.divisor // 1, q * cells.divisor // 1
    first, second = cells.up_to(whole) + part, cells.up_to(whole_other) + other
    if whole != whole_other:
        return max(0, second - first), max(0, first - second)
    both = min(part, other)
    if both > 0 and max(part, other) < (size := cells.at(whole + 1)):
        both = int(rng.hypergeometric(part, size - part, other)) if size < 10**9 else part * other // size
    return other - both, part - both
