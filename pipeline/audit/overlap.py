"""Known documents whose texts others have too, or near-duplicates of them, found by keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.audit.summary import CopyPair, OverlapDiagnostic
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_copies import CopyIndex, likeness
from pipeline.errors import UserError
from pipeline.report.wording.documents import named_pairs, shared_sentence

NAMED_PAIRS = 3
"""Pairs of near copies that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownTexts:
    """The texts of some documents, to find others that are equal or near-duplicates."""

    text: np.ndarray  # int64, (documents,): text keys
    index: CopyIndex

    @classmethod
    def of(cls, text: np.ndarray, sketch: np.ndarray, near_copies: float) -> KnownTexts:
        """The texts of documents.

        Args:
            text: int64, (documents,), text keys.
            sketch: uint8, (documents, 128).
            near_copies: the share of common runs from which documents are near copies.
        """
        return cls(text, CopyIndex.of(sketch, near_copies))

    def near(self, keys: Keys) -> np.ndarray:
        """Which of some documents are near-duplicates of one of these: bool, (documents,)."""
        return self.index.matches(keys.sketch)

    def equal(self, keys: Keys) -> np.ndarray:
        """Which of some documents have a text of these: bool, (documents,)."""
        return np.asarray(np.isin(keys.text, self.text))

    def shared(self, keys: Keys) -> SharedTexts:
        """What some documents share with these."""
        given, places = self.index.near(keys.sketch)
        equal = np.isin(self.text, keys.text)
        audited, first = np.unique(given, return_index=True)
        known = self.index.first[places[first]][:NAMED_PAIRS]
        named = audited[:NAMED_PAIRS]
        share = likeness(keys.sketch[named], self.index.sketches[known])
        near = self.index.documents(np.unique(places)) | equal
        pairs = list(zip(named.tolist(), known.tolist(), share.tolist(), strict=True))
        return SharedTexts(len(keys), np.flatnonzero(near), np.flatnonzero(equal), audited.size, pairs)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTexts:
    """What some documents share with known ones."""

    n_documents: int
    near: np.ndarray  # int64: places of known documents that have a near copy among these, ascending
    equal: np.ndarray  # int64: of these, those with an equal text
    n_near: int  # documents that have a near copy among the known ones
    pairs: list[tuple[int, int, float]]  # the first: place, place among the known, share of common runs


Ids = Callable[[Sequence[int]], Sequence[str]]
"""The ids of documents of a role, by their places."""


def find_shared(
    parts: Sequence[SharedTexts], n_known: int, audit: Ids, known: Ids, role: str, consequence: str = ""
) -> tuple[OverlapDiagnostic, np.ndarray]:
    """What the audited documents share with a known role.

    Args:
        parts: of the audited documents, in their order.
        n_known: known documents in all.
        audit: ids of audited documents.
        known: ids of known documents.
        role: of these.
        consequence: what becomes of documents in two roles, to be read after "and".

    Returns:
        The check, and which known documents are shared: bool, (n_known,).
    """
    near, equal = (np.zeros(n_known, dtype=bool) for _ in range(2))
    for part in parts:
        near[part.near] = True
        equal[part.equal] = True
    begins = np.cumsum([0, *(part.n_documents for part in parts)]).tolist()
    first = [(begin + at, *pair) for begin, part in zip(begins, parts, strict=False) for at, *pair in part.pairs]
    pairs = [
        CopyPair(audit=audit([at])[0], calibration=known([place])[0], share=round(share, 2))
        for at, place, share in first[:NAMED_PAIRS]
    ]
    diagnostic = OverlapDiagnostic(
        ok=True,
        sentence="",
        n_calibration=int(np.count_nonzero(near)),
        n_equal=int(np.count_nonzero(equal)),
        n_audit=sum(part.n_near for part in parts),
        pairs=pairs,
    )
    sentence = shared_sentence(diagnostic, role, consequence)
    return diagnostic.model_copy(update={"sentence": sentence}), near


def shared_error(overlap: OverlapDiagnostic, n_known: int, role: str) -> UserError:
    """The error of calibration documents that are near copies of audited ones.

    Args:
        overlap: there are some.
        n_known: calibration documents in all.
        role: of these.
    """
    return UserError(
        f"{overlap.n_calibration} of {n_known} {role} documents are near copies of audit documents "
        f"({overlap.n_equal} of them with the same text; {overlap.n_audit} audit documents; "
        f"first: {named_pairs(overlap.pairs)}); remove them, or set overlap: drop to leave them out of calibration"
    )
