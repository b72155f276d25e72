"""Two workers at one shard: the first receipt counts, nothing else is left, and no document pays for a lost race."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import recorder
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayTaskError
from recorder import Recorder, letters, shards_of, stage_of

from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.documents import Document
from pipeline.errors import IncompleteError
from pipeline.stages.base import Entry, Output, Placement, model_digests
from pipeline.stages.events import Failure
from pipeline.stages.process import process, read_rows
from pipeline.store.attempts import forget_attempts
from pipeline.store.files import Store
from ray_jobs.actors import ShardActor, map_shards
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


def portion(answer: Portion | float | None) -> Portion:
    """What a board gave, which is a shard."""
    assert isinstance(answer, Portion)
    return answer


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board of three shards, of which the second is the longest and the first the shortest."""
    shards, _ = shards_of(tmp_path, *([letter] for letter in "abc"))
    board = Board(list(bundles(shards)), IN_BUNDLE, [1.0, 3.0, 2.0])
    board.line.least_seconds = 0.0
    return board


def test_a_board_tells_of_each_shard_once_and_of_no_failure_while_another_is_at_it(board: Board) -> None:
    one, two, three = (portion(board.take(caller, caller, "1")) for caller in ("one", "two", "three"))
    ids = [shards_in(each.bundle)[each.index].id for each in (one, two, three)]
    assert ids == ["audit-000001", "audit-000002", "audit-000000"]
    board.end(three.attempt, "receipt", "c")
    board.line.attempts[one.attempt].begun -= 50.0
    second = portion(board.take("three", "three", "2"))
    assert second.second
    assert isinstance(board.take("four", "three", "1"), float), "it is asked for again later"
    assert not board.advance(second.attempt, ids[0], 1, 1)
    board.end(second.attempt, "failure", "of a second attempt")
    assert not board.advance(one.attempt, ids[0], 1, 1)
    board.end(one.attempt, "receipt", "b")
    board.end(two.attempt, "failure", "a")
    assert board.news().ended == [("receipt", "c"), ("receipt", "b"), ("failure", "a")]
    assert board.take("one", "one", "2") is None
    assert board.news().ended == []


def test_a_first_attempt_that_fails_leaves_its_shard_to_the_second(board: Board) -> None:
    one, _, three = (portion(board.take(caller, caller, "1")) for caller in ("one", "two", "three"))
    board.end(three.attempt, "receipt", "c")
    board.line.attempts[one.attempt].begun -= 50.0
    second = portion(board.take("three", "three", "2"))
    board.end(one.attempt, "failure", "its disk is full")
    assert board.news().ended == [("receipt", "c")]
    board.end(second.attempt, "receipt", "b")
    assert board.news().ended == [("receipt", "b")]


def test_a_request_that_comes_again_gets_the_same_answer_and_an_end_counts_once(board: Board) -> None:
    first = board.take("one", "one", "1")
    assert board.take("one", "one", "1") == first
    assert portion(board.take("two", "two", "1")) != first
    for _ in range(2):
        board.end(portion(first).attempt, "receipt", "b")
    assert board.news().ended == [("receipt", "b")]
    assert portion(board.take("one", "one", "2")) != first


def test_a_board_that_cannot_be_reached_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ActorUnavailableError("the network", None), ActorUnavailableError("again", None), "shard"])

    def get(answer: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Method:
        @staticmethod
        def remote() -> object:
            return next(answers)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr("ray_jobs.actors.TICK_SECONDS", 0.0)
    assert ShardActor.ask(ShardActor.__new__(ShardActor), Method) == "shard"


@pytest.mark.slow
def test_a_lost_board_is_one_line_whoever_comes_upon_it(cluster: None) -> None:
    board = start_board([b""], 1, [1.0])
    ray.get(board.news.remote())

    @ray.remote
    def ask() -> None:
        ray.get(board.news.remote())

    with pytest.raises(RayTaskError, match="a trace"), losses_told(board):
        raise RayTaskError("what else", "a trace", ValueError("what else"))
    ray.kill(board)
    for answer in (board.news.remote(), ask.remote()):
        with pytest.raises(IncompleteError, match="run the same command again to go on"), losses_told(board):
            ray.get(answer)


@pytest.mark.slow
def test_actors_that_wait_for_the_place_of_one_that_died_leave_no_shard_undone(cluster: None, tmp_path: Path) -> None:
    """With `auto` more actors than there are CPUs are asked for: one of them may begin where another one died."""
    texts = [letters(letter, 6) for letter in "abcdefgh"]
    texts[2][3] = "c deadly to tokenise"
    shards, store = shards_of(tmp_path, *texts)
    (tmp_path / "flag").touch()
    cloudpickle.register_pickle_by_value(recorder)
    stage = replace(stage_of(deadly_at=str(tmp_path / "flag")), make=Recorder, digest=model_digests())
    resources = ResourcesConfig(cluster="ray", actors="auto", gpus_per_actor=0)
    events = list(map_shards(stage, resources, shards, store, "some driver"))
    cloudpickle.unregister_pickle_by_value(recorder)
    assert not [event for event in events if isinstance(event, Failure)]
    problems = [
        (number, row)
        for number, shard in enumerate(shards)
        for row, values in read_rows(stage, shard, store).items()
        if values["problem"]
    ]
    assert problems == [(2, 3)]
