"""What two roles share, in words: near copies, and equal texts among them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.audit.summary import CopyPair, OverlapDiagnostic
from pipeline.errors import UserError

NAMED_PAIRS = 3
"""Pairs of near copies that are named."""

SHOWN_CHARACTERS = 80


def shared_error(
    n_shared: int, n_equal: int, n_known: int, role: str, n_audit: int, pairs: Sequence[CopyPair]
) -> UserError:
    """The error of calibration documents that are near copies of audited ones.

    Args:
        n_shared: calibration documents that are.
        n_equal: of these, those whose text is equal.
        n_known: calibration documents in all.
        role: of these.
        n_audit: audited documents that they repeat.
        pairs: the first.
    """
    return UserError(
        f"{n_shared} of {n_known} {role} documents are near copies of audit documents ({n_equal} of them with the same "
        f"text; {n_audit} audit documents; first: {named_pairs(pairs)}); remove them, or set overlap: drop to leave "
        "them out of calibration"
    )


def overlap_diagnostic(
    role: str, n_calibration: int, n_equal: int, n_audit: int, pairs: Sequence[CopyPair], consequence: str = ""
) -> OverlapDiagnostic:
    """The check of what two roles share.

    Args:
        role: whose documents calibrate.
        n_calibration: calibration documents that are near copies of audited ones.
        n_equal: of these, those whose text is equal.
        n_audit: audited documents that they repeat.
        pairs: the first.
        consequence: what becomes of documents that stand in two roles, to be read after "and".
    """
    sentence = f"No {role} document is a near copy of an audited one."
    if n_calibration:
        verb = f"{role} document is a near copy" if n_calibration == 1 else f"{role} documents are near copies"
        sentence = (
            f"{n_calibration} {verb} of audited documents, {n_equal} with the same text"
            f"{f', and {consequence}' if consequence else ''} (first: {named_pairs(pairs)})."
        )
    return OverlapDiagnostic(
        ok=True,
        sentence=sentence,
        n_calibration=n_calibration,
        n_equal=n_equal,
        n_audit=n_audit,
        pairs=list(pairs),
    )


def named_pairs(pairs: Sequence[CopyPair]) -> str:
    """Pairs of near copies as a sentence names them, each with its share of common runs of words."""
    return "; ".join(f"{short_id(pair.audit)} and {short_id(pair.calibration)}, {pair.share:.0%}" for pair in pairs)


def short_id(doc_id: str) -> str:
    """An id as a sentence shows it: one line, and not a long one."""
    line = " ".join(doc_id.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."
