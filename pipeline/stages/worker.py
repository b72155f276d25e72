"""A worker and its shards: a thread prefetches the next documents during computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.corpus.documents import Document
from pipeline.corpus.reasons import FAULTS, Reason
from pipeline.corpus.shard import Shard
from pipeline.errors import LostDeviceError, UserError, error_line, foreign_as_errors
from pipeline.models.devices import check_lost, out_of_memory
from pipeline.stages.base import BatchSize, BatchWorker, Entry, Output, Stage, Window, Worker
from pipeline.stages.events import kind_of_message
from pipeline.stages.process import file_rows, readable_documents
from pipeline.store.attempts import BATCH, WORK, AttemptLog, forget_attempts
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt

KILLED = "it was being worked on when its worker was killed, again and again"
_MESSAGE_CHARACTERS = 300

Take = Callable[[bool], Shard | None]
"""Returns the next shard of a worker, given whether it is a prefetch; None: none now."""

Ended = tuple[Shard, Receipt | Exception | SystemExit]
"""A shard and its receipt or the exception that prevented it."""


class OvertakenError(Exception):
    """Another worker has written the receipt of the shard."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """The state of a shard that is read or computed."""

    shard: Shard
    log: AttemptLog
    output: Output = field(default_factory=Output)
    seconds: float = 0.0  # time of computation and waiting
    over: bool = False  # no further reads or computations
    error: Exception | SystemExit | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """An item from the reader; an item without entries pauses the reader until it is processed."""

    attempt: _Attempt | None = None
    entries: list[Entry] | None = None  # of a window; None: the shard is isolated first
    ended: Ended | None = None

    @property
    def waits(self) -> bool:
        """Whether the reader pauses until this item is processed."""
        return self.entries is None and self.ended is None


class ShardStream:
    """The shards of one worker in turn; the next shard is prefetched while one is computed.

    A shard whose attempt log records a death is not prefetched: it is isolated first.

    Attributes:
        waited: seconds without documents to compute.
        worked: seconds of computation.
        filed: whether this worker, and not another one, wrote the receipt of the last shard.
        scored: whether a document has had a result in a call of `failures`.
    """

    def __init__(
        self,
        stage: Stage,
        worker: Worker,
        store: Store,
        driver: str | None = "",
        on_batch: Callable[[Shard, int, int], None] = lambda *_: None,
        *,
        alone: bool = True,
    ) -> None:
        """Prepare a stream for a worker.

        Args:
            stage: stage of the worker.
            worker: worker from `stage.make`.
            store: run directory.
            driver: name of the driver, for the attempt logs; None: attempts are not recorded.
            on_batch: called before every window and after every batch with the shard and its finished documents and
                tokens so far; an exception ends the stream, and `OvertakenError` only the attempt.
            alone: whether this process has no other worker.
        """
        self.stage = stage
        self.worker = worker
        self.store = store
        self.driver = driver
        self.on_batch = on_batch
        self.alone = alone
        self.waited = self.worked = 0.0
        self.filed = False
        self.scored = False
        self._open: list[_Attempt] = []

    def finish(self, take: Take) -> Iterator[Ended]:
        """Finish shards until none is left.

        Args:
            take: returns the next shard.

        Raises:
            LostDeviceError: the device refuses all further work of this process.
        """
        at: _Attempt | None = None
        items = self._items(take)
        prefetched = _prefetch(items)
        try:
            while True:
                item = self._received(prefetched)
                if item is not None and not item.waits:
                    prefetched = _prefetch(items)
                if at is not None and (item is None or item.attempt is not at):
                    yield from self._handle(at, None)
                if item is None:
                    return
                at = item.attempt
                if item.ended is not None:
                    self.filed = False
                    yield item.ended
                elif at is not None:
                    yield from self._handle(at, item)
                if item.waits:
                    prefetched = _prefetch(items)
        except LostDeviceError as error:  # as after a kill: the log keeps the work in flight
            if at is None:
                raise
            self._open.remove(at)
            raise LostDeviceError(f"shard {at.shard.id} of {at.shard.name}: {error}") from error
        finally:
            wait([prefetched])
            while self._open:
                self._open.pop().log.abandon()

    def _received(self, prefetched: Future[_Item | None]) -> _Item | None:
        """Wait for the prefetched item; None at the end."""
        began = time.monotonic()
        item = prefetched.result()
        seconds = time.monotonic() - began
        self.waited += seconds
        if item is not None and item.attempt is not None:
            item.attempt.seconds += seconds
        return item

    def failures(self, shard: Shard) -> tuple[bool, dict[str, int]]:
        """Whether a document of a shard in progress has a result; while none has, the failed ones by kind of message.

        A key is the first message of its kind; there are at most two.
        """
        output = next((attempt.output for attempt in self._open if attempt.shard is shard), None)
        if output is None or self.scored or output.rows.keys() - output.refused.keys():
            self.scored = self.scored or output is not None
            return self.scored, {}
        counts: dict[str, tuple[str, int]] = {}
        for _, reason, message in output.refused.values():
            if reason in FAULTS and (len(counts) < 2 or kind_of_message(message) in counts):
                first, count = counts.get(kind := kind_of_message(message), (message, 0))
                counts[kind] = first, count + 1
        return False, dict(counts.values())

    # --- the reader: each item is prepared in a separate thread, one at a time

    def _items(self, take: Take) -> Iterator[_Item]:
        while True:
            shard = take(True)
            if shard is None:
                yield _Item()  # wait until the previous shard is finished
                if (shard := take(False)) is None:
                    return
            yield from self._read_items(shard)

    def _read_items(self, shard: Shard) -> Iterator[_Item]:
        try:
            if receipt := read_receipt(self.store, self.stage.name, shard.id):
                forget_attempts(self.store, self.stage.name, shard.id)  # of a worker that died after its receipt
                yield _Item(ended=(shard, receipt))
                return
            attempt = self._begin(shard)
        except (Exception, SystemExit) as error:
            yield _Item(ended=(shard, error))
            return
        try:
            if attempt.log.isolates:
                yield _Item(attempt)
            if not attempt.over:
                empty = True
                for entries in self._prepared(attempt):
                    empty = False
                    yield _Item(attempt, entries)
                    if attempt.over:
                        return
                if empty:
                    yield _Item(attempt, [])
        except (Exception, SystemExit) as error:
            attempt.error = error
            yield _Item(attempt, [])

    def _begin(self, shard: Shard) -> _Attempt:
        name = f"{self.stage.name}/{shard.id}"
        log = AttemptLog(self.store, name, shard.name, self.driver, alone=self.alone)
        self._open.append(_Attempt(shard, log))
        return self._open[-1]

    def _prepared(self, attempt: _Attempt) -> Iterator[list[Entry]]:
        shard, output, log = attempt.shard, attempt.output, attempt.log
        inputs = self.worker.open(shard, self.store, output)
        documents = readable_documents(self.stage, shard, output, log.watch)
        for window in windows(documents, self.worker.window):
            fit = []
            for document in window:
                if log.is_deadly(f"{WORK}{document.row}"):
                    output.refuse(document, Reason.MODEL_ERROR, KILLED)
                else:
                    fit.append(document)
            yield prepare(self.worker, fit, inputs, output)

    # --- the worker's thread

    def _handle(self, attempt: _Attempt, item: _Item | None) -> Iterator[Ended]:
        """Compute a window of a shard, isolate the shard, or finish it if there is no item; yields ended shards."""
        if attempt.over:
            return
        began = time.monotonic()
        result: Receipt | Exception | SystemExit | None = None
        try:
            if attempt.error is not None:
                raise attempt.error
            if item is None:
                self._report(attempt)
                self.stage.check_models(hub=False)
                result = file_rows(self.stage, attempt.shard, self.store, attempt.output, attempt.seconds)
            elif item.entries is None:
                self._isolate(attempt)
            else:
                self._compute(attempt, item.entries)
        except LostDeviceError:
            raise
        except (Exception, SystemExit) as error:
            result = error
        finally:
            seconds = time.monotonic() - began
            attempt.seconds += seconds
            self.worked += seconds
        if result is not None:
            yield self._end(attempt, result)

    def _report(self, attempt: _Attempt) -> None:
        output = attempt.output
        self.on_batch(attempt.shard, len(output.rows) + len(output.refused), output.tokens)

    def _compute(self, attempt: _Attempt, entries: list[Entry]) -> None:
        """Compute the batches of a window; a batch at which workers died repeatedly is computed by single documents.

        A batch is not divided earlier, because its composition affects the last bits of a score.
        """
        log = attempt.log
        self._report(attempt)
        for batch in longest_first(entries, self.worker.batch_size):
            name = f"{BATCH}{batch[0].document.row}+{len(batch)}"
            for part in [[entry] for entry in batch] if log.is_deadly(name) else [batch]:
                names = [f"{WORK}{entry.document.row}" for entry in part]
                log.enter(names if len(part) == 1 else [name, *names])
                _in_halves(part, lambda some: self.worker.work(some, attempt.output), attempt.output)
            self._report(attempt)
        log.enter()

    def _isolate(self, attempt: _Attempt) -> None:
        """Read and compute documents alone, each after it is recorded; the rows are discarded."""
        shard, log, output = attempt.shard, attempt.log, Output()
        inputs = self.worker.open(shard, self.store, output)
        for document in readable_documents(self.stage, shard, output, log.watch_alone):
            if not log.must_isolate(document.row):
                continue
            log.enter([f"{WORK}{document.row}"])
            for entry in prepare(self.worker, [document], inputs, output):
                _in_halves([entry], lambda some: self.worker.work(some, output), output)
            log.enter()
            self._report(attempt)
        log.passed()

    def _end(self, attempt: _Attempt, result: Receipt | Exception | SystemExit) -> Ended:
        """The end of a shard; a shard that another attempt has finished has not failed."""
        attempt.over = True
        self.filed = isinstance(result, Receipt) and attempt.output.filed
        self._open.remove(attempt)
        with suppress(Exception):  # the removal of a log may fail
            if isinstance(result, Receipt):
                attempt.log.close()
            else:
                attempt.log.abandon()
                result = read_receipt(self.store, self.stage.name, attempt.shard.id) or result
        return attempt.shard, result


def _prefetch(items: Iterator[_Item]) -> Future[_Item | None]:
    """Prepare the next item in a daemon thread; None at the end."""
    future: Future[_Item | None] = Future()

    def read() -> None:
        try:
            future.set_result(next(items, None))
        except BaseException as error:  # raised by the thread of the worker
            future.set_exception(error)

    threading.Thread(target=read, name="seenset-reader", daemon=True).start()
    return future


def work_through(worker: BatchWorker, entries: list[Entry], output: Output) -> None:
    """Compute prepared documents in this process, without attempt log and receipt."""
    for batch in longest_first(entries, worker.batch_size):
        _in_halves(batch, lambda some: worker.work(some, output), output)


def prepare(worker: Worker, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
    """Prepare documents; after a failure in halves."""
    entries: list[Entry] = []
    if documents:
        _in_halves(documents, lambda some: entries.extend(worker.prepare(some, inputs, output)), output)
    return entries


def refusal_reason(error: BaseException) -> tuple[str, str]:
    """Reason and message of a document whose processing raised an error."""
    if isinstance(error, SystemExit):
        return Reason.MODEL_ERROR, f"sys.exit({error.code!r}) was called"[:_MESSAGE_CHARACTERS]
    message = error_line(error, _MESSAGE_CHARACTERS) or type(error).__name__
    return Reason.OUT_OF_MEMORY if out_of_memory(error) else Reason.MODEL_ERROR, message


def _in_halves(items: list[Any], work: Callable[[Any], None], output: Output) -> None:
    """Process documents or entries together; after a failure in halves, so that only the failing one has no result."""
    try:
        with foreign_as_errors():
            work(items)
        return
    except UserError:  # caused by settings, not by a document
        raise
    except (Exception, SystemExit) as error:  # any exception of a tokenizer, model or detector refuses the text
        check_lost(error)
        refusal = refusal_reason(error)
    if len(items) == 1:
        output.refuse(getattr(items[0], "document", items[0]), *refusal)
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(items) // 2
    _in_halves(items[:half], work, output)
    _in_halves(items[half:], work, output)


# --- windows of a shard and batches of a window depend only on the shard, and so do its scores


def windows(documents: Iterator[Document], most: Window) -> Iterator[list[Document]]:
    """Windows of documents, in order."""
    window: list[Document] = []
    characters = kept = 0
    for document in documents:
        window.append(document)
        characters += sum(map(len, document.texts)) + len(document.picture or b"")
        kept += sum(min(len(text), most.kept_of_one) for text in document.texts)
        if len(window) >= most.documents or characters >= most.characters or kept >= most.kept:
            yield window
            window, characters, kept = [], 0, 0
    if window:
        yield window


def longest_first(entries: list[Entry], size: BatchSize | None) -> list[list[Entry]]:
    """The batches of a window, longest first, so that insufficient memory is detected by the first batch."""
    return list(_batches(entries, size))[::-1]


def _batches(entries: list[Entry], size: BatchSize | None) -> Iterator[list[Entry]]:
    """Batches of documents of similar length that fit the size, each of at least one document."""
    if size is None:
        if entries:
            yield entries
        return
    batch: list[Entry] = []
    unpadded = 0
    for entry in sorted(entries, key=lambda entry: (entry.tokens, entry.document.row)):
        unpadded += entry.tokens
        padded = entry.tokens * (len(batch) + 1)
        if batch and (padded > size.tokens or (size.padding is not None and padded - unpadded > size.padding)):
            yield batch
            batch, unpadded = [], entry.tokens
        batch.append(entry)
    if batch:
        yield batch
