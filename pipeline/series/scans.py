"""The scans of a schedule, the records of its ledger, and the runs that `against` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.audit import AuditConfig
from pipeline.config.selection import Direction
from pipeline.errors import UserError, VersionError
from pipeline.results.already_audited import reconcile_audited_texts, recorded_audited_texts
from pipeline.run.conclusion import Bounded
from pipeline.run.manifest import read_manifest
from pipeline.run.records import MANIFEST_FILE, VersionedRecord, parse_part
from pipeline.selection.guarantees import ConclusionValue, GuaranteeKind
from pipeline.series.series_text import already_audited_phrase, clock_note, left_out_later
from pipeline.stages.audited_texts import AuditedTexts, read_audited_keys
from pipeline.store.files import Store, real_address
from pipeline.store.ledger import LedgerEntry, read_ledger

Say = Callable[[str], None]


class Opening(VersionedRecord):
    """The first entry: the settings that every scan of the schedule must state."""

    kind: Literal["opening"] = Field("opening", description="Kind of the entry.")
    alpha: float = Field(description="Largest share of all that the scans select together that may be wrong.")
    horizon: int | None = Field(description="Number of scans of the schedule; null: no end.")
    version: str = Field(description="Version of Seenset that opened the ledger.")
    at: str = Field(description="Time, by the clock of the command: ISO 8601, UTC.")

    @model_validator(mode="before")
    @classmethod
    def _of_0_10(cls, value: Any) -> Any:
        """Read the opening of version 0.10, which recorded the rule `spend`; `parse_schedule` refuses others."""
        if not isinstance(value, dict) or value.get("rule") != "spend":
            return value
        return {key: one for key, one in value.items() if key != "rule"}


class Claim(VersionedRecord):
    """A scan took the next place of the schedule, before its answer could be read. Its level is spent."""

    kind: Literal["claim"] = Field("claim", description="Kind of the entry.")
    slot: int = Field(description="Number of the place: 1 for the first scan.")
    run: str = Field(description="Run directory of the scan: an absolute path or a URL.")
    key: str = Field(
        description="SHA-256 of the inputs of the answer: scores, questions, seed. The same scan keeps its place."
    )
    model: str = Field(description="The audited model, by its name on the run's pages.")
    selections: list[str] = Field(description="Names of the selections of the scan.")
    asked_before: bool = Field(
        False, description="Whether the run had answered questions before this claim: then nothing is guaranteed."
    )
    share: float = Field(description="Part of alpha of this scan.")
    version: str = Field(description="Version of Seenset.")
    at: str = Field(description="Time, by the clock of the command: ISO 8601, UTC.")

    @model_validator(mode="before")
    @classmethod
    def _of_0_10(cls, value: Any) -> Any:
        """Read a claim of version 0.10, which recorded what only its other rules read."""
        if not isinstance(value, dict) or not isinstance(value.get("before"), dict):
            return value
        named = {"selections": list(value["before"])}
        return named | {key: one for key, one in value.items() if key not in ("before", "scorer", "calibration")}

    @field_validator("run")
    @classmethod
    def _real(cls, value: str) -> str:
        """Normalise the path: entries of earlier versions may have `..` in it."""
        return real_address(value)


class FiledSelection(Bounded):
    """One answer of a scan."""

    name: str = Field(description="Name of the selection.")
    procedure: str = Field(description="The procedure of the selection.")
    direction: Direction = Field(description="members: selects documents that were trained on; clean: that were not.")
    detectors: list[str] = Field(description="Score columns that the selection reads.")
    alpha: float = Field(description="The level at which it selected.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_calibration: int = Field(description="Documents that the p-values were calibrated on.")
    n_selected: int = Field(description="Documents selected.")
    guarantee: GuaranteeKind = Field(description="Guarantee of the selection: finite-sample, asymptotic or heuristic.")


class Filing(VersionedRecord):
    """The answers of a scan. A claim without a filing has spent its level and states nothing."""

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    kind: Literal["result"] = Field("result", description="Kind of the entry.")
    slot: int = Field(description="Number of the scan's place.")
    key: str = Field(description="Key of its claim.")
    selections: list[FiledSelection] = Field(description="Its answers, in the order of the configuration.")
    at: str = Field(description="Time, by the clock of the command: ISO 8601, UTC.")

    @model_validator(mode="before")
    @classmethod
    def _of_0_10(cls, value: Any) -> Any:
        """Read a result of version 0.10, whose answers state in `supported` whether their checks support them."""
        if not isinstance(value, dict) or value.get("schema") != 1:
            return value
        return {**value, "schema": 2, "selections": [_concluded(answer) for answer in value.get("selections") or ()]}


def _concluded(answer: Any) -> Any:
    """An answer of version 0.10 with the conclusion that its `supported` (true, null or false) states."""
    if not isinstance(answer, dict) or "supported" not in answer:
        return answer
    supported = {True: ConclusionValue.SUPPORTED, False: ConclusionValue.CONTRADICTED}
    rest = {key: value for key, value in answer.items() if key != "supported"}
    return {**rest, "conclusion": supported.get(answer["supported"], ConclusionValue.INCONCLUSIVE)}


@dataclass(frozen=True, slots=True)
class Scan:
    """One taken place of a schedule, and its result."""

    entry: int  # number of its claim in the ledger
    claim: Claim
    filing: Filing | None  # None: no answer is filed, although the level is spent
    filed: int = -1  # number of its filing in the ledger


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of a schedule and its scans, by their places."""

    opening: Opening
    scans: tuple[Scan, ...] = ()

    def place(self, number: int) -> str:
        """A place as text, such as 3 of 52."""
        return f"{number:,}" if self.opening.horizon is None else f"{number:,} of {self.opening.horizon:,}"

    def filed_scans(self) -> list[Scan]:
        """The scans with a result, in the order of filing."""
        return sorted((scan for scan in self.scans if scan.filing is not None), key=lambda scan: scan.filed)

    def find_scan(self, key: str) -> Scan | None:
        """The scan with this key; None where it has no place."""
        return next((scan for scan in self.scans if scan.claim.key == key), None)

    def clock_notes(self, slot: int | None = None) -> list[str]:
        """One line for each claim, or that of one place, dated before its predecessor; scans are ordered by number."""
        return [
            clock_note(later.claim.slot, later.claim.at, earlier.claim.slot, earlier.claim.at)
            for earlier, later in zip(self.scans, self.scans[1:], strict=False)
            if later.claim.at < earlier.claim.at and slot in (None, later.claim.slot)
        ]


