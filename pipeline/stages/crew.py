"""Shards through a stage in several processes of this machine, each with a core and weights of its own.

Threads of one process take turns wherever Python itself works: while it reads, tokenises and counts. Where documents
are short or the model is small, that is most of the time. A process that dies costs its shard an attempt, as on a
cluster: what it had in flight is in the journal, and the process that takes its place goes on there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from pipeline.corpus.shard import Shard
from pipeline.detectors.plugins import load_plugins, loaded_plugins
from pipeline.errors import FullError, IncompleteError, LostDeviceError
from pipeline.models.libraries import give_back
from pipeline.stages.base import Placement, Stage
from pipeline.stages.child import END_SECONDS, ENDING, Child, LostChildError, carried, nursery_of, tell
from pipeline.stages.events import Advance, Event, Failure, Ready, Tick, failure_of
from pipeline.stages.process import process
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

TICK_SECONDS = 0.5
ADVANCE_SECONDS = 0.5

MOST_DEATHS = 3
"""Of processes, one after the other, without a result between them, where no journal counts them."""

GIVING_BACK = 8
"""Shards after which a process gives back memory that the C library holds and nobody uses."""

RECEIPTS_A_CALL = 4
READ_AHEAD = 4
"""Results of a fold that wait for the driver, a process."""

_CLOSED = "the worker processes have ended; what is finished is kept"

Job = TypeVar("Job")
Result = TypeVar("Result")


class Crew:
    """Processes of this machine, until `close`."""

    def __init__(self, size: int, threads: int) -> None:
        """Begin the processes, which import what models need at once.

        Args:
            size: how many, >= 1.
            threads: of the CPU, for a batch.

        Raises:
            OSError: they cannot be started.
        """
        self.threads = threads
        self.closed = False
        self.nursery = nursery_of(size, threads)
        self.children = list(self.nursery.children)

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        for child in self.children:
            child.close()
        end = time.monotonic() + END_SECONDS
        self.nursery.end()
        for child in self.children:
            child.end(max(0.0, end - time.monotonic()))

    def finish_shards(self, stage: Stage, shards: Sequence[Shard], store: Store, driver: str) -> Iterator[Event]:
        """Finish shards, one at a time in each process.

        Args:
            stage: whose models are at hand.
            shards: without a receipt of the stage.
            store: the run directory.
            driver: who asks, for the count of attempts.

        Returns:
            Receipts and failures in the order in which shards end, and between them how far the others are. Closing
            the iterator before that ends the processes.

        Raises:
            UserError: a model cannot be opened.
            IncompleteError: processes die that have no shard yet.
        """
        begin = partial(_open_worker, stage, Placement(0, self.threads))
        finish = partial(_finish, store_url=store.url, driver=driver)
        yield from self._spread(shards, begin, finish, Tick(), ready=Ready(), in_journal=True)

    def each(self, receipts: Sequence[Receipt], function: Callable[[Receipt], Result]) -> Iterator[Result]:
        """The function of every receipt, in any order.

        Raises:
            IncompleteError: processes die of it.
            Exception: that the function raises.
        """
        jobs = [receipts[start : start + RECEIPTS_A_CALL] for start in range(0, len(receipts), RECEIPTS_A_CALL)]
        for results in self._spread(jobs, partial(_hold, function, loaded_plugins()), _of_some):
            yield from results

    def call(self, function: Callable[..., Result], *arguments: Any, check: Callable[[], None]) -> Result:
        """What a function answers in one of the processes.

        Args:
            function: and
            arguments: of it.
            check: called now and then while it is waited for; what it raises ends the process.
        """
        begin, work, tick = partial(load_plugins, loaded_plugins()), partial(_apply, function), object()
        for message in self._spread([arguments], begin, work, tick):
            if message is not tick:
                answer: Result = message
                return answer
            check()
        raise AssertionError("one job has one result")

    def _spread(
        self,
        jobs: Sequence[Job],
        begin: Callable[[], object],
        work: Callable[[Job], Any],
        tick: Any = None,
        ready: Any = None,
        in_journal: bool = False,
    ) -> Iterator[Any]:
        """What the processes tell and answer, as it comes.

        Args:
            jobs: one result each.
            begin: called in each process before its first job.
            work: called in a process with a job.
            tick: what comes where nothing did for a while; None: nothing.
            ready: what comes when the first process is ready for jobs; None: nothing.
            in_journal: whether what dies of a job is counted elsewhere.
        """
        if self.closed:
            raise IncompleteError(_CLOSED)
        waiting = deque(jobs)
        messages: queue.Queue[tuple[bool, Any]] = queue.Queue(0 if in_journal else READ_AHEAD * len(self.children))
        beginning = carried(begin)
        line, stop, begun = threading.Lock(), threading.Event(), threading.Event()
        remaining = len(jobs)

        def put(ends: bool, message: Any) -> None:
            while not stop.is_set():
                try:
                    messages.put((ends, message), timeout=TICK_SECONDS)
                except queue.Full:
                    continue
                return

        def take() -> Job | None:
            with line:
                return waiting.popleft() if waiting and not stop.is_set() else None

        def note_begun() -> None:
            if ready is not None and not begun.is_set():
                begun.set()
                put(False, ready)

        def run(place: int) -> None:
            try:
                self._work_off(place, take, beginning, work, put, note_begun, in_journal)
            except BaseException as error:  # raised by the driver's thread
                put(False, error)

        many = min(len(self.children), len(jobs))
        threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(many)]
        for thread in threads:
            thread.start()
        try:
            while remaining:
                try:
                    ends, message = messages.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    if self.closed:
                        raise IncompleteError(_CLOSED) from None
                    if tick is not None:
                        yield tick
                    continue
                if isinstance(message, BaseException):
                    raise message
                remaining -= ends
                yield message
        finally:
            stop.set()
            if remaining and any(map(_goes_on, threads)):  # for nobody
                self.close()
            for thread in threads:
                thread.join(END_SECONDS)

    def _work_off(
        self,
        place: int,
        take: Callable[[], Job | None],
        begin: bytes,
        work: Callable[[Job], Any],
        put: Callable[[bool, Any], None],
        note_begun: Callable[[], None],
        in_journal: bool,
    ) -> None:
        """Let one process, and those that take its place, work off jobs until none is left."""
        deaths, begun = 0, False
        job: Job | None = None
        while True:
            child = self.children[place]
            try:
                if not begun:
                    child.call_carried(begin)
                    begun = True
                    note_begun()
                if job is None and (job := take()) is None:
                    return
                put(True, child.call(work, job, heard=partial(put, False)))
                job, deaths = None, 0
            except LostChildError:
                if self.closed:
                    return
                child.end()
                if child.process is not None and not (begun and in_journal):
                    deaths += 1
                    if deaths == MOST_DEATHS:
                        raise IncompleteError(
                            f"{deaths} worker processes ended one after the other, the last with code "
                            f"{child.process.returncode}: was memory short? What is finished is kept"
                        ) from None
                try:
                    self.children[place], begun = Child(self.threads), False
                except OSError as error:
                    raise IncompleteError(f"no worker process can be started: {error}") from None
                if self.closed:
                    self.children[place].end()
                    return


_worker: tuple[Stage, Any] | None = None  # of this child
_held: Callable[[Any], Any] | None = None
_finished = 0


def _open_worker(stage: Stage, placement: Placement) -> None:
    global _worker
    _worker = None  # two models at a time may be too many
    _worker = stage, stage.make(stage, placement)


def _finish(shard: Shard, store_url: str, driver: str) -> Receipt | Failure:
    """Finish a shard in a child."""
    global _finished
    assert _worker is not None
    stage, worker = _worker
    reported = time.monotonic()

    def on_batch(documents: int, tokens: int) -> None:
        nonlocal reported
        if ENDING.is_set():
            raise _Stopped
        if time.monotonic() - reported >= ADVANCE_SECONDS:
            reported = time.monotonic()
            tell(Advance(shard.id, documents, tokens))

    try:
        receipt = process(stage, worker, shard, Store(store_url), driver, on_batch)
    except (FullError, LostDeviceError):  # no other shard could be filed or finished either
        raise
    except (Exception, SystemExit) as error:  # of one shard: the others go on
        return failure_of(shard, error)
    _finished += 1
    if _finished % GIVING_BACK == 0:
        give_back()
    return receipt


class _Stopped(BaseException):
    """Ends an attempt whose driver no longer waits for it."""


def _hold(function: Callable[[Any], Any], plugins: Sequence[Any]) -> None:
    global _held
    load_plugins(plugins)
    _held = function


def _of_some(receipts: Sequence[Receipt]) -> list[Any]:
    assert _held is not None
    return [_held(receipt) for receipt in receipts]


def _goes_on(thread: threading.Thread) -> bool:
    thread.join(0.1)  # it may have said its last word
    return thread.is_alive()


def _apply(function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    return function(*arguments)
