"""What a run begins side by side: checks of the documents, the model, a cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.audit.before_scoring import check_before_scoring
from pipeline.audit.checking import check_apart, check_aside
from pipeline.audit.machine import LocalMachine, local_machine, runs_locally
from pipeline.audit.places import actor_shape
from pipeline.audit.plan import Plan, pending
from pipeline.audit.precheck import Effort, Precheck, check_documents
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig
from pipeline.detectors.registry import adapters_of, parse_detectors
from pipeline.models.libraries import import_package, uncollected
from pipeline.models.load import open_model, open_picture_model
from pipeline.models.sharing import SharedModels
from pipeline.stages.score import STAGE
from pipeline.store.files import Store
from ray_jobs.connection import check_cluster, cluster_is_named, connect
from ray_jobs.node_versions import check_node_versions
from ray_jobs.nodes import cluster_nodes, nodes_ahead
from ray_jobs.progress import Reporter

WAITING_TOKENS = 1 << 21
"""Of all documents: no more are checked before scoring begins with them, whatever the checks take."""


@dataclass(frozen=True, slots=True)
class Checks:
    """The checks of the documents, under way in another process or done."""

    under_way: Future[None]
    lines: list[str]  # to be said: while a cluster starts, nobody sees what is written to standard error
    reporter: Reporter

    def look(self) -> None:
        """Stop the run if the checks have ended and say so.

        Raises:
            UserError: as `check_before_scoring`.
        """
        if self.under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checks, and say what they found.

        Raises:
            UserError: as `check_before_scoring`.
        """
        try:
            self.under_way.result()
        finally:
            while self.lines:
                self.reporter.say(self.lines.pop(0))


def check_meanwhile(
    plan: Plan,
    store: Store,
    reporter: Reporter,
    machine: LocalMachine | None,
    early: SharedModels | None,
) -> Checks:
    """Check the documents; where there is work for a cluster, start it meanwhile.

    Shards of a large corpus are scored beside the checks, also on this machine if the model is opened early.

    Raises:
        UserError: as `check_before_scoring`, `connect` and `check_node_versions`, or an actor is larger than any node.
    """
    checks = Checks(Future(), [], reporter)
    large = sum(plan.estimated_tokens().values()) > WAITING_TOKENS
    here = machine is not None and not (large and early is not None)
    if here or not pending(plan, STAGE, store):
        check = _announced(check_documents if early is None else check_apart, reporter)
        check_before_scoring(plan, store, reporter.say, check)
        checks.under_way.set_result(None)
        return checks
    aside = _announced(check_aside, reporter)
    _begin(partial(check_before_scoring, plan, store, checks.lines.append, aside), checks.under_way)
    if machine is not None:
        return checks
    imports: Future[None] = Future()
    import_package()
    _begin(partial(_import_for_cluster, plan.config), imports)
    connect()
    check_node_versions()
    actor_shape(plan.config.resources, cluster_nodes())
    imports.exception()  # whoever imports it again says what is wrong
    if not large:
        checks.wait()
    return checks


def _announced(check: Callable[[Plan, Effort], Precheck], reporter: Reporter) -> Callable[[Plan, Effort], Precheck]:
    """A check that states that it starts: it may take longer than anybody waits without a word."""

    def announced(plan: Plan, effort: Effort) -> Precheck:
        reporter.say("checking the documents before scoring")
        return check(plan, effort)

    return announced


def _begin(work: Callable[[], None], result: Future[None]) -> None:
    """Do something in a thread that does not hold up the end of the process."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, name="seenset-beginning", daemon=True).start()


def _import_for_cluster(config: AuditConfig) -> None:
    """Import what the driver needs next, which takes seconds, while a cluster starts."""
    with uncollected():
        if isinstance(config.model, ModelConfig):
            from transformers.models.auto import configuration_auto, modeling_auto  # noqa: F401
        import ray.data  # noqa: F401


def begin_model(plan: Plan, store: Store, machine: LocalMachine | None) -> SharedModels | None:
    """Open the audited model while the documents are checked, where nothing but scoring in this process needs it."""
    if machine is None or machine.workers == 1 or not isinstance(plan.config.model, ModelConfig):
        return None
    # A training beside it would compute in the dtype that torch has by default while a model is built.
    training = adapters_of(parse_detectors(plan.config.detectors))
    if training or plan.config.paraphraser is not None or not pending(plan, STAGE, store):
        return None
    models = SharedModels()
    opener = open_picture_model if plan.config.corpus.has_pictures else open_model
    models.begin(opener, plan.config.model, machine.gpus)
    return models


def machine_of(plan: Plan) -> LocalMachine | None:
    """What this process may use of its machine; None where a cluster does the work.

    Raises:
        UserError: as `runs_locally` and `local_machine`, or no cluster answers.
    """
    gpus = torch.cuda.device_count()
    if not runs_locally(plan, cluster_is_named(), gpus):
        check_cluster()
        return None
    return local_machine(plan.config.resources, gpus)


def check_actors(plan: Plan) -> None:
    """Check before a run that what does its work holds one actor; nothing where the cluster cannot be asked.

    Raises:
        UserError: an actor is larger than any node, or than this machine, or nodes have programs of other versions.
    """
    gpus = torch.cuda.device_count()
    if runs_locally(plan, cluster_is_named(), gpus):
        local_machine(plan.config.resources, gpus)
    elif nodes := nodes_ahead(gpus):
        actor_shape(plan.config.resources, nodes)
        if os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
            connect()
            check_node_versions()
