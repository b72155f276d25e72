"""Paraphrases of documents for the `knockoff` detector."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, ParaphraserConfig, as_model_config
from pipeline.corpus.chats import ASSISTANT, Conversation, Turn
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.registry import count_draws
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatEnd, ChatSettings
from pipeline.models.load import check_model, count_positions, open_paraphraser
from pipeline.models.tokens import open_tokenizer, tokenize
from pipeline.passes.generate import Sampling, continuations
from pipeline.passes.paraphrase import Draws, ParaphraseSettings, TextPart, draw_paraphrases
from pipeline.passes.parts import PassSizes
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, StageKind, StagePlan, Window, rows_schema
from pipeline.stages.chat_scoring import chat_settings
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
    chat: ChatSettings | None = None  # rendering of chats by the audited model


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
    chat = chat_settings(config, ()) if config.corpus.has_chats else None
    settings = ParaphraserSettings(
        as_model_config(config.model),
        config.paraphraser,
        drawing(config.paraphraser),
        draws,
        config.max_tokens if chat is None else _scored_tokens(wanted),
        wanted.device.mark,
        wanted.budget(config.paraphraser).cache,
        chat,
    )
    make = Paraphraser if chat is None else ChatParaphraser
    stage = wanted.stage(KIND.name, folder=KIND.folder, schema=SCHEMA, settings=settings, make=make)
    if stage.fingerprint["paraphraser_model"] == stage.fingerprint["model"]:
        raise UserError(f"paraphraser {config.paraphraser.shown} {AUDITED_ITSELF}")
    return [stage]


def _scored_tokens(wanted: StagePlan) -> int:
    """Maximum number of tokens of a document that the models of the detectors read."""
    models = {"target": wanted.config.model, "reference": wanted.config.reference_model}
    read = [models[name] for name in sorted({needed.model for needed in wanted.passes})]
    limits = [count_positions(model) for model in read if isinstance(model, ModelConfig)]
    return min([wanted.config.max_tokens, *(limit for limit in limits if limit is not None)])


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
        texts = [(id_key(entry.document.doc_id), self.text_parts(entry.work)) for entry in batch]
        draw = partial(continuations, batch_tokens=self.settings.cache_positions, parts=self.parts)
        results = draw_paraphrases(self.model, texts, self.settings.draws, self.settings.sampling, self.seed, draw)
        for entry, result in zip(batch, results, strict=True):
            if not isinstance(result, Draws):
                output.refuse(entry.document, Reason.MODEL_ERROR, result.message)
                continue
            output.keep(entry.document, paraphrases=[self.written(entry.work, drawn) for drawn in result.parts])
            tokens = tokenize(self.tokenizer, list(result.texts), self.settings.max_tokens)
            output.tokens += sum(len(drawn.ids) for drawn in tokens)

    def text_parts(self, work: Any) -> Sequence[TextPart]:
        """The parts of a prepared document."""
        return [TextPart(work)]

    def written(self, work: Any, drawn: Sequence[str]) -> str:
        """A paraphrase of a prepared document, given those of its parts, as in a row."""
        return "".join(drawn)


class ChatParaphraser(Paraphraser):
    """A paraphraser of conversations: of the contents of users and of the assistant that the audited model reads.

    Reasoning, calls of tools and the contents of other roles stay as they are. A paraphrase is stored as JSON: the
    contents of the first turns, up to the last one that is read.
    """

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the model and compile the template of the audited model."""
        super().__init__(stage, placement)
        assert self.settings.chat is not None
        self.template = self.settings.chat.open("target", self.tokenizer)

    def prepare(self, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
        """Split conversations into parts, up to the last content that is scored."""
        chats = [document.chat for document in documents if document.chat is not None]
        entries = []
        for document, chat, read in zip(
            documents, chats, self.template.read(chats, self.settings.max_tokens), strict=True
        ):
            if isinstance(read, Unreadable):
                output.refuse(document, read.reason, read.message)
            else:
                entries.append(Entry(document, len(read.tokens.ids), self._turns(chat, read.end)))
        return entries

    def text_parts(self, work: Sequence[Sequence[TextPart]]) -> Sequence[TextPart]:
        """The parts of all contents."""
        return list(chain.from_iterable(work))

    def written(self, work: Sequence[Sequence[TextPart]], drawn: Sequence[str]) -> str:
        """The contents of a paraphrase as JSON."""
        parts = iter(drawn)
        return json.dumps(["".join(islice(parts, len(content))) for content in work], ensure_ascii=False)

    def _turns(self, chat: Conversation, end: ChatEnd) -> list[list[TextPart]]:
        """The parts of the contents of a conversation up to an end."""
        turns = chat.turns[: end.turn + 1]
        lengths = [*(len(turn.content) for turn in turns[:-1]), end.kept]
        return [list(self._parts(turn, length)) for turn, length in zip(turns, lengths, strict=True)]

    def _parts(self, turn: Turn, length: int) -> Iterator[TextPart]:
        """The parts of the first characters of a content."""
        stays = self.template.wrapped(turn.content) if turn.role in ("user", ASSISTANT) else [(0, length)]
        at = 0
        for start, stop in [*stays, (length, length)]:
            yield TextPart(turn.content[at : min(start, length)])
            yield TextPart(turn.content[min(start, length) : min(stop, length)], stays=True)
            at = min(stop, length)


KIND = StageKind("paraphrase", "paraphrases", _stages, _check)
