"""Log-probabilities of every token of scored documents, by another pass of each through the target model.

Scores are stored per document, not per token. This stage is not part of a run: it does not affect scores, so its files
and receipts are in a separate folder. Each document is a separate pass, so that its bits do not depend on the other
documents. Of a chat the first piece is its last question, without values, and the others are those of its last answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.config.models import AnyModel
from pipeline.corpus.documents import Document, text_key
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.likelihood import standardised
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatSettings
from pipeline.models.load import open_model
from pipeline.models.opened import embedding_rows, unknown_id
from pipeline.models.tokens import Tokens, split_into_pieces, tokenize
from pipeline.models.windows import window_pieces, window_values
from pipeline.passes.parts import PassSizes, windows_in_parts
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window, rows_schema
from pipeline.stages.chat_scoring import target_settings
from pipeline.stages.events import STATISTICS, TOKEN_SCHEMA, ScoredText, TokenSettings
from pipeline.store.files import Store
from pipeline.store.receipts import read_filed, read_receipt

GONE = "its text is missing or has changed"
SCHEMA = rows_schema(*((name, TOKEN_SCHEMA.field(name).type) for name in TOKEN_SCHEMA.names[2:]))


@dataclass(frozen=True, slots=True)
class _Read:
    """The tokens of a document, and the pieces that are kept of it."""

    tokens: Tokens
    pieces: list[str]
    places: Sequence[int | None]  # index of the token of each piece; None: it has no value

    def shown_values(self, values: Sequence[float | None]) -> list[float | None]:
        """The value of each piece, from those of all tokens; None where the model gives no finite one."""
        chosen = [None if place is None else values[place] for place in self.places]
        return [value if value is None or math.isfinite(value) else None for value in chosen]


class TokenReader:
    """The model of one worker. The results of a document depend only on the document."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the model."""
        self.settings: TokenSettings = stage.settings
        placement.set_up(self.settings.device)
        self.window = Window(1024, characters=1 << 20)
        self.batch_size: BatchSize | None = None
        self.lm = placement.open(open_model, self.settings.model)
        self.ids = embedding_rows(self.lm.model)
        limits = [self.settings.windows[1] if self.settings.windows is not None else 1, self.lm.max_tokens]
        self.max_tokens = min(limit for limit in limits if limit is not None)

    def open(self, shard: Shard, store: Store, output: Output) -> dict[int, ScoredText]:
        """The documents of a shard to read, by row number."""
        return {text.row: text for text in self.settings.texts.by_shard[shard.id]}

    def prepare(self, documents: list[Document], inputs: dict[int, ScoredText], output: Output) -> list[Entry]:
        """The documents that are unchanged since scoring, with their tokens and the pieces of their texts."""
        entries = []
        for document in documents:
            if (scored := inputs.get(document.row)) is None:
                continue
            if text_key(document.text) != scored.key:
                output.refuse(document, Reason.MODEL_ERROR, GONE)
                continue
            read = self._read(document, scored.tokens)
            problem = read if isinstance(read, str) else unknown_id(read.tokens.ids, self.ids)
            if isinstance(read, str) or problem is not None:
                output.refuse(document, Reason.MODEL_ERROR, str(problem))
                continue
            entries.append(Entry(replace(document, text="", chat=None), len(read.tokens.ids), (scored.key, read)))
        return entries

    def _read(self, document: Document, scored: int) -> _Read | str:
        """The tokens of a document and its pieces; the problem if it has other than `scored` tokens."""
        if self.settings.windows is not None:
            tokens, pieces = window_pieces(self.lm.tokenizer, document.text, self.max_tokens, self.settings.windows[0])
        else:
            (tokens,), pieces = tokenize(self.lm.tokenizer, [document.text], scored), []
        if len(tokens.ids) != scored:
            return f"{len(tokens.ids)} tokens now, {scored} were scored"
        pieces = pieces or split_into_pieces(self.lm.tokenizer, document.text, tokens.ids, tokens.kept)
        return _Read(tokens, pieces, range(len(pieces)))

    def work(self, batch: list[Entry], output: Output) -> None:
        """Compute the results of the tokens of each document in a separate pass."""
        for entry in batch:
            key, read = entry.work
            ids, cuts = [read.tokens.ids], [read.tokens.cuts]
            statistics = windows_in_parts(self.lm, ids, cuts, STATISTICS, PassSizes(), self.max_tokens)
            with torch.inference_mode():
                both = torch.cat([statistics.log_prob, standardised(statistics)]).tolist()
            log_prob, standard = (read.shown_values(window_values(read.tokens.cuts, one)) for one in both)
            output.keep(entry.document, text_key=key, pieces=read.pieces, log_prob=log_prob, standardised=standard)
            output.tokens += entry.tokens


