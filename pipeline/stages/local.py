"""The thread executor: a stage in this process, with workers that share one set of weights.

A batch is computed with the number of CPU threads of an actor on a cluster, so that the rows have the same bytes.
Shards with an open attempt of a killed process are finished first, one at a time, which identifies a document that
kills its process without suspecting documents of other shards.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import torch

from pipeline.corpus.shard import Shard
from pipeline.errors import FullError, StopError, instead_of_exit
from pipeline.models.sharing import SharedModels
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Advance, Answered, Event, Failure, Ready, Tick, failure_event
from pipeline.stages.worker import ShardStream
from pipeline.store.attempts import LOCAL_DRIVER, interrupted_work
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

TICK_SECONDS = 0.5
ENDPOINT_WORKERS = 2
"""Concurrent shards for an endpoint, so that the client stays busy at the end of a shard."""

STOP_SECONDS = 2.0
"""Maximum wait for workers that compute a batch when the driver stops; their shards start again."""


def finish_shards(
    stage: Stage,
    shards: Sequence[Shard],
    store: Store,
    workers: int,
    placement: Placement | None = None,
) -> Generator[Event]:
    """Finish shards in this process.

    Args:
        stage: stage with local models or an endpoint.
        shards: shards without a receipt of the stage.
        store: run directory.
        workers: number of concurrent batches, >= 1.
        placement: resources of all workers; its models may be loaded already and stay loaded; None: one CPU thread
            each. Several workers share weights. A client of an endpoint is closed at the end.

    Returns:
        Receipts and failures in the order in which shards end, interleaved with the progress of others. Closing the
        iterator stops the workers after their batches.

    Raises:
        UserError: a model cannot be opened.
        LostDeviceError: the device refuses all further work of this process.
        StopError: an endpoint would answer for no document, or the budget is exhausted.
        FullError: no space is left.
    """
    placement = placement or Placement()
    if placement.shared is None and workers > 1:
        placement = replace(placement, shared=SharedModels())
    killed = interrupted_work(store, stage.name, LOCAL_DRIVER)
    suspects = [shard for shard in shards if shard.id in killed]
    others = [shard for shard in shards if shard.id not in killed]
    before = torch.get_num_threads()
    try:
        for part, most in ((suspects, 1), (others, workers)):
            if part:
                yield from _Pool(stage, part, store, placement, min(most, len(part)), alone=part is suspects).run()
    finally:
        torch.set_num_threads(before)


class _Pool:
    """Workers that take shards from one queue, each in a thread."""

    def __init__(
        self, stage: Stage, shards: Sequence[Shard], store: Store, placement: Placement, workers: int, *, alone: bool
    ) -> None:
        self.stage = stage
        self.store = store
        self.placement = placement
        self.endpoint = placement.endpoint
        self.alone = alone  # only one shard is read or computed at a time
        self.waiting = deque(shards)
        self.workers = workers
        self.taking = threading.Lock()
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.ready = threading.Event()

    def run(self) -> Iterator[Event]:
        """Start the threads and yield their events until all shards have ended."""
        remaining = len(self.waiting)
        threads = [
            threading.Thread(target=self.work, name=f"seenset-worker-{index}", daemon=True)
            for index in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        try:
            while remaining:
                try:
                    event = self.events.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    event = Tick() if self.endpoint is None else Answered(self.endpoint.client.answered)
                if isinstance(event, BaseException):
                    raise event
                remaining -= isinstance(event, (Receipt, Failure))
                yield event
        finally:
            self.stop.set()
            if self.endpoint is not None:
                self.endpoint.close()
            end = time.monotonic() + STOP_SECONDS
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))

    def work(self) -> None:
        """One thread: construct a worker and finish shards until none is left."""
        try:
            worker = self.stage.make(self.stage, self.placement)
            self.stage.check_models(hub=True)
            if not self.ready.is_set():
                self.ready.set()
                self.events.put(Ready())
            driver = LOCAL_DRIVER if self.endpoint is None else None  # requests to an endpoint kill no process

            def advance(shard: Shard, documents: int, tokens: int) -> None:
                """Report the progress of a shard; stop the worker if the driver has stopped."""
                if self.stop.is_set():
                    raise _Stopped
                self.events.put(Advance(shard.id, documents, tokens, *stream.failures(shard)))

            stream = ShardStream(self.stage, worker, self.store, driver, advance, alone=self.alone)
            for shard, result in stream.finish(self.take):
                if isinstance(result, (FullError, StopError)):  # affects all other shards
                    raise result
                self.events.put(result if isinstance(result, Receipt) else failure_event(shard, result))
        except _Stopped:
            return
        except BaseException as error:  # raised by the driver's thread
            self.stop.set()
            self.events.put(instead_of_exit(error))

    def take(self, early: bool) -> Shard | None:
        """The next shard; it is not prefetched if another worker could start it soon, or during an isolation."""
        with self.taking:
            if self.stop.is_set() or not self.waiting or (early and (self.alone or len(self.waiting) < self.workers)):
                return None
            return self.waiting.popleft()


class _Stopped(BaseException):
    """Ends a thread whose driver no longer waits for it."""
