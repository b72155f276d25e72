"""Pictures with captions trained into a vision-language model: prompt and caption go in, the caption is learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config.training import FinetuneConfig
from pipeline.corpus.pictures import open_picture
from pipeline.errors import UserError
from pipeline.models.opened import LanguageModel, embedding_rows, unknown_id
from pipeline.models.pictures import caption_ids, padded_prompts, picture_prompt
from pipeline.training.loss import loss_of_tokens
from pipeline.training.memory import typed
from pipeline.training.train import PLAIN, Lesson, Training, TrainingOptions, TrainingResult, carry_on, check_job


@dataclass(frozen=True, slots=True)
class CaptionedPicture:
    """A picture with its caption, as a model is trained on it."""

    picture: bytes  # encoded
    ids: list[int]  # of the prompt, with a token for every part of the picture, and of the caption
    first: int  # place of the caption's first token, >= 1

    def __len__(self) -> int:
        return len(self.ids)


def train_pictures(
    lm: LanguageModel,
    pictures: Sequence[tuple[bytes, str]],
    config: FinetuneConfig,
    output_folder: str | Path,
    options: TrainingOptions = PLAIN,
) -> TrainingResult:
    """Train on pictures with captions and write the result to a folder that appears whole or not at all.

    A document is the prompt that asks for a description, with the picture in it, and the caption as the answer; only
    the tokens of the caption count in the loss. All else is as with `train`: the same model, pictures, config and kind
    of device give the same weights, also where the training was killed and called again.

    Args:
        lm: from `open_picture_model`, on its device; float32 for method `full`.
        pictures: encoded pictures that can be decoded, each with its caption; at least `config.batch_size`.
        config: how to train. `max_tokens` cuts the caption.
        output_folder: local folder that does not exist yet.
        options: how it runs, in one process.

    Raises:
        UserError: as `train`; a model without a processor, no caption, or a picture that leaves no room for one.
        LostDeviceError: the device refuses all further work of this process.
        FullError: there is no space left for a checkpoint or the result.
    """
    if lm.processor is None:
        raise UserError("pictures are trained into a vision-language model, and this model reads texts alone")
    config = typed(lm.model, config)
    check_job(output_folder, len(pictures), config)
    documents = [
        _captioned(lm, index, picture, caption, config.max_tokens) for index, (picture, caption) in enumerate(pictures)
    ] * config.copies

    def loss(model: Any, some: Sequence[CaptionedPicture]) -> tuple[Tensor, int]:
        captions = [one.ids[one.first :] for one in some]
        prompts = [picture_prompt(lm, open_picture(one.picture)) for one in some]
        batch, mask = padded_prompts(lm, prompts, captions)
        places = torch.arange(1, mask.shape[1], device=mask.device)
        firsts = torch.tensor([one.first for one in some], device=mask.device)
        predicted = mask[:, 1:].bool() & (places >= firsts[:, None])
        return loss_of_tokens(model, {**batch, "attention_mask": mask}, predicted)

    described = [[hashlib.sha256(one.picture).hexdigest(), one.ids, one.first] for one in documents]
    lesson = Lesson(loss, lambda one: len(one) - one.first, lm.processor, loss)
    return carry_on(lm.model, Training.of(documents, described, lesson, config, output_folder, options))


def _captioned(lm: LanguageModel, index: int, picture: bytes, caption: str, max_tokens: int) -> CaptionedPicture:
    prompt, answer = picture_prompt(lm, open_picture(picture)).ids, caption_ids(lm, caption)
    if not answer or not caption.strip():
        raise UserError(f"fine-tuning picture {index} has no caption: {caption!r}")
    most = max_tokens if lm.max_tokens is None else min(max_tokens, lm.max_tokens - len(prompt))
    if most < 1:
        raise UserError(
            f"fine-tuning picture {index} and the instruction are {len(prompt)} tokens, and the model has "
            f"{lm.max_tokens} positions: none is left for a caption"
        )
    ids = [*prompt, *answer[:most]]
    if (problem := unknown_id(ids, embedding_rows(lm.model))) is not None:
        raise UserError(f"fine-tuning picture {index}: {problem}")
    return CaptionedPicture(picture, ids, len(prompt))
