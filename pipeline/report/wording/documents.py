"""What checks of the documents themselves found: ids, lengths, groups, near copies, parts that calibration lacks.

Words of numbers alone, so that the same check reads the same before scoring and after it.
"""

from __future__ import annotations

from collections.abc import Sequence

UNTESTED_IDS = "Whether documents repeat an id was not tested."
UNKNOWN_LENGTHS = "How many documents were cut is not known."
LEFT_OUT = "left out of calibration"
"""What becomes of calibration documents that are near copies of audited ones."""


def untested_overlap(role: str) -> str:
    """That it is not known whether known documents are copies of audited ones."""
    return f"Whether {role} documents are copies of audited ones was not tested."


def repeated_ids(count: int) -> str:
    """How many scored documents repeat an id."""
    return f"{count} documents repeat an id and were quarantined."


def truncated(count: int, total: int) -> str:
    """How many of the scored documents were truncated."""
    if total and not count:
        return f"None of the {total} documents was truncated."
    return (
        f"{count} of {total} documents {'was' if count == 1 else 'were'} truncated at max_tokens. A truncated "
        "document is judged by its first max_tokens tokens alone."
    )


def fine_tuned(count: int, role: str, n_near: int) -> str:
    """Documents that adapters were trained on.

    Args:
        count: those of the role that calibrates, and their near copies.
        role: that calibrates.
        n_near: audited documents that are near copies of one.
    """
    text = f"{count} {role} documents were fine-tuned on, or are near copies of one that was, and do not calibrate."
    if n_near:
        text += f" {n_near} audited documents are near copies of one: to fsd they look less like members."
    return text


def grouped(roles: Sequence[str], instead: bool) -> str:
    """What groups take from the bounds of a selection.

    Args:
        roles: whose documents are grouped.
        instead: whether the verdict on the collection counts groups; else it states nothing of them.
    """
    other = "seenset verdict counts groups" if instead else "the list and its error rate stay"
    return (
        f"The {' and '.join(roles)} documents are grouped, and documents of one group may depend on each other. A "
        f"bound on numbers of documents requires independent documents, so none is stated; {other}."
    )
