"""A line wherever a command would else print nothing for many seconds: what it is doing, and for how long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from pipeline.errors import one_line

SILENT_SECONDS = 8.0
"""After which the next line is due."""


class Heartbeat:
    """Prints what a command is doing as long as nothing else is printed."""

    def __init__(self, stream: TextIO, phase: str, silent: float) -> None:
        """Begin a phase; nothing is printed before `start`.

        Args:
            stream: where lines are printed.
            phase: what the command is doing.
            silent: seconds without a line, > 0.
        """
        self.stream = stream
        self._phase = phase
        self._silent = silent
        self._began = self._heard = time.monotonic()
        self._ended: threading.Event | None = None

    def phase(self, phase: str) -> None:
        """Begin another phase."""
        self._phase = phase
        self._began = time.monotonic()

    def hear(self) -> None:
        """Note that something was printed."""
        self._heard = time.monotonic()

    def start(self) -> None:
        """Print lines from now on."""
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(self._ended,), name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Print nothing more; a process without threads can be forked."""
        if self._ended is not None:
            self._ended.set()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._heard + self._silent - time.monotonic(), self._silent / 10)):
            if time.monotonic() - self._heard >= self._silent:
                self.hear()
                try:
                    print(f"{one_line(self._phase)}: {time.monotonic() - self._began:.0f} s", file=self.stream)
                    self.stream.flush()
                except (OSError, ValueError):  # closed, or nobody reads it
                    return


_of_command: Heartbeat | None = None


def begin_heartbeat(arguments: Sequence[str], errors: bool = False) -> None:
    """Begin the heartbeat of a command, whose name is its first phase; `status` has none, whose lines are watched.

    Args:
        arguments: of the command line.
        errors: whether lines go to standard error, because standard output is for JSON.
    """
    global _of_command
    end()
    _of_command = None
    name = next((argument for argument in arguments if not argument.startswith("-")), "seenset")
    if name != "status":
        _of_command = Heartbeat(sys.stderr if errors else sys.stdout, name, SILENT_SECONDS)
        _of_command.start()


def end() -> None:
    """End it."""
    if _of_command is not None:
        _of_command.stop()


def resume() -> None:
    """Go on in a child of the process that began it."""
    if _of_command is not None:
        _of_command.start()


def phase(name: str) -> None:
    """Begin a phase of the command, if it has a heartbeat."""
    if _of_command is not None:
        _of_command.phase(name)


def hear() -> None:
    """Note that the command has printed something."""
    if _of_command is not None:
        _of_command.hear()
