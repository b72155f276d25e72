"""The rows of documents that are read once more; whoever reads them alone needs no model."""

from __future__ import annotations

import pyarrow as pa

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
