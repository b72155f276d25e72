"""What an open model is, for the passes: nothing of how its files were read, so that a bare machine can run them."""

from __future__ import annotations

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