def read_schedule(store: Store) -> Schedule | None:
    """The schedule of a ledger; None for an empty ledger.

    Raises:
        UserError: the errors of `read_ledger`, or an entry that is not of a schedule or is out of order.
    """
    return parse_schedule(read_ledger(store), store.url)


def parse_schedule(entries: Sequence[LedgerEntry], url: str) -> Schedule | None:
    """As `read_schedule`, for entries in memory.

    Args:
        entries: all entries of a ledger.
        url: address of the ledger, for messages.

    Raises:
        UserError: an entry that is not of a schedule or is out of order.
    """
    schedule: Schedule | None = None
    for entry in entries:
        where = f"ledger {url}: entry {entry.number}"
        record = _record(entry, url)
        if schedule is None or isinstance(record, Opening):
            if schedule is not None or not isinstance(record, Opening):
                raise UserError(f"{where} is no {'claim or result' if schedule else 'opening'}: not a ledger of scans")
            schedule = Schedule(record)
        else:
            schedule = _with(schedule, entry.number, record, where)
    return schedule


def _with(schedule: Schedule, number: int, record: Claim | Filing, where: str) -> Schedule:
    scans = list(schedule.scans)
    if isinstance(record, Claim):
        if record.slot != len(scans) + 1:
            raise UserError(f"{where} claims place {record.slot}, and the next one is {len(scans) + 1}")
        scans.append(Scan(number, record, None))
    else:
        scan = scans[record.slot - 1] if 0 < record.slot <= len(scans) else None
        if scan is None or scan.claim.key != record.key or scan.filing is not None:
            raise UserError(f"{where} is a result of place {record.slot}, which has no claim of its own without one")
        scans[record.slot - 1] = replace(scan, filing=record, filed=number)
    return replace(schedule, scans=tuple(scans))


