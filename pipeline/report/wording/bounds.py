"""What a report says of the bounds of its answers: of one list, of all audited documents, and of what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pipeline.audit.sentences import condition, known_claim, sentence, wrong_claim
from pipeline.audit.summary import Summary
from pipeline.selection.digits import percentage


def bound_clause(summary: Summary) -> str:
    """What the first sentence says of this one list; nothing without a bound."""
    bound = summary.bound
    if bound is None or not summary.n_selected:
        return ""
    return f"; {wrong_claim(summary, bound)}{condition(summary) if bound.wrong_at_most < summary.n_selected else ''}"


def bound_text(summary: Summary) -> str | None:
    """How many of all audited documents are members (or clean), and what that and the first sentence assume."""
    bound = summary.bound
    if bound is None:
        return summary.bound_withheld
    null = "not trained on" if summary.direction == "members" else "trained on"
    failing = percentage(1 - Fraction(repr(bound.confidence)))
    known = sentence(known_claim(summary, bound))
    if bound.members_at_least:
        known += f", selected or not{condition(summary)}"
    return (
        f"{known}. "
        f"Bounds are about the documents at hand and fail in at most {failing} of such audits, if the audited "
        f"documents that were {null} and the calibration documents are exchangeable, all of them together."
    )


def bounds_not_covered(summaries: Sequence[Summary]) -> list[str]:
    """What a bound adds to the average, and what it does not."""
    if not any(summary.bound for summary in summaries):
        return []
    return [
        "What is said with a confidence is about this one list and these audited documents. It says how many are "
        "wrong at most and not which, and the confidence is that of the whole statement, not of any document. "
        "It rests on the calibration documents as the average does, and fails too where documents of one role depend "
        "on one another."
    ]
