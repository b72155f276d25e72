"""Code of a plugin that calls sys.exit ends no run as done: it costs one document, or stops the run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.detectors import plugins
from pipeline.errors import ExitCode
from pipeline.run import machine
from tests.helpers.commands import printed
from tests.helpers.made_up import sentence, write_audit

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
CHECKED = '["log_prob"]}, checks={"k": lambda value: sys.exit(0)}'
ARGUMENT = LEAVING.replace('["log_prob"]}', CHECKED).replace("(evidence)", "(evidence, k: int = 1)")
LIBRARY = f"{PROCEDURE}\nimport numpy\nnumpy.cumsum = lambda *arguments, **settings: sys.exit(0)\n"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """(code of a plugin, command, settings) -> the exit code of the command, and its errors."""

    def finish(code: str, command: str = "run", **settings: Any) -> tuple[int, str]:
        (tmp_path / "mine.py").write_text(code)
        path = write_audit(tmp_path, tiny_model_folder, **{"import": [str(tmp_path / "mine.py")], **settings})
        status, _, errors = printed(capsys, command, path)
        return status, errors.strip()

    return finish


def scored_by_leaving(**resources: Any) -> dict[str, Any]:
    selections = [{"name": "members", "detectors": ["leaving"], "procedure": "bh", "alpha": 0.2}]
    return {"detectors": ["leaving"], "selections": selections, "resources": resources}


@pytest.mark.parametrize("processes", [False, True])
def test_a_detector_that_always_exits_ends_the_run_with_its_first_documents(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    if processes:
        monkeypatch.setitem(machine.LOCAL_TOKENS, "cpu", 0)
        monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    placed = {"cluster": "auto", "actors": "auto"} if processes else {}
    code, errors = run(LEAVING.replace("WORD", "''"), **scored_by_leaving(**placed))
    assert code == ExitCode.USER_ERROR
    assert "failed with one message: sys.exit(0) was called; correct the cause" in errors
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", ExitCode.USER_ERROR)


def test_a_detector_that_exits_on_one_document_quarantines_that_document(run: Run, tmp_path: Path) -> None:
    texts = [*map(sentence, range(59)), f"{sentence(59)} poison"]
    settings = scored_by_leaving() | {"error_budget": 0.5}
    assert run(LEAVING.replace("WORD", "'poison'"), audit=texts, **settings)[0] == ExitCode.DONE
    summary = json.loads((tmp_path / "run/selection/members/summary.json").read_text())
    assert (summary["n_audit"], summary["n_quarantined"]) == (60, 1)


def test_a_procedure_or_the_check_of_an_argument_that_exits_is_a_user_error(run: Run) -> None:
    selections = [{"name": "members", "detectors": ["loss"], "procedure": "leaving", "alpha": 0.2}]
    code, errors = run(PROCEDURE, selections=selections)
    assert code == ExitCode.USER_ERROR
    assert errors.endswith("procedure leaving (mine.py) raised SystemExit:")
    code, errors = run(ARGUMENT, "plan", **scored_by_leaving() | {"detectors": [{"leaving": {"k": 2}}]})
    assert code == ExitCode.USER_ERROR
    assert "the check of k raised SystemExit: 0" in errors


def test_a_library_that_exits_ends_the_command_as_incomplete(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "cumsum", np.cumsum)  # and put back after the test
    code, errors = run(LIBRARY)
    assert code == ExitCode.INCOMPLETE
    assert errors.endswith(
        "called sys.exit(0), so the run is not complete; finished shards are kept: correct that code and rerun the "
        "command"
    )


def command(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ray_jobs.cli", *arguments], stderr=subprocess.PIPE, text=True, check=False, **settings
    )


def test_an_import_that_never_ends_is_a_user_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "IMPORT_SECONDS", 1.0)
    hanging = "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except Exception:\n        pass\n"
    timer = signal.getitimer(signal.ITIMER_REAL)
    code, errors = run(hanging, "plan")
    assert code == ExitCode.USER_ERROR
    assert errors.endswith("mine.py, line 4: its import takes more than 1 s")
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0), "the timer of the tests goes on"


@pytest.mark.slow
def test_an_import_that_ends_the_process_ends_no_command_as_done(run: Run, tmp_path: Path) -> None:
    run("import sys\nsys.exit(0)\n", "plan")
    for name, status in (("plan", 0), ("run", 0), ("run", 7)):
        (tmp_path / "mine.py").write_text(f"import os\nos._exit({status})\n")
        done = command(name, str(tmp_path / "audit.yaml"), timeout=300)
        assert done.returncode == ExitCode.INCOMPLETE, done.stderr
        assert "ended this process" in done.stderr


@pytest.mark.slow
def test_a_detector_that_ends_its_process_ends_no_local_run_as_done(run: Run, tmp_path: Path) -> None:
    code = LEAVING.replace("WORD", "''").replace("sys.exit(0)", "__import__('os')._exit(0)")
    tried, errors = run(code, "plan", **scored_by_leaving())
    assert tried == ExitCode.INCOMPLETE
    assert errors.endswith("detector leaving (mine.py) ends its process on made-up input (exit status 0)")
    done = command("run", str(tmp_path / "audit.yaml"), timeout=300)
    assert done.returncode == ExitCode.INCOMPLETE, done.stderr
    assert done.stderr.strip().endswith("ended this process, so the command is not complete; finished shards are kept")


@pytest.mark.slow
def test_a_detector_that_a_signal_ends_is_named_with_its_document(run: Run, tmp_path: Path) -> None:
    code = LEAVING.replace("WORD", "'poison'").replace("sys.exit(0)", "__import__('ctypes').string_at(0)")
    texts = [*map(sentence, range(59)), f"{sentence(59)} poison"]
    (tmp_path / "mine.py").write_text("broken")
    run("broken", audit=texts, **scored_by_leaving() | {"error_budget": 0.5})
    (tmp_path / "mine.py").write_text(code)
    lines = []
    while (done := command("run", str(tmp_path / "audit.yaml"), timeout=300)).returncode == -signal.SIGSEGV:
        lines.append(done.stderr)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert [line.count("\n") for line in lines] == [1, 1, 1], "then the document is in quarantine"
    assert all(
        line.startswith("seenset: SIGSEGV ended this process in leaving (mine.py, line 8) at ") for line in lines
    )
    remedy = "audit.jsonl; finished shards are kept: correct that code and rerun the command, which leaves a document"
    assert "at row 59 of " in lines[-1]
    assert remedy in lines[-1]
    assert json.loads((tmp_path / "run/selection/members/summary.json").read_text())["n_quarantined"] == 1


HALT = "type('Halt', (BaseException,), {})('not today')"


@pytest.mark.parametrize(
    ("code", "settings", "message"),
    [
        (
            LEAVING.replace("WORD", "''").replace("sys.exit(0)", f"raise {HALT}"),
            scored_by_leaving(),
            "failed with one message: detector leaving (mine.py, line 8) raised Halt: not today; correct the cause",
        ),
        (
            ARGUMENT.replace("sys.exit(0)", "(_ for _ in ()).throw(Halt())") + "\nclass Halt(BaseException): pass\n",
            scored_by_leaving() | {"detectors": [{"leaving": {"k": 2}}]},
            "the check of k raised Halt",
        ),
        (
            PROCEDURE.replace("sys.exit()", f"raise {HALT}"),
            {"selections": [{"name": "members", "detectors": ["loss"], "procedure": "leaving", "alpha": 0.2}]},
            "procedure leaving (mine.py) raised Halt: not today",
        ),
        (f"raise {HALT}", {}, "mine.py, line 1: cannot be imported: Halt: not today"),
    ],
)
def test_what_a_plugin_raises_below_base_exception_is_one_line(
    run: Run, code: str, settings: dict[str, Any], message: str
) -> None:
    status, errors = run(code, **settings)
    assert (status, errors.count("\n")) == (ExitCode.USER_ERROR, 0)
    assert message in errors


def test_a_library_that_raises_below_base_exception_ends_a_command_as_incomplete(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "cumsum", np.cumsum)  # and put back after the test
    raising = f"def broken(*arguments, **settings):\n    raise {HALT}\nnumpy.cumsum = broken\n"
    code, errors = run(f"{PROCEDURE}\nimport numpy\n{raising}")
    assert code == ExitCode.INCOMPLETE
    assert "code of a plugin, a model or a library raised Halt: not today, so the run is not complete" in errors


def test_an_output_that_nobody_reads_is_no_exit_of_a_plugin() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = command("--help", stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode != 0
    assert "sys.exit" not in done.stderr
