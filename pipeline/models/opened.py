"""What an open model is, for the passes: nothing of how its files were read, so that a bare machine can run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch costs seconds, and a model's files are checked in one
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model in eval mode, without gradients."""

    model: nn.Module
    tokenizer: Any
    device: torch.device  # where token ids go
    max_tokens: int | None  # positions of the model; None if unknown
    processor: Any | None = None  # of a model that reads pictures with text


@dataclass(frozen=True, slots=True)
class Seq2SeqModel:
    """An encoder-decoder model such as T5, in eval mode, without gradients."""

    model: nn.Module
    tokenizer: Any
    device: torch.device  # where token ids go
    max_tokens: int | None  # tokens that it can read, and as many that it can write; None if unknown


def embedding_rows(model: Any) -> int:
    """The number of token ids that a model of transformers has an embedding of, >= 1.

    An id beyond them would end all work on a GPU: `unknown_id` finds it before a device sees it.
    """
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
