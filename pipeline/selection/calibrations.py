"""Calibrations of p-values, one record each: the known documents among which an audited document is ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.kinds import Capability
from pipeline.config.selection import Direction, SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.conformal import Grid, RankCounts, Weighting, calibrate, ranks
from pipeline.selection.folds import RoleScores

Groups: TypeAlias = Sequence[str | None] | np.ndarray | pa.Array | pa.ChunkedArray

Ranking = tuple[Callable[[RoleScores], np.ndarray], int | Grid]
"""A function from a batch to its ranks, and the number of calibration documents or the grid of the ranks."""

UNIT = 62  # p-values are multiples of 2^-62

BEYOND = 1 << 62
"""In place of a p-value that its weight raises above 1: no limit of a selection reaches it."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupCalibration:
    """The calibration scores of every group, and the pooled p-values that its documents can have."""

    names: tuple[str, ...]  # sorted
    scores: tuple[np.ndarray, ...]  # per group: float64, (n_g,), ascending
    grid: Grid
    positions: tuple[np.ndarray, ...]  # per group: int64, (n_g + 1,): pooled rank of the group's rank k

    def codes(self, groups: Groups) -> np.ndarray:
        """Position in `names` of the group of each audit document, int64.

        Raises:
            UserError: a document has no group, or its group has no calibration documents.
        """
        array = _strings(groups)
        if array.null_count:
            raise UserError(f"{array.null_count} of {len(array)} audit documents have no group")
        code = _codes(array, self.names)
        outside = np.flatnonzero(code < 0)
        if outside.size:
            name = array[int(outside[0])].as_py()
            missing = len(array.take(pa.array(outside)).unique())
            more = f", and {missing - 1:,} more have none" if missing > 1 else ""
            raise UserError(
                f"group {name!r} has audit documents and no calibration documents{more}: add some, or take "
                "calibration: pooled"
            )
        return code

    def weighted(self, weights: Sequence[Fraction]) -> GroupCalibration:
        """The same calibration with the p-values of each group divided by its weight; `BEYOND` where that is above 1.

        The last rank of the grid is that of documents without a score, which are `BEYOND` too; their weight is 1.

        Args:
            weights: of the groups, >= 0, with numerators below 2^30 and powers of 2 as denominators: so that the
                grid is exact. 0: `BEYOND` at every rank.
        """
        plain = [Grid.uniform(part.size) for part in self.scores]
        divided = [_divided(one, weight) for one, weight in zip(plain, weights, strict=True)]
        plain.append(Grid(np.ones(1), np.array(1), 0, groups=0))
        weights = (*weights, Fraction(1))
        grid, places = pool([*divided, replace(plain[-1], numerators=np.array([BEYOND]))])
        order = np.argsort(np.concatenate(places))
        numerators = np.concatenate([one.numerators for one in plain])[order]
        denominators = np.concatenate([np.broadcast_to(one.denominators, one.size) for one in plain])[order]
        denominators[-1], numerators[-1] = plain[0].denominators, plain[0].denominators  # 1, as a group writes it
        group = np.repeat(np.arange(len(plain)), [one.size for one in plain])[order]
        unweighted = Grid(numerators, denominators, grid.n, grid.groups)
        grid = replace(grid, weighting=Weighting(unweighted, weights, group))
        return replace(self, grid=grid, positions=places[:-1])

    def moved(self, counts: RankCounts, weighted: GroupCalibration) -> RankCounts:
        """Counts over this grid, without quarantined documents, over that of the same calibration with weights."""
        before, after = (np.concatenate(one.positions) - 1 for one in (self, weighted))

        def move(over: np.ndarray) -> np.ndarray:
            to = np.zeros(weighted.grid.size, dtype=np.int64)
            to[after] = over[before]
            return to

        kept = None if counts.kept is None else replace(counts.kept, counts=move(counts.kept.counts))
        return RankCounts(move(counts.counts), weighted.grid, kept)


