"""Processes of this machine finish shards and read scores as threads do, and outlive what dies in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from test_local import audit_of

from pipeline.audit.description import build_config
from pipeline.audit.plan import make_plan
from pipeline.audit.stages import stages_of
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, UserError
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window, model_digests, rows_schema
from pipeline.stages.child import Child, LostChildError, begin_ahead, end_ahead
from pipeline.stages.crew import Crew
from pipeline.stages.events import Event, Failure, Ready
from pipeline.stages.local import finish_shards
from pipeline.stages.process import read_rows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt


class Deadly:
    """Counts characters; a text may kill its process, each time or once."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        self.window = Window(8)
        self.batch_size: BatchSize | None = BatchSize(40)
        self.store: Store | None = None

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        self.store = store

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        return [Entry(document, len(document.text), document.text) for document in documents]

    def work(self, batch: list[Entry], output: Output) -> None:
        assert self.store is not None
        for entry in batch:
            if entry.work == "kills" or (entry.work == "kills once" and not self.store.exists("killed")):
                self.store.write("killed", b"")
                os.kill(os.getpid(), signal.SIGKILL)
            while entry.work == "never ends":
                time.sleep(0.01)
            time.sleep(0.002)
            output.keep(entry.document, length=len(entry.work))


class DeadlyToOpen:
    """Kills every process that makes one."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        os._exit(1)


def fork_and_die() -> None:
    """Leave a process behind that lives for a minute."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Settings:
    """Of the stage of these tests: none."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Two processes."""
    made = Crew(2, 1)
    yield made
    made.close()


def stage_and_shards(tmp_path: Path, texts: list[str], make: Any = Deadly) -> tuple[Stage, list[Shard], Store]:
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "run": str(tmp_path / "run"),
        "model": {"path": "none"},
        "corpus": {"audit": {"path": str(path)}},
        "resources": {"shard_bytes": 150},
    }
    schema = rows_schema(("length", pa.int64()))
    stage = Stage("lengths", "lengths", schema, Settings(), None, 0, make, model_digests())
    config = build_config(settings)
    return stage, list(make_plan(config).shards), Store(config.run)


def receipts_of(events: Iterable[Event]) -> list[Receipt]:
    return sorted((e for e in events if isinstance(e, Receipt)), key=lambda receipt: receipt.shard)


def children_of(crew: Crew) -> list[psutil.Process]:
    """Its processes, when they are there."""
    list(crew.each(range(40), str))
    assert crew.nursery.process is not None
    copies = psutil.Process(crew.nursery.process.pid).children()
    return copies + [psutil.Process(child.process.pid) for child in crew.children if child.process is not None]


def test_rows_are_the_same_bytes_as_those_of_threads(crew: Crew, tmp_path: Path, tiny_model_folder: Path) -> None:
    contents = []
    for run in ("threads", "processes"):
        config = audit_of(tmp_path, tiny_model_folder, run)
        (stage,), shards, store = stages_of(config), make_plan(config).shards, Store(config.run)
        by_crew = run == "processes"
        events = list(
            crew.finish_shards(stage, shards, store, "me") if by_crew else finish_shards(stage, shards, store, 2)
        )
        assert sum(isinstance(event, Ready) for event in events) == 1
        receipts = receipts_of(events)
        assert len(receipts) == len(shards) > 4
        assert not store.names("attempts/score")
        contents.append([store.read(receipt.data) for receipt in receipts])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("text", ["kills", "kills once"])
def test_a_document_that_kills_its_process_costs_no_other_a_result(text: str, crew: Crew, tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(40)]
    texts[17] = text
    stage, shards, store = stage_and_shards(tmp_path, texts)
    assert len(shards) > 4
    receipts = receipts_of(crew.finish_shards(stage, shards, store, "me"))
    assert len(receipts) == len(shards)
    assert sum(receipt.n_scored for receipt in receipts) == 40 - (text == "kills")
    problems = [row["problem"] for shard in shards for row in read_rows(stage, shard, store).values() if row["problem"]]
    assert len(problems) == (text == "kills")
    assert all("its worker was killed" in problem for problem in problems)
    assert not store.names("attempts/lengths")


def test_a_process_that_is_killed_from_outside_is_replaced(crew: Crew, tmp_path: Path) -> None:
    stage, shards, store = stage_and_shards(tmp_path, [f"document {number}" for number in range(400)])
    receipts: list[Receipt] = []
    (child, *_) = children_of(crew)
    for event in crew.finish_shards(stage, shards, store, "me"):
        if isinstance(event, Receipt):
            if not receipts:
                child.kill()
            receipts.append(event)
    assert sum(receipt.n_scored for receipt in receipts) == 400
    assert sum(child.process is not None for child in crew.children) >= 1, "it is no copy"


def test_a_damaged_file_fails_its_shards_alone(crew: Crew, tmp_path: Path) -> None:
    stage, shards, store = stage_and_shards(tmp_path, [f"document {number}" for number in range(40)])
    object.__setattr__(shards[0], "path", str(tmp_path / "elsewhere.jsonl"))
    events = list(crew.finish_shards(stage, shards, store, "me"))
    assert [event.shard for event in events if isinstance(event, Failure)] == [shards[0].id]
    assert len(receipts_of(events)) == len(shards) - 1


