"""Processors of models that read pictures with text: numbers of pixels, and room for them among the tokens."""

from __future__ import annotations

from typing import Any

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.checkpoints import Checkpoint, in_one_line

INSTRUCTION = "Describe this image concisely."


def load_processor(config: ModelConfig, source: Checkpoint, loaded: Any) -> Any:
    """Load the processor of a checkpoint.

    Args:
        config: of the model.
        source: of its files.
        loaded: its configuration.

    Raises:
        UserError: a file is missing or damaged, or no token stands for a picture.
    """
    from PIL import Image
    from transformers import AutoImageProcessor, AutoProcessor

    trusted = {"trust_remote_code": config.trust_remote_code}
    with in_one_line(config, "processor"):
        processor = (_without_videos(type(loaded)) or AutoProcessor).from_pretrained(source.folder, **trusted)
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise UserError(f"model {config.shown}: its processor takes no pictures with text: {type(processor).__name__}")
    if picture_token(loaded) is None:
        raise UserError(f"model {config.shown}: no token stands for a picture: its configuration has no image_token_id")
    # By Pillow, so that a picture becomes the same numbers whether or not torchvision is installed.
    with in_one_line(config, "processor"):
        processor.image_processor = AutoImageProcessor.from_pretrained(source.folder, backend="pil", **trusted)
        blank = processor(images=[Image.new("RGB", (64, 64))], text=[prompt_text(processor)], return_tensors="np")
    if picture_token(loaded) not in blank["input_ids"][0]:
        raise UserError(f"model {config.shown}: its processor writes no token that stands for a picture")
    return processor


def prompt_text(processor: Any) -> str:
    """`INSTRUCTION` behind the mark of a picture, as a turn of a conversation where the processor knows turns."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": INSTRUCTION}]
        text: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return text
    return f"USER: {processor.image_token}\n{INSTRUCTION} ASSISTANT:"


def _without_videos(kind: type) -> Any | None:
    """A model's class of processors without that of videos, which no picture needs and which takes torchvision.

    Args:
        kind: the class of the model's configuration.

    Returns:
        None where transformers knows no class, or one that reads no videos.
    """
    from transformers import ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING.get(kind, None)
    if whole is None or "video_processor" not in whole.get_attributes():
        return None

    class Pictures(whole):
        apply_chat_template = ProcessorMixin.apply_chat_template  # others look at the settings of videos

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Any, processor_dict: dict[str, Any], **settings: Any) -> Any:
            return super().from_args_and_dict(args, {**processor_dict, "video_processor": None}, **settings)

    Pictures.__name__ = Pictures.__qualname__ = whole.__name__  # which a saved processor is opened by
    return Pictures


def picture_token(loaded: Any) -> int | None:
    """The id of the token that stands for a part of a picture; None where a configuration names none."""
    value = getattr(loaded, "image_token_id", None)
    value = getattr(loaded, "image_token_index", None) if value is None else value
    return None if value is None else int(value)
