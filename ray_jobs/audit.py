"""The driver of an audit: phases in order, one run directory, one exit status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.audit.allocation import KEYS_FILE, Parts, divide
from pipeline.audit.description import build_config
from pipeline.audit.plan import Plan, make_plan, pending, settle
from pipeline.audit.scored import Scored, read_scored
from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.detectors.registry import draws_of, parse_detectors
from pipeline.errors import ExitCode, IncompleteError, UserError
from pipeline.models.adapters import RECORD
from pipeline.report import write_report
from pipeline.stages import ask_log_probs, continuations
from pipeline.stages import paraphrase as paraphrase_stage
from pipeline.stages.score import STAGE, fingerprint_of
from pipeline.store.files import Store
from pipeline.store.lock import RunLock, lock_is_live
from pipeline.store.receipts import Receipt, read_receipts
from ray_jobs import adapters, interrupts
from ray_jobs.actors import Failure
from ray_jobs.adapters import Finetuning
from ray_jobs.finetune import Adapter
from ray_jobs.log_probs import read_log_probs
from ray_jobs.paraphrase import paraphrase
from ray_jobs.progress import Answered, Counts, Reporter
from ray_jobs.sample import sample
from ray_jobs.score import score
from ray_jobs.selection import select_all

STATUS_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: str
    exit_code: ExitCode
    counts: dict[str, Any]
    selections: list[dict[str, Any]]
    report: str | None


def run_audit(
    config: AuditConfig,
    reporter: Reporter,
    limit: int | None = None,
    texts: bool = True,
    fail_if_selected: bool = False,
) -> Outcome:
    """Do what is not done yet of an audit: score, select, report. The same call again resumes.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    plan = make_plan(config, limit)
    store = Store(config.run)
    with RunLock(store) as lock:
        parts = divide(config, plan.shards)
        base = fingerprint_of(config)
        keys = adapters.keys_of(parts, base)
        stages = _stages(config, {**base, **({"adapters": keys} if keys else {})})
        fingerprints = {stage: stages[stage].fingerprint for stage in stages}
        plan = settle(plan, fingerprints, store, adapters.facts_of(parts, keys))
        status = _Status(store, Counts(len(plan.shards)))
        try:
            *before, scoring = stages.values()
            finetuning = _finetuning(config, parts, keys, base, store, lock, reporter)
            _prepare(finetuning, before, plan, store, lock, status, reporter)
            _finish(scoring, plan, store, lock, status, reporter)
            scored = read_scored(store, plan.shards)
            _note_gradient(store, scored)
            _check_budget(config, scored)
            summaries = select_all(config, scored, limit)
            selected = any(summary["n_selected"] for summary in summaries)
            code = ExitCode.SELECTED if fail_if_selected and selected else ExitCode.DONE
            status.write("complete", code)
            report = write_report(store, texts=texts)
        except KeyboardInterrupt:
            status.write("incomplete", ExitCode.INTERRUPTED)
            raise
        except UserError as error:
            state = "incomplete" if error.exit_code == ExitCode.INCOMPLETE else "failed"
            status.write(state, error.exit_code, str(error))
            raise
        except BaseException as error:
            status.write("failed", 1, f"{type(error).__name__}: {error}")
            raise
    return Outcome("complete", code, status.counts.to_dict(), summaries, report)


def select_again(run: str, overrides: Sequence[str], texts: bool = True) -> list[dict[str, Any]]:
    """Answer a finished run's selections anew, with overrides; never touches a model.

    Raises:
        UserError: not a run directory, an unfinished run, or settings that only scoring could follow.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    before = build_config(dict(manifest["config"]))
    config = build_config(dict(manifest["config"]), overrides)
    changed = [key for key, value in before.model_dump().items() if config.model_dump()[key] != value]
    refused = sorted(set(changed) - {"selections", "overlap", "error_budget"})
    if refused:
        raise UserError(
            f"seenset select takes selections, overlap and error_budget; {', '.join(refused)} needs seenset run"
        )
    with RunLock(store):
        scored = read_scored(store, shards)
        _check_budget(config, scored)
        summaries = select_all(config, scored, manifest["limit"])
        store.write_json("manifest.json", {**manifest, "config": config.model_dump(mode="json")})
        write_report(store, texts=texts)
    return summaries


def read_run(store: Store) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest and the shard table of a run directory.

    Raises:
        UserError: there is none.
    """
    manifest, table = store.read_json("manifest.json"), store.read_json("shards.json")
    if manifest is None or table is None:
        raise UserError(f"{store.url} is not a run directory: it has no manifest.json and shards.json")
    return manifest, [Shard.from_dict(value) for value in table]


