"""The attempt log of a shard: what was in flight when a worker died, so that a document cannot kill workers forever."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import FullError, UserError
from pipeline.store.files import Store

LOCAL_DRIVER = "local"
"""Driver name of local runs: a process that was killed and the one that continues are one driver."""

MOST_DEATHS = 3
"""Number of deaths of workers with a single document in flight after which the document is quarantined."""

MAX_STARTS = 12
"""Maximum number of consecutive attempts that die without a newly quarantined document."""

BATCH = "batch "
WORK = "work "
READ = "read "
WAY = "way "
"""Prefixes of names of work in flight: a batch, a document that is computed or read, the advance to its row."""


@dataclass(slots=True)
class _Record:
    """The content of an attempt log."""

    driver: str
    attempt: str = ""  # latest attempt
    open: bool = False  # whether it has not ended
    starts: int = 0  # consecutive attempts that died, plus the open one
    at: list[str] | None = field(default_factory=list)  # in flight; None: not recorded
    deaths: dict[str, int] = field(default_factory=dict)  # by name of the work in flight
    mode: Literal["all", "some"] | None = None  # isolated documents: all, or those of the last batch
    cleared: int = 0  # rows below this number have survived isolation
    source: str = ""  # name of the input


_RECORD = TypeAdapter(_Record)


def interrupted_work(store: Store, stage: str, driver: str) -> set[str]:
    """The shards of a stage with an attempt of this driver that was interrupted."""
    folder = f"attempts/{stage}"
    records = {name: _read_record(store, f"{folder}/{name}") for name in store.names(folder, ".json")}
    return {name.removesuffix(".json") for name, record in records.items() if record and record.driver == driver}


def documents_in_flight(store: Store) -> str:
    """The documents that a killed process of `LOCAL_DRIVER` was at, as in `row 7 of a.jsonl`; empty if not known."""
    folders, documents = [f"attempts/{stage}" for stage in store.listing("attempts")], list[str]()
    for record in (_read_record(store, f"{folder}/{name}") for folder in folders for name in store.listing(folder)):
        if record is not None and record.open and record.driver == LOCAL_DRIVER:
            rows = sorted({int(name.rpartition(" ")[2]) for name in record.at or () if not name.startswith(BATCH)})
            several = f"one of {len(rows)} documents in rows {rows[0]} to {rows[-1]}" if len(rows) > 1 else ""
            documents += [f"{several or f'row {rows[0]}'} of {record.source}"] if rows else []
    return " or ".join(documents)


def forget_attempts(store: Store, stage: str, shard: str) -> None:
    """Remove the attempt log of a shard that has its receipt."""
    store.remove(f"attempts/{stage}/{shard}.json")


def shows_death(store: Store, stage: str, shard: str) -> str | None:
    """The state of an attempt log that records a death; None if there is no log, or only a first attempt."""
    record = _read_record(store, f"attempts/{stage}/{shard}.json")
    if record is None or (record.starts < 2 and not record.deaths and record.mode is None):
        return None
    return str(record)


class AttemptLog:
    """Durable record of the attempts at one shard.

    The first attempt records only its start, unless the driver is `LOCAL_DRIVER`, whose death ends the command; later
    attempts also record the work in flight. After a death the shard is isolated once (`isolates`): each document is
    read and computed alone, after its row is recorded. A document that was alone in flight at `MOST_DEATHS` deaths is
    skipped from then on. If batches were recorded, only the documents of the last one are isolated.
    """

    def __init__(self, store: Store, work: str, source: str, driver: str | None, *, alone: bool = True) -> None:
        """Start an attempt.

        Args:
            store: run directory.
            work: `stage/shard`, the name of the log.
            source: name of the input, for messages.
            driver: name of the driver; attempts of other drivers are discarded. None: nothing is read or recorded.
            alone: whether this process has no other work in flight, so that a death before the first batch counts.

        Raises:
            RuntimeError: too many attempts died.
        """
        self.store = store
        self.name = f"attempts/{work}.json"
        self.kept = driver is not None
        record = _read_record(store, self.name) if self.kept else None
        self.record = _Record(driver or "") if record is None or record.driver != driver else record
        if self.record.open and self.record.at == []:
            self.record.starts -= 1  # it had no work in flight
        elif self.record.open:
            self._count(self.record.at)
        self.record.source = source
        self.exact = driver == LOCAL_DRIVER
        self._attempt = self.record.attempt = uuid.uuid4().hex
        self._idle: list[str] | None = [] if self.exact and not alone else None
        self.record.at = self._idle
        self.ended = False
        self._writing = threading.RLock()
        died = self.record.starts
        too_often = died >= MAX_STARTS
        self.record.open = not too_often
        self.record.starts = 0 if too_often else died + 1  # the next command starts a new count
        self._write(begins=True)
        if too_often:
            shard = work.rsplit("/", 1)[-1]
            raise RuntimeError(f"shard {shard} of {source}: its worker died {died} times")

    def _count(self, at: list[str] | None) -> None:
        """Count a death with this work in flight, and decide which documents to isolate."""
        record = self.record
        for name in at or []:
            record.deaths[name] = record.deaths.get(name, 0) + 1
            if record.deaths[name] == MOST_DEATHS and not name.startswith(BATCH):
                record.starts = 1
        if record.mode is None:
            record.mode, record.cleared = ("all", 0) if at is None else ("some", 0)
        elif at is None:
            record.mode, record.cleared = "all", record.cleared if record.mode == "all" else 0
        else:
            rows = [int(name.rpartition(" ")[2]) for name in at if name.startswith((WORK, READ, WAY))]
            record.cleared = max([record.cleared, *rows])

    @property
    def died(self) -> bool:
        """Whether an earlier attempt died."""
        return self.record.starts > 1

    @property
    def isolates(self) -> bool:
        """Whether documents must be computed alone before the shard."""
        return self.record.mode is not None

    def is_deadly(self, name: str) -> bool:
        """Whether this work was alone in flight at too many deaths."""
        return self.record.deaths.get(name, 0) >= MOST_DEATHS

    def must_isolate(self, row: int) -> bool:
        """Whether the document of a row must be computed alone."""
        if self.is_deadly(f"{WORK}{row}"):
            return False
        return row >= self.record.cleared and (self.record.mode == "all" or f"{WORK}{row}" in self.record.deaths)

    def watch(self, row: int, between: bool) -> bool:
        """Whether a row, or the advance to it, must be skipped (`pipeline.corpus.documents.read_shard`)."""
        return self.is_deadly(f"{WAY if between else READ}{row}")

    def watch_alone(self, row: int, between: bool) -> bool:
        """As `watch`, and record that the row is read next."""
        if self.watch(row, between):
            return True
        if self.record.mode == "all" and row >= self.record.cleared:
            self.enter([f"{WAY if between else READ}{row}"])
        return False

    def enter(self, names: Sequence[str] = ()) -> None:
        """Record the work in flight, if this attempt records it."""
        self.record.at = list(names) or self._idle
        if self.exact or self.died:
            self._write()

    def passed(self) -> None:
        """Record that all isolated documents have survived."""
        record = self.record
        record.mode, record.cleared, record.at = None, 0, self._idle
        record.deaths = {
            name: count for name, count in record.deaths.items() if count >= MOST_DEATHS or name.startswith(BATCH)
        }
        self._write()

    def close(self) -> None:
        """Remove the log: the shard has its receipt."""
        with self._writing:
            if self.kept:
                self.store.remove(self.name)
            self.ended = True

    def abandon(self) -> None:
        """Discard the attempt, which ended without a receipt and without the death of its worker."""
        with self._writing:
            if self.ended or not self._owns():
                return
            self.record.starts -= 1
            self.record.open = False
            if self.record.starts:
                try:
                    self._write()
                    self.ended = True
                    return
                except FullError:  # the remaining record would count as a death
                    pass
            self.close()

    def _owns(self) -> bool:
        """Whether the log still belongs to this attempt."""
        if self.kept and not self.exact:
            record = _read_record(self.store, self.name)
            self.kept = record is not None and record.attempt == self._attempt
        return self.kept

    def _write(self, begins: bool = False) -> None:
        with self._writing:
            if not self.ended and (self.kept if begins else self._owns()):
                self.store.write_json(self.name, asdict(self.record))


def _read_record(store: Store, name: str) -> _Record | None:
    """A log; None if it is missing or damaged: attempts are then counted from 0."""
    try:
        data = store.find(name)
        return None if data is None else _RECORD.validate_json(data, strict=True)
    except (UserError, ValidationError):
        return None
