"""What dependent documents will do to each selection, stated before scoring from the documents that were read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.checks.dependent_documents import group_numbers
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.corpus.keys import Keys
from pipeline.run.records import Record
from pipeline.selection.blocks import EXCESS, INFLATION, NONE, Blocks, Dependence, Related, Sizes
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.procedures.estimating import storey_cut
from pipeline.selection.procedures.record import Rule, applied_to
from pipeline.selection.ranked import fewest_selectable
from pipeline.wording import documents, format_against

LITTLE = Fraction(1, 2)
"""Smallest possible estimate of the share of nulls above which storey is said to select little more than bh."""


class BlockCounts(Record):
    """Blocks of dependent documents among the audited documents and those of a known role that were read."""

    audited: dict[int, int] = Field(description="Blocks of audited documents, by their number of documents.")
    n_calibration: int = Field(description="Documents of the known role.")
    n_blocks: int = Field(description="Their blocks.")
    factor: float = Field(description="Maximum factor by which p-values would be too small.")
    n_strata: int = Field(description="Groups with documents of both roles.")

    @classmethod
    def of(cls, dependence: Dependence, n_strata: int) -> BlockCounts:
        """The counts of a `Dependence`."""
        return cls(
            audited=dict(dependence.audited.counts),
            n_calibration=dependence.n_calibration,
            n_blocks=dependence.n_blocks,
            factor=float(dependence.factor),
            n_strata=n_strata,
        )


def relate_documents(keys: Keys, once: np.ndarray, compared: np.ndarray, family: np.ndarray) -> Related:
    """What makes documents that were read depend on one another.

    Args:
        keys: keys of the documents.
        once: int64, positions of those that do not repeat an id.
        compared: int64, positions of those whose texts were compared, which do not repeat an id either.
        family: int64, (compared,), their families of near-duplicates.
    """
    number = np.arange(len(keys), dtype=np.int64) + family.size
    number[compared] = family
    families = np.unique(number[once], return_inverse=True)[1].astype(np.int64)
    return Related.of(keys.id[once], families, group_numbers(keys)[once])


def count_blocks(audited: Related, known: Related) -> dict[str, BlockCounts]:
    """The blocks of audited documents and of a known role, by whether calibration is by group; empty without any."""
    counted = {}
    strata = np.intersect1d(audited.group, known.group)
    for by_group in (False, True):
        dependence = Blocks.of(audited, known, by_group).dependence()
        if dependence is not None:
            counted[_kind(by_group)] = BlockCounts.of(dependence, int(np.count_nonzero(strata != NONE)))
    return counted


def read_blocks(checks: Mapping[str, Any]) -> tuple[dict[Role, dict[str, BlockCounts]], bool]:
    """The counted blocks of `plan_checks`, and whether all documents were read."""
    blocks = {
        role: {kind: BlockCounts.model_validate(counts) for kind, counts in kinds.items()}
        for role, kinds in checks.get("blocks", {}).items()
    }
    return blocks, checks.get("whole", False)


def share_of_blocks(selection: SelectionConfig, counted: Mapping[str, BlockCounts]) -> Fraction:
    """The share of the known documents that calibrate a selection, in (0, 1]: one of each block, or all.

    Args:
        selection: the selection.
        counted: result of `count_blocks` of its null role.
    """
    counts = counted.get(_kind(calibration_of(selection.calibration).grouped))
    if selection.calibrate == "all" or counts is None:
        return Fraction(1)
    return Fraction(counts.n_blocks, counts.n_calibration)


def _kind(by_group: bool) -> str:
    return "by_group" if by_group else "pooled"


def dependence_lines(
    config: AuditConfig,
    counted: Mapping[Role, Mapping[str, BlockCounts]],
    documents: Mapping[Role, int],
    whole: bool,
) -> list[tuple[bool, str]]:
    """Lines on what dependent documents will do to each selection: whether it would contradict it, and the sentence.

    Args:
        config: the audit's configuration.
        counted: result of `count_blocks` by known role.
        documents: planned number of documents by role.
        whole: whether all documents were read.
    """
    lines = []
    for selection in config.selections:
        role = NULL_ROLE[selection.direction]
        calibration = calibration_of(selection.calibration)
        counts = counted.get(role, {}).get(_kind(calibration.grouped))
        if counts is None:
            continue
        about = [
            *_calibrating(selection, counts, documents, whole),
            *_estimating(selection, counts),
        ]
        lines += [(failing, f"selection {selection.name}: {sentence}") for failing, sentence in about]
    return lines


def _calibrating(
    selection: SelectionConfig, counts: BlockCounts, documents: Mapping[Role, int], whole: bool
) -> list[tuple[bool, str]]:
    """The effect of dependent calibration documents, and the shortest list with one of each block."""
    role, one_of_each = NULL_ROLE[selection.direction], selection.calibrate != "all"
    if counts.factor <= INFLATION and not (one_of_each and counts.n_blocks < counts.n_calibration):
        return []
    share = Fraction(counts.n_blocks, counts.n_calibration)
    n, m = math.floor(documents[role] * share), documents["audit"]
    procedure, halved = applied_to(selection)
    calibrated = calibration_of(selection.calibration)
    rule = Rule(procedure, selection.exact_alpha, calibrated.delta(selection), halved, selection.exact_lambda)
    fewest = None if procedure.signed or procedure.per_list else fewest_selectable(rule, n, m)
    if one_of_each:
        return [(False, one_of_each_planned(n, documents[role], role, fewest, whole))]
    return [(True, dependent_calibration(n, documents[role], role, counts.factor, fewest, whole))]


def _estimating(selection: SelectionConfig, counts: BlockCounts) -> list[tuple[bool, str]]:
    """The effect of dependent audited documents on an estimate of the share of nulls."""
    procedure, halved = applied_to(selection)
    sizes = Sizes(counts.audited)
    if not procedure.estimates or sizes.largest <= 1:
        return []
    calibrated = calibration_of(selection.calibration)
    rule = Rule(procedure, selection.exact_alpha, calibrated.delta(selection), halved, selection.exact_lambda)
    n = counts.n_calibration if selection.calibrate == "all" else counts.n_blocks
    t, _ = storey_cut(rule.grid(rule.calibrating(n)), selection.exact_lambda)
    if not procedure.by_blocks:
        unsafe = sizes.excess(t, Fraction(sizes.documents)) > EXCESS
        return [(True, unsafe_estimate(selection.procedure, sizes.blocks, sizes.largest))] if unsafe else []
    part = sizes.part(t)
    least = (part / (1 - t) + sizes.left_out(part)) / sizes.documents
    by_group = counts.n_strata > 0 and not calibrated.grouped
    return [(False, as_bh(min(1.0, float(least)), sizes.blocks, by_group))] if least > LITTLE else []


# --- sentences


def dependent_calibration(n: int, known: int, role: str, factor: float, fewest: int | None, whole: bool) -> str:
    """States before scoring that dependent calibration documents would contradict a selection, and the remedy.

    Args:
        n: blocks of calibration documents.
        known: calibration documents.
        role: role of the calibration documents.
        factor: maximum factor by which p-values would be too small.
        fewest: documents of the shortest possible list with one document of each block; None: not by their number.
        whole: whether all documents were read.
    """
    shortest = "" if fewest is None else f", and the shortest possible list has {documents(fewest)}"
    return (
        f"the {known:,} {role} documents rank as {_about(n, whole)} independent ones, so p-values can be too small by "
        f"a factor of up to {format_against(factor, float(INFLATION))}, and the answer would not be supported; with "
        f"calibrate: one_per_block {_about(n, whole)} calibrate{shortest}."
    )


def one_of_each_planned(n: int, known: int, role: str, fewest: int | None, whole: bool) -> str:
    """States before scoring how many documents calibrate with one of each block; arguments as above."""
    shortest = "" if fewest is None else f", and the shortest possible list has {documents(fewest)}"
    return f"one {role} document of each block calibrates, {_about(n, whole)} of {known:,}{shortest}."


def unsafe_estimate(procedure: str, blocks: int, largest: int) -> str:
    """States before scoring that a procedure would not be supported, because it ignores blocks."""
    return (
        f"the audited documents form {blocks:,} blocks of groups and near-duplicates, the largest of "
        f"{documents(largest)}, too few for the estimate of procedure {procedure}: the answer would not be supported; "
        "take bh or storey."
    )


def as_bh(least: float, blocks: int, by_group: bool) -> str:
    """States before scoring that Storey's estimate of the share of nulls cannot be small, so that storey is like bh.

    Args:
        least: the smallest possible estimate.
        blocks: blocks of audited documents.
        by_group: whether calibration by group would remedy it.
    """
    remedy = (
        "; calibration: by_group ranks within the groups of both roles, which then are no blocks, and keeps it"
        if by_group
        else ""
    )
    return (
        f"the audited documents form {blocks:,} blocks of groups and near-duplicates, with which storey takes a share "
        f"of nulls of at least {least:.2f} (bh takes 1), so it selects little more than bh{remedy}."
    )


def _about(count: int, whole: bool) -> str:
    return f"{count:,}" if whole else f"about {count:,}"
