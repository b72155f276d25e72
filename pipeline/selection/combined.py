"""Scores that combine several detectors, ranked with any calibration: levels of groups, halves, and the ranks.

By group a combined score is ranked within groups. It is computed from rows in units of their group, so that groups of
other levels and scales are not taken for members. Weights of groups follow from the combined score. The proof is in
docs/methods.md, section 3.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pipeline.selection.calibrations import calibration_of, group_codes
from pipeline.selection.conformal import POOL_SIZE, Sample, halves
from pipeline.selection.folds import Fold, Query, RoleScores, SelectionInput, over
from pipeline.selection.pool_score import center_and_scale
from pipeline.selection.ranked import Counted, count_calibrated

Level = Callable[[RoleScores], RoleScores]
"""The same documents, with scores in units of their groups."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLevels:
    """Median and half the range of the middle 68% of the scores of each group, roles unread."""

    names: tuple[str, ...]
    center: np.ndarray  # (groups + 1, detectors); the last row is of all documents together
    scale: np.ndarray  # likewise; 1 where the range is 0

    @classmethod
    def from_rows(cls, names: tuple[str, ...], rows: np.ndarray) -> GroupLevels:
        """The levels of documents; the last column of `rows` is the position of the group, the others are scores."""
        matrix, code = rows[:, :-1], rows[:, -1]
        parts = [matrix[code == place] for place in range(len(names))] + [matrix]
        levels = [center_and_scale(part if len(part) else matrix) for part in parts]
        center, scale = (np.stack(columns) for columns in zip(*levels, strict=True))
        return cls(names, center, scale)

    def __call__(self, batch: RoleScores) -> RoleScores:
        """The documents in units of their groups; those of other groups, or of none, in units of all documents."""
        code = self.codes(batch)
        with np.errstate(over="ignore"):  # scores near the largest float
            levelled = np.clip((batch.matrix - self.center[code]) / self.scale[code], -1e300, 1e300)
        return replace(batch, matrix=levelled)

    def codes(self, batch: RoleScores) -> np.ndarray:
        """The row of each document: int64, (documents,)."""
        if batch.groups is None:
            return np.full(len(batch.matrix), len(self.names))
        code = group_codes(batch.groups, self.names)
        return np.where(code < 0, len(self.names), code)


def levelled(question: SelectionInput) -> Query[tuple[SelectionInput, Level]]:
    """A question whose known documents are in units of their groups, and the function that does it to others.

    Without groups nothing changes. With groups one fold samples the audited documents. A swap of two documents of one
    group, whatever their roles, changes no level, because the levels are a function of the multiset of its rows.
    """
    known = question.known
    if not calibration_of(question.selection.calibration).grouped:
        return question, _unchanged
    assert known.groups is not None  # the configuration has their columns
    names = tuple(sorted(name for name in known.groups.unique().to_pylist() if name is not None))

    def draw(batch: RoleScores) -> Sample:
        assert batch.groups is not None
        rows = np.column_stack([batch.matrix, group_codes(batch.groups, names)])
        return Sample.draw(batch.keys, rows, question.seed, POOL_SIZE)

    audited = yield Fold(draw)
    sample = draw(known)
    level = GroupLevels.from_rows(names, (sample if audited is None else sample + audited).rows)
    others = level(question.others) if len(question.others.matrix) else question.others
    return replace(question, known=level(known), others=others), level


def _unchanged(batch: RoleScores) -> RoleScores:
    return batch


def count_combined(
    score: Callable[[RoleScores], np.ndarray], level: Level, calibrating: RoleScores, question: SelectionInput
) -> Query[Counted]:
    """Count the ranks of a combined score, with the calibration and the weights of groups of the selection.

    Args:
        score: of documents in units of their groups, higher is more evidence against the null: float64, (documents,).
        level: puts documents in units of their groups.
        calibrating: the calibration documents that rank, in these units.
        question: the selection and its inputs.

    Raises:
        UserError: as `ranked.count_calibrated`.
    """
    upward = question.selection.model_copy(update={"direction": "members"})
    scored = partial(_with_score, score)
    combined = replace(question, selection=upward, known=scored(calibrating))

    def view(batch: RoleScores) -> RoleScores:
        return scored(level(batch))

    counted = yield from over(view, count_calibrated(combined))
    rank, against = counted.ranking
    return replace(counted, ranking=(lambda batch: rank(view(batch)), against))


def _with_score(score: Callable[[RoleScores], np.ndarray], batch: RoleScores) -> RoleScores:
    return replace(batch, matrix=score(batch)[:, None])


def calibrating_halves(question: SelectionInput) -> np.ndarray:
    """The half of the known documents that teaches a score, by a hash of their ids, by group of each group: bool."""
    known, seed = question.known, question.seed
    if not calibration_of(question.selection.calibration).grouped:
        return halves(known.keys, seed)
    assert known.groups is not None
    codes = known.groups.combine_chunks().dictionary_encode().indices.to_numpy()
    chosen = np.zeros(known.keys.size, dtype=bool)
    for code in np.unique(codes).tolist():
        here = np.flatnonzero(codes == code)
        chosen[here] = halves(known.keys[here], seed)
    return chosen