def test_a_model_that_cannot_be_opened_ends_the_stage_in_one_line_and_no_process(
    crew: Crew, tmp_path: Path, tiny_model_folder: Path
) -> None:
    config = audit_of(tmp_path, tiny_model_folder, "run")
    (stage,), shards = stages_of(config), make_plan(config).shards
    object.__setattr__(stage.settings, "model", ModelConfig(path=str(tmp_path / "gone")))
    with pytest.raises(UserError, match="gone"):
        list(crew.finish_shards(stage, shards[:1], Store(config.run), "me"))
    assert list(crew.each([0, 1, 2], lambda number: number + 1)) == [1, 2, 3]


def test_processes_that_die_before_they_have_a_shard_end_the_stage(tmp_path: Path) -> None:
    stage, shards, store = stage_and_shards(tmp_path, ["a document"], DeadlyToOpen)
    crew = Crew(1, 1)
    with pytest.raises(IncompleteError, match="3 worker processes ended one after the other, the last with code 1"):
        list(crew.finish_shards(stage, shards, store, "me"))
    crew.close()


def test_closing_the_events_ends_the_processes_and_costs_no_attempt(tmp_path: Path) -> None:
    stage, shards, store = stage_and_shards(tmp_path, ["never ends", *(f"document {n}" for n in range(40))])
    crew = Crew(2, 1)
    children = children_of(crew)
    events = crew.finish_shards(stage, shards, store, "me")
    while not any(isinstance(event, Receipt) for event in events):
        continue
    events.close()  # type: ignore[attr-defined]
    assert not psutil.wait_procs(children, timeout=10)[1]
    with pytest.raises(IncompleteError, match="processes have ended"):
        next(crew.each([1], str))
    assert len(store.names("attempts/lengths")) <= 1  # of the one that had to be killed
    crew.close()


def test_a_fold_is_spread_and_its_error_is_raised(crew: Crew) -> None:
    added = 10
    numbers = list(range(50))
    found = list(crew.each(numbers, lambda number: (number + added, os.getpid())))
    assert sorted(value for value, _ in found) == [number + 10 for number in numbers]
    assert {process for _, process in found} <= {child.pid for child in children_of(crew)}

    def refuse(number: int) -> int:
        raise UserError(f"number {number} is refused")

    with pytest.raises(UserError, match="number 0 is refused"):
        list(crew.each([0], refuse))
    assert list(crew.each([], refuse)) == []


def test_a_call_is_answered_and_ends_when_its_check_says_so() -> None:
    crew = Crew(1, 1)
    assert crew.call(max, 3, 4, check=lambda: None) == 4

    def check() -> None:
        raise UserError("taken over")

    (child,) = children_of(crew)
    with pytest.raises(UserError, match="taken over"):
        crew.call(time.sleep, 60, check=check)
    assert not psutil.wait_procs([child], timeout=10)[1]


def test_a_crew_takes_the_processes_that_were_begun_ahead_and_ends_others() -> None:
    begin_ahead(2, 1)
    ahead = set(psutil.Process().children())
    crew = Crew(2, 1)
    try:
        assert set(psutil.Process().children()) == ahead
        assert sorted(crew.each(range(40), str)) == sorted(map(str, range(40)))
    finally:
        crew.close()
    begin_ahead(3, 1)
    begin_ahead(2, 1)
    others = set(psutil.Process().children()) - ahead
    assert len(others) == 2
    end_ahead()
    assert not psutil.wait_procs(others, timeout=20)[1]


def test_the_death_of_a_process_is_seen_while_what_it_began_lives() -> None:
    child = Child(1)
    begun = time.monotonic()
    with pytest.raises(LostChildError):
        child.call(fork_and_die)
    assert time.monotonic() - begun < 30
    child.end()


def test_a_process_that_takes_nothing_is_ended_while_it_is_written_to() -> None:
    child = Child(1)
    child.call(str, 1)
    assert child.process is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    writing = ThreadPoolExecutor(1)
    waiting = writing.submit(child.call, len, b"0" * (1 << 24))
    time.sleep(0.5)
    assert not waiting.done()
    child.end(0.1)
    assert child.process.returncode == -signal.SIGKILL
    with pytest.raises(LostChildError):
        waiting.result(timeout=60)
    writing.shutdown()


def test_processes_of_several_threads_are_begun_one_by_one() -> None:
    crew = Crew(2, 2)
    try:
        processes = [child.process for child in crew.children]
        assert None not in processes
        assert sorted(crew.each(range(40), str)) == sorted(map(str, range(40)))
        assert [child.process for child in crew.children] == processes
    finally:
        crew.close()


def test_an_answer_that_cannot_be_carried_is_named() -> None:
    child = Child(1)
    with pytest.raises((TypeError, RuntimeError), match="lock"):
        child.call(threading.Lock)
    assert child.call(str, 1) == "1"
    child.end()


def test_what_an_error_cannot_carry_is_named() -> None:
    class Odd(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    def refuse() -> None:
        raise Odd(1, 2)

    child = Child()
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        child.call(refuse)
    with pytest.raises(LostChildError):
        child.call(os._exit, 0)
    with pytest.raises(LostChildError):
        child.call(os.getpid)
    child.end()


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    program = "import time; from pipeline.stages.child import Child; Child().call(time.sleep, 600)"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        waiting = psutil.Process(process.pid)
        while not (children := waiting.children()):
            assert process.poll() is None
        process.kill()
    assert not psutil.wait_procs(children, timeout=30)[1]
