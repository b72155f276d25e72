"""Shards in bundles: those of one input differ in a number or two, and take little memory together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence

from pipeline.corpus.shard import Shard

IN_BUNDLE = 64


def bundles(shards: Sequence[Shard]) -> Iterator[bytes]:
    """Shards in their order, `IN_BUNDLE` of them packed together."""
    for start in range(0, len(shards), IN_BUNDLE):
        yield packed(shards[start : start + IN_BUNDLE])


def packed(bundle: Sequence[Shard]) -> bytes:
    """A bundle in few bytes."""
    return zlib.compress(json.dumps([shard.to_dict() for shard in bundle]).encode(), 1)


def shards_in(data: bytes) -> list[Shard]:
    """The inverse of `packed`."""
    return [Shard.from_dict(row) for row in json.loads(zlib.decompress(data))]
