"""Two workers at one shard: the first receipt counts, and neither spoils what the log of the other knows."""

import os
from pathlib import Path

import pytest

from benchmarks.plain_loop import process
from pipeline.corpus.documents import Document
from pipeline.stages.base import Entry, Output, Placement
from pipeline.store.attempts import AttemptLog, interrupted_work
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipt
from tests.helpers.finished import files_in
from tests.helpers.recorder import Recorder, letters, shards_of, stage_of

WORK = "turns/audit-000000"
LOG = f"attempts/{WORK}.json"


def log_of(store: Store) -> AttemptLog:
    """An attempt at the shard, by the same driver."""
    return AttemptLog(store, WORK, "a.jsonl", "driver")


def test_an_attempt_that_was_overtaken_takes_no_death_out_of_the_log_and_adds_none(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first, overtaken, last = log_of(store), log_of(store), log_of(store)
    last.enter(["work 3"])
    before = store.read(LOG)
    first.abandon()
    overtaken.enter(["work 5"])
    assert store.read(LOG) == before
    again = log_of(store)
    assert again.record.deaths == {"work 3": 1}
    again.close()
    overtaken.enter(["work 5"])
    assert interrupted_work(store, "turns", "driver") == set()


def test_a_shard_with_a_receipt_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses to remove the log, after the receipt was filed."""
    (shard,), store = shards_of(tmp_path, letters("a", 9))

    def refuse(name: str) -> None:
        raise PermissionError(name)

    monkeypatch.setattr(store, "remove", refuse)
    stage = stage_of()
    receipt = process(stage, Recorder(stage, Placement()), shard, store, "driver")
    assert receipt == read_receipt(store, "turns", shard.id)


def test_an_attempt_that_fails_where_another_has_filed_has_its_receipt(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 9))
    stage = stage_of()

    class Overtaken(Recorder):
        def open(self, *_: object) -> None:
            process(stage, Recorder(stage, Placement()), shard, store, None)
            raise MemoryError

    assert process(stage, Overtaken(stage, Placement()), shard, store, "driver").n_scored == 9


class Beaten(Recorder):
    """A worker that another one overtakes while it works."""

    def work(self, batch: list[Entry], output: Output) -> None:
        super().work(batch, output)
        if not self.store.exists("receipts/turns/audit-000000.json"):
            process(self.stage, Recorder(self.stage, Placement()), self.shard, self.store, None)


def test_the_slower_of_two_attempts_files_nothing_and_both_return_the_same_receipt(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 9))
    stage = stage_of()
    first = Beaten(stage, Placement())
    first.stage, first.shard, first.store = stage, shard, store  # type: ignore[attr-defined]
    receipt = process(stage, first, shard, store, "driver")
    assert receipt.n_scored == 9
    assert files_in(tmp_path / "run") == sorted([receipt.data, "receipts/turns/audit-000000.json"])
    again = Store(str(tmp_path / "again"))
    expected = process(stage, Recorder(stage, Placement()), shard, again, "driver")
    assert receipt.files[receipt.data] == expected.files[expected.data], "the same bytes"


def test_an_attempt_beside_another_one_that_is_killed_is_no_death_in_the_log(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 5))
    stage = stage_of()

    class Ended(KeyboardInterrupt):
        pass

    class Observed(Recorder):
        def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
            before = store.read(LOG)
            if (child := os.fork()) == 0:
                worker = Recorder(stage_of(deadly_at=str(tmp_path)), Placement())
                worker.prepare = lambda *_: os._exit(1)  # type: ignore[method-assign]
                process(stage, worker, shard, store, None)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
            assert store.read(LOG) == before
            raise Ended

    with pytest.raises(Ended):
        process(stage, Observed(stage, Placement()), shard, store, "driver")
    assert not store.exists(LOG), "an attempt that stopped alive is no death either"
