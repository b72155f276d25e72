"""`python -m cluster.preflight audit.yaml`: check every node of the cluster, in parallel, before a run.

Without RAY_ADDRESS it checks this machine. Exit 0 where nothing is red, 2 where something is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

from cluster.checks import REMEDIES, Expectation, Finding, NodeReport, judge_nodes
from cluster.inspection import (
    CHECKS,
    DRIVER_FILE,
    Answer,
    Inspection,
    first_batch,
    inspect_node,
    measured,
    measured_within,
    remove_traces,
)
from pipeline.audit.description import load_config
from pipeline.audit.machine import ActorShape, Node, actor_shape, machine_node, places, places_on, usable_cores
from pipeline.audit.manifest import read_manifest
from pipeline.audit.plan import Plan, check_model_files, describe_model, make_plan
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.detectors.plugins import imported
from pipeline.errors import ExitCode, UserError, one_line
from pipeline.stages.base import model_shape
from pipeline.store.files import Store
from ray_jobs import terminal
from ray_jobs.actors import task_environment
from ray_jobs.cluster import alive_nodes, ask_nodes, cluster_warning, connect, reason_of, versions_here
from ray_jobs.commands import AsJson, ConfigPath, Overrides
from ray_jobs.nodes import cluster_nodes

CLUSTER = "cluster"
"""Replaces a node in checks of all nodes."""

DRIVER = "this machine"
COLOURS = {"good": "green", "note": "yellow", "red": "red"}
MOST_COLUMNS = 4
"""Maximum number of nodes whose lines are shown side by side in full; with more, the table shows states only."""

SHOWN = ("plugins", "model", "input")
"""Checks that this machine also runs, as the reference for the nodes."""

ROUNDS = 5
"""Number of clock requests to a node; the fastest one counts."""

Nodes = Mapping[str, Mapping[str, Any]]
"""Nodes as returned by `alive_nodes`."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def preflight(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    every: Annotated[
        bool, typer.Option("--all", help="Score a first batch on every node, not one of each kind.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a node has for its checks.")] = 120.0,
    batch_timeout: Annotated[
        float, typer.Option("--batch-timeout", min=1, help="Seconds that a first batch has, with loading the model.")
    ] = 900.0,
) -> None:
    """Check every node of a cluster for an audit: a table of nodes and checks, and the remedy for each red line."""
    audit = load_config(config, set_ or ())
    planned = make_plan(audit)
    check_model_files(audit)
    lines = inspect_cluster(planned, timeout, batch_timeout, every)
    red = [line for line in lines if line.state == "red"]
    if json_:
        terminal.print_json({"ok": not red, "lines": [_published(line) for line in lines]})
    else:
        _print(lines)
    if red:
        raise typer.Exit(int(ExitCode.USER_ERROR))


def inspect_cluster(plan: Plan, seconds: float, batch_seconds: float, every: bool) -> list[Finding]:
    """All lines: of the cluster, of this machine where it fails, and of every node.

    Args:
        plan: plan of the audit.
        seconds: time limit of the checks of a node.
        batch_seconds: time limit of a first batch.
        every: whether every node scores a first batch, not only one of each kind.

    Raises:
        UserError: no cluster answers at RAY_ADDRESS.
    """
    config = plan.config
    shard = next((shard for shard in plan.shards if shard.role == "audit"), None)
    folder, plugins = f"preflight-{uuid.uuid4().hex[:12]}", imported(config.import_)
    inspection = Inspection(config, plan.inputs, shard, plugins, folder, seconds, batch_seconds, every=every)
    driver: dict[str, Answer] = {check: measured(partial(CHECKS[check], inspection)) for check in SHOWN}
    driver["versions"] = dict(versions_here())
    lines = [*_run_line(config), *_endpoint_lines(config)]
    lines += [
        Finding(DRIVER, check, "red", answer, "correct it here first")
        for check, answer in driver.items()
        if isinstance(answer, str)
    ]
    on_cluster = os.environ.get("RAY_ADDRESS", "") not in ("", "local") and config.resources.cluster != "local"
    with _without_traces(config.run, inspection.folder):
        written = measured(lambda: {"": Store(config.run).write(f"{inspection.folder}/{DRIVER_FILE}", b"")})
        if isinstance(written, str):  # the nodes continue and report what they see
            lines.append(Finding(DRIVER, "run directory", "red", written, REMEDIES["run directory"]))
        if on_cluster:
            connect()
            lines.append(_token_line(config))
        shape, held, problems = _places(config, on_cluster)
        lines += problems
        tried = shape if held and isinstance(config.model, ModelConfig) else None
        inspection = replace(inspection, shape=tried)
        nodes = _answers_of_cluster(inspection) if on_cluster else [answers_of_machine(inspection)]
    # On this machine all threads share one set of weights.
    most = config.resources.actors_between(held, held)[1] if on_cluster else 1
    models = [model for model in config.models if isinstance(model, ModelConfig)]
    shapes = [model_shape(model) for model in models]
    expected = Expectation(driver, shape, most, shapes, config.max_tokens, config.resources.finetune_workers)
    return [*lines, *judge_nodes(nodes, expected)]


