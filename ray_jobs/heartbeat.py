"""A line on standard error while a command prints nothing: that it works, for how long, and at what."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, TextIO

from pipeline.audit.status import duration
from pipeline.errors import visible

FIRST_SECONDS = 8.0
"""Without output, after which the first line is printed."""

GROWTH = 2.0
"""A further line of the same silence comes after so many times the seconds of the one before."""

LABEL_CHARACTERS = 60


class _Noted:
    """A stream that notes when something was written to it, and how the last line begins."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.last = time.monotonic()
        self.label = ""

    def write(self, text: str) -> int:
        self.last = time.monotonic()
        line = text.strip().rpartition("\n")[2].partition(":")[0].strip()
        self.label = line[:LABEL_CHARACTERS] or self.label
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Heartbeat:
    """Prints a line on standard error whenever this process has printed nothing for a while.

    The two standard streams are replaced by ones that note what is written, until `end`. A process that is to be forked
    starts it afterwards: it is a thread.
    """

    def __init__(self, command: str, first: float = FIRST_SECONDS) -> None:
        """Start.

        Args:
            command: named where the command has printed nothing yet.
            first: seconds without output after which a line is printed.
        """
        self.command = command
        self.first = first
        self.before = sys.stdout, sys.stderr
        self.streams = _Noted(sys.stdout), _Noted(sys.stderr)
        self.ended = threading.Event()
        sys.stdout, sys.stderr = self.streams
        threading.Thread(target=self._beat, name="seenset-heartbeat", daemon=True).start()

    def end(self) -> None:
        """Stop, and put the standard streams back."""
        self.ended.set()
        if (sys.stdout, sys.stderr) == self.streams:
            sys.stdout, sys.stderr = self.before

    def _beat(self) -> None:
        since, wait = 0.0, self.first
        while not self.ended.wait(min(1.0, self.first / 4)):
            last = max(stream.last for stream in self.streams)
            if last != since:
                since, wait = last, self.first
            silence = time.monotonic() - last
            if silence >= wait:
                wait *= GROWTH
                label = self.streams[0].label or self.streams[1].label or self.command
                line = f"{label}: still working, {duration(silence)} without output"
                print(visible(line), file=self.before[1], flush=True)


_current: Heartbeat | None = None


def start(command: str) -> None:
    """Start the heartbeat of a command, at most one in a process."""
    global _current
    if _current is None:
        _current = Heartbeat(command)


def end() -> None:
    """End the heartbeat of this process, if it has one."""
    global _current
    if _current is not None:
        _current.end()
        _current = None
