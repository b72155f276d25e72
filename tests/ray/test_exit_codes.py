"""Exit codes of the command and in status.json, also where Ray or a library ends its process."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.clusters import python
from tests.helpers.commands import ended, printed
from tests.helpers.made_up import MakeAudit, sentence


def test_an_incomplete_run_exits_with_3_and_keeps_it_in_its_status(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_audit([*(sentence(i) for i in range(20)), ""], [sentence(100 + i) for i in range(20)], error_budget=0.0)
    code, output, _ = printed(capsys, "run", path)
    assert (code, "\x1b" in output) == (3, False), "no bar and no colours where nobody watches"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", 3)
    assert ended("status", tmp_path / "run") == 3


@pytest.mark.parametrize("rest", [["--nonsense", "audit.yaml"], []])
def test_a_command_line_that_cannot_be_read_is_never_done(rest: list[str]) -> None:
    assert ended("run", *rest) == 2
    assert ended("run", "nowhere.yaml") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="a command goes on in a child on Linux alone")
@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", 3), ("supervisor.fail('stopped', 75)", 75)])
def test_what_ray_ended_has_an_exit_code_and_one_line(end: str, code: int) -> None:
    script = f"""
import os
from ray_jobs import supervisor
supervisor.begin_command(True)
supervisor.supervise()
supervisor.note_cluster('10.0.0.7:6379', {{}})
{end}
"""
    done = python(script)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
