"""Claim the next place of a schedule before a scan's answer can be read, and file the answer at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.answers.collection_test import audited_model
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SeriesConfig
from pipeline.detectors.plugins import BUILT_IN, code_digests, imported
from pipeline.errors import UserError
from pipeline.results.history import was_asked
from pipeline.results.summary import Summary, read_summary
from pipeline.run.plan import Plan
from pipeline.run.records import MANIFEST_FILE
from pipeline.run.scored import Scored
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.schedule import Slot, alpha_share
from pipeline.series import series_text as wording
from pipeline.series.scans import Claim, FiledSelection, Filing, Opening, Scan, Schedule, parse_schedule, read_schedule
from pipeline.store.files import Store
from pipeline.store.ledger import LedgerEntry, append_entry
from pipeline.store.receipts import json_digest

Say = Callable[[str], None]


def open_ledger(series: SeriesConfig) -> Store:
    """The folder of a schedule's ledger, which may not exist yet.

    Raises:
        UserError: the path cannot be a folder.
    """
    try:
        return Store(series.ledger, "folder")
    except UserError as error:
        raise UserError(f"series.ledger: {error}") from None


def check_ledger(config: AuditConfig) -> Schedule | None:
    """Check the ledger before scoring for errors that would stop the claim.

    Args:
        config: the audit's configuration, with `series`.

    Returns:
        The schedule; None where this scan would open it.

    Raises:
        UserError: the ledger is damaged or has other settings, is in a run directory or contains one, its bucket is
            missing, or all its places are taken.
        IncompleteError: the store of the ledger does not answer.
    """
    assert config.series is not None
    store = open_ledger(config.series)
    check_ledger_place(store, Store(config.run))
    schedule = read_schedule(store)
    if schedule is None:
        _check_bucket(store)
        return None
    _check_opening(config.series, schedule.opening, store.url)
    if all(scan.claim.run != Store(config.run).url for scan in schedule.scans):  # it may have its place already
        _check_room(schedule, store.url)
    return schedule


def prepare_claim(
    config: AuditConfig, scored: Scored, limit: int | None, say: Say
) -> Callable[[], dict[str, Slot]] | None:
    """The claim of a scan's place in its schedule, from `claim_slots`; None for a run without a schedule."""
    if config.series is None:
        return None
    return lambda: claim_slots(config, scored, limit, say)


def claim_slots(config: AuditConfig, scored: Scored, limit: int | None, say: Say) -> dict[str, Slot]:
    """Take the next place of the schedule, or keep that of this scan; its level is then spent.

    Call this after all checks that can refuse a selection, and before an answer can be read.

    Args:
        config: the audit's configuration, with `series`.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.
        say: prints a line.

    Returns:
        The place, with its level, of each selection by name.

    Raises:
        UserError: the errors of `check_ledger`, or a run without audit documents.
        IncompleteError: the store of the ledger does not answer. The same command resumes.
    """
    assert config.series is not None
    store, key = open_ledger(config.series), scan_key(config, scored, limit)
    check_ledger_place(store, scored.store)
    if not scored.receipts:
        raise UserError("no audit documents")
    asked_before = was_asked(scored.store)

    def make(entries: Sequence[LedgerEntry]) -> dict[str, Any] | None:
        schedule = _opened(config, entries, store.url)
        _check_answered(config, scored.store, schedule, store.url)
        if schedule.find_scan(key) is not None:
            return None
        _check_room(schedule, store.url)
        slot = len(schedule.scans) + 1
        return Claim(
            slot=slot,
            run=scored.store.url,
            key=key,
            model=audited_model(config),
            selections=[selection.name for selection in config.selections],
            share=float(alpha_share(slot, schedule.opening.horizon)),
            asked_before=asked_before,
            version=__version__,
            at=_now(),
        ).plain()

    append_entry(store, lambda entries: None if entries else _opening(config.series).plain())
    known = append_entry(store, lambda entries: None)
    entries = append_entry(store, make)
    schedule = _opened(config, entries, store.url)
    scan = schedule.find_scan(key)
    assert scan is not None
    for line in _lines(schedule, scan, scan.entry >= len(known), scored.store.url, limit):
        say(f"series: {line}")
    return dict.fromkeys(scan.claim.selections, scan_slot(schedule, scan))


