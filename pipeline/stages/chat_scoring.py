"""Scoring of conversations: a model reads the rendered conversation, and only tokens of answers are scored."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ChatConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import Conversation
from pipeline.corpus.documents import Document
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.notes import CONTROL_TOKENS, REMOVED_PIECES, TAGS_ALONE, UNREAD_TOOLS
from pipeline.corpus.reasons import Reason
from pipeline.detectors.base import FORWARD, Detector, Pass
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.chat_rendering import IsolatedTemplate, Template
from pipeline.models.chat_templates import ChatSettings, ReadChat, chat_template, check_offsets
from pipeline.models.checkpoints import locate
from pipeline.models.tokens import Tokens, open_tokenizer
from pipeline.passes.statistics import text_read
from pipeline.stages.base import Entry, Output, Placement, Stage
from pipeline.stages.score import Inputs, Scorer, ScoreSettings


def chat_settings(config: AuditConfig, detectors: Sequence[Detector]) -> ChatSettings:
    """The rendering of the chats of an audit: by the configured template, or by that of each model that reads them.

    Raises:
        UserError: a tokenizer has no chat template or no offsets, a template is no Jinja, or two models whose tokens a
            detector compares have different ones.
    """
    needed = {needed.model for detector in detectors for needed in detector.needs}
    models = {"target": config.model} | ({"reference": config.reference_model} if "reference" in needed else {})
    made = _settings({name: one for name, one in models.items() if isinstance(one, ModelConfig)}, config.chat)
    pair = next((detector.column for detector in detectors if detector.same_tokens), None)
    if pair is not None and len({*made.templates.values()}) > 1:
        raise UserError(
            f"detector {pair} compares model and reference_model token by token, and their chat templates differ: take "
            "a reference_model with the same template, or detector reference"
        )
    return made


def target_settings(model: ModelConfig, chat: ChatConfig) -> ChatSettings:
    """The rendering of chats for the audited model alone. Raises UserError as `chat_settings`."""
    return _settings({"target": model}, chat)


def _settings(models: Mapping[str, ModelConfig], chat: ChatConfig | None) -> ChatSettings:
    """The rendering of chats for models, by name."""
    given = chat or ChatConfig()
    template = None if given.template is None else _read_template(given.template)
    file = "" if given.template is None else os.path.basename(given.template)
    templates = {
        name: _checked_template(model.model_dump_json(), _stamps(model), template, file)
        for name, model in models.items()
    }
    return ChatSettings(templates, file, given.score == "all")


@dataclass(frozen=True, slots=True)
class ChatForecast:
    """What a model reads of some conversations, and what is scored of it."""

    documents: int  # conversations with a scored token
    read: float  # mean number of tokens that the model reads
    scored: float  # mean number of tokens that are scored
    too_short: int  # conversations of which max_tokens leaves no answer
    refused: int  # conversations that the template refuses or does not render as they are
    controlled: int  # conversations whose contents hold control tokens
    removed: int  # pieces of answers that the template leaves out
    tags: int  # answers of tags alone
    unread_tools: int  # conversations with tools, which the template does not read
    max_tokens: int

    @property
    def sentence(self) -> str:
        """The numbers in words, for `plan`."""
        line = (
            f"of the first {self.documents:,} chats a model reads {self.read:,.0f} tokens on average, and "
            f"{self.scored:,.0f} of them are scored"
        )
        if self.too_short:
            line += f"; max_tokens, {self.max_tokens:,}, leaves no answer of {self.too_short:,} more (too_short)"
        if self.refused:
            line += f"; {self.refused:,} more are refused by the chat template"
        if self.controlled:
            line += f"; control tokens stand in the contents of {self.controlled:,}"
        if self.removed:
            pieces = "piece of an answer" if self.removed == 1 else "pieces of answers"
            line += f"; the chat template leaves out {self.removed:,} {pieces}, such as earlier reasoning"
        if self.tags:
            line += f"; {self.tags:,} {'answers consist' if self.tags > 1 else 'answer consists'} of tags alone"
        if self.unread_tools:
            line += f"; the chat template does not read tools, which {self.unread_tools:,} have"
        return line


def read_chats(config: AuditConfig, documents: Sequence[Document]) -> ChatForecast:
    """What the audited model would read of some conversations.

    Raises:
        UserError: as `chat_settings`.
    """
    assert isinstance(config.model, ModelConfig)
    settings, tokenizer = chat_settings(config, parse_detectors(config.detectors)), open_tokenizer(config.model)
    template = settings.open("target", tokenizer)
    chats = [document.chat for document in documents if document.chat is not None]
    made = template.read(chats, config.max_tokens)
    template.close()
    read = [one for one in made if isinstance(one, ReadChat)]
    reasons = Counter(one.reason for one in made if isinstance(one, Unreadable))
    return ChatForecast(
        len(read),
        fmean([len(one.tokens.ids) for one in read] or [0]),
        fmean([sum(one.scored) for one in read] or [0]),
        reasons[Reason.TOO_SHORT],
        reasons.total() - reasons[Reason.TOO_SHORT],
        sum(template.holds_control(chat) for chat in chats),
        sum(one.removed for one in read),
        sum(one.tags for one in read),
        sum(template.ignores_tools(chat) for chat in chats),
        config.max_tokens,
    )


def _read_template(path: str) -> str:
    """The text of a template's file. Raises UserError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        problem = "does not exist"
    except IsADirectoryError:
        problem = "is a folder, not a file"
    except UnicodeDecodeError:
        problem = "is not in UTF-8"
    except OSError as error:
        problem = f"is not readable ({error.strerror})"
    raise UserError(f"chat.template {path} {problem}: give a file with a Jinja template, or leave it out")


