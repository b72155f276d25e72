"""A document that kills its worker, wherever it does so, is found and left out; a kill from outside costs none."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plain_loop import process
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.models.unchanged import ModelDigests
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage
from pipeline.stages.process import read_rows
from pipeline.store.attempts import LOCAL_DRIVER, MAX_STARTS
from pipeline.store.files import Store
from tests.helpers import recorder
from tests.helpers.recorder import shards_of

RAISED = 9  # exit status of a process whose work raised
DRIVERS = ["some", LOCAL_DRIVER]
JSON_BOMB = "[" + "[]," * 800_000 + "0]"


@dataclass(frozen=True)
class Settings(recorder.Settings):
    """Of the stage of these tests."""

    calls: str = ""  # a file that counts calls over all attempts
    kills: tuple[int, ...] = ()  # the call of each attempt at which it is killed from outside


class Lengths(recorder.Recorder):
    """Dies of some texts, of some already while it prepares them."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        super().__init__(stage, placement)
        self.batch_size = BatchSize(30)
        self.calls = 0
        if self.settings.calls:
            with Path(self.settings.calls).open("a") as attempts:
                attempts.write("attempt\n")

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        self.die_at(0)

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        if any("deadly to tokenise" in document.text for document in documents):
            os._exit(1)
        return super().prepare(documents, inputs, output)

    def die_at(self, call: int) -> None:
        if self.settings.calls:
            attempt = Path(self.settings.calls).read_text().count("\n") - 1
            if attempt < len(self.settings.kills) and self.settings.kills[attempt] == call:
                os._exit(1)

    def work(self, batch: list[Entry], output: Output) -> None:
        self.calls += 1
        self.die_at(self.calls)
        if any("deadly to score" in entry.work for entry in batch):
            os._exit(1)
        super().work(batch, output)


def stage_of(**settings: Any) -> Stage:
    return replace(recorder.stage_of(), settings=Settings(**settings), make=Lengths, digest=ModelDigests())


def killed(work: Callable[[], Any], megabytes: int = 10**6) -> int:
    """The exit status of a process; one that takes more memory than it may is killed, as nodes do that."""
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(RAISED)
    begin = memory_of(child)
    while not (end := os.waitpid(child, os.WNOHANG))[0]:
        if memory_of(child) - begin > megabytes:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(end[1])