QUESTION = 2_000
"""Characters that are shown of a question."""


@dataclass(frozen=True, slots=True)
class _ChatTokenSettings(TokenSettings):
    """The chats that are read again, and their template."""

    rendering: ChatSettings | None = None


class ChatTokenReader(TokenReader):
    """A reader of chats: the last question, and the tokens of the last answer."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the model and compile its template."""
        super().__init__(stage, placement)
        rendering = stage.settings.rendering
        assert rendering is not None
        self.template = rendering.open("target", self.lm.tokenizer)

    def _read(self, document: Document, scored: int) -> _Read | str:
        """The last question and the pieces of the answer to it; the problem if there is none."""
        if document.chat is None:
            return GONE
        read = self.template.last_answer(document.chat, scored)
        if isinstance(read, Unreadable):
            return read.message
        if len(read.tokens.ids) != scored:
            return f"{len(read.tokens.ids)} tokens now, {scored} were scored"
        cut = " ..." if len(read.question) > QUESTION else ""
        question = f"{read.question[:QUESTION]}{cut}\n\n" if read.question else ""
        return _Read(read.tokens, [question, *read.pieces], [None, *read.places])


def token_stage(settings: TokenSettings, shards: Sequence[Shard]) -> Stage:
    """The stage that reads documents of these shards again, with the configured models.

    Raises:
        UserError: the chat template is not the one of the scores, or cannot be read.
    """
    if settings.chats is not None:
        rendering = target_settings(settings.model, settings.chats.chat)
        if rendering.fingerprint()["templates"]["target"] != settings.chats.template:
            raise UserError("the chat template has changed since the documents were scored")
        values = {field.name: getattr(settings, field.name) for field in fields(settings)}
        settings = _ChatTokenSettings(**values, rendering=rendering)

    def digest(model: AnyModel) -> dict[str, str]:
        return {"model": model.model_dump_json()}

    reader = TokenReader if settings.chats is None else ChatTokenReader
    return Stage("tokens", "tokens", SCHEMA, settings, shards[0].transform, 0, reader, digest)


def read_token_rows(
    stage: Stage, shards: Sequence[Shard], store: Store, failures: Mapping[str, str]
) -> tuple[pa.Table, list[str]]:
    """A table of `TOKEN_SCHEMA` in the order of shards and rows, and a problem for each document without a row.

    Raises:
        UserError: as `read_filed`.
    """
    tables, problems = [TOKEN_SCHEMA.empty_table()], list[str]()
    for shard in shards:
        wanted = len(stage.settings.texts.by_shard[shard.id])
        receipt = read_receipt(store, stage.name, shard.id)
        if receipt is None:
            problems += [failures.get(shard.id, GONE)] * wanted
            continue
        table = read_filed(store, receipt)
        problems += [problem for problem in table["problem"].to_pylist() if problem is not None]
        problems += [GONE] * (wanted - len(table))
        table = table.filter(pc.is_null(table["reason"]))
        source = pa.array([shard.name] * len(table), pa.string())
        tables.append(table.append_column("source", source).select(TOKEN_SCHEMA.names).cast(TOKEN_SCHEMA))
    return pa.concat_tables(tables), problems