def _answers_of_cluster(inspection: Inspection) -> list[NodeReport]:
    """The answers of the nodes of the connected cluster."""
    nodes, seconds = alive_nodes(), inspection.seconds
    versions = ask_nodes(versions_here, nodes, seconds)
    answers: dict[str, dict[str, Answer]] = {name: {"versions": versions[name]} for name in nodes}
    awake = {name: node for name, node in nodes.items() if not isinstance(versions[name], str)}
    for name, there in ask_nodes(time.time, awake, seconds).items():
        answers[name]["clock"] = there if isinstance(there, str) else _clock(name, awake, seconds)
    awake = {name: node for name, node in awake.items() if not isinstance(answers[name]["clock"], str)}
    # The checks have one time limit, the storage check another one after them, and the answer takes some more time.
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
    """The offset of a node's clock from that of this machine, and its uncertainty, by the fastest round trip."""
    rounds = []
    for _ in range(ROUNDS):
        before, begin = time.time(), time.perf_counter()
        there = ask_nodes(time.time, {name: nodes[name]}, seconds)[name]
        if isinstance(there, str):  # it has answered an earlier request
            return there
        trip = time.perf_counter() - begin
        rounds.append((trip, there - before - trip / 2))
    trip, offset = min(rounds)
    return {"offset": offset, "within": trip / 2}


def _first_batches(
    inspection: Inspection, shape: ActorShape, nodes: Nodes, answers: Mapping[str, Mapping[str, Answer]]
) -> dict[str, Answer]:
    """A first batch on every node with an actor, or on one of each kind, whose name the others report."""
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
    """The answers of this machine."""
    answers: dict[str, Answer] = {"versions": dict(versions_here()), **inspect_node(inspection)}
    if inspection.shape is not None:
        answers |= measured_within({"first batch": partial(first_batch, inspection)}, inspection.batch_seconds)
    return NodeReport("here", float(usable_cores()), float(torch.cuda.device_count()), 0.0, answers)


def _run_line(config: AuditConfig) -> list[Finding]:
    """Whether the state of the run directory can be resumed."""
    remedy = "start a new run directory, or use that version on all nodes"
    try:
        manifest = read_manifest(Store(config.run))
    except Exception as error:  # an error of the files or the store; the nodes report it as well
        remedy = remedy if isinstance(error, UserError) else "see the reason"
        return [Finding(CLUSTER, "manifest", "red", reason_of(error), remedy)]
    if manifest is None:
        return []
    before, here = manifest.versions.get("seenset"), versions_here().get("seenset")
    if before != here:
        return [Finding(CLUSTER, "manifest", "red", f"the run was started by seenset {before}, here is {here}", remedy)]
    return [Finding(CLUSTER, "manifest", "good", f"the run was started by seenset {before}")]


def _endpoint_lines(config: AuditConfig) -> list[Finding]:
    """Whether the endpoints answer; only this machine sends requests."""
    lines = []
    for model in config.models:
        if isinstance(model, EndpointConfig):
            try:
                describe_model(model)
                lines.append(Finding(DRIVER, "endpoint", "good", f"{model.endpoint} answers"))
            except UserError as error:
                lines.append(
                    Finding(DRIVER, "endpoint", "red", str(error), "start the endpoint, or correct model.endpoint")
                )
    return lines


