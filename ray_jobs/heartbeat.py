"""A line wherever a command would else print nothing for many seconds: what it is doing, and for how long."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from pipeline.errors import one_line

SILENT_SECONDS = 8.0
"""After which the next line is due."""


class Heartbeat:
    """Prints what a command is doing as long as nothing else is printed; nothing before `begin`."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._phase = ""
        self._silent = SILENT_SECONDS
        self._began = self._heard = 0.0
        self._ended = threading.Event()

    def begin(self, stream: TextIO, phase: str, silent: float | None = None) -> None:
        """Begin with a first phase.

        Args:
            stream: where lines are printed.
            phase: what the command is doing.
            silent: seconds without a line, > 0; None: `SILENT_SECONDS`.
        """
        self._stream, self._silent = stream, silent or SILENT_SECONDS
        self.phase(phase)
        self.hear()
        self.resume()

    def phase(self, phase: str) -> None:
        """Begin another phase."""
        self._phase = phase
        self._began = time.monotonic()

    def hear(self) -> None:
        """Note that something was printed."""
        self._heard = time.monotonic()

    def resume(self) -> None:
        """Print lines from now on, if it has begun; a fork takes no threads along."""
        if not self._phase:
            return
        self.stop()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(self._ended,), name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Print nothing more; a process without threads can be forked."""
        self._ended.set()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._heard + self._silent - time.monotonic(), self._silent / 10)):
            if time.monotonic() - self._heard >= self._silent:
                self.hear()
                try:
                    print(f"{one_line(self._phase)}: {time.monotonic() - self._began:.0f} s", file=self._stream)
                    self._stream.flush()
                except (OSError, ValueError):  # closed, or nobody reads it
                    return


heartbeat = Heartbeat()
"""Of the command that this process runs."""
