"""A worker reads its next shard while it computes one, in this process and as an actor, and that changes no row."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.plain_loop import process
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.errors import ExitCode, LostDeviceError
from pipeline.models.unchanged import ModelDigests
from pipeline.stages.base import Entry, Output, Placement, Stage, Window
from pipeline.stages.events import Failure
from pipeline.stages.local import finish_shards
from pipeline.stages.process import read_rows
from pipeline.stages.score import batch_window
from pipeline.stages.worker import ShardStream, windows
from pipeline.store.attempts import LOCAL_DRIVER
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts
from tests.helpers.commands import attempts
from tests.helpers.recorder import SECONDS, Recorder, letters, made, make, shards_of, stage_of


def in_one_process(stage: Stage, shards: list[Shard], store: Store) -> None:
    failures = [event for event in finish_shards(stage, shards, store, workers=1) if isinstance(event, Failure)]
    assert not failures


def as_an_actor(stage: Stage, shards: list[Shard], store: Store) -> None:
    worker, todo = stage.make(stage, Placement()), iter(shards)
    results = list(ShardStream(stage, worker, store, "some driver").finish(lambda prefetch: next(todo, None)))
    assert [shard for shard, _ in results] == shards
    assert all(isinstance(result, Receipt) for _, result in results)


def died(driver: str, at: list[str] | None = None) -> dict[str, Any]:
    """The log of a first attempt that ended with its process."""
    state = {"open": True, "starts": 1, "at": at, "deaths": {}, "mode": None, "cleared": 0}
    return {"driver": driver, "attempt": "one", **state}


WAYS = [pytest.param(in_one_process, id="local"), pytest.param(as_an_actor, id="actor")]
Way = Callable[[Stage, list[Shard], Store], None]


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
    assert made[-1].placement.shared is None


@pytest.mark.parametrize("finish", WAYS)
def test_a_shard_without_a_readable_document_has_a_receipt(finish: Way, tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, letters("a", 2), ["", " "], letters("c", 2))
    finish(stage_of(), shards, store)
    assert read_rows(stage_of(), shards[1], store) == {}


def stage_that_meets(count: int) -> Stage:
    """Its workers, of this number, wait for one another before they end a batch."""
    meeting = threading.Barrier(count)

    class Meeting(Recorder):
        def work(self, batch: list[Entry], output: Output) -> None:
            super().work(batch, output)
            meeting.wait(SECONDS)

    return replace(stage_of(), make=Meeting, digest=ModelDigests())


def test_a_worker_prefetches_no_shard_that_another_could_start(tmp_path: Path) -> None:
    shards, store = shards_of(tmp_path, *(letters(letter, 4) for letter in "abc"))
    stage = stage_that_meets(3)
    list(finish_shards(stage, shards, store, workers=3))
    assert [receipt.n_scored for receipt in read_receipts(store, "turns")] == [4, 4, 4]
    one, *others = {worker.placement.shared for worker in made[-3:]}
    assert (one is None, others) == (False, []), "all share one set of weights"


@pytest.mark.parametrize("finish", WAYS)
def test_a_document_that_kills_while_it_is_prefetched_is_found_and_no_other(finish: Way, tmp_path: Path) -> None:
    texts = [letters("a", 4), ["b", "bb", "b deadly to tokenise", "bbbb", "bbbbb"], letters("c", 6)]
    stage = stage_of(together=3, deadly_at=str(tmp_path / "flag"))
    shards, store = shards_of(tmp_path / "killed", *texts)
    assert attempts(lambda: finish(stage, shards, store)) <= 6
    assert (tmp_path / "flag").exists(), "it was prefetched"
    texts[1][2] = "b wrong to tokenise"
    others, clean = shards_of(tmp_path / "clean", *texts)
    finish(stage_of(), others, clean)
    for shard, other in zip(shards, others, strict=True):
        rows, expected = read_rows(stage, shard, store), read_rows(stage, other, clean)
        assert {row: rows[row]["length"] for row in rows} == {row: expected[row]["length"] for row in expected}
    problems = {row: values["problem"] for row, values in read_rows(stage, shards[1], store).items()}
    assert [row for row, problem in problems.items() if problem] == [2]
    assert "being worked on when its worker was killed" in problems[2]
    assert not store.names("attempts/turns", ".json")


def test_a_worker_that_was_killed_when_it_had_filed_a_receipt_leaves_no_log(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 4))
    stage = stage_of()
    receipt = process(stage, make(stage, Placement()), shard, store, "me")
    store.write_json(f"attempts/turns/{shard.id}.json", died("me"))
    assert process(stage, make(stage, Placement()), shard, store, "me") == receipt
    assert not store.names("attempts/turns", ".json")


def test_of_two_workers_that_end_a_shard_at_once_one_has_filed_it(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, [*letters("a", 4), ""])
    stage = replace(stage_that_meets(2), quarantines=True, digest=ModelDigests())

    def filed(number: int) -> bool:
        stream = ShardStream(stage, stage.make(stage, Placement()), store, driver=None)
        todo = iter([shard])
        assert [shard for shard, _ in stream.finish(lambda prefetch: next(todo, None))] == [shard]
        return stream.filed

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(filed, range(2))) == [False, True]
    assert len([path for path in tmp_path.rglob("*") if "quarantine" in path.parent.name]) == 1


@pytest.mark.parametrize("finish", WAYS)
def test_a_shard_that_was_interrupted_is_isolated_and_alone_in_its_process(finish: Way, tmp_path: Path) -> None:
    """Else a death could be blamed on what is computed, of a document that was prefetched."""
    shards, store = shards_of(tmp_path, letters("a", 9), letters("b", 9), letters("c", 9))
    driver = LOCAL_DRIVER if finish is in_one_process else "some driver"
    store.write_json(f"attempts/turns/{shards[1].id}.json", died(driver))
    before = len(made)
    finish(stage_of(), shards, store)
    during = [note for worker in made[before:] for note in worker.notes if not note[0].endswith("ended")]
    first = next(i for i, (_, text) in enumerate(during) if text[0] == "b")
    last = len(during) - 1 - next(i for i, (_, text) in enumerate(during[::-1]) if text[0] == "b")
    alone = during[first : first + 18]
    assert alone == [(event, text) for text in letters("b", 9) for event in ("prepare", "work")]
    assert {text[0] for _, text in during[first : last + 1]} <= {"b", "c"}, "the next one is read while it is computed"
    assert [len(read_rows(stage_of(), shard, store)) for shard in shards] == [9, 9, 9]


@pytest.mark.parametrize(("at", "alone"), [([], []), (["batch 2+2", "work 2", "work 5"], ["a" * 3, "a" * 6])])
def test_only_what_was_in_flight_at_a_death_is_isolated(at: list[str], alone: list[str], tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, letters("a", 9))
    store.write_json(f"attempts/turns/{shard.id}.json", died(LOCAL_DRIVER, at))
    in_one_process(stage_of(), [shard], store)
    assert [text for event, text in made[-1].notes if event == "work"][: len(alone)] == alone
    assert len([text for event, text in made[-1].notes if event == "prepare"]) == len(alone) + 3, "then three windows"


class OnDevice(Recorder):
    """Works on a device that a text may break; it then refuses every text, as CUDA does."""

    lost = False

    def work(self, batch: list[Entry], output: Output) -> None:
        self.lost = self.lost or any("assertion" in entry.work for entry in batch)
        if self.lost:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")
        super().work(batch, output)


@pytest.mark.parametrize("delay", [0, 0.5])
def test_a_lost_device_ends_a_run_in_one_line_and_the_log_names_what_was_in_flight(
    delay: float, tmp_path: Path
) -> None:
    texts = [[f"document {4 * shard + row}" for row in range(4)] for shard in range(5)]
    texts[1][3] = "an assertion"
    shards, store = shards_of(tmp_path, *texts)
    events = finish_shards(replace(stage_of(), make=OnDevice, digest=ModelDigests()), shards, store, workers=1)
    line = rf"^shard {shards[1].id} of {shards[1].name}: .*device-side assert triggered.*rerun the command.*$"
    with pytest.raises(LostDeviceError, match=line) as raised:  # of a driver that is slow to hear of it
        deque((time.sleep(delay) for _ in events), maxlen=0)
    assert raised.value.exit_code == ExitCode.INCOMPLETE
    assert store.names("attempts/turns", ".json") == [f"{shards[1].id}.json"]
    assert store.read_json(f"attempts/turns/{shards[1].id}.json")["at"] == ["work 3"]


@pytest.mark.parametrize(
    ("device", "tokens", "batches"), [("cpu", 2048, 128), ("cuda", 16384, 16), ("cuda", 65536, 16)]
)
def test_a_window_is_about_so_many_batches_whatever_documents_are_cut_to(
    device: str, tokens: int, batches: int
) -> None:
    assert batch_window(tokens, device, 512, draws=0) == Window(4096, 1 << 23, 4 * tokens * batches, 4 * 512)
    assert batch_window(tokens, device, 512, draws=2).characters == math.ceil((1 << 23) / 3)


@pytest.mark.parametrize("most", [Window(3), Window(9, characters=102), Window(9, kept=12, kept_of_one=10)])
def test_a_window_ends_with_the_document_that_reaches_a_limit(most: Window) -> None:
    texts = ["a" * length for length in (1, 100, 1, 1, 100, 1, 1)]
    documents = [Document(row, str(row), text, None) for row, text in enumerate(texts)]
    assert [len(window) for window in windows(iter(documents), most)] == [3, 3, 1]
    pictures = [replace(one, text="a", picture=one.text[1:].encode()) for one in documents]
    assert [len(window) for window in windows(iter(pictures), Window(9, characters=102))] == [3, 3, 1]


def test_a_worker_without_a_window_waits_and_one_that_computes_works(tmp_path: Path) -> None:
    class Slow(Recorder):
        def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
            time.sleep(0.1)
            return super().prepare(documents, inputs, output)

        def work(self, batch: list[Entry], output: Output) -> None:
            time.sleep(0.2)
            super().work(batch, output)

    (shard,), store = shards_of(tmp_path, ["a", "a", "a", "a", "b"])
    stage, todo = stage_of(), iter([shard])
    stream = ShardStream(stage, Slow(stage, Placement()), store)
    began = time.monotonic()
    ((_, receipt),) = stream.finish(lambda prefetch: next(todo, None))
    lasted = time.monotonic() - began
    assert stream.waited >= 0.1
    assert stream.worked >= 0.4, "two windows of one batch"
    assert stream.waited + stream.worked <= lasted
    assert isinstance(receipt, Receipt)
    assert 0.5 <= receipt.seconds == round(receipt.seconds, 3) <= lasted
