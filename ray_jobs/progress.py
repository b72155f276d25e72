"""Show the progress of a run: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.audit.status import Counts

LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answered:
    """The number of requests that an endpoint has answered in a stage so far."""

    requests: int


class Reporter:
    """Prints messages and progress: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        """`quiet` prints nothing at all (for --json)."""
        self.console = console
        self.quiet = quiet
        self._bar: Progress | None = None
        self._last = 0.0

    def say(self, text: str) -> None:
        """Print one plain line."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def pace(self, text: str) -> None:
        """Print one plain line, unless one was printed in the last ten seconds."""
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self.say(text)

    def __enter__(self) -> Reporter:
        """Begin the scoring phase."""
        if self.console.is_terminal and not self.quiet:
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self.console, transient=True)
            self._bar.add_task("starting", total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the scoring phase and remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, counts: Counts, last: bool = False) -> None:
        """Show the counts."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, total=counts.shards, completed=counts.shards_done, description=counts.line())
        elif last or time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self.say(counts.line())
