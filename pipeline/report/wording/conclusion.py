"""The conclusion of the checks of an answer, reasons for a missing bound, a review, and the answer in one line."""

from __future__ import annotations

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

NOT_BOUNDED = (
    "This selection states no bound: calibration documents were removed after a review, and a bound requires that all "
    "documents of the training data were found."
)
"""Why an answer has no bound after a review removed calibration documents."""

NO_VERDICT = (
    "the calibration documents of this run were reviewed, and the tests of seenset verdict have no stated level "
    "there: seenset select without corpus.unseen.review comes first"
)

NO_JOINT = "removed calibration documents after a review: the error rate of a joint selection does not cover that"

AS_CSV = "save it as CSV in UTF-8"
CHANGED = "; a spreadsheet program changes what looks like a number or a date: read the columns as text"


def assumption_in(units: str, assumption: str) -> str:
    """An assumption on words, adapted to tokens for documents that are token ids."""
    return assumption.replace(" words", f" {units}") if units == "tokens" else assumption


def elsewhere_assumption(assumption: str) -> str:
    """The assumption for external scores: that of the procedure, and that on the scores."""
    return (
        f"{assumption} A score is the same function of a document whatever its role, and was not fitted to the "
        "documents that calibrate: scores from elsewhere are taken as they are, and nothing here checks this."
    )


def standing(conclusion: str, checked: bool = True) -> str:
    """The word for a conclusion in tables.

    Args:
        conclusion: conclusion of the checks: supported, inconclusive or contradicted.
        checked: whether the check that both groups are alike was made.
    """
    if conclusion == "contradicted":
        return "CONTRADICTED"
    return conclusion if checked or conclusion == "supported" else "inconclusive (not checked)"


def inconclusive_sentence(sentence: str, checked: bool) -> str:
    """Why a blind test leaves an answer inconclusive.

    Args:
        sentence: sentence of the blind test.
        checked: whether it was made, regardless of its result.
    """
    return sentence if checked else f"Not checked: {sentence}"


def unproved(weighting: str) -> str:
    """States that nothing is proved for an answer with weights; precedes the statement on the weights."""
    return f"no guarantee is proved. {weighting}"


def selected(n_selected: int, n_audit: int) -> str:
    """States how many of the audited documents are selected."""
    return f"{n_selected:,} of {n_audit:,} selected"


def line(name: str, count: str, settings: str, standing: str) -> str:
    """An answer in one line."""
    return f"{name}: {count} ({settings}), {standing}"


def contradicted_line(name: str, remarks: str, count: str, settings: str) -> str:
    """A contradicted answer in one line: the contradiction precedes the count."""
    return f"{name}: {remarks} {count} ({settings}; guarantee contradicted)"


def scan(slot: int, horizon: int | None, level: float) -> str:
    """The place of a scan in its schedule, as a short phrase."""
    return f"scan {slot:,}{'' if horizon is None else f' of {horizon:,}'} at level {level:.3g}"


def part_of_schedule(place: str, alpha: float) -> str:
    """The place of a scan, from `scan`, and its schedule."""
    return f"{place} of alpha {alpha:g}"


def review_sentence(n_listed: int, n_reviewed: int, n_removed: int, detector: str) -> str:
    """States how many calibration documents were listed, reviewed and removed."""
    return (
        f"Of the {n_listed:,} calibration documents with the highest scores ({detector}), {n_reviewed:,} were reviewed "
        f"and {n_removed:,} removed, as confirmed to be in the training data."
    )


def reviewed_assumption(assumption: str, n_removed: int) -> str:
    """The assumption after a review.

    Args:
        assumption: assumption of the procedure.
        n_removed: number of documents that the review removed.
    """
    removed = "The removed document was" if n_removed == 1 else f"Each of the {n_removed:,} removed documents was"
    rest = "apart from the share e of calibration documents that were trained on too"
    return f"{removed} trained on; and, {rest}, {assumption[0].lower()}{assumption[1:]}"


def reviewed_guarantee(alpha: float, n_calibration: int, proved: bool) -> str:
    """The guarantee after a review (Bashari, Sesia and Romano 2025), which is only approximate.

    Args:
        alpha: alpha of the selection.
        n_calibration: number of calibration documents after the review.
        proved: whether the procedure has a finite-sample guarantee without a review.
    """
    kept = "" if proved else "If the procedure keeps alpha without a review: "
    text = (
        f"approximately, the expected share of wrong documents among the selected is at most alpha / (1 - e) with "
        f"alpha = {alpha:g}. Here e is the share of documents of the training data that remain among the "
        f"{n_calibration:,} calibration documents; it is not known. The share can be higher where a removed "
        "document was not trained on."
    )
    return kept + text if kept else text[0].upper() + text[1:]
