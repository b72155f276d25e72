"""Attempts at one shard, counted durably: a document that kills its worker must not do so for ever."""

from __future__ import annotations

from pipeline.store.files import Store

MAX_STARTS = 12


class Journal:
    """The attempts at one piece of work, which survive its workers.

    The first attempt only notes that it began. Later ones of the same driver also note the batch in flight, so that a
    batch, and then a document, that was in flight at two deaths is known.
    """

    def __init__(self, store: Store, work: str, source: str, driver: str) -> None:
        """Begin an attempt.

        Args:
            store: the run directory.
            work: `stage/shard`, the journal's name.
            source: the input, for messages.
            driver: attempts of another driver are forgotten.

        Raises:
            RuntimeError: the work has killed its workers too often.
        """
        self.store = store
        self.name = f"attempts/{work}.json"
        record = store.read_json(self.name)
        if record is None or record["driver"] != driver:
            record = {"driver": driver, "starts": 0, "deaths": {}, "at": None}
        self.deaths: dict[str, int] = record["deaths"]
        if record["at"] is not None:
            self.deaths[record["at"]] = self.deaths.get(record["at"], 0) + 1
        self.starts = record["starts"] + 1
        self.driver = driver
        if self.starts > MAX_STARTS:
            shard = work.rsplit("/", 1)[-1]
            raise RuntimeError(f"shard {shard} of {source}: its worker died {record['starts']} times")
        self._write(None)

    def deadly(self, batch: str) -> bool:
        """Whether two workers died with exactly this batch in flight."""
        return self.deaths.get(batch, 0) >= 2

    def enter(self, batch: str) -> None:
        """Note the batch in flight, if an earlier attempt died."""
        if self.starts > 1:
            self._write(batch)

    def close(self) -> None:
        """The work has its receipt."""
        self.store.remove(self.name)

    def _write(self, batch: str | None) -> None:
        record = {"driver": self.driver, "starts": self.starts, "deaths": self.deaths, "at": batch}
        self.store.write_json(self.name, record)
