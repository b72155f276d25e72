"""Show the progress of a run, from its driver or from storage alone (seenset status RUN --watch)."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from pipeline.errors import LINE_BREAK, ExitCode, UserError, is_of_storage, message_of_storage, one_line, visible
from pipeline.results.status import Counts, Status, duration, run_status
from pipeline.trial.progress import TrialStatus, trial_status
from ray_jobs import terminal
from ray_jobs.supervisor import leave_at_once

LINE_SECONDS = 10.0
FIRST_LINE_SECONDS = 3.0
REDRAW_SECONDS = 0.5
EVERY_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
"""Maximum time that a store may fail after it has answered."""

BAR_WIDTH = 40


class Reporter:
    """Prints messages and progress: a bar on a terminal and in a notebook, otherwise a line every ten seconds."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        """With `quiet`, nothing is printed."""
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
        """Start a stage."""
        self._next = time.monotonic() + FIRST_LINE_SECONDS
        if self.quiet:
            return self
        if is_notebook():
            self._notebook = NotebookBar()
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
            self._bar.update(task, total=1.0, completed=counts.share, description=progress_line(counts))
        if self._notebook is not None:
            if last or self._notebook.is_due:
                self._notebook.draw(counts.share, progress_line(counts))
        elif last:
            self.say(progress_line(counts))
        elif self._bar is None and time.monotonic() >= self._next:  # no line is made without being printed
            self.pace(progress_line(counts))


def progress_line(counts: Counts) -> str:
    """The progress of a stage, in one line."""
    status = counts.status()
    eta = "-" if status.eta_s is None else duration(status.eta_s)
    answers = f"answers {counts.answers:,}  " if counts.answers else ""
    already_audited = f"  already audited {counts.judged:,}" if counts.judged else ""
    return (
        f"{status.stage}: shards {status.shards_done}/{status.shards}  "
        f"documents {status.documents + status.under_way:,}  "
        f"{status.documents_per_s:,.1f} documents/s  {status.tokens_per_s:,.0f} tokens/s  "
        f"ETA {eta}  {answers}quarantined {status.quarantined:,}{already_audited}"
    )


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython on a terminal is not."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return getattr(None if ipython is None else ipython.get_ipython(), "kernel", None) is not None


class NotebookBar:
    """A bar and a line below the cell, in an output that is updated; it needs no further package than the kernel's."""

    def __init__(self) -> None:
        """Start without an output."""
        self._handle: Any = None  # handle of the output, once it is shown
        self._next = 0.0
        self._last: tuple[float | None, str] = (None, "")

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last drawing."""
        return time.monotonic() >= self._next

    def draw(self, share: float | None, line: str) -> None:
        """Draw the bar.

        Args:
            share: finished share, in [0, 1]; None where it is not known.
            line: description of the bar.
        """
        from IPython.display import display

        self._next = time.monotonic() + REDRAW_SECONDS
        self._last = share, line
        line = visible(line).replace("\n", LINE_BREAK)
        percent = "" if share is None else f"{100 * share:.0f}% "
        value = "" if share is None else f' value="{share:.4f}"'
        bar = f'<progress max="1"{value} style="width:16em" aria-label="progress"></progress>'
        text = f'<span style="white-space:pre-wrap;font-family:monospace">{html.escape(percent + line)}</span>'
        data = {"text/plain": percent + line, "text/html": f"<div>{bar} {text}</div>"}
        with contextlib.suppress(Exception):  # an error of the browser connection must not cause a failure
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)

    def stop(self, ended: bool) -> None:
        """Mark a bar that is not full as stopped."""
        share, line = self._last
        if self._handle is not None and not ended:
            self.draw(0.0 if share is None else share, f"stopped: {line}")


def read_progress(run: str) -> Status | TrialStatus:
    """The progress of a run or a trial.

    Args:
        run: a run directory, or the folder of a trial.

    Raises:
        UserError: it is neither, or one of its files is damaged.
    """
    of_trial = trial_status(run)
    return run_status(run) if of_trial is None else of_trial


def watch_progress(run: str, as_json: bool, every: float | None = None) -> Status | TrialStatus:
    """Show the progress of a run or a trial until it ends: redrawn on a terminal, otherwise one line per change.

    Ctrl-C, or a closed output, ends this process at once; the run is not affected.

    Args:
        run: a run directory, or the folder of a trial.
        as_json: print JSON objects, one per line, including the last one.
        every: seconds between two reads; more where a read takes longer.

    Returns:
        The final status. It has been printed only if `as_json`.

    Raises:
        UserError: it does not exist yet, or one of its files is and stays damaged.
        Exception: the store fails for longer than `PATIENCE_SECONDS`.
    """
    live, last = None, None
    try:
        with ExitStack() as stack:
            if not as_json and (screen := terminal.console()).is_interactive:
                live = stack.enter_context(Live(console=screen, auto_refresh=False, transient=True))
            for status in _looks(run, EVERY_SECONDS if every is None else every):
                runs, before, last = status.state == "running", last, _progress(status)
                if live is not None and runs:
                    live.update(_drawn(status), refresh=True)
                elif last != before and (runs or as_json):  # the status has changed
                    if as_json:
                        terminal.print_json(status.plain(), in_one_line=True)
                    else:
                        print("; ".join(_lines(status)))
                    sys.stdout.flush()
                if not runs:
                    return status
        raise AssertionError
    except KeyboardInterrupt:
        leave_at_once("no longer watched; the run is as it was", int(ExitCode.INTERRUPTED))
    except BrokenPipeError:  # such as `| head -1`
        leave_at_once("", int(ExitCode.INTERRUPTED))


def _looks(run: str, every: float) -> Iterator[Status | TrialStatus]:
    """The status in storage, repeatedly; a store that has answered may fail for a while."""
    answered, trouble = None, ""
    pool = ThreadPoolExecutor(1)  # so that Ctrl-C does not wait for a store that hangs
    while True:
        began = time.monotonic()
        try:
            status = pool.submit(read_progress, run).result()
        except Exception as error:
            if answered is None or began - answered > PATIENCE_SECONDS:
                raise
            if not (isinstance(error, UserError) or is_of_storage(error)):
                raise
            message = str(error) if isinstance(error, UserError) else message_of_storage(error)
            if message != trouble:
                print(f"seenset: {one_line(message)}; looking again", file=sys.stderr, flush=True)
            trouble = message
        else:
            answered, trouble = time.monotonic(), ""
            yield status
        time.sleep(max(every, time.monotonic() - began))


def _progress(status: Status | TrialStatus) -> tuple[Any, ...]:
    """The values that change with progress; rates and the remaining time change by themselves."""
    if isinstance(status, Status):
        counts = status.shards_done, status.documents, status.under_way, status.quarantined, len(status.failures)
        return status.state, status.message, status.stage, counts
    audit = None if status.audit is None else _progress(status.audit)
    return status.state, status.message, status.audits_done, status.points_done, status.audit_run, audit


def _lines(status: Status | TrialStatus) -> list[str]:
    return [visible(line).replace("\n", LINE_BREAK) for line in terminal.progress_lines(status)]


def _drawn(status: Status | TrialStatus) -> Group:
    """A status with a bar of the shards."""
    parts: list[Text | ProgressBar] = [Text(line) for line in _lines(status)]
    audit = status if isinstance(status, Status) else status.audit
    if audit is not None and audit.shards:
        parts.append(ProgressBar(audit.shards, audit.shards_done, width=BAR_WIDTH))
    return Group(*parts)
