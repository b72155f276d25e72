"""A run whose work is large is done by processes of this machine, to the same answers, without Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from finished import run
from made_up import sentence, write_audit, write_jsonl

from pipeline.audit import machine
from pipeline.audit.description import load_config
from pipeline.audit.machine import LocalMachine, begin_scoring_ahead, machine_for, may_need_cluster, runs_locally
from pipeline.audit.plan import Plan, make_plan
from pipeline.detectors import plugins
from pipeline.errors import ExitCode
from ray_jobs import selection

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
LARGE = """
import sys
from pipeline.audit import machine
machine.LOCAL_TOKENS["cpu"], machine.usable_cores = 0, lambda: 2
from ray_jobs import cli
sys.argv = ["seenset", *sys.argv[1:]]
cli.main()
"""


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is large, on a machine of two cores."""
    monkeypatch.setitem(machine.LOCAL_TOKENS, "cpu", 0)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(selection, "MANY_DOCUMENTS", 1)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    for plugin in plugins._loaded.values():
        plugins._forget(plugin)
    plugins._loaded.clear()


def files_of(folder: Path, *parts: str) -> dict[str, bytes]:
    found = {}
    for part in parts:
        for path in sorted((folder / part).rglob("*")):
            if path.is_file() and not path.name.startswith(("history", "digests")):  # which cover the run's name
                name = re.sub(r"-[0-9a-f]{8}(?=\.parquet$)", "", str(path.relative_to(folder)))  # of one attempt
                found[name] = path.read_bytes()
    return found


def plugin_settings(folder: Path) -> dict[str, Any]:
    """A detector and a procedure of a user's file, and a selection by each."""
    code = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.S)
    (folder / "my_detectors.py").write_text("\n\n".join(code))
    return {
        "import": [str(folder / "my_detectors.py")],
        "detectors": ["loss", "min_k", {"log_prob_quantile": {"share": 0.1}}],
        "selections": [
            {"name": "half", "detectors": ["log_prob_quantile(share=0.1)"], "procedure": "bh_half", "alpha": 0.4},
            {"name": "members", "detectors": ["loss"], "procedure": "storey", "alpha": 0.4},
            {"name": "clean", "detectors": ["min_k"], "direction": "clean", "procedure": "bh", "alpha": 0.4},
        ],
        "resources": {"cluster": "auto", "actors": "auto", "shard_bytes": 600},
    }


def test_answers_are_the_same_bytes_whether_threads_or_processes_work(
    tmp_path: Path, tiny_model_folder: Path, request: pytest.FixtureRequest
) -> None:
    path = write_audit(tmp_path, tiny_model_folder, **plugin_settings(tmp_path))
    seen = write_jsonl(tmp_path / "seen.jsonl", [sentence(i) for i in range(2000, 2040)])
    answers = []
    for kind in ("threads", "processes"):
        if kind == "processes":
            request.getfixturevalue("large")
        overrides = [f"corpus.seen.path={seen}", f"run={tmp_path / kind}"]
        assert machine_for(plan_of(path, *overrides), 0).apart == (kind == "processes")
        outcome = run(path, *overrides)
        assert outcome.exit_code == ExitCode.DONE
        assert sum(summary.n_selected for summary in outcome.selections) > 0
        answers.append(files_of(tmp_path / kind, "scores", "selection"))
        assert not [child for child in psutil.Process().children() if "pipeline.stages.child" in str(child.cmdline())]
    assert len(answers[0]) > 12
    assert answers[0].keys() == answers[1].keys()
    assert {name for name in answers[0] if answers[0][name] != answers[1][name]} == set()


