"""The ways to calibrate p-values, one record each: among which known documents an audited one is ranked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.conditional import simes_grid
from pipeline.selection.conformal import calibrate, ranks
from pipeline.selection.grid import Grid
from pipeline.selection.groups import calibrate_by_group, ranks_by_group
from pipeline.selection.passes import Batch

Ranking = tuple[Callable[[Batch], np.ndarray], int | Grid]
"""A function from a batch to its ranks, and the number of calibration documents or grid that they refer to."""


def _pooled(selection: SelectionConfig, seed: int, known: Batch) -> Ranking:
    calibration = calibrate(known.first)

    def rank(batch: Batch) -> np.ndarray:
        return ranks(batch.first, calibration, selection.direction, batch.draws(selection, seed))

    return rank, calibration.size


def _by_group(selection: SelectionConfig, seed: int, known: Batch) -> Ranking:
    if known.groups is None:
        raise UserError(f"selection {selection.name}: calibration by_group needs a group column in the corpus")
    groups = calibrate_by_group(known.first, known.groups)

    def rank(batch: Batch) -> np.ndarray:
        if batch.groups is None:
            raise UserError(f"selection {selection.name}: the audit documents have no group column")
        return ranks_by_group(batch.first, batch.groups, groups, selection.direction, batch.draws(selection, seed))

    return rank, groups.grid


@dataclass(frozen=True, slots=True)
class Calibration:
    """A way to calibrate p-values: which columns it reads, and what its p-values are."""

    name: str
    ranking: Callable[[SelectionConfig, int, Batch], Ranking] = _pooled
    grouped: bool = False  # ranks a document among those of its group: reads their groups
    weighted: bool = False  # counts calibration documents by weights: reads them
    conditional: bool = False  # for the calibration documents at hand, and not on average over sets of them

    @property
    def plain(self) -> bool:
        """Whether p-values are k / (n + 1) against all n calibration documents."""
        return not (self.grouped or self.weighted or self.conditional)

    @property
    def ranks_together(self) -> bool:
        """Whether all documents are ranked among the same ones, each counted once."""
        return not (self.grouped or self.weighted)

    @property
    def valid_on_average(self) -> bool:
        """Whether each p-value by itself is proved to be valid on average over calibration sets."""
        return not (self.weighted or self.conditional)

    def delta(self, selection: SelectionConfig) -> Fraction | None:
        """The share of calibration sets for which the guarantee may fail, exact; None where it is an average."""
        return Fraction(repr(selection.delta)) if self.conditional else None

    def regridded(self, selection: SelectionConfig, n: int) -> Grid | None:
        """The p-values of the ranks among n documents, where they are not those that `ranking` refers to."""
        delta = self.delta(selection)
        return None if delta is None else simes_grid(n, delta)


CALIBRATIONS = {
    calibration.name: calibration
    for calibration in (
        Calibration("pooled"),
        Calibration("by_group", _by_group, grouped=True),
        Calibration("conditional", conditional=True),
        Calibration("weighted", weighted=True),
    )
}


def calibration_of(name: str) -> Calibration:
    """The calibration of a name, as a configuration or an answer holds it."""
    return CALIBRATIONS[name]
