"""The steps of a driver from a plan to all scores, in one list: each states what must have happened before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from pipeline.answers.select import ShardMap
from pipeline.answers.top_documents import Reread
from pipeline.config.audit import AuditConfig
from pipeline.errors import instead_of_exit
from pipeline.models.devices import Device
from pipeline.models.sharing import SharedModels
from pipeline.models.weight_dtypes import flags_differ
from pipeline.plan.allocation import allocation_record
from pipeline.plan.stage_plan import BuiltStages, build_stages, note_device
from pipeline.results.status import Counts, StatusFile, final_state
from pipeline.run.dtypes import Arithmetic, note_arithmetic, with_types
from pipeline.run.machine import LocalMachine
from pipeline.run.manifest import recorded_parameters, refused_parameters
from pipeline.run.plan import Plan, check_model_files, pending
from pipeline.run.reconcile import check_inputs_since, note_gradient, reconcile
from pipeline.run.remedies import recorded_model
from pipeline.run.repair import withdraw_damaged, withdraw_refused
from pipeline.run.scored import Scored, check_budget, read_scored
from pipeline.series.claims import check_ledger
from pipeline.series.scans import reconcile_already_audited
from pipeline.stages import SCORING
from pipeline.stages.registry import find_parameters
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from ray_jobs import supervisor
from ray_jobs.cluster import cluster_warning
from ray_jobs.execution import Driver, find_trainings, finish_stage, finish_work_before_scoring
from ray_jobs.finetune import AdapterJob
from ray_jobs.progress import Reporter
from ray_jobs.select import shard_mapper
from ray_jobs.start import Checks, begin_model, device_of_run, start_checks, this_machine, types_of_run
from ray_jobs.terminal import heartbeat
from ray_jobs.token_attributions import token_reader


@dataclass(slots=True)
class Scoring:
    """What the steps of a driver know of their run. A field without a value is set by the step that provides it."""

    plan: Plan
    given: AuditConfig  # the configuration as it was planned, with `dtype: auto`
    reporter: Reporter
    retried: Collection[str]  # reasons of quarantine for which documents are tried again
    until_end: ExitStack  # contexts that end with the run
    machine: LocalMachine | None = field(init=False)  # None: a cluster does the work
    types_here: Arithmetic | None = field(init=False)  # None: the cluster is asked for them
    early: SharedModels | None = field(init=False)  # the model that is being opened, if this process scores with it
    lock: RunLock = field(init=False)
    store: Store = field(init=False)  # the run directory, locked
    checks: Checks = field(init=False)  # of the documents
    types: Arithmetic = field(init=False)
    device: Device = field(init=False)
    work: BuiltStages = field(init=False)
    each: ShardMap = field(init=False)  # applies a function to the score files of shards
    waiting: bool = field(init=False)  # whether documents are to be scored
    status: StatusFile = field(init=False)
    models: SharedModels | None = field(init=False)  # of scoring in this process, kept open for token attributions
    driver: Driver = field(init=False)
    jobs: Sequence[AdapterJob] = field(init=False)  # the trainings of missing adapters
    scored: Scored = field(init=False)
    reread: Reread = field(init=False)  # reads single documents again


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a driver.

    Attributes:
        work: carries it out; its docstring states what must have happened before.
        requires: what earlier steps must have provided: fields of `Scoring`, and changes of the run directory.
        provides: what holds after it.
    """

    work: Callable[[Scoring], None]
    requires: frozenset[str]
    provides: frozenset[str]

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.work.__name__


def step(requires: str, provides: str) -> Callable[[Callable[[Scoring], None]], Step]:
    """Mark a function as a step.

    Args:
        requires: names separated by blanks, as `Step.requires`.
        provides: as `Step.provides`.
    """
    return lambda work: Step(work, frozenset(requires.split()), frozenset(provides.split()))


