"""The answers of nodes: of every node of a cluster, side by side, each within its time; or of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cluster.checks import NodeReport
from cluster.first_batch import first_batch
from cluster.inspection import CHECKS, Inspection, Inspector, Measurement, make_check
from pipeline.audit.machine import ActorShape, Node, places_on, usable_cores
from pipeline.config.models import EndpointConfig
from ray_jobs.actors import task_environment
from ray_jobs.cluster import NO_ANSWER, alive_nodes, answer_of, ask_nodes, pinned, versions_here

ROUNDS = 5
"""Of asking a node for its time: the quickest counts."""

CALLS = 16
"""Of an inspector at a time."""

ALONE = "storage"
"""Measured when nothing else is."""

UnderWay = dict[str, dict[str, Any]]  # node -> check -> reference


def answers_of_cluster(
    inspection: Inspection, shape: ActorShape | None, seconds: float, batch_seconds: float, every: bool
) -> list[NodeReport]:
    """What the nodes of the cluster that this process is connected to answer.

    Args:
        inspection: of all nodes.
        shape: of an actor; None where no node holds one, and so no first batch is scored.
        seconds: that a node has for its checks.
        batch_seconds: that a first batch has.
        every: whether every node scores one, and not one of each kind.
    """
    import ray

    nodes = alive_nodes()
    answers: dict[str, dict[str, Measurement]] = {name: {} for name in nodes}
    for name, versions in ask_nodes(versions_here, nodes, seconds).items():
        answers[name]["versions"] = _answer(versions)
    awake = [name for name, given in answers.items() if not given["versions"].problem]
    kind = ray.remote(num_cpus=0, max_concurrency=CALLS, max_restarts=0)(Inspector)
    inspectors = {
        name: kind.options(scheduling_strategy=pinned(nodes[name])).remote(inspection, name) for name in awake
    }
    for name, answer in _gathered({n: {"clock": i.now.remote()} for n, i in inspectors.items()}, seconds).items():
        answers[name]["clock"] = answer["clock"]
    inspectors = {name: inspector for name, inspector in inspectors.items() if not answers[name]["clock"].problem}
    for name, inspector in inspectors.items():
        answers[name]["clock"] = _clock(inspector, seconds)
    for checks in ([check for check in CHECKS if check != ALONE], [ALONE]):
        under_way = {name: {check: i.measure.remote(check) for check in checks} for name, i in inspectors.items()}
        for name, given in _gathered(under_way, seconds).items():
            answers[name] |= given
    if shape is not None and not isinstance(inspection.config.model, EndpointConfig):
        batches = _first_batches(
            inspection, shape, {name: nodes[name] for name in inspectors}, answers, batch_seconds, every
        )
        for name, answer in batches.items():
            answers[name]["first batch"] = answer
    _gathered({name: {"": inspector.clean.remote()} for name, inspector in inspectors.items()}, seconds)
    return [_report(name, nodes[name]["Resources"], answers[name]) for name in nodes]


def _report(name: str, resources: Mapping[str, float], answers: Mapping[str, Measurement]) -> NodeReport:
    return NodeReport(
        name, resources.get("CPU", 0.0), resources.get("GPU", 0.0), resources.get("object_store_memory", 0.0), answers
    )


def _gathered(under_way: UnderWay, seconds: float) -> dict[str, dict[str, Measurement]]:
    """The answers to what is under way, when all are there or the time is up."""
    import ray

    references = [reference for checks in under_way.values() for reference in checks.values()]
    if references:
        ray.wait(references, num_returns=len(references), timeout=seconds)
    return {
        name: {check: _answer(answer_of(reference, seconds)) for check, reference in checks.items()}
        for name, checks in under_way.items()
    }


def _answer(value: Any) -> Measurement:
    """What a node gave as an answer: a line in its place says why there is none."""
    if isinstance(value, Measurement):
        return value
    if isinstance(value, str):
        return Measurement({}, value)
    return Measurement(dict(value) if isinstance(value, Mapping) else {})


def _clock(inspector: Any, seconds: float) -> Measurement:
    """How far the clock of a node is before that of this machine, and within what, by the quickest round trip."""
    import ray

    rounds = []
    for _ in range(ROUNDS):
        before, begin = time.time(), time.perf_counter()
        try:
            there = ray.get(inspector.now.remote(), timeout=seconds)
        except Exception as error:  # it has answered before
            return Measurement({}, f"no more answer: {type(error).__name__}")
        trip = time.perf_counter() - begin
        rounds.append((trip, there - before - trip / 2))
    trip, offset = min(rounds)
    return Measurement({"offset": offset, "within": trip / 2})


def _first_batches(
    inspection: Inspection,
    shape: ActorShape,
    nodes: Mapping[str, Mapping[str, Any]],
    answers: Mapping[str, Mapping[str, Measurement]],
    seconds: float,
    every: bool,
) -> dict[str, Measurement]:
    """A first batch on every node that holds an actor, or on one of each kind, whose name the others then give."""
    import ray

    first: dict[Any, str] = {}
    like: dict[str, str] = {}
    for name, node in nodes.items():
        resources = node["Resources"]
        if places_on(Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0)), shape):
            cards = [card["name"] for card in answers[name]["gpus"].facts.get("cards", ())]
            kind = (name,) if every else (*cards, resources.get("GPU", 0.0), str(answers[name]["versions"].facts))
            like[name] = first.setdefault(kind, name)
    environment = task_environment(inspection.config.resources, shape.gpus)
    task = ray.remote(num_cpus=shape.cpus, num_gpus=shape.gpus, max_retries=0, **environment)(first_batch)
    under_way = {
        name: {"": task.options(scheduling_strategy=pinned(nodes[name])).remote(inspection, shape.gpus, shape.cpus)}
        for name in first.values()
    }
    given = {name: answer[""] for name, answer in _gathered(under_way, seconds).items()}
    return {name: given[name] if name == other else _as_on(other, given) for name, other in like.items()}


def _as_on(other: str, given: Mapping[str, Measurement]) -> Measurement:
    problem = given[other].problem
    return Measurement({}, f"not tried, as {other} is of the same kind") if problem else Measurement({"like": other})


def answers_of_machine(
    inspection: Inspection, shape: ActorShape | None, seconds: float, batch_seconds: float
) -> NodeReport:
    """What this machine answers; arguments as of `answers_of_cluster`."""
    answers = {"versions": Measurement(dict(versions_here()))}
    for check in CHECKS:
        answers[check] = _within(lambda check=check: make_check(check, inspection, "here"), seconds)  # type: ignore[misc]
    if shape is not None and not isinstance(inspection.config.model, EndpointConfig):
        answers["first batch"] = _within(lambda: first_batch(inspection, shape.gpus, shape.cpus), batch_seconds)
    return NodeReport("here", float(usable_cores()), float(torch.cuda.device_count()), 0.0, answers)


def _within(work: Callable[[], Measurement], seconds: float) -> Measurement:
    """What a check answers in its time; a thread that hangs does not hold up the end of the process."""
    answers: list[Measurement] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else Measurement({}, f"{NO_ANSWER} in {seconds:g} s")
