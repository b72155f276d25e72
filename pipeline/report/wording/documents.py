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


def repeated_ids_sentence(count: int) -> str:
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


NO_BOUND = "A bound assumes independent documents, so none is stated."
"""What near copies take from an answer of independent documents."""


def too_few_independent(effective: float, procedure: str) -> str:
    """What near copies among the audited documents take from a procedure that estimates the share of nulls."""
    return (
        f"They count as about {effective:,.0f} independent documents, too few for {procedure}: it estimates the share "
        "of nulls from them, and its share of wrong documents can be larger than alpha."
    )


def bh_holds(n_selected: int) -> str:
    """What bh selects where its guarantee holds with near copies."""
    return f"The guarantee of bh holds with near copies among the audited documents; bh selects {n_selected:,}."


def that_calibrate(role: str) -> str:
    """The documents of a role that calibrate."""
    return f"{role} documents that calibrate"


def small_p_values(n_distinct: int, factor: str) -> str:
    """What near copies among the documents that calibrate do to p-values; `factor` is the most, in digits."""
    return (
        f"They rank as {n_distinct:,} distinct documents, so the p-values of every procedure can be too small by a "
        f"factor of up to {factor}; to fix it, keep one document of each family."
    )
