"""Attempts at one shard, counted durably: a document that kills its worker must not do so for ever."""

from __future__ import annotations

from typing import Any

from pipeline.errors import FullError, UserError
from pipeline.store.files import Store

MAX_STARTS = 12


def interrupted_work(store: Store, stage: str, driver: str) -> set[str]:
    """The shards of a stage at which a process of this driver was killed."""
    folder = f"attempts/{stage}"
    records = {name: _read_record(store, f"{folder}/{name}") for name in store.names(folder, ".json")}
    return {name.removesuffix(".json") for name, record in records.items() if record and record["driver"] == driver}


class Journal:
    """The attempts at one piece of work, which survive its workers.

    The first attempt only notes that it began, unless it is `eager`. Later ones of the same driver also note the batch
    in flight: a batch that was in flight at a death is taken apart, a document that was at two is known to be deadly.
    """

    def __init__(self, store: Store, work: str, source: str, driver: str, eager: bool = False) -> None:
        """Begin an attempt.

        Args:
            store: the run directory.
            work: `stage/shard`, the journal's name.
            source: the input, for messages.
            driver: attempts of another driver are forgotten.
            eager: whether the first attempt notes the batch in flight too, because each death costs a user's command.

        Raises:
            RuntimeError: the work has killed its workers too often.
        """
        self.store = store
        self.name = f"attempts/{work}.json"
        record = _read_record(store, self.name)
        if record is None or record["driver"] != driver:
            record = {"driver": driver, "starts": 0, "deaths": {}, "at": None}
        self.deaths: dict[str, int] = record["deaths"]
        if record["at"] is not None:
            self.deaths[record["at"]] = self.deaths.get(record["at"], 0) + 1
        self.starts = record["starts"] + 1
        self.driver = driver
        self.eager = eager
        if self.starts > MAX_STARTS:
            shard = work.rsplit("/", 1)[-1]
            raise RuntimeError(f"shard {shard} of {source}: its worker died {record['starts']} times")
        self._write(None)

    def deadly(self, batch: str, documents: int) -> bool:
        """Whether workers died with exactly this batch in flight: two, or for more than one document one."""
        return self.deaths.get(batch, 0) >= (2 if documents == 1 else 1)

    def enter(self, batch: str) -> None:
        """Note the batch in flight, if an earlier attempt died."""
        if self.eager or self.starts > 1:
            self._write(batch)

    def close(self) -> None:
        """The work has its receipt."""
        self.store.remove(self.name)

    def abandon(self) -> None:
        """The attempt ended without a receipt, and its worker lives: it does not count."""
        self.starts -= 1
        if self.starts:
            try:
                self._write(None)
                return
            except FullError:  # what stands there would count as a death
                pass
        self.close()

    def _write(self, batch: str | None) -> None:
        record = {"driver": self.driver, "starts": self.starts, "deaths": self.deaths, "at": batch}
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
    return record if all(isinstance(number, int) for number in record["deaths"].values()) else None
