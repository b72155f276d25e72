"""An attempt whose worker seemed lost goes on beside the one in its place: neither spoils what the other knows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from recorder import Recorder, letters, shards_of, stage_of

from pipeline.corpus.documents import Document
from pipeline.stages.base import Entry, Output, Placement
from pipeline.stages.process import process
from pipeline.stages.turns import Turns
from pipeline.store.attempts import Journal, interrupted_work
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipt
from ray_jobs import actors
from ray_jobs.actors import ShardActor
from ray_jobs.board import Portion
from ray_jobs.bundles import bundles

WORK = "turns/audit-000000"


def journal_of(store: Store) -> Journal:
    """An attempt at the shard, by the same driver."""
    return Journal(store, WORK, "a.jsonl", "driver")


def test_an_attempt_that_was_overtaken_takes_no_death_out_of_the_journal(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = journal_of(store)
    second = journal_of(store)
    second.enter("row 3")
    before = store.read(f"attempts/{WORK}.json")
    first.abandon()
    assert store.read(f"attempts/{WORK}.json") == before
    assert journal_of(store).deaths == {"row 3": 1}


def test_what_an_overtaken_attempt_has_in_flight_is_not_blamed_for_the_death_of_the_other(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    journal_of(store)
    overtaken, last = journal_of(store), journal_of(store)
    last.enter("row 3")
    overtaken.enter("row 5")
    assert journal_of(store).deaths == {"row 3": 1}


def test_an_overtaken_attempt_leaves_no_journal_of_a_finished_shard(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    journal_of(store)
    overtaken, last = journal_of(store), journal_of(store)
    last.close()
    overtaken.enter("row 5")
    assert interrupted_work(store, "turns", "driver") == set()


def test_a_shard_with_a_receipt_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses to remove the journal, after the receipt was filed."""
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
        def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
            process(stage, Recorder(stage, Placement()), shard, store, "driver", second=True)
            raise MemoryError

        def open(self, *_: object) -> None:
            self.prepare([], None, Output())

    assert process(stage, Overtaken(stage, Placement()), shard, store, "driver").n_scored == 9


def test_an_attempt_that_is_stopped_leaves_the_journal_of_the_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller is at work elsewhere: the network parted it from the board, not a receipt."""
    (shard,), store = shards_of(tmp_path, letters("a", 9))
    stage = stage_of()

    class Parted(Recorder):
        def open(self, *_: object) -> None:
            journal_of(store).enter("window 0")

    actor = ShardActor.__new__(ShardActor)
    actor.stage, actor.store, actor.driver, actor.reported = stage, store, "driver", 0.0
    actor.worker, actor.metrics = Parted(stage, Placement()), SimpleNamespace(work=int, add=lambda *_: None)  # type: ignore[assignment]
    actor.board = SimpleNamespace(advance="advance", give_up="give_up")
    answers = {"advance": True, "give_up": None}
    monkeypatch.setattr(actor, "ask", lambda method, *_: answers[method])
    monkeypatch.setattr(actors, "TICK_SECONDS", 0.0)
    with Turns().take() as turn:
        actor.finish(Portion(0, next(iter(bundles([shard]))), 0, False), turn)
    assert journal_of(store).deaths == {"window 0": 1}
