"""The driver of an audit: its phases in order, with one run directory and one exit status."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.audit.allocation import allocation_record, write_document_keys
from pipeline.audit.arithmetic import note_arithmetic, read_arithmetic, with_types
from pipeline.audit.common_failure import CommonFailure, CommonFailureError
from pipeline.audit.evaluation import Evaluation, evaluate_scores
from pipeline.audit.machine import LocalMachine
from pipeline.audit.plan import Plan, check_model_files, make_plan, pending
from pipeline.audit.reconcile import (
    check_inputs_since,
    note_gradient,
    reconcile,
)
from pipeline.audit.records import KEYS_FILE
from pipeline.audit.repair import count_refused, withdraw_damaged, withdraw_refused
from pipeline.audit.scored import Scored, check_budget, read_scored
from pipeline.audit.select import Answering, Each, select_all
from pipeline.audit.status import Counts, Status, StatusFile, final_state, read_status
from pipeline.audit.summary import Summary, exit_code_of
from pipeline.audit.top_documents import Reread
from pipeline.audit.work import Work, note_device, work_of
from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.endpoint.keys import keys_withdrawn
from pipeline.errors import DamagedError, ExitCode, IncompleteError, UserError, instead_of_exit
from pipeline.models.arithmetic import flags_differ
from pipeline.models.load import RECORD, check_adapter_digests
from pipeline.models.sharing import SharedModels
from pipeline.report.evaluation_page import write_evaluation
from pipeline.report.page import write_report
from pipeline.report.wording.evaluation import worded
from pipeline.report.wording.files import recorded_model
from pipeline.series.claims import check_ledger, claim_of, file_result
from pipeline.series.scans import reconcile_already_audited
from pipeline.stages import SCORING, is_scoring
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Advance, Answered, Event, Failure, Ready, Remark, Tick
from pipeline.stages.local import ENDPOINT_WORKERS, finish_shards
from pipeline.stages.registry import endpoint_of
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from pipeline.store.receipts import Receipt, compact_receipts, read_receipts
from ray_jobs import supervisor
from ray_jobs.actors import map_shards
from ray_jobs.cluster import cluster_warning
from ray_jobs.finetune import AdapterJob, adapter_jobs, train_adapters, trainings_beside
from ray_jobs.nodes import cluster_shape, sized_by_cluster
from ray_jobs.progress import Reporter
from ray_jobs.select import fold_of
from ray_jobs.start import Checks, begin_model, device_of_run, machine_of, start_checks, types_of_run
from ray_jobs.terminal import heartbeat
from ray_jobs.token_attributions import token_reader

FINETUNE_STAGE = "finetune"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The final status of a run, and the address of its report."""

    status: Status
    report: str

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        if self.status.state != "complete":
            return ExitCode.INCOMPLETE
        return ExitCode(self.status.exit_code or ExitCode.DONE)

    @property
    def selections(self) -> list[Summary]:
        """The answers, in the order of the configuration."""
        return self.status.selections


@dataclass(frozen=True, slots=True)
class _Driver:
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


def run_audit(
    config: AuditConfig,
    reporter: Reporter,
    limit: int | None = None,
    texts: bool = True,
    fail_if_selected: bool = False,
) -> RunResult:
    """Carry out the unfinished parts of an audit: score, select, report. The same call resumes it.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    return run_plan(make_plan(config, limit), reporter, texts, fail_if_selected)


def run_plan(
    plan: Plan,
    reporter: Reporter,
    texts: bool = True,
    fail_if_selected: bool = False,
    retried: Collection[str] = (),
) -> RunResult:
    """As `run_audit`, for a plan; documents in quarantine for one of the reasons `retried` are tried again."""
    retried = _met_again(Store(plan.config.run), retried, reporter)
    with keys_withdrawn(plan.config.models), scoring(plan, reporter, retried) as (scored, status, fold, reread):
        types = read_arithmetic(scored.store)
        config = plan.config if types is None else with_types(plan.config, types.types)
        reporter.say("selecting")
        heartbeat.phase("selecting")
        claim = claim_of(config, scored, plan.limit, reporter.say)
        how = Answering(texts=texts, reread=reread, say=reporter.say, claim=claim)
        summaries = select_all(config, scored, plan.limit, fold, how)
        code = exit_code_of(summaries) if fail_if_selected else ExitCode.DONE
        ended = status.write("complete", code, selections=summaries)
        heartbeat.phase("writing the report")
        report = write_report(scored.store, texts=texts)
        if claim is not None and summaries:
            file_result(config, scored, plan.limit, summaries, reporter.say)
    return RunResult(ended, report)


def _met_again(store: Store, reasons: Collection[str], reporter: Reporter) -> Collection[str]:
    """The reasons of a retry; none where the run is complete and no document is in quarantine for one of them."""
    try:
        status = read_status(store) if reasons else None
    except DamagedError:  # the run writes it again
        return reasons
    if status is None or status.state != "complete" or count_refused(store, reasons):
        return reasons
    reporter.say(f"no document of {store.url} is in quarantine for {' or '.join(reasons)}: nothing to try again")
    return ()


def run_evaluation(plan: Plan, reporter: Reporter) -> tuple[Evaluation, str]:
    """Score the missing documents and compare seen with unseen ones. The same call resumes it.

    Args:
        plan: plan of a configuration from `pipeline.audit.description.load_config`, with labelled documents.
        reporter: shows progress.

    Returns:
        The figures, and the address of their page.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    with keys_withdrawn(plan.config.models), scoring(plan, reporter) as (scored, status, *_):
        evaluated = worded(evaluate_scores(plan.config, scored, plan.limit))
        page = write_evaluation(scored.store, evaluated)
        status.write("complete", ExitCode.DONE)
    return evaluated.evaluation, page


