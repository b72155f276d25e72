"""Events of the shards of a stage for the driver, and token rows of reread documents; without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from pipeline.config.corpus import ChatConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, error_line, instead_of_exit
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

_RAISED = re.compile(r"(detector .+ raised \w+)")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


def kind_of_message(message: str) -> str:
    """A message without the numbers of its document; of an error in a detector only its place and its type."""
    raised = _RAISED.match(message)
    return _NUMBERS.sub("#", raised[1] if raised is not None else message)


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
"""One row per document: the pieces of its text, and two numbers per piece, null if the model gives none."""

STATISTICS = frozenset({"log_prob", "mean", "variance"})
"""Statistics of a forward pass that `standardised` requires."""

VERSIONS = "versions"
"""Column of a score file with the data of all versions."""

VERSIONS_TYPE = pa.struct(
    [
        ("published", pa.int32()),  # index, from 0
        ("digests", pa.binary()),  # concatenated SHA-256 of each version before transforms
        ("kinds", pa.list_(pa.string())),  # kinds of the edited sites
        ("forms", pa.list_(pa.binary())),  # of each version; empty if unknown
        ("scores", pa.list_(pa.float64())),  # scores of the first version by each detector, then of the second
    ]
)

FEATURES = "features"
"""Column of a score file with `DrawFeatures`, of what the texts show of the draw; null where `seenset mark` drew."""

FEATURES_TYPE = pa.struct(
    [
        ("number", pa.int32()),
        ("equal", pa.int64()),
        ("sketches", pa.binary()),
        ("marks", pa.int8()),
        ("options", pa.int64()),
        ("order", pa.int16()),
        ("orders", pa.list_(pa.int16())),
        ("places", pa.list_(pa.int16())),
        ("columns", pa.list_(pa.string())),
        ("answers", pa.list_(pa.int16())),
    ]
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A shard that could not be finished, with the reason in one line."""

    shard: str
    message: str


@dataclass(frozen=True, slots=True)
class Advance:
    """Progress of an unfinished shard."""

    shard: str
    documents: int  # finished or refused
    tokens: int
    scored: bool = False  # whether a document of it has a result
    failed: Mapping[str, int] = field(default_factory=dict)
    """While none has: documents that failed by the first message of their kind, for at most two kinds."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Number of requests that an endpoint has answered in a stage so far."""

    requests: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its models."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A message of a worker for the user, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A second has passed without news."""


Event = Receipt | Failure | Advance | Answered | Ready | Remark | Tick


def failure_event(shard: Shard, raised: Exception | SystemExit) -> Failure:
    """The failure event of an exception."""
    error = instead_of_exit(raised)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return Failure(shard.id, f"{kind}{error_line(error)}")


class ScoredText(NamedTuple):
    """A scored document."""

    row: int  # number in the input
    key: int  # `text_key`
    tokens: int


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """The documents to read, in row order."""

    by_shard: Mapping[str, Sequence[ScoredText]]  # shard id -> its documents

    def __len__(self) -> int:
        """Number of documents."""
        return sum(map(len, self.by_shard.values()))

    def fingerprint(self) -> str:
        """The value in the fingerprint of the stage."""
        return hashlib.sha256(json.dumps(self.by_shard).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ScoredChats:
    """How chats were rendered when they were scored."""

    chat: ChatConfig
    template: str  # digest of the template of the audited model

    def fingerprint(self) -> str:
        """The value in the fingerprint of the stage."""
        return self.template


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """The documents that are read again, and the model."""

    texts: ScoredTexts
    model: ModelConfig
    device: str  # `Device.mark`
    windows: tuple[int, int] | None = None  # maximum number for a document, and ids of each; None: its beginning
    chats: ScoredChats | None = None  # None if the documents are no chats