def memory_of(process_id: int) -> int:
    """Megabytes of a process that are in no file."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10
    except (OSError, StopIteration):
        return 0


def attempts_at(stage: Stage, shard: Shard, store: Store, driver: str, megabytes: int = 10**6) -> int:
    """How many attempts it takes to file a receipt."""
    for attempt in range(1, 60):
        status = killed(lambda: process(stage, stage.make(stage, Placement()), shard, store, driver), megabytes)
        assert status != RAISED
        if status == 0:
            return attempt
    raise AssertionError("never filed")


def problems(stage: Stage, shard: Shard, store: Store) -> dict[int, str]:
    """The message of every document without a result, by row."""
    receipt = process(stage, stage.make(stage, Placement()), shard, store)
    table = store.read_table(receipt.data)
    messages = {row["row"]: row["problem"] for row in table.to_pylist() if row["reason"] is not None}
    assert receipt.n_in == receipt.n_scored + receipt.n_quarantined
    return messages


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_document_that_kills_its_worker_while_it_is_tokenised_is_found(driver: str, tmp_path: Path) -> None:
    texts = ["one", "two", "three", "deadly to tokenise", "four", "five"]
    stage = stage_of()
    (shard,), store = shards_of(tmp_path / "killed", texts)
    assert attempts_at(stage, shard, store, driver) <= 6
    assert problems(stage, shard, store) == {3: "it was being worked on when its worker was killed, again and again"}
    assert not store.names("attempts/turns", ".json")
    (other,), clean = shards_of(tmp_path / "clean", [*texts[:3], "wrong to tokenise", *texts[4:]])
    assert attempts_at(stage, other, clean, driver) == 1
    assert problems(stage, other, clean) == {3: "no tokens"}
    rows, expected = read_rows(stage, shard, store), read_rows(stage, other, clean)
    assert {row: rows[row]["length"] for row in rows} == {row: expected[row]["length"] for row in expected}


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_document_that_kills_its_worker_while_it_is_read_is_found(driver: str, tmp_path: Path) -> None:
    """2.4 MB of JSON that become 50 MB, on a node that kills whoever takes 30 MB."""
    lines = ["one", "two", f'{{"text": "x", "other": {JSON_BOMB}}}'.encode(), "three", "four", "five", "six"]
    stage = stage_of()
    (shard,), store = shards_of(tmp_path, lines)
    assert attempts_at(stage, shard, store, driver, megabytes=30) <= 7
    receipt = store.read_json("receipts/turns/audit-000000.json")
    assert store.read_table(receipt["data"]).num_rows == 6  # such a row no stage can read: only quarantine has it
    assert receipt["reasons"] == {"model_error": 1}


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_more_deadly_documents_than_a_shard_may_have_deaths_are_all_found(driver: str, tmp_path: Path) -> None:
    texts = [f"{number} deadly to score" if number % 3 else f"document {number}" for number in range(12)]
    texts += ["deadly to tokenise"] * 3
    stage = stage_of()
    (shard,), store = shards_of(tmp_path, texts)
    assert attempts_at(stage, shard, store, driver) > MAX_STARTS
    assert sorted(problems(stage, shard, store)) == [1, 2, 4, 5, 7, 8, 10, 11, 12, 13, 14]


def rows_of(stage: Stage, shard: Shard, store: Store) -> list[int | None]:
    return [row["length"] for row in read_rows(stage, shard, store).values()]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("kills", [(1,), (2, 1, 2, 2, 2), (4, 1, 2), (1, 2, 3, 0, 0, 0, 0)])
def test_a_node_that_is_preempted_again_and_again_costs_no_document(
    driver: str, kills: tuple[int, ...], tmp_path: Path
) -> None:
    """Two kills hit one document alone at most; what shares a batch is as it was."""
    texts = [f"document {number}" for number in range(11)]
    rows = []
    for name, times in (("killed", kills), ("clean", ())):
        stage = stage_of(calls=str(tmp_path / f"{name}.calls"), kills=times)
        (shard,), store = shards_of(tmp_path / name, texts)
        assert attempts_at(stage, shard, store, driver) <= len(times) + 1
        assert problems(stage, shard, store) == {}
        rows.append(rows_of(stage, shard, store))
    assert rows[0] == rows[1]


def test_a_document_alone_in_flight_at_three_kills_from_outside_is_quarantined(tmp_path: Path) -> None:
    """It cannot be told from one that kills its worker (docs/cluster.md)."""
    stage = stage_of(calls=str(tmp_path / "calls"), kills=(2, 1, 1, 1))
    (shard,), store = shards_of(tmp_path / "run", [f"document {number}" for number in range(11)])
    assert attempts_at(stage, shard, store, "some") == 5
    assert list(problems(stage, shard, store)) == [0]


def test_documents_of_a_batch_that_kills_are_worked_on_one_by_one(tmp_path: Path) -> None:
    class Together(Lengths):
        def work(self, batch: list[Entry], output: Output) -> None:
            if len(batch) > 1 and batch[0].document.row == 0:
                os._exit(1)
            super().work(batch, output)

    stage = replace(stage_of(), make=Together, digest=ModelDigests())
    (shard,), store = shards_of(tmp_path / "run", [f"document {number}" for number in range(6)])
    assert attempts_at(stage, shard, store, LOCAL_DRIVER) == 4
    assert problems(stage, shard, store) == {}
    assert sorted(rows_of(stage, shard, store)) == [10, 10, 10, 10, 20, 20]


@pytest.mark.parametrize("text", ["deadly to score", "deadly to tokenise"])
def test_a_deadly_document_without_a_neighbour_is_found(text: str, tmp_path: Path) -> None:
    stage = stage_of()
    (shard,), store = shards_of(tmp_path, [text])
    assert attempts_at(stage, shard, store, LOCAL_DRIVER) <= 6
    assert list(problems(stage, shard, store)) == [0]


def test_a_shard_whose_attempts_all_die_is_given_up_and_the_next_command_tries_again(tmp_path: Path) -> None:
    stage = stage_of(calls=str(tmp_path / "calls"), kills=(0,) * MAX_STARTS)
    (shard,), store = shards_of(tmp_path / "run", ["one", "two", "three"])

    def attempt() -> int:
        return killed(lambda: process(stage, stage.make(stage, Placement()), shard, store, LOCAL_DRIVER))

    assert [attempt() for _ in range(MAX_STARTS)] == [1] * MAX_STARTS
    with pytest.raises(RuntimeError, match=f"its worker died {MAX_STARTS} times"):
        process(stage, stage.make(stage, Placement()), shard, store, LOCAL_DRIVER)
    receipt = process(stage, stage.make(stage, Placement()), shard, store, LOCAL_DRIVER)
    assert (receipt.n_scored, receipt.n_quarantined) == (3, 0)


def test_a_place_in_a_file_that_kills_its_reader_fails_the_shard_by_name(tmp_path: Path) -> None:
    (shard,), _ = shards_of(tmp_path, ["one", "two", "three"])
    with pytest.raises(UserError, match=r"audit.jsonl cannot be read beyond row 1: that killed its reader"):
        list(read_shard(replace(shard, name="audit.jsonl"), watch=lambda row, between: between and row == 2))
    documents = list(read_shard(shard, watch=lambda row, between: not between and row == 1))
    assert [document.problem is None for document in documents] == [True, False, True]
