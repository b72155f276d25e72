"""The device of a run: decided when it begins, written down, and held to by whoever goes on."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from pipeline.audit.budgets import with_memory
from pipeline.audit.machine import LocalMachine
from pipeline.audit.places import actor_shape
from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError, one_line
from pipeline.models.devices import CPU, Device, gpus_in_sight
from pipeline.store.files import Store
from ray_jobs.connection import REASON_CHARACTERS, connect
from ray_jobs.nodes import cluster_nodes

DEVICE_FILE = "device.json"
ASK_SECONDS = 120.0


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


def device_on_file(store: Store, resources: ResourcesConfig) -> Device | None:
    """The device that a run was begun on, with what the configuration states now; None where nothing is written."""
    record = store.read_json(DEVICE_FILE)
    if not record:
        return None
    device = Device(float(record["gpus"]), int(record["memory"]), str(record["name"]))
    return with_memory(replace(device, deterministic=resources.deterministic and device.gpus > 0), resources)


def note_device(store: Store, device: Device) -> None:
    """Write down the device of a run. The run's lock must be held, and its settings be those of what is there."""
    record: dict[str, Any] = {name: value for name, value in asdict(device).items() if name != "deterministic"}
    if store.read_json(DEVICE_FILE) != record:
        store.write_json(DEVICE_FILE, record)


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
