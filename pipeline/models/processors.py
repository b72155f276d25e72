"""Processors of models that read pictures with text: numbers of pixels, and room for them among the tokens."""

from __future__ import annotations

from typing import Any

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.checkpoints import Checkpoint, in_one_line


def load_processor(config: ModelConfig, source: Checkpoint, loaded: Any) -> Any:
    """Load the processor of a checkpoint.

    Args:
        config: of the model.
        source: of its files.
        loaded: its configuration.

    Raises:
        UserError: a file is missing or damaged, or no token stands for a picture.
    """
    from transformers import AutoProcessor

    with in_one_line(config, "processor"):
        processor = AutoProcessor.from_pretrained(source.folder, trust_remote_code=config.trust_remote_code)
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise UserError(f"model {config.shown}: its processor takes no pictures with text: {type(processor).__name__}")
    if picture_token(loaded) is None:
        raise UserError(f"model {config.shown}: no token stands for a picture: its configuration has no image_token_id")
    return processor


def picture_token(loaded: Any) -> int | None:
    """The id of the token that stands for a part of a picture; None where a configuration names none."""
    value = getattr(loaded, "image_token_id", None)
    value = getattr(loaded, "image_token_index", None) if value is None else value
    return None if value is None else int(value)