def run_status(run: str) -> dict[str, Any]:
    """How far a run is, from storage alone: status.json, the receipts and the summaries.

    Raises:
        UserError: not a run directory.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    value = store.read_json("status.json") or {"state": "running", "exit_code": None, "message": None}
    counts = Counts(len(shards))
    for receipt in read_receipts(store, STAGE):
        counts.add(receipt, fresh=False)
    rates = ("documents_per_s", "tokens_per_s", "eta_s", "failures")
    fresh = {key: entry for key, entry in counts.to_dict().items() if key not in rates or key not in value}
    if value["state"] == "running" and not lock_is_live(store):
        value = {**value, "state": "incomplete", "message": "its driver is gone; the same command resumes"}
    names = [selection["name"] for selection in manifest["config"]["selections"]]
    summaries = [store.read_json(f"selection/{name}/summary.json") for name in names]
    return {**value, **fresh, "selections": [summary for summary in summaries if summary is not None]}


@dataclass(frozen=True, slots=True)
class _Stage:
    """What is done with every shard before selection, in the order of `_stages`."""

    name: str
    fingerprint: dict[str, Any]
    job: Callable[..., Iterator[Receipt | Failure | Answered]]


def _stages(config: AuditConfig, fingerprint: dict[str, Any]) -> dict[str, _Stage]:
    """The stages that the detectors need; scoring, of this fingerprint, is the last."""
    found = []
    if draws_of(parse_detectors(config.detectors)):
        found.append(_Stage(paraphrase_stage.STAGE, paraphrase_stage.stage_fingerprint(config), paraphrase))
    for needed in ask_log_probs.endpoint_passes(config):
        asked_of = ask_log_probs.stage_fingerprint(config, needed)
        found.append(_Stage(ask_log_probs.stage_of(needed), asked_of, partial(read_log_probs, needed)))
    for asked in continuations.sample_sets(config):
        found.append(_Stage(asked.stage, continuations.stage_fingerprint(config, asked), partial(sample, asked)))
    found.append(_Stage(STAGE, fingerprint, score))
    return {stage.name: stage for stage in found}


def _finetuning(
    config: AuditConfig,
    parts: Parts,
    keys: Mapping[str, str],
    base: Mapping[str, str],
    store: Store,
    lock: RunLock,
    reporter: Reporter,
) -> Finetuning | None:
    """The trainings that the detectors need, if one is missing."""
    if not parts.adapters:
        store.remove(KEYS_FILE)  # of detectors that are no longer asked for
        return None
    adapters.write_keys(parts, store)
    missing = [key for key in keys.values() if not store.exists(f"adapters/{key}/{RECORD}")]
    if not missing:
        return None
    if store.names(f"receipts/{STAGE}", ".json"):
        raise UserError(
            f"{store.url}/adapters/{missing[0]} is gone, and documents were scored with it; another may differ: "
            "begin a new run directory"
        )

    def on_adapter(adapter: Adapter) -> None:
        if adapter.fresh:
            reporter.say(adapter.line())

    def check() -> None:
        lock.check()
        interrupts.check()

    jobs = adapters.adapter_jobs(config, parts, base)
    return Finetuning(jobs, store, on_adapter, lambda progress: reporter.pace(progress.line()), check)


def _prepare(
    finetuning: Finetuning | None,
    stages: Sequence[_Stage],
    plan: Plan,
    store: Store,
    lock: RunLock,
    status: _Status,
    reporter: Reporter,
) -> None:
    """Finish what comes before scoring: adapters, and beside them on other resources the other stages.

    Raises:
        UserError: as `adapters.Finetuning.run`.
        IncompleteError: a shard could not be finished, or the workers of an adapter were lost too often.
    """
    waiting = any(pending(plan, stage.name, store) for stage in stages)
    room = adapters.room_beside(plan.config, finetuning.jobs) if finetuning is not None and waiting else None
    if finetuning is not None and room is None:
        status.counts = Counts(len(plan.shards), adapters.STAGE)
        status.write("running", None)
        finetuning.run()
        interrupts.check()
    with ExitStack() as beside:
        if finetuning is not None and room is not None:
            capacity, actors = room
            plan = _with_actors(plan, actors)
            beside.enter_context(finetuning.beside(capacity))
        for stage in stages:
            _finish(stage, plan, store, lock, status, reporter)


def _with_actors(plan: Plan, most: int) -> Plan:
    """The same work on no more actors."""
    resources = plan.config.resources
    own = most if resources.actors == "auto" else min(most, resources.actors)
    config = plan.config.model_copy(update={"resources": resources.model_copy(update={"actors": own})})
    return replace(plan, config=config)


def _finish(stage: _Stage, plan: Plan, store: Store, lock: RunLock, status: _Status, reporter: Reporter) -> None:
    """Let the actors do what is missing of a stage.

    Raises:
        IncompleteError: a shard could not be finished.
    """
    todo = pending(plan, stage.name, store)
    status.counts = Counts(len(plan.shards), stage.name)
    waiting = {shard.id for shard in todo}
    for receipt in read_receipts(store, stage.name):
        if receipt.shard not in waiting:
            status.counts.add(receipt, fresh=False)
    status.write("running", None)
    if not todo:
        return
    with reporter:
        reporter.update(status.counts)
        for result in stage.job(plan.config, stage.fingerprint, todo, store, lock.owner):
            lock.check()
            interrupts.check()
            if isinstance(result, Receipt):
                status.counts.add(result, fresh=True)
            elif isinstance(result, Failure):
                status.counts.failures.append(result.message)
            else:
                status.counts.answers = result.requests
            status.tick()
            reporter.update(status.counts)
        reporter.update(status.counts, last=True)
    interrupts.check()
    if status.counts.failures:
        first = status.counts.failures[0]
        raise IncompleteError(
            f"{len(status.counts.failures)} of {len(plan.shards)} shards could not be finished by stage {stage.name}: "
            f"{first}; the others are kept: mend it and run again"
        )


def _check_budget(config: AuditConfig, scored: Scored) -> None:
    """Too many quarantined documents end the run before any selection; the scores are kept."""
    total = sum(receipt.n_in for receipt in scored.receipts)
    reasons: dict[str, int] = {}
    for role in ("audit", "unseen", "seen"):
        for reason, count in scored.quarantined(role).items():
            reasons[reason] = reasons.get(reason, 0) + count
    bad = sum(reasons.values())
    if bad > config.error_budget * total:
        listed = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        raise IncompleteError(
            f"{bad} of {total} documents were quarantined ({listed}), more than error_budget "
            f"{config.error_budget:g} allows; see quarantine/ or raise it and run again"
        )


def _note_gradient(store: Store, scored: Scored) -> None:
    """Add to the manifest over what the gradient norm was taken, and how: only the loaded model could tell."""
    found = next((receipt.gradient for receipt in scored.receipts if receipt.gradient is not None), None)
    if found is not None:
        if found["reason"]:
            _log.warning("gradient_norm took one backward pass a document: %s", found["reason"])
        store.write_json("manifest.json", {**store.read_json("manifest.json"), "gradient": found})


class _Status:
    """Keeps status.json, not more often than every few seconds while shards come in."""

    def __init__(self, store: Store, counts: Counts) -> None:
        self.store = store
        self.counts = counts
        self._last = 0.0

    def tick(self) -> None:
        if time.monotonic() - self._last >= STATUS_SECONDS:
            self.write("running", None)

    def write(self, state: str, code: int | None, message: str | None = None) -> None:
        self._last = time.monotonic()
        value = {"state": state, "exit_code": None if code is None else int(code), "message": message}
        self.store.write_json("status.json", {**value, **self.counts.to_dict()})
