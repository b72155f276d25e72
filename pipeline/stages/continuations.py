"""Continuations of documents: what is drawn, and how a document is cut into what is given and what is compared.

Whoever draws them, a shard comes to one file: for each document the rest of its text and what the model wrote instead,
or why there is nothing. A draw that is in a file is never made again, nor stored again: a run that asks for more draws
makes those that are missing, and its file holds them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.config.models import AnyModel
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Continued
from pipeline.detectors.samia import prefix_and_reference
from pipeline.stages.base import Output, Stage, rows_schema
from pipeline.stages.process import earlier_rows
from pipeline.store.files import Store

MAX_NEW_TOKENS = 1024
SCHEMA = rows_schema(("reference", pa.string()), ("continuations", pa.list_(pa.string())))


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """All that continuations depend on."""

    model: AnyModel
    continued: Continued
    draws: int
    max_tokens: int
    device: str = "endpoint"  # `Device.mark`
    cache_positions: int = 0  # at a time; 0: an endpoint's own affair

    @property
    def folder(self) -> str:
        """A folder's name: samples/ratio0.5_t1_k50_p1_reference."""
        c = self.continued
        shape = f"ratio{c.prefix_ratio:g}_t{c.temperature:g}_k{c.top_k or 'all'}_p{c.top_p:g}_{c.candidate_words}"
        return f"samples/{shape}"

    @property
    def stage(self) -> str:
        """The stage whose receipts say that a shard has so many draws."""
        return f"sample/{self.folder.removeprefix('samples/')}/{self.draws}"


@dataclass(frozen=True, slots=True)
class Task:
    """A document cut in two: what the model is given, and what it is compared with."""

    document: Document
    prefix: str
    reference: str
    words: int | None  # a draw is done with so many words; None: as the model likes
    max_new_tokens: int


def token_limit(reference_bytes: int, continued: Continued) -> int:
    """Most new tokens of a draw: a third more than the reference's own, at four bytes a token, and 16."""
    if continued.candidate_words == "all":
        return MAX_NEW_TOKENS
    return min(MAX_NEW_TOKENS, 16 + reference_bytes // 3)


def keep_earlier_draws(stage: Stage, shard: Shard, store: Store, output: Output) -> None:
    """Put the draws that were filed with another number of draws into the output."""
    for row in earlier_rows(stage, shard, store, output):
        output.rows[row["row"]] = {**row, "continuations": row["continuations"] or [], "reason": None, "problem": None}


def draws_of_row(number: int, output: Output) -> list[str]:
    """The draws of a document so far, the first ones first."""
    texts: list[str] = output.rows[number]["continuations"] if number in output.rows else []
    return texts


def task_of(stage: Stage, document: Document, kept: int, output: Output) -> Task | None:
    """What is to be drawn of a document; None where nothing is, or where it has too few words, which is refused.

    Args:
        stage: of the continuations.
        document: to be continued.
        kept: characters of it that max_tokens keeps.
        output: of the shard.
    """
    settings: SampleSettings = stage.settings
    if len(draws_of_row(document.row, output)) >= settings.draws:
        return None
    task = cut_in_two(document, kept, settings.continued)
    if task is None:
        count, ratio = len(document.text.split()), settings.continued.prefix_ratio
        words = f"{count} word{'' if count == 1 else 's'}"
        output.refuse(document, "too_short", f"{words}: a prefix of {ratio:g} of them leaves no two parts")
    return task


def cut_in_two(document: Document, kept: int, continued: Continued) -> Task | None:
    """Cut the first `kept` characters of a document in two; None where it has too few words."""
    prefix, reference = prefix_and_reference(document.text[:kept], continued.prefix_ratio)
    if not prefix or not reference:
        return None
    words = None if continued.candidate_words == "all" else len(reference.split())
    return Task(document, prefix, reference, words, token_limit(len(reference.encode()), continued))


def keep_draws(task: Task, texts: Sequence[str], output: Output) -> None:
    """Note the draws of a document."""
    output.keep(task.document, reference=task.reference, continuations=list(texts))
