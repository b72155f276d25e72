"""Code of a plugin that calls sys.exit ends no run as done: what it cannot score is quarantined, or the code is 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ended, printed
from made_up import sentence, write_audit

from pipeline.audit import machine
from pipeline.errors import ExitCode

pytestmark = pytest.mark.usefixtures("forgotten_plugins")

LEAVING = """
import sys
from seenset import FORWARD, detector, mean_of_all

@detector(needs={FORWARD: ["log_prob"]})
def leaving(evidence):
    if any(WORD in text for text in evidence.texts):
        sys.exit(0)
    return mean_of_all(evidence[FORWARD].log_prob, evidence[FORWARD].mask)
"""
PROCEDURE = """
import sys
from seenset import procedure

@procedure(guarantee="heuristic", assumption="None.", promise="None.")
def leaving(counts, alpha):
    sys.exit()
"""
ARGUMENT = """
import sys
from seenset import FORWARD, detector, mean_of_all

@detector(needs={FORWARD: ["log_prob"]}, checks={"k": lambda value: sys.exit(0)})
def leaving(evidence, k: int = 1):
    return mean_of_all(evidence[FORWARD].log_prob, evidence[FORWARD].mask)
"""
LIBRARY = """
import sys
import numpy
from seenset import procedure

numpy.cumsum = lambda *arguments, **settings: sys.exit(0)

@procedure(guarantee="heuristic", assumption="None.", promise="None.")
def unused(counts, alpha):
    return None
"""


def audit(folder: Path, model: Path, code: str, **settings: Any) -> str:
    (folder / "mine.py").write_text(code)
    return str(write_audit(folder, model, **{"import": [str(folder / "mine.py")], **settings}))


def scored_by_leaving(**resources: Any) -> dict[str, Any]:
    selections = [{"name": "members", "detectors": ["leaving"], "procedure": "bh", "alpha": 0.2}]
    return {"detectors": ["leaving"], "selections": selections, "resources": resources}


@pytest.mark.parametrize("processes", [False, True])
def test_a_detector_that_always_exits_leaves_the_run_incomplete(
    tmp_path: Path,
    tiny_model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    processes: bool,
) -> None:
    """It ended with exit code 0 and nothing scored."""
    if processes:
        monkeypatch.setitem(machine.LOCAL_TOKENS, "cpu", 0)
        monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    placed = {"cluster": "auto", "actors": "auto"} if processes else {}
    path = audit(tmp_path, tiny_model_folder, LEAVING.replace("WORD", "''"), **scored_by_leaving(**placed))
    code, _, errors = printed(capsys, "run", path)
    assert code == ExitCode.INCOMPLETE
    assert "quarantine" in errors
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", ExitCode.INCOMPLETE)


def test_a_detector_that_exits_on_one_document_quarantines_that_document(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*map(sentence, range(59)), f"{sentence(59)} poison"]
    settings = scored_by_leaving() | {"error_budget": 0.5}
    code_of_plugin = LEAVING.replace("WORD", "'poison'")
    path = audit(tmp_path, tiny_model_folder, code_of_plugin, audit=texts, **settings)
    assert ended("run", path) == ExitCode.DONE
    summary = json.loads((tmp_path / "run/selection/members/summary.json").read_text())
    assert (summary["n_audit"], summary["n_quarantined"]) == (60, 1)


def test_a_procedure_that_exits_is_a_user_error(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    selections = [{"name": "members", "detectors": ["loss"], "procedure": "leaving", "alpha": 0.2}]
    code, _, errors = printed(capsys, "run", audit(tmp_path, tiny_model_folder, PROCEDURE, selections=selections))
    assert code == ExitCode.USER_ERROR
    assert errors.strip().endswith("procedure leaving (mine.py) raised SystemExit:")


def test_the_check_of_an_argument_that_exits_is_a_user_error(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = scored_by_leaving() | {"detectors": [{"leaving": {"k": 2}}]}
    code, _, errors = printed(capsys, "plan", audit(tmp_path, tiny_model_folder, ARGUMENT, **settings))
    assert code == ExitCode.USER_ERROR
    assert "the check of k raised SystemExit: 0" in errors


def test_a_library_that_exits_ends_the_command_as_incomplete(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.setattr(np, "cumsum", np.cumsum)  # and put back after the test
    code, _, errors = printed(capsys, "run", audit(tmp_path, tiny_model_folder, LIBRARY))
    assert code == ExitCode.INCOMPLETE
    assert errors.strip().endswith(
        "called sys.exit(0), so the run is not complete; finished shards are kept: correct that code and rerun the "
        "command"
    )


def test_a_detector_that_ends_its_process_ends_no_local_run_as_done(tmp_path: Path, tiny_model_folder: Path) -> None:
    """`os._exit(0)` ended with exit code 0 and without a line."""
    path = audit(tmp_path, tiny_model_folder, LEAVING.replace("WORD", "''"), **scored_by_leaving())
    source = tmp_path / "mine.py"
    source.write_text(source.read_text().replace("sys.exit(0)", "__import__('os')._exit(0)"))
    done = subprocess.run(
        [sys.executable, "-m", "ray_jobs.cli", "run", path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == ExitCode.INCOMPLETE, done.stdout + done.stderr
    assert done.stderr.strip().endswith("ended this process, so the command is not complete; finished shards are kept")


@pytest.mark.parametrize("command", [["schema"], ["--help"]])
def test_an_output_that_nobody_reads_is_no_exit_of_a_plugin(command: list[str]) -> None:
    """`seenset --help | head -1` stated that code of a plugin had called sys.exit."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ray_jobs.cli", *command], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode != 0
    assert b"sys.exit" not in done.stderr
