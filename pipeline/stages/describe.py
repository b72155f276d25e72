"""Descriptions of pictures by the audited model, word by likeliest word."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
import torch

from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.models.devices import check_device, compute_as
from pipeline.models.load import LanguageModel, open_picture_model
from pipeline.models.processors import INSTRUCTION
from pipeline.passes.parts import PassSizes
from pipeline.passes.pictures import DESCRIPTION_TOKENS, describe
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, rows_schema
from pipeline.stages.pictures import PICTURE_WINDOW, shown_pictures
from pipeline.store.files import Store

STAGE = "describe"
FOLDER = "descriptions"
SCHEMA = rows_schema(("ids", pa.list_(pa.int32())), ("description", pa.string()))


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
        check_device(self.settings.device, placement.gpus)
        compute_as(self.settings.device, gradients=False)
        if placement.gpus == 0:
            torch.set_num_threads(placement.threads)
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
