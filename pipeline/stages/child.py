"""A process of this machine that does what its parent asks, one thing at a time.

Libraries take seconds to import, and threads of one process import, tokenise and decide in turn: a child does so on a
core of its own. It gets a function and its arguments, says what `tell` is given while it works, and answers. It ends
with its parent, whose death closes its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any, TypeVar, cast

import cloudpickle

from pipeline.errors import instead_of_exit
from pipeline.models.libraries import collect_rarely, import_models, keep_memory

Answer = TypeVar("Answer")

END_SECONDS = 2.0
"""For which a child goes on that was told to end; then it is killed."""

ENDING = threading.Event()
"""In a child: its parent waits for nothing more."""

_SIZE = 8  # bytes that say how long a message is
_TOLD, _ANSWER, _ERROR = "told", "answer", "error"


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
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from pipeline.stages.child import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            bufsize=0,
            env=_environment(threads),
            start_new_session=True,  # Ctrl-C is the parent's to answer
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.process: subprocess.Popen[bytes] | None = process
        self.calls: IO[bytes] = process.stdin  # without a buffer, whose lock a thread that writes would hold
        self.answers: IO[bytes] = io.BufferedReader(cast(io.FileIO, process.stdout))

    @classmethod
    def of_pipes(cls, calls: IO[bytes], answers: IO[bytes]) -> Child:
        """A process that another one has begun."""
        child = cls.__new__(cls)
        child.process, child.calls, child.answers = None, calls, answers
        return child

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
        answer: Answer = self.call_carried(carried(function, *arguments), heard)
        return answer

    def call_carried(self, work: bytes, heard: Callable[[Any], object] | None = None) -> Any:
        """As `call`, of what `carried` gave: what is large is made ready once for several children."""
        message = self._exchange(work)
        while message is not None:
            kind, value = pickle.loads(message)
            if kind == _ANSWER:
                return value
            if kind == _ERROR:
                raise value
            if heard is not None:
                heard(value)
            message = self._exchange()
        raise LostChildError("a process ended while it was at work")

    def _exchange(self, work: bytes | None = None) -> bytes | None:
        """What the process says next, after it was told what to do; None when it has ended."""
        try:
            if work is not None:
                _send(self.calls, work)
            return _receive(self.answers)
        except (OSError, ValueError):  # a pipe breaks; another thread has closed it
            return None

    def close(self) -> None:
        """Tell the process to end, without waiting for it."""
        with contextlib.suppress(OSError):
            self.calls.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        """End the process: within some seconds by itself, else it is killed, unless another one has begun it."""
        self.close()
        if self.process is not None:
            _await(self.process, seconds)
        with contextlib.suppress(OSError):
            self.answers.close()


def carried(function: Callable[..., Any], *arguments: Any) -> bytes:
    """A call, as a child takes it."""
    return cloudpickle.dumps((function, arguments))


class Nursery:
    """Several children that are copies of one process, which has imported what all of them need.

    So it is imported once, and stands in memory once. Where that begins threads, which no copy would have, it makes
    none: its children are lost at once, and the caller begins others. Linear algebra does so where it may use several
    threads: such children are begun one by one.
    """

    def __init__(self, count: int, threads: int) -> None:
        """Begin the process, which makes the children when it has imported the libraries.

        Args:
            count: of children.
            threads: of the CPU for what each computes.

        Raises:
            OSError: it cannot be started.
        """
        self.children: list[Child] = []
        self.process: subprocess.Popen[bytes] | None = None
        if threads > 1:
            self.children = [Child(threads) for _ in range(count)]
            return
        theirs: list[tuple[int, int]] = []
        try:
            for _ in range(count):
                (calls, write), (read, answers) = os.pipe(), os.pipe()
                theirs.append((calls, answers))
                self.children.append(Child.of_pipes(os.fdopen(write, "wb", 0), os.fdopen(read, "rb")))
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from pipeline.stages.child import breed; breed({theirs!r})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[end for ends in theirs for end in ends],
                env=_environment(threads),
                start_new_session=True,
            )
        except OSError:
            for child in self.children:
                child.end()
            raise
        finally:
            for end in itertools.chain(*theirs):
                os.close(end)

    def end(self, seconds: float = END_SECONDS) -> None:
        """End all children that there are still: within some seconds by themselves, else they are killed."""
        for child in self.children:
            child.close()
        end = time.monotonic() + seconds
        if self.process is not None:
            _await(self.process, seconds)
        for child in self.children:
            child.end(max(0.0, end - time.monotonic()))


_ahead: dict[tuple[int, int], Nursery] = {}  # by the count of children and their threads


def begin_ahead(count: int, threads: int) -> None:
    """Begin children that `nursery_of` will give, while this process imports for seconds itself.

    Args:
        count: of children.
        threads: of the CPU for what each computes.
    """
    with contextlib.suppress(OSError):  # whoever needs them tries again, and says so
        _ahead[count, threads] = Nursery(count, threads)


def nursery_of(count: int, threads: int) -> Nursery:
    """So many children: those that were begun ahead, or others.

    Raises:
        OSError: they cannot be started.
    """
    nursery = _ahead.pop((count, threads), None)
    end_ahead()
    return Nursery(count, threads) if nursery is None else nursery


def end_ahead() -> None:
    """End the children that were begun ahead, and are not needed."""
    while _ahead:
        _ahead.popitem()[1].end(0)


def _environment(threads: int | None) -> dict[str, str]:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    return environment


def _await(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process that leads a session, and kill what is left of that."""
    if process.returncode is not None:  # its number may be another's by now
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(OSError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tell(message: Any) -> None:
    """Let the parent hear something of a call while it is worked on; of the child alone."""
    _send(_answers, pickle.dumps((_TOLD, message)))


def breed(pipes: Sequence[tuple[int, int]]) -> None:
    """Import what models need, and make a child for each pair of pipes: (its calls, its answers)."""
    collect_rarely()
    import_models()
    if not _is_alone():
        return
    gc.freeze()  # what is never looked through is never copied
    begun = 0
    for mine in pipes:
        try:
            child = os.fork()
        except OSError:  # the parent begins the others itself
            break
        begun += 1
        if child == 0:
            try:
                for pipe in itertools.chain(*pipes):
                    if pipe not in mine:
                        os.close(pipe)
                _serve(*mine)
            finally:
                os._exit(0)
    for pipe in itertools.chain(*pipes):
        os.close(pipe)
    for _ in range(begun):
        os.wait()


def _is_alone() -> bool:
    """Whether this thread is the only one: of others a copy would have the locks that they hold, and nothing else."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # nobody knows
        return False


def serve() -> None:
    """Do what comes on standard input until that ends."""
    collect_rarely()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    _serve(0, answers)


def _serve(reading: int, writing: int) -> None:
    global _answers
    keep_memory()
    os.set_inheritable(writing, False)  # the end of this process is to be seen, whatever it has begun itself
    os.register_at_fork(after_in_child=partial(_close, writing))
    _answers = os.fdopen(writing, "wb")
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(os.fdopen(reading, "rb"), calls), name="seenset-parent", daemon=True).start()
    while (message := calls.get()) is not None:
        try:
            function, arguments = pickle.loads(message)
            answer = cloudpickle.dumps((_ANSWER, function(*arguments)))
        except BaseException as error:
            answer = cloudpickle.dumps((_ERROR, _able_to_travel(instead_of_exit(error))))
        with contextlib.suppress(OSError):  # nobody waits for it any more
            _send(_answers, answer)


_answers: IO[bytes]


def _listen(parent: IO[bytes], calls: queue.SimpleQueue[bytes | None]) -> None:
    while (message := _receive(parent)) is not None:
        calls.put(message)
    ENDING.set()
    calls.put(None)
    time.sleep(END_SECONDS)
    os._exit(1)


def _close(pipe: int) -> None:
    with contextlib.suppress(OSError):
        os.close(pipe)


def _able_to_travel(error: BaseException) -> BaseException:
    """The error if it can be carried, with where it was raised."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    except Exception:  # whatever its class does
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _send(file: IO[bytes], message: bytes) -> None:
    for part in (len(message).to_bytes(_SIZE, "little"), message):
        rest = memoryview(part)
        while rest:
            rest = rest[file.write(rest) :]
    file.flush()


def _receive(file: IO[bytes]) -> bytes | None:
    """A message; None if it breaks off."""
    size = file.read(_SIZE)
    length = int.from_bytes(size, "little")
    message = file.read(length)
    return message if len(size) == _SIZE and len(message) == length else None
