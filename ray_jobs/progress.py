"""Show the progress of a run: a live bar on a terminal and in a notebook, plain lines otherwise."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.audit.status import Counts
from pipeline.errors import LINE_BREAK, visible
from ray_jobs.notebook_bar import NotebookBar, notebook_shell

LINE_SECONDS = 10.0
FIRST_LINE_SECONDS = 3.0


class Reporter:
    """Prints messages and progress: a bar on a terminal and in a notebook, otherwise a line every ten seconds."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        """`quiet` prints nothing at all."""
        self.console = console
        self.quiet = quiet
        self._bar: Progress | None = None
        self._notebook: NotebookBar | None = None
        self._next = 0.0

    def say(self, text: str) -> None:
        """Print one plain line."""
        if not self.quiet:
            text = visible(text).replace("\n", LINE_BREAK)
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def pace(self, text: str) -> None:
        """Print one plain line, unless one was printed in the last ten seconds; a notebook's bar shows it instead."""
        if self._notebook is not None:
            if self._notebook.is_due:
                self._notebook.draw(None, text)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            self.say(text)

    def __enter__(self) -> Reporter:
        """Begin a stage."""
        self._next = time.monotonic() + FIRST_LINE_SECONDS
        if self.quiet:
            return self
        if (shell := notebook_shell()) is not None:
            self._notebook = NotebookBar(shell)
        elif self.console.is_terminal:
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self.console, transient=True)
            self._bar.add_task("starting", total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stage and remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._notebook is not None:
            self._notebook.stop(ended=kind is None)
            self._notebook = None

    def update(self, counts: Counts, last: bool = False) -> None:
        """Show the counts."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, total=1.0, completed=counts.share, description=counts.line())
        if self._notebook is not None:
            if last or self._notebook.is_due:
                self._notebook.draw(counts.share, counts.line())
        elif last:
            self.say(counts.line())
        elif self._bar is None and time.monotonic() >= self._next:  # a line is not made in vain
            self.pace(counts.line())
