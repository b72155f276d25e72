"""Paraphrases of documents for the `knockoff` detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, ParaphraserConfig, as_model_config
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.registry import count_draws
from pipeline.errors import UserError
from pipeline.models.load import check_model, open_paraphraser
from pipeline.models.tokens import open_tokenizer, tokenize
from pipeline.passes.generate import Sampling, continuations
from pipeline.passes.paraphrase import Draws, ParaphraseSettings, draw_paraphrases
from pipeline.passes.parts import PassSizes
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, StageKind, StagePlan, Window, rows_schema
from pipeline.store.files import Store

WINDOW_DOCUMENTS = 64
AUDITED_ITSELF = (
    "is the audited model itself; the knockoffs of a model must not come from it (KTD, definition 1): give another one"
)
SCHEMA = rows_schema(("paraphrases", pa.list_(pa.string())))


@dataclass(frozen=True, slots=True)
class ParaphraserSettings:
    """Everything that paraphrases depend on."""

    model: ModelConfig  # audited model, whose tokenizer determines the kept part of a text
    paraphraser: ParaphraserConfig
    sampling: ParaphraseSettings
    draws: int
    max_tokens: int
    device: str  # `Device.mark`
    cache_positions: int  # maximum at a time


def drawing(paraphraser: ParaphraserConfig) -> ParaphraseSettings:
    """The settings of paraphrases in a configuration."""
    return ParaphraseSettings(
        Sampling(temperature=paraphraser.temperature, top_k=paraphraser.top_k, top_p=paraphraser.top_p)
    )


def _check(config: AuditConfig) -> tuple[()]:
    """Check without reading weights that the paraphraser can be opened and is not at the path of the audited model.

    Raises:
        UserError: in one line, what is missing or refused.
    """
    paraphraser = config.paraphraser
    if paraphraser is None:
        return ()
    check_model(paraphraser, "rewriter")
    if _place(paraphraser) == _place(as_model_config(config.model)):
        raise UserError(f"paraphraser {paraphraser.shown} {AUDITED_ITSELF}")
    return ()


def _place(model: ModelConfig) -> tuple[str | None, ...]:
    return model.path, model.revision, model.gguf_file, model.adapter


def _stages(wanted: StagePlan, earlier: Sequence[Stage]) -> list[Stage]:
    """The stage of the paraphrases that the detectors read.

    Raises:
        UserError: the paraphraser is the audited model, whose paraphrases reveal what it knows; as `StagePlan.budget`.
    """
    config, draws = wanted.config, count_draws(wanted.detectors)
    if not draws:
        return []
    assert config.paraphraser is not None
    settings = ParaphraserSettings(
        as_model_config(config.model),
        config.paraphraser,
        drawing(config.paraphraser),
        draws,
        config.max_tokens,
        wanted.device.mark,
        wanted.budget(config.paraphraser).cache,
    )
    stage = wanted.stage(KIND.name, folder=KIND.folder, schema=SCHEMA, settings=settings, make=Paraphraser)
    if stage.fingerprint["paraphraser_model"] == stage.fingerprint["model"]:
        raise UserError(f"paraphraser {config.paraphraser.shown} {AUDITED_ITSELF}")
    return [stage]


class Paraphraser:
    """The paraphraser of one actor. Paraphrases depend only on the shard."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the model."""
        self.settings: ParaphraserSettings = stage.settings
        placement.set_up(self.settings.device)
        self.parts = PassSizes()
        self.seed = stage.seed
        self.window = Window(WINDOW_DOCUMENTS)
        self.batch_size: BatchSize | None = None
        self.model = placement.open(open_paraphraser, self.settings.paraphraser)
        self.tokenizer = open_tokenizer(self.settings.model)

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        """No inputs."""

    def prepare(self, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
        """Truncate documents to the part that is scored."""
        tokens = tokenize(self.tokenizer, [document.text for document in documents], self.settings.max_tokens)
        return [Entry(d, len(entry.ids), d.text[: entry.kept]) for d, entry in zip(documents, tokens, strict=True)]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Draw the paraphrases of a batch."""
        texts = [(id_key(entry.document.doc_id), entry.work) for entry in batch]
        draw = partial(continuations, batch_tokens=self.settings.cache_positions, parts=self.parts)
        results = draw_paraphrases(self.model, texts, self.settings.draws, self.settings.sampling, self.seed, draw)
        for entry, result in zip(batch, results, strict=True):
            if not isinstance(result, Draws):
                output.refuse(entry.document, Reason.MODEL_ERROR, result.message)
                continue
            output.keep(entry.document, paraphrases=list(result.texts))
            tokens = tokenize(self.tokenizer, list(result.texts), self.settings.max_tokens)
            output.tokens += sum(len(drawn.ids) for drawn in tokens)


KIND = StageKind("paraphrase", "paraphrases", _stages, _check)
