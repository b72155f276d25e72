"""The nodes of a cluster: of the one that this process is connected to, or of the one that a run would use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pipeline.audit.places import Node

ANSWER_SECONDS = 5.0


def cluster_nodes() -> list[Node]:
    """The nodes of the cluster that this process is connected to."""
    import ray

    return [_node(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def nodes_ahead(gpus: int) -> list[Node]:
    """The nodes that a run on a cluster would use, without joining them; empty where that cannot be known here.

    Args:
        gpus: of this machine, which is the only node where RAY_ADDRESS names none.
    """
    import ray

    if ray.is_initialized():
        return cluster_nodes()
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        from ray._private.utils import get_num_cpus

        return [Node(float(get_num_cpus()), float(gpus))]
    if address.startswith("ray://"):
        return []
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        client = GcsClient(address=canonicalize_bootstrap_address(address))
        table = client.get_all_node_info(timeout=ANSWER_SECONDS)
    except Exception:  # of many kinds; what is wrong with a cluster is said by whoever connects to it
        return []
    return [_node(entry.resources_total) for entry in table.values() if entry.state == 0]


def _node(resources: Mapping[str, float]) -> Node:
    return Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0))