def file_result(config: AuditConfig, scored: Scored, limit: int | None, summaries: Iterable[Summary], say: Say) -> None:
    """File the answers of the scan, as its last step, unless they are filed already.

    Args:
        config: the audit's configuration, with `series`.
        scored: its finished score shards.
        limit: as in its claim.
        summaries: the answers.
        say: prints a line.

    Raises:
        UserError: a damaged ledger, or one without the claim of this scan.
        IncompleteError: the store of the ledger does not answer. The same command resumes.
    """
    assert config.series is not None
    store, key = open_ledger(config.series), scan_key(config, scored, limit)
    answers = [_filed(summary) for summary in summaries]
    filed: list[Filing] = []

    def make(entries: Sequence[LedgerEntry]) -> dict[str, Any] | None:
        scan = _opened(config, entries, store.url).find_scan(key)
        if scan is None:
            raise UserError(f"ledger {store.url} has lost the claim of this scan: put its latest entries back")
        filed[:] = [] if scan.filing is None else [scan.filing]
        if filed:
            return None
        return Filing(slot=scan.claim.slot, key=key, selections=answers, at=_now()).plain()

    append_entry(store, make)
    if filed and _by_name(filed[0].selections) != _by_name(answers):
        say(f"series: {wording.filed_before(filed[0].slot)}")


def scan_key(config: AuditConfig, scored: Scored, limit: int | None) -> str:
    """SHA-256, hexadecimal, of the inputs of an answer: scores, questions without their alpha, plugins and seed.

    It is equal in another run directory, and for shards that were scored again with the same result.
    """
    shards = [
        [one.shard, one.role, one.documents, one.files[one.data].sha256, one.n_in, sorted(one.reasons.items())]
        for one in scored.receipts
    ]
    questions = [
        selection.model_dump(mode="json", by_alias=True, exclude={"alpha"})
        for selection in sorted(config.selections, key=lambda selection: selection.name)
    ]
    made_of = [sorted(shards), questions, config.overlap, config.near_copies, config.seed, limit]
    if code := _code_of_procedures(config):
        made_of.append(code)
    return json_digest(made_of)


def _code_of_procedures(config: AuditConfig) -> dict[str, str]:
    """The code of procedures that are not built in, by name."""
    modules = {PROCEDURES.modules.get(selection.procedure, BUILT_IN) for selection in config.selections}
    return code_digests(imported(config.import_), sorted(modules)) if modules != {BUILT_IN} else {}


def scan_slot(schedule: Schedule, scan: Scan) -> Slot:
    """The exact level of a scan.

    Raises:
        UserError: another version of the program divided alpha differently.
    """
    number, opening = scan.claim.slot, schedule.opening
    share = alpha_share(number, opening.horizon)
    if float(share) != scan.claim.share:
        raise UserError(
            f"scan {number} was claimed by seenset {scan.claim.version} with {scan.claim.share:g} of alpha, and this "
            f"version gives it {float(share):g}: use that version, or start a new ledger"
        )
    return Slot(number, Fraction(repr(opening.alpha)), share, scan.claim.asked_before)


def next_slot(series: SeriesConfig, schedule: Schedule | None) -> Slot:
    """The place that a scan would get if it were claimed now."""
    number = 1 if schedule is None else len(schedule.scans) + 1
    return Slot(number, Fraction(repr(series.alpha)), alpha_share(number, series.horizon))


def _opening(series: SeriesConfig | None) -> Opening:
    assert series is not None
    return Opening(alpha=series.alpha, horizon=series.horizon, version=__version__, at=_now())


def _opened(config: AuditConfig, entries: Sequence[LedgerEntry], url: str) -> Schedule:
    """The schedule of these entries, checked against the configuration."""
    schedule = parse_schedule(entries, url)
    if schedule is None or config.series is None:
        raise UserError(f"ledger {url} is empty now, and was not before: put its entries back")
    _check_opening(config.series, schedule.opening, url)
    return schedule


def _check_bucket(store: Store) -> None:
    """Check that the bucket of a new ledger exists.

    Raises:
        UserError: the bucket does not exist, or cannot be read.
    """
    bucket = store.root.split("/")[0]
    if bucket and not store.local and not store.fs.exists(bucket):
        raise UserError(f"series.ledger {store.url}: bucket {bucket} does not exist, or may not be read")


def _check_opening(series: SeriesConfig, opening: Opening, url: str) -> None:
    """Check that a schedule continues with the settings that it was opened with.

    Raises:
        UserError: the settings differ.
    """
    for term in ("alpha", "horizon"):
        stated, opened = getattr(series, term), getattr(opening, term)
        if stated != opened:
            names = ["null" if value is None else f"{value}" for value in (stated, opened)]
            raise UserError(
                f"series.{term} is {names[0]}, and ledger {url} was opened with {names[1]}: state {names[1]}, or start "
                "a new ledger with its own guarantee; alpha was divided when it was opened, and a change "
                "would spend more than alpha"
            )


def _check_answered(config: AuditConfig, run: Store, schedule: Schedule, url: str) -> None:
    """Check that a ledger still has the place at which this run has answered.

    Raises:
        UserError: the place is missing, for instance because an older copy of the ledger was restored.
    """
    for selection in config.selections:
        try:
            answered = read_summary(run, selection.name)
        except UserError:  # it is made again
            continue
        place = None if answered is None else answered.series
        if place is None or config.series is None or Store(place.ledger).url != url:
            continue
        if place.slot > len(schedule.scans):
            raise UserError(
                f"this run was scan {place.slot:,} of ledger {url}, in which {len(schedule.scans):,} places are taken: "
                "put its latest entries back"
            )


