"""Descriptions of pictures by the audited model, word by likeliest word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, weights_of
from pipeline.corpus.documents import Document
from pipeline.corpus.pictures import open_picture
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Pass
from pipeline.models.load import LanguageModel, open_picture_model
from pipeline.models.pictures import PicturePrompt, picture_prompt
from pipeline.models.processors import INSTRUCTION
from pipeline.passes.parts import PassSizes
from pipeline.passes.pictures import DESCRIPTION_TOKENS, describe
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window, rows_schema
from pipeline.stages.record import StageKind, Wanted
from pipeline.store.files import Store

if TYPE_CHECKING:
    from PIL.Image import Image

SCHEMA = rows_schema(("ids", pa.list_(pa.int32())), ("description", pa.string()))


PICTURE_WINDOW = Window(64, characters=16 << 20)
"""Pictures that are made ready at a time, and the bytes of their files: of large photographs a model's numbers take a
hundred times as much."""


@dataclass(frozen=True, slots=True)
class DescriptionSettings:
    """All that descriptions depend on."""

    model: ModelConfig
    device: str  # `Device.mark`
    batch_tokens: int  # of prompts and descriptions, in the cache at a time
    tokens: int = DESCRIPTION_TOKENS  # of a description, at most
    instruction: str = INSTRUCTION


class Describer:
    """The model of one actor. Descriptions depend on the shard alone."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Prepare; the model is loaded with the first pictures."""
        self.settings: DescriptionSettings = stage.settings
        placement.set_up(self.settings.device)
        self.placement = placement
        self.parts = PassSizes()
        self.window = PICTURE_WINDOW
        self.batch_size: BatchSize | None = BatchSize(self.settings.batch_tokens)

    @cached_property
    def lm(self) -> LanguageModel:
        """The model."""
        return self.placement.open(open_picture_model, self.settings.model)

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        """Nothing of the run directory is needed."""

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        """Decode pictures."""
        return [
            Entry(replace(one.document, text="", picture=None), len(one.prompt.ids) + self.settings.tokens, one.prompt)
            for one in shown_pictures(self.lm, documents, output)
        ]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Describe a batch."""
        written = self.parts.run(
            lambda some: describe(self.lm, some, self.settings.tokens),
            [entry.work for entry in batch],
            [entry.tokens for entry in batch],
        )
        for entry, ids in zip(batch, [ids for part in written for ids in part], strict=True):
            text = self.lm.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            output.keep(entry.document, ids=ids, description=text)
            output.tokens += len(ids)


def _serves(needed: Pass, config: AuditConfig) -> bool:
    return needed.caption == "generated"


def _stages(wanted: Wanted, earlier: Sequence[Stage]) -> list[Stage]:
    if not any(_serves(needed, wanted.config) for needed in wanted.passes):
        return []
    model = weights_of(wanted.config.model)
    budget = wanted.budget(model)
    # a picture is read as in scoring, whatever little its keys and values take
    batch = min(budget.cache, budget.forward) if wanted.device.gpus else budget.cache
    settings = DescriptionSettings(model, wanted.device.mark, batch)
    return [wanted.stage(KIND.name, folder=KIND.folder, schema=SCHEMA, settings=settings, make=Describer)]


KIND = StageKind("describe", "descriptions", _serves, _stages)


# --- from the bytes of a picture to what a model is given of it


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture, decoded, and what a model is given of it."""

    document: Document
    picture: Image
    prompt: PicturePrompt


def shown_pictures(lm: LanguageModel, documents: list[Document], output: Output) -> Iterator[ShownPicture]:
    """Decode the pictures of documents; those that cannot be, or that leave a model no room for a word, are refused.

    One picture at a time: whoever keeps none of them holds the pixels of one.

    Args:
        lm: from `open_picture_model`.
        documents: with pictures.
        output: of the shard.
    """
    for document in documents:
        assert document.picture is not None
        try:
            picture = open_picture(document.picture)
        except ValueError as error:
            output.refuse(document, "undecodable", str(error))
            continue
        prompt = picture_prompt(lm, picture)
        if lm.max_tokens is not None and len(prompt.ids) >= lm.max_tokens:
            room = f"the picture and the instruction are {len(prompt.ids)} tokens, and the model has {lm.max_tokens}"
            output.refuse(document, "too_large", f"{room} positions")
            continue
        yield ShownPicture(document, picture, prompt)
