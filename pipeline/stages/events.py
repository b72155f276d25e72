"""What a driver hears of the shards of a stage, and the rows of documents that are read once more: without torch."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, instead_of_exit
from pipeline.store.receipts import Receipt

TOKEN_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row", pa.int64()),
        ("text_key", pa.int64()),
        ("pieces", pa.list_(pa.string())),
        ("log_prob", pa.list_(pa.float32())),
        ("standardised", pa.list_(pa.float32())),
    ]
)
"""A row a document: the pieces of its text, and two numbers a piece, which are null where the model gives none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A shard that could not be finished, and why in one line."""

    shard: str
    message: str


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a shard is that is not finished yet."""

    shard: str
    documents: int  # finished or refused
    tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The number of requests that an endpoint has answered in a stage so far."""

    requests: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its models."""


@dataclass(frozen=True, slots=True)
class Remark:
    """What the user should know of a worker, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing new: a second has passed."""


Event = Receipt | Failure | Advance | Answered | Ready | Remark | Tick


def failure_of(shard: Shard, raised: Exception | SystemExit) -> Failure:
    """Why a shard could not be finished."""
    error = instead_of_exit(raised)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return Failure(shard.id, f"{kind}{' '.join(str(error).split())}")
