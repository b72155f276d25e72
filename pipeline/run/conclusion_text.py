"""The conclusion of the checks of an answer, reasons for a missing bound, and the answer in one line."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.selection.guarantees import ConclusionValue, GroupWeight
from pipeline.selection.smoothing import OtherDraws

CONTRADICTED = "No bound is stated: a check contradicts what it rests on."
"""Why an answer that a check contradicts has no bound."""

GROUPED = (
    "This selection states no bound: a bound requires independent documents, and these are grouped or near-duplicates "
    "of each other."
)
"""Why an answer with dependent documents has no bound."""

WARNING = "CONTRADICTED, do not act on it"
"""Prefix of the reason and of all numbers of an answer that a check contradicts."""

UNCONFIRMED = "provided both groups are alike; the test could not confirm this"
UNCHECKED = "provided both groups are alike and their documents independent; this was not checked"
"""The conditions under which a bound is stated where the blind test is inconclusive, or was not made."""

ONLY_SCORES = "only scores were available"
"""Why no blind test was made for scores without texts."""


def elsewhere_assumption(assumption: str) -> str:
    """The assumption for external scores: that of the procedure, and that on the scores."""
    return (
        f"{assumption} A score is the same function of a document whatever its role, and was not fitted to the "
        "documents that calibrate: scores from elsewhere are taken as they are, and nothing here checks this."
    )


def conclusion_shown(conclusion: ConclusionValue, checked: bool = True) -> str:
    """The word for a conclusion in tables.

    Args:
        conclusion: conclusion of the checks.
        checked: whether the check that both groups are alike was made.
    """
    if conclusion == ConclusionValue.CONTRADICTED:
        return "CONTRADICTED"
    if conclusion == ConclusionValue.INCONCLUSIVE and not checked:
        return "inconclusive (not checked)"
    return str(conclusion)


def inconclusive_sentence(sentence: str, checked: bool) -> str:
    """Why a blind test leaves an answer inconclusive.

    Args:
        sentence: sentence of the blind test.
        checked: whether it was made, regardless of its result.
    """
    return sentence if checked else f"Not checked: {sentence}"


def selected(n_selected: int, n_audit: int) -> str:
    """States how many of the audited documents are selected."""
    return f"{n_selected:,} of {n_audit:,} selected"


def line(name: str, count: str, settings: str, conclusion: str) -> str:
    """An answer in one line; `conclusion` as in tables."""
    return f"{name}: {count} ({settings}), {conclusion}"


def contradicted_line(name: str, remarks: str, count: str, settings: str) -> str:
    """A contradicted answer in one line: the contradiction precedes the count."""
    return f"{name}: {remarks} {count} ({settings}; guarantee contradicted)"


def scan(slot: int, horizon: int | None, level: float) -> str:
    """The place of a scan in its schedule, as a short phrase."""
    return f"scan {slot:,}{'' if horizon is None else f' of {horizon:,}'} at level {level:.3g}"


def part_of_schedule(place: str, alpha: float) -> str:
    """The place of a scan, from `scan`, and its schedule."""
    return f"{place} of alpha {alpha:g}"


def smoothed_ranks(n_selected: int, n_whole: int, others: OtherDraws | None) -> str:
    """That a list by smoothed ranks depends on a draw, and how much.

    Args:
        n_selected: documents of the list.
        n_whole: documents that whole ranks select.
        others: lists under other draws; None: not known.
    """
    text = (
        "Ranks are smoothed: the list depends on a number that the run draws for each document, which no setting "
        f"changes. Whole ranks, which draw nothing, select {n_whole:,}."
    )
    if others is None:
        return text
    draws, fewest, most = len(others.n_selected), min(others.n_selected), max(others.n_selected)
    lists = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    entered, left = (sum(counts) / draws for counts in (others.entered, others.left))
    return (
        f"{text} Under {draws} other draws the list has {lists} documents: on average {entered:,.1f} enter it, and "
        f"{left:,.1f} of these {n_selected:,} leave it."
    )


def weights_of_groups(groups: Sequence[GroupWeight]) -> str:
    """States what p-values were divided by; `groups` holds at least one, in descending order of weight."""
    first, last = groups[0], groups[-1]
    extent = f"from {last.weight:.3g} ({last.group}) to {first.weight:.3g} ({first.group})"
    if first.weight == last.weight:
        extent = f"{first.weight:.3g} in every group"
    return (
        f"A document is selected by its p-value divided by the weight of its group, {extent}. The weights follow from "
        "the share of high scores in each group, without knowing which of its documents are audited."
    )
