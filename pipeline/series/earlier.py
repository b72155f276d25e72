"""The runs that `against` names: one by its directory, or all scans of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.audit.against import reconcile_judged, reconciled_judged
from pipeline.audit.records import MANIFEST_FILE
from pipeline.config.audit import AuditConfig
from pipeline.errors import UserError
from pipeline.report.wording.series import judged_before_phrase, left_out_later
from pipeline.series.scans import read_schedule
from pipeline.stages.judged import JudgedTexts, read_judged
from pipeline.store.files import Store

Say = Callable[[str], None]


def begin_against(
    config: AuditConfig, fingerprint: Mapping[str, Any], store: Store, say: Say = lambda line: None
) -> JudgedTexts | None:
    """Which texts a run leaves out, settled when it began or now; None where it audits all. The lock must be held.

    Args:
        config: of the audit.
        fingerprint: of its scores.
        store: its run directory.
        say: prints a line.

    Raises:
        UserError: `against` is no run and no ledger, or is this run; or a run that scored otherwise, or is damaged.
        IncompleteError: a run that is not complete.
    """
    if (settled := reconciled_judged(config, store)) is None:
        if config.against is None:
            return None
        runs, strict = earlier_runs(config, store.url)
        judged = reconcile_judged(config, fingerprint, store, runs, strict, say)
        say(judged_before_phrase(config.against, judged.count))
        return judged
    _, judged = settled
    read_judged(store, judged.sha256)
    return judged


def planned_against(config: AuditConfig) -> str | None:
    """What `seenset plan` says of the documents that a run would leave out; None where it audits all.

    Raises:
        UserError: as `earlier_runs`.
    """
    if config.against is None:
        return None
    return left_out_later(config.against, len(earlier_runs(config, Store(config.run).url)[0]))


def earlier_runs(config: AuditConfig, run: str) -> tuple[list[str], bool]:
    """The run directories that `against` names, and whether it names one run itself.

    Args:
        config: of the audit, with `against`.
        run: directory of this run.

    Raises:
        UserError: it is neither a run nor a ledger, or it is this run.
    """
    assert config.against is not None
    try:
        named = Store(config.against)
    except UserError as error:
        raise UserError(f"against: {error}") from None
    if named.url == run:
        raise UserError(f"against {named.url} is this very run: name an earlier one, or a ledger")
    if named.exists(MANIFEST_FILE):
        return [named.url], True
    schedule = read_schedule(named)
    if schedule is not None:
        return list(dict.fromkeys(scan.claim.run for scan in schedule.scans if scan.claim.run != run)), False
    if config.series is not None and Store(config.series.ledger).url == named.url:
        return [], False  # the first scan opens it
    raise UserError(f"against {named.url} is neither a run directory ({MANIFEST_FILE}) nor a ledger: nothing is there")
