"""Selections over scores in memory: the same answers as over score shards, for many small audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.engine import answer
from pipeline.selection.passes import NOBODY, Answer, Ask, Batch, together
from pipeline.selection.procedures import procedure_of
from pipeline.selection.schedule import Slot


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scored documents of any role, in any order."""

    columns: Mapping[str, np.ndarray]  # detector column -> float64, (documents,), finite
    keys: np.ndarray  # int64 hashes of the ids, (documents,)
    groups: pa.Array | None = None
    weights: Mapping[Role, np.ndarray] | None = None
    """Of calibration weighted: null role -> int64, (documents,), from `weighted.weight_levels`."""

    @property
    def group_numbers(self) -> np.ndarray:
        """The group of each document, int64, (documents,), from 0; -1 for none."""
        if self.groups is None:
            return np.full(self.keys.size, -1, dtype=np.int64)
        codes = self.groups.dictionary_encode().indices
        return np.asarray(codes.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)

    def batch(self, positions: np.ndarray, selection: SelectionConfig) -> Batch:
        """The documents at these positions, with the columns that a selection reads."""
        matrix = np.stack([self.columns[column][positions] for column in selection.detectors], axis=1)
        groups, calibration = None, calibration_of(selection.calibration)
        if self.groups is not None and calibration.grouped:
            groups = pa.chunked_array([self.groups.take(pa.array(positions))])
        weights = None
        if self.weights is not None and calibration.weighted:
            weights = self.weights[NULL_ROLE[selection.direction]][positions]
        return Batch(matrix, groups, self.keys[positions], weights)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The answer of one selection, and its result for each audit document, in their order."""

    answer: Answer
    p: np.ndarray  # float64, (documents,)
    selected: np.ndarray  # bool, (documents,)


def answer_all(
    selections: Sequence[SelectionConfig],
    scores: Scores,
    roles: Mapping[Role, np.ndarray],
    quarantined: int,
    seed: int,
    slot: Slot | None = None,
) -> list[Verdict]:
    """Answer selections over documents whose roles are positions in `scores`.

    Equal to what the same selections say of a run directory that holds these documents in these roles.

    Args:
        selections: their configurations.
        scores: the documents.
        roles: role -> int64 positions.
        quarantined: audit documents without scores, on top; hypotheses at p = 1.
        seed: for random ties, splits and random weights.
        slot: the place of the selections in a schedule of scans; None: in no schedule.

    Raises:
        UserError: as `engine.answer`.
    """

    def batch(role: Role, selection: SelectionConfig) -> Batch:
        return scores.batch(roles[role], selection) if role in roles else NOBODY

    batches = [batch("audit", selection) for selection in selections]
    asking = []
    for selection in selections:
        sought = procedure_of(selection.procedure).reads_sought
        others = batch(SOUGHT_ROLE[selection.direction], selection) if sought else NOBODY
        known = batch(NULL_ROLE[selection.direction], selection)
        asking.append(answer(selection, seed, known, others, quarantined, slot))

    def run_pass(asks: Sequence[tuple[int, Ask]]) -> dict[int, Any]:
        return {index: ask.of_shard(batches[index]) for index, ask in asks}

    answers = together(asking, run_pass)
    return [Verdict(outcome, *outcome.judge(audit)) for outcome, audit in zip(answers, batches, strict=True)]