@lru_cache(maxsize=8)
def _checked_template(model: str, stamps: tuple[Any, ...], template: str | None, file: str) -> str:
    """The template that renders chats for a model, given as JSON; its own, or that of a file.

    Its tokenizer is opened once in a process, as long as no file changes.
    """
    config = ModelConfig.model_validate_json(model)
    tokenizer = open_tokenizer(config)
    check_offsets(tokenizer, config)
    if template is None:
        template = chat_template(tokenizer, config)
        Template(template, tokenizer.special_tokens_map)
    else:
        IsolatedTemplate(template, tokenizer.special_tokens_map, file).close()
    return template


def _stamps(model: ModelConfig) -> tuple[Any, ...]:
    """Sizes and modification times of the files of a model."""
    files = locate(model, weights=False).files
    states = [] if files is None else [path.stat() for path in files.places.values()]
    return tuple((state.st_size, state.st_mtime_ns) for state in states)


_Variant = tuple[str, str, int]
"""Model, "target" or "reference", how its text is changed, and the number of the paraphrase, as in `Pass`."""

_PLAIN: _Variant = ("target", "plain", 0)


@dataclass(frozen=True, slots=True)
class _ReadConversation(Conversation):
    """A conversation as each model of a scorer reads it."""

    read: Mapping[_Variant, ReadChat] = field(default_factory=dict)


