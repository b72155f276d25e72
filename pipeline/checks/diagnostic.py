"""The form of a result of a check, and the forms of results that several checks read.

The form that one check alone reads stands in the module of this check.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from pipeline.run.records import Record
from pipeline.selection.guarantees import Outcome

LEAST_SHARED = 10
"""Tokens of two characters or more, in common with other documents, that the median document needs for the test."""


class Diagnostic(Record):
    """One check of an assumption of a selection."""

    about_power: ClassVar[bool] = False
    """Whether a failed check leaves the guarantee intact and only states how little could have been selected."""

    decides: ClassVar[bool] = False
    """Whether an answer is inconclusive where the check is."""

    outcome: Outcome = Field(
        description="passed; failed; inconclusive: it could not be made, decided nothing, or only reports a number."
    )
    sentence: str = Field(description="The check and its result, in words that need no statistics.")

    @property
    def contradicts(self) -> bool:
        """Whether the check contradicts the guarantee of an answer."""
        return self.outcome == Outcome.FAILED and not self.about_power


class CountDiagnostic(Diagnostic):
    """A number of documents."""

    count: int = Field(description="Number of documents in the sentence.")


class ShareDiagnostic(Diagnostic):
    """A share of the documents."""

    share: float = Field(description="Share of the scored documents in the sentence.")


class BlindPart(Record):
    """How well one part of chats distinguishes calibration documents from audited ones."""

    by: str = Field(description="questions (all contents but the answers), answers, or both together.")
    auc: float = Field(description="Area under the ROC curve, held out.")
    low: float = Field(description="Lower end of its interval; the intervals of all parts hold together at 99%.")
    high: float = Field(description="Upper end of the interval.")


class BlindDiagnostic(Diagnostic):
    """Whether words or tokens alone, or the looks of pictures, distinguish calibration documents from audited ones.

    Numbers are null if not tested.
    """

    decides: ClassVar[bool] = True

    outcome: Outcome = Field(
        description="passed: hardly, at 99% confidence; failed: they do, at 99% confidence; inconclusive: not tested, "
        "or too few documents, or too few words in common, to say either."
    )
    tested: bool = Field(
        True,
        description="Whether the test was made; false: no texts could be read, or documents have versions, which need "
        "no test.",
    )
    by: str = Field(
        "words",
        description="Input of the classifier: words, or tokens where documents are given as token ids; of pictures "
        "thumbnails, colours and files.",
    )
    n_to_settle: int | None = Field(
        None, description="Documents of each kind, approximately, that would decide the test; null where it is decided."
    )
    auc: float | None = Field(None, description="Area under the ROC curve of the classifier, held out; 0.5 is chance.")
    low: float | None = Field(None, description="Lower end of the 99% interval of the area.")
    high: float | None = Field(None, description="Upper end of the 99% interval of the area.")
    n_calibration: int | None = Field(None, description="Calibration documents that were compared.")
    n_audit: int | None = Field(None, description="Audited documents that were compared.")
    n_calibration_blocks: int | None = Field(
        None,
        description="Sets of dependent calibration documents among these, which count once: groups, families of "
        "near-duplicates, single documents; null where all documents are independent.",
    )
    n_audit_blocks: int | None = Field(None, description="The same for the audited documents.")
    shared: float | None = Field(
        None,
        description="Median number of distinct words, or pairs and triples of characters, that another document has: "
        "below 10 the test could not look, and does not pass. Null for pictures.",
    )
    blocks: list[BlindPart] = Field(
        [],
        exclude_if=lambda blocks: not blocks,
        description="Of chats, the test by each part; `auc` is of the one that decides. Left out for other documents.",
    )

    @property
    def looked(self) -> bool:
        """Whether documents have enough words in common for a difference to show."""
        return self.shared is None or self.shared >= LEAST_SHARED

    @property
    def below(self) -> bool:
        """Whether the whole interval of the area is below 0.5, as where documents of the two roles are paired."""
        return self.high is not None and self.high < 0.5


class NearDuplicatePair(Record):
    """Two documents that are near-duplicates."""

    audit: str = Field(description="Id of the audited document.")
    calibration: str = Field(description="Id of the calibration document; the first that is a near-duplicate of it.")
    share: float = Field(description="Share of common runs of five words or eight characters, estimated, in [0, 1].")


class OverlapDiagnostic(Diagnostic):
    """Which calibration documents are near-duplicates of audited ones."""

    n_calibration: int = Field(
        description="Calibration documents that are near-duplicates of audited ones, left out of calibration."
    )
    n_equal: int = Field(0, description="Of these, those whose text is the same.")
    n_audit: int = Field(description="Audited documents that calibration documents repeat.")
    pairs: list[NearDuplicatePair] = Field([], description="The first few pairs.")


class DuplicateFamily(Record):
    """Documents that are near-duplicates of each other, directly or through others."""

    size: int = Field(description="Documents of the family.")
    ids: list[str] = Field(description="Ids of the first of them.")


class NearDuplicates(Record):
    """Near-duplicates among the documents of one role."""

    n_documents: int = Field(description="Documents that were compared.")
    whole: bool = Field(description="Whether these are all; else a sample that keeps near-duplicates together.")
    n_copies: int = Field(description="Of these, those that have a near-duplicate among the others.")
    n_families: int = Field(description="Families of near-duplicates, of two documents or more.")
    largest: int = Field(
        description="Documents of the largest family; 1 where there are no near-duplicates, 0 for none."
    )
    n_distinct: int = Field(description="Documents that remain if one of each family is kept.")
    effective: float = Field(
        description="Effective number of independent documents: (sum of sizes)^2 / sum of sizes^2."
    )
    families: list[DuplicateFamily] = Field(description="The largest families.")
    n_large: int = Field(0, description="Families of at least 5 documents.")
