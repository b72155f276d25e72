"""The attempt log of a shard: what was in flight when a worker died, so that a document cannot end workers for ever."""

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
"""In attempt logs: a process that was killed and the one that continues are one driver."""

MOST_DEATHS = 3
"""Of workers that died with a document alone in flight; then it is quarantined."""

MAX_STARTS = 12
"""Of attempts that die one after the other without a document that is newly quarantined."""

BATCH = "batch "
WORK = "work "
READ = "read "
WAY = "way "
"""Beginnings of names of what is in flight: a batch, a document that is computed or read, the way to its row."""


@dataclass(slots=True)
class _Record:
    """What the file of an attempt log holds."""

    driver: str
    attempt: str = ""  # the latest one
    open: bool = False  # whether it has not ended
    starts: int = 0  # attempts that died one after the other, and the one that is open
    at: list[str] | None = field(default_factory=list)  # in flight; None: not recorded
    deaths: dict[str, int] = field(default_factory=dict)  # by name of what was in flight
    mode: Literal["all", "some"] | None = None  # which documents are isolated: all, or those of the last batch
    cleared: int = 0  # rows below this number have survived alone


_RECORD = TypeAdapter(_Record)


def interrupted_work(store: Store, stage: str, driver: str) -> set[str]:
    """The shards of a stage whose attempt by this driver was not ended by itself."""
    folder = f"attempts/{stage}"
    records = {name: _read_record(store, f"{folder}/{name}") for name in store.names(folder, ".json")}
    return {name.removesuffix(".json") for name, record in records.items() if record and record.driver == driver}


def forget_attempts(store: Store, stage: str, shard: str) -> None:
    """Remove the attempt log of a shard that has its receipt."""
    store.remove(f"attempts/{stage}/{shard}.json")


def shows_death(store: Store, stage: str, shard: str) -> str | None:
    """The state of an attempt log that shows that a worker died; None where there is none, or a first attempt."""
    record = _read_record(store, f"attempts/{stage}/{shard}.json")
    if record is None or (record.starts < 2 and not record.deaths and record.mode is None):
        return None
    return str(record)


class AttemptLog:
    """The attempts at one shard, recorded so that they survive the workers.

    The first attempt records only its start, unless it is of `LOCAL_DRIVER`, whose death ends the user's command; later
    ones also what is in flight. After a death the shard is isolated once (`isolates`): each document is read and
    computed alone, with its row recorded before. A document alone in flight at `MOST_DEATHS` deaths is left out from
    then on. Where batches were recorded, only the documents of the last one are isolated.
    """

    def __init__(
        self, store: Store, work: str, source: str, driver: str, *, alone: bool = True, kept: bool = True
    ) -> None:
        """Begin an attempt.

        Args:
            store: the run directory.
            work: `stage/shard`, the name of the log.
            source: the input, for messages.
            driver: attempts of another driver are forgotten.
            alone: whether nothing else is in flight in this process: a death before the first batch counts.
            kept: if not, nothing is read or recorded.

        Raises:
            RuntimeError: too many attempts died.
        """
        self.store = store
        self.name = f"attempts/{work}.json"
        self.kept = kept
        record = _read_record(store, self.name) if kept else None
        self.record = _Record(driver) if record is None or record.driver != driver else record
        if self.record.open and self.record.at == []:
            self.record.starts -= 1  # nothing of it was in flight
        elif self.record.open:
            self._count(self.record.at)
        self.exact = driver == LOCAL_DRIVER
        self._attempt = self.record.attempt = uuid.uuid4().hex
        self._idle: list[str] | None = [] if self.exact and not alone else None
        self.record.at = self._idle
        self.ended = False
        self._writing = threading.RLock()
        died = self.record.starts
        too_often = died >= MAX_STARTS
        self.record.open = not too_often
        self.record.starts = 0 if too_often else died + 1  # the next command may try as often
        self._write(begins=True)
        if too_often:
            shard = work.rsplit("/", 1)[-1]
            raise RuntimeError(f"shard {shard} of {source}: its worker died {died} times")

    def _count(self, at: list[str] | None) -> None:
        """Count a death with this in flight, and decide what is isolated."""
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
        """Whether documents must be computed alone before the shard is."""
        return self.record.mode is not None

    def is_deadly(self, name: str) -> bool:
        """Whether something was in flight alone at too many deaths."""
        return self.record.deaths.get(name, 0) >= MOST_DEATHS

    def must_isolate(self, row: int) -> bool:
        """Whether the document of a row must be computed alone."""
        if self.is_deadly(f"{WORK}{row}"):
            return False
        return row >= self.record.cleared and (self.record.mode == "all" or f"{WORK}{row}" in self.record.deaths)

    def watch(self, row: int, between: bool) -> bool:
        """Whether a row, or the way to it, must not be read (`pipeline.corpus.documents.read_shard`)."""
        return self.is_deadly(f"{WAY if between else READ}{row}")

    def watch_alone(self, row: int, between: bool) -> bool:
        """As `watch`, and record that it is read next."""
        if self.watch(row, between):
            return True
        if self.record.mode == "all" and row >= self.record.cleared:
            self.enter([f"{WAY if between else READ}{row}"])
        return False

    def enter(self, names: Sequence[str] = ()) -> None:
        """Record what is in flight from now on, if this attempt records that."""
        self.record.at = list(names) or self._idle
        if self.exact or self.died:
            self._write()

    def passed(self) -> None:
        """Record that all that had to be isolated has survived."""
        record = self.record
        record.mode, record.cleared, record.at = None, 0, self._idle
        record.deaths = {
            name: count for name, count in record.deaths.items() if count >= MOST_DEATHS or name.startswith(BATCH)
        }
        self._write()

    def close(self) -> None:
        """The work has its receipt."""
        with self._writing:
            if self.kept:
                self.store.remove(self.name)
            self.ended = True

    def abandon(self) -> None:
        """The attempt ended without a receipt, and its worker lives: it does not count."""
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
                except FullError:  # what stands there would count as a death
                    pass
            self.close()

    def _owns(self) -> bool:
        """Whether the log is still that of this attempt."""
        if self.kept and not self.exact:
            record = _read_record(self.store, self.name)
            self.kept = record is not None and record.attempt == self._attempt
        return self.kept

    def _write(self, begins: bool = False) -> None:
        with self._writing:
            if not self.ended and (self.kept if begins else self._owns()):
                self.store.write_json(self.name, asdict(self.record))


def _read_record(store: Store, name: str) -> _Record | None:
    """A log; None where there is none, or a damaged one: then its attempts are counted from the start."""
    try:
        data = store.find(name)
        return None if data is None else _RECORD.validate_json(data, strict=True)
    except (UserError, ValidationError):
        return None
