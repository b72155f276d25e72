"""From what nodes measured to lines: each bad fact is red on its node, with what to do, and only there."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster import inspection
from cluster.checks import HUNG, REMEDIES, Expectation, Finding, NodeReport, judge_nodes
from cluster.inspection import CHECKS, Answer, Inspection, file_marks, measured, scored_alone
from cluster.preflight import answers_of_machine, check_command
from pipeline.audit.description import load_config
from pipeline.audit.machine import ActorShape
from pipeline.audit.plan import make_plan
from pipeline.config.models import ModelConfig
from pipeline.passes.budget import Shape
from ray_jobs.cluster import version_differences, versions_here

GIB = 2**30
CARD = {"name": "NVIDIA L4", "driver": "570.1", "total": 24 * GIB, "free": 23 * GIB}
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FILES = {WEIGHTS: [10 * GIB, "aa"], CONFIG: [600, "bb"]}
FACTS: dict[str, dict[str, Any]] = {
    "versions": {"python": "3.12.3", "seenset": "0.7.0", "ray": "2.60.0", "torch": "2.9.0+cu128"},
    "processor": {"flags": ["avx2"]},
    "clock": {"offset": 0.1, "within": 0.01},
    "plugins": {"digests": {"my.py": "aa"}},
    "gpus": {"cards": [CARD, CARD], "torch": 2, "cuda": "12.8"},
    "memory": {"total": 64 * GIB, "free": 60 * GIB},
    "/dev/shm": {"total": 16 * GIB, "free": 16 * GIB},
    "model": {"models": {"org/model": FILES}},
    "input": {"marks": {"a.jsonl": [100, "cc"]}, "of": 1},
    "run directory": {"seen": True, "won": False, "holder": "one", "winners": 1, "second": False},
    "storage": {"write": 1e8, "read": 1e8, "same": True},
    "first batch": {"load": 3.0, "batch": 0.5, "documents": 8, "tokens": 1000, "peak": 11 * GIB},
}
SHAPE = Shape(4096, 32, 32, 8, 128, 14336, 128256, 2, 10 * GIB)
DRIVER: dict[str, Answer] = {check: FACTS[check] for check in ("versions", "plugins", "model", "input")}
EXPECTED = Expectation(DRIVER, ActorShape(1.0, 1), 64, [SHAPE], 1024)


def node(name: str = "two", **facts: dict[str, Any]) -> NodeReport:
    """A good node, with other facts of some checks."""
    changed = {check.replace("_", " ").replace("dev shm", "/dev/shm"): value for check, value in facts.items()}
    assert set(changed) <= set(FACTS)
    answers = {check: {**given, **changed.get(check, {})} for check, given in FACTS.items()}
    return NodeReport(name, 16.0, 2.0, 8.0 * GIB, answers)


def held(files: dict[str, Any]) -> Any:
    return {"model": {"models": {"org/model": files}}}


def judged(other: NodeReport, expected: Expectation = EXPECTED) -> list[Finding]:
    """The lines that are not good, of this node beside a good one."""
    lines = judge_nodes([node("one", run_directory={"won": True}), other], expected)
    assert [line.check for line in lines] == [*FACTS] * 2
    return [line for line in lines if line.state != "good"]


def test_a_bad_fact_is_a_line_of_its_node_and_check() -> None:
    for facts, check, state, value in (
        ({"versions": {"torch": "2.8.0+cu128"}}, "versions", "red", "torch 2.8.0+cu128 (here 2.9.0+cu128)"),
        ({"versions": {"seenset": "0.6.0"}}, "versions", "red", "seenset 0.6.0 (here 0.7.0)"),
        ({"versions": {"my-detectors": "1.0"}}, "versions", "red", "my-detectors 1.0 (here missing)"),
        ({"plugins": {"digests": {"my.py": "zz"}}}, "plugins", "red", "another content than here: my.py"),
        ({"gpus": {"cards": [CARD]}}, "gpus", "red", "Ray gives out 2 GPUs, the driver has 1"),
        ({"gpus": {"torch": 0}}, "gpus", "red", "torch sees 0 of 2"),
        ({"gpus": {"cards": [{**CARD, "total": 8 * GIB}] * 2}}, "gpus", "red", "10.0 GiB of weights leave no memory"),
        ({"gpus": {"cards": [CARD, {**CARD, "free": GIB}]}}, "gpus", "red", "1.0 GiB free on one of them, 10.0 GiB"),
        ({"memory": {"free": 9 * GIB}}, "memory", "red", "10.0 GiB of weights pass through it"),
        ({"dev_shm": {"total": 64 << 20}}, "/dev/shm", "note", "less than Ray's object store of 8 GiB"),
        (held({**FILES, WEIGHTS: [10 * GIB, "z"]}), "model", "red", f"{WEIGHTS} of org/model is of another content"),
        (held({WEIGHTS: FILES[WEIGHTS]}), "model", "red", "config.json of org/model is missing there"),
        (held({CONFIG: FILES[CONFIG]}), "model", "note", "org/model: the hub will send the weights"),
        ({"input": {"marks": {"a.jsonl": "cannot be read: no"}}}, "input", "red", "a.jsonl: cannot be read: no"),
        ({"input": {"marks": {"a.jsonl": [101, "cc"]}}}, "input", "red", "a.jsonl is another file there"),
        ({"run_directory": {"seen": False}}, "run directory", "red", "it does not see what this machine writes there"),
        ({"run_directory": {"winners": 3}}, "run directory", "red", "3 of 8 attempts created one name"),
        ({"run_directory": {"second": True}}, "run directory", "red", "and one more later"),
        ({"storage": {"same": False}}, "storage", "red", "what was read is not what was written"),
        ({"storage": {"write": 2e6}}, "storage", "note", "write 2 MB/s"),
        ({"processor": {"flags": []}}, "processor", "note", "most nodes have avx2"),
        ({"clock": {"offset": -75.0}}, "clock", "red", "-75.0 s"),
        ({"clock": {"offset": 5.0}}, "clock", "note", "+5.0 s"),
    ):
        (line,) = judged(node(**facts))
        assert (line.node, line.check, line.state) == ("two", check, state)
        assert value in line.value
        assert line.remedy


def test_a_good_cluster_has_no_red_line_whatever_versions_cannot_change_a_score() -> None:
    assert judged(node()) == []
    assert judged(node(versions={"torch": "2.9.0+cpu", "python": "3.12.9"})) == []
    assert version_differences({"python": "3.12.3"}, {"python": "3.11.3"}) == ["python 3.11.3 (here 3.12.3)"]
    assert versions_here()["seenset"]


@pytest.mark.parametrize("check", FACTS)
def test_a_check_that_fails_is_a_red_line_with_the_reason(check: str) -> None:
    good = node()
    for problem, remedy in (("no answer in 60 s", HUNG), ("OSError: it broke", REMEDIES[check])):
        lines = judged(replace(good, answers={**good.answers, check: problem}))
        assert lines == [Finding("two", check, "red", problem, remedy)]


def test_trainers_need_shared_memory_actors_on_cpus_room_for_all_weights_and_all_nodes_one_folder() -> None:
    small = node(dev_shm={"total": 64 << 20, "free": 64 << 20})
    (line,) = judged(small, replace(EXPECTED, trainers=2))
    assert (line.check, line.state) == ("/dev/shm", "red")
    on_cpus = replace(EXPECTED, shape=ActorShape(0.0, 2))
    (line, *_) = (line for line in judged(node(), on_cpus) if line.check == "memory")
    assert "80.0 GiB of weights of 8 actors" in line.value
    assert judged(node(), replace(on_cpus, actors=2)) == []
    lines = judged(node(run_directory={"won": True, "holder": "two"}))
    assert [(line.node, line.check, line.state) for line in lines] == [
        (name, "run directory", "red") for name in ("one", "two")
    ]
    assert "a folder of each node alone" in lines[0].value


def make_check(check: str, inspection: Inspection) -> Any:
    return measured(partial(CHECKS[check], inspection))


@pytest.fixture
def inspected(make_audit: Callable[..., Path]) -> Inspection:
    """What is asked of nodes about a small audit."""
    plan = make_plan(load_config(str(make_audit())))
    return Inspection(plan.config, plan.inputs, plan.shards[0], (), "preflight-1")


def test_a_model_of_the_same_size_with_other_weights_has_another_mark(tiny_model_folder: Path, tmp_path: Path) -> None:
    marks = file_marks(ModelConfig(path=str(tiny_model_folder)))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(marks)
    path = tmp_path / "large"
    path.write_bytes(bytes(inspection.WHOLE_BYTES + 1))
    before = inspection._mark(path)
    with path.open("r+b") as file:
        file.seek(inspection.WHOLE_BYTES // 2)
        file.write(b"\1" * (inspection.WHOLE_BYTES // inspection.PARTS))
    assert inspection._mark(path) != before


def test_checks_of_a_broken_place_say_so_and_leave_nothing(inspected: Inspection, tmp_path: Path) -> None:
    for check in ("run directory", "storage", "input", "model", "/dev/shm", "memory"):
        answer = make_check(check, inspected)
        assert isinstance(answer, dict)
        assert answer
    inspection.remove_traces(inspected)
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "audit.jsonl").unlink()
    marks = make_check("input", inspected)["marks"]
    assert [name for name, mark in marks.items() if isinstance(mark, str)] == [str(tmp_path / "audit.jsonl")]
    blocked = inspected.config.model_copy(update={"run": str(tmp_path / "unseen.jsonl")})
    assert "unseen.jsonl" in make_check("run directory", replace(inspected, config=blocked))
    assert set(CHECKS) <= set(REMEDIES)


def test_a_check_that_hangs_has_its_time_and_the_others_answer(inspected: Inspection, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").unlink()
    os.mkfifo(tmp_path / "audit.jsonl")  # whoever opens it waits for a writer
    report = answers_of_machine(replace(inspected, seconds=2.0))
    assert report.answers["input"] == "no answer in 2 s"
    assert isinstance(report.answers["/dev/shm"], dict)


@pytest.mark.slow
def test_cards_that_torch_misses_are_red(
    inspected: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA L4, 570.124, 23034, 22000'\necho 'NVIDIA L4, 570.124, 23034, 800'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = make_check("gpus", inspected)
    assert facts["cards"][1] == {"name": "NVIDIA L4", "driver": "570.124", "total": 23034 << 20, "free": 800 << 20}
    (line,) = judged(node(gpus=facts))
    assert (line.check, line.state) == ("gpus", "red")
    assert "2 x NVIDIA L4 22 GiB, driver 570.124" in line.value
    program.write_text("#!/bin/sh\necho 'NVIDIA GB10, 580.1, [N/A], [N/A]'\n")
    assert "states no memory of NVIDIA GB10" in make_check("gpus", inspected)
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert make_check("gpus", inspected) == "nvidia-smi ended with 9: NVIDIA-SMI has failed"


def test_a_first_batch_needs_no_earlier_stage(inspected: Inspection) -> None:
    detectors = [
        {"samia": {"draws": 2}},
        "min_k",
        {"fsd": {"base": "loss"}},
        {"knockoff": {"base": "loss", "draws": 1}},
    ]
    assert scored_alone(inspected.config.model_copy(update={"detectors": detectors})) == ["min_k"]
    assert scored_alone(inspected.config.model_copy(update={"detectors": detectors[:1]})) == ["loss"]


def test_the_command_checks_this_machine_and_says_what_is_wrong(
    make_audit: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = make_audit()
    assert exit_code(str(path), "--json") == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert {line["check"] for line in lines} == {*CHECKS, "versions", "first batch"}
    assert not (tmp_path / "run").exists()
    assert exit_code(str(path), "--set", "resources.gpus_per_actor=8") == 2
    assert "red: cluster, places: resources.gpus_per_actor is 8, this machine has" in capsys.readouterr().out
    assert exit_code(str(path), "--set", "corpus.audit.path=nowhere.jsonl") == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text('{"schema": 99}')
    assert exit_code(str(path)) == 2
    assert "red: cluster, manifest: " in capsys.readouterr().out


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        check_command(arguments)
    return int(ended.value.code or 0)
