"""Attempts at one shard, counted durably: a document that kills its worker must not do so for ever."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from pipeline.errors import FullError, UserError
from pipeline.store.files import Store

MAX_STARTS = 12
_CONTROL = "control of "


def interrupted_work(store: Store, stage: str, driver: str) -> set[str]:
    """The shards of a stage at which a process of this driver was killed."""
    folder = f"attempts/{stage}"
    records = {name: _read_record(store, f"{folder}/{name}") for name in store.names(folder, ".json")}
    return {name.removesuffix(".json") for name, record in records.items() if record and record["driver"] == driver}


def forget_attempts(store: Store, stage: str, shard: str) -> None:
    """Remove the journal of a shard that has its receipt."""
    store.remove(f"attempts/{stage}/{shard}.json")


class Journal:
    """The attempts at one piece of work, which survive its workers.

    The first attempt only notes that it began, unless it is `eager`. Later ones of the same driver are `careful`: they
    also note what is in flight, a window of documents that are read or a batch that is worked on. What was in flight at
    a death is suspect, and tried in parts.

    An attempt whose worker seemed lost may go on while a later one keeps the journal: it writes there no more.
    """

    def __init__(
        self,
        store: Store,
        work: str,
        source: str,
        driver: str,
        eager: bool = False,
        alone: Callable[[], object] | None = None,
        kept: bool = True,
    ) -> None:
        """Begin an attempt.

        Args:
            store: the run directory.
            work: `stage/shard`, the journal's name.
            source: the input, for messages.
            driver: attempts of another driver are forgotten.
            eager: whether the first attempt notes the batch in flight too, because each death costs a user's command.
            alone: waits until nothing else is worked on in this process, before an attempt that is not the first.
            kept: if not, this is an attempt beside another one, whose journal it neither reads nor writes: neither its
                death nor a lost race counts.

        Raises:
            RuntimeError: the work has killed its workers too often.
        """
        self.store = store
        self.name = f"attempts/{work}.json"
        self.kept = kept
        self.attempt = uuid.uuid4().hex
        record = _read_record(store, self.name) if kept else None
        if record is None or record["driver"] != driver:
            record = {"driver": driver, "starts": 0, "deaths": {}, "at": None}
        if record["starts"] and alone is not None:
            alone()
        self.deaths: dict[str, int] = record["deaths"]
        for name in (record["at"], record.get("ahead")):
            if name is not None and name.startswith(_CONTROL):  # the death may be from outside, like the one before it
                suspect = name.removeprefix(_CONTROL)
                self.deaths[suspect] = max(0, self.deaths.get(suspect, 0) - 1)
            elif name is not None:
                self.deaths[name] = self.deaths.get(name, 0) + 1
        self.condemned: list[str] = record.get("condemned", [])
        self.at: str | None = None
        self.ahead: str | None = None
        self.survivors: set[str] = set()  # of this attempt
        self.writing = threading.RLock()  # the reader's thread notes what is ahead
        self.ended = False  # whatever that thread still notes is not written
        self.starts = record["starts"] + 1
        self.driver = driver
        self.eager = eager
        if self.starts > MAX_STARTS:
            self.starts = 0  # of the next command, which may try as often
            self._write(begins=True)
            shard = work.rsplit("/", 1)[-1]
            raise RuntimeError(f"shard {shard} of {source}: its worker died {record['starts']} times")
        self._write(begins=True)

    @property
    def careful(self) -> bool:
        """Whether an earlier attempt died."""
        return self.starts > 1

    def suspects(self, name: str) -> bool:
        """Whether a worker died with exactly this in flight."""
        return name in self.deaths

    def guilt(self, name: str) -> int:
        """How many workers died with exactly this in flight, less those that died with its control; at least 0."""
        return self.deaths.get(name, 0)

    def condemn(self, name: str) -> None:
        """Note that something is not tried again. That is progress, after which as many attempts may die as before."""
        if name not in self.condemned:
            self.condemned.append(name)
            self.starts = min(self.starts, 2)

    def enter(self, name: str | None) -> None:
        """Note what is in flight, if an earlier attempt died; what was before has survived."""
        if self.at is not None:
            self.survivors.add(self.at)
        self.at, self.ahead = name, None
        if self.eager or self.careful:
            self._write()

    def enter_control(self, name: str, control: str) -> None:
        """Note that something is in flight as the control of a suspect: a death makes it suspect too."""
        self.enter(_CONTROL + name)
        self.ahead = control
        self._write()

    def enter_ahead(self, name: str | None) -> None:
        """Note what is read ahead while something else is in flight, if each death costs a user's command."""
        self.ahead = name
        if self.eager:
            self._write()

    def close(self) -> None:
        """The work has its receipt."""
        with self.writing:
            self.ended = True
            self.store.remove(self.name)

    def abandon(self) -> None:
        """The attempt ended without a receipt, and its worker lives: it does not count."""
        with self.writing:
            if not self._keeps():
                return
            self.starts -= 1
            self.at = self.ahead = None
            if self.starts:
                try:
                    self._write()
                    self.ended = True
                    return
                except FullError:  # what stands there would count as a death
                    pass
            self.close()

    def _keeps(self) -> bool:
        """Whether the journal is still that of this attempt; that of a run in one process always is."""
        if self.kept and not self.eager:
            record = _read_record(self.store, self.name)
            self.kept = record is not None and record.get("attempt") == self.attempt
        return self.kept

    def _write(self, begins: bool = False) -> None:
        with self.writing:
            if self.ended or not (self.kept if begins else self._keeps()):
                return
            record = {
                "driver": self.driver,
                "attempt": self.attempt,
                "starts": self.starts,
                "deaths": self.deaths,
                "at": self.at,
                "ahead": self.ahead,
                "condemned": self.condemned,
            }
            self.store.write_json(self.name, record)


def _read_record(store: Store, name: str) -> dict[str, Any] | None:
    """A journal; None where there is none, or a damaged one: then its attempts are counted from the start."""
    try:
        record = store.read_json(name)
    except UserError:
        return None
    kinds = {"driver": str, "starts": int, "deaths": dict, "at": str | None}
    if not isinstance(record, dict) or any(not isinstance(record.get(key, ...), kind) for key, kind in kinds.items()):
        return None
    lists = isinstance(record.get("ahead"), str | None) and isinstance(record.get("condemned", []), list)
    return record if lists and all(isinstance(number, int) for number in record["deaths"].values()) else None
