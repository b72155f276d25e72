"""Results of checks of the documents themselves: ids, lengths, groups, near-duplicates, parts that calibration lacks.

Sentences depend on numbers alone, so the same check has the same text before and after scoring.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from pipeline.checks.blind import TAIL_LEVEL
from pipeline.run.summary import NearDuplicatePair, NearDuplicates, OverlapDiagnostic
from pipeline.wording import documents, format_against, percent, was

SHOWN_CHARACTERS = 80
"""Maximum length of a shown id."""

UNTESTED_IDS = "Whether documents repeat an id was not tested."
UNCHECKED_DUPLICATES = "Near-duplicates were not checked: the documents are scores without texts."
UNKNOWN_LENGTHS = "How many documents were cut is not known."
LEFT_OUT = "left out of calibration"
"""Treatment of calibration documents that are near-duplicates of audited ones."""


def untested_overlap(role: str) -> str:
    """States that near-duplicates between known and audited documents were not tested."""
    return f"Whether {role} documents are near-duplicates of audited ones was not tested."


def shared_sentence(overlap: OverlapDiagnostic, role: str, consequence: str) -> str:
    """States the overlap of known documents with the audited ones.

    Args:
        overlap: the counts and the first pairs.
        role: role of the known documents.
        consequence: treatment of documents in two roles, a clause that follows "and"; may be empty.
    """
    count = overlap.n_calibration
    if not count:
        return (
            f"No {role} document was found to be a near-duplicate of an audited one; single passages in common are not "
            "looked for."
        )
    verb = f"{role} document is a near-duplicate" if count == 1 else f"{role} documents are near-duplicates"
    rest = f", and {consequence}" if consequence else ""
    return (
        f"{count} {verb} of audited documents, {overlap.n_equal} with the same text{rest} "
        f"(first: {named_pairs(overlap.pairs)})."
    )


def named_pairs(pairs: Sequence[NearDuplicatePair]) -> str:
    """Pairs of near-duplicates as listed in a sentence, each with its share of common runs of words."""
    return "; ".join(f"{short_id(pair.audit)} and {short_id(pair.calibration)}, {pair.share:.0%}" for pair in pairs)


def short_id(doc_id: str) -> str:
    """An id in a sentence: on one line, and shortened."""
    line = " ".join(doc_id.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."


def count_sentence(duplicates: NearDuplicates, documents: str) -> str:
    """States the number of near-duplicates.

    Args:
        duplicates: near-duplicates among the documents.
        documents: their name in the plural, such as "audited documents".
    """
    sample = "" if duplicates.whole else f"In a sample of {duplicates.n_documents:,}: "
    if not duplicates.n_copies:
        return f"{sample}{'N' if duplicates.whole else 'n'}one of the {documents} is a near-duplicate of another."
    families = "1 family" if duplicates.n_families == 1 else f"{duplicates.n_families:,} families"
    return (
        f"{sample}{duplicates.n_copies:,} of {duplicates.n_documents:,} {documents} are near-duplicates of others "
        f"among them ({families}, the largest of {duplicates.largest:,})."
    )


def large_alpha(name: str, alpha: float) -> str:
    """States what an alpha above a half allows."""
    return f"selection {name}: alpha {alpha:g} allows a list of which up to {percent(alpha)} may be wrong"


def items_left_out(name: str, documents: int, causes: Mapping[str, int], first: str) -> str:
    """States how many items or runs of rows an answer cannot use, and why.

    Args:
        name: name of the input.
        documents: number of its documents that were read.
        causes: cause -> number of documents, not empty.
        first: message of the first of them.
    """
    counts = ", ".join(f"{count:,} with {cause}" for cause, count in causes.items())
    return (
        f"{sum(causes.values()):,} of {documents:,} documents of {name} are left out, because their orders are not "
        f"equally likely or not different: {counts} (first: {first})"
    )


def documents_read(count: int, whole: bool) -> str:
    """The number of documents that the checks before scoring have read."""
    return f"all {count:,} documents" if whole else f"a sample of {count:,} documents"


def documents_and_words(read: str, texts: int, by: str) -> str:
    """The documents read, and the maximum number per role whose words or tokens were compared."""
    return f"{read}, and the {by} of at most {texts:,} documents of each role"


def checked_before(read: str) -> str:
    """States that the checks before scoring read a sample."""
    return f"checked before scoring: {read}; what they share is checked again over all of them after it"


NO_REPEATED_ID = "No document repeats an id."


def repeated_ids_to_come(count: int, first: Sequence[str], budget: float | None, whole: bool) -> str:
    """States how many documents will be quarantined because they repeat an id.

    Args:
        count: number of documents, at least 1.
        first: ids of the first ones.
        budget: `error_budget`, if it allows fewer; else None.
        whole: whether all documents were read.
    """
    verb = "document repeats an id and goes" if count == 1 else "documents repeat an id and go"
    sentence = f"{count} {verb} to quarantine (first: {', '.join(map(short_id, first))})."
    if budget is None:
        return sentence
    alike = "" if whole else "if the others are like these, "
    return f"{sentence} error_budget {budget:g} allows fewer: {alike}the run would end without an answer."


def repeats_differ(name: str, differing: tuple[str, Sequence[str]] | None) -> str:
    """States which column differs where an id repeats, and how to take the rows of one of its values; None: nothing."""
    if differing is None:
        return ""
    column, values = differing
    field = f".{column}" if column.isidentifier() else f".[{json.dumps(column)}]"
    wanted = shlex.quote(f"select({field} == {json.dumps(values[0], ensure_ascii=False)})")
    return (
        f" In {name} documents of one id differ in column {column!r} ({', '.join(values)}): give a file of the rows of "
        f"one value, for JSONL by jq -c {wanted} {shlex.quote(name)} > one.jsonl"
    )


def repeated_ids_sentence(count: int) -> str:
    """States how many scored documents repeat an id."""
    verb = "repeats" if count == 1 else "repeat"
    return f"{documents(count)} {verb} an id and {was(count)} quarantined." if count else NO_REPEATED_ID


def truncated(count: int, total: int) -> str:
    """States how many of the scored documents were truncated."""
    if total and not count:
        return f"None of the {total} documents was truncated."
    return (
        f"{count} of {total} documents {was(count)} truncated at max_tokens. A truncated "
        "document is judged by its first max_tokens tokens alone."
    )


def fine_tuned(count: int, role: str, n_near: int) -> str:
    """States the documents that adapters were trained on or that are in a prefix.

    Args:
        count: number of these in the calibration role, with their near-duplicates.
        role: the calibration role.
        n_near: number of audited documents that are near-duplicates of one.
    """
    text = (
        f"{count} {role} documents do not calibrate: they were fine-tuned on or are in a prefix, or are "
        "near-duplicates of such a document."
    )
    if n_near:
        text += f" {n_near} audited documents are near-duplicates of one: to fsd they look less like members"
        text += ", and also after a prefix of unseen documents."
    return text


NAMED = 10
"""Maximum number of documents that a sentence names."""


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


def tail(role: str, by: str, p_value: float, share: float) -> str:
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


def no_family(role: str, p_value: float | None) -> str:
    """States that no large family is in one role only; `p_value`: of the largest family, if it is large."""
    shown = "" if p_value is None else f" (p = {_p(p_value)})"
    return f"No large family of near-duplicates is among the audited or the {role} documents alone{shown}."


def family(ids: Sequence[str], size: int, known: str, others: str, p_value: float) -> str:
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
