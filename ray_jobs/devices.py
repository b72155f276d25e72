"""The device of a run: decided when it begins, written down, and held to by whoever goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from pipeline.audit.arithmetic import Arithmetic, Deciding, decide_types, earlier_arithmetic
from pipeline.audit.budgets import with_memory
from pipeline.audit.machine import LocalMachine, local_machine, runs_locally
from pipeline.audit.places import ActorShape, Node, actor_shape, places_on
from pipeline.audit.plan import Plan
from pipeline.audit.records import opened
from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.errors import DamagedError, UserError, one_line
from pipeline.models.arithmetic import processor_here
from pipeline.models.devices import CPU, Device, gpus_in_sight
from pipeline.store.files import Store
from pipeline.store.receipts import DIGEST, sealed
from ray_jobs.connection import REASON_CHARACTERS, cluster_is_named, connect, is_private
from ray_jobs.nodes import cluster_nodes, nodes_ahead

DEVICE_FILE = "device.json"
_RECORDED = {"gpus", "memory", "name"}
ASK_SECONDS = 120.0

_log = logging.getLogger(__name__)


def device_of_run(resources: ResourcesConfig, store: Store, machine: LocalMachine | None, waiting: bool) -> Device:
    """The device that the budgets and the fingerprint of a run follow from.

    The memory that a run began with stays its own, so that it may go on with other cards or more actors a GPU.

    Args:
        resources: of the audit.
        store: the run directory.
        machine: where the work is done in this process; None: on a cluster.
        waiting: whether there is work; if not, nobody is asked.

    Raises:
        UserError: the cluster's GPUs do not answer, or are of several models where one is needed.
    """
    earlier = device_on_file(store, resources)
    if earlier is not None and not waiting:
        return earlier
    if machine is not None:
        gpus = machine.gpus
    else:
        connect()
        gpus = actor_shape(resources, cluster_nodes()).gpus
    device = Device(gpus, deterministic=resources.deterministic) if gpus else CPU
    if not gpus:
        return device
    if earlier is not None and earlier.gpus:
        device = replace(device, gpus=earlier.gpus, memory=earlier.memory)
    if resources.deterministic or (not device.memory and resources.gpu_memory == "auto"):
        memory, name = gpus_in_sight() if machine is not None else gpus_of_cluster(gpus, resources.deterministic)
        name = name if resources.deterministic else ""
        device = replace(device, memory=device.memory or memory, name=name)
    return with_memory(device, resources)


def arithmetic_of_run(
    config: AuditConfig, store: Store, machine: LocalMachine | None, say: Callable[[str], None]
) -> Arithmetic:
    """The types of the models and trainings of a run: those that its directory states, else decided now.

    Args:
        config: of the audit.
        store: the run directory.
        machine: where the work is done in this process; None: on a cluster, of which one worker node is asked.
        say: prints a line.

    Raises:
        UserError: as `decide_types`, or the cluster does not answer.
    """
    ask = partial(_deciding_node, config.resources) if machine is None else partial(_deciding_here, machine)
    return decide_types(config, earlier_arithmetic(store, say), ask, say)


def arithmetic_ahead(plan: Plan, say: Callable[[str], None]) -> Arithmetic:
    """The types that a run of this plan would decide; no cluster is started for it.

    Args:
        plan: of the audit.
        say: prints a line.

    Raises:
        UserError: as `arithmetic_of_run`.
    """
    gpus, named = torch.cuda.device_count(), cluster_is_named()
    store, resources = Store(plan.config.run), plan.config.resources
    if runs_locally(plan, named, gpus):
        return arithmetic_of_run(plan.config, store, local_machine(resources, gpus), say)
    if named and os.environ.get("RAY_ADDRESS") != "local":
        return arithmetic_of_run(plan.config, store, None, say)
    nodes = nodes_ahead(gpus)
    shape = actor_shape(resources, nodes)
    ask = partial(_on_this_machine, shape, _copies(resources, shape, nodes))
    return decide_types(plan.config, earlier_arithmetic(store, say), ask, say)


def _deciding_here(machine: LocalMachine) -> Deciding:
    return Deciding(processor_here(machine.gpus), 1)


def _on_this_machine(shape: ActorShape, copies: int) -> Deciding:
    return Deciding(processor_here(shape.gpus), copies)


def _copies(resources: ResourcesConfig, shape: ActorShape, nodes: Sequence[Node]) -> int:
    """Copies of the weights in the memory of one node: one an actor on CPUs; a GPU's memory holds an actor's own."""
    held = 1 if shape.gpus else max(places_on(node, shape) for node in nodes)
    return min(held, resources.actors_between(held, held)[1])


def _deciding_node(resources: ResourcesConfig) -> Deciding:
    """The processor of a node that holds an actor: of this one, or asked by one task."""
    import ray

    connect()
    nodes = cluster_nodes()
    shape = actor_shape(resources, nodes)
    copies = _copies(resources, shape, nodes)
    if is_private() and not shape.gpus:
        return _on_this_machine(shape, copies)
    task: Any = ray.remote(num_cpus=shape.cpus, num_gpus=shape.gpus, max_retries=1)(processor_here)
    hint = "state the type with dtype, such as dtype: float32, to start without asking"
    try:
        return Deciding(ray.get(task.remote(shape.gpus), timeout=ASK_SECONDS), copies)
    except ray.exceptions.GetTimeoutError:
        raise UserError(f"no node stated its processor within {ASK_SECONDS:g} s; {hint}") from None
    except ray.exceptions.RayError as error:
        reason = one_line(str(getattr(error, "cause", error)))[:REASON_CHARACTERS]
        raise UserError(f"a node cannot state its processor ({reason}); {hint}") from None


def device_on_file(store: Store, resources: ResourcesConfig) -> Device | None:
    """The device that a run was begun on, with what the configuration states now; None where nothing is written."""
    record = _record_on_file(store)
    if record is None:
        return None
    device = Device(float(record["gpus"]), int(record["memory"]), str(record["name"]))
    return with_memory(replace(device, deterministic=resources.deterministic and device.gpus > 0), resources)


def note_device(store: Store, device: Device) -> None:
    """Write down the device of a run. The run's lock must be held, and its settings be those of what is there."""
    record: dict[str, Any] = {name: value for name, value in asdict(device).items() if name != "deterministic"}
    if _record_on_file(store) != record:
        store.write_json(DEVICE_FILE, sealed(record))


