"""Token ids are checked before a device sees them: one beyond the embedding would end all work on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def embedding_rows(model: Any) -> int:
    """The number of token ids that a model of transformers has an embedding of, >= 1."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # DeepSpeed may hold its parts elsewhere


def unknown_id(ids: Sequence[int], rows: int) -> str | None:
    """What is wrong with token ids, in a line; None where all of them have a row.

    Args:
        ids: of one text.
        rows: of the model's embedding.
    """
    largest = max(ids, default=0)
    if largest < rows:
        return None
    return f"token id {largest} has no row in the model's embedding of {rows}: the tokenizer knows more than the model"
