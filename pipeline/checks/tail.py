"""The tail check of a selection: does its list depend on a small part of the documents that calibration lacks?"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.compute as pc
from pydantic import Field

from pipeline.checks.check import KNOWN_TEXTS, AnswerFacts, Check
from pipeline.checks.diagnostic import Diagnostic
from pipeline.checks.held_out_tail import TAIL_LEVEL, TailTest
from pipeline.run.scored import Scored
from pipeline.selection.guarantees import Outcome
from pipeline.wording import format_against, short_id

LEAST_SELECTED = 2
"""Minimum number of selected documents in a tail that contradicts a list."""

NAMED = 10
"""Maximum number of documents that a sentence names."""


class TailDiagnostic(Diagnostic):
    """Whether a small part of the audited documents is of a kind that calibration lacks."""

    p_value: float = Field(description="P-value of the hypothesis that audited and calibration documents are alike.")
    share: float | None = Field(
        None, description="Share of the compared documents in this part; null where p is above 0.01."
    )
    n_compared: int | None = Field(
        None, description="Selected documents that were compared; null where p is above 0.01."
    )
    n_selected: int | None = Field(None, description="Of these, those in this part; null where p is above 0.01.")
    documents: list[str] = Field(
        [], description="Ids of the ten highest of these; of the audited documents where none is selected."
    )


def tail_diagnostic(facts: AnswerFacts) -> TailDiagnostic | None:
    """The tail check of a selection; None where the blind test was not made."""
    tail, blind, scored, role = facts.tail, facts.blind, facts.scored, facts.role
    if tail is None or blind is None or scored is None:
        return None
    if not blind.looked and not tail.significant:
        sentence = unseen_tail(role, blind.by)
        return TailDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=sentence, p_value=tail.p_value)
    if not tail.significant or tail.share is None:
        sentence = no_tail(role, blind.by, tail.p_value)
        return TailDiagnostic(outcome=Outcome.PASSED, sentence=sentence, p_value=tail.p_value)
    n_compared, inside = _selected_in(tail, facts, scored)
    alpha = facts.selection.alpha
    contradicted = len(inside) >= LEAST_SELECTED and len(inside) / n_compared - tail.share > alpha / 2
    names = [doc_id for _, doc_id in inside[:NAMED]] if inside else _audited_names(tail, scored)
    sentence = tail_sentence(role, blind.by, tail.p_value, tail.share)
    sentence += selected_in_tail(n_compared, len(inside), facts.n_selected)
    sentence += highest([*map(short_id, names)], selected=bool(inside))
    sentence += tail_outcome(role, contradicted, facts.n_selected)
    return TailDiagnostic(
        outcome=Outcome.FAILED if contradicted else Outcome.INCONCLUSIVE,
        sentence=sentence,
        p_value=tail.p_value,
        share=tail.share,
        n_compared=n_compared,
        n_selected=len(inside),
        documents=names,
    )


def _selected_in(tail: TailTest, facts: AnswerFacts, scored: Scored) -> tuple[int, list[tuple[float, str]]]:
    """The number of selected documents that were compared; rank and id of those in the tail, the highest first."""
    shards = scored.shards
    ranks = {(shards[name].name, shards[name].first_row + row): rank for name, row, rank in tail.documents}
    compared = {
        (shards[name].name, shards[name].first_row + row) for name, rows in tail.compared.items() for row in range(rows)
    }
    selected = facts.among(compared)
    inside = [(ranks[source, row], str(name)) for source, row, name in selected if (source, row) in ranks]
    return len(selected), sorted(inside, key=lambda place: (-place[0], place[1]))


def _audited_names(tail: TailTest, scored: Scored) -> list[str]:
    """The ids of the highest audited documents of the tail that have scores, at most ten."""
    receipts = {receipt.shard: receipt for receipt in scored.of("audit")}
    names = []
    for shard, row, _ in tail.documents[:NAMED]:
        table = scored.table(receipts[shard], ["doc_id", "row"])
        rows = table.filter(pc.equal(table["row"], scored.shards[shard].first_row + row))
        names += rows["doc_id"].to_pylist()
    return names


# --- sentences


def no_tail(role: str, by: str, p_value: float) -> str:
    """States that no small part of the audited documents stands out; `by` is the classifier's input."""
    return (
        f"No small part of the audited documents stands out from the {role} documents by their {by} "
        f"(p = {_p(p_value)}; the check looks for p of at most {TAIL_LEVEL:g})."
    )


def unseen_tail(role: str, by: str) -> str:
    """States that the check could not look for a small part."""
    return (
        f"Whether a small part of the audited documents is unlike the {role} documents is not known: they have too few "
        f"{by} in common to look."
    )


def tail_sentence(role: str, by: str, p_value: float, share: float) -> str:
    """States the share of the compared documents in the part that stands out."""
    return (
        f"A small part of the audited documents is unlike the {role} documents: of the {share:.1%} of the compared "
        f"documents whose {by} look most like those of audited ones, more are audited than chance allows "
        f"(p = {_p(p_value)})."
    )


def selected_in_tail(n_compared: int, n_inside: int, n_selected: int) -> str:
    """States how many selected documents were compared, and how many of these are in the part."""
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
    """Names the highest documents in the part, if any; `selected`: whether these are selected."""
    whose = "selected" if selected else "audited"
    return f" The highest {whose} documents in it: {', '.join(ids)}." if ids else ""


def tail_outcome(role: str, contradicted: bool, n_selected: int) -> str:
    """States the consequence of the part for the list."""
    if contradicted:
        return f" No {role} document calibrates this part, so the error rate of the list is not supported."
    return " That is too few to contradict the list." if n_selected else ""


def _p(p_value: float) -> str:
    return format_against(p_value, TAIL_LEVEL, kind="g")


CHECK = Check(
    name="tail",
    title="Tail check",
    record=TailDiagnostic,
    description=(
        "Whether a small part of the audited documents is of a kind that calibration lacks; null where the blind "
        "test was not made."
    ),
    place=9,
    needs=KNOWN_TEXTS,
    on_scores=tail_diagnostic,
    next=lambda diagnostic, role: (
        f"Leave the named documents out of the audit, or add {role} documents of their kind, and make a new run."
    ),
)
