"""The end of a command: its exit code, its last line, signals, and a parent process where Ray is used.

Ray ends the process that is connected to a cluster without a message: at once when the node of the process is gone,
after a minute without a head node, and by `abort` where one of its own checks fails. So a command that may use Ray runs
in a child process, which probes the nodes on which it depends. The parent, which never imports Ray, forwards signals
and reports how the child ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pipeline.errors import ExitCode, IncompleteError, UserError, one_line
from ray_jobs.terminal import heartbeat

LONGEST_LINE = 2000
"""Maximum number of printed characters of an error."""

INTERRUPTED = "interrupted; the same command goes on from here"

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

ONCE_SECONDS = 1.0
"""Time in which signals count as one: Ctrl-C reaches the child from the terminal and from its parent."""

PROBE_SECONDS = 1.0
"""Interval between two probes of a node, and their time limit."""

_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


@dataclass(slots=True)
class _Facts:
    """Facts that a child has recorded for its parent."""

    nodes: dict[str, float] = field(default_factory=dict)  # address -> seconds of silence after which it is lost
    cluster: str = ""  # address of the head node; empty while no cluster is connected
    folder: str = ""  # files of a cluster that the child started
    run: str = ""  # run directory whose documents it scores
    code: int | None = None  # its exit code, when it is about to end
    lines: str = ""  # lines that it has not printed yet


_facts = _Facts()
_silent: dict[str, float] = {}  # node that does not answer -> time of its first silence
_probed = -PROBE_SECONDS
_to_parent: int | None = None  # file descriptor
_fault_file: int | None = None  # file descriptor of what a child was executing at a fatal signal
_may_supervise = False
_decided: int | None = None
_deciding = threading.Lock()
_listening = _deferring = _stop_requested = _hurried = False
_last_signal = -ONCE_SECONDS


def begin_command(whole_process: bool) -> None:
    """Start a command in this process, in which SIGINT and SIGTERM raise KeyboardInterrupt.

    Args:
        whole_process: whether the process runs only this command, which may then run in a child.
    """
    global _decided, _may_supervise, _listening, _stop_requested, _hurried
    _decided, _may_supervise = None, whole_process and sys.platform == "linux"
    _listening, _stop_requested, _hurried = True, False, False
    handle_signals()


def handle_signals() -> None:
    """Handle SIGINT and SIGTERM again where this process is a command: Ray's C++ code installs its own handler."""
    if _listening and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error and an exit code."""
    line = one_line(message)
    code = _decide(code, line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}...")
    if _hurried:  # cleanup would wait for the lost cluster
        os._exit(code)
    sys.exit(code)


def finish(code: int) -> NoReturn:
    """End with an exit code."""
    sys.exit(_decide(code))


def leave_at_once(message: str, code: int) -> NoReturn:
    """End without waiting for threads that compute a batch, and without messages of libraries during cleanup."""
    os._exit(_decide(code, message))


def note_fault() -> None:
    """Keep exit code 1 for an error that Python is about to print with its traceback."""
    _decide(1)


def _decide(code: int, message: str = "") -> int:
    """The exit code to return; the code and line of the first thread that ends the command are kept."""
    global _decided
    with _deciding:
        if _decided is None:
            _decided, lines = code, _line(message)
            _note(code=_decided, lines=lines)
            with contextlib.suppress(OSError, ValueError):  # closed or full: Python reports it at exit
                print(end=lines, file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
            _note(lines="")
        return _decided


def _line(message: str) -> str:
    return f"seenset: {one_line(message)}\n" if message else ""


def check() -> None:
    """Raise the exception of a signal again: Python ignores an exception that is raised inside a callback.

    Raises:
        KeyboardInterrupt: the command was interrupted.
        IncompleteError: the cluster is lost.
    """
    if _stop_requested:
        check_cluster()
        raise KeyboardInterrupt
    if time.monotonic() - _probed >= PROBE_SECONDS:
        check_cluster(patient=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _stop_requested, _last_signal
    first, again = not _stop_requested, _stop_requested and time.monotonic() - _last_signal < ONCE_SECONDS
    _stop_requested, _last_signal = True, time.monotonic()
    if not (again or (first and _deferring)):
        check()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer the exception of a first signal to the end of the block: during Ray's start it may leave a lock held.

    A second signal, a second later or more, is raised at once.

    Raises:
        KeyboardInterrupt: the command was interrupted.
    """
    global _deferring
    _deferring = True
    try:
        yield
    finally:
        _deferring = False
    check()


