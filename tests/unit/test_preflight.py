"""The preflight on this machine: each check reads or writes what a run would, and states its problem in one line."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import preflight
from cluster.preflight import CHECKS, HUNG, REMEDIES, Inspection, check_command, inspect_node
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from ray_jobs.cluster import version_differences, versions_here

MakePath = Callable[..., Path]


@pytest.fixture
def inspected(make_audit: MakePath, tmp_path: Path) -> Inspection:
    """The request about a small audit, whose run directory holds the file of the driver."""
    plan = make_plan(load_config(str(make_audit())))
    (tmp_path / "run/preflight-1").mkdir(parents=True)
    (tmp_path / "run/preflight-1/driver").touch()
    shards = {shard.role: shard for shard in reversed(plan.shards)}
    return Inspection(plan.config, tuple(shards.values()), "preflight-1", 60.0)


def problem(inspection: Inspection, check: str) -> str:
    """The problem of a check of this machine; every other check has none."""
    answers = inspect_node(inspection)
    assert set(answers) == set(CHECKS)
    problems = {name: problem for name, (problem, _) in answers.items() if problem}
    assert set(problems) <= {check}, problems
    return problems.get(check, "")


def test_a_good_node_has_a_measurement_of_each_check(inspected: Inspection) -> None:
    answers = inspect_node(inspected)
    assert all(value and not problem for problem, value in answers.values()), answers
    assert {*CHECKS, "versions"} == set(REMEDIES)


@pytest.mark.parametrize("role", ["audit", "unseen"])
def test_a_missing_input_of_any_role_is_named(inspected: Inspection, tmp_path: Path, role: str) -> None:
    (tmp_path / f"{role}.jsonl").unlink()
    assert f"{role}.jsonl" in problem(inspected, "input")


def test_a_missing_model_is_named(inspected: Inspection, tmp_path: Path, tiny_model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    model = inspected.config.model.model_copy(update={"path": str(folder)})
    changed = replace(inspected, config=inspected.config.model_copy(update={"model": model}))
    assert problem(changed, "model") == ""
    (folder / "config.json").unlink()
    assert "config.json" in problem(changed, "model")
    (folder / "config.json").write_text("{")
    assert "config.json" in problem(changed, "model")
    shutil.rmtree(folder)
    assert str(folder) in problem(changed, "model")


def test_a_run_directory_that_nodes_do_not_share_is_named(inspected: Inspection, tmp_path: Path) -> None:
    (tmp_path / "run/preflight-1/driver").unlink()
    assert "does not hold what this machine writes" in problem(inspected, "run directory")
    config = inspected.config.model_copy(update={"run": str(tmp_path / "unseen.jsonl")})
    assert "unseen.jsonl" in problem(replace(inspected, config=config), "run directory")


def test_a_full_disk_is_named(inspected: Inspection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised, because a disk cannot be filled here."""
    monkeypatch.setattr(preflight, "LEAST_FREE", 1 << 60)
    assert f"free in the temporary folder {tempfile.gettempdir()}" in problem(inspected, "disk")


def test_a_model_of_the_hub_needs_space_in_its_cache(inspected: Inspection) -> None:
    model = inspected.config.model.model_copy(update={"path": "owner/name"})
    value = CHECKS["disk"](replace(inspected, config=inspected.config.model_copy(update={"model": model})))
    assert "cache of the hub" in value


def test_a_check_that_hangs_has_its_time_and_the_others_answer(inspected: Inspection, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").unlink()
    os.mkfifo(tmp_path / "audit.jsonl")  # opening it waits for a writer
    hung = problem(replace(inspected, seconds=5.0), "input")
    assert hung == "no answer in 5 s"
    assert preflight._finding("here", "input", hung, "").remedy == HUNG


def test_versions_that_cannot_change_a_score_are_no_difference() -> None:
    assert version_differences({"python": "3.12.3"}, {"python": "3.11.3"}) == ["python 3.11.3 (here 3.12.3)"]
    assert version_differences({"torch": "2.9.0+cu128"}, {"torch": "2.9.0+cpu"}) == []
    assert version_differences({"ray": "2.60.0"}, {}) == ["ray missing (here 2.60.0)"]
    assert versions_here()["seenset"]


def test_the_command_checks_this_machine_and_leaves_nothing(
    make_audit: MakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = str(make_audit())
    assert exit_code(path, "--json") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["outcome"] == "passed"
    assert {line["check"] for line in answer["lines"]} == set(CHECKS)
    assert not (tmp_path / "run").exists()
    assert exit_code(path) == 0
    assert "none of 4 lines red" in capsys.readouterr().out
    assert exit_code(path, "--set", "corpus.audit.path=nowhere.jsonl") == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_red_line_has_a_remedy(
    make_audit: MakePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = str(make_audit())
    assert exit_code(path, "--set", "run=/proc/none/run") == 2
    output = capsys.readouterr().out
    assert "red: here, run directory: " in output
    assert REMEDIES["run directory"] in output
    monkeypatch.setattr(preflight, "LEAST_FREE", 1 << 60)
    assert exit_code(path, "--json") == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["outcome"] == "failed"
    assert [(line["check"], line["remedy"]) for line in answer["lines"] if line["outcome"] == "failed"] == [
        ("disk", REMEDIES["disk"])
    ]


def exit_code(*arguments: str) -> int:
    """The exit code of the preflight."""
    with pytest.raises(SystemExit) as ended:
        check_command(arguments)
    return int(ended.value.code or 0)
