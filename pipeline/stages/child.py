"""A process of this machine that does what its parent asks, one thing at a time.

Libraries take seconds to import, and threads of one process import, tokenise and decide in turn: a child does so on a
core of its own. It gets a function and its arguments, says what `tell` is given while it works, and answers. It ends
with its parent, whose death closes its standard input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

import cloudpickle

from pipeline.models.libraries import collect_rarely

Answer = TypeVar("Answer")

END_SECONDS = 2.0
"""For which a child goes on that was told to end; then it is killed."""

ENDING = threading.Event()
"""In a child: its parent waits for nothing more."""

_SIZE = 8  # bytes that say how long a message is
_TOLD, _ANSWER, _ERROR = "told", "answer", "error"
_PROGRAM = "from pipeline.stages.child import serve; serve()"


class LostChildError(Exception):
    """A child ended while it was at work."""


class Child:
    """A process that is there until `end`, or until it dies."""

    def __init__(self, threads: int | None = None, quiet: bool = False) -> None:
        """Begin the process.

        Args:
            threads: of the CPU for what it computes; None: as its libraries choose.
            quiet: whether nobody sees what it writes to standard error.

        Raises:
            OSError: it cannot be started.
        """
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths}
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's to answer
        )

    def call(
        self, function: Callable[..., Answer], *arguments: Any, heard: Callable[[Any], object] | None = None
    ) -> Answer:
        """What a function answers there; one call at a time.

        Args:
            function: and
            arguments: of it, which cloudpickle can carry.
            heard: called with what the function passes to `tell`; None: nobody listens.

        Raises:
            LostChildError: the process ended before it answered.
            Exception: that the function raised; a `RuntimeError` that names it where it cannot be carried.
        """
        work = cloudpickle.dumps((function, arguments))
        message = self._exchange(work)
        while message is not None:
            kind, value = pickle.loads(message)
            if kind == _ANSWER:
                answer: Answer = value
                return answer
            if kind == _ERROR:
                raise value
            if heard is not None:
                heard(value)
            message = self._exchange()
        raise LostChildError(f"process {self.process.pid} ended while it was at work")

    def _exchange(self, work: bytes | None = None) -> bytes | None:
        """What the process says next, after it was told what to do; None when it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if work is not None:
                _send(self.process.stdin, work)
            return _receive(self.process.stdout)
        except (OSError, ValueError):  # a pipe breaks; another thread has closed it
            return None

    def close(self) -> None:
        """Tell the process to end, without waiting for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        """End the process: within some seconds by itself, else it is killed."""
        self.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdout.close()


def tell(message: Any) -> None:
    """Let the parent hear something of a call while it is worked on; of the child alone."""
    _send(_answers, pickle.dumps((_TOLD, message)))


def serve() -> None:
    """Do what comes on standard input until that ends."""
    global _answers
    collect_rarely()
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(calls,), name="seenset-parent", daemon=True).start()
    while (message := calls.get()) is not None:
        try:
            function, arguments = pickle.loads(message)
            answer = _ANSWER, function(*arguments)
        except BaseException as error:
            answer = _ERROR, _carried(error)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            _send(_answers, cloudpickle.dumps(answer))


_answers: IO[bytes]


def _listen(calls: queue.SimpleQueue[bytes | None]) -> None:
    while (message := _receive(sys.stdin.buffer)) is not None:
        calls.put(message)
    ENDING.set()
    calls.put(None)
    time.sleep(END_SECONDS)
    os._exit(1)


def _carried(error: BaseException) -> BaseException:
    """The error if it can be carried, with where it was raised."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    except Exception:  # whatever its class does
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _send(file: IO[bytes], message: bytes) -> None:
    file.write(len(message).to_bytes(_SIZE, "little") + message)
    file.flush()


def _receive(file: IO[bytes]) -> bytes | None:
    """A message; None if it breaks off."""
    size = file.read(_SIZE)
    length = int.from_bytes(size, "little")
    message = file.read(length)
    return message if len(size) == _SIZE and len(message) == length else None
