"""How a command ends: the first thread that ends it decides its exit code, and the one line that says why."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

from pipeline.errors import one_line
from ray_jobs.exit_codes import begin_codes, given_code, given_line
from ray_jobs.guard import note_end, note_said

LONGEST_LINE = 2000
"""Characters of an error that are printed."""


def message_of_storage(error: Exception) -> str:
    """What an error of storage says, with the path that it is about."""
    path = getattr(error, "filename", None)
    reason = (path and getattr(error, "strerror", None)) or str(error) or type(error).__name__
    return f"storage: {reason}{f': {path}' if path else ''}"


_lock = threading.Lock()
_code: int | None = None
_hurried = False


def begin_command() -> None:
    """Begin a command of this process."""
    global _code, _hurried
    _code, _hurried = None, False
    begin_codes()


def hurry() -> None:
    """Let a failure end at once from now on: what cleans up would wait for a cluster that is lost."""
    global _hurried
    _hurried = True


def leave_at_once(message: str, code: int) -> NoReturn:
    """End without waiting for threads in the midst of a batch, and with no word from libraries that clean up."""
    os._exit(_decide(code, message))


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error and an exit code."""
    line = one_line(message)
    code = _decide(code, line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}...")
    if _hurried:
        os._exit(code)
    sys.exit(code)


def note_fault() -> None:
    """Keep exit code 1 for an error that Python is about to print with its traceback."""
    _decide(1)


def finish_command(code: int) -> NoReturn:
    """End with an exit code."""
    sys.exit(_decide(code))


def _decide(code: int, message: str = "") -> int:
    """The exit code as it is given: of the first thread that comes here, whose message no other can cut off."""
    global _code
    with _lock:
        if _code is None:
            _code = given_code(code)
            note_end(_code, message)
            if message:
                print(f"seenset: {one_line(message)}", file=sys.stderr)
            print(end=given_line(code), file=sys.stderr)
            with contextlib.suppress(OSError, ValueError):  # closed, or full: Python says so when it ends
                sys.stdout.flush()
                sys.stderr.flush()
            note_said()
        return _code
