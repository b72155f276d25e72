"""`python -m cluster.preflight audit.yaml`: check every node of the cluster, in parallel, before a run.

Without RAY_ADDRESS it checks this machine. Exit 0 where nothing is red, 2 where something is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig
from pipeline.config.retired import retired
from pipeline.corpus.documents import read_shard
from pipeline.corpus.shard import Shard
from pipeline.errors import ExitCode, UserError, error_line, one_line
from pipeline.models.checkpoints import Kind
from pipeline.models.load import check_model
from pipeline.plan.description import load_config
from pipeline.run.plan import Plan, check_model_files, make_plan
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from ray_jobs import terminal
from ray_jobs.cluster import (
    NO_ANSWER,
    alive_nodes,
    ask_nodes,
    cluster_is_named,
    connect,
    failure_reason,
    version_differences,
    versions_here,
)
from ray_jobs.commands import AsJson, ConfigPath, Overrides

LEAST_FREE = 1 << 30
"""Bytes that the temporary folder and the cache of the hub of a node need."""

GIB = 1 << 30
VERSIONS = "versions"
DRIVER_FILE = "driver"
"""The file that the machine of the command writes for the nodes to see."""

MOST_COLUMNS = 4
"""Maximum number of nodes whose lines are shown side by side in full; with more, the table shows states only."""

REMEDIES: Mapping[str, str] = {
    VERSIONS: "install the same on all nodes, from the same checkout with constraints.txt",
    "disk": "free space there, or set TMPDIR or HF_HOME to a larger disk",
    "model": "copy the model to that path on every node, or state a hub id or a path on the shared file system",
    "input": "put the documents on a file system that all nodes reach, or on s3:// or gs://",
    "run directory": "set run to a folder on a file system that all nodes reach, or to s3:// or gs://",
}
HUNG = "see what hangs there (a file system, no resources for a process), or give it more time with --timeout"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one node."""

    node: str
    check: str
    outcome: Outcome  # passed or failed, which is a red line
    value: str  # the measurement, or why there is none
    remedy: str = ""  # empty where none is needed


@dataclass(frozen=True, slots=True)
class Inspection:
    """The request to every node."""

    config: AuditConfig
    shards: tuple[Shard, ...]  # the first shard of each role
    folder: str  # folder of this preflight in the run directory
    seconds: float = 120.0  # time limit of the checks of a node


@app.command()
def preflight(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a node has for its checks.")] = 120.0,
) -> None:
    """Check every node of a cluster for an audit: a table of nodes and checks, and the remedy for each red line."""
    planned = make_plan(load_config(config, set_ or ()))
    check_model_files(planned)
    lines = inspect_cluster(planned, timeout)
    red = [line for line in lines if line.outcome == Outcome.FAILED]
    if json_:
        terminal.print_json(
            {"outcome": Outcome.FAILED if red else Outcome.PASSED, "lines": [asdict(line) for line in lines]}
        )
    else:
        _print(lines)
    if red:
        raise typer.Exit(int(ExitCode.USER_ERROR))


def inspect_cluster(plan: Plan, seconds: float) -> list[Finding]:
    """The lines of every node of the cluster at RAY_ADDRESS, or of this machine.

    Args:
        plan: plan of the audit.
        seconds: time limit of the checks of a node.

    Raises:
        UserError: no cluster answers at RAY_ADDRESS.
    """
    config = plan.config
    first = {shard.role: shard for shard in reversed(plan.shards)}
    inspection = Inspection(config, tuple(first.values()), f"preflight-{uuid.uuid4().hex[:12]}", seconds)
    with _without_traces(config.run, inspection.folder):
        try:
            Store(config.run).write(f"{inspection.folder}/{DRIVER_FILE}", b"")
        except Exception as error:  # of the files or the store
            return [_finding("here", "run directory", failure_reason(error), "")]
        if not cluster_is_named() or config.resources.cluster == "local":
            return _findings("here", inspect_node(inspection))
        connect()
        return _findings_of_cluster(inspection)


def _findings_of_cluster(inspection: Inspection) -> list[Finding]:
    """The lines of the nodes of the connected cluster; only nodes with the versions of this machine read anything."""
    nodes, here = alive_nodes(), versions_here()
    lines: dict[str, list[Finding]] = {}
    for name, there in ask_nodes(versions_here, nodes, inspection.seconds).items():
        problem = there if isinstance(there, str) else ", ".join(version_differences(here, there))
        lines[name] = [_finding(name, VERSIONS, problem, f"those of this machine ({here.get('seenset')})")]
    alike = {name: nodes[name] for name, (versions,) in lines.items() if versions.outcome == Outcome.PASSED}
    # A node that does not answer at all has some more time than its checks.
    answers = ask_nodes(partial(inspect_node, inspection), alike, inspection.seconds + 10)
    for name, answer in answers.items():
        lines[name] += _findings(name, dict.fromkeys(CHECKS, (answer, "")) if isinstance(answer, str) else answer)
    return [line for of_node in lines.values() for line in of_node]


def _findings(node: str, answers: Mapping[str, tuple[str, str]]) -> list[Finding]:
    return [_finding(node, check, problem, value) for check, (problem, value) in answers.items()]


