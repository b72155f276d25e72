"""A worker and its shards: a thread reads the next documents while these are computed."""

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
from pipeline.corpus.shard import Shard
from pipeline.errors import LostDeviceError, UserError
from pipeline.models.devices import check_lost, out_of_memory
from pipeline.stages.base import BatchSize, BatchWorker, Entry, Output, Stage, Window, Worker
from pipeline.stages.process import file_rows, readable_documents
from pipeline.store.attempts import BATCH, WORK, AttemptLog, forget_attempts
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt

KILLED = "it was being worked on when its worker was killed, again and again"
_MESSAGE_CHARACTERS = 300

Take = Callable[[bool], Shard | None]
"""The next shard of a worker, given whether it would be read while another is computed; None: none now."""

Ended = tuple[Shard, Receipt | Exception | SystemExit]
"""A shard and its receipt, or what prevented one."""


class OvertakenError(Exception):
    """Another worker has filed the receipt of the shard."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """What is known of the shard that is read or computed."""

    shard: Shard
    log: AttemptLog
    output: Output = field(default_factory=Output)
    seconds: float = 0.0  # in which it was computed or waited for
    over: bool = False  # nothing more of it is read or computed
    error: Exception | SystemExit | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """What the reader hands over; without entries and an end, it reads on only when this is handled."""

    attempt: _Attempt | None = None
    entries: list[Entry] | None = None  # of a window; None: the shard is isolated before it is read
    ended: Ended | None = None

    @property
    def waits(self) -> bool:
        """Whether nothing is read while this is handled."""
        return self.entries is None and self.ended is None


class ShardStream:
    """The shards of one worker, one after the other; the next one is read while this one is computed.

    A shard whose attempt log shows a death is not prefetched: it is isolated first.

    Attributes:
        waited: seconds in which there was nothing to compute.
        worked: seconds of work.
        filed: whether the receipt of the shard that ended last is this worker's, not of another that was quicker.
    """

    def __init__(
        self,
        stage: Stage,
        worker: Worker,
        store: Store,
        driver: str = "",
        on_batch: Callable[[Shard, int, int], None] = lambda *_: None,
        *,
        alone: bool = True,
        kept: bool = True,
    ) -> None:
        """Hold the worker.

        Args:
            stage: of the worker.
            worker: from `stage.make`.
            store: the run directory.
            driver: who asks, for the attempt logs.
            on_batch: called before every window and after every batch with the shard and its finished documents and
                tokens so far; what it raises ends the stream, or with `OvertakenError` the attempt.
            alone: whether no other worker is in this process.
            kept: whether attempts are recorded.
        """
        self.stage = stage
        self.worker = worker
        self.store = store
        self.driver = driver
        self.on_batch = on_batch
        self.alone = alone
        self.kept = kept
        self.waited = self.worked = 0.0
        self.filed = False
        self._open: list[_Attempt] = []

    def finish(self, take: Take) -> Iterator[Ended]:
        """Finish shards until none is left.

        Args:
            take: the next shard.

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
        except LostDeviceError as error:  # as if the process had been killed: the log keeps what was in flight
            if at is None:
                raise
            self._open.remove(at)
            raise LostDeviceError(f"shard {at.shard.id} of {at.shard.name}: {error}") from error
        finally:
            wait([prefetched])
            while self._open:
                self._open.pop().log.abandon()

    def _received(self, prefetched: Future[_Item | None]) -> _Item | None:
        """The prefetched item, once it is there; None: there is no more."""
        began = time.monotonic()
        item = prefetched.result()
        seconds = time.monotonic() - began
        self.waited += seconds
        if item is not None and item.attempt is not None:
            item.attempt.seconds += seconds
        return item

    # --- the reader: each item is made in a thread of its own, one at a time

    def _items(self, take: Take) -> Iterator[_Item]:
        while True:
            shard = take(True)
            if shard is None:
                yield _Item()  # until the worker has filed the shard before
                if (shard := take(False)) is None:
                    return
            yield from self._items_of(shard)

    def _items_of(self, shard: Shard) -> Iterator[_Item]:
        try:
            if receipt := read_receipt(self.store, self.stage.name, shard.id):
                forget_attempts(self.store, self.stage.name, shard.id)  # of a worker that died when it had filed it
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
        log = AttemptLog(self.store, name, shard.name, self.driver, alone=self.alone, kept=self.kept)
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
                    output.refuse(document, "model_error", KILLED)
                else:
                    fit.append(document)
            yield prepare(self.worker, fit, inputs, output)

    # --- the worker's own thread

    def _handle(self, attempt: _Attempt, item: _Item | None) -> Iterator[Ended]:
        """Compute a window of a shard, isolate it, or without an item file it; how the shard ended, if it has."""
        if attempt.over:
            return
        began = time.monotonic()
        result: Receipt | Exception | SystemExit | None = None
        try:
            if attempt.error is not None:
                raise attempt.error
            if item is None:
                self._report(attempt)
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
        """Compute the batches of a window; one with which workers died again and again, a document at a time.

        A batch is not divided sooner: what shares a batch decides the last bits of a score.
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
        """Read and compute documents alone, each recorded before; the rows are discarded."""
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
        """How a shard ended; one that another attempt has filed has not failed."""
        attempt.over = True
        self.filed = isinstance(result, Receipt) and attempt.output.filed
        self._open.remove(attempt)
        with suppress(Exception):  # the store may refuse to remove a log
            if isinstance(result, Receipt):
                attempt.log.close()
            else:
                attempt.log.abandon()
                result = read_receipt(self.store, self.stage.name, attempt.shard.id) or result
        return attempt.shard, result


def _prefetch(items: Iterator[_Item]) -> Future[_Item | None]:
    """Make the next item in a thread, which does not outlive the process; None: there is no more."""
    future: Future[_Item | None] = Future()

    def read() -> None:
        try:
            future.set_result(next(items, None))
        except BaseException as error:  # raised by the thread of the worker
            future.set_exception(error)

    threading.Thread(target=read, name="seenset-reader", daemon=True).start()
    return future


def work_through(worker: BatchWorker, entries: list[Entry], output: Output) -> None:
    """Compute prepared documents in this process: nothing is recorded or filed."""
    for batch in longest_first(entries, worker.batch_size):
        _in_halves(batch, lambda some: worker.work(some, output), output)


def prepare(worker: Worker, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
    """Prepare documents; where that fails, in halves."""
    entries: list[Entry] = []
    if documents:
        _in_halves(documents, lambda some: entries.extend(worker.prepare(some, inputs, output)), output)
    return entries


def refusal_of(error: BaseException) -> tuple[str, str]:
    """Reason and message of a document whose work ends in an error."""
    if isinstance(error, SystemExit):
        return "model_error", f"sys.exit({error.code!r}) was called"[:_MESSAGE_CHARACTERS]
    message = " ".join(str(error).split())[:_MESSAGE_CHARACTERS] or type(error).__name__
    return "out_of_memory" if out_of_memory(error) else "model_error", message


def _in_halves(items: list[Any], work: Callable[[Any], None], output: Output) -> None:
    """Work on documents or entries together; where that fails, in halves, so that only the culprit has no result."""
    try:
        work(items)
        return
    except UserError:  # of the settings, which no other document would change
        raise
    except (Exception, SystemExit) as error:  # what a tokenizer, model or detector raises on a text is its fault
        check_lost(error)
        refusal = refusal_of(error)
    if len(items) == 1:
        output.refuse(getattr(items[0], "document", items[0]), *refusal)
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(items) // 2
    _in_halves(items[:half], work, output)
    _in_halves(items[half:], work, output)


# --- windows of a shard and batches of a window: they follow from the shard alone, and so do its scores


def windows(documents: Iterator[Document], most: Window) -> Iterator[list[Document]]:
    """A bounded number of documents at a time, in order."""
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
    """The batches of a window: where memory is too short for one of them, that shows with the first."""
    return list(_batches(entries, size))[::-1]


def _batches(entries: list[Entry], size: BatchSize | None) -> Iterator[list[Entry]]:
    """Documents of like length together, as many as fit the size; at least one."""
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
