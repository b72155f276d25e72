"""The work of a driver: it finishes trainings and stages in this process or on a cluster, and shows their progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import DamagedError, IncompleteError, UserError
from pipeline.models.load import RECORD, check_adapter_digests
from pipeline.models.sharing import SharedModels
from pipeline.plan.allocation import write_document_keys
from pipeline.plan.stage_plan import BuiltStages
from pipeline.results.status import Counts, StatusFile
from pipeline.run.common_failure import CommonFailure, CommonFailureError
from pipeline.run.machine import LocalMachine
from pipeline.run.plan import Plan, pending
from pipeline.run.records import KEYS_FILE
from pipeline.stages import SCORING, is_scoring
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Advance, Answered, Event, Failure, Ready, Remark, Tick
from pipeline.stages.local import ENDPOINT_WORKERS, finish_shards
from pipeline.stages.registry import open_endpoint
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from pipeline.store.receipts import Receipt, compact_receipts, read_receipts
from ray_jobs import supervisor
from ray_jobs.actors import map_shards
from ray_jobs.finetune import AdapterJob, adapter_jobs, train_adapters, trainings_beside
from ray_jobs.nodes import cluster_shape, sized_by_cluster
from ray_jobs.progress import Reporter
from ray_jobs.start import Checks
from ray_jobs.terminal import heartbeat

FINETUNE_STAGE = "finetune"


@dataclass(frozen=True, slots=True)
class Driver:
    """State that the phases of a run share."""

    store: Store
    lock: RunLock
    status: StatusFile
    reporter: Reporter
    machine: LocalMachine | None  # None: a cluster does the work
    models: SharedModels | None  # models of local scoring, kept open for token attributions
    checks: Checks  # checks of the documents

    def check(self) -> None:
        """Stop the driver if its lock was taken over, it was interrupted, its cluster is lost or a check failed."""
        self.lock.check()
        supervisor.check()
        self.checks.look()


def find_trainings(driver: Driver, config: AuditConfig, work: BuiltStages) -> list[AdapterJob]:
    """The trainings of the detectors, if an adapter is missing."""
    store, parts, keys, machine = driver.store, work.parts, work.keys, driver.machine
    if not parts.taken():
        store.remove(KEYS_FILE)  # from detectors that are no longer configured
        return []
    write_document_keys(parts, store)
    missing = _missing_adapters(store, keys.values())
    if not missing:
        return []
    if store.names(f"receipts/{SCORING}", ".json"):
        raise UserError(
            f"{next(iter(missing.values()))}, and documents were scored with it; another may differ: "
            "start a new run directory"
        )
    for key, problem in missing.items():
        if store.exists(f"adapters/{key}"):
            driver.reporter.say(f"{problem}; it is trained again")
            store.remove_folder(f"adapters/{key}")
    for name, part in parts.adapters.items():
        if part.left_out and keys[name] in missing:
            driver.reporter.say(part.line(name))
    return adapter_jobs(config, work, missing, None if machine is None else machine.gpus)


def _missing_adapters(store: Store, keys: Iterable[str]) -> dict[str, str]:
    """The adapters that are missing or changed, with the fault of each."""
    missing = {}
    for key in keys:
        if not store.exists(f"adapters/{key}/{RECORD}"):
            missing[key] = f"{store.url}/adapters/{key} is missing"
            continue
        try:
            check_adapter_digests(Path(store.path(f"adapters/{key}")))
        except DamagedError as error:
            missing[key] = str(error)
    return missing


def finish_work_before_scoring(driver: Driver, jobs: Sequence[AdapterJob], stages: Sequence[Stage], plan: Plan) -> None:
    """Finish the work before scoring: adapters, and on other resources at the same time the other stages.

    Raises:
        UserError: the errors of `train_adapters`.
        IncompleteError: a shard could not be finished, or the workers of an adapter were lost too often.
    """
    waiting = any(pending(plan, stage.name, driver.store) for stage in stages)
    room = None
    if jobs and waiting and driver.machine is None:
        shape = cluster_shape(plan.config.resources)
        room = sized_by_cluster(lambda nodes: trainings_beside(jobs, shape, nodes))
    if jobs and room is None:
        driver.status.counts = Counts(len(plan.shards), FINETUNE_STAGE)
        driver.status.write("running", None)
        _train(driver, jobs)
        supervisor.check()
    with ExitStack() as stack:
        if room is not None:
            at_once, actors = room
            plan = _with_actors(plan, actors)
            stack.enter_context(_trained_meanwhile(driver, jobs, at_once))
        for stage in stages:
            finish_stage(driver, stage, plan)


def _with_actors(plan: Plan, most: int) -> Plan:
    """The plan with a limited number of actors."""
    resources = plan.config.resources
    actors = min(most, resources.actors_between(most, most)[1])
    config = plan.config.model_copy(update={"resources": resources.model_copy(update={"actors": actors})})
    return replace(plan, config=config)


def _train(
    driver: Driver, jobs: Sequence[AdapterJob], at_once: int | None = None, stop: threading.Event | None = None
) -> None:
    """Train the missing adapters, until `stop` is set.

    Raises:
        UserError: the errors of `train_adapters`.
        IncompleteError: the workers of one adapter were lost too often.
    """
    reporter = driver.reporter

    def check() -> None:
        driver.check()
        if stop is not None and stop.is_set():
            raise CancelledError

    trainings = train_adapters(
        jobs,
        driver.store,
        reporter.pace,
        check,
        at_once,
        here=driver.machine is not None,
    )
    with supervisor.cluster_named():
        for adapter in trainings:
            reporter.say(adapter.line())


@contextmanager
def _trained_meanwhile(driver: Driver, jobs: Sequence[AdapterJob], at_once: int) -> Iterator[None]:
    """Train while the block runs, and wait for the end after it; if the block raises, the trainings stop.

    Raises:
        UserError: the errors of `_train`, at the end of the block.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1, "seenset-finetune") as pool:
        training = pool.submit(_train, driver, jobs, at_once, stop)
        try:
            yield
            training.result()
        finally:
            stop.set()