@contextmanager
def scoring(
    plan: Plan, reporter: Reporter, retried: Collection[str] = ()
) -> Iterator[tuple[Scored, StatusFile, Each, Reread]]:
    """Score the missing documents of every role; the run is locked until the block ends.

    Errors of the block are recorded in status.json, like those of scoring. The block itself records completion.

    Args:
        plan: plan of the audit.
        reporter: shows progress.
        retried: reasons of quarantine for which documents are tried again.

    Returns:
        All scores, the status, a reader of all score shards, and a function that reads single documents again.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    config = plan.config
    machine = _announced(plan, reporter)
    store = Store(config.run)
    types = None if machine is None else types_of_run(config, store, machine, reporter.say)
    plan = plan if types is None else replace(plan, config=with_types(config, types.types))
    early = begin_model(plan, store, machine)
    with RunLock(store, reporter.say) as lock:
        store = lock.held
        checks = start_checks(plan, store, reporter, machine, early)
        types = types or types_of_run(config, store, machine, reporter.say)
        if (chosen := types.chosen(config, "model")) is not None:
            reporter.say(f"the model computes in {chosen.dtype}, {chosen.reason}")
        config = with_types(config, types.types)
        plan = replace(plan, config=config)
        store.begin()
        unscored = pending(plan, SCORING, store)
        device = device_of_run(config.resources, store, machine, bool(unscored))
        already_audited = partial(reconcile_already_audited, config, store=store, say=reporter.say)
        if plan.recorded and retried:
            check_model_files(replace(plan, recorded={}))
        work = work_of(config, plan.shards, device, already_audited, plan.recorded)
        for key in plan.recorded:
            reporter.say(recorded_model(getattr(config, key).shown))
        fingerprints = {stage.name: stage.fingerprint for stage in work.stages}
        if config.series is not None:
            check_ledger(config)
        fold = fold_of(store, machine is None)
        note_arithmetic(store, types)
        if machine is not None and not device.gpus and types.types and (line := flags_differ(types.flags)):
            reporter.say(f"warning: this machine: {line}")
        heartbeat.phase("counting rows and checking what is there")
        plan = reconcile(plan, fingerprints, store, allocation_record(work.parts, work.keys), fold, work.models)
        note_device(store, device)
        if retried and (count := withdraw_refused(work.stages, plan.shards, store, retried)):
            reporter.say(f"documents of {count} shards are tried again: {', '.join(retried)}")
        for line in withdraw_damaged(work.stages, plan.shards, store, fold):
            reporter.say(line)
        unscored = pending(plan, SCORING, store)
        heartbeat.phase("opening the models")
        status = StatusFile(store, Counts(len(plan.shards)))
        models = early or (None if machine is None else SharedModels(alone=machine.workers == 1))
        driver = _Driver(store, lock, status, reporter, machine, models, checks)
        with _faults_noted(status):
            if plan.recorded and unscored:
                check_model_files(replace(plan, recorded={}))
            scored = _scored(driver, config, work, plan, fold if unscored else None)
            reread = token_reader(store, config.resources, machine, models, reporter.say, driver.check)
            yield scored, status, fold, reread


def _announced(plan: Plan, reporter: Reporter) -> LocalMachine | None:
    """Print the extent and the place of the work; returns this machine's resources, None on a cluster."""
    inputs = f"{len(plan.inputs)} input{'s' * (len(plan.inputs) != 1)}"
    reporter.say(f"{inputs}, {len(plan.shards)} shards; run directory {plan.config.run}")
    machine = machine_of(plan)
    if machine is None and (warning := cluster_warning(plan.config.resources)) is not None:
        reporter.say(warning)
    return machine


