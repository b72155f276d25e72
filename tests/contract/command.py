"""The command as a user has it: as a process, or for quick ones in this process through its entry point."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SEENSET = [str(Path(sys.executable).with_name("seenset"))]
PATIENCE = 400.0
"""Seconds after which something that must come has failed to come."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The one line of an error that a user can fix."""
        lines = [line for line in self.err.splitlines() if line.startswith("seenset: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


def environment(**changes: str) -> dict[str, str]:
    """The variables of a command; one that is "" is left out."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    merged = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "COLUMNS": "200", **changes}
    return {name: value for name, value in merged.items() if value}


def begin(*arguments: str | Path, prefix: Sequence[str] = (), **changes: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    return subprocess.Popen(
        [*prefix, *SEENSET, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str]) -> Ended:
    """Wait for a command; one that does not end is killed with all that it started."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.kill()
        raise
    return Ended(process.returncode, out, err)


def seenset(*arguments: str | Path, **changes: str) -> Ended:
    """A command in a process of its own."""
    return end_of(begin(*arguments, **changes))


def here(*arguments: str | Path) -> Ended:
    """The same command in this process."""
    (command,) = entry_points(group="console_scripts", name="seenset")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            command.load()([*map(str, arguments)])
        except SystemExit as end:
            code = end.code or 0
        else:
            code = 0
    assert isinstance(code, int), code
    return Ended(code, out.getvalue(), err.getvalue())


def done(ended: Ended, code: int = 0) -> Ended:
    """A command that ended as it should have."""
    assert ended.code == code, f"exit code {ended.code}\n{ended.out[-2000:]}\n{ended.err[-3000:]}"
    return ended


def wait_for(reached: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> Any:
    """What comes, which it must while the process lives."""
    end = time.monotonic() + PATIENCE
    while not (value := reached()):
        assert time.monotonic() < end, "it did not come"
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the command ended too early: {end_of(process)}")
        time.sleep(0.02)
    return value


class Orders:
    """What the plugin is to do from now on, and what it noted."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def give(self, **wanted: Any) -> None:
        """Give other orders: seconds, seconds_of (by node), tokens (that memory holds), busy, exits."""
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps({"noted": True, **wanted}))
        beside.replace(self.file)

    def workers(self) -> list[int]:
        """The processes that scored, the last one last."""
        notes = Path(f"{self.file}.notes")
        return [int(line.split()[0]) for line in notes.read_text().splitlines()] if notes.exists() else []