def finish_stage(driver: Driver, stage: Stage, plan: Plan) -> None:
    """Finish the missing shards of a stage with the workers.

    Raises:
        IncompleteError: a shard could not be finished.
        CommonFailureError: every document failed with one message; its shards have no receipts then.
    """
    store, status, reporter = driver.store, driver.status, driver.reporter
    todo, sizes = pending(plan, stage.name, store), plan.estimated_tokens()
    compact_receipts(store, stage.name)
    counts = status.counts = Counts(len(plan.shards), stage.name, sizes)
    failure = CommonFailure.watch(stage, store, plan.config)
    waiting = {shard.id for shard in todo}
    for receipt in read_receipts(store, stage.name):
        if receipt.shard not in waiting:
            counts.add(receipt, fresh=False)
            failure.add(receipt)
    status.write("running", None)
    if not todo:
        return
    try:
        with reporter, supervisor.cluster_named(), closing(_events(driver, stage, plan, todo, sizes)) as events:
            _follow(driver, stage, events, failure)
            reporter.update(counts, last=True)
        failure.check(ended=not counts.failures)
    except CommonFailureError:
        failure.withdraw({shard.id: shard for shard in plan.shards})
        raise
    supervisor.check()
    driver.check()
    compact_receipts(store, stage.name)
    if counts.failures:
        raise IncompleteError(
            f"{len(counts.failures)} of {len(plan.shards)} shards could not be finished by stage {stage.name}: "
            f"{counts.failures[0]}; completed shards are kept; correct the cause and run the command again"
        )


def _follow(driver: Driver, stage: Stage, events: Iterator[Event], failure: CommonFailure) -> None:
    """Count the events of the shards of a stage, and show its progress.

    Raises:
        CommonFailureError: every document so far failed with one message.
    """
    counts, reporter, ready = driver.status.counts, driver.reporter, False
    for event in events:
        driver.check()
        ready = ready or not isinstance(event, Tick)
        if isinstance(event, Receipt):
            counts.add(event, fresh=True)
            failure.add(event)
            failure.check()
        elif isinstance(event, Failure):
            counts.fail(event)
        elif isinstance(event, Advance):
            counts.advance(event)
            failure.advance(event)
            failure.check()
        elif isinstance(event, Answered):
            counts.answers = event.requests
        elif isinstance(event, Ready):
            counts.began = time.monotonic()
            heartbeat.phase(stage.name)
        elif isinstance(event, Remark):
            reporter.say(event.text)
        driver.status.tick()
        if ready:
            reporter.update(counts)
        else:
            reporter.pace(f"{stage.name}: still loading")


def _events(
    driver: Driver, stage: Stage, plan: Plan, shards: Sequence[Shard], sizes: Mapping[str, float]
) -> Generator[Event]:
    """Finish the shards of a stage: by requests to an endpoint, in threads of this process, or with actors."""
    store, reporter, machine = driver.store, driver.reporter, driver.machine
    if stage.endpoint is not None:
        reporter.say(f"{stage.name}: asking {stage.endpoint.endpoint}")
        return finish_shards(stage, shards, store, ENDPOINT_WORKERS, Placement(endpoint=open_endpoint(stage, store)))
    shards = sorted(shards, key=lambda shard: -sizes[shard.id])
    if machine is not None:
        many = f", {machine.workers} batches at a time" if machine.workers > 1 else ""
        doing = "loading the model" if plan.passes() else "reading the scores of the files"
        reporter.say(f"{stage.name}: {doing}, in this process{many}")
        models = driver.models if is_scoring(stage.name) else None
        placement = Placement(machine.gpus, machine.threads, models)
        return finish_shards(stage, shards, store, machine.workers, placement)
    reporter.say(f"{stage.name}: starting actors on the cluster")
    return map_shards(stage, plan.config.resources, shards, store, driver.lock.owner, sizes)
