"""The bounds of answers in the report: for one list, for all audited documents, with their assumptions.

No sentence claims more than its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pipeline.results.summary import Summary
from pipeline.selection.bounds import Bound
from pipeline.wording import percentage, was


def bound_clause(summary: Summary) -> str:
    """The clause of the first sentence on this one list; empty without a bound."""
    bound = summary.bound
    if bound is None or not summary.n_selected:
        return ""
    return f"; {wrong_claim(summary, bound)}{condition(summary) if bound.wrong_at_most < summary.n_selected else ''}"


def bound_text(summary: Summary) -> str | None:
    """At least how many of all audited documents are members (or clean), and the assumption of all bounds."""
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
        f"Bounds are about these documents and fail in at most {failing} of such audits, if the audited "
        f"documents that were {null} and the calibration documents are exchangeable, all of them together."
    )


def bound_sentence(summary: Summary) -> str | None:
    """At most how many of the selected are wrong, and at least how many audited documents are members (or clean).

    Where no bound may be stated, the reason; None where no theorem covers the selection.
    """
    bound = summary.bound
    if bound is None:
        return summary.bound_withheld
    known = f"{sentence(known_claim(summary, bound))}{condition(summary) if bound.members_at_least else ''}."
    if not summary.n_selected:
        return known
    wrong = sentence(wrong_claim(summary, bound))
    if bound.wrong_at_most >= summary.n_selected:
        return f"{wrong}. {known}" if bound.members_at_least else f"{wrong}."
    return f"{wrong}, and {known_clause(summary, bound)}{condition(summary)}."


def bounds_not_covered(summaries: Sequence[Summary]) -> list[str]:
    """What a bound adds to the average, and its limits."""
    if not any(summary.bound for summary in summaries):
        return []
    return [
        "What is said with a confidence is about this one list and these audited documents. It says how many are "
        "wrong at most and not which, and the confidence is that of the whole statement, not of any document. "
        "It rests on the calibration documents as the average does, and fails too where documents of one role depend "
        "on one another."
    ]


def condition(summary: Summary) -> str:
    """The clause at the end of a sentence with a bound: the condition under which it is stated, if any."""
    return f", {summary.condition}" if summary.condition else ""


def sentence(clause: str) -> str:
    """A clause as the start of a sentence."""
    return f"{clause[0].upper()}{clause[1:]}"


def wrong_claim(summary: Summary, bound: Bound) -> str:
    """At most how many of the selected are wrong, with the confidence unless all may be wrong."""
    clause = wrong_clause(summary, bound)
    return clause if bound.wrong_at_most >= summary.n_selected else f"with {sureness(bound)} {clause}"


def known_claim(summary: Summary, bound: Bound) -> str:
    """At least how many of all audited documents are members (or clean), with the confidence; a bound of 0 has none."""
    clause = known_clause(summary, bound)
    return f"with {sureness(bound)} {clause}" if bound.members_at_least else clause


def sureness(bound: Bound) -> str:
    """The confidence of a bound in words: 95% confidence. It is not rounded: 99.99999% is not 100%."""
    return f"{percentage(Fraction(repr(bound.confidence)))} confidence"


def wrong_clause(summary: Summary, bound: Bound) -> str:
    """At most how many of the selected are wrong; there is at least one."""
    wrong, these = bound.wrong_at_most, f"these {summary.n_selected:,}"
    if wrong >= summary.n_selected:
        return "the one selected document may be wrong" if wrong == 1 else f"all of {these} may be wrong"
    if wrong == 0:
        return "the one selected document is not wrong" if summary.n_selected == 1 else f"none of {these} is wrong"
    return f"at most {wrong:,} of {these} {'is' if wrong == 1 else 'are'} wrong"


def known_clause(summary: Summary, bound: Bound) -> str:
    """At least how many of all audited documents are members; with direction clean, how many are not."""
    kind = "trained on" if summary.direction == "members" else "not trained on"
    least, audited = bound.members_at_least, f"of the {summary.n_audit:,} audited documents"
    if least == 0:
        return f"the bound is 0: it does not show that any {audited} was {kind}"
    return f"at least {least:,} {audited} {was(least)} {kind}"


def share_text(share: float) -> str:
    """An estimated null share, which some procedures do not cap at 1."""
    return f"{share:.3g}" if share <= 1 else f"{share:.3g} (this estimate may exceed 1)"
