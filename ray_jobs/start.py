"""The start of a run: where its work is done, the checks of its documents, the types of its models and its device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.models import ModelConfig
from pipeline.detectors.registry import needed_adapters, parse_detectors
from pipeline.models.devices import CPU, Device, gpus_in_sight
from pipeline.models.load import open_model, open_picture_model
from pipeline.models.sharing import SharedModels
from pipeline.models.weight_dtypes import processor_here
from pipeline.plan.preflight import RUN, begin_checks, check_before_scoring
from pipeline.plan.stage_plan import device_on_file, with_memory
from pipeline.results.document_checks import PreflightChecks, stored_preflight
from pipeline.run.dtypes import Arithmetic, WorkerFacts, decide_types, earlier_arithmetic
from pipeline.run.machine import (
    LocalMachine,
    Node,
    copies_on_a_node,
    local_machine,
    machine_node,
    runs_locally,
)
from pipeline.run.plan import Plan, pending
from pipeline.stages import SCORING
from pipeline.store.files import Store
from ray_jobs.cluster import (
    check_node_versions,
    check_ray_address,
    cluster_is_named,
    connect,
    gpus_of_cluster,
    is_connected,
    is_private,
    processor_of_cluster,
)
from ray_jobs.nodes import cluster_nodes, cluster_shape
from ray_jobs.progress import Reporter

WAITING_TOKENS = 1 << 21
"""Maximum number of documents for which scoring waits for the checks."""


def this_machine(plan: Plan) -> LocalMachine | None:
    """The resources of this machine for this process; None where a cluster does the work.

    Raises:
        UserError: the errors of `runs_locally` and `local_machine`, or no cluster answers.
    """
    gpus = torch.cuda.device_count()
    if not runs_locally(plan, cluster_is_named(), gpus):
        check_ray_address()
        return None
    return local_machine(plan.config.resources, gpus)


@dataclass(slots=True)
class Checks:
    """The checks of the documents of a run, made in a thread or when `wait` is called."""

    plan: Plan
    store: Store
    reporter: Reporter
    begun: Future[PreflightChecks] | None  # None: they are made in `wait`
    waiting: bool = True

    def look(self) -> None:
        """Stop the run if the checks have ended with an error.

        Raises:
            UserError: the errors of `check_before_scoring`.
        """
        if self.begun is None or self.begun.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checks, and print their results.

        Raises:
            UserError: the errors of `check_before_scoring`.
        """
        if self.waiting:
            self.waiting = False
            check_before_scoring(self.plan, self.store, self.reporter.say, self.begun)


def start_checks(
    plan: Plan, store: Store, reporter: Reporter, machine: LocalMachine | None, early: SharedModels | None
) -> Checks:
    """Check the documents of a run while a cluster starts or a model is opened early.

    For a large corpus the checks continue while shards are scored; otherwise this waits for them.

    Args:
        plan: plan of the run.
        store: the run directory, locked.
        reporter: prints lines.
        machine: where the work is done in this process; None: on a cluster.
        early: the model that is being opened, from `begin_model`.

    Raises:
        UserError: the errors of `check_before_scoring`, `connect`, `cluster_shape` and `check_node_versions`.
    """
    concurrent = bool(pending(plan, SCORING, store)) and (machine is None or early is not None)
    separate = concurrent and stored_preflight(store, plan.shards, plan.config.seed) is None
    checks = Checks(plan, store, reporter, begin_checks(plan, RUN) if separate else None)
    if concurrent and machine is None:
        connect()
        cluster_shape(plan.config.resources)
        check_node_versions()
    if not concurrent or sum(plan.estimated_tokens().values()) <= WAITING_TOKENS:
        checks.wait()
    return checks


def begin_model(plan: Plan, store: Store, machine: LocalMachine | None) -> SharedModels | None:
    """Open the audited model while the documents are checked, if only scoring in this process needs it."""
    if machine is None or machine.workers == 1 or not isinstance(plan.config.model, ModelConfig):
        return None
    # A simultaneous training would use the default dtype that torch has while a model is built.
    training = needed_adapters(parse_detectors(plan.config.detectors))
    if training or plan.config.paraphraser is not None or not pending(plan, SCORING, store):
        return None
    models = SharedModels()
    opener = open_picture_model if plan.config.corpus.has_pictures else open_model
    models.begin(opener, plan.config.model, machine.gpus)
    return models


def types_of_run(
    config: AuditConfig, store: Store, machine: LocalMachine | None, say: Callable[[str], None]
) -> Arithmetic:
    """The types of the models and trainings of a run: the recorded ones, otherwise decided now.

    Args:
        config: the audit's configuration.
        store: the run directory.
        machine: where the work is done in this process; None: on a cluster, where one worker node is queried.
        say: prints a line.

    Raises:
        UserError: the errors of `decide_types`, or the cluster does not answer.
    """

    def ask() -> WorkerFacts:
        if machine is not None:
            return WorkerFacts(processor_here(machine.gpus), 1)
        nodes = _nodes_of_run()
        shape = cluster_shape(config.resources, nodes)
        # A cluster of CPUs that this process starts, or would start, has the processor of this machine.
        here = not is_connected() or (is_private() and not shape.gpus)
        processor = processor_here(shape.gpus) if here else processor_of_cluster(shape)
        return WorkerFacts(processor, copies_on_a_node(config.resources, nodes, shape))

    return decide_types(config, earlier_arithmetic(store, say), ask, say)


def _nodes_of_run() -> list[Node]:
    """The nodes of the named or connected cluster; otherwise this machine, where a cluster would be started."""
    if not cluster_is_named():
        return [machine_node(torch.cuda.device_count())]
    connect()
    return cluster_nodes()


def planned_types(plan: Plan, say: Callable[[str], None]) -> Arithmetic:
    """The types that a run of this plan would decide; existing resources are checked, and no cluster is started.

    Args:
        plan: plan of the audit.
        say: prints a line.

    Raises:
        UserError: the errors of `types_of_run`; an actor is larger than any node or than this machine; nodes have other
            versions of programs.
    """
    config, machine = plan.config, this_machine(plan)
    if machine is None:
        cluster_shape(config.resources, _nodes_of_run())
    if machine is None and is_connected():
        check_node_versions()
    return types_of_run(config, Store(config.run), machine, say)


def device_of_run(resources: ResourcesConfig, store: Store, machine: LocalMachine | None, waiting: bool) -> Device:
    """The device for the budgets and the fingerprint of a run.

    A run keeps the memory that it started with, so that it may resume with other cards or more actors per GPU.

    Args:
        resources: resources of the audit.
        store: the run directory.
        machine: where the work is done in this process; None: on a cluster.
        waiting: whether there is work; if not, no node is queried.

    Raises:
        UserError: the cluster's GPUs do not answer, or are of several models where one is required.
    """
    earlier = device_on_file(store, resources)
    if earlier is not None and not waiting:
        return earlier
    if machine is None:
        connect()
    gpus = cluster_shape(resources).gpus if machine is None else machine.gpus
    if not gpus:
        return CPU
    device = Device(gpus, deterministic=resources.deterministic)
    if earlier is not None and earlier.gpus:
        device = replace(device, gpus=earlier.gpus, memory=earlier.memory)
    if resources.deterministic or (not device.memory and resources.gpu_memory == "auto"):
        memory, name = gpus_in_sight() if machine is not None else gpus_of_cluster(gpus, resources.deterministic)
        device = replace(device, memory=device.memory or memory, name=name if resources.deterministic else "")
    return with_memory(device, resources)
