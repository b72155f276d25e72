"""One shard through a stage in this process, which executors are compared with."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.corpus.shard import Shard
from pipeline.stages.base import Stage, Worker
from pipeline.stages.worker import ShardStream
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt


def process(
    stage: Stage,
    worker: Worker,
    shard: Shard,
    store: Store,
    driver: str | None = "",
    on_batch: Callable[[Shard, int, int], None] = lambda *_: None,
) -> Receipt:
    """Finish one shard and file its receipt; an already filed receipt is returned as it is.

    Args:
        stage: of the worker.
        worker: from `stage.make`.
        shard: to be finished.
        store: the run directory.
        driver: as for `ShardStream`.
        on_batch: as for `ShardStream`.

    Raises:
        UserError: the shard's file is damaged.
        RuntimeError: its worker died too often.
        LostDeviceError: the device refuses all further work; this process must not work on.
    """
    shards = iter([shard])
    stream = ShardStream(stage, worker, store, driver, on_batch)
    ((_, result),) = stream.finish(lambda prefetch: next(shards, None))
    if isinstance(result, Receipt):
        return result
    raise result
