"""Watch a run or a trial until it ends, from storage alone: seenset status RUN --watch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from pipeline.audit.status import Status, run_status
from pipeline.errors import LINE_BREAK, ExitCode, UserError, one_line, visible
from pipeline.store.space import is_of_storage, message_of_storage
from pipeline.trial.progress import TrialStatus, trial_status
from ray_jobs import terminal
from ray_jobs.supervisor import leave_at_once

EVERY_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
"""For so long a store may fail that has answered before."""

BAR_WIDTH = 40


def read_progress(run: str) -> Status | TrialStatus:
    """How far a run or a trial is.

    Args:
        run: a run directory, or the folder of a trial.

    Raises:
        UserError: it is neither, or a file in it is damaged.
    """
    of_trial = trial_status(run)
    return run_status(run) if of_trial is None else of_trial


def watch_progress(run: str, as_json: bool, every: float | None = None) -> Status | TrialStatus:
    """Show how far a run or a trial is, until it ends: redrawn on a terminal, otherwise a line whenever it is further.

    Ctrl-C ends this process at once, and so does a reader of its output that is gone; the run is not touched.

    Args:
        run: a run directory, or the folder of a trial.
        as_json: print JSON objects, one a line, the last one too.
        every: seconds between two looks; more where a look takes longer.

    Returns:
        How it ended. It has been printed only if `as_json`.

    Raises:
        UserError: it is not there yet, or a file in it is damaged and stays so.
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
                elif last != before and (runs or as_json):  # it is further than the last time
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
    """What storage says, again and again; a store that has answered before may fail for a while."""
    answered, trouble = None, ""
    pool = ThreadPoolExecutor(1)  # Ctrl-C does not wait for a store that hangs
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
    """What has changed if a run is further; rates and the remaining time change by themselves."""
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
