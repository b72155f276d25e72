"""A parent that has the last word of a command that uses a cluster.

Ray ends the process that is connected to it from a thread of its own and without a word: at once when it reads from or
writes to the object store of a node that is gone (`_exit(1)`), after a minute without a head node, and by `abort` where
a check of its own fails. No code of that process runs then. So the command goes on in a child, and the parent, which
has never imported Ray, waits for it and says what befell it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
from typing import NoReturn

from pipeline.errors import ExitCode, one_line
from ray_jobs.exit_codes import given_code, given_line

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SIZE = 1 << 14
_ADDRESS = slice(16, 1024)  # of the cluster, until a zero byte
_MESSAGE = slice(1024, _SIZE)
_CONNECTED, _DECIDED, _CODE, _SAID = range(4)  # single bytes

_may_guard = False
_record: mmap.mmap | None = None  # shared with the parent


def begin_guarding(whole_process: bool) -> None:
    """Say at the start of a command whether it is all that its process does: only then may it go on in a child."""
    global _may_guard
    _may_guard = whole_process and sys.platform == "linux"


def guard(needed: bool = True) -> None:
    """Go on in a child of this process, at most once, if that is needed; in the parent this does not return.

    The child dies with its parent and gets the signals that its parent gets. The parent ends as the child does, but for
    a child that ended without `note_end` while it was connected to a cluster.
    """
    global _may_guard, _record
    if not (needed and _may_guard):
        return
    _may_guard = False
    _record = mmap.mmap(-1, _SIZE)
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    parent = os.getpid()
    child = os.fork()
    if child:
        for number in FORWARDED:
            signal.signal(number, lambda number, _: _pass_on(child, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _leave(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), _record)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(ExitCode.INCOMPLETE)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def note_cluster(address: str) -> None:
    """Tell the parent that this process is connected to a cluster."""
    if _record is not None:
        _write(_record, _ADDRESS, address)
        _record[_CONNECTED] = 1


def note_end(code: int, message: str = "") -> None:
    """Tell the parent how this process is about to end, and with which line."""
    if _record is not None and not _record[_DECIDED]:
        _write(_record, _MESSAGE, message)
        _record[_CODE] = code
        _record[_SAID] = not message
        _record[_DECIDED] = 1


def note_said() -> None:
    """Tell the parent that the line is printed."""
    if _record is not None:
        _record[_SAID] = 1


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(child, number)


def _leave(code: int, record: mmap.mmap) -> NoReturn:
    """End as the child did, or with exit 3 and a line where Ray ended it.

    Args:
        code: of the child; of a signal that ended it, the negative.
        record: what the child noted.
    """
    line = note = ""
    if record[_DECIDED]:
        code, line = record[_CODE], "" if record[_SAID] else _read(record, _MESSAGE)
    elif record[_CONNECTED] and code in (0, 1, -signal.SIGABRT):
        code, note = given_code(ExitCode.INCOMPLETE), given_line(ExitCode.INCOMPLETE)
        line = (
            f"the cluster at {_read(record, _ADDRESS)} is lost: Ray ended this process, as it does without its node; "
            "what is finished is kept: run the same command to go on, on this cluster when it is back or on another"
        )
    if line:
        os.write(2, f"seenset: {one_line(line)}\n{note}".encode("utf-8", "replace"))
    if code < 0:  # whoever started this process is to see the same
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _write(record: mmap.mmap, place: slice, text: str) -> None:
    data = text.encode("utf-8", "replace")[: place.stop - place.start - 1]
    record[place.start : place.start + len(data) + 1] = data + b"\0"


def _read(record: mmap.mmap, place: slice) -> str:
    return bytes(record[place]).partition(b"\0")[0].decode("utf-8", "replace")
