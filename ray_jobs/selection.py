"""A fold over score shards: few are read in this process, many by tasks on the cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

from pipeline.audit.scored import Each
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.cluster import connect

MANY_SHARDS = 512
SIDE_BY_SIDE = 8
SHARDS_A_TASK = 64
TASKS_A_CPU = 4
"""Tasks under way at a time, so that results do not pile up in the object store."""


def each_here(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    """The function of every shard, in this process."""
    yield from map(function, receipts)


def each_side_by_side(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    """The function of every shard, in order, by threads of this process that wait for an object store together."""
    following = iter(receipts)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        under_way = deque(pool.submit(function, receipt) for receipt in islice(following, SIDE_BY_SIDE))
        while under_way:
            result = under_way.popleft().result()
            under_way.extend(pool.submit(function, receipt) for receipt in islice(following, 1))
            yield result


def fold_of(store: Store, cluster: bool) -> Each:
    """How the shards of a run are read: many documents by what has scored them, if that is at hand."""
    few = each_here if store.local else each_side_by_side
    return partial(each, few=few) if cluster else few


def each(receipts: Sequence[Receipt], function: Callable[[Receipt], Any], few: Each = each_here) -> Iterator[Any]:
    """The function of every shard, in any order: here for a few shards, on the cluster for many."""
    if len(receipts) < MANY_SHARDS:
        yield from few(receipts, function)
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
