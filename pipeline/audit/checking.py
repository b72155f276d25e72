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
from typing import cast

import cloudpickle

from pipeline.audit.plan import Plan
from pipeline.audit.precheck import Effort, Precheck, check_documents
from pipeline.detectors.plugins import load_plugins, loaded_plugins
from pipeline.errors import UserError
from pipeline.models.libraries import collect_rarely

NICENESS = 10
"""Of a check beside work that has begun: workers that start have most of the cores."""


def check_apart(plan: Plan, effort: Effort, niceness: int = 0) -> Precheck:
    """`check_documents` in a process that ends with this one; where there can be none, in this process.

    Args:
        plan: of the audit.
        effort: how much to read.
        niceness: how far the process stands back where others want its core, in [0, 19].

    Raises:
        UserError: as `check_documents`.
    """
    answer = _outcome_of(cloudpickle.dumps((loaded_plugins(), plan, effort, niceness)))
    if isinstance(answer, UserError):
        raise answer
    return check_documents(plan, effort) if answer is None else answer  # what fails there is done and said here


def check_aside(plan: Plan, effort: Effort) -> Precheck:
    """`check_apart` beside work that has begun and does not wait for it."""
    return check_apart(plan, effort, NICENESS)


def _outcome_of(work: bytes) -> Precheck | UserError | None:
    """What a process answers; None where it cannot be started, or ends before it has answered."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", "from pipeline.audit.checking import serve_check; serve_check()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is the command's to answer
        ) as process:
            try:
                return _exchange(process, work)
            finally:
                process.kill()
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def _exchange(process: subprocess.Popen[bytes], work: bytes) -> Precheck | UserError:
    """The answer; the pipe of the work stays open, so that its end is the end of this process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(work).to_bytes(8, "little") + work)
    process.stdin.flush()
    return cast(Precheck | UserError, pickle.load(process.stdout))


def serve_check() -> None:
    """Check the documents that standard input asks for, in a process that `check_apart` has started."""
    collect_rarely()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    plugins, plan, effort, niceness = pickle.loads(
        sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little"))
    )
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    os.nice(niceness)
    load_plugins(plugins)
    result: Precheck | UserError
    try:
        result = check_documents(plan, effort)
    except UserError as error:
        result = error
    with answers, contextlib.suppress(OSError):  # nobody waits for it any more
        answers.write(cloudpickle.dumps(result))


def _end_with_the_command() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