def is_listening() -> bool:
    """Whether this process is a command, which handles SIGINT and SIGTERM."""
    return _listening


def note_cluster(address: str, nodes: dict[str, float]) -> None:
    """Record the cluster to which this process is connected.

    Args:
        address: address of its head node; empty after disconnecting.
        nodes: address -> seconds of silence after which the cluster counts as lost.
    """
    _silent.clear()
    _note(cluster=address, nodes={node: seconds for node, seconds in nodes.items() if _answers(node)})


def note_folder(path: str) -> None:
    """Record the folder of a cluster that this process starts, which is removed with it."""
    _note(folder=path)


def note_run(folder: str) -> None:
    """Record the run directory that this process fills, whose attempt logs name the documents in flight."""
    _note(run=folder)


def check_cluster(patient: bool = False) -> None:
    """Check that the nodes that this process depends on answer, at once or after the patience of each.

    Raises:
        IncompleteError: a node does not answer.
    """
    global _probed, _hurried
    for node, patience in _facts.nodes.items() if _facts.cluster else ():
        began = time.monotonic()
        if _answers(node):
            _silent.pop(node, None)
            continue
        seconds = began - _silent.setdefault(node, began)
        if not patient or seconds > patience:
            _hurried = True
            name = "its head node" if node == _facts.cluster else "the node of this process"
            reason = f"has not answered for {seconds:.0f} s" if patient else "does not answer"
            raise IncompleteError(_lost(_facts.cluster, f"{name} {reason}"))
    _probed = time.monotonic()


