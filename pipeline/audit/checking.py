"""The checks of the documents in a process of their own, beside one that opens a model.

Both import libraries for seconds, and threads of one process would do so in turn.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from typing import IO

from pipeline.audit.plan import Plan
from pipeline.audit.precheck import Effort, Precheck, check_documents
from pipeline.models.libraries import collect_rarely

NICENESS = 10
"""Of a check beside work that has begun: workers that start have most of the cores."""

_SIZE = 8  # bytes that say how long a message is


def check_apart(plan: Plan, effort: Effort, niceness: int = 0) -> Precheck:
    """`check_documents` in a process that ends with this one; where there can be none, in this process.

    Args:
        plan: of the audit.
        effort: how much to read.
        niceness: how far the process stands back where others want its core, in [0, 19].

    Raises:
        UserError: as `check_documents`.
    """
    answer = _answer(pickle.dumps((plan, effort, niceness)))
    return check_documents(plan, effort) if answer is None else answer


def check_aside(plan: Plan, effort: Effort) -> Precheck:
    """`check_apart` beside work that has begun and does not wait for it."""
    return check_apart(plan, effort, NICENESS)


def _answer(work: bytes) -> Precheck | None:
    """What the process says; None where it could not be started or did not finish."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.audit.checking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what fails there is done and said here
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is this process's to answer
        )
    except OSError:
        return None
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            _send(process.stdin, work)
            content = _receive(process.stdout)
        except OSError:  # it died
            content = None
        finally:
            process.kill()
            with contextlib.suppress(OSError):
                process.stdin.close()  # of which a part may not be sent
    if content is None:
        return None
    answer: Precheck = pickle.loads(content)
    return answer


def _send(file: IO[bytes], message: bytes) -> None:
    file.write(len(message).to_bytes(_SIZE, "little") + message)
    file.flush()


def _receive(file: IO[bytes]) -> bytes | None:
    """A message; None if it breaks off."""
    size = file.read(_SIZE)
    length = int.from_bytes(size, "little")
    message = file.read(length)
    return message if len(size) == _SIZE and len(message) == length else None


def answer_check() -> None:
    """Check the documents of the plan on standard input; the record goes to standard output."""
    collect_rarely()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no part of it
    work = _receive(sys.stdin.buffer)
    if work is None:
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plan, effort, niceness = pickle.loads(work)
    os.nice(niceness)
    _send(answers, pickle.dumps(check_documents(plan, effort)))


def _end_with_parent() -> None:
    """Standard input stays open as long as the process lives that waits for the answer."""
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    answer_check()
