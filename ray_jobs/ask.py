"""Jobs that ask an endpoint: in the driver, whose environment holds the key, through one client that keeps the limits.

There is nothing to spread over a cluster here: the endpoint computes, and its limits and the budget are those of the
whole run. Two shards are under way at a time, so that the end of one leaves no place empty.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from pipeline.corpus.shard import Shard
from pipeline.endpoint.answers import spent_before
from pipeline.endpoint.client import Endpoint
from pipeline.errors import FullError, StopError
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Answered, Failure, failure_of
from pipeline.stages.process import process_by_asking
from pipeline.stages.registry import ANSWER_FOLDERS
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

SHARDS = 2
TICK_SECONDS = 2.0


def ask_shards(stage: Stage, shards: Sequence[Shard], store: Store) -> Iterator[Receipt | Failure | Answered]:
    """Finish shards by asking the endpoint of a stage.

    Args:
        stage: with an endpoint.
        shards: without a receipt of the stage.
        store: the run directory.

    Returns:
        Receipts and failures in the order in which shards end; while there is none, every few seconds how many
        requests were answered.

    Raises:
        StopError: no document would get an answer now, or the budget is spent.
        FullError: there is no space left for answers.
    """
    assert stage.endpoint is not None
    client = Endpoint(stage.endpoint, spent_before(store, stage.name, ANSWER_FOLDERS))
    results = _results(stage, client, shards, store)

    with asyncio.Runner() as runner:
        idle = True
        try:
            while True:
                idle = False
                result = runner.run(_next(results))
                idle = True
                if result is _END:
                    return
                yield result
        finally:
            if idle:  # else an interrupt or error came out of its midst, and the runner ends what is under way
                runner.run(_close(results))


_END: Any = object()


async def _next(results: AsyncGenerator[Receipt | Failure | Answered, None]) -> Any:
    return await anext(results, _END)


async def _close(results: AsyncGenerator[Receipt | Failure | Answered, None]) -> None:
    await results.aclose()


async def _results(
    stage: Stage, client: Endpoint, shards: Sequence[Shard], store: Store
) -> AsyncGenerator[Receipt | Failure | Answered, None]:
    asker = stage.make(stage, Placement())
    waiting = deque(shards)
    live: dict[asyncio.Task[Receipt], Shard] = {}
    async with client as endpoint:
        try:
            while waiting or live:
                while waiting and len(live) < SHARDS:
                    shard = waiting.popleft()
                    live[asyncio.create_task(process_by_asking(stage, asker, shard, store, endpoint))] = shard
                done, _ = await asyncio.wait(live, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield Answered(endpoint.answered)
                for task in done:
                    yield _outcome(task, live.pop(task))
        finally:
            for task in live:
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)


def _outcome(task: asyncio.Task[Receipt], shard: Shard) -> Receipt | Failure:
    """The receipt of a shard, or why there is none.

    Raises:
        StopError: there will be none of any.
        FullError: nothing more could be written down.
    """
    try:
        return task.result()
    except (FullError, StopError):
        raise
    except Exception as error:
        return failure_of(shard, error)
