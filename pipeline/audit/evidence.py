"""What made the scores of the strongest selected documents: their tokens, their neighbours, their near copies.

It shows what a detector weighed, and proves nothing: a document may be selected wrongly, and its tokens then look as
those of any other. No answer depends on it, and a document or a run that has none is as good as one that has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from pipeline.audit.known_copies import Place
from pipeline.audit.scored import Scored
from pipeline.errors import UserError
from pipeline.stages.tokens import TOKEN_SCHEMA
from pipeline.store.files import Store

Kind = Literal["log-probability", "standardised log-probability"]
PLAIN: Kind = "log-probability"
STANDARDISED: Kind = "standardised log-probability"
_DECIDING = ("model", "tokenizer", "dtype", "quantization", "device", "text_transform", "max_tokens", "code")
"""Of a score's fingerprint: what the tokens of a document and their numbers depend on."""

_MADE_BY = b"seenset_made_by"
_NEIGHBOUR = pa.struct([("doc_id", pa.string()), ("score", pa.float64())])
EVIDENCE_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        *TOKEN_SCHEMA,
        ("kind", pa.string()),
        ("detector", pa.string()),
        ("ranked_by", pa.string()),
        ("score", pa.float64()),
        ("neighbours", pa.list_(_NEIGHBOUR)),
        ("near_copies", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, slots=True)
class DocumentEvidence:
    """What made the score of one selected document, token by token: what its detector weighed, which is no proof."""

    text: str  # as the model saw it (cut at max_tokens)
    pieces: list[str]  # the text cut into its tokens: "".join(pieces) == text
    values: list[float | None]  # one a piece: None where the model gives none (the first token)
    kind: str  # "log-probability" or "standardised log-probability"
    detector: str  # the detector that the values belong to
    neighbours: list[tuple[str, float]]  # the calibration documents with the nearest scores: (id, score)
    near_copies: list[str]  # ids of known near copies of it among the other documents, some through others
    ranked_by: str = ""  # the detector, or the procedure that fuses several, of its neighbours' scores
    score: float | None = None  # of the document, by the same


def evidence_file(selection: str) -> str:
    """Where a run directory keeps the evidence of a selection."""
    return f"selection/{selection}/evidence.parquet"


def read_evidence(store: Store, selection: str) -> dict[str, DocumentEvidence]:
    """The evidence of the strongest documents of a selection, by id, the strongest first; {} where there is none.

    A file that cannot be read counts as none: evidence is not worth a report.
    """
    try:
        if not store.exists(evidence_file(selection)):
            return {}
        rows = store.read_table(evidence_file(selection), EVIDENCE_SCHEMA.names).cast(EVIDENCE_SCHEMA).to_pylist()
    except (UserError, OSError, ValueError, LookupError):  # of another version, or damaged
        return {}
    return {row["doc_id"]: _evidence(row) for row in rows}


def _evidence(row: Mapping[str, Any]) -> DocumentEvidence:
    return DocumentEvidence(
        text="".join(row["pieces"]),
        pieces=row["pieces"],
        values=row["standardised" if row["kind"] == STANDARDISED else "log_prob"],
        kind=row["kind"],
        detector=row["detector"],
        neighbours=[(one["doc_id"], one["score"]) for one in row["neighbours"]],
        near_copies=row["near_copies"],
        ranked_by=row["ranked_by"],
        score=row["score"],
    )


def kept_tokens(scored: Scored) -> pa.Table:
    """The tokens of documents that an earlier answer of this run read, of the same model: no document twice.

    Returns:
        Of `TOKEN_SCHEMA`.
    """
    store, tables, seen = scored.store, [TOKEN_SCHEMA.empty_table()], set[Place]()
    wanted = _maker(scored)
    for selection in store.names("selection"):
        try:
            if not store.exists(evidence_file(selection)):
                continue
            table = store.read_table(evidence_file(selection))
            if (table.schema.metadata or {}).get(_MADE_BY) != wanted:
                continue
            table = table.select(TOKEN_SCHEMA.names).cast(TOKEN_SCHEMA)
        except (UserError, OSError, ValueError, LookupError):  # as `read_evidence`
            continue
        places = list(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True))
        tables.append(table.filter(pa.array([place not in seen for place in places], pa.bool_())))
        seen.update(places)
    return pa.concat_tables(tables)


def _maker(scored: Scored) -> bytes:
    """A digest of what the tokens of this run's documents depend on."""
    fingerprint = scored.receipts[0].fingerprint
    parts = {key: fingerprint.get(key) for key in _DECIDING}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest().encode()


def write_table_of(scored: Scored, selection: str, table: pa.Table) -> None:
    """Write the evidence of a selection.

    Args:
        scored: the score shards.
        selection: its name.
        table: of `EVIDENCE_SCHEMA`.
    """
    scored.store.write_table(evidence_file(selection), table.replace_schema_metadata({_MADE_BY: _maker(scored)}))