class ChatScorer(Scorer):
    """A scorer of conversations. Detectors of texts, such as `zlib`, read the answers."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the models and compile their templates."""
        super().__init__(stage, placement)
        settings: ScoreSettings = stage.settings
        assert settings.chat is not None
        tokenizers: dict[str, Any] = {name: lm.tokenizer for name, lm in self.models.items()}
        tokenizers.setdefault("target", self.tokenizer)
        self.templates = {name: settings.chat.open(name, tokenizers[name]) for name in settings.chat.templates}

    def prepare(self, documents: list[Document], inputs: Inputs, output: Output) -> list[Entry]:
        """Render and tokenize conversations; those without a scored token are refused."""
        usable = self._rendered(documents, output)
        if self.draws:
            usable = self._with_paraphrases(usable, inputs, output)
        kept = {document.row: _read(document) for document in usable}
        return [self._restricted(entry, kept[entry.document.row]) for entry in super().prepare(usable, inputs, output)]

    def tokenise(self, documents: Sequence[Document]) -> tuple[list[Tokens], list[str]]:
        """The tokens of rendered conversations, and their answers."""
        return self._tokens(documents, _PLAIN)

    def tokenise_draw(self, documents: Sequence[Document], inputs: Inputs, draw: int) -> tuple[list[Tokens], list[str]]:
        """The tokens of one paraphrase of each conversation, and its answers."""
        return self._tokens(documents, (*_PLAIN[:2], draw))

    def tokenise_passes(
        self, documents: Sequence[Document], kept: list[list[str]], ids: dict[Pass, list[list[int]]]
    ) -> None:
        """Use the ids of the model and the changed contents of each pass."""
        for needed in self.passes:
            variant, same = _variant(needed), replace(FORWARD, draw=needed.draw)
            plain = variant[:2] == _PLAIN[:2]
            ids[needed] = ids[same] if plain else [_read(document)[variant].tokens.ids for document in documents]

    def _rendered(self, documents: list[Document], output: Output) -> list[Document]:
        """The documents as each model reads them; those that one cannot read are refused."""
        chats = [document.chat for document in documents if document.chat is not None]
        variants = dict.fromkeys([_PLAIN, *(_variant(needed) for needed in self.passes if not needed.draw)])
        of_variants = {
            variant: self.templates[variant[0]].read([self._changed(chat, variant) for chat in chats], self.max_tokens)
            for variant in variants
        }
        usable = []
        for place, (document, chat) in enumerate(zip(documents, chats, strict=True)):
            read = _readable({variant: some[place] for variant, some in of_variants.items()})
            if isinstance(read, Unreadable):
                output.refuse(document, read.reason, read.message)
                continue
            if self.templates[_PLAIN[0]].holds_control(chat):
                output.notes.add(CONTROL_TOKENS, document.row)
            if self.templates[_PLAIN[0]].ignores_tools(chat):
                output.notes.add(UNREAD_TOOLS, document.row)
            for kind, count in ((REMOVED_PIECES, read[_PLAIN].removed), (TAGS_ALONE, read[_PLAIN].tags)):
                if count:
                    output.notes.add(kind, document.row, count)
            usable.append(replace(document, chat=_ReadConversation(chat.turns, chat.prompt, chat.tools, read)))
        return usable

    def _with_paraphrases(self, documents: list[Document], inputs: Inputs, output: Output) -> list[Document]:
        """The documents with their paraphrases as each model reads them; those that one cannot read are refused."""
        drawn = [document for document in documents if inputs.refusal(document.row) is None]
        plain = {(*_PLAIN[:2], draw): None for draw in range(1, self.draws + 1)}
        variants = {**plain, **{_variant(needed): None for needed in self.passes if needed.draw}}
        of_variants = {}
        for variant in variants:
            chats = [self._paraphrase(document, inputs, variant) for document in drawn]
            ends = [_read(document)[_PLAIN].end for document in drawn]
            of_variants[variant] = self.templates[variant[0]].read(chats, self.max_tokens, ends)
        usable = {document.row: document for document in documents}
        for place, document in enumerate(drawn):
            read = _readable({variant: some[place] for variant, some in of_variants.items()})
            if isinstance(read, Unreadable):
                output.refuse(usable.pop(document.row), read.reason, read.message)
                continue
            assert isinstance(document.chat, _ReadConversation)
            chat = replace(document.chat, read={**document.chat.read, **read})
            usable[document.row] = replace(document, chat=chat)
        return list(usable.values())

    def _paraphrase(self, document: Document, inputs: Inputs, variant: _Variant) -> Conversation:
        """A conversation with the contents of one paraphrase, changed as a pass reads them.

        What the audited model does not read of the last of these contents stays behind it.
        """
        chat, end = document.chat, _read(document)[_PLAIN].end
        assert chat is not None
        contents = json.loads(inputs.paraphrases[document.row]["paraphrases"][variant[2] - 1])
        changed = [turn.content for turn in self._changed(chat.replaced(contents), variant).turns[: end.turn + 1]]
        rest = chat.turns[end.turn].content[end.kept :]
        return Conversation(chat.turns, chat.prompt, chat.tools).replaced([*changed[:-1], changed[-1] + rest])

    def _tokens(self, documents: Sequence[Document], variant: _Variant) -> tuple[list[Tokens], list[str]]:
        """The tokens and the answers of conversations as a model reads them."""
        read = [_read(document)[variant] for document in documents]
        return [chat.tokens for chat in read], [chat.answers for chat in read]

    def _changed(self, chat: Conversation, variant: _Variant) -> Conversation:
        """A conversation with its contents as a pass reads them."""
        kind = variant[1]
        return chat if kind == _PLAIN[1] else chat.changed(lambda content: text_read(content, kind, self.seed))

    def _restricted(self, entry: Entry, read: Mapping[_Variant, ReadChat]) -> Entry:
        """A prepared conversation of which only the tokens of answers are scored."""
        keep = {needed: read[_variant(needed)].scored for needed in self.passes}
        return replace(entry, work=replace(entry.work, keep=keep))


def _variant(needed: Pass) -> _Variant:
    """What a pass reads of a conversation."""
    return needed.model, needed.text, needed.draw


def _readable(read: Mapping[_Variant, ReadChat | Unreadable]) -> dict[_Variant, ReadChat] | Unreadable:
    """A conversation as the models read it; the first reason if one of them cannot."""
    made = dict[_Variant, ReadChat]()
    for variant, one in read.items():
        if isinstance(one, Unreadable):
            return replace(one, message=f"paraphrase {variant[2]}: {one.message}") if variant[2] else one
        made[variant] = one
    return made


def _read(document: Document) -> Mapping[_Variant, ReadChat]:
    """A conversation as the models read it."""
    assert isinstance(document.chat, _ReadConversation)
    return document.chat.read
