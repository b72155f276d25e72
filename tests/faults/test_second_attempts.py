"""Two workers at one shard: the first receipt counts, nothing else is left, and no document pays for a lost race."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
from recorder import Recorder, letters, shards_of, stage_of

from pipeline.corpus.documents import Document
from pipeline.errors import IncompleteError
from pipeline.stages.base import Entry, Output, Placement
from pipeline.stages.process import process
from pipeline.store.attempts import forget_attempts
from pipeline.store.files import Store
from ray_jobs.board import Board, Portion, losses_told, start_board
from ray_jobs.bundles import IN_BUNDLE, bundles, shards_in

JOURNAL = "attempts/turns/audit-000000.json"


def files(folder: Path) -> list[str]:
    """What is in a run directory, but for its root."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Beaten(Recorder):
    """A worker that another one overtakes while it works."""

    def work(self, batch: list[Entry], output: Output) -> None:
        super().work(batch, output)
        if not self.store.exists("receipts/turns/audit-000000.json"):
            process(self.stage, Recorder(self.stage, Placement()), self.shard, self.store, "driver", second=True)


def test_the_slower_of_two_attempts_files_nothing_and_both_return_the_same_receipt(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 9))
    stage = stage_of()
    first = Beaten(stage, Placement())
    first.stage, first.shard, first.store = stage, shard, store  # type: ignore[attr-defined]
    receipt = process(stage, first, shard, store, "driver")
    assert receipt.n_scored == 9
    assert files(tmp_path / "run") == sorted([receipt.data, "receipts/turns/audit-000000.json"])
    again = Store(str(tmp_path / "again"))
    expected = process(stage, Recorder(stage, Placement()), shard, again, "driver")
    assert receipt.files[receipt.data] == expected.files[expected.data], "the same bytes"


def test_a_second_attempt_that_is_killed_is_no_death_in_the_journal(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 5))
    stage = stage_of()

    class Ended(BaseException):
        pass

    class Observed(Recorder):
        def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
            before = store.read(JOURNAL)
            if (child := os.fork()) == 0:
                worker = Recorder(stage_of(deadly_at=str(tmp_path)), Placement())
                worker.prepare = lambda *_: os._exit(1)  # type: ignore[method-assign]
                process(stage, worker, shard, store, "driver", second=True)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
            assert store.read(JOURNAL) == before
            raise Ended

    with pytest.raises(Ended):
        process(stage, Observed(stage, Placement()), shard, store, "driver")
    assert not store.exists(JOURNAL), "an attempt that stopped alive is no death either"
    forget_attempts(store, "turns", "audit-000000")


def test_a_board_tells_of_each_shard_once_and_of_no_failure_of_a_second_attempt(tmp_path: Path) -> None:
    shards, _ = shards_of(tmp_path, *([letter] for letter in "abc"))
    board = Board(list(bundles(shards)), IN_BUNDLE, [1.0, 3.0, 2.0])
    board.line.least_seconds = 0.0
    taken = [board.take(caller, caller) for caller in ("one", "two", "three")]
    assert [shards_in(portion.bundle)[portion.index] for portion in taken if isinstance(portion, Portion)] == [
        shards[1],
        shards[2],
        shards[0],
    ]
    board.end("three", "receipt", "c")
    board.line.attempts["one"].begun -= 1000.0
    second = board.take("three", "three")
    assert isinstance(second, Portion)
    assert second.second
    assert isinstance(board.take("four", "three"), float), "it is asked for again later"
    assert not board.advance("three", shards[1].id, 1, 1)
    board.end("three", "failure", "of a second attempt")
    assert not board.advance("one", shards[1].id, 1, 1)
    board.end("one", "receipt", "b")
    board.end("two", "failure", "a")
    news = board.news()
    assert news.ended == [("receipt", "c"), ("receipt", "b"), ("failure", "a")]
    assert board.take("one", "one") is None
    assert board.news().ended == []


@pytest.mark.slow
def test_a_lost_board_is_one_line(cluster: None) -> None:
    board = start_board([b""], 1, [1.0])
    ray.get(board.news.remote())
    ray.kill(board)
    with pytest.raises(IncompleteError, match="run the same command again to go on"), losses_told():
        ray.get(board.news.remote())