def _record_on_file(store: Store) -> dict[str, Any] | None:
    """What `note_device` wrote; None where nothing is, or a damaged file, which is logged: the device is asked for."""
    try:
        record = store.read_json(DEVICE_FILE)
        if not record:
            return None
        where = f"{store.url}/{DEVICE_FILE}"
        if not isinstance(record, dict) or record.keys() - {DIGEST} != _RECORDED:
            raise DamagedError(f"{where} is damaged: its keys are not those of a device")
        return opened(record, where) if DIGEST in record else record  # version 0.9.0 wrote no digest
    except DamagedError as error:
        _log.warning("%s; it is written again", error)
        return None


def gpus_of_cluster(gpus: float, same: bool) -> tuple[int, str]:
    """The least memory of a GPU of the cluster, in nominal bytes, and the model of one: each node is asked.

    Args:
        gpus: of an actor.
        same: whether all must be of one model.

    Raises:
        UserError: a node does not answer, sees no GPU, or has another model.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0.0) >= min(1.0, gpus)]
    ask = ray.remote(num_gpus=min(1.0, gpus), num_cpus=0, max_retries=1)(_card)
    answers = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    hint = "set resources.gpu_memory to the memory of the smallest GPU to begin without asking"
    try:
        cards = ray.get(answers, timeout=ASK_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise UserError(f"{len(nodes)} nodes with GPUs did not all answer in {ASK_SECONDS:g} s; {hint}") from None
    except ray.exceptions.RayError as error:
        reason = one_line(str(getattr(error, "cause", error)))[:REASON_CHARACTERS]
        raise UserError(f"a node with GPUs cannot tell their memory ({reason}); {hint}") from None
    blind = [(node["NodeManagerAddress"], reason) for node, (_, _, reason) in zip(nodes, cards, strict=True) if reason]
    if blind:
        (address, reason), others = blind[0], len(blind) - 1
        more = f", and {others} more" if others else ""
        raise UserError(f"GPUs of the node at {address}{more} cannot be used: {reason}")
    names = sorted({name for _, name, _ in cards})
    if same and len(names) > 1:
        raise UserError(
            f"resources.deterministic needs GPUs of one model, the cluster has {', '.join(names)}: "
            "leave the others out, or set it to false"
        )
    return min(memory for memory, _, _ in cards), names[0]


def _card() -> tuple[int, str, str]:
    """What a node answers: memory and model of its GPUs, or why it cannot tell; an error would be a trace a node."""
    try:
        return *gpus_in_sight(), ""
    except Exception as error:  # of many kinds: a driver's, torch's
        return 0, "", one_line(str(error)) or type(error).__name__
