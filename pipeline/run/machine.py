"""The place of an audit, in threads of this process or on a cluster, and the number of actors that nodes hold."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError
from pipeline.run.plan import Plan

LOCAL_TOKENS = {"cpu": 5e6, "cuda": 2e8}
"""Maximum of tokens over all passes for local work: some hours of a small model on a CPU, of a larger one on a GPU."""

LOCAL_WORKERS = 8
"""Maximum of threads in one interpreter; more of them gain little, so large work uses a cluster."""

GPU_UNITS = 10_000
"""Resolution of Ray for a fraction of a GPU: ten-thousandths."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """The resources that a command can use on its own machine."""

    workers: int  # concurrent batches
    gpus: float
    threads: int  # CPU threads per batch


@dataclass(frozen=True, slots=True)
class Node:
    """The resources of a machine of a cluster."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class ActorShape:
    """The resources of its node that an actor uses."""

    gpus: float  # 0, a share of one GPU, or whole GPUs
    cpus: int


def runs_locally(plan: Plan, ray_address: bool, gpus: int) -> bool:
    """Whether the command does the work on its own machine, without Ray (docs/cluster.md).

    Args:
        plan: plan of the run.
        ray_address: whether a cluster is named, or one is connected already.
        gpus: number of GPUs of this machine.

    Raises:
        UserError: `cluster: local` with settings that require a cluster.
    """
    resources = plan.config.resources
    several = resources.finetune_workers > 1 or resources.deepspeed is not None
    if resources.cluster == "local" and several:
        key = "finetune_workers" if resources.finetune_workers > 1 else "deepspeed"
        raise UserError(f"resources.{key} is {getattr(resources, key)}, which needs resources.cluster: ray")
    if resources.cluster != "auto":
        return resources.cluster == "local"
    if not plan.passes():  # no model is used
        return True
    if ray_address or several or gpus > 1:
        return False
    passes = sum(1 + entry.get("paraphrases", 0) + entry.get("draws", 0) for entry in plan.passes())
    if passes * sum(plan.estimated_tokens().values()) <= LOCAL_TOKENS["cuda" if gpus else "cpu"]:
        return True
    of_cpus = not gpus and resources.gpus_per_actor in ("auto", 0)
    return of_cpus and local_machine(resources, gpus).workers <= LOCAL_WORKERS


def may_need_cluster(resources: ResourcesConfig, plan: Plan | None = None) -> bool:
    """Whether a cluster may do the work, before the import of anything that counts GPUs; True where that is not known.

    Args:
        resources: resources of the audit or trial.
        plan: plan of the audit, if it has been made.

    Raises:
        UserError: the errors of `runs_locally`.
    """
    if plan is None:
        return resources.cluster != "local"
    named = bool(os.environ.get("RAY_ADDRESS"))  # an existing GPU may be unusable
    return not all(runs_locally(plan, named, gpus) for gpus in {0, min(2, len(_gpu_files()))})


def _gpu_files() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


def local_machine(resources: ResourcesConfig, gpus: int) -> LocalMachine:
    """The resources of this machine for stages: one worker with a GPU, otherwise one per cpus_per_actor cores.

    Args:
        resources: resources of the audit.
        gpus: number of GPUs of this machine.

    Raises:
        UserError: more GPUs or CPUs per actor than this machine has.
    """
    here = machine_node(gpus)
    shape = actor_shape(resources, [here])
    most = 1 if shape.gpus else places_on(here, shape)
    return LocalMachine(min(most, resources.actors_between(most, most)[1]), shape.gpus, shape.cpus)


def machine_node(gpus: int) -> Node:
    """The resources of this machine, as the only node of a cluster."""
    return Node(float(usable_cores()), float(gpus))


def usable_cores() -> int:
    """The number of CPUs of this process, by its affinity and the limits of its container."""
    from joblib import cpu_count

    return int(cpu_count())


def actor_shape(resources: ResourcesConfig, nodes: Sequence[Node]) -> ActorShape:
    """The resources of an actor: GPUs as configured, or one where the cluster has any.

    A fraction is rounded down to the resolution of Ray, so that six actors at 0.16667 fit on a GPU.

    Args:
        resources: resources of the audit.
        nodes: nodes of the cluster.

    Raises:
        UserError: no node has enough resources for an actor; the message names the setting and the nearest node.
    """
    wanted = resources.gpus_per_actor
    if wanted == "auto":
        gpus = 1.0 if any(node.gpus >= 1 for node in nodes) else 0.0
    else:
        gpus = int(wanted * GPU_UNITS + 1e-6) / GPU_UNITS
    shape = ActorShape(gpus, resources.cpus_per_actor)
    if any(places_on(node, shape) for node in nodes):
        return shape
    largest = max(nodes, default=Node(0), key=lambda node: (min(node.gpus, gpus), node.cpus, node.gpus))
    too_large = f"gpus_per_actor is {gpus:g}"
    if gpus <= largest.gpus:
        too_large = f"cpus_per_actor is {shape.cpus}" + (f" with {gpus:g} GPUs" if gpus else "")
    where = "this machine" if len(nodes) == 1 else largest_node(len(nodes))
    raise UserError(f"resources.{too_large}, {where} has {largest.gpus:g} GPUs and {largest.cpus:g} CPUs")


def places_on(node: Node, shape: ActorShape) -> int:
    """The number of actors that fit on a node: a fraction is on one GPU, several GPUs on one node."""
    by_cpus = int(node.cpus // shape.cpus)
    if not shape.gpus:
        return by_cpus
    if shape.gpus < 1:
        return min(by_cpus, int(node.gpus) * (GPU_UNITS // round(shape.gpus * GPU_UNITS)))
    return min(by_cpus, int(node.gpus // shape.gpus))


def places(nodes: Sequence[Node], shape: ActorShape) -> int:
    """The number of actors that fit on all nodes."""
    return sum(places_on(node, shape) for node in nodes)


def places_beside(nodes: Sequence[Node], shape: ActorShape, trainers: int) -> int:
    """The number of actors that fit next to the training workers, which have a whole GPU each if actors have any.

    Training workers are assumed to fill one node after the other. Ray may spread them: actors that then do not fit wait
    until a training ends.

    Args:
        nodes: nodes of the cluster.
        shape: resources of an actor, with as many CPUs as a training worker.
        trainers: number of training workers.
    """
    trainer, rest = ActorShape(1.0 if shape.gpus else 0.0, shape.cpus), []
    for node in nodes:
        here = min(trainers, places_on(node, trainer))
        trainers -= here
        rest.append(Node(node.cpus - here * trainer.cpus, node.gpus - here * trainer.gpus))
    return places(rest, shape)


def copies_on_a_node(resources: ResourcesConfig, nodes: Sequence[Node], shape: ActorShape) -> int:
    """Copies of the weights in the memory of one node: one per actor on CPUs; on GPUs each actor has its own memory."""
    held = 1 if shape.gpus else max(places_on(node, shape) for node in nodes)
    return min(held, resources.actors_between(held, held)[1])


def largest_node(nodes: int) -> str:
    """The node of a cluster that a message is about."""
    return f"the largest of {nodes} nodes"
