"""Scored documents through the target model once more, one at a time: the log-probability of every token.

Scores are kept a document, not a token. What this reads of some documents changes no score: it is no stage of a run and
has no receipts. A document is a pass of its own, so that its numbers are the same bits whatever else is read with it.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import torch

from pipeline.config.models import ModelConfig
from pipeline.corpus.excerpts import same_texts
from pipeline.corpus.shard import Shard
from pipeline.detectors.likelihood import standardised
from pipeline.models.device_errors import check_lost
from pipeline.models.embedding import embedding_rows, unknown_id
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.pieces import pieces_of
from pipeline.models.tokens import tokenize
from pipeline.passes.parts import PassSizes, forward_in_parts
from pipeline.stages.base import Placement
from pipeline.stages.token_table import TOKEN_SCHEMA
from pipeline.stages.worker import refusal_of
from pipeline.store.attempts import AttemptLog

STATISTICS = frozenset({"log_prob", "mean", "variance"})
AT_ONCE = 128
"""Documents that are prepared and read before they become rows, which take less memory."""

DOCUMENTS_A_THREAD = 8
"""At least: a thread of its own costs layers of its own, and a proof of what its model's logits are made of."""

DEADLY = 2
"""Deaths of processes that had one document alone in flight, from which it is left out."""

TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A document as it was scored."""

    row: int  # number in the input
    key: int  # `text_key`
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Documents to be read once more, and by what."""

    texts: tuple[tuple[Shard, tuple[ScoredText, ...]], ...]
    model: ModelConfig
    device: str  # `Device.mark`

    def __len__(self) -> int:
        """How many documents."""
        return sum(len(texts) for _, texts in self.texts)


@dataclass(slots=True)
class TokenReading:
    """What came of a request."""

    table: pa.Table  # of `TOKEN_SCHEMA`, in the order of the request
    problems: list[str] = field(default_factory=list)  # one for each document that has no row


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document with its tokens."""

    shard: Shard
    text: ScoredText
    ids: list[int]
    pieces: list[str]

    @property
    def name(self) -> str:
        return f"{self.shard.name}#{self.text.row}"


def _unchecked() -> None:
    """Nothing stops the reading."""


def read_tokens(
    request: TokenRequest,
    placement: Placement,
    workers: int = 1,
    log: AttemptLog | None = None,
    check: Callable[[], None] = _unchecked,
) -> TokenReading:
    """Read documents once more. One that fails has no row, and a problem instead.

    Args:
        request: the documents.
        placement: where the model is.
        workers: threads, of which each has a document at a time.
        log: of attempts; after a death every document is recorded, and those that were deadly are left out.
        check: called every while; what it raises ends the reading.

    Raises:
        UserError: the model cannot be opened.
        LostDeviceError: the device refuses all further work of this process.
    """
    before = torch.get_num_threads()
    placement.set_up(request.device)
    careful = log if log is not None and log.died else None
    threads = 1 if careful else max(1, min(workers, len(request) // DOCUMENTS_A_THREAD))
    models = [placement.open(open_model, request.model) for _ in range(threads)]
    reading = TokenReading(TOKEN_SCHEMA.empty_table())
    prepared = _prepared(request, models[0], reading.problems)
    try:
        while documents := list(islice(prepared, AT_ONCE)):
            columns = _columns(documents, models, placement, careful, check)
            rows = [
                _row(document, numbers) for document, numbers in zip(documents, columns, strict=True) if numbers.good
            ]
            reading.problems += [numbers.problem for numbers in columns if not numbers.good]
            reading.table = pa.concat_tables([reading.table, pa.Table.from_pylist(rows, schema=TOKEN_SCHEMA)])
    finally:
        torch.set_num_threads(before)
    return reading


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a pass gives of a document's tokens but the first, or why it gives nothing."""

    log_prob: Sequence[float] = ()
    standardised: Sequence[float] = ()
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem


def _prepared(request: TokenRequest, lm: LanguageModel, problems: list[str]) -> Iterator[_Prepared]:
    """The documents that are still what was scored, with their tokens."""
    rows = embedding_rows(lm.model)
    for shard, texts in request.texts:
        wanted = {text.row: text for text in texts}
        for row, text in same_texts(shard, {text.row: text.key for text in texts}):
            scored = wanted.pop(row)
            try:
                ids, pieces = _tokens(lm.tokenizer, text, scored.tokens, rows)
            except Exception as error:  # whatever a tokenizer raises on a text is that text's fault
                problems.append(refusal_of(error)[1])
                continue
            yield _Prepared(shard, scored, ids, pieces)
        problems += ["its text is gone, or another now"] * len(wanted)


def _tokens(tokenizer: Any, text: str, count: int, rows: int) -> tuple[list[int], list[str]]:
    """The token ids of a text, of which so many were scored, and its pieces.

    Raises:
        ValueError: they are others now.
    """
    (tokens,) = tokenize(tokenizer, [text], count)
    if len(tokens.ids) != count:
        raise ValueError(f"{len(tokens.ids)} tokens now, {count} were scored")
    if (problem := unknown_id(tokens.ids, rows)) is not None:
        raise ValueError(problem)
    return tokens.ids, pieces_of(tokenizer, text, tokens.ids, tokens.kept)


def _columns(
    documents: Sequence[_Prepared],
    models: Sequence[LanguageModel],
    placement: Placement,
    careful: AttemptLog | None,
    check: Callable[[], None],
) -> list[_Numbers]:
    """The numbers of documents, in order, each computed by one of several threads."""
    free: queue.SimpleQueue[LanguageModel] = queue.SimpleQueue()
    for model in models:
        free.put(model)
    pool = ThreadPoolExecutor(len(models), thread_name_prefix="seenset-tokens")
    try:
        work = partial(_of_document, free=free, placement=placement, careful=careful)
        futures = [pool.submit(work, document) for document in documents]
        return [_awaited(future, check) for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _awaited(future: Future[_Numbers], check: Callable[[], None]) -> _Numbers:
    check()
    while not wait([future], timeout=TICK_SECONDS).done:
        check()
    return future.result()


def is_deadly(log: AttemptLog) -> bool:
    """Whether a log knows of a document that is left out because it kills its process."""
    return any(deaths >= DEADLY for deaths in log.deaths.values())


def _of_document(
    document: _Prepared, free: queue.SimpleQueue[LanguageModel], placement: Placement, careful: AttemptLog | None
) -> _Numbers:
    """The numbers of one document.

    Raises:
        LostDeviceError: the device refuses all further work of this process.
    """
    if careful is not None:
        if careful.deaths.get(document.name, 0) >= DEADLY:
            return _Numbers(problem="its process was killed at it, again and again")
        careful.enter([document.name])
    model = free.get()
    try:
        if placement.gpus == 0:
            torch.set_num_threads(placement.threads)
        return _pass_over(model, document.ids)
    except Exception as error:  # as in a stage: of this document alone
        check_lost(error)
        return _Numbers(problem=refusal_of(error)[1])
    finally:
        free.put(model)


def _pass_over(model: LanguageModel, ids: list[int]) -> _Numbers:
    statistics = forward_in_parts(model, [ids], STATISTICS, PassSizes())
    with torch.inference_mode():
        both = torch.cat([statistics.log_prob, standardised(statistics)]).tolist()
    return _Numbers(*both)


def _row(document: _Prepared, numbers: _Numbers) -> dict[str, Any]:
    def column(values: Sequence[float]) -> list[float | None]:
        return [None, *(value if math.isfinite(value) else None for value in values)]

    return {
        "source": document.shard.name,
        "row": document.text.row,
        "text_key": document.text.key,
        "pieces": document.pieces,
        "log_prob": column(numbers.log_prob),
        "standardised": column(numbers.standardised),
    }
