"""One function over many items, such as the score shards of a run: in this process, or by tasks of a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from pipeline.audit.scored import Each, each_in_turn
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.cluster import connect

MANY_SHARDS = 512
SIDE_BY_SIDE = 8
ITEMS_A_TASK = 64
TASKS_A_CPU = 4
"""Tasks under way at a time, so that results do not pile up in the object store."""

TICK_SECONDS = 0.5


def map_in_threads(items: Sequence[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    """The function of every item, in order, by threads of this process that wait for an object store together."""
    following = iter(items)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        under_way = deque(pool.submit(function, item) for item in islice(following, SIDE_BY_SIDE))
        while under_way:
            result = under_way.popleft().result()
            under_way.extend(pool.submit(function, item) for item in islice(following, 1))
            yield result


def map_on_cluster(items: Sequence[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    """The function of every item, in any order, by tasks of the cluster at RAY_ADDRESS, or of one started here.

    Args:
        items: few enough to be held in memory.
        function: may hold an index of all calibration documents: it is sent once.

    Raises:
        UserError: as the function, or no cluster answers.
    """
    import ray

    connect()
    task = ray.remote(_of_each)
    held = ray.put(function)
    parts = iter([items[start : start + ITEMS_A_TASK] for start in range(0, len(items), ITEMS_A_TASK)])
    most = max(1, TASKS_A_CPU * int(ray.cluster_resources().get("CPU", 1)))
    running = [task.remote(held, part) for part in islice(parts, most)]
    try:
        while running:
            ended, running = ray.wait(running, timeout=TICK_SECONDS)
            running += [task.remote(held, part) for part in islice(parts, len(ended))]
            for results in ended:
                yield from ray.get(results)
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)


def _of_each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [function(item) for item in items]


def fold_of(store: Store, cluster: bool) -> Each:
    """How the score shards of a run are read, in any order: many of them on the cluster, if that is at hand."""
    few = each_in_turn if store.local else map_in_threads

    def fold(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
        return (map_on_cluster if cluster and len(receipts) >= MANY_SHARDS else few)(receipts, function)

    return fold
