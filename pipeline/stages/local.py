"""Shards through a stage in this process: threads that share one set of weights, each with a batch of its own.

A batch is computed by as many threads of the CPU as an actor on a cluster would have, so that the rows are the same
bytes. What a killed process was working on is known from its journals: those shards go first, one at a time, which
finds a document that kills its worker without suspecting those beside it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.corpus.shard import Shard
from pipeline.errors import FullError, LostDeviceError, instead_of_exit
from pipeline.models.sharing import SharedModels
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Advance, Event, Failure, Ready, Tick, failure_of
from pipeline.stages.process import LOCAL_DRIVER, process
from pipeline.stages.turns import SHARDS_AT_A_TIME, Turn, Turns
from pipeline.store.attempts import interrupted_work
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

TICK_SECONDS = 0.5
STOP_SECONDS = 2.0
"""Waited for workers that are in the midst of a batch when the driver stops; their shards are begun anew."""


def finish_shards(
    stage: Stage,
    shards: Sequence[Shard],
    store: Store,
    workers: int,
    gpus: float = 0,
    threads: int = 1,
    shared: SharedModels | None = None,
) -> Iterator[Event]:
    """Finish shards in this process.

    Args:
        stage: whose models are at hand.
        shards: without a receipt of the stage.
        store: the run directory.
        workers: batches at a time, >= 1.
        gpus: of this process, for all workers.
        threads: of the CPU, for a batch.
        shared: models that may be open already, and stay so; for several workers unless they are `alone`.

    Returns:
        Receipts and failures in the order in which shards end, and between them how far the others are. Closing the
        iterator stops the workers after their batches.

    Raises:
        UserError: a model cannot be opened.
        LostDeviceError: the device refuses all further work of this process.
    """
    placement = Placement(gpus, threads, SharedModels() if shared is None and workers > 1 else shared)
    killed = interrupted_work(store, stage.name, LOCAL_DRIVER)
    suspects = [shard for shard in shards if shard.id in killed]
    others = [shard for shard in shards if shard.id not in killed]
    before = torch.get_num_threads()
    try:
        for part, most in ((suspects, 1), (others, workers)):
            if part:
                yield from _Pool(stage, part, store, placement).run(min(most, len(part)))
    finally:
        torch.set_num_threads(before)


class _Pool:
    """Workers that take shards from one line, each with two threads: one shard is worked on, the next one read."""

    def __init__(self, stage: Stage, shards: Sequence[Shard], store: Store, placement: Placement) -> None:
        self.stage = stage
        self.store = store
        self.placement = placement
        self.waiting = deque(shards)
        self.workers = 1
        self.line = threading.Lock()
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.ready = threading.Event()

    def run(self, workers: int) -> Iterator[Event]:
        """Start the threads and pass on what they say, until all shards have ended."""
        self.workers = workers
        remaining = len(self.waiting)
        threads = [
            threading.Thread(target=self.work, name=f"seenset-worker-{index}", daemon=True) for index in range(workers)
        ]
        for thread in threads:
            thread.start()
        try:
            while remaining:
                try:
                    event = self.events.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    event = Tick()
                if isinstance(event, BaseException):
                    raise event
                remaining -= isinstance(event, (Receipt, Failure))
                yield event
        finally:
            self.stop.set()
            end = time.monotonic() + STOP_SECONDS
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))

    def work(self) -> None:
        """One thread: make a worker, finish shards with another thread until none waits."""
        try:
            crew = _Crew(self.stage.make(self.stage, self.placement))
            if not self.ready.is_set():
                self.ready.set()
                self.events.put(Ready())
        except BaseException as error:  # raised by the driver's thread
            self.events.put(instead_of_exit(error))
            return
        name = threading.current_thread().name
        others = [
            threading.Thread(target=self.finish_all, args=(crew,), name=f"{name}-{index}", daemon=True)
            for index in range(1, SHARDS_AT_A_TIME)
        ]
        for other in others:
            other.start()
        self.finish_all(crew)
        for other in others:
            other.join()

    def finish_all(self, crew: _Crew) -> None:
        """Finish shards with a worker until it shall take no other."""
        try:
            while True:
                with crew.turns.take() as turn:
                    if self.stop.is_set() or (shard := self.next_shard(crew)) is None:
                        return
                    self.events.put(self.finish(crew, shard, turn))
                with self.line:
                    crew.shards -= 1
        except _Stopped:
            return
        except BaseException as error:  # as above
            self.events.put(instead_of_exit(error))

    def next_shard(self, crew: _Crew) -> Shard | None:
        """The next in line; none is read ahead that another worker may soon begin at once."""
        with self.line:
            if not self.waiting or (crew.shards and len(self.waiting) < self.workers):
                return None
            crew.shards += 1
            return self.waiting.popleft()

    def finish(self, crew: _Crew, shard: Shard, turn: Turn) -> Receipt | Failure:
        """The receipt of a shard, or why there is none."""

        def on_batch(documents: int, tokens: int) -> None:
            if self.stop.is_set():
                raise _Stopped
            self.events.put(Advance(shard.id, documents, tokens))

        try:
            return process(self.stage, crew.worker, shard, self.store, LOCAL_DRIVER, on_batch, turn)
        except (_Stopped, FullError, LostDeviceError):  # no other shard could be finished or filed either
            self.stop.set()  # before the turn ends: whoever waits for it begins no work
            raise
        except (Exception, SystemExit) as error:  # of one shard: the others go on
            return failure_of(shard, error)


@dataclass(slots=True)
class _Crew:
    """A worker, and the threads that share it."""

    worker: Any
    turns: Turns = field(default_factory=Turns)
    shards: int = 0  # that it has begun


class _Stopped(BaseException):
    """Ends a thread whose driver no longer waits for it."""
