"""Attempts at one shard, counted durably: a document that kills its worker must not do so for ever."""

from __future__ import annotations

from pipeline.corpus.shard import Shard
from pipeline.store.files import Store

MAX_STARTS = 12


class Journal:
    """Attempts at one shard, counted durably: a document that kills its worker must not do so for ever.

    The first attempt only notes that it began. Later ones of the same driver also note the batch in flight, so
    that a batch, and then a document, that was in flight at two deaths is known.
    """

    def __init__(self, store: Store, stage: str, shard: Shard, driver: str) -> None:
        self.store = store
        self.name = f"attempts/{stage}/{shard.id}.json"
        before = store.read_json(self.name)
        if before is None or before["driver"] != driver:
            before = {"driver": driver, "starts": 0, "deaths": {}, "at": None}
        self.deaths: dict[str, int] = before["deaths"]
        if before["at"] is not None:
            self.deaths[before["at"]] = self.deaths.get(before["at"], 0) + 1
        self.starts = before["starts"] + 1
        self.driver = driver
        if self.starts > MAX_STARTS:
            raise RuntimeError(f"shard {shard.id} of {shard.name}: its worker died {before['starts']} times")
        self._write(None)

    def deadly(self, batch: str) -> bool:
        """Whether two workers died with exactly this batch in flight."""
        return self.deaths.get(batch, 0) >= 2

    def enter(self, batch: str) -> None:
        """Note the batch in flight, if an earlier attempt died."""
        if self.starts > 1:
            self._write(batch)

    def close(self) -> None:
        """The shard has its receipt."""
        self.store.remove(self.name)

    def _write(self, at: str | None) -> None:
        value = {"driver": self.driver, "starts": self.starts, "deaths": self.deaths, "at": at}
        self.store.write_json(self.name, value)
