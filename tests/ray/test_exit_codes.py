"""Exit codes that a scheduler is to see as 0, and status.json, which keeps the true ones."""

import json
import sys
from pathlib import Path

import pytest
from clusters import python
from commands import ended, printed
from made_up import MakeAudit, sentence

from pipeline.errors import ExitCode


def test_a_named_code_is_given_as_0_and_stays_in_the_status(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_audit([*(sentence(i) for i in range(20)), ""], [sentence(100 + i) for i in range(20)], error_budget=0.0)
    code, output, errors = printed(capsys, "run", path, "--exit-zero-on", "3,4")
    assert (code, "\x1b" in output) == (0, False), "no bar and no colours where nobody watches"
    assert errors.endswith("seenset: exit code 3 is given as 0, for --exit-zero-on names it\n")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", 3)
    assert ended("status", tmp_path / "run") == 3
    assert ended("status", tmp_path / "run", "--exit-zero-on= 4, 3") == 0


@pytest.mark.parametrize("codes", ["", "0", "1", "6", "130", "3,,4", "x", "-3", "3.0", "³"])
def test_what_is_no_exit_code_is_one_line_with_those_that_are(codes: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = printed(capsys, "run", "nowhere.yaml", f"--exit-zero-on={codes}")
    assert (code, errors.count("\n")) == (2, 1)
    known = ", ".join(str(code.value) for code in sorted(ExitCode) if 0 < code < ExitCode.INTERRUPTED)
    assert f"known: {known};" in errors


@pytest.mark.parametrize("rest", [["--nonsense", "audit.yaml"], []])
def test_a_command_line_that_cannot_be_read_is_never_done(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("run", "nowhere.yaml", "--exit-zero-on", "2") == 0
    assert ended("run", "--exit-zero-on", "2", *rest) == 2
    assert ended("run", "nowhere.yaml") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="a command goes on in a child on Linux alone")
@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", 3), ("supervisor.fail('stopped', 75)", 75)])
@pytest.mark.parametrize("named", [True, False])
def test_what_ray_ended_is_given_as_the_user_says(end: str, code: int, named: bool) -> None:
    script = f"""
import os
from ray_jobs import supervisor
supervisor.begin_command(True)
supervisor.give_as_zero('{code}' if {named} else None)
supervisor.supervise()
supervisor.note_cluster('10.0.0.7:6379', {{}})
{end}
"""
    done = python(script)
    assert done.returncode == (0 if named else code)
    assert done.stderr.count("\n") == 1 + named
    assert (f"exit code {code} is given as 0" in done.stderr) == named
