"""The next shard is read while this one is on the device, whoever finishes shards, and that changes no row."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorder import SECONDS, Recorder, letters, made, make, shards_of, stage_of

from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.stages.base import Entry, Output, Placement, Stage, Window, model_digests
from pipeline.stages.events import Failure
from pipeline.stages.local import finish_shards
from pipeline.stages.process import LOCAL_DRIVER, process, read_rows
from pipeline.stages.score import window_of
from pipeline.stages.turns import SHARDS_AT_A_TIME, Turns
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt


def in_one_process(stage: Stage, shards: list[Shard], store: Store) -> None:
    """Local mode, with one worker."""
    failures = [event for event in finish_shards(stage, shards, store, workers=1) if isinstance(event, Failure)]
    assert not failures


def as_an_actor(stage: Stage, shards: list[Shard], store: Store) -> None:
    """The threads in which an actor is called for bundle after bundle, two at a time."""
    worker, turns, line = stage.make(stage, Placement()), Turns(), list(shards)

    def call() -> None:
        while line:
            shard = line.pop(0)
            with turns.take() as turn:
                process(stage, worker, shard, store, "some driver", None, turn)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(SHARDS_AT_A_TIME)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()


WAYS = [pytest.param(in_one_process, id="local"), pytest.param(as_an_actor, id="actor")]
Way = Callable[[Stage, list[Shard], Store], None]


@pytest.mark.parametrize("finish", WAYS)
def test_the_next_shard_is_read_while_this_one_is_worked_on(finish: Way, tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, letters("a", 4), letters("b", 4))
    stage = stage_of(together=2)
    finish(stage, shards, store)
    notes = made[-1].notes
    assert notes.index(("prepare", "b")) < max(
        i for i, (kind, text) in enumerate(notes) if kind == "work ended" and text[0] == "a"
    )
    assert [len(read_rows(stage, shard, store)) for shard in shards] == [4, 4]


@pytest.mark.parametrize("finish", WAYS)
def test_one_shard_is_read_at_a_time_and_one_is_worked_on(finish: Way, tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, *(letters(letter, 13) for letter in "abcde"))
    stage = stage_of()
    finish(stage, shards, store)
    worker = made[-1]
    assert worker.most == {"prepare": 1, "work": 1}
    order = [text[0] for kind, text in worker.notes if kind == "work"]
    assert order == sorted(order), "a shard is worked on as a whole, in the order in which shards are read"


def test_a_window_is_read_while_the_one_before_is_worked_on(tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, ["a", "a", "a", "a", "b"])
    stage = stage_of(together=2)
    in_one_process(stage, shards, store)
    assert len(read_rows(stage, shards[0], store)) == 5


def test_a_shard_that_fails_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, letters("a", 4), letters("b", 4), letters("c", 4))
    Path(shards[0].path).unlink()
    events = list(finish_shards(stage_of(), shards, store, workers=1))
    assert [event.shard for event in events if isinstance(event, Failure)] == [shards[0].id]
    assert sum(isinstance(event, Receipt) for event in events) == 2


def test_a_worker_takes_no_shard_ahead_that_another_could_begin(tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, *(letters(letter, 4) for letter in "abc"))
    meeting = threading.Barrier(3)
    worked: list[bool] = []

    class Meeting(Recorder):
        def work(self, batch: list[Entry], output: Output) -> None:
            meeting.wait(SECONDS)
            worked.append(True)
            super().work(batch, output)

    stage = replace(stage_of(), make=Meeting, digest=model_digests())
    list(finish_shards(stage, shards, store, workers=3))
    assert len(worked) == 3, "each of the three workers has begun a shard before one of them has ended its own"


def attempts(work: Callable[[], None]) -> int:
    """How many processes it takes until one ends as it should."""
    for attempt in range(1, 30):
        if (child := os.fork()) == 0:
            try:
                work()
                os._exit(0)
            finally:
                os._exit(9)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 1)
        if status == 0:
            return attempt
    raise AssertionError("never ended")


@pytest.mark.parametrize("finish", WAYS)
def test_a_document_that_kills_while_it_is_read_ahead_is_found_and_no_other(finish: Way, tmp_path: Path) -> None:
    texts = [letters("a", 4), ["b", "bb", "b deadly to tokenise", "bbbb", "bbbbb"], letters("c", 6)]
    stage = stage_of(together=3, deadly_at=str(tmp_path / "flag"))
    shards, store = shards_of(tmp_path / "killed", *texts)
    assert attempts(lambda: finish(stage, shards, store)) <= 6
    assert (tmp_path / "flag").exists(), "it was read ahead"
    texts[1][2] = "b wrong to tokenise"
    others, clean = shards_of(tmp_path / "clean", *texts)
    finish(stage_of(), others, clean)
    for shard, other in zip(shards, others, strict=True):
        rows, expected = read_rows(stage, shard, store), read_rows(stage, other, clean)
        assert {row: rows[row]["length"] for row in rows} == {row: expected[row]["length"] for row in expected}
    problems = {
        row: values["problem"] for row, values in read_rows(stage, shards[1], store).items() if values["problem"]
    }
    assert list(problems) == [2]
    assert "being prepared for the model when its worker was killed" in problems[2]
    assert not store.names("attempts/turns", ".json")


def test_a_worker_that_was_killed_when_it_had_filed_a_receipt_leaves_no_journal(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 4))
    stage = stage_of()
    receipt = process(stage, make(stage, Placement()), shard, store, "me")
    store.write_json(f"attempts/turns/{shard.id}.json", {"driver": "me", "starts": 1, "deaths": {}, "at": None})
    assert process(stage, make(stage, Placement()), shard, store, "me") == receipt
    assert not store.names("attempts/turns", ".json")


@pytest.mark.parametrize("driver", ["some driver", LOCAL_DRIVER])
def test_a_shard_that_was_interrupted_is_alone_in_its_process(driver: str, tmp_path: Path) -> None:
    """Else a death could be laid at the door of what is worked on, of a document that was read ahead."""
    shards, store = shards_of(tmp_path, letters("a", 9), letters("b", 9), letters("c", 9))
    stage = stage_of()
    store.write_json(f"attempts/turns/{shards[1].id}.json", {"driver": driver, "starts": 1, "deaths": {}, "at": None})
    worker, turns = make(stage, Placement()), Turns()

    def call(shard: Shard) -> None:
        with turns.take() as turn:
            process(stage, worker, shard, store, driver, None, turn)

    threads = [threading.Thread(target=call, args=(shard,)) for shard in shards]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    during = [text[0] for _, text in worker.notes]
    first, last = during.index("b"), len(during) - 1 - during[::-1].index("b")
    assert set(during[first : last + 1]) == {"b"}
    assert [len(read_rows(stage, shard, store)) for shard in shards] == [9, 9, 9]


@pytest.mark.parametrize(
    ("device", "tokens", "batches"), [("cpu", 2048, 128), ("cuda", 16384, 16), ("cuda", 65536, 16)]
)
def test_a_window_is_about_so_many_batches_whatever_documents_are_cut_to(
    device: str, tokens: int, batches: int, tmp_path: Path
) -> None:
    window = window_of(tokens, device, max_tokens=512, draws=0)
    assert window.kept == 4 * tokens * batches
    assert window.kept_of_one == 4 * 512
    assert window_of(tokens, device, 512, draws=3).characters == window.characters / 4


def test_windows_are_cut_by_what_is_kept_of_documents(tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, ["a" * 5, "a" * 100, "a" * 2, "b", "c" * 300, "d"])
    worker = make(stage_of(), Placement())
    sizes: list[int] = []
    worker.window = Window(1000, kept=12, kept_of_one=10)
    prepare = worker.prepare

    def noted(documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        sizes.append(len(documents))
        return prepare(documents, inputs, output)

    worker.prepare = noted  # type: ignore[method-assign]
    process(stage_of(), worker, shards[0], store)
    assert sizes == [2, 3, 1]


def test_the_longest_batch_of_a_window_comes_first(tmp_path: Path) -> None:
    shards, store = shards_of(
        tmp_path, [letter * length for letter, length in zip("abcd", (3, 39, 20, 4), strict=True)]
    )
    stage = stage_of()
    in_one_process(stage, shards, store)
    assert [text[0] for kind, text in made[-1].notes if kind == "work"] == ["b", "c", "a"]
    lengths = {row: values["length"] for row, values in read_rows(stage, shards[0], store).items()}
    assert lengths == {0: 7, 1: 39, 2: 20, 3: 7}, "what shares a batch is as it was"


def slow(windows: int, seconds: float) -> Any:
    """Windows that each take a while to be read."""
    for window in range(windows):
        time.sleep(seconds)
        yield window


def test_a_worker_without_a_window_starves_and_one_that_works_does_not() -> None:
    with Turns().take() as turn:
        began = time.monotonic()
        for _ in turn.awaited(slow(2, 0.1)):
            turn.work()
            time.sleep(0.2)
        lasted = time.monotonic() - began
        turn.end()
    assert 0.2 <= turn.starved <= lasted - 0.4 + 1e-3
    assert 0.4 <= turn.worked <= lasted - 0.2 + 1e-3
    assert turn.starved + turn.worked == pytest.approx(lasted, abs=0.02)
    worked = turn.worked
    time.sleep(0.05)
    assert turn.worked == worked, "it has ended"


def test_a_shard_that_is_read_while_another_is_worked_on_does_not_starve() -> None:
    turns, begun, ended = Turns(), threading.Event(), threading.Event()
    starved: list[float] = []

    def read_ahead() -> None:
        begun.wait(SECONDS)
        with turns.take() as turn:
            windows = turn.awaited(slow(2, 0.15))
            next(windows)  # while the other one is worked on
            starved.append(turn.starved)
            ended.set()
            turn.work()
            next(windows)  # while nobody is
            starved.append(turn.starved)
            assert 0 <= turn.worked < 0.05

    with turns.take() as first:
        first.work()
        thread = threading.Thread(target=read_ahead)
        thread.start()
        first.end_reading()
        begun.set()
        assert ended.wait(SECONDS)
    thread.join(SECONDS)
    assert starved[0] == 0.0
    assert 0.15 <= starved[1] < 0.15 + 5