@pytest.mark.usefixtures("large")
def test_a_finished_run_begins_no_process(
    make_audit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = make_audit(resources={"cluster": "auto", "actors": "auto"})
    assert run(path).exit_code == ExitCode.DONE
    monkeypatch.setattr("ray_jobs.beginning.Crew", None)
    assert run(path, "selections.0.alpha=0.4").exit_code == ExitCode.DONE


@pytest.mark.usefixtures("large")
def test_processes_begin_ahead_where_it_is_known_that_they_will_score(
    make_audit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(machine, "begin_ahead", lambda *which: begun.append(which))
    path = make_audit(resources={"cluster": "auto", "actors": "auto"})
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere")
    begin_scoring_ahead(plan_of(path))
    monkeypatch.delenv("RAY_ADDRESS")
    begin_scoring_ahead(plan_of(path, "resources.actors=1"))
    with monkeypatch.context() as patched:
        patched.setattr(machine, "_gpu_files", lambda: ["/dev/nvidia0"])
        begin_scoring_ahead(plan_of(path))
    assert not begun
    begin_scoring_ahead(plan_of(path))
    assert begun == [(2, 1)]
    assert run(path).exit_code == ExitCode.DONE
    begin_scoring_ahead(plan_of(path))
    assert begun == [(2, 1)], "nothing is left to score"


def test_an_interrupted_run_ends_its_processes_and_the_same_command_goes_on(
    make_audit: Callable[..., Path], tmp_path: Path
) -> None:
    texts = [sentence(i) for i in range(3000, 4500)]
    path = make_audit(audit=texts, resources={"cluster": "auto", "actors": "auto", "shard_bytes": 4000})
    command = [sys.executable, "-c", LARGE, "run", str(path), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as first:
        receipts = tmp_path / "run" / "receipts" / "score"
        while not (receipts.exists() and len(list(receipts.glob("*.json"))) > 2):
            assert first.poll() is None, first.stderr and first.stderr.read()
        children = psutil.Process(first.pid).children(recursive=True)
        first.terminate()
        _, said = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "Traceback" not in said
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert not (tmp_path / "run" / "selection").exists()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "in 2 processes" in again.stderr
    assert json.loads(again.stdout)["documents"] == 1540


def plan_of(path: Path, *overrides: str) -> Plan:
    return make_plan(load_config(str(path), overrides))


@pytest.mark.usefixtures("large")
def test_large_work_is_done_by_processes_where_memory_holds_a_model_each(
    make_audit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_audit(resources={"cluster": "auto", "actors": "auto"})
    plan = plan_of(path)
    assert runs_locally(plan, False, 0)
    assert machine_for(plan, 0) == LocalMachine(2, 0.0, 1, apart=True)
    assert not machine_for(plan_of(path, "resources.actors=1"), 0).apart
    assert not runs_locally(plan, True, 0), "a cluster is named"
    assert not machine_for(plan, 1).apart, "threads feed one GPU"
    assert not runs_locally(plan_of(path, "model.path=owner/name"), False, 0), "how large it is, nobody knows"
    training = plan_of(path, "detectors=[{fsd: {base: loss}}]", "selections=[]")
    assert not runs_locally(training, False, 0), "adapters are trained beside other work"
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    assert not runs_locally(plan_of(path), False, 0), "no room for a model in each"
    local = plan_of(path, "resources.cluster=local")
    assert not machine_for(local, 0).apart
    assert runs_locally(local, False, 0)


@pytest.mark.usefixtures("large")
def test_what_free_memory_allows_is_decided_once_for_a_plan(
    make_audit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(make_audit(resources={"cluster": "auto", "actors": "auto"}))
    assert runs_locally(plan, False, 0)
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    assert runs_locally(plan, False, 0)
    assert machine_for(plan, 0).apart


@pytest.mark.usefixtures("large")
def test_a_machine_with_one_gpu_may_need_a_cluster_and_takes_actors_that_hold_it(
    make_audit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_audit(resources={"cluster": "auto", "actors": "auto"})
    assert not may_need_cluster(plan_of(path).config.resources, plan_of(path))
    holding = plan_of(path, "resources.gpus_per_actor=1")
    monkeypatch.setattr(machine, "_gpu_files", lambda: ["/dev/nvidia0"])
    assert may_need_cluster(holding.config.resources, holding)
    monkeypatch.setitem(machine.LOCAL_TOKENS, "cuda", 0)
    plan = plan_of(path)
    assert may_need_cluster(plan.config.resources, plan), "Ray does what is large for one GPU"
    monkeypatch.setattr(machine, "_gpu_files", list)  # of another maker
    assert may_need_cluster(holding.config.resources, holding)
    begin_scoring_ahead(holding)
    assert not [child for child in psutil.Process().children() if "pipeline.stages.child" in str(child.cmdline())]