_KINDS: dict[Any, type[Opening] | type[Claim] | type[Filing]] = {
    "opening": Opening,
    "claim": Claim,
    "result": Filing,
}


def _record(entry: LedgerEntry, url: str) -> Opening | Claim | Filing:
    content, where = entry.content, f"ledger {url}: entry {entry.number}"
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UserError(f"{where} is not an entry of a schedule of scans: kind {kind!r}, known: {', '.join(_KINDS)}")
    if kind == "opening" and content.get("rule") in ("prds", "e-lond"):
        raise UserError(
            f"ledger {url}: this schedule has rule {content['rule']}: finish it with version 0.10; a new ledger is a "
            "new error rate"
        )
    if content.get("schema") not in (1, _KINDS[kind].model_fields["schema_"].default):
        raise UserError(
            f"{where} was written by seenset {content.get('version', 'of another version')} in another form"
        )
    return parse_part(_KINDS[kind], content, where)


def refuse_other_versions(config: AuditConfig) -> None:
    """Refuse the files of another version before an input is listed: of the run, its schedule and an earlier run.

    What is damaged is left to the steps that read it, which may repair it.

    Raises:
        VersionError: a run directory is of another version.
        UserError: the errors of `read_schedule`.
    """
    for place in filter(None, (config.run, config.against)):
        try:
            read_manifest(Store(place))
        except VersionError:
            raise
        except (UserError, OSError):
            continue
    if config.series is not None:
        read_schedule(Store(config.series.ledger))


def reconcile_already_audited(
    config: AuditConfig, fingerprint: Mapping[str, Any], store: Store, say: Say = lambda line: None
) -> AuditedTexts | None:
    """The texts that a run leaves out, fixed at its start; None where it audits all. The lock must be held.

    Args:
        config: the audit's configuration.
        fingerprint: fingerprint of its scores.
        store: its run directory.
        say: prints a line.

    Raises:
        UserError: `against` is not a run or ledger, or is this run; or a run is damaged or was scored differently.
        IncompleteError: a run that is not complete.
    """
    if (reconciled := recorded_audited_texts(config, store)) is None:
        if config.against is None:
            return None
        runs, strict = earlier_runs(config, store.url)
        texts = reconcile_audited_texts(config, fingerprint, store, runs, strict, say)
        say(already_audited_phrase(config.against, texts.count))
        return texts
    _, texts = reconciled
    read_audited_keys(store, texts.sha256)
    return texts


def planned_already_audited(config: AuditConfig) -> str | None:
    """The sentence of `seenset plan` on the documents that a run would leave out; None where it audits all.

    Raises:
        UserError: the errors of `earlier_runs`.
    """
    if config.against is None:
        return None
    return left_out_later(config.against, len(earlier_runs(config, Store(config.run).url)[0]))


def earlier_runs(config: AuditConfig, run: str) -> tuple[list[str], bool]:
    """The run directories that `against` names, and whether it names a single run.

    Args:
        config: the audit's configuration, with `against`.
        run: directory of this run.

    Raises:
        UserError: `against` is neither a run nor a ledger, or is this run.
    """
    assert config.against is not None
    try:
        named = Store(config.against)
    except UserError as error:
        raise UserError(f"against: {error}") from None
    if named.url == run:
        raise UserError(f"against {named.url} is this run: name an earlier one, or a ledger")
    if named.exists(MANIFEST_FILE):
        return [named.url], True
    schedule = read_schedule(named)
    if schedule is not None:
        return list(dict.fromkeys(scan.claim.run for scan in schedule.scans if scan.claim.run != run)), False
    if config.series is not None and Store(config.series.ledger).url == named.url:
        return [], False  # the first scan opens it
    raise UserError(f"against {named.url} is neither a run directory ({MANIFEST_FILE}) nor a ledger: nothing is there")