@contextlib.contextmanager
def cluster_named() -> Iterator[None]:
    """Attribute an error to the loss of the cluster, if that is its cause.

    Raises:
        IncompleteError: a node of the cluster does not answer, whatever the block raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception:
        check_cluster()
        raise


def _note(**facts: Any) -> None:
    for name, value in facts.items():
        setattr(_facts, name, value)
    if _to_parent is not None:
        with contextlib.suppress(OSError):
            os.write(_to_parent, json.dumps(facts).encode() + b"\n")


def _lost(cluster: str, reason: str) -> str:
    return (
        f"the cluster at {cluster} is lost: {reason}; what is finished is kept: run the same command to go on, on this "
        "cluster when it is back or on another"
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def supervise(needed: bool = True, documents: Callable[[str], str] = lambda run: "") -> None:
    """Continue in a child of this process, at most once, if needed; in the parent this does not return.

    The child ends with its parent and receives the signals that its parent receives.

    Args:
        needed: whether it is.
        documents: names the documents that were in flight in a run directory, for the message about a signal.
    """
    global _may_supervise, _to_parent, _fault_file
    if not (needed and _may_supervise):
        return
    _may_supervise = False
    heartbeat.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    parent, (read, write) = os.getpid(), os.pipe()
    _fault_file = os.memfd_create("seenset-fault")
    child = os.fork()
    if child:
        os.close(write)
        _Parent(child, read, documents).run(before)
    os.close(read)
    _to_parent = write
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this
        os._exit(ExitCode.INCOMPLETE)
    faulthandler.enable(_fault_file, all_threads=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    heartbeat.resume()


class _Parent:
    """Waits for a child and ends with its exit code."""

    def __init__(self, child: int, notes: int, documents: Callable[[str], str]) -> None:
        self.child = child
        self.documents = documents
        self.notes = notes
        self.facts = _Facts()
        self.unread = b""
        self.forwarded = 0  # the last forwarded signal

    def run(self, mask: Any) -> NoReturn:
        """Wait, and end this process."""
        for number in FORWARDED:
            signal.signal(number, self._forward)
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while True:
            ready, _, _ = select.select([self.notes], [], [], PROBE_SECONDS)
            ended = ready and not self._read()
            ended_by, status = os.waitpid(self.child, 0 if ended else os.WNOHANG)
            if ended_by:
                self._end(os.waitstatus_to_exitcode(status))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.forwarded = number
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.child, number)

    def _read(self) -> bool:
        """Read notes; False at the end of the notes."""
        data = os.read(self.notes, 1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                setattr(self.facts, name, value)
        return bool(data)

    def _end(self, code: int) -> NoReturn:
        """End as the child did; if Ray ended it, with exit code 3 and a line.

        Args:
            code: exit code of the child; the negative number of a signal that ended it.
        """
        while select.select([self.notes], [], [], 0)[0] and self._read():
            pass
        facts = self.facts
        if facts.code is not None:
            code = facts.code
        elif facts.cluster and code in (0, 1, -signal.SIGABRT):
            reason = "Ray ended this process, as it does without its node"
            code, facts.lines = ExitCode.INCOMPLETE, _line(_lost(facts.cluster, reason))
        elif code == 0 or code > 1:
            reason = "code of a plugin, a model or a library ended this process, so the command is not complete"
            code, facts.lines = ExitCode.INCOMPLETE, _line(f"{reason}; finished shards are kept")
        elif -code == self.forwarded == signal.SIGTERM:  # during the start of Ray, which handles it by itself
            code, facts.lines = ExitCode.INTERRUPTED, _line(INTERRUPTED)
        elif code < 0 and -code != self.forwarded:
            documents = ""
            with contextlib.suppress(Exception):  # a run directory may hold anything, and the end is reported anyway
                documents = self.documents(facts.run) if facts.run else ""
            facts.lines = _line(_killed(-code, _place_of_fault(), documents, bool(facts.run)))
        if facts.folder:
            _remove_cluster(facts.folder)
        os.write(2, facts.lines.encode("utf-8", "replace"))
        if code < 0:  # the process that started this one sees the same signal
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(abs(code))


_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_INSTALLED = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARIES = (*_INSTALLED, *(str(Path(__file__).parents[1] / name) for name in ("pipeline", "ray_jobs")), "<")


def _place_of_fault() -> str:
    """The last function of a user's code that the child called before a fatal signal; empty if not known."""
    if _fault_file is None:
        return ""
    dump = os.pread(_fault_file, 1 << 16, 0).decode("utf-8", "replace")
    frames = [match.groups() for line in dump.splitlines() if (match := _FRAME.fullmatch(line))]
    file, line, function = next((one for one in frames if not one[0].startswith(_LIBRARIES)), ("", "", ""))
    return f"{function} ({Path(file).name}, line {line})" if file else ""


def _killed(number: int, place: str, documents: str, kept: bool) -> str:
    """The message about a child that a signal ended.

    Args:
        number: the signal.
        place: `_place_of_fault`.
        documents: the documents in flight; empty if they are not known.
        kept: whether it filled a run directory.
    """
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    reason = f"{name} ended this process"
    if place:
        reason += f" in {place}"
    elif number == signal.SIGKILL:
        reason += ", as the system does where memory is short"
    reason += f" at {documents}" if documents else ""
    then = "correct that code and rerun the command" if place else "rerun the command"
    skips = ", which leaves a document out that does so again and again" if documents else ""
    return f"{reason}{'; finished shards are kept' if kept else ''}: {then}{skips}"


def _remove_cluster(folder: str) -> None:
    """Kill the remaining processes of a cluster of a child, adopted by this process, and remove its files."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)
