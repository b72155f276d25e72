"""What an answer states of a review of its calibration documents: in part confirmed as trained on, and removed."""

from __future__ import annotations

NOT_BOUNDED = (
    "This selection states no bound: calibration documents were removed after a review, and a bound requires that all "
    "documents of the training data were found."
)
"""Why an answer has no bound whose calibration documents were removed by a review."""

NO_VERDICT = (
    "the calibration documents of this run were reviewed, and the tests of seenset verdict have no stated level "
    "there: seenset select without corpus.unseen.review comes first"
)

NO_JOINT = "removed calibration documents after a review: the error rate of a joint selection does not cover that"

AS_CSV = "save it as CSV in UTF-8"
CHANGED = "; a spreadsheet program changes what looks like a number or a date: read the columns as text"


def review_sentence(n_listed: int, n_reviewed: int, n_removed: int, detector: str) -> str:
    """How many calibration documents were listed, reviewed and removed."""
    return (
        f"Of the {n_listed:,} calibration documents with the highest scores ({detector}), {n_reviewed:,} were reviewed "
        f"and {n_removed:,} removed, as confirmed to be in the training data."
    )


def reviewed_assumption(assumption: str, n_removed: int) -> str:
    """What must hold after a review.

    Args:
        assumption: of the procedure.
        n_removed: documents that the review removed.
    """
    removed = "The removed document was" if n_removed == 1 else f"Each of the {n_removed:,} removed documents was"
    rest = "apart from the share e of calibration documents that were trained on too"
    return f"{removed} trained on; and, {rest}, {assumption[0].lower()}{assumption[1:]}"


def reviewed_promise(alpha: float, n_calibration: int, proved: bool) -> str:
    """What holds after a review (Bashari, Sesia and Romano 2025): no more than an approximation.

    Args:
        alpha: of the selection.
        n_calibration: documents that calibrate after the review.
        proved: whether the procedure has a finite-sample guarantee without a review.
    """
    kept = "" if proved else "As far as the procedure keeps to alpha without a review: "
    text = (
        f"approximately, the expected share of wrong documents among the selected is at most alpha / (1 - e) with "
        f"alpha = {alpha:g}. Here e is the share of documents of the training data that remain among the "
        f"{n_calibration:,} calibration documents; it is not known. The share can be higher where a removed "
        "document was not trained on."
    )
    return kept + text if kept else text[0].upper() + text[1:]
