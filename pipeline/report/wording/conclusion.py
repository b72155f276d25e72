"""What the checks of an answer conclude, why it has no bound, and the answer in one line: of numbers alone."""

from __future__ import annotations

CONTRADICTED = "No bound is stated: a check contradicts what it rests on."
"""Why an answer has no bound that a check contradicts."""

GROUPED = (
    "This selection states no bound: a bound requires independent documents, and these are grouped or near copies of "
    "each other."
)
"""Why an answer has no bound whose documents depend on each other."""

WARNING = "CONTRADICTED, do not act on it"
"""What stands before the reason, and before any number, of an answer that a check contradicts."""

UNCONFIRMED = "provided both groups are alike; the test could not confirm this"
UNCHECKED = "provided both groups are alike and their documents independent; this was not checked"
"""The conditions under which a bound is stated where the blind test is inconclusive, or was not made."""


def assumption_in(units: str, assumption: str) -> str:
    """An assumption on words, of documents that are token ids on these."""
    return assumption.replace(" words", f" {units}") if units == "tokens" else assumption


def elsewhere_assumption(assumption: str) -> str:
    """What must hold for scores that another program computed: of the procedure, and of the scores."""
    return (
        f"{assumption} A score is the same function of a document whatever its role, and was not fitted to the "
        "documents that calibrate: scores from elsewhere are taken as they are, and nothing here checks this."
    )


def standing(conclusion: str, checked: bool = True) -> str:
    """The word for a conclusion in tables.

    Args:
        conclusion: of the checks: supported, inconclusive or contradicted.
        checked: whether the check that both groups are alike was made.
    """
    if conclusion == "contradicted":
        return "CONTRADICTED"
    return conclusion if checked or conclusion == "supported" else "inconclusive (not checked)"


def unsettled_sentence(sentence: str, checked: bool, n_to_settle: int | None) -> str:
    """Why a blind test leaves an answer inconclusive, and what would decide it.

    Args:
        sentence: of the blind test.
        checked: whether it was made, with whatever result.
        n_to_settle: about how many documents of each kind would decide it; None where the test states no number.
    """
    if checked:
        return sentence
    settles = "" if n_to_settle else " To decide it, repeat the selection where the texts can be read."
    return f"Not checked: {sentence}{settles}"


def unproved(weighting: str) -> str:
    """That nothing is proved of an answer with weights, before what they rest on."""
    return f"no guarantee is proved. {weighting}"


def selected(n_selected: int, n_audit: int) -> str:
    """How many of the audited documents are selected."""
    return f"{n_selected:,} of {n_audit:,} selected"


def line(name: str, count: str, terms: str, standing: str) -> str:
    """An answer in one line."""
    return f"{name}: {count} ({terms}), {standing}"


def contradicted_line(name: str, remarks: str, count: str, terms: str) -> str:
    """A contradicted answer in one line: what contradicts the promise comes before the count."""
    return f"{name}: {remarks} {count} ({terms}; guarantee contradicted)"


def scan(slot: int, horizon: int | None, level: float) -> str:
    """The place of a scan in its schedule, in a few words."""
    return f"scan {slot:,}{'' if horizon is None else f' of {horizon:,}'} at level {level:.3g}"


def part_of_schedule(place: str, alpha: float, rule: str, before: int) -> str:
    """The place of a scan, from `scan`, and what it is a part of."""
    counted = f", {before:,} selected before" if rule != "spend" else ""
    return f"{place} of alpha {alpha:g} ({rule}{counted})"
