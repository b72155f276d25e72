"""The attempt log of a shard: what was in flight when a worker died, so that a document cannot end workers for ever."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pipeline.errors import FullError, UserError
from pipeline.store.files import Store

MOST_DEATHS = 3
"""Of workers that died with a document alone in flight; then it is quarantined."""

MAX_STARTS = 12
"""Of attempts that die one after the other without a document that is newly quarantined."""

BATCH = "batch "
WORK = "work "
READ = "read "
WAY = "way "
"""Beginnings of names of what is in flight: a batch, a document that is computed or read, the way to its row."""


def interrupted_work(store: Store, stage: str, driver: str) -> set[str]:
    """The shards of a stage whose attempt by this driver was not ended by itself."""
    folder = f"attempts/{stage}"
    records = {name: _read_record(store, f"{folder}/{name}") for name in store.names(folder, ".json")}
    return {name.removesuffix(".json") for name, record in records.items() if record and record["driver"] == driver}


def forget_attempts(store: Store, stage: str, shard: str) -> None:
    """Remove the attempt log of a shard that has its receipt."""
    store.remove(f"attempts/{stage}/{shard}.json")


def shows_death(store: Store, stage: str, shard: str) -> str | None:
    """The state of an attempt log that shows that a worker died; None where there is none, or a first attempt."""
    record = _read_record(store, f"attempts/{stage}/{shard}.json")
    if record is None or (record["starts"] < 2 and not record["deaths"] and record["mode"] is None):
        return None
    return str(record)


class AttemptLog:
    """The attempts at one shard, recorded so that they survive the workers.

    The first attempt records only its start, unless it is `exact`; later ones also what is in flight. After a death
    the shard is isolated once (`isolates`): each document is read and computed alone, with its row recorded before. A
    document alone in flight at `MOST_DEATHS` deaths is left out from then on. Where batches were recorded, only the
    documents of the last one are isolated.

    Attributes:
        deaths: by name of what was in flight, the workers that died.
        mode: which documents are still to be isolated: all, or those of the batch at the death; None: none.
        cleared: rows below this number have survived alone.
    """

    def __init__(
        self,
        store: Store,
        work: str,
        source: str,
        driver: str,
        *,
        exact: bool = False,
        alone: bool = True,
        kept: bool = True,
    ) -> None:
        """Begin an attempt.

        Args:
            store: the run directory.
            work: `stage/shard`, the name of the log.
            source: the input, for messages.
            driver: attempts of another driver are forgotten.
            exact: whether the first attempt records its batches too, because a death ends the user's command.
            alone: whether nothing else is in flight in this process: a death before the first batch counts.
            kept: if not, nothing is read or recorded.

        Raises:
            RuntimeError: too many attempts died.
        """
        self.store = store
        self.name = f"attempts/{work}.json"
        self.kept = kept
        self.attempt = uuid.uuid4().hex
        record = _read_record(store, self.name) if kept else None
        if record is None or record["driver"] != driver:
            record = {"driver": driver, "open": False, "starts": 0, "at": [], "deaths": {}, "mode": None, "cleared": 0}
        self.driver = driver
        self.deaths: dict[str, int] = record["deaths"]
        self.mode: Literal["all", "some"] | None = record["mode"]
        self.cleared: int = record["cleared"]
        self.starts: int = record["starts"]
        if record["open"] and record["at"] == []:
            self.starts -= 1  # nothing of it was in flight
        elif record["open"]:
            self._count(record["at"])
        self.open = True
        self.exact = exact
        self._idle: list[str] | None = [] if exact and not alone else None
        self.at = self._idle
        self.ended = False
        self._writing = threading.RLock()
        if self.starts >= MAX_STARTS:
            died, self.starts, self.open = self.starts, 0, False  # the next command may try as often
            self._write(begins=True)
            shard = work.rsplit("/", 1)[-1]
            raise RuntimeError(f"shard {shard} of {source}: its worker died {died} times")
        self.starts += 1
        self._write(begins=True)

    def _count(self, at: list[str] | None) -> None:
        """Count a death with this in flight, and decide what is isolated."""
        for name in at or []:
            self.deaths[name] = self.deaths.get(name, 0) + 1
            if self.deaths[name] == MOST_DEATHS and not name.startswith(BATCH):
                self.starts = 1
        if self.mode is None:
            self.mode, self.cleared = ("all", 0) if at is None else ("some", 0)
        elif at is None:
            self.mode, self.cleared = "all", self.cleared if self.mode == "all" else 0
        else:
            rows = [int(name.rpartition(" ")[2]) for name in at if name.startswith((WORK, READ, WAY))]
            self.cleared = max([self.cleared, *rows])

    @property
    def died(self) -> bool:
        """Whether an earlier attempt died."""
        return self.starts > 1

    @property
    def isolates(self) -> bool:
        """Whether documents must be computed alone before the shard is."""
        return self.mode is not None

    def is_deadly(self, name: str) -> bool:
        """Whether something was in flight alone at too many deaths."""
        return self.deaths.get(name, 0) >= MOST_DEATHS

    def must_isolate(self, row: int) -> bool:
        """Whether the document of a row must be computed alone."""
        if self.is_deadly(f"{WORK}{row}"):
            return False
        return row >= self.cleared and (self.mode == "all" or f"{WORK}{row}" in self.deaths)

    def watch(self, row: int, between: bool) -> bool:
        """Whether a row, or the way to it, must not be read (`pipeline.corpus.documents.read_shard`)."""
        return self.is_deadly(f"{WAY if between else READ}{row}")

    def watch_alone(self, row: int, between: bool) -> bool:
        """As `watch`, and record that it is read next."""
        if self.watch(row, between):
            return True
        if self.mode == "all" and row >= self.cleared:
            self.enter([f"{WAY if between else READ}{row}"])
        return False

    def enter(self, names: Sequence[str] = ()) -> None:
        """Record what is in flight from now on, if this attempt records that."""
        self.at = list(names) or self._idle
        if self.exact or self.died:
            self._write()

    def passed(self) -> None:
        """Record that all that had to be isolated has survived."""
        self.mode, self.cleared, self.at = None, 0, self._idle
        self.deaths = {
            name: count for name, count in self.deaths.items() if count >= MOST_DEATHS or name.startswith(BATCH)
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
            self.starts -= 1
            self.open = False
            if self.starts:
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
            self.kept = record is not None and record.get("attempt") == self.attempt
        return self.kept

    def _write(self, begins: bool = False) -> None:
        with self._writing:
            if self.ended or not (self.kept if begins else self._owns()):
                return
            names = ("driver", "attempt", "open", "starts", "at", "deaths", "mode", "cleared")
            self.store.write_json(self.name, {name: getattr(self, name) for name in names})


def _read_record(store: Store, name: str) -> dict[str, Any] | None:
    """A log; None where there is none, or a damaged one: then its attempts are counted from the start."""
    try:
        record = store.read_json(name)
    except UserError:
        return None
    kinds = {
        "driver": str,
        "open": bool,
        "starts": int,
        "at": list | None,
        "deaths": dict,
        "mode": str | None,
        "cleared": int,
    }
    if not isinstance(record, dict) or any(not isinstance(record.get(key, ...), kind) for key, kind in kinds.items()):
        return None
    return record if all(isinstance(number, int) for number in record["deaths"].values()) else None
