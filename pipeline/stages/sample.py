"""Continuations of documents by the model at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Pass
from pipeline.detectors.registry import sampled_of
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.opened import embedding_rows, unknown_id
from pipeline.models.tokens import tokenize
from pipeline.passes.generate import Prompt, continuations
from pipeline.passes.parts import PassSizes
from pipeline.passes.sampling import Sampling
from pipeline.stages.ask_samples import EndpointSampler
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window
from pipeline.stages.continuations import (
    MAX_NEW_TOKENS,
    SCHEMA,
    SampleSettings,
    Task,
    draws_of_row,
    keep_draws,
    keep_earlier_draws,
    task_of,
    token_limit,
)
from pipeline.stages.record import Questions, StageKind, Wanted
from pipeline.store.files import Store

WINDOW_DOCUMENTS = 64


class Sampler:
    """The model of one actor. Continuations depend on the shard alone."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Prepare; the model is loaded when a draw is missing."""
        self.stage = stage
        self.settings: SampleSettings = stage.settings
        placement.set_up(self.settings.device)
        self.parts = PassSizes()
        self.placement = placement
        self.window = Window(WINDOW_DOCUMENTS)
        self.batch_size: BatchSize | None = None

    @cached_property
    def lm(self) -> LanguageModel:
        """The model."""
        assert isinstance(self.settings.model, ModelConfig)
        return self.placement.open(open_model, self.settings.model)

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        continued = self.settings.continued
        return Sampling(continued.temperature, continued.top_k, continued.top_p, MAX_NEW_TOKENS)

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        """Take up the draws that earlier attempts filed."""
        keep_earlier_draws(self.stage, shard, store, output)

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        """Cut documents in two; those that have their draws are passed over, those that are too short refused."""
        missing = [d for d in documents if len(draws_of_row(d.row, output)) < self.settings.draws]
        if not missing:
            return []
        limit = min(self.settings.max_tokens, self.lm.max_tokens or self.settings.max_tokens)
        tokens = tokenize(self.lm.tokenizer, [document.text for document in missing], limit)
        tasks = [
            task_of(self.stage, document, entry.kept, output) for document, entry in zip(missing, tokens, strict=True)
        ]
        return [Entry(task.document, 0, task) for task in tasks if task is not None]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Make the draws that are missing of a batch."""
        rows, known = embedding_rows(self.lm.model), []
        for entry in batch:
            before = draws_of_row(entry.document.row, output)
            prompt = self._prompt(entry.work, len(before))
            if (problem := unknown_id(prompt.ids, rows)) is not None:
                output.refuse(entry.document, "model_error", problem)
            else:
                known.append((entry.work, before, prompt))
        drawn = continuations(
            self.lm,
            [prompt for *_, prompt in known],
            self.sampling,
            self.stage.seed,
            batch_tokens=self.settings.cache_positions,
            parts=self.parts,
        )
        task: Task
        for (task, before, _), draws in zip(known, drawn, strict=True):
            if any(draw.end == "non_finite" for draw in draws):
                output.refuse(task.document, "non_finite_score", "the model gave no finite number to draw by")
            else:
                keep_draws(task, [*before, *(draw.text for draw in draws)], output)
            output.tokens += sum(len(draw.ids) for draw in draws)

    def _prompt(self, task: Task, first: int) -> Prompt:
        """The draws that are missing. Streams of other prefixes of a document are others: the ratio is in the key."""
        key = (id_key(task.document.doc_id), round(self.settings.continued.prefix_ratio * 1e6))
        ids = self.lm.tokenizer(task.prefix, verbose=False)["input_ids"]
        return Prompt(key, ids, range(first, self.settings.draws), task.words, task.max_new_tokens)


def _serves(needed: Pass, config: AuditConfig) -> bool:
    return needed.continued is not None


def _stages(wanted: Wanted, earlier: Sequence[Stage]) -> list[Stage]:
    endpoint = wanted.config.model if isinstance(wanted.config.model, EndpointConfig) else None
    return [
        wanted.stage(
            settings.stage,
            folder=settings.folder,
            schema=SCHEMA,
            settings=settings,
            make=EndpointSampler if endpoint is not None else Sampler,
            endpoint=endpoint,
            grows="draws",
        )
        for settings in _settings(wanted)
    ]


def _settings(wanted: Wanted) -> list[SampleSettings]:
    """The continuations that the detectors read, drawn on a device or by an endpoint."""
    config, samples = wanted.config, sampled_of(wanted.detectors)
    place: tuple[str, int] | tuple[()] = ()
    if samples and not isinstance(config.model, EndpointConfig):
        place = wanted.device.mark, wanted.budget(config.model).cache
    return [
        SampleSettings(config.model, continued, draws, config.max_tokens, *place)
        for continued, draws in samples.items()
    ]


def _questions(config: AuditConfig, text_bytes: float) -> list[Questions]:
    model, questions = config.model, list[Questions]()
    if not isinstance(model, EndpointConfig):
        return questions
    instruction = len(model.instruction) if model.api == "chat" else 0
    for samples in _settings(Wanted(config)):
        requests, ratio = math.ceil(samples.draws / model.choices), samples.continued.prefix_ratio
        limit = token_limit(round((1 - ratio) * text_bytes), samples.continued)
        questions.append(
            Questions(model, requests, requests * (instruction + ratio * text_bytes), samples.draws * limit)
        )
    return questions


def _cost(entry: Mapping[str, Any]) -> float:
    return float(entry["prefix_ratio"] + entry["draws"] * (1 - entry["prefix_ratio"]))


KIND = StageKind("sample", "samples", _serves, _stages, questions=_questions, asks=True, costs={"generate": _cost})
