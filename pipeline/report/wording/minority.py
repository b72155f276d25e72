"""What the tail check and the family check found: a small part of the documents that calibration lacks."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.audit.tail import LEVEL
from pipeline.selection.promises import beside

NAMED = 10
"""Documents that a sentence names."""


def no_tail(role: str, by: str, p_value: float) -> str:
    """That no small part of the audited documents stands out; `by` is what the classifier knows of documents."""
    return (
        f"No small part of the audited documents stands out from the {role} documents by their {by} "
        f"(p = {beside(p_value, LEVEL, kind='g')}; p of at most {LEVEL:g} would be a finding)."
    )


def tail(role: str, by: str, p_value: float, share: float) -> str:
    """The part that stands out: its share of the compared documents."""
    return (
        f"A small part of the audited documents is unlike the {role} documents: of the {share:.1%} of the compared "
        f"documents whose {by} look most like those of audited ones, more are audited than chance allows "
        f"(p = {beside(p_value, LEVEL, kind='g')})."
    )


def selected_in_tail(n_compared: int, n_inside: int, n_selected: int) -> str:
    """How many of the selected documents were compared, and how many of these are in the part."""
    if not n_selected:
        return " No document is selected."
    text = ""
    if n_compared != n_selected:
        text = f" {n_compared:,} of the {n_selected:,} selected documents were compared."
    if n_compared:
        inside = f"{n_inside:,} ({n_inside / n_compared:.0%})"
        text += f" Of {n_compared:,} selected documents {inside} are in this part."
    return text


def highest(ids: Sequence[str], selected: bool) -> str:
    """The highest documents in the part, if any; `selected`: whether these are selected."""
    whose = "selected" if selected else "audited"
    return f" The highest {whose} documents in it: {', '.join(ids)}." if ids else ""


def tail_outcome(role: str, contradicted: bool, n_selected: int) -> str:
    """What the part means for the list."""
    if contradicted:
        return f" No {role} document calibrates this part, so the error rate of the list is not supported."
    return " That is too few to contradict the list." if n_selected else ""


def no_family(role: str, p_value: float | None) -> str:
    """That no large family of near-duplicates is in one role alone; `p_value` is of the largest, if it is large."""
    shown = "" if p_value is None else f" (p = {beside(p_value, LEVEL, kind='g')})"
    return f"No large family of near-duplicates is among the audited or the {role} documents alone{shown}."


def family(ids: Sequence[str], size: int, known: str, others: str, p_value: float) -> str:
    """A family of near-duplicates in one role alone.

    Args:
        ids: of its first documents.
        size: documents of it.
        known: the word for its documents.
        others: the word for those of the other role.
        p_value: of its being there by chance.
    """
    more = f" and {size - len(ids):,} more" if size > len(ids) else ""
    return (
        f"{size:,} {known} documents are near-duplicates of one another and have none among the {others} "
        f"documents, which chance does not explain (p = {beside(p_value, LEVEL, kind='g')}): {', '.join(ids)}{more}."
    )


def selected_in_family(n_inside: int, n_selected: int) -> str:
    """How many selected documents are in the family."""
    return f" {n_inside:,} of the {n_selected:,} selected documents are among them."


def family_outcome(role: str) -> str:
    """What a family means for a list that it contradicts."""
    return f" No {role} document calibrates them, so the error rate of the list is not supported."
