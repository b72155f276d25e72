"""A command that prints nothing for long says what it is doing; one that prints does not."""

import io
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ray_jobs.terminal import Heartbeat, VisibleConsole

COMMAND = """
import sys
from ray_jobs import terminal
terminal.SILENT_SECONDS = 0.05
from ray_jobs.cli import main
main()
"""


def test_a_phase_that_prints_needs_no_heartbeat() -> None:
    stream, beat = io.StringIO(), Heartbeat()
    beat.begin(stream, "plan", 1.0)
    began = time.monotonic()
    while time.monotonic() - began < 2.2:
        beat.hear()
        time.sleep(0.05)
    beat.stop()
    assert stream.getvalue() == ""


def test_no_line_is_printed_after_it_was_stopped() -> None:
    class Slow(io.StringIO):
        under_way = threading.Event()

        def write(self, text: str, /) -> int:
            self.under_way.set()
            time.sleep(0.1)
            return super().write(text)

    stream, beat = Slow(), Heartbeat()
    beat.begin(stream, "plan", 0.05)
    assert stream.under_way.wait(60)
    beat.stop()
    printed = stream.getvalue()
    assert re.fullmatch(r"(plan: 0 s\n)+", printed)
    time.sleep(0.3)
    assert stream.getvalue() == printed


def test_a_closed_stream_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    stream, beat = io.StringIO(), Heartbeat()
    stream.close()
    beat.begin(stream, "plan", 0.05)
    time.sleep(0.3)
    VisibleConsole().print("still there")
    assert capsys.readouterr() == ("still there\n", "")


def test_a_command_keeps_standard_output_for_json_and_standard_error_for_errors(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[list[str], list[str]]:
        command = [sys.executable, "-c", COMMAND, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert ended.returncode == 2
        return ended.stdout.splitlines(), ended.stderr.splitlines()

    output, errors = run("plan", "none.yaml")
    assert output
    assert all(re.fullmatch(r"plan: \d+ s", line) for line in output)
    refused = "seenset: cannot read config none.yaml: No such file or directory; "
    assert len(errors) == 1
    assert errors[0].startswith(refused)
    output, errors = run("plan", "none.yaml", "--json")
    assert output == []
    assert errors[0].startswith("plan: ")
    assert errors[-1].startswith(refused)
    assert run("status", "none")[0] == []