@contextmanager
def _faults_noted(status: StatusFile) -> Iterator[None]:
    """Record errors of the block in status.json."""
    try:
        yield
    except SystemExit as error:
        left = instead_of_exit(error)
        status.end("incomplete", ExitCode.INCOMPLETE, str(left))
        raise left from None
    except BaseException as error:
        status.end(*final_state(error))
        raise


def _scored(driver: _Driver, config: AuditConfig, work: Work, plan: Plan, fold: Each | None) -> Scored:
    """Run all stages and read the scores.

    Args:
        driver: driver of the run.
        config: the audit's configuration.
        work: its stages and trainings.
        plan: its shards.
        fold: reads the inputs of this run for their check; None: no shard was scored.

    Raises:
        UserError: the errors of a stage, `check_inputs_since` and `check_budget`.
    """
    *before, scoring = work.stages
    jobs = _finetuning(driver, config, work)
    if jobs or before:
        driver.checks.wait()  # before trainings; scoring starts while they run
    _prepare(driver, jobs, before, plan)
    _finish(driver, scoring, plan)
    driver.checks.wait()
    if fold is not None:
        check_inputs_since(plan, work.stages, driver.store, fold)
    driver.store.remove_temporaries()
    heartbeat.phase("reading the scores")
    scored = read_scored(driver.store, plan.shards, plan.config.near_copies)
    note_gradient(driver.store, scored)
    check_budget(config, scored)
    return scored


def _finetuning(driver: _Driver, config: AuditConfig, work: Work) -> list[AdapterJob]:
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
    return adapter_jobs(config, work, missing, None if machine is None else machine.gpus)


def _train(
    driver: _Driver, jobs: Sequence[AdapterJob], at_once: int | None = None, stop: threading.Event | None = None
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
def _trained_beside(driver: _Driver, jobs: Sequence[AdapterJob], at_once: int) -> Iterator[None]:
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


def _prepare(driver: _Driver, jobs: Sequence[AdapterJob], stages: Sequence[Stage], plan: Plan) -> None:
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
    with ExitStack() as beside:
        if room is not None:
            at_once, actors = room
            plan = _with_actors(plan, actors)
            beside.enter_context(_trained_beside(driver, jobs, at_once))
        for stage in stages:
            _finish(driver, stage, plan)


def _with_actors(plan: Plan, most: int) -> Plan:
    """The plan with a limited number of actors."""
    resources = plan.config.resources
    actors = min(most, resources.actors_between(most, most)[1])
    config = plan.config.model_copy(update={"resources": resources.model_copy(update={"actors": actors})})
    return replace(plan, config=config)


def _finish(driver: _Driver, stage: Stage, plan: Plan) -> None:
    """Finish the missing shards of a stage with the workers.

    Raises:
        IncompleteError: a shard could not be finished.
        CommonFailureError: every document failed with one message; its shards have no receipts then.
    """
    store, status, reporter = driver.store, driver.status, driver.reporter
    todo, sizes = pending(plan, stage.name, store), plan.estimated_tokens()
    compact_receipts(store, stage.name)
    counts = status.counts = Counts(len(plan.shards), stage.name, sizes)
    failure = CommonFailure.of(stage, store, plan.config)
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


def _follow(driver: _Driver, stage: Stage, events: Iterator[Event], failure: CommonFailure) -> None:
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
    driver: _Driver, stage: Stage, plan: Plan, shards: Sequence[Shard], sizes: Mapping[str, float]
) -> Generator[Event]:
    """Finish the shards of a stage: by requests to an endpoint, in threads of this process, or with actors."""
    store, reporter, machine = driver.store, driver.reporter, driver.machine
    if stage.endpoint is not None:
        reporter.say(f"{stage.name}: asking {stage.endpoint.endpoint}")
        return finish_shards(stage, shards, store, ENDPOINT_WORKERS, Placement(endpoint=endpoint_of(stage, store)))
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
