"""Inputs of vision-language models: a picture, encoded by the model's processor, and an instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.checkpoints import Checkpoint, in_one_line
from pipeline.models.opened import LanguageModel

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A picture and the instruction as model input."""

    ids: list[int]  # token ids, including those of the picture
    numbers: dict[str, Tensor]  # output of the processor for the pixels, with one picture on the first axis
    along: dict[str, Tensor]  # output of the processor per token, (1, tokens)


def picture_prompt(lm: LanguageModel, picture: Image) -> PicturePrompt:
    """The model input for a picture: the picture and `INSTRUCTION`, encoded by the processor.

    Args:
        lm: model from `open_picture_model`.
        picture: RGB picture.
    """
    processor: Any = lm.processor
    inputs = processor(images=[picture], text=[_prompt_text(processor)], return_tensors="pt")
    ids = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask", None)
    along = {name: value for name, value in inputs.items() if value.dim() == 2 and value.shape == (1, len(ids))}
    return PicturePrompt(ids, {name: value for name, value in inputs.items() if name not in along}, along)


def caption_ids(lm: LanguageModel, caption: str) -> list[int]:
    """Token ids of a caption after the prompt, separated by a blank if the prompt ends in a word.

    Picture tokens in the text of a caption are removed.

    Args:
        lm: model from `open_picture_model`.
        caption: caption of a picture.
    """
    prompt = _prompt_text(lm.processor)
    blank = "" if prompt[-1:].isspace() else " "
    before, both, alone = lm.tokenizer(
        [prompt, f"{prompt}{blank}{caption.lstrip()}", f"{blank}{caption.lstrip()}"], add_special_tokens=False
    )["input_ids"]
    # some tokenizers insert a blank before the first token
    ids: list[int] = both[len(before) :] if both[: len(before)] == before else alone
    mark = picture_token(lm.model.config)
    return [one for one in ids if one != mark]


def padded_prompts(
    lm: LanguageModel, prompts: Sequence[PicturePrompt], descriptions: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments of the model for a batch, padded on the right, and its attention mask."""
    import torch

    lengths = [len(p.ids) + len(d) for p, d in zip(prompts, descriptions, strict=True)]
    longest = max(lengths)
    rows = [[*p.ids, *d] for p, d in zip(prompts, descriptions, strict=True)]
    inputs = {"input_ids": torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])}
    for name in prompts[0].along:
        parts = [torch.nn.functional.pad(p.along[name], (0, longest - p.along[name].shape[1])) for p in prompts]
        inputs[name] = torch.cat(parts)
    dtype = next(parameter.dtype for parameter in lm.model.parameters() if parameter.is_floating_point())
    for name in prompts[0].numbers:
        numbers = _stacked([p.numbers[name] for p in prompts])
        inputs[name] = numbers.to(dtype) if numbers.is_floating_point() else numbers
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long().to(lm.device)
    return {name: value.to(lm.device) for name, value in inputs.items()}, mask


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Concatenated processor outputs of pictures; pictures with fewer tiles are padded with empty tiles."""
    import torch

    if numbers[0].dim() < 4:
        return torch.cat(list(numbers))
    tiles = max(value.shape[1] for value in numbers)
    padding = [0] * (2 * (numbers[0].dim() - 2))
    return torch.cat([torch.nn.functional.pad(value, (*padding, 0, tiles - value.shape[1])) for value in numbers])


INSTRUCTION = "Describe this image concisely."


def load_processor(config: ModelConfig, source: Checkpoint, loaded: Any) -> Any:
    """Load the processor of a checkpoint.

    Args:
        config: configuration of the model in the run.
        source: location of the model's files.
        loaded: configuration of the model from its files.

    Raises:
        UserError: a file is missing or damaged, or there is no picture token.
    """
    from PIL import Image
    from transformers import AutoImageProcessor, AutoProcessor

    trusted = {"trust_remote_code": config.trust_remote_code}
    with in_one_line(config, "processor"):
        processor = (_without_videos(type(loaded)) or AutoProcessor).from_pretrained(source.folder, **trusted)
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise UserError(f"model {config.shown}: its processor takes no pictures with text: {type(processor).__name__}")
    if picture_token(loaded) is None:
        raise UserError(f"model {config.shown}has no picture token: its configuration has no image_token_id")
    # With Pillow, so that results do not depend on whether torchvision is installed.
    with in_one_line(config, "processor"):
        processor.image_processor = AutoImageProcessor.from_pretrained(source.folder, backend="pil", **trusted)
        blank = processor(images=[Image.new("RGB", (64, 64))], text=[_prompt_text(processor)], return_tensors="np")
    if picture_token(loaded) not in blank["input_ids"][0]:
        raise UserError(f"model {config.shown}: its processor writes no picture token")
    return processor


def _prompt_text(processor: Any) -> str:
    """The picture token followed by `INSTRUCTION`, as a chat turn if the processor has a chat template."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": INSTRUCTION}]
        text: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return text
    return f"USER: {processor.image_token}\n{INSTRUCTION} ASSISTANT:"


def _without_videos(kind: type) -> Any | None:
    """A model's processor class without its video processor, which requires torchvision.

    Args:
        kind: class of the model's configuration.

    Returns:
        None if transformers has no such class, or one without a video processor.
    """
    from transformers import ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING.get(kind, None)
    if whole is None or "video_processor" not in whole.get_attributes():
        return None

    class Pictures(whole):
        apply_chat_template = ProcessorMixin.apply_chat_template  # overrides read the video settings

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Any, processor_dict: dict[str, Any], **settings: Any) -> Any:
            return super().from_args_and_dict(args, {**processor_dict, "video_processor": None}, **settings)

    Pictures.__name__ = Pictures.__qualname__ = whole.__name__  # a saved processor is opened by this name
    return Pictures


def picture_token(loaded: Any) -> int | None:
    """The id of the picture token; None if a configuration states none."""
    value = getattr(loaded, "image_token_id", None)
    value = getattr(loaded, "image_token_index", None) if value is None else value
    return None if value is None else int(value)