def _check_room(schedule: Schedule, url: str) -> None:
    """Check that a place is free.

    Raises:
        UserError: no place is free.
    """
    horizon, taken = schedule.opening.horizon, len(schedule.scans)
    if horizon is not None and taken >= horizon:
        raise UserError(
            f"all {horizon} places of ledger {url} are taken, and its alpha is spent: start a new ledger, whose "
            "guarantee is its own (with horizon: null it has no end); a longer horizon is refused, because every scan "
            "had its part of alpha from the first one on"
        )


def _lines(schedule: Schedule, scan: Scan, fresh: bool, run: str, limit: int | None) -> list[str]:
    """Notes for the user on a claim."""
    number, others = scan.claim.slot, [other for other in schedule.scans if other is not scan]
    if not fresh:
        return [wording.kept(schedule.place(number), None if scan.claim.run == run else scan.claim.run)]
    lines = [wording.claimed(schedule.place(number), float(scan_slot(schedule, scan).level))]
    if earlier := [other.claim.slot for other in others if other.claim.run == run]:
        lines.append(wording.other_places(earlier))
    if scan.claim.asked_before:
        lines.append(wording.NOT_GUARANTEED)
    if limit is not None:
        lines.append(wording.SAMPLE)
    return [*lines, *schedule.clock_notes(number)]


def _filed(summary: Summary) -> FiledSelection:
    return FiledSelection(**{name: getattr(summary, name) for name in FiledSelection.model_fields})


def _by_name(answers: Iterable[FiledSelection]) -> list[FiledSelection]:
    return sorted(answers, key=lambda answer: answer.name)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_ledger_place(ledger: Store, run: Store) -> None:
    """Check that a ledger is not in a run directory, and that no run directory is in it.

    Args:
        ledger: folder of the ledger.
        run: run directory of a scan. Other runs are searched for on local disks only.

    Raises:
        UserError: one of them is inside the other.
    """
    there, here = ledger.url, run.url
    within = here if f"{there}/".startswith(f"{here}/") else None
    if within is None and f"{here}/".startswith(f"{there}/"):
        raise UserError(
            f"series.ledger {ledger.url}: run {run.url} is in it, and a ledger holds its entries alone: name a folder "
            "next to the run directories"
        )
    if within is None and ledger.local:
        folders = (there, *map(str, Path(there).parents))
        within = next((folder for folder in folders if Path(folder, MANIFEST_FILE).exists()), None)
    if within is not None:
        raise UserError(
            f"series.ledger {ledger.url} is in run directory {within}, and a run removes what is not its own: name a "
            "folder next to the run directories"
        )


def planned_scan(plan: Plan) -> tuple[Plan, dict[str, Any] | None]:
    """The plan with every selection at the level of the next place, and notes for the user.

    Args:
        plan: plan of an audit.

    Returns:
        The plan, unchanged for an audit without a schedule; and the facts, None for such an audit.

    Raises:
        UserError: the errors of `check_ledger`.
        IncompleteError: the store of the ledger does not answer.
    """
    config = plan.config
    if config.series is None:
        return plan, None
    schedule = check_ledger(config)
    slot = next_slot(config.series, schedule)
    selections = [one.model_copy(update={"alpha": float(slot.level)}) for one in config.selections]
    facts = {
        **config.series.model_dump(mode="json"),
        "slot": slot.number,
        "level": float(slot.level),
        "lines": _planned_lines(config, schedule, slot, plan.limit),
    }
    return replace(plan, config=config.model_copy(update={"selections": selections})), facts


def _planned_lines(config: AuditConfig, schedule: Schedule | None, slot: Slot, limit: int | None) -> list[str]:
    assert config.series is not None
    series, url = config.series, open_ledger(config.series).url
    of = "" if series.horizon is None else f" of {series.horizon:,}"
    full = series.horizon is not None and slot.number > series.horizon
    lines = [] if full else [wording.next_scan(f"{slot.number:,}{of}", float(slot.level), series.alpha)]
    sample = [wording.SAMPLE] if limit is not None else []
    if schedule is None:
        return [*lines, wording.new_ledger(url), *sample]
    unfiled = sum(scan.filing is None for scan in schedule.scans)
    lines.append(wording.places_taken(url, f"{len(schedule.scans):,}{of}", unfiled))
    run = Store(config.run).url
    if places := [scan.claim.slot for scan in schedule.scans if scan.claim.run == run]:
        lines.append(wording.place_of_run(places))
    return [*lines, *schedule.clock_notes(), *sample]
