"""Pictures: greedy descriptions by the audited model, and scores from one forward pass over both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, as_model_config
from pipeline.corpus.documents import Document
from pipeline.corpus.picture_files import open_picture, picture_key, picture_sketches
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Evidence, Pass, plan_passes
from pipeline.detectors.plugins import load_plugins
from pipeline.models.load import LanguageModel, open_picture_model
from pipeline.models.picture_prompts import INSTRUCTION, PicturePrompt, caption_ids, picture_prompt, picture_token
from pipeline.passes.forward import TokenStatistics, in_one_copy
from pipeline.passes.parts import PassSizes
from pipeline.passes.picture_forward import DESCRIPTION_TOKENS, describe, pictures_in_parts, token_positions
from pipeline.stages.base import (
    BatchSize,
    Entry,
    Output,
    Placement,
    Rows,
    Stage,
    StageKind,
    StagePlan,
    Window,
    rows_schema,
)
from pipeline.stages.process import read_rows
from pipeline.stages.score import ScoreSettings, file_scores
from pipeline.store.files import Store

if TYPE_CHECKING:
    from PIL.Image import Image


SCHEMA = rows_schema(("ids", pa.list_(pa.int32())), ("description", pa.string()))


PICTURE_WINDOW = Window(64, characters=16 << 20)
"""Pictures that are prepared together, and the bytes of their files: the model input of large photographs takes a
hundred times as much."""


@dataclass(frozen=True, slots=True)
class DescriptionSettings:
    """Everything that descriptions depend on."""

    model: ModelConfig
    device: str  # `Device.mark`
    batch_tokens: int  # maximum of prompts and descriptions in the cache
    tokens: int = DESCRIPTION_TOKENS  # maximum per description
    instruction: str = INSTRUCTION


class Describer:
    """The model of one actor. Descriptions depend only on the shard."""

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
        """No inputs."""

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


def _stages(wanted: StagePlan, earlier: Sequence[Stage]) -> list[Stage]:
    if not any(_serves(needed, wanted.config) for needed in wanted.passes):
        return []
    model = as_model_config(wanted.config.model)
    budget = wanted.budget(model)
    # a picture is read as in scoring, even if its keys and values take less
    batch = min(budget.cache, budget.forward) if wanted.device.gpus else budget.cache
    settings = DescriptionSettings(model, wanted.device.mark, batch)
    return [wanted.stage(KIND.name, folder=KIND.folder, schema=SCHEMA, settings=settings, make=Describer)]


KIND = StageKind("describe", "descriptions", _stages)


# --- from the bytes of a picture to model input


@dataclass(frozen=True, slots=True)
class _ShownPicture:
    """A decoded picture and its model input."""

    document: Document
    picture: Image
    prompt: PicturePrompt


def shown_pictures(lm: LanguageModel, documents: list[Document], output: Output) -> Iterator[_ShownPicture]:
    """Decode the pictures of documents; those that cannot be decoded or that fill all positions are refused.

    Pictures are decoded one at a time, so that a caller that keeps none holds the pixels of one.

    Args:
        lm: model from `open_picture_model`.
        documents: documents with pictures.
        output: output of the shard.
    """
    for document in documents:
        assert document.picture is not None
        try:
            picture = open_picture(document.picture)
        except ValueError as error:
            output.refuse(document, Reason.UNDECODABLE, str(error))
            continue
        prompt = picture_prompt(lm, picture)
        if lm.max_tokens is not None and len(prompt.ids) >= lm.max_tokens:
            room = f"the picture and the instruction are {len(prompt.ids)} tokens, and the model has {lm.max_tokens}"
            output.refuse(document, Reason.TOO_LARGE, f"{room} positions")
            continue
        yield _ShownPicture(document, picture, prompt)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked picture with its descriptions."""

    role: str
    text_key: int  # key of its pixels
    sketch: bytes
    prompt: PicturePrompt
    words: Mapping[str, list[int]]  # source of a description -> its token ids
    text: str
    truncated: bool


