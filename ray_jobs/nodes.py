"""The nodes of the connected cluster: what they hold, and whether nodes that were large enough are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pipeline.config.audit import ResourcesConfig
from pipeline.errors import IncompleteError, UserError
from pipeline.run.machine import ActorShape, Node, actor_shape, places
from ray_jobs.cluster import NODES_BACK, alive_nodes, connection, is_private

NO_PLACE_SECONDS = {False: 120.0, True: 600.0}
"""Time without a node that holds a worker after which a run ends, by whether one was ready; new nodes may come."""

PLACES_SECONDS = 10.0
"""Interval between two counts of these places."""

_nodes: dict[str, Node] = {}  # by id; all nodes that the connected cluster has had since this process joined it
_connection = 0


def cluster_nodes() -> list[Node]:
    """The resources of the nodes of the connected cluster."""
    global _connection
    alive = {
        node["NodeID"]: Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in alive_nodes().values()
    }
    if _connection != connection():
        _nodes.clear()
        _connection = connection()
    _nodes.update(alive)
    return list(alive.values())


Sized = TypeVar("Sized")


def sized_by_cluster(size: Callable[[Sequence[Node]], Sized], nodes: Sequence[Node] | None = None) -> Sized:
    """What the nodes of the connected cluster hold.

    Args:
        size: returns it, or raises a user error where the nodes are too small.
        nodes: nodes from `cluster_nodes`; None: the current ones.

    Raises:
        UserError: the errors of `size`, where no node is lost that would be large enough.
        IncompleteError: the nodes that are large enough are lost, or no node has a CPU.
    """
    current = cluster_nodes() if nodes is None else nodes
    try:
        return size(current)
    except UserError as error:
        lost = len(_nodes) - len(current)
        if lost > 0 and _is_enough(size, [*_nodes.values()]):
            are = "is" if lost == 1 else "are"
            raise IncompleteError(
                f"{lost} of the {len(_nodes)} nodes of the cluster {are} lost, and {error}: {NODES_BACK}"
            ) from None
        if not any(node.cpus for node in current):
            raise IncompleteError(
                f"the cluster has {len(current)} node{'s' * (len(current) != 1)} and no CPU for an actor: {NODES_BACK}"
            ) from None
        raise


def _is_enough(size: Callable[[Sequence[Node]], Any], nodes: Sequence[Node]) -> bool:
    try:
        size(nodes)
    except UserError:
        return False
    return True


def cluster_shape(resources: ResourcesConfig, nodes: Sequence[Node] | None = None) -> ActorShape:
    """The resources of an actor on the connected cluster; with `auto` a GPU also where the nodes with GPUs are lost.

    Args:
        resources: resources of the audit.
        nodes: nodes from `cluster_nodes`; None: the current ones.

    Raises:
        UserError: an actor is larger than any node.
        IncompleteError: the nodes that are large enough are lost, or no node has a CPU.
    """
    current = cluster_nodes() if nodes is None else nodes
    if resources.gpus_per_actor == "auto" and any(node.gpus >= 1 for node in [*current, *_nodes.values()]):
        resources = resources.model_copy(update={"gpus_per_actor": 1.0})
    return sized_by_cluster(partial(actor_shape, resources), current)


class Room:
    """The time without nodes that hold the workers of an actor pool or of a training, for which Ray waits for ever."""

    def __init__(self, shape: ActorShape, workers: int = 1) -> None:
        """Begin.

        Args:
            shape: resources of a worker.
            workers: workers that must be held together.
        """
        self.shape = shape
        self.workers = workers
        self.ready = False  # whether a worker was
        self.counted = self.held = time.monotonic()  # time of the last count, and of the last one that was enough

    def check(self, ready: bool = False) -> None:
        """Count the places, at intervals.

        Args:
            ready: whether a worker has just loaded its models.

        Raises:
            IncompleteError: the nodes have not held the workers for too long.
        """
        self.ready = self.ready or ready
        now = time.monotonic()
        if is_private() or now - self.counted < PLACES_SECONDS:
            return
        self.counted = now
        if places(cluster_nodes(), self.shape) >= self.workers:
            self.held = now
        elif now - self.held > NO_PLACE_SECONDS[self.ready]:
            what = "an actor" if self.workers == 1 else f"{self.workers} workers"
            before = "" if self.ready else ", before any was ready"
            raise IncompleteError(
                f"the nodes of the cluster have not held {what} for {now - self.held:.0f} s{before}: {NODES_BACK}"
            )