def _finding(node: str, check: str, problem: str, value: str) -> Finding:
    if not problem:
        return Finding(node, check, Outcome.PASSED, value)
    remedy = HUNG if problem.startswith(NO_ANSWER) else REMEDIES[check]
    return Finding(node, check, Outcome.FAILED, problem, remedy)


def inspect_node(inspection: Inspection) -> dict[str, tuple[str, str]]:
    """A problem, or "" and a measurement, of each of `CHECKS` on this node.

    The checks run in parallel threads; the thread of a check that exceeds its time limit is abandoned.
    """
    answers: dict[str, tuple[str, str]] = {}

    def answer(check: str) -> None:
        try:
            answers[check] = "", CHECKS[check](inspection)
        except Exception as error:  # only the check fails, not the preflight
            answers[check] = failure_reason(error), ""

    threads = [threading.Thread(target=answer, args=(check,), daemon=True) for check in CHECKS]
    for thread in threads:
        thread.start()
    end = time.monotonic() + inspection.seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {check: answers.get(check, (f"{NO_ANSWER} in {inspection.seconds:g} s", "")) for check in CHECKS}


def _disk(inspection: Inspection) -> str:
    """Free space of the temporary folder, and of the cache of the hub where a model comes from it."""
    places = {"temporary folder": Path(tempfile.gettempdir())}
    if any(not Path(model.path).exists() for model in _models(inspection.config)):
        from huggingface_hub.constants import HF_HUB_CACHE

        places["cache of the hub"] = Path(HF_HUB_CACHE)
    free = {}
    for name, path in places.items():
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        free[f"{name} {path}"] = shutil.disk_usage(there).free
    for name, size in free.items():
        if size < LEAST_FREE:
            raise UserError(f"{size / GIB:.1f} GiB free in the {name}, at least {LEAST_FREE / GIB:g} GiB are needed")
    return ", ".join(f"{size / GIB:,.1f} GiB free in the {name}" for name, size in free.items())


def _models(config: AuditConfig) -> list[ModelConfig]:
    return [model for model in config.models if isinstance(model, ModelConfig)]


def _model(inspection: Inspection) -> str:
    """The configuration and the tokenizer of each model, read without its weights."""
    config = inspection.config
    read = []
    for model in _models(config):
        kind: Kind = "pictures" if config.corpus.has_pictures and model is config.model else "causal"
        facts = check_model(model, "rewriter" if model is config.paraphraser else kind)
        read.append(f"{model.shown} ({facts['architecture']})")
    return ", ".join(read) or "at an endpoint"


def _input(inspection: Inspection) -> str:
    """The first document of each role."""
    for shard in inspection.shards:
        with contextlib.closing(read_shard(shard)) as documents:
            next(documents, None)
    return f"the first document of {', '.join(shard.name for shard in inspection.shards)}"


def _run_directory(inspection: Inspection) -> str:
    """Sees the file of the driver in the run directory, and writes and reads one there."""
    store = Store(inspection.config.run)
    if not store.exists(f"{inspection.folder}/{DRIVER_FILE}"):
        raise UserError(f"{store.url} is another folder there: it does not hold what this machine writes")
    mark = uuid.uuid4().hex
    store.write(f"{inspection.folder}/{mark}", mark.encode())
    if store.read(f"{inspection.folder}/{mark}").decode() != mark:
        raise UserError("what is read is not what was written")
    return "written and read"


CHECKS: Mapping[str, Callable[[Inspection], str]] = {
    "disk": _disk,
    "model": _model,
    "input": _input,
    "run directory": _run_directory,
}
"""The checks of every node, in addition to its versions."""


@contextlib.contextmanager
def _without_traces(run: str, folder: str) -> Iterator[None]:
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
        with contextlib.suppress(Exception):  # a store that cannot be written to is reported
            store.remove_folder(folder)
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _print(lines: Sequence[Finding]) -> None:
    """Print the table, and below it each red line with its remedy."""
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
    red = [line for line in lines if line.outcome == Outcome.FAILED]
    screen.lines(*(f"red: {line.node}, {line.check}: {line.value} -> {line.remedy}" for line in red))
    screen.lines(f"{len(red)} of {len(lines)} lines red" if red else f"none of {len(lines)} lines red")


def _cell(line: Finding | None, whole: bool) -> Text:
    """A line in the table: the measurement, or only its state."""
    if line is None:
        return Text("")
    if line.outcome == Outcome.PASSED:
        return Text(line.value if whole else "good", style="green")
    return Text(f"RED {line.value}" if whole else "RED", style="red")


def check_command(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every user error is one line and an exit code."""
    terminal.show_all_characters()
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except UserError as error:
        print(f"preflight: {error_line(error)}", file=sys.stderr)
        code = int(error.exit_code)
    except TyperException as error:
        message = retired("option", f"preflight {getattr(error, 'option_name', '')}") or str(error.format_message())
        print(f"preflight: {one_line(message)}", file=sys.stderr)
        code = int(ExitCode.USER_ERROR)
    sys.exit(code or 0)


if __name__ == "__main__":
    check_command()