class PictureScorer:
    """The model of one actor and the detectors that read parts of pictures. Scores depend only on the shard."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the model."""
        settings: ScoreSettings = stage.settings
        assert isinstance(settings.model, ModelConfig)
        placement.set_up(settings.device)
        if settings.plugins is not None:
            load_plugins(settings.plugins.plugins)
        self.detectors = settings.detectors.parse()
        self.wanted: defaultdict[str, dict[str, frozenset[str]]] = defaultdict(dict)  # source -> part -> statistics
        for needed, names in plan_passes(self.detectors).items():
            self.wanted[needed.caption][needed.part] = names
        self.describe = next(iter(stage.reads_with("description")), None)
        self.lm = placement.open(open_picture_model, settings.model)
        token = picture_token(self.lm.model.config)
        assert token is not None
        self.token = token
        self.max_tokens = settings.max_tokens
        self.parts = PassSizes()
        self.batch_size: BatchSize | None = BatchSize(settings.batch_tokens)
        self.window = PICTURE_WINDOW

    def open(self, shard: Shard, store: Store, output: Output) -> tuple[str, Rows]:
        """The role of the shard's pictures, and their descriptions, which are empty if no pass reads them."""
        return shard.role, {} if self.describe is None else read_rows(self.describe, shard, store, output)

    def prepare(self, documents: list[Document], inputs: tuple[str, Rows], output: Output) -> list[Entry]:
        """Decode pictures and collect their descriptions; pictures with too short descriptions are refused."""
        role, descriptions = inputs
        described = []
        for document in documents:
            row = descriptions.get(document.row)
            if row is not None and row["reason"] is not None:
                output.refuse(document, row["reason"], row["problem"])
            else:
                described.append(document)
        entries = []
        for one in shown_pictures(self.lm, described, output):
            words, truncated = self._words(one, descriptions)
            if (problem := self._too_short(one.prompt, words)) is not None:
                output.refuse(one.document, Reason.TOO_SHORT, problem)
                continue
            key, (sketch,) = picture_key(one.picture), picture_sketches([one.picture])
            prepared = _Prepared(role, key, sketch, one.prompt, words, one.document.text, truncated)
            tokens = len(one.prompt.ids) + max(map(len, words.values()))
            entries.append(Entry(replace(one.document, text="", picture=None), tokens, prepared))
        return entries

    def work(self, batch: list[Entry], output: Output) -> None:
        """Score a batch."""
        scores = self._scores([entry.work for entry in batch])
        file_scores(self.detectors, batch, scores, output)

    def _words(self, shown: _ShownPicture, descriptions: Rows) -> tuple[dict[str, list[int]], bool]:
        """The token ids of a picture's descriptions, by source, and whether the caption was truncated."""
        words: dict[str, list[int]] = {}
        most, truncated = self.max_tokens, False
        if self.lm.max_tokens is not None:
            most = min(most, self.lm.max_tokens - len(shown.prompt.ids))
        if "given" in self.wanted:
            ids = caption_ids(self.lm, shown.document.text)
            words["given"], truncated = ids[:most], len(ids) > most
        if "generated" in self.wanted:
            words["generated"] = list(descriptions[shown.document.row]["ids"])[:most]
        return words, truncated

    def _too_short(self, prompt: PicturePrompt, words: Mapping[str, list[int]]) -> str | None:
        """A message for a part of a picture with too few tokens for a score, if any."""
        for caption, parts in self.wanted.items():
            for part in parts:
                count = len(token_positions(prompt, len(words[caption]), part, self.token))
                if count < 2:
                    kind = f"{caption} {part}" if "description" in part else part
                    return f"{kind}: {count} token{'' if count == 1 else 's'}; a score needs 2"
        return None

    def _scores(self, batch: Sequence[_Prepared]) -> torch.Tensor:
        """Scores of a batch: float64, (documents, detectors)."""
        statistics: dict[Pass, TokenStatistics] = {}
        prompts = [entry.prompt for entry in batch]
        for caption, wanted in self.wanted.items():
            written = [entry.words[caption] for entry in batch]
            measured = pictures_in_parts(self.lm, prompts, written, wanted, self.parts)
            for needed in plan_passes(self.detectors):
                if needed.caption == caption:
                    statistics[needed] = measured[needed.part]
        evidence = Evidence([entry.text for entry in batch], statistics)
        return in_one_copy([detector.score(evidence) for detector in self.detectors])
