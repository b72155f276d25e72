"""A fold over score shards: few are read in this process, many by tasks on the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.store.receipts import Receipt
from ray_jobs.actors import connect

MANY_SHARDS = 512
SHARDS_A_TASK = 64
TASKS_A_CPU = 4
"""Tasks under way at a time, so that results do not pile up in the object store."""


def each_here(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    """The function of every shard, in this process."""
    yield from map(function, receipts)


def each(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    """The function of every shard, in any order: here for a few shards, on the cluster for many."""
    if len(receipts) < MANY_SHARDS:
        yield from each_here(receipts, function)
        return
    import ray

    connect()

    @ray.remote
    def of_some(function: Callable[[Receipt], Any], some: Sequence[Receipt]) -> list[Any]:
        return [function(receipt) for receipt in some]

    held = ray.put(function)  # may hold an index of all calibration documents: too large for a task's own code

    starts = iter(range(0, len(receipts), SHARDS_A_TASK))
    most = max(1, TASKS_A_CPU * int(ray.cluster_resources().get("CPU", 1)))
    running: list[Any] = []
    while True:
        while len(running) < most and (start := next(starts, None)) is not None:
            running.append(of_some.remote(held, receipts[start : start + SHARDS_A_TASK]))
        if not running:
            return
        (ended,), running = ray.wait(running, num_returns=1)
        yield from ray.get(ended)
