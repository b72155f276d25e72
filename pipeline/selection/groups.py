"""Calibration by group: a document is ranked among the calibration documents of its own group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.selection import Direction
from pipeline.errors import UserError
from pipeline.selection.conformal import Grid, calibrate, ranks

Groups: TypeAlias = Sequence[str | None] | np.ndarray | pa.Array | pa.ChunkedArray


@dataclass(frozen=True, slots=True, eq=False)
class GroupCalibration:
    """The calibration scores of every group, and the pooled p-values that its documents can have."""

    names: tuple[str, ...]  # sorted
    scores: tuple[np.ndarray, ...]  # a group, ascending, float64, (n_g,)
    grid: Grid
    positions: tuple[np.ndarray, ...]  # a group, int64, (n_g + 1,): the grid's rank of the group's rank k


def pool(grids: Sequence[Grid]) -> tuple[Grid, tuple[np.ndarray, ...]]:
    """All p-values of several grids as one grid, and where each grid's ranks went.

    Nothing is merged: two groups' equal p-values are neighbours with ranks of their own. The order is exact
    and depends on the order of the grids alone. A share delta of each grid adds up to that of the pool, as
    the probability that any of them fails.

    Args:
        grids: at least one.

    Returns:
        the grid, and for each given grid int64 of its size: the pooled rank of its rank k at k - 1.
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
        scores: shape (n,), n >= 1, of the null role's documents.
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
    nulls: given the unordered scores of a null document and its group's calibration, its rank is uniform, its
    group's other p-values do not fall as it grows, and the other groups' do not change. Groups may differ in
    distribution and in their share of nulls, where pooled calibration holds nothing.

    Args:
        scores: shape (documents,), finite or infinite.
        groups: as many group names.
        calibration: from `calibrate_by_group`.
        direction: `members` or `clean`.
        draws: as for `ranks`.

    Returns:
        int64, shape (documents,), in 1..grid.size.

    Raises:
        UserError: a document without a group, or of a group that has no calibration documents; or as `ranks`.
    """
    values = np.asarray(scores, dtype=np.float64)
    array = _strings(groups)
    code = _codes(array, calibration.names)
    outside = np.flatnonzero(code < 0)
    if array.null_count:
        raise UserError(f"{array.null_count} of {len(array)} audit documents have no group")
    if outside.size:
        name = array[int(outside[0])].as_py()
        raise UserError(f"group {name!r} has audit documents and no calibration documents")
    pooled_ranks = np.empty(values.size, dtype=np.int64)
    for index, (calibration_scores, place) in enumerate(zip(calibration.scores, calibration.positions, strict=True)):
        in_group = np.flatnonzero(code == index)
        if in_group.size:
            drawn = None if draws is None else draws[in_group]
            pooled_ranks[in_group] = place[ranks(values[in_group], calibration_scores, direction, drawn) - 1]
    return pooled_ranks


def _strings(groups: Groups) -> pa.Array:
    array = groups.combine_chunks() if isinstance(groups, pa.ChunkedArray) else groups
    return array.cast(pa.string()) if isinstance(array, pa.Array) else pa.array(array, pa.string())


def _codes(groups: pa.Array, names: Sequence[str]) -> np.ndarray:
    """Index into names of each group, -1 outside."""
    codes = pc.index_in(groups, value_set=pa.array(names, pa.string()))
    return pc.fill_null(codes, -1).to_numpy(zero_copy_only=False)
