"""Shards in bundles, each a task of an actor: a task costs the driver memory and time before anything runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence

from pipeline.corpus.shard import Shard

MOST_IN_BUNDLE = 256
FEW_TASKS = 1_000
"""So many tasks start within a second or two: fewer shards are not bundled at all."""

QUEUED = 2
"""Bundles of an actor at a time: one that it works on, one that waits for it."""


def bundles(shards: Sequence[Shard], actors: int) -> Iterator[Sequence[Shard]]:
    """Cut shards into bundles, in their order: large ones first, single shards last, so that all actors end together.

    A bundle is no larger than an equal share of what remains, of all bundles that actors hold at a time (guided
    self-scheduling).

    Args:
        shards: to be finished.
        actors: how many work on them, >= 1.
    """
    most = min(MOST_IN_BUNDLE, -(-len(shards) // FEW_TASKS))
    start = 0
    while start < len(shards):
        size = min(most, max(1, (len(shards) - start) // (QUEUED * actors)))
        yield shards[start : start + size]
        start += size


def packed(bundle: Sequence[Shard]) -> bytes:
    """A bundle in few bytes: the shards of one input differ in a number or two."""
    return zlib.compress(json.dumps([shard.to_dict() for shard in bundle]).encode(), 1)


def shards_in(data: bytes) -> list[Shard]:
    """The inverse of `packed`."""
    return [Shard.from_dict(row) for row in json.loads(zlib.decompress(data))]
