"""What made the scores of the top selected documents: their tokens, their neighbours, their near-duplicates.

It shows what a detector weighed, and proves nothing: a document may be selected wrongly, and its tokens then look as
those of any other. No answer depends on it, and a document or a run that has none is as good as one that has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from pipeline.errors import UserError
from pipeline.stages.events import TOKEN_SCHEMA
from pipeline.store.files import Store

Kind = Literal["log-probability", "standardised log-probability"]
PLAIN: Kind = "log-probability"
STANDARDISED: Kind = "standardised log-probability"
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

THUMBNAIL_SCHEMA = pa.schema([("source", pa.string()), ("row", pa.int64()), ("thumbnail", pa.binary())])


@dataclass(frozen=True, slots=True)
class DocumentEvidence:
    """What made the score of one selected document, token by token: what its detector weighed, which is no proof."""

    text: str  # as the model saw it (cut at max_tokens)
    pieces: list[str]  # the text cut into its tokens: "".join(pieces) == text
    values: list[float | None]  # one a piece: None where the model gives none (the first token)
    kind: str  # "log-probability" or "standardised log-probability"
    detector: str  # the detector that the values belong to
    neighbours: list[tuple[str, float]]  # the calibration documents with the nearest scores: (id, score)
    near_copies: list[str]  # ids of known near-duplicates of it among the other documents, some through others
    ranked_by: str = ""  # the detector, or the procedure that fuses several, of its neighbours' scores
    score: float | None = None  # of the document, by the same


def evidence_file(selection: str) -> str:
    """Where a run directory keeps the evidence of a selection."""
    return f"selection/{selection}/evidence.parquet"


def read_evidence(store: Store, selection: str) -> dict[str, DocumentEvidence]:
    """The evidence of the top documents of a selection, by id, in the order of the list; {} where there is none.

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


def thumbnails_file(selection: str) -> str:
    """Where a run directory keeps the thumbnails of a selection."""
    return f"selection/{selection}/thumbnails.parquet"


def read_thumbnails(store: Store, selection: str) -> dict[tuple[str, int], bytes]:
    """The thumbnails of a selection, JPEG files, by input and row; none where the documents are texts."""
    name = thumbnails_file(selection)
    if not store.exists(name):
        return {}
    table = store.read_table(name)
    places = zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)
    return dict(zip(places, table["thumbnail"].to_pylist(), strict=True))
