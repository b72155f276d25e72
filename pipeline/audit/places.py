"""How many actors the nodes of a cluster hold: they are counted node by node and GPU by GPU, as Ray places them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError

GPU_UNITS = 10_000
"""Parts of a GPU that Ray tells apart: a fraction counts in ten-thousandths."""


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


def actor_shape(resources: ResourcesConfig, nodes: Sequence[Node]) -> ActorShape:
    """What an actor takes: GPUs as configured, or one where the cluster has any.

    A share is rounded down to what Ray tells apart, so that six actors at 0.16667 share a GPU.

    Args:
        resources: of the audit.
        nodes: of the cluster.

    Raises:
        UserError: no node holds such an actor.
    """
    wanted = resources.gpus_per_actor
    if wanted == "auto":
        gpus = 1.0 if any(node.gpus >= 1 for node in nodes) else 0.0
    else:
        gpus = int(wanted * GPU_UNITS + 1e-6) / GPU_UNITS
    shape = ActorShape(gpus, resources.cpus_per_actor)
    if not any(places_on(node, shape) for node in nodes):
        raise UserError(_too_large(shape, nodes))
    return shape


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
    """How many actors fit beside the workers of trainings, each with as many CPUs as an actor and at most one GPU.

    Where an actor takes several GPUs, the workers are thought to fill one node after the other. Ray may spread them:
    the actors that then find no place wait until a training ends.

    Args:
        nodes: of the cluster.
        shape: of an actor.
        trainers: workers that are training.
    """
    if shape.gpus <= 1:
        return max(0, places(nodes, shape) - trainers)
    rest = []
    for node in nodes:
        here = min(trainers, places_on(node, ActorShape(1.0, shape.cpus)))
        trainers -= here
        rest.append(Node(node.cpus - here * shape.cpus, node.gpus - here))
    return places(rest, shape)


def _too_large(shape: ActorShape, nodes: Sequence[Node]) -> str:
    """One line that names the setting, and the node that comes nearest."""
    largest = max(nodes, default=Node(0), key=lambda node: (min(node.gpus, shape.gpus), node.cpus, node.gpus))
    key = "gpus_per_actor" if shape.gpus > largest.gpus else "cpus_per_actor"
    value = shape.gpus if key == "gpus_per_actor" else shape.cpus
    where = "this machine" if len(nodes) == 1 else f"the largest of {len(nodes)} nodes"
    also = "" if key == "gpus_per_actor" or not shape.gpus else f" beside {shape.gpus:g} GPUs"
    return f"resources.{key} is {value:g}{also}, {where} has {largest.gpus:g} GPUs and {largest.cpus:g} CPUs"
