"""Continuations of a shard's documents, stored so that none is drawn twice; and how scoring reads them back.

Whoever draws them, a shard comes to one file: for each document the rest of its text and what the model wrote instead,
or why there is nothing. A file says in its metadata what it was made of, and a draw in such a file is never made again,
whatever receipt there is: a run that asks for more draws makes those that are missing.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.detectors.base import Continuations, Continued
from pipeline.detectors.registry import parse_detectors, sampled_of
from pipeline.detectors.samia import prefix_and_reference
from pipeline.errors import UserError
from pipeline.models.load import fingerprint_model
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt, write_receipt

FOLDER = "samples"
MAX_NEW_TOKENS = 1024
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("row", pa.int64()),
        ("reference", pa.string()),
        ("continuations", pa.list_(pa.string())),
        ("reason", pa.string()),
        ("problem", pa.string()),
    ]
)

_MADE_OF = b"seenset"


@dataclass(frozen=True, slots=True)
class SampleSet:
    """One way to continue documents, and how many draws of each are wanted."""

    continued: Continued
    draws: int

    @property
    def name(self) -> str:
        """A folder's name: ratio0.5_t1_k50_p1_reference."""
        c = self.continued
        return f"ratio{c.prefix_ratio:g}_t{c.temperature:g}_k{c.top_k or 'all'}_p{c.top_p:g}_{c.candidate_words}"

    @property
    def stage(self) -> str:
        """The stage whose receipts say that a shard has so many draws."""
        return f"sample/{self.name}/{self.draws}"


def sample_sets(config: AuditConfig) -> list[SampleSet]:
    """The continuations that the detectors read."""
    return [SampleSet(*entry) for entry in sampled_of(parse_detectors(config.detectors)).items()]


def made_of(config: AuditConfig, asked: SampleSet) -> dict[str, Any]:
    """All that could change a continuation but its number."""
    found = {
        **fingerprint_model(config.model),
        "continued": asdict(asked.continued),
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "code": __version__,
    }
    if config.text_transform is not None:
        found["text_transform"] = config.text_transform.model_dump()
    return found


def stage_fingerprint(config: AuditConfig, asked: SampleSet) -> dict[str, Any]:
    """The fingerprint of the receipts of a set."""
    return {**made_of(config, asked), "draws": asked.draws}


