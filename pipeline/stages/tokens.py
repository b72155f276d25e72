"""Log-probabilities of every token of scored documents, by another pass of each through the target model.

Scores are stored per document, not per token. This stage is not part of a run: it does not affect scores, so its files
and receipts are in a separate folder. Each document is a separate pass, so that its bits do not depend on the other
documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.config.models import AnyModel
from pipeline.corpus.documents import Document, text_key
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.likelihood import standardised
from pipeline.models.load import open_model
from pipeline.models.opened import embedding_rows, unknown_id
from pipeline.models.tokens import Tokens, split_into_pieces, tokenize
from pipeline.models.windows import window_pieces, window_values
from pipeline.passes.parts import PassSizes, windows_in_parts
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window, rows_schema
from pipeline.stages.events import STATISTICS, TOKEN_SCHEMA, ScoredText, TokenSettings
from pipeline.store.files import Store
from pipeline.store.receipts import read_filed, read_receipt

GONE = "its text is missing or has changed"
SCHEMA = rows_schema(*((name, TOKEN_SCHEMA.field(name).type) for name in TOKEN_SCHEMA.names[2:]))


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
            tokens, pieces = self._tokenize(document.text, scored.tokens)
            problem = unknown_id(tokens.ids, self.ids)
            if len(tokens.ids) != scored.tokens:
                problem = f"{len(tokens.ids)} tokens now, {scored.tokens} were scored"
            if problem is not None:
                output.refuse(document, Reason.MODEL_ERROR, problem)
                continue
            pieces = pieces or split_into_pieces(self.lm.tokenizer, document.text, tokens.ids, tokens.kept)
            entries.append(Entry(replace(document, text=""), len(tokens.ids), (scored.key, tokens, pieces)))
        return entries

    def _tokenize(self, text: str, scored: int) -> tuple[Tokens, list[str]]:
        """The tokens of a text, of which `scored` were scored, and the pieces of its windows."""
        if self.settings.windows is not None:
            return window_pieces(self.lm.tokenizer, text, self.max_tokens, self.settings.windows[0])
        return tokenize(self.lm.tokenizer, [text], scored)[0], []

    def work(self, batch: list[Entry], output: Output) -> None:
        """Compute the results of the tokens of each document in a separate pass."""
        for entry in batch:
            key, tokens, pieces = entry.work
            read, cuts = [tokens.ids], [tokens.cuts]
            statistics = windows_in_parts(self.lm, read, cuts, STATISTICS, PassSizes(), self.max_tokens)
            with torch.inference_mode():
                both = torch.cat([statistics.log_prob, standardised(statistics)]).tolist()
            log_prob, standard = (
                [value if value is None or math.isfinite(value) else None for value in window_values(tokens.cuts, one)]
                for one in both
            )
            output.keep(entry.document, text_key=key, pieces=pieces, log_prob=log_prob, standardised=standard)
            output.tokens += entry.tokens


def token_stage(settings: TokenSettings, shards: Sequence[Shard]) -> Stage:
    """The stage that reads documents of these shards again, with the configured models."""

    def digest(model: AnyModel) -> dict[str, str]:
        return {"model": model.model_dump_json()}

    return Stage("tokens", "tokens", SCHEMA, settings, shards[0].transform, 0, TokenReader, digest)


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
