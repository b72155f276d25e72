"""Run a configured selection: calibrate on known documents, then decide on audit documents shard by shard.

`answer` is a generator. For each fold of the audit shards it yields a `Fold`: a function of a shard, and a function
that merges two results. The merged result is sent back to it. The same code therefore runs in one process and on a
cluster, several selections share readings (`pipeline.selection.folds`), and small audits run in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.blocks import NONE, Blocks, Related
from pipeline.selection.bounds import wrong_in_list
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.folds import EMPTY, Answer, Fold, Query, RoleScores, SelectionInput, run_queries
from pipeline.selection.procedures import procedure_of, why_unbounded
from pipeline.selection.ranked import ranked
from pipeline.selection.schedule import Level, Slot
from pipeline.selection.smoothing import IdDigest
from pipeline.wording import percentage


def answer(question: SelectionInput) -> Query[Answer]:
    """Decide a selection: a generator that yields the required folds and returns the answer.

    The answer carries its guarantee and the assumption of that guarantee.

    Args:
        question: the selection and its inputs; the level is that of its slot in a schedule of scans, if it has one.

    Raises:
        UserError: missing calibration documents, groups without any, or no audit documents.
    """
    selection, level, quarantined = question.selection, question.level, question.quarantined
    decided = yield from (procedure_of(selection.procedure).answer or ranked)(question)
    counts, rank = decided.counts, decided.rank
    if counts is not None and why_unbounded(selection) is None:
        unlisted = quarantined if rank == counts.grid.size else 0  # they have no score and are never on the list
        if decided.smoothing is not None:  # the bound of all documents at the ranks of the list
            unlisted = counts.at_most(rank) - decided.smoothing.n_selected
        decided = replace(decided, bound=wrong_in_list(counts, rank, level.confidence, unlisted))
    return in_slot(decided, level, selection)


def refuse_uncovered(selection: SelectionConfig) -> None:
    """Refuse a selection whose guarantee does not add up over a schedule.

    Raises:
        UserError: the message states what is covered.
    """
    if calibration_of(selection.calibration).conditional:
        raise UserError(
            f"selection {selection.name}: series does not cover calibration conditional, which may fail for a share "
            "delta of calibration sets in every scan anew; use calibration: pooled"
        )
    if selection.ranks != "whole":
        raise UserError(f"selection {selection.name}: series does not cover ranks: smoothed; use ranks: whole")


def in_slot(answer: Answer, level: Level, selection: SelectionConfig) -> Answer:
    """An answer with the guarantee of its slot; unchanged without a slot."""
    slot = level.slot
    if slot is None:
        return answer
    assumption = f"{answer.assumption} {_FIXED}"
    return replace(answer, assumption=assumption, promise=_guarantee(answer, slot, selection))


_FIXED = (
    "This holds in every scan of the schedule. What each scan audits and asks, and how many scans there are, was fixed "
    "without looking at what earlier scans answered."
)

_LEARNT = (
    "Learning from the pool spends nothing of it; the weights are those of this scan, so a document may enter or leave "
    "a list because they changed."
)

LATE = (
    "Nothing is guaranteed for this list, nor for all scans of the schedule together with it: its run had answered "
    "before it took its place, so what was asked may have been picked by an answer."
)
"""The guarantee of a scan that joined the schedule after its run had answered."""


def _guarantee(answer: Answer, slot: Slot, selection: SelectionConfig) -> str:
    """The guarantee of all scans together, and of this scan if there is one."""
    if slot.asked_before:
        return LATE
    whole, part = percentage(slot.alpha), f"{float(slot.level):.3g}"
    over_all = (
        "Over all scans of the schedule together, the expected share of wrong documents among all that this question "
        f"selects is at most {whole}"
    )
    learnt = f" {_LEARNT}" if selection.learn == "pool" and answer.weights is not None else ""
    here = f"{answer.promise} Here alpha is {part}, the part of this scan.{learnt}"
    if procedure_of(selection.procedure).per_list:
        sure = percentage(selection.exact_confidence)
        return f"{here} With {sure} confidence this holds of every scan of the schedule at once, each at its part."
    return f"{here} {over_all}{'' if answer.guarantee == 'finite-sample' else ', if every scan keeps its part'}."


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scored documents of any role, in any order."""

    columns: Mapping[str, np.ndarray]  # detector column -> float64, (documents,), finite
    keys: np.ndarray  # int64 hashes of the ids, (documents,)
    groups: pa.Array | None = None
    family: np.ndarray | None = None
    """int64, (documents,): equal for near-duplicates of one role; NONE for a document that was not compared with the
    others. None: no documents are near-duplicates."""
    key: bytes | None = None  # of the draws of smoothed ranks; None: from the ids of both roles

    @property
    def group_numbers(self) -> np.ndarray:
        """The group of each document, int64, (documents,), from 0; -1 for none."""
        if self.groups is None:
            return np.full(self.keys.size, -1, dtype=np.int64)
        codes = self.groups.dictionary_encode().indices
        return np.asarray(codes.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)

    def batch(self, positions: np.ndarray, selection: SelectionConfig) -> RoleScores:
        """The documents at some positions, with the columns of a selection."""
        matrix = np.stack([self.columns[column][positions] for column in selection.detectors], axis=1)
        groups = None
        if self.groups is not None and calibration_of(selection.calibration).grouped:
            groups = pa.chunked_array([self.groups.take(pa.array(positions))])
        return RoleScores(matrix, groups, self.keys[positions])

    def drawing(self, *roles: np.ndarray) -> bytes:
        """The key of the draws of smoothed ranks, for roles at some positions."""
        return IdDigest.of(self.keys[np.concatenate(roles)]).key() if self.key is None else self.key

    def related(self, positions: np.ndarray, groups: np.ndarray) -> Related:
        """What makes the documents at some positions depend on one another; `groups` are `group_numbers`."""
        family = None if self.family is None else np.unique(self.family[positions], return_inverse=True)[1]
        return Related.of(self.keys[positions], family, groups[positions])


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The answer of one selection, and its result for each audit document, in order."""

    answer: Answer
    p: np.ndarray  # float64, (documents,)
    selected: np.ndarray  # bool, (documents,)
    calibrating: np.ndarray  # bool, over the documents of the null role: whether they calibrate


def answer_all(
    selections: Sequence[SelectionConfig],
    scores: Scores,
    roles: Mapping[Role, np.ndarray],
    quarantined: int,
    seed: int,
    slot: Slot | None = None,
) -> list[Verdict]:
    """Answer selections over documents with roles given as positions in `scores`.

    The answers equal those for a run directory with these documents in these roles.

    Args:
        selections: configurations of the selections.
        scores: documents with scores.
        roles: role -> int64 positions.
        quarantined: number of additional audit documents without scores; hypotheses at p = 1.
        seed: seed of random ties, splits, random weights, and the order of dependent documents.
        slot: slot of the selections in a schedule of scans; None: no schedule.

    Raises:
        UserError: as `engine.answer`.
    """

    def batch(role: Role, selection: SelectionConfig, kept: np.ndarray | slice = slice(None)) -> RoleScores:
        return scores.batch(roles[role][kept], selection) if role in roles else EMPTY

    groups, none = scores.group_numbers, np.empty(0, dtype=np.int64)
    compared = np.ones(roles["audit"].size, dtype=bool)
    if scores.family is not None:
        compared = scores.family[roles["audit"]] != NONE
    audited = scores.related(roles["audit"][compared], groups)
    batches, queries, calibrating = [], [], []
    for selection in selections:
        role, sought = NULL_ROLE[selection.direction], procedure_of(selection.procedure).reads_sought
        known = scores.related(roles.get(role, none), groups)
        blocks = Blocks.of(audited, known, calibration_of(selection.calibration).grouped)
        kept, blocks = blocks.calibrating_in(selection, known, seed)
        dependence = blocks.dependence(bool(compared.all() or (audited.group == NONE).all()))
        place = teaches = None
        if dependence is not None and dependence.in_audit:
            place, teaches = np.full(compared.size, NONE, dtype=np.int64), np.zeros(compared.size, dtype=bool)
            place[compared] = audited.places(blocks.audited, seed)
            teaches[compared] = audited.places(blocks.learning, seed) == 0
        batches.append(replace(batch("audit", selection), place=place, teaches=teaches))
        others = batch(SOUGHT_ROLE[selection.direction], selection) if sought else EMPTY
        drawing = b"" if selection.ranks == "whole" else scores.drawing(roles["audit"], roles.get(role, none))
        inputs = seed, batch(role, selection, kept), others, quarantined, dependence, drawing
        queries.append(answer(SelectionInput(selection, Level.of(selection, slot), *inputs)))
        calibrating.append(kept)

    def run_folds(folds: Sequence[tuple[int, Fold]]) -> dict[int, Any]:
        return {index: fold.of_shard(batches[index]) for index, fold in folds}

    answers = run_queries(queries, run_folds)
    made = zip(answers, batches, calibrating, strict=True)
    return [Verdict(outcome, *outcome.judge(audit), kept) for outcome, audit, kept in made]
