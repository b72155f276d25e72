"""Nodes whose programs are of other versions than the driver's would score otherwise: they are named and refused."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from pipeline.errors import UserError, one_line
from ray_jobs import versions
from ray_jobs.versions import version_differences, versions_here

ANSWER_SECONDS = 30.0
NAMED_NODES = 3
NO_ANSWER = "no answer"
"""How the line of a node or a check begins that has had its time."""


def check_versions(driver: Mapping[str, str]) -> None:
    """Check in a worker that its programs are of the versions of the driver's.

    Raises:
        UserError: they are not.
    """
    if others := version_differences(driver, versions_here()):
        raise UserError(_refusal({socket.gethostname(): others}))


def check_node_versions() -> None:
    """Check that the other nodes of the cluster that this process is connected to have its versions.

    A node that does not answer in time is not refused: a run does without it, or its actors look for themselves.

    Raises:
        UserError: some have others.
    """
    import ray

    mine = ray.get_runtime_context().get_node_id()
    others_alive = {name: node for name, node in alive_nodes().items() if node["NodeID"] != mine}
    answers = ask_versions(others_alive, ANSWER_SECONDS)
    here = versions_here()
    lines = {name: version_differences(here, answer) for name, answer in answers.items() if isinstance(answer, dict)}
    if others := {name: differing for name, differing in lines.items() if differing}:
        raise UserError(_refusal(others))


def ask_versions(nodes: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, dict[str, str] | str]:
    """The versions of nodes by their names, or in one line why one does not tell them.

    Args:
        nodes: from `alive_nodes`.
        seconds: that a node may take.
    """
    if not nodes:
        return {}
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(versions)
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(versions_here)
        pending = {name: task.options(scheduling_strategy=pinned(node)).remote() for name, node in nodes.items()}
    finally:
        cloudpickle.unregister_pickle_by_value(versions)
    ray.wait(list(pending.values()), num_returns=len(pending), timeout=seconds)
    return {name: answer_of(reference, seconds) for name, reference in pending.items()}


def alive_nodes() -> dict[str, Mapping[str, Any]]:
    """The nodes of the cluster by their names: the address, and where several share one also how their ids begin."""
    import ray

    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    addresses = [node["NodeManagerAddress"] for node in nodes]
    return {
        address if addresses.count(address) == 1 else f"{address} ({node['NodeID'][:6]})": node
        for address, node in zip(addresses, nodes, strict=True)
    }


def pinned(node: Mapping[str, Any]) -> Any:
    """The scheduling of a task or an actor that runs on this node or nowhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def answer_of(reference: Any, seconds: float) -> Any:
    """What a task gave, or in one line why it gave nothing; it has had its time."""
    import ray

    try:
        return ray.get(reference, timeout=0.1)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=False)
        return f"{NO_ANSWER} in {seconds:g} s"
    except Exception as error:  # of many kinds: Ray's, or what the task raised
        cause = getattr(error, "cause", None) or error
        return one_line(f"{type(cause).__name__}: {cause}")[:300]


def _refusal(others: Mapping[str, list[str]]) -> str:
    """One line that names the nodes and what they have."""
    listed = "; ".join(f"{name} has {', '.join(lines)}" for name, lines in list(others.items())[:NAMED_NODES])
    more = f"; and {len(others) - NAMED_NODES} more" if len(others) > NAMED_NODES else ""
    return (
        f"{len(others)} node{'s have' if len(others) > 1 else ' has'} other versions, and would score otherwise: "
        f"{listed}{more}; install the same on all nodes (python -m cluster.preflight shows all)"
    )
