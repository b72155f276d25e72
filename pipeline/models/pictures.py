"""What a model that reads pictures with text is given: the picture, an instruction, and what is written of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.models.opened import LanguageModel
from pipeline.models.processors import picture_token, prompt_text

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A picture and the instruction, as a model reads them."""

    ids: list[int]  # of the tokens, those that stand for the picture among them
    numbers: dict[str, Tensor]  # what the processor made of the pixels, one picture along the first axis
    along: dict[str, Tensor]  # what it says of each token, (1, tokens)


def picture_prompt(lm: LanguageModel, picture: Image) -> PicturePrompt:
    """What a model is given of a picture: the picture itself and `INSTRUCTION`, as its processor writes them.

    Args:
        lm: From `open_picture_model`.
        picture: RGB.
    """
    processor: Any = lm.processor
    inputs = processor(images=[picture], text=[prompt_text(processor)], return_tensors="pt")
    ids = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask", None)
    along = {name: value for name, value in inputs.items() if value.dim() == 2 and value.shape == (1, len(ids))}
    return PicturePrompt(ids, {name: value for name, value in inputs.items() if name not in along}, along)


def caption_ids(lm: LanguageModel, caption: str) -> list[int]:
    """Token ids of a caption, as they follow the prompt: a blank parts the two where the prompt ends in a word.

    A caption that writes the mark of a picture has no picture there, and the mark is left out.

    Args:
        lm: From `open_picture_model`.
        caption: of a picture.
    """
    prompt = prompt_text(lm.processor)
    blank = "" if prompt[-1:].isspace() else " "
    before, both, alone = lm.tokenizer(
        [prompt, f"{prompt}{blank}{caption.lstrip()}", f"{blank}{caption.lstrip()}"], add_special_tokens=False
    )["input_ids"]
    # some tokenizers put a blank of their own before whatever comes first
    ids: list[int] = both[len(before) :] if both[: len(before)] == before else alone
    mark = picture_token(lm.model.config)
    return [one for one in ids if one != mark]


def padded_prompts(
    lm: LanguageModel, prompts: Sequence[PicturePrompt], descriptions: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments of the model for a batch, padded on the right, and its attention mask."""
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
    """Numbers of pictures behind one another. Where they are cut into tiles, empty ones fill up the smaller."""
    if numbers[0].dim() < 4:
        return torch.cat(list(numbers))
    tiles = max(value.shape[1] for value in numbers)
    padding = [0] * (2 * (numbers[0].dim() - 2))
    return torch.cat([torch.nn.functional.pad(value, (*padding, 0, tiles - value.shape[1])) for value in numbers])