def ordered_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, if each comes after all that provide what it requires.

    Raises:
        ValueError: one does not, or two provide the same; the message names it.
    """
    provided: set[str] = set()
    for one in steps:
        if missing := sorted(one.requires - provided):
            raise ValueError(f"step {one.name} requires {', '.join(missing)}, which no earlier step provides")
        if twice := sorted(one.provides & provided):
            raise ValueError(f"step {one.name} provides {', '.join(twice)}, which an earlier step provides")
        provided |= one.provides
    return tuple(steps)


# --- before the run directory is locked: nothing is written


@step(requires="", provides="machine")
def announce_work(run: Scoring) -> None:
    """Print the extent of the work, and decide whether this process or a cluster does it.

    The first step: the lines about the work stand before all others.
    """
    inputs = f"{len(run.plan.inputs)} input{'s' * (len(run.plan.inputs) != 1)}"
    run.reporter.say(f"{inputs}, {len(run.plan.shards)} shards; run directory {run.plan.config.run}")
    run.machine = this_machine(run.plan)
    if run.machine is None and (warning := cluster_warning(run.plan.config.resources)) is not None:
        run.reporter.say(warning)


@step(requires="machine", provides="types_here")
def decide_types_here(run: Scoring) -> None:
    """Decide the types of the models for this machine.

    After the place is known: a cluster is asked only once it is connected.
    """
    run.types_here = None
    if run.machine is not None:
        run.types_here = types_of_run(run.given, Store(run.given.run), run.machine, run.reporter.say)
        run.plan = replace(run.plan, config=with_types(run.given, run.types_here.types))


@step(requires="machine types_here", provides="early")
def open_model_early(run: Scoring) -> None:
    """Begin to open the model in a thread, if this process scores with it.

    After its type is decided, in which it is opened; before the lock, because opening takes longest.
    """
    run.early = begin_model(run.plan, Store(run.given.run), run.machine)


# --- the run directory is locked: other runs of it have ended, and its files may be replaced


@step(requires="early", provides="lock store")
def lock_run(run: Scoring) -> None:
    """Lock the run directory until the run ends.

    Before the first change of it.
    """
    run.lock = run.until_end.enter_context(RunLock(Store(run.given.run), run.reporter.say))
    run.store = run.lock.held
    supervisor.note_run(run.given.run)


@step(requires="machine early store", provides="checks")
def begin_document_checks(run: Scoring) -> None:
    """Check the documents, or begin to, and connect to the cluster meanwhile.

    After the lock, because the findings are stored, and while a model is opened.
    """
    run.checks = start_checks(run.plan, run.store, run.reporter, run.machine, run.early)


@step(requires="machine types_here store checks", provides="types")
def settle_types(run: Scoring) -> None:
    """Decide the types of the models for the cluster, and state that of the audited model.

    After the checks are begun, which connect to the cluster; before a fingerprint, which holds the types.
    """
    run.types = run.types_here or types_of_run(run.given, run.store, run.machine, run.reporter.say)
    if (chosen := run.types.chosen(run.given, "model")) is not None:
        run.reporter.say(f"the model computes in {chosen.dtype}, {chosen.reason}")
    run.plan = replace(run.plan, config=with_types(run.given, run.types.types))


@step(requires="store checks", provides="fresh")
def forget_kept_files(run: Scoring) -> None:
    """Forget the files of the store that an earlier command of this process kept in memory.

    After the lock, and before the receipts are read to decide what is left to do.
    """
    run.store.begin()


@step(requires="machine store types fresh", provides="device")
def choose_device(run: Scoring) -> None:
    """Decide the device that the batches and the fingerprint are of; without work, no node is asked.

    After the types, which may need the nodes of the cluster to be known.
    """
    waiting = bool(pending(run.plan, SCORING, run.store))
    run.device = device_of_run(run.plan.config.resources, run.store, run.machine, waiting)


@step(requires="store types device", provides="work")
def plan_work(run: Scoring) -> None:
    """Decide the stages, with the fingerprint of each, and the documents of trainings and prompts.

    After types and device, which the fingerprints hold. It reads what earlier runs have audited, and files that; and
    asks an endpoint without a record which parameters it refuses.
    """
    config, recorded = run.plan.config, run.plan.recorded
    already_audited = partial(reconcile_already_audited, config, store=run.store, say=run.reporter.say)
    if recorded and run.retried:
        check_model_files(replace(run.plan, recorded={}))
    shards, known = run.plan.shards, recorded_parameters(run.store)
    parameters = partial(find_parameters, shards=shards, store=run.store, recorded=known)
    run.work = build_stages(config, shards, run.device, already_audited, recorded, parameters)
    for line in refused_parameters(run.work.models):
        run.reporter.say(line)
    for key in recorded:
        run.reporter.say(recorded_model(getattr(config, key).shown))


@step(requires="work", provides="place_in_ledger")
def check_place_in_ledger(run: Scoring) -> None:
    """Check that the ledger of the schedule has a place for this scan.

    After the earlier scans are read; before the manifest states the configuration of a scan that may be refused.
    """
    if run.plan.config.series is not None:
        check_ledger(run.plan.config)


@step(requires="machine store", provides="each")
def choose_shard_map(run: Scoring) -> None:
    """Choose what reads the files of all shards: threads of this process, or tasks of the cluster.

    After the place of the work is known.
    """
    run.each = shard_mapper(run.store, run.machine is None)


@step(requires="store machine types device place_in_ledger", provides="types_on_file")
def record_types(run: Scoring) -> None:
    """File the types, and warn if the flags of this machine are not those for which they were decided.

    After all checks that can refuse the run; before the manifest, which states why the type of the model was chosen.
    """
    note_arithmetic(run.store, run.types)
    of_cpu = run.machine is not None and not run.device.gpus and run.types.types
    if of_cpu and (line := flags_differ(run.types.flags)):
        run.reporter.say(f"warning: this machine: {line}")


@step(requires="store work each types_on_file", provides="manifest")
def reconcile_inputs(run: Scoring) -> None:
    """Compare plan and fingerprints with what is there, number the rows, and write the manifest.

    After the types are on file. Refuses a directory of another model, of other inputs or of other settings; whatever
    follows may take its files for those of this plan.
    """
    heartbeat.phase("counting rows and checking what is there")
    work, fingerprints = run.work, {stage.name: stage.fingerprint for stage in run.work.stages}
    allocation = allocation_record(work.parts, work.keys)
    run.plan = reconcile(run.plan, fingerprints, run.store, allocation, run.each, work.models)


@step(requires="store device manifest", provides="device_on_file")
def record_device(run: Scoring) -> None:
    """File the device, with which the run is resumed.

    After the inputs are reconciled: the device is that of the existing files only if their settings are.
    """
    note_device(run.store, run.device)


@step(requires="store work manifest", provides="retried_withdrawn")
def withdraw_retried(run: Scoring) -> None:
    """Withdraw the receipts of shards whose documents are tried again.

    After the inputs are reconciled, so that the receipts are of this plan.
    """
    if run.retried and (count := withdraw_refused(run.work.stages, run.plan.shards, run.store, run.retried)):
        run.reporter.say(f"documents of {count} shards are tried again: {', '.join(run.retried)}")


@step(requires="store work each manifest retried_withdrawn", provides="files_intact")
def withdraw_damaged_files(run: Scoring) -> None:
    """Withdraw the receipts of shards whose files are missing or changed.

    After the retried ones, whose files are not read. What has a receipt afterwards need not be done again.
    """
    for line in withdraw_damaged(run.work.stages, run.plan.shards, run.store, run.each):
        run.reporter.say(line)


@step(requires="store files_intact", provides="waiting status")
def open_status(run: Scoring) -> None:
    """Find what is to be scored, and begin status.json.

    After all withdrawals, which make work.
    """
    run.waiting = bool(pending(run.plan, SCORING, run.store))
    heartbeat.phase("opening the models")
    run.status = StatusFile(run.store, Counts(len(run.plan.shards)))


@step(requires="status", provides="errors_recorded")
def record_errors(run: Scoring) -> None:
    """Record every error from here on in status.json, with what it means for the run.

    After status.json is begun. An error before it leaves the status of an earlier command as it was.
    """
    run.until_end.enter_context(_faults_noted(run.status))


@step(requires="waiting errors_recorded", provides="models_there")
def check_models(run: Scoring) -> None:
    """Check that the files of the models are there, if documents are to be scored.

    After the work is known: a finished run needs no model.
    """
    if run.plan.recorded and run.waiting:
        check_model_files(replace(run.plan, recorded={}))


@step(requires="machine early lock store checks status models_there", provides="models driver")
def make_driver(run: Scoring) -> None:
    """Gather what the stages share: the run directory, the workers, their models, and the checks to look at.

    After lock, status and checks, at which a stage looks while it waits for its workers.
    """
    here = run.machine
    run.models = run.early or (None if here is None else SharedModels(alone=here.workers == 1))
    run.driver = Driver(run.store, run.lock, run.status, run.reporter, here, run.models, run.checks)


# --- the work


@step(requires="work driver", provides="jobs")
def find_missing_adapters(run: Scoring) -> None:
    """Find the adapters that are missing, and remove changed ones.

    After errors are recorded: a changed adapter with which documents were scored ends the run.
    """
    run.jobs = find_trainings(run.driver, run.plan.config, run.work)


@step(requires="work driver jobs checks device_on_file", provides="stages_before")
def finish_before_scoring(run: Scoring) -> None:
    """Train the missing adapters and finish the stages that scoring reads, at the same time where there is room.

    After the checks of the documents have ended: a training takes long, and is not begun for a corpus to be refused.
    """
    before = run.work.stages[:-1]
    if run.jobs or before:
        run.checks.wait()
    finish_work_before_scoring(run.driver, run.jobs, before, run.plan)


@step(requires="work driver stages_before", provides="all_scored")
def score_documents(run: Scoring) -> None:
    """Score the documents of all shards without a receipt.

    After the stages and adapters that it reads. The checks of a large corpus may go on meanwhile.
    """
    finish_stage(run.driver, run.work.stages[-1], run.plan)


@step(requires="checks all_scored", provides="documents_checked")
def wait_for_checks(run: Scoring) -> None:
    """Wait for the checks of the documents, and print what they found.

    After scoring, and before any result is read.
    """
    run.checks.wait()


@step(requires="store work each waiting documents_checked", provides="inputs_unchanged")
def recheck_inputs(run: Scoring) -> None:
    """Check that no input was changed while documents were read: the shards would be of two corpora.

    After all reading of inputs; a run without work has read none.
    """
    if run.waiting:
        check_inputs_since(run.plan, run.work.stages, run.store, run.each)


@step(requires="store inputs_unchanged", provides="scored")
def read_all_scores(run: Scoring) -> None:
    """Remove the remains of killed writers, and read the receipts of all scores.

    After every shard has a receipt.
    """
    run.store.remove_temporaries()
    heartbeat.phase("reading the scores")
    run.scored = read_scored(run.store, run.plan.shards, run.plan.config.near_copies)


@step(requires="store scored manifest", provides="gradient_on_file")
def record_gradient(run: Scoring) -> None:
    """Add the parameters of the gradient norm to the manifest; only the loaded model states them.

    After the scores are read, whose receipts hold them.
    """
    note_gradient(run.store, run.scored)


@step(requires="scored gradient_on_file", provides="within_budget")
def check_error_budget(run: Scoring) -> None:
    """Refuse to select if more documents are in quarantine than the configuration allows.

    The last check: nothing is answered unless all of them passed.
    """
    check_budget(run.plan.config, run.scored)


@step(requires="machine store models driver within_budget", provides="reread")
def open_token_reader(run: Scoring) -> None:
    """Prepare to read selected documents again, for the tokens of the report.

    After the models are opened, which it uses again.
    """
    resources = run.plan.config.resources
    run.reread = token_reader(run.store, resources, run.machine, run.models, run.reporter.say, run.driver.check)


STEPS = ordered_steps(
    [
        announce_work,
        decide_types_here,
        open_model_early,
        lock_run,
        begin_document_checks,
        settle_types,
        forget_kept_files,
        choose_device,
        plan_work,
        check_place_in_ledger,
        choose_shard_map,
        record_types,
        reconcile_inputs,
        record_device,
        withdraw_retried,
        withdraw_damaged_files,
        open_status,
        record_errors,
        check_models,
        make_driver,
        find_missing_adapters,
        finish_before_scoring,
        score_documents,
        wait_for_checks,
        recheck_inputs,
        read_all_scores,
        record_gradient,
        check_error_budget,
        open_token_reader,
    ]
)
"""All steps of a driver; docs/architecture.md prints them."""


@contextmanager
def scoring(
    plan: Plan, reporter: Reporter, retried: Collection[str] = ()
) -> Iterator[tuple[Scored, StatusFile, ShardMap, Reread]]:
    """Score the missing documents of every role: carry out `STEPS`. The run is locked until the block ends.

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
    with ExitStack() as until_end:
        run = Scoring(plan, plan.config, reporter, retried, until_end)
        for one in STEPS:
            one.work(run)
        yield run.scored, run.status, run.each, run.reread


@contextmanager
def _faults_noted(status: StatusFile) -> Iterator[None]:
    """Record errors of the block in status.json."""
    try:
        yield
    except BaseException as error:
        left = instead_of_exit(error)
        status.end(*final_state(left))
        if left is error:
            raise
        raise left from None
