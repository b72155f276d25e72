"""Jobs that ask an endpoint: in the driver, whose environment holds the key, through one client that keeps the limits.

There is nothing to spread over a cluster here: the endpoint computes, and its limits and the budget are those of the
whole run. Two shards are under way at a time, so that the end of one leaves no place empty.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

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

Live = dict[asyncio.Task[Receipt], Shard]
"""What is under way."""


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
    asker, waiting, live = stage.make(stage, Placement()), deque(shards), Live()
    with asyncio.Runner() as runner:
        try:
            while waiting or live:
                while waiting and len(live) < SHARDS:
                    shard = waiting.popleft()
                    work = process_by_asking(stage, asker, shard, store, client)
                    live[runner.get_loop().create_task(work)] = shard
                done = runner.run(_ended(live))
                if not done:
                    yield Answered(client.answered)
                for task in done:
                    yield _outcome(task, live.pop(task))
        finally:
            runner.run(_close(live, client))


async def _ended(live: Live) -> set[asyncio.Task[Receipt]]:
    done, _ = await asyncio.wait(live, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    return done


async def _close(live: Live, client: Endpoint) -> None:
    async with client:
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
