"""What a driver hears of the shards of a stage, and the rows of documents that are read once more: without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from pipeline.config.models import ModelConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, instead_of_exit
from pipeline.store.receipts import Receipt

QUARANTINE_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("role", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("id_key", pa.int64()),
    ]
)

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

STATISTICS = frozenset({"log_prob", "mean", "variance"})
"""Of a forward pass: what `standardised` is of."""

VERSIONS = "versions"
"""The column of a score file with what is known of all versions."""

VERSIONS_TYPE = pa.struct(
    [
        ("published", pa.int32()),  # index, from 0
        ("digests", pa.binary()),  # SHA-256 of each version as its file has it, side by side
        ("kinds", pa.list_(pa.string())),  # of the edited sites
        ("forms", pa.list_(pa.binary())),  # of each version; empty where they are not known
        ("scores", pa.list_(pa.float64())),  # of the first version by each detector, then of the second
    ]
)


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


class ScoredText(NamedTuple):
    """A document as it was scored."""

    row: int  # number in the input
    key: int  # `text_key`
    tokens: int


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """The documents that are read, in the order of their rows."""

    by_shard: Mapping[str, Sequence[ScoredText]]  # id of a shard -> its documents

    def __len__(self) -> int:
        """How many documents."""
        return sum(map(len, self.by_shard.values()))

    def fingerprint(self) -> str:
        """What a reading of these documents depends on."""
        return hashlib.sha256(json.dumps(self.by_shard).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Which documents are read once more, and by what."""

    texts: ScoredTexts
    model: ModelConfig
    device: str  # `Device.mark`
