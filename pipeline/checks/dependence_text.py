"""Sentences on documents that depend on one another: near-duplicates and groups, and what they do to a selection.

Sentences depend on numbers alone, so the same check has the same text before and after scoring.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.selection.blocks import INFLATION
from pipeline.wording import documents, format_against


def grouped(roles: Sequence[str]) -> str:
    """States that documents of these roles are grouped."""
    return f"The {' and '.join(roles)} documents are grouped, and documents of one group may depend on each other."


def unbounded_groups(instead: bool) -> str:
    """States that groups leave no bound; `instead`: whether the verdict on the collection counts groups."""
    other = "; seenset verdict counts groups" if instead else ""
    return f"A bound on numbers of documents requires independent documents, so none is stated{other}."


def estimate_by_blocks(part: int, left_out: int, whole: bool, direction: str) -> str:
    """States how an estimate of the share of nulls allows for dependent documents.

    Args:
        part: maximum number of documents of a block that it counts.
        left_out: documents that exceed it.
        whole: whether all audited documents were compared; otherwise a sample.
        direction: direction of the selection.
    """
    null = "not trained on" if direction == "members" else "trained on"
    rest = f", and takes the other {documents(left_out)} as {null}" if left_out else ""
    sample = "" if whole else " It is that of a sample of the audited documents, in which blocks may be smaller."
    return (
        f"The estimate of the share of nulls counts at most {documents(part)} of each block (a group, a family of "
        f"near-duplicates, or what both join){rest}.{sample}"
    )


def dependent_estimate(procedure: str, blocks: int, largest: int) -> str:
    """States that groups make a procedure that estimates the share of nulls unsafe."""
    return (
        f"They form {blocks:,} blocks, the largest of {documents(largest)}, too few for {procedure}: it estimates the "
        "share of nulls as if they were independent documents, and its share of wrong ones can be larger than alpha."
    )


NO_BOUND = "A bound assumes independent documents, so none is stated."
"""The effect of near-duplicates on an answer for independent documents."""


def too_few_independent(effective: float, procedure: str) -> str:
    """States that near-duplicates make a procedure that estimates the share of nulls unsafe."""
    return (
        f"They count as about {effective:,.0f} independent documents, too few for {procedure}: it estimates the share "
        "of nulls from them, and its share of wrong documents can be larger than alpha."
    )


def others_hold(what: str, n_bh: int, n_storey: int | None) -> str:
    """States the selections of bh and storey where their guarantees hold.

    Args:
        what: the dependent documents, such as "near-duplicates".
        n_bh: documents that bh selects.
        n_storey: documents that storey selects; None where it is not known.
    """
    if n_storey is None:
        return f"The guarantee of bh holds with {what} among the audited documents; bh selects {n_bh:,}."
    return (
        f"The guarantees of bh and storey hold with {what} among the audited documents; bh selects {n_bh:,}, storey "
        f"{n_storey:,}."
    )


def that_calibrate(role: str, all_of_them: bool = True) -> str:
    """A phrase for the calibration documents of a role; `all_of_them`: whether all known documents calibrate."""
    return f"{role} documents that {'' if all_of_them else 'may '}calibrate"


def small_p_values(n_distinct: int, factor: str) -> str:
    """States the effect of near-duplicates in calibration on p-values; `factor` is the maximum, as text."""
    return (
        f"They rank as {n_distinct:,} distinct documents, so the p-values of every procedure can be too small by a "
        f"factor of up to {factor}; calibrate: one_per_block takes one document of each family."
    )


def small_p_values_of_groups(n: int, n_blocks: int, role: str, factor: str) -> str:
    """States the effect of groups in calibration on p-values; `factor` is the maximum, as text."""
    return (
        f"The {n:,} {role} documents that calibrate rank as {n_blocks:,} independent ones, so the p-values of every "
        f"procedure can be too small by a factor of up to {factor}; calibrate: one_per_block takes one document of "
        "each group."
    )


def one_of_each(n: int, role: str) -> str:
    """States that one document of each block calibrates."""
    return f"One {role} document of each group or family of near-duplicates calibrates, {n:,} in all."


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
