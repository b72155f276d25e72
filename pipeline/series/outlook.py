"""What `seenset plan` says of a scan's place in its schedule, before it is taken."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from pipeline.audit.plan import Plan
from pipeline.config.audit import AuditConfig
from pipeline.report.wording import series as wording
from pipeline.selection.schedule import Slot, level_of_prds
from pipeline.series.claims import check_ledger, next_slots, open_ledger
from pipeline.series.scans import Schedule
from pipeline.store.files import Store


def planned_scan(plan: Plan) -> tuple[Plan, dict[str, Any] | None]:
    """The plan with every selection at the level that it would get if the place were claimed now, and what to say.

    Args:
        plan: of an audit.

    Returns:
        The plan, as it is for an audit that is no scan of a schedule; and the facts, None for such an audit.

    Raises:
        UserError: as `check_ledger`.
        IncompleteError: the store of the ledger does not answer.
    """
    config = plan.config
    if config.series is None:
        return plan, None
    schedule = check_ledger(config)
    slots = next_slots(config, schedule)
    slot = next(iter(slots.values()))
    audited, _ = plan.documents("audit")
    levels = {name: float(_level(one, max(1, audited))) for name, one in slots.items()}
    selections = [one.model_copy(update={"alpha": levels[one.name]}) for one in config.selections]
    facts = {
        **config.series.model_dump(mode="json"),
        "slot": slot.number,
        "level": float(slot.level),
        "before": {name: one.before for name, one in slots.items()},
        "lines": [
            *_lines(config, schedule, slot, plan.limit),
            *(wording.counted_before(name, one.before) for name, one in slots.items() if _counts(one)),
        ],
    }
    return replace(plan, config=config.model_copy(update={"selections": selections})), facts


def _level(slot: Slot, audited: int) -> Fraction:
    """At what a selection of so many documents would be decided."""
    return level_of_prds(slot, audited) if slot.rule == "prds" else slot.level


def _counts(slot: Slot) -> bool:
    """Whether the level of a selection depends on how many documents earlier scans selected."""
    return slot.rule == "e-lond" and slot.before > 0


def _lines(config: AuditConfig, schedule: Schedule | None, slot: Slot, limit: int | None) -> list[str]:
    assert config.series is not None
    series, url = config.series, open_ledger(config.series).url
    of = "" if series.horizon is None else f" of {series.horizon:,}"
    full = series.horizon is not None and slot.number > series.horizon
    lines = [] if full else [wording.next_scan(f"{slot.number:,}{of}", float(slot.level), series.alpha, series.rule)]
    sample = [wording.SAMPLE] if limit is not None else []
    if schedule is None:
        return [*lines, wording.new_ledger(url), *sample]
    unfiled = sum(scan.filing is None for scan in schedule.scans)
    lines.append(wording.places_taken(url, f"{len(schedule.scans):,}{of}", unfiled))
    run = Store(config.run).url
    if places := [scan.claim.slot for scan in schedule.scans if scan.claim.run == run]:
        lines.append(wording.place_of_run(places))
    return [*lines, *schedule.clock_notes(), *sample]