@dataclass(slots=True)
class Sampled:
    """What a shard's documents came to so far, by row."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0  # that the model at hand drew, in this attempt

    def texts(self, row: int) -> list[str]:
        """The draws of a document, the first ones first."""
        found: list[str] = self.rows[row]["continuations"] if row in self.rows else []
        return found

    def keep(self, document: Document, reference: str, texts: Sequence[str]) -> None:
        """Note the draws of a document."""
        self._note(document, reference, texts, None, None)

    def refuse(self, document: Document, reason: str, problem: str) -> None:
        """Note why a document has no score; the draws that it has are kept."""
        before = self.rows.get(document.row, {"reference": "", "continuations": []})
        self._note(document, before["reference"], before["continuations"], reason, problem)

    def done(self, row: int, draws: int) -> bool:
        """Whether nothing is left to do for a document."""
        found = self.rows.get(row)
        return found is not None and (found["reason"] == "too_short" or len(found["continuations"]) >= draws)

    def _note(
        self, document: Document, reference: str, texts: Sequence[str], reason: str | None, problem: str | None
    ) -> None:
        self.rows[document.row] = {
            "doc_id": document.doc_id,
            "row": document.row,
            "reference": reference,
            "continuations": list(texts),
            "reason": reason,
            "problem": problem,
        }


@dataclass(frozen=True, slots=True)
class Task:
    """A document cut in two: what the model is given, and what it is compared with."""

    document: Document
    prefix: str
    reference: str
    words: int | None  # a draw is done with so many words; None: as the model likes
    max_new_tokens: int


def cut(document: Document, kept: int, continued: Continued) -> Task | None:
    """Cut the first `kept` characters of a document in two; None where it has too few words."""
    prefix, reference = prefix_and_reference(document.text[:kept], continued.prefix_ratio)
    if not prefix or not reference:
        return None
    words = None if continued.candidate_words == "all" else len(reference.split())
    return Task(document, prefix, reference, words, token_limit(len(reference.encode()), continued))


def token_limit(reference_bytes: int, continued: Continued) -> int:
    """Most new tokens of a draw: a third more than the reference's own, at four bytes a token, and 16."""
    if continued.candidate_words == "all":
        return MAX_NEW_TOKENS
    return min(MAX_NEW_TOKENS, 16 + reference_bytes // 3)


def too_short(document: Document, continued: Continued) -> str:
    """Why a document has no prefix."""
    words = len(document.text.split())
    return (
        f"{words} word{'' if words == 1 else 's'}: a prefix of {continued.prefix_ratio:g} of them leaves no two parts"
    )


def stored(store: Store, asked: SampleSet, shard: Shard, fingerprint: Mapping[str, Any]) -> Sampled:
    """What earlier runs filed of a shard, whatever number of draws they asked for.

    Args:
        store: the run directory.
        asked: the set.
        shard: of which.
        fingerprint: of the stage; files that were made of anything else are passed over.
    """
    found = Sampled()
    for name in store.names(f"{FOLDER}/{asked.name}", ".parquet"):
        if not name.startswith(f"{shard.id}-"):
            continue
        table = store.read_table(f"{FOLDER}/{asked.name}/{name}")
        if (table.schema.metadata or {}).get(_MADE_OF) != _metadata(fingerprint, shard):
            continue
        for row in table.to_pylist():
            if row["reason"] != "too_short" and len(row["continuations"]) >= asked.draws:
                row["reason"] = row["problem"] = None  # it failed at a draw that is not asked for now
            if len(row["continuations"]) >= len(found.texts(row["row"])):
                found.rows[row["row"]] = row
    return found


def file_samples(
    store: Store,
    asked: SampleSet,
    shard: Shard,
    fingerprint: Mapping[str, Any],
    sampled: Sampled,
    seconds: float,
    spent: dict[str, int] | None = None,
) -> Receipt:
    """Write a shard's continuations, and then its receipt."""
    data = f"{FOLDER}/{asked.name}/{shard.id}-{uuid.uuid4().hex[:8]}.parquet"
    rows = [sampled.rows[row] for row in sorted(sampled.rows)]
    schema = SCHEMA.with_metadata({_MADE_OF: _metadata(fingerprint, shard)})
    store.write_table(data, pa.Table.from_pylist(rows, schema=schema))
    reasons = Counter(row["reason"] for row in rows if row["reason"] is not None)
    receipt = Receipt(
        shard=shard.id,
        role=shard.role,
        n_in=len(rows),
        n_scored=len(rows) - reasons.total(),
        n_quarantined=reasons.total(),
        data=data,
        quarantine=None,
        reasons=dict(sorted(reasons.items())),
        fingerprint=shard_fingerprint(fingerprint, shard),
        tokens=sampled.tokens if spent is None else spent["tokens"],
        seconds=round(seconds, 3),
        spent=spent,
    )
    return write_receipt(store, asked.stage, receipt)


def read_samples(store: Store, asked: SampleSet, shard: Shard) -> dict[int, Continuations | tuple[str, str]]:
    """By row the continuations of a finished shard's documents, or the reason and message why there are none.

    Raises:
        UserError: the shard was not sampled.
    """
    receipt = read_receipt(store, asked.stage, shard.id)
    if receipt is None:
        raise UserError(f"shard {shard.id} of {shard.name} has no continuations yet")
    return {
        row["row"]: Continuations(row["reference"], row["continuations"])
        if row["reason"] is None
        else (row["reason"], row["problem"])
        for row in store.read_table(receipt.data).to_pylist()
    }


def said(fingerprint: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """All that could change a draw: the stage's fingerprint without the number of draws, and what the shard reads."""
    return {key: value for key, value in shard_fingerprint(fingerprint, shard).items() if key != "draws"}


def _metadata(fingerprint: Mapping[str, Any], shard: Shard) -> bytes:
    return json.dumps(said(fingerprint, shard), sort_keys=True).encode()