def pool(grids: Sequence[Grid]) -> tuple[Grid, tuple[np.ndarray, ...]]:
    """All p-values of several grids as one grid, and the new positions of each grid's ranks.

    Nothing is merged: equal p-values of two groups are neighbours with separate ranks. The order is exact and depends
    only on the order of the grids. The delta of the pool is the sum of those of the grids, which bounds the
    probability that any of them fails.

    Args:
        grids: at least one.

    Returns:
        The grid, and for each given grid int64, (size,): the pooled rank of its rank k at index k - 1.
    """
    numerators = np.concatenate([grid.numerators for grid in grids])
    denominators = np.concatenate([np.broadcast_to(grid.denominators, grid.size) for grid in grids])
    # two fractions with denominators up to 2^62 differ by 2^-124 or not at all
    keys = [(a << 128) // b for a, b in zip(numerators.tolist(), denominators.tolist(), strict=True)]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    place = np.empty(order.size, dtype=np.int64)
    place[order] = np.arange(1, order.size + 1)
    deltas = [grid.delta for grid in grids if grid.delta is not None]
    pooled = Grid(
        numerators[order],
        denominators[order],
        sum(grid.n for grid in grids),
        sum(grid.groups for grid in grids),
        sum(deltas, Fraction(0)) if deltas else None,
    )
    return pooled, tuple(np.split(place, np.cumsum([grid.size for grid in grids])[:-1]))


def calibrate_by_group(scores: np.ndarray, groups: Groups) -> GroupCalibration:
    """Sort the calibration scores of each group, once, for `ranks_by_group`.

    Args:
        scores: shape (n,), n >= 1, scores of the null role's documents.
        groups: n group names.

    Raises:
        UserError: no calibration documents, a NaN among their scores, or a document without a group.
    """
    values = np.asarray(scores, dtype=np.float64).ravel()
    if values.size == 0:
        calibrate(values)
    array = _strings(groups)
    if array.null_count:
        raise UserError(f"{array.null_count} of {len(array)} calibration documents have no group")
    names = tuple(sorted(array.unique().to_pylist()))
    code = _codes(array, names)
    parts = tuple(calibrate(values[code == index]) for index in range(len(names)))
    grid, positions = pool([Grid.uniform(part.size) for part in parts])
    return GroupCalibration(names, parts, grid, positions)


def ranks_by_group(
    scores: np.ndarray,
    groups: Groups,
    calibration: GroupCalibration,
    direction: Direction,
    draws: np.ndarray | None = None,
) -> np.ndarray:
    """Rank in the pooled grid of each audit document: its conformal p-value within its group (`ranks`).

    Guaranteed: if in each group the null documents are exchangeable with the group's calibration documents
    given all other scores, then each p-value is valid and BH's FDR is at most alpha times the share of
    nulls: given the unordered scores of a null document and its group's calibration, its rank is uniform, the
    other p-values of its group do not decrease as it increases, and those of other groups do not change. Groups
    may differ in distribution and in their share of nulls, for which pooled calibration guarantees nothing.

    Args:
        scores: shape (documents,), finite or infinite.
        groups: group name of each document.
        calibration: result of `calibrate_by_group`.
        direction: `members` or `clean`.
        draws: as in `ranks`.

    Returns:
        int64, shape (documents,), in 1..grid.size.

    Raises:
        UserError: a document has no group, or its group has no calibration documents; or as in `ranks`.
    """
    values, code = np.asarray(scores, dtype=np.float64), calibration.codes(groups)
    pooled_ranks = np.empty(values.size, dtype=np.int64)
    for index, (calibration_scores, place) in enumerate(zip(calibration.scores, calibration.positions, strict=True)):
        in_group = np.flatnonzero(code == index)
        if in_group.size:
            drawn = None if draws is None else draws[in_group]
            pooled_ranks[in_group] = place[ranks(values[in_group], calibration_scores, direction, drawn) - 1]
    return pooled_ranks


def _divided(grid: Grid, weight: Fraction) -> Grid:
    """The p-values of a grid with one denominator, divided by a weight; `BEYOND` where the quotient is above 1."""
    up, down = weight.numerator, weight.denominator
    one = int(grid.denominators) * up  # p / weight = numerator down / one
    inside = grid.numerators <= one // down
    divided = [k * down if most else BEYOND for k, most in zip(grid.numerators.tolist(), inside.tolist(), strict=True)]
    return replace(grid, numerators=np.array(divided), denominators=np.where(inside, one, 1))


def group_codes(groups: Groups, names: Sequence[str]) -> np.ndarray:
    """Position in `names` of the group of each document, int64; -1 for others and for none."""
    return _codes(_strings(groups), names)


def _strings(groups: Groups) -> pa.Array:
    array = groups.combine_chunks() if isinstance(groups, pa.ChunkedArray) else groups
    return array.cast(pa.string()) if isinstance(array, pa.Array) else pa.array(array, pa.string())


def _codes(groups: pa.Array, names: Sequence[str]) -> np.ndarray:
    """Index in `names` of each group; -1 if absent."""
    codes = pc.index_in(groups, value_set=pa.array(names, pa.string()))
    return pc.fill_null(codes, -1).to_numpy(zero_copy_only=False)


def _pooled(selection: SelectionConfig, seed: int, known: RoleScores) -> Ranking:
    calibration = calibrate(known.first)

    def rank(batch: RoleScores) -> np.ndarray:
        return ranks(batch.first, calibration, selection.direction, batch.draws(selection, seed))

    return rank, calibration.size


def _by_group(selection: SelectionConfig, seed: int, known: RoleScores) -> Ranking:
    assert known.groups is not None  # the configuration has their columns
    groups = calibrate_by_group(known.first, known.groups)
    return group_ranking(groups, selection, seed)


def group_ranking(groups: GroupCalibration, selection: SelectionConfig, seed: int) -> Ranking:
    """The ranks of audit documents within their groups."""

    def rank(batch: RoleScores) -> np.ndarray:
        assert batch.groups is not None
        return ranks_by_group(batch.first, batch.groups, groups, selection.direction, batch.draws(selection, seed))

    return rank, groups.grid


@dataclass(frozen=True, slots=True)
class Calibration:
    """A method to calibrate p-values: the columns that it reads, and its p-values."""

    name: str
    ranking: Callable[[SelectionConfig, int, RoleScores], Ranking] = _pooled
    grouped: bool = False  # ranks a document among those of its group
    conditional: bool = False  # valid for given calibration documents, not on average over them

    @property
    def plain(self) -> bool:
        """Whether p-values are k / (n + 1) against all n calibration documents."""
        return not (self.grouped or self.conditional)

    @property
    def needs(self) -> frozenset[Capability]:
        """What it needs of the documents: only ranks among n documents are also those of versions."""
        return frozenset() if self.plain else frozenset({Capability.SINGLE})

    def delta(self, selection: SelectionConfig) -> Fraction | None:
        """The exact share of calibration sets for which the guarantee may fail; None if it is an average."""
        return Fraction(repr(selection.delta)) if self.conditional else None

    def regridded(self, selection: SelectionConfig, n: int) -> Grid | None:
        """The p-values of the ranks among n documents if they differ from those of `ranking`; else None."""
        delta = self.delta(selection)
        return None if delta is None else simes_grid(n, delta)


CALIBRATIONS = {
    calibration.name: calibration
    for calibration in (
        Calibration("pooled"),
        Calibration("by_group", _by_group, grouped=True),
        Calibration("conditional", conditional=True),
    )
}


def calibration_of(name: str) -> Calibration:
    """The calibration with a name of a configuration or an answer."""
    return CALIBRATIONS[name]


def simes_grid(n: int, delta: Fraction) -> Grid:
    """The p-values of Bates et al. 2023 (Annals of Statistics 51(1), section 3), by their Simes adjustment.

    A null document's conformal rank K has, given the calibration documents, P(K <= k) = U_(k), the k-th
    smallest of n uniform variables. Their theorem replaces k / (n + 1) by b_k for constants
    b_1 <= ... <= b_n with P(U_(1) <= b_1, ..., U_(n) <= b_n) >= 1 - delta. The Simes constants, from Sarkar's
    (2008) generalised Simes inequality with s = max(1, n // 2), are

        b_(n+1-i) = 1 - (delta i (i-1)...(i-s+1) / (n (n-1)...(n-s+1)))^(1/s), i = 1..n, and b_(n+1) = 1.

    Guaranteed: if the calibration documents and the null audit documents are independent draws of one
    distribution without ties, then with probability 1 - delta over the calibration documents (it is an
    equality before rounding) every null p-value is, given them, independent of the others and
    P(p <= t) <= t for all t. On that event BH's FDR given the calibration documents is at most alpha times
    the share of nulls. Ties in the scores are conservative.

    The cost is a larger smallest p-value: 1 - delta^(1/s), about 2 ln(1/delta) / n, instead of 1 / (n + 1).

    Each b_k is computed in float64, increased by more than its error and rounded up to a multiple of 2^-62, so
    it is exact and never below the theorem's.

    Args:
        n: calibration documents, >= 1.
        delta: share of calibration sets for which the guarantee may fail, in (0, 1).

    Returns:
        a grid of n + 1 ranks, the same ranks as the uniform grid's: use `RankCounts.over`.
    """
    s = max(1, n // 2)
    i = np.arange(n, s, -1)  # from i to i - 1 the ratio of products changes by (i - s) / i; it is 1 at i = n
    logs = np.concatenate([[0.0], np.cumsum(np.log((i - s) / i))])  # at i = n, n - 1, ..., s
    numerators = np.full(n + 1, 1 << UNIT, dtype=np.int64)
    numerators[: logs.size] = _raised(logs, s, delta)
    return Grid(np.maximum.accumulate(numerators), np.array(1 << UNIT), n, delta=delta)


def smallest_simes(n: int, delta: Fraction) -> Fraction:
    """Only the smallest p-value of `simes_grid`: 1 - delta^(1/s), rounded up; n >= 1."""
    return Fraction(int(_raised(np.zeros(1), max(1, n // 2), delta)[0]), 1 << UNIT)


def _raised(logs: np.ndarray, s: int, delta: Fraction) -> np.ndarray:
    """The b_k from the logarithms of their products, rounded up to integer multiples of 2^-62: int64."""
    log_delta = math.log1p(delta - 1) if delta > Fraction(1, 2) else math.log(delta)  # exact to an ulp, also near 1
    bounds = -np.expm1((log_delta + logs) / s)
    error = (np.arange(logs.size) + 16) * 2.0**-52  # relative; a running sum of one sign loses half an ulp per term
    raised = np.ceil(np.ldexp(bounds * (1 + error), UNIT))
    return np.minimum(raised, 2.0**UNIT).astype(np.int64)
