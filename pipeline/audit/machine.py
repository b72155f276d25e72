"""Where an audit runs: in threads of this process or on a cluster, and how many actors the nodes hold."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.audit.plan import Plan
from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError
from pipeline.report.wording.starter import largest_of

LOCAL_TOKENS = {"cpu": 5e6, "cuda": 2e8}
"""Tokens over all passes that count as small: some hours of a small model on a CPU, of a larger one on a GPU."""

LOCAL_WORKERS = 8
"""Threads that share one interpreter; more of them gain little, so that large work goes to a cluster."""

GPU_UNITS = 10_000
"""Parts of a GPU that Ray tells apart: a fraction counts in ten-thousandths."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What a command can use of the machine that it runs on."""

    workers: int  # batches at a time
    gpus: float
    threads: int  # of the CPU, for a batch


@dataclass(frozen=True, slots=True)
class Node:
    """What a machine of a cluster offers."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class ActorShape:
    """What an actor takes of its node."""

    gpus: float  # 0, a share of one GPU, or whole GPUs
    cpus: int


def runs_locally(plan: Plan, ray_address: bool, gpus: int) -> bool:
    """Whether the command does the work on its own machine, without Ray (docs/cluster.md).

    Args:
        plan: of the run.
        ray_address: whether a cluster is named, or one is connected already.
        gpus: of this machine.

    Raises:
        UserError: `cluster: local` with settings that only a cluster can follow.
    """
    resources = plan.config.resources
    several = resources.finetune_workers > 1 or resources.deepspeed is not None
    if resources.cluster == "local" and several:
        key = "finetune_workers" if resources.finetune_workers > 1 else "deepspeed"
        raise UserError(f"resources.{key} is {getattr(resources, key)}, which needs resources.cluster: ray")
    if resources.cluster != "auto":
        return resources.cluster == "local"
    if not plan.passes():  # no model is asked
        return True
    if ray_address or several or gpus > 1:
        return False
    passes = sum(1 + entry.get("paraphrases", 0) + entry.get("draws", 0) for entry in plan.passes())
    if passes * sum(plan.estimated_tokens().values()) <= LOCAL_TOKENS["cuda" if gpus else "cpu"]:
        return True
    of_cpus = not gpus and resources.gpus_per_actor in ("auto", 0)
    return of_cpus and local_machine(resources, gpus).workers <= LOCAL_WORKERS


def may_need_cluster(resources: ResourcesConfig, plan: Plan | None = None) -> bool:
    """Whether a cluster may do the work, before anything that counts GPUs is imported; True where that is not known.

    Args:
        resources: of the audit, or of a trial.
        plan: of the audit, if it has been made.

    Raises:
        UserError: as `runs_locally`.
    """
    if plan is None:
        return resources.cluster != "local"
    named = bool(os.environ.get("RAY_ADDRESS"))  # a GPU that is there may be of no use
    return not all(runs_locally(plan, named, gpus) for gpus in {0, min(2, len(_gpu_files()))})


def _gpu_files() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


def local_machine(resources: ResourcesConfig, gpus: int) -> LocalMachine:
    """What the stages may use of this machine: one worker with a GPU, otherwise one for every cpus_per_actor cores.

    Args:
        resources: of the audit.
        gpus: of this machine.

    Raises:
        UserError: more GPUs or CPUs an actor than this machine has.
    """
    here = machine_node(gpus)
    shape = actor_shape(resources, [here])
    most = 1 if shape.gpus else places_on(here, shape)
    return LocalMachine(min(most, resources.actors_between(most, most)[1]), shape.gpus, shape.cpus)


def machine_node(gpus: int) -> Node:
    """What this machine offers, as the only node of a cluster."""
    return Node(float(usable_cores()), float(gpus))


def usable_cores() -> int:
    """The CPUs that this process may run on, by its affinity and the limits of its container."""
    from joblib import cpu_count

    return int(cpu_count())


def actor_shape(resources: ResourcesConfig, nodes: Sequence[Node]) -> ActorShape:
    """What an actor takes: GPUs as configured, or one where the cluster has any.

    A share is rounded down to what Ray tells apart, so that six actors at 0.16667 share a GPU.

    Args:
        resources: of the audit.
        nodes: of the cluster.

    Raises:
        UserError: no node holds such an actor; names the setting, and the node that comes nearest.
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
        too_large = f"cpus_per_actor is {shape.cpus}" + (f" beside {gpus:g} GPUs" if gpus else "")
    where = "this machine" if len(nodes) == 1 else largest_of(len(nodes))
    raise UserError(f"resources.{too_large}, {where} has {largest.gpus:g} GPUs and {largest.cpus:g} CPUs")


def places_on(node: Node, shape: ActorShape) -> int:
    """How many actors fit on a node: a share lies on one GPU, several GPUs on one node."""
    by_cpus = int(node.cpus // shape.cpus)
    if not shape.gpus:
        return by_cpus
    if shape.gpus < 1:
        return min(by_cpus, int(node.gpus) * (GPU_UNITS // round(shape.gpus * GPU_UNITS)))
    return min(by_cpus, int(node.gpus // shape.gpus))


def places(nodes: Sequence[Node], shape: ActorShape) -> int:
    """How many actors fit on all nodes."""
    return sum(places_on(node, shape) for node in nodes)


def places_beside(nodes: Sequence[Node], shape: ActorShape, trainers: int) -> int:
    """How many actors fit beside the workers of trainings, each with a whole GPU, if actors have any.

    The workers are thought to fill one node after the other. Ray may spread them: the actors that then find no place
    wait until a training ends.

    Args:
        nodes: of the cluster.
        shape: of an actor, with as many CPUs as a worker of a training.
        trainers: workers that are training.
    """
    trainer, rest = ActorShape(1.0 if shape.gpus else 0.0, shape.cpus), []
    for node in nodes:
        here = min(trainers, places_on(node, trainer))
        trainers -= here
        rest.append(Node(node.cpus - here * trainer.cpus, node.gpus - here * trainer.gpus))
    return places(rest, shape)


def copies_on_a_node(resources: ResourcesConfig, nodes: Sequence[Node], shape: ActorShape) -> int:
    """Copies of the weights in the memory of one node: one an actor on CPUs; a GPU's memory holds an actor's own."""
    held = 1 if shape.gpus else max(places_on(node, shape) for node in nodes)
    return min(held, resources.actors_between(held, held)[1])