def _token_line(config: AuditConfig) -> Finding:
    """Whether the cluster accepts connections without a token."""
    address = os.environ["RAY_ADDRESS"]
    if address.startswith("ray://"):
        return Finding(CLUSTER, "token", "note", f"{address} is a Ray client's: it cannot be tried from here", "")
    if cluster_warning(config.resources) is None:
        return Finding(CLUSTER, "token", "good", "it requires a token")
    value = "it requires no token: any client of its ports can run code as its user"
    return Finding(
        CLUSTER, "token", "red", value, "start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on all nodes"
    )


def _places(config: AuditConfig, on_cluster: bool) -> tuple[ActorShape, int, list[Finding]]:
    """The resources of an actor, the number of actors on the cluster, and a line; for this machine only if none fit."""
    nodes = cluster_nodes() if on_cluster else [machine_node(torch.cuda.device_count())]
    try:
        shape = actor_shape(config.resources, nodes)
    except UserError as error:
        wanted = config.resources.gpus_per_actor
        shape = ActorShape(0.0 if wanted == "auto" else wanted, config.resources.cpus_per_actor)
        remedy = "add nodes that hold such an actor, or change resources"
        remedy = remedy if on_cluster else "set RAY_ADDRESS, or change resources"
        return shape, 0, [Finding(CLUSTER, "places", "red", str(error), remedy)]
    held = places(nodes, shape)
    value = f"{held} actors of {shape.gpus:g} GPUs and {shape.cpus} CPUs on {len(nodes)} nodes"
    return shape, held, [Finding(CLUSTER, "places", "good", value)] if on_cluster else []


@contextlib.contextmanager
def _without_traces(run: str, folder: str) -> Any:
    """Remove the files of the checks: their folder, and the folders that were made for it."""
    store = Store(run)
    made = []
    if store.local:
        path = store.root
        while path and not os.path.exists(path):
            made.append(path)
            path = os.path.dirname(path)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # a store that cannot be written to is reported in a line
            store.remove_folder(folder)
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _published(line: Finding) -> dict[str, str]:
    """A line for `--json`, where its remedy is `mend`, the name of 0.9.0."""
    return {("mend" if name == "remedy" else name): value for name, value in asdict(line).items()}


def _print(lines: Sequence[Finding]) -> None:
    """Print the table, and below it each line with a remedy."""
    screen = terminal.console()
    names = list(dict.fromkeys(line.node for line in lines))
    checks = list(dict.fromkeys(line.check for line in lines))
    cells = {(line.node, line.check): line for line in lines}
    if len(names) <= MOST_COLUMNS:
        table = Table("check", *names)
        for check in checks:
            table.add_row(check, *(_cell(cells.get((name, check)), True) for name in names))
    else:
        table = Table("node", *checks)
        for name in names:
            table.add_row(name, *(_cell(cells.get((name, check)), False) for check in checks))
    screen.print(table)
    for state in ("red", "note"):
        for line in (line for line in lines if line.state == state):
            remedy = f" -> {line.remedy}" if line.remedy else ""
            screen.print(f"{state}: {line.node}, {line.check}: {line.value}{remedy}", markup=False, soft_wrap=True)
    red = sum(line.state == "red" for line in lines)
    screen.print(f"{red} of {len(lines)} lines red" if red else f"none of {len(lines)} lines red", highlight=False)


def _cell(line: Finding | None, whole: bool) -> Text:
    """A line in the table: the measurement, or only its state."""
    if line is None:
        return Text("")
    mark = "" if line.state == "good" else line.state.upper()
    text = f"{mark} {line.value}".strip() if whole else mark or "good"
    return Text(text, style=COLOURS[line.state])


def check_command(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every user error is one line and an exit code."""
    terminal.show_all_characters()
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except UserError as error:
        print(f"preflight: {one_line(str(error))}", file=sys.stderr)
        code = int(error.exit_code)
    except TyperException as error:
        print(f"preflight: {one_line(str(getattr(error, 'format_message', error.__str__)()))}", file=sys.stderr)
        code = int(ExitCode.USER_ERROR)
    sys.exit(code or 0)


if __name__ == "__main__":
    check_command()
