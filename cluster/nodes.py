"""The answers of nodes: of every node of a cluster, side by side, each within its time; or of this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from cluster.checks import NodeReport
from cluster.inspection import (
    CHECKS,
    Answer,
    Inspection,
    first_batch,
    inspect_node,
    measured_within,
    remove_traces,
)
from pipeline.audit.machine import ActorShape, Node, places_on, usable_cores
from ray_jobs.actors import task_environment
from ray_jobs.cluster import alive_nodes, ask_nodes, versions_here

ROUNDS = 5
"""Of asking a node for its time: the quickest counts."""

Nodes = Mapping[str, Mapping[str, Any]]
"""From `alive_nodes`."""


def answers_of_cluster(inspection: Inspection) -> list[NodeReport]:
    """What the nodes of the cluster that this process is connected to answer."""
    nodes, seconds = alive_nodes(), inspection.seconds
    versions = ask_nodes(versions_here, nodes, seconds)
    answers: dict[str, dict[str, Answer]] = {name: {"versions": versions[name]} for name in nodes}
    awake = {name: node for name, node in nodes.items() if not isinstance(versions[name], str)}
    for name, there in ask_nodes(time.time, awake, seconds).items():
        answers[name]["clock"] = there if isinstance(there, str) else _clock(name, awake, seconds)
    awake = {name: node for name, node in awake.items() if not isinstance(answers[name]["clock"], str)}
    # The checks have their time, the storage has it after them, and to answer takes some more.
    for name, given in ask_nodes(partial(inspect_node, inspection), awake, 2 * seconds + 10).items():
        answers[name] |= dict.fromkeys(CHECKS, given) if isinstance(given, str) else given
    if inspection.shape is not None:
        for name, batch in _first_batches(inspection, inspection.shape, awake, answers).items():
            answers[name]["first batch"] = batch
    ask_nodes(partial(remove_traces, inspection), awake, seconds)
    offered = {name: node["Resources"] for name, node in nodes.items()}
    return [
        NodeReport(name, has.get("CPU", 0.0), has.get("GPU", 0.0), has.get("object_store_memory", 0.0), answers[name])
        for name, has in offered.items()
    ]


def _clock(name: str, nodes: Nodes, seconds: float) -> Answer:
    """How far the clock of a node is before that of this machine, and within what, by the quickest round trip."""
    rounds = []
    for _ in range(ROUNDS):
        before, begin = time.time(), time.perf_counter()
        there = ask_nodes(time.time, {name: nodes[name]}, seconds)[name]
        if isinstance(there, str):  # it has answered before
            return there
        trip = time.perf_counter() - begin
        rounds.append((trip, there - before - trip / 2))
    trip, offset = min(rounds)
    return {"offset": offset, "within": trip / 2}


def _first_batches(
    inspection: Inspection, shape: ActorShape, nodes: Nodes, answers: Mapping[str, Mapping[str, Answer]]
) -> dict[str, Answer]:
    """A first batch on every node that holds an actor, or on one of each kind, whose name the others then give."""
    first: dict[Any, str] = {}
    like: dict[str, str] = {}
    for name, node in nodes.items():
        resources = node["Resources"]
        if places_on(Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0)), shape):
            gpus = answers[name]["gpus"]
            cards = [] if isinstance(gpus, str) else [card["name"] for card in gpus["cards"]]
            kind = (*cards, resources.get("GPU", 0.0), str(answers[name]["versions"]))
            like[name] = first.setdefault(name if inspection.every else kind, name)
    options = {"num_cpus": shape.cpus, "num_gpus": shape.gpus, "max_retries": 0}
    options |= task_environment(inspection.config.resources, shape.gpus)
    chosen = {name: nodes[name] for name in first.values()}
    given = ask_nodes(partial(first_batch, inspection), chosen, inspection.batch_seconds, options)
    failed = {other: f"not tried, as {other} is of the same kind" for other in chosen if isinstance(given[other], str)}
    return {name: given[name] if name == other else failed.get(other, {"like": other}) for name, other in like.items()}


def answers_of_machine(inspection: Inspection) -> NodeReport:
    """What this machine answers."""
    answers: dict[str, Answer] = {"versions": dict(versions_here()), **inspect_node(inspection)}
    if inspection.shape is not None:
        answers |= measured_within({"first batch": partial(first_batch, inspection)}, inspection.batch_seconds)
    return NodeReport("here", float(usable_cores()), float(torch.cuda.device_count()), 0.0, answers)
