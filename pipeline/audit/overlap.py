"""What two roles share, in words: equal texts are one document, equal beginnings a reason to look."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.audit.summary import LikePair, OverlapDiagnostic
from pipeline.errors import UserError

LIKE_PAIRS = 3
"""Pairs of documents that begin alike that are named."""

SHOWN_CHARACTERS = 80


def shared_error(n_shared: int, n_known: int, role: str, n_audit: int) -> UserError:
    """The error of calibration documents that are audited too.

    Args:
        n_shared: calibration documents that are audited too.
        n_known: calibration documents in all.
        role: of these.
        n_audit: audited documents that they repeat.
    """
    return UserError(
        f"{n_shared} of {n_known} {role} documents are audit documents too (same text; {n_audit} audit documents); "
        "remove them or set overlap: drop to leave them out of calibration"
    )


def overlap_diagnostic(
    role: str, n_calibration: int, n_audit: int, n_alike: int, pairs: Sequence[LikePair], consequence: str = ""
) -> OverlapDiagnostic:
    """The check of what two roles share; null where documents begin alike: a changed copy may be among them.

    Args:
        role: whose documents calibrate.
        n_calibration: calibration documents that are audited too.
        n_audit: audited documents that they repeat.
        n_alike: audited documents that only begin like a calibration document.
        pairs: the first of these.
        consequence: what becomes of documents that stand in two roles, to be read after "and".
    """
    sentence = f"No {role} document is an audit document too."
    if n_calibration:
        documents = "document is an audit document" if n_calibration == 1 else "documents are audit documents"
        sentence = f"{n_calibration} {role} {documents} too{f' and {consequence}' if consequence else ''}."
    if n_alike:
        named = "; ".join(f"{short_id(pair.audit)} and {short_id(pair.calibration)}" for pair in pairs)
        documents = "document begins" if n_alike == 1 else "documents begin"
        goes = "goes" if n_alike == 1 else "go"
        sentence += (
            f" {n_alike} audited {documents} with the same 8 words as one of the {role} documents and {goes} on "
            f"differently ({named}): a title or a header in common does no harm, a copy with changes would."
        )
    return OverlapDiagnostic(
        ok=None if n_alike else True,
        sentence=sentence,
        n_calibration=n_calibration,
        n_audit=n_audit,
        n_alike=n_alike,
        pairs=list(pairs),
    )


def short_id(doc_id: str) -> str:
    """An id as a sentence shows it: one line, and not a long one."""
    line = " ".join(doc_id.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."
