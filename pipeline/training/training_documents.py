"""Documents of a training: texts, or token ids of which only some count in the loss, such as those of answers.

What counts in the loss of a chat are the tokens that an audit scores, by the same function: `ChatTemplate.read`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.corpus.chats import Conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.errors import UserError, error_line, foreign_as_errors
from pipeline.models.chat_templates import ChatSettings, ReadChat
from pipeline.models.tokens import tokenize_each


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The tokens of a document, and which of them count in the loss."""

    ids: list[int]
    scored: list[bool]  # of each token from the second on

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def predicted(self) -> int:
        """Number of tokens that count in the loss."""
        return sum(self.scored)

    def cut(self, max_tokens: int) -> ScoredTokens:
        """The first `max_tokens` tokens."""
        return ScoredTokens(self.ids[:max_tokens], self.scored[: max_tokens - 1])


TrainingDocument = str | ScoredTokens
"""A document as it is handed to a training: a text, all of which is learnt, or its tokens."""


def training_documents(
    tokenizer: Any, documents: Sequence[str | Conversation], chat: ChatSettings | None, max_tokens: int
) -> list[TrainingDocument | Unreadable]:
    """What a training reads of each document, or why nothing of the document can be learnt.

    Args:
        tokenizer: tokenizer of the trained model.
        documents: texts, or conversations.
        chat: rendering of conversations, with the template of the model "target"; None for texts.
        max_tokens: number of tokens to which documents are cut.
    """
    if chat is None:
        texts = [document for document in documents if isinstance(document, str)]
        tokens = tokenize_each(tokenizer, texts, max_tokens)
        short = Unreadable(Reason.TOO_SHORT, "fewer than 2 tokens, which training needs")
        return [text if len(read.ids) > 1 else short for text, read in zip(texts, tokens, strict=True)]
    template = chat.open("target", tokenizer)
    try:
        made = template.read([document for document in documents if isinstance(document, Conversation)], max_tokens)
    finally:
        template.close()
    return [ScoredTokens(read.tokens.ids, read.scored) if isinstance(read, ReadChat) else read for read in made]


def document_bytes(document: TrainingDocument) -> bytes:
    """What determines the learnt content of a document, for a digest: its text, or its tokens with their labels."""
    if isinstance(document, str):
        return document.encode("utf-8", "surrogatepass")
    return b"\0" + json.dumps([document.ids, list(map(int, document.scored))]).encode()


def to_table(documents: Sequence[TrainingDocument]) -> pa.Table:
    """Documents of one kind as a table: a column `text`, or columns `ids` and `scored`."""
    texts = [document for document in documents if isinstance(document, str)]
    if texts:
        return pa.table({"text": texts})
    tokens = [document for document in documents if isinstance(document, ScoredTokens)]
    ids = pa.array([one.ids for one in tokens], pa.list_(pa.int64()))
    return pa.table({"ids": ids, "scored": pa.array([one.scored for one in tokens], pa.list_(pa.bool_()))})


def from_table(table: pa.Table) -> list[TrainingDocument]:
    """The documents of a table from `to_table`."""
    columns = [column.to_pylist() for column in table.columns]
    if table.column_names == ["text"]:
        return list(columns[0])
    return [ScoredTokens(ids, scored) for ids, scored in zip(*columns, strict=True)]


def encode(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The token ids of each text, cut to `max_tokens`.

    Raises:
        UserError: a text has fewer than 2 tokens, so that no token can be predicted, or the tokenizer refuses it.
    """
    return [_encode(tokenizer, index, text, max_tokens) for index, text in enumerate(texts)]


def read_tokens(tokenizer: Any, documents: Sequence[TrainingDocument], max_tokens: int) -> list[ScoredTokens]:
    """The tokens of each document, cut to `max_tokens`. All of a text count in the loss.

    Raises:
        UserError: a document has no token that counts, or the tokenizer refuses its text.
    """
    made = []
    for index, document in enumerate(documents):
        if isinstance(document, str):
            ids = _encode(tokenizer, index, document, max_tokens)
            made.append(ScoredTokens(ids, [True] * (len(ids) - 1)))
            continue
        made.append(document.cut(max_tokens))
        if not made[-1].predicted:
            raise UserError(
                f"fine-tuning document {index} has no token to learn within max_tokens = {max_tokens:,}: raise it, or "
                "leave the document out"
            )
    return made


def _encode(tokenizer: Any, index: int, text: str, max_tokens: int) -> list[int]:
    """The token ids of the text with an index, cut to `max_tokens`. Raises UserError as `encode`."""
    try:
        with foreign_as_errors():
            ids: list[int] = tokenizer(text)["input_ids"][:max_tokens]
    except Exception as error:  # a tokenizer raises any exception of its parts
        raise UserError(f"fine-tuning text {index} cannot be tokenized: {error_line(error)}") from error
    if len(ids) < 2:
        raise UserError(f"fine-tuning text {index} has {len(ids)} tokens, needs at least 2")
    return ids
