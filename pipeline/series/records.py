"""What a ledger holds: how the schedule was opened, who claimed a place in it, and what each scan found."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from pipeline.audit.conclusion import Bounded
from pipeline.audit.records import VersionedRecord
from pipeline.audit.summary import Guarantee
from pipeline.config.selection import Direction
from pipeline.config.series import Rule
from pipeline.store.files import real_address


class Opening(VersionedRecord):
    """The first entry: the terms, which every scan of the schedule must state alike."""

    kind: Literal["opening"] = Field("opening", description="What the entry is.")
    alpha: float = Field(description="Largest share of all that the scans select together that may be wrong.")
    rule: Rule = Field(description="How alpha is shared out.")
    horizon: int | None = Field(description="Scans of the schedule; null: no end.")
    version: str = Field(description="Version of Seenset that opened the ledger.")
    at: str = Field(description="When, by the clock of the command: ISO 8601, UTC.")


class Claim(VersionedRecord):
    """A scan took the next place of the schedule, before anyone could read its answer. It has spent its level."""

    kind: Literal["claim"] = Field("claim", description="What the entry is.")
    slot: int = Field(description="Number of the place: 1 for the first scan.")
    run: str = Field(description="Run directory of the scan: an absolute path or a URL.")
    key: str = Field(
        description="SHA-256 of what the answer is made of: scores, questions, seed. The same scan keeps its place."
    )
    model: str = Field(description="The audited model, as the run's pages name it.")
    scorer: dict[str, dict[str, str]] = Field(
        description="By selection: what decides its scores and how it ranks them, a digest each by name: the model, "
        "the detectors, the settings, the version."
    )
    calibration: dict[str, str] = Field(
        description="By selection: SHA-256 of the texts of the documents that it was calibrated on."
    )
    asked_before: bool = Field(
        False, description="Whether the run had answered questions before it took this place: nothing is promised then."
    )
    share: float = Field(description="Part of alpha that is this scan's.")
    before: dict[str, int] = Field(
        description="By selection: documents that earlier scans had selected, as filed when the place was claimed; "
        "without those of another direction, of a selection whose promise a check contradicts, and of a run that had "
        "answered before."
    )
    version: str = Field(description="Version of Seenset.")
    at: str = Field(description="When, by the clock of the command: ISO 8601, UTC.")

    @field_validator("run")
    @classmethod
    def _real(cls, value: str) -> str:
        """Entries of earlier versions have the path as it was written, which may hold `..`."""
        return real_address(value)


class FiledSelection(Bounded):
    """One answer of a scan."""

    name: str = Field(description="Name of the selection.")
    procedure: str = Field(description="The procedure that chose the selected.")
    direction: Direction = Field(description="members: selects what was trained on; clean: what was not.")
    detectors: list[str] = Field(description="Score columns that the selection reads.")
    alpha: float = Field(description="The level at which it selected.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_calibration: int = Field(description="Documents that the p-values were calibrated on.")
    n_selected: int = Field(description="Documents selected.")
    guarantee: Guarantee = Field(description="Of the selection: finite-sample, asymptotic or heuristic.")


class Filing(VersionedRecord):
    """What a scan answered. A claim without one has spent its level and says nothing."""

    kind: Literal["result"] = Field("result", description="What the entry is.")
    slot: int = Field(description="Number of the scan's place.")
    key: str = Field(description="Key of its claim.")
    selections: list[FiledSelection] = Field(description="Its answers, in the order of the configuration.")
    at: str = Field(description="When, by the clock of the command: ISO 8601, UTC.")
