"""The family check of a selection: does its list depend on a family of near-duplicates that calibration lacks?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.checks.check import KNOWN_TEXTS, AnswerFacts, Check
from pipeline.checks.dependent_documents import LARGE, near_duplicates_file
from pipeline.checks.diagnostic import Diagnostic
from pipeline.checks.held_out_tail import TAIL_LEVEL
from pipeline.config.corpus import Role
from pipeline.corpus.keys import Keys
from pipeline.corpus.known_texts import KnownTexts
from pipeline.run.records import KEYS_FILE
from pipeline.run.scored import Scored
from pipeline.selection.guarantees import Outcome
from pipeline.wording import format_against, short_id

NAMED = 10
"""Maximum number of documents that a sentence names."""


class FamiliesDiagnostic(Diagnostic):
    """Whether a family of near-duplicates is in one role only although chance would have put it into both."""

    p_value: float | None = Field(
        None, description="P-value of the largest family in one role only; null where none has 5 documents."
    )
    role: Role | None = Field(None, description="The role of the family; null where p is above 0.01.")
    size: int | None = Field(None, description="Documents of the family; null where p is above 0.01.")
    n_selected: int | None = Field(None, description="Of these, those selected; null where p is above 0.01.")
    documents: list[str] = Field([], description="Ids of the first ten of them.")


def families_diagnostic(facts: AnswerFacts) -> FamiliesDiagnostic | None:
    """The family check of a selection: is the largest family of near-duplicates in one role by chance?

    Returns:
        None where documents have groups, or adapters took whole families of calibration documents.
    """
    scored, role = facts.scored, facts.role
    if scored is None or not facts.near:
        return None
    shards = [shard for shard in scored.shards.values() if shard.role in ("audit", role)]
    if any(shard.group_column is not None for shard in shards) or scored.store.exists(KEYS_FILE):
        return None
    audit, known = facts.near["audit"], facts.near[role]
    counts = audit.n_documents, known.n_documents
    families, largest = audit.n_large + known.n_large, max(audit.largest, known.largest)
    p_value = one_role_p(largest, *counts, families) if largest >= LARGE else None
    if p_value is not None and p_value <= TAIL_LEVEL:
        candidate = _largest_of_one_role(facts, scored)
        p_value = None if candidate is None else one_role_p(len(candidate[1]), *counts, families)
        if candidate is not None and p_value is not None and p_value <= TAIL_LEVEL:
            return _found_family(*candidate, p_value, facts)
    return FamiliesDiagnostic(outcome=Outcome.PASSED, sentence=no_family(role, p_value), p_value=p_value)


def one_role_p(size: int, n_audit: int, n_calibration: int, families: int) -> float:
    """The probability that all documents of a family are in one role, times the number of families; at most 1.

    Args:
        size: documents of the family.
        n_audit: number of compared audited documents.
        n_calibration: number of compared calibration documents.
        families: number of families of at least LARGE documents.
    """
    total = _log_choices(n_audit + n_calibration, size)
    chances = [math.exp(_log_choices(n, size) - total) for n in (n_audit, n_calibration) if n >= size]
    return min(1.0, families * sum(chances))


def _largest_of_one_role(facts: AnswerFacts, scored: Scored) -> tuple[Role, pa.Table] | None:
    """The largest family of at least LARGE documents in one role only: its role, and doc_id, source and row of each."""
    store, families = scored.store, []
    roles: tuple[Role, ...] = ("audit", facts.role)
    for kind in roles:
        if store.exists(near_duplicates_file(kind)):
            table = store.read_table(near_duplicates_file(kind))
            number = table["family"].to_numpy()
            for family in np.flatnonzero(np.bincount(number) >= LARGE):
                families.append((kind, table.filter(pa.array(number == family))))
    for kind, rows in sorted(families, key=lambda family: -len(family[1])):
        if kind != "audit" or not _is_shared(rows, facts, scored):
            return kind, rows
    return None


def _is_shared(rows: pa.Table, facts: AnswerFacts, scored: Scored) -> bool:
    """Whether a family of audited documents has a near-duplicate among documents left out of calibration."""
    if facts.overlap is None or facts.overlap.keep.all():
        return False
    known = Keys.joined(scored.keys(receipt) for receipt in scored.of(facts.role)).take(~facts.overlap.keep)
    dropped = KnownTexts.of(known.text, known.sketch, facts.near_copies)
    wanted = set(zip(rows["source"].to_pylist(), rows["row"].to_pylist(), strict=True))
    for receipt in scored.of("audit"):
        name = scored.shards[receipt.shard].name
        rows_here = scored.table(receipt, ["row"])["row"].to_pylist()
        inside = np.array([(name, row) in wanted for row in rows_here], dtype=bool)
        if inside.any() and dropped.near(scored.keys(receipt).take(inside)).any():
            return True
    return False


def _found_family(kind: Role, rows: pa.Table, p_value: float, facts: AnswerFacts) -> FamiliesDiagnostic:
    """The diagnostic of a family that is in one role only, contrary to chance."""
    names = [str(name) for name in rows["doc_id"].to_pylist()]
    places = set(zip(rows["source"].to_pylist(), rows["row"].to_pylist(), strict=True))
    n_selected = len(facts.among(places)) if kind == "audit" else 0
    contradicted = n_selected >= max(1, facts.selection.alpha / 2 * facts.n_selected)
    known = "audited" if kind == "audit" else kind
    others = facts.role if kind == "audit" else "audited"
    sentence = family_sentence([*map(short_id, names[:NAMED])], len(names), known, others, p_value)
    if kind == "audit" and facts.n_selected:
        sentence += selected_in_family(n_selected, facts.n_selected)
    if contradicted:
        sentence += family_outcome(facts.role)
    return FamiliesDiagnostic(
        outcome=Outcome.FAILED if contradicted else Outcome.INCONCLUSIVE,
        sentence=sentence,
        p_value=p_value,
        role=kind,
        size=len(names),
        n_selected=n_selected,
        documents=names[:NAMED],
    )


def _log_choices(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


# --- sentences


def no_family(role: str, p_value: float | None) -> str:
    """States that no large family is in one role only; `p_value`: of the largest family, if it is large."""
    shown = "" if p_value is None else f" (p = {_p(p_value)})"
    return f"No large family of near-duplicates is among the audited or the {role} documents alone{shown}."


def family_sentence(ids: Sequence[str], size: int, known: str, others: str, p_value: float) -> str:
    """States a family of near-duplicates in one role only.

    Args:
        ids: ids of its first documents.
        size: number of its documents.
        known: the word for its documents.
        others: the word for those of the other role.
        p_value: p-value under chance.
    """
    more = f" and {size - len(ids):,} more" if size > len(ids) else ""
    return (
        f"{size:,} {known} documents are near-duplicates of one another and have none among the {others} "
        f"documents, which chance does not explain (p = {_p(p_value)}): {', '.join(ids)}{more}."
    )


def selected_in_family(n_inside: int, n_selected: int) -> str:
    """States how many selected documents are in the family."""
    return f" {n_inside:,} of the {n_selected:,} selected documents are among them."


def family_outcome(role: str) -> str:
    """States the consequence of a family for a list that it contradicts."""
    return f" No {role} document calibrates them, so the error rate of the list is not supported."


def _p(p_value: float) -> str:
    return format_against(p_value, TAIL_LEVEL, kind="g")


CHECK = Check(
    name="families",
    title="Families of near-duplicates",
    record=FamiliesDiagnostic,
    description=(
        "Whether a family of near-duplicates has documents in one role only; null where documents have groups or "
        "were split by families."
    ),
    place=10,
    needs=KNOWN_TEXTS,
    on_scores=families_diagnostic,
    next=lambda diagnostic, role: (
        f"Leave the named family out of the audit, or add {role} documents like it, and make a new run."
    ),
)
