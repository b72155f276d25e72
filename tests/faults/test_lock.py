"""The run lock: one driver at a time, whatever the store, the clocks and the machines do."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from stores import HOLD, RUBBISH, Fault, in_another_container, object_store, process

from pipeline.errors import BusyError, UserError
from pipeline.store import lock as lock_module
from pipeline.store.files import Store
from pipeline.store.lock import RunLock, describe_process, lock_is_live
from tests.helpers.clusters import output_of, until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heart that beats twenty times a second and is watched for a third of a second."""
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(lock_module, "CONFIRM_SECONDS", 0.1)


def latest(folder: Path) -> Path:
    return max((folder / "lock").glob("*.json"))


def leave_elsewhere(store: Store, shift: float = 0.0) -> None:
    """The lock of a driver that died on another machine, whose clock was wrong by so many seconds."""
    dead = replace(describe_process("dead", 1), machine="another", host="another", heartbeat=time.time() + shift)
    store.create("lock/000001.json", dead.to_bytes())


CONTEND = """
import multiprocessing, os, sys
from pipeline.errors import BusyError
from pipeline.store import lock

def leave(url):
    lock.RunLock(lock.Store(url)).__enter__()
    os._exit(0)

def contend(url, start, outcomes, end):
    held = lock.RunLock(lock.Store(url))
    start.wait()
    try:
        held.__enter__()
        outcomes.put(1)
    except BusyError:
        outcomes.put(0)
    end.wait()  # the winner holds it until all have tried
    os._exit(0)

lock.HEARTBEAT_SECONDS = 1.0
if sys.argv[2] == "network":
    lock.LOCAL_FILE_SYSTEMS = frozenset()
fork, rounds = multiprocessing.get_context("fork"), []
for number in range(5):  # rounds at once: most of the time of one goes by in waiting for the winner's heart
    url = f"{sys.argv[1]}/{number}"
    dead = fork.Process(target=leave, args=(url,))
    dead.start()
    dead.join()
    start, outcomes, end = fork.Barrier(8), fork.SimpleQueue(), fork.Event()
    for _ in range(8):
        fork.Process(target=contend, args=(url, start, outcomes, end)).start()
    rounds.append((outcomes, end))
print([sum(outcomes.get() for _ in range(8)) for outcomes, _ in rounds])
for _, end in rounds:
    end.set()
"""


@pytest.mark.parametrize("mount", ["local", "network"])
def test_of_eight_processes_that_take_over_a_stale_lock_exactly_one_wins(tmp_path: Path, mount: str) -> None:
    assert output_of(CONTEND, tmp_path, mount) == "[1, 1, 1, 1, 1]\n"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lost", [0, 1, 2], ids="{} of 3 answers lost".format)
def test_of_eight_drivers_on_an_object_store_one_wins_also_where_answers_are_lost(lost: int) -> None:
    store = object_store()
    leave_elsewhere(store)
    creations = count()
    store.fs.fault = lambda operation, path: "lost" if operation == "create" and next(creations) % 3 < lost else None
    together = threading.Barrier(8, timeout=60)

    def contender(_: int) -> str:
        together.wait()
        try:
            with RunLock(store):
                together.wait()
                return "won"
        except BusyError:
            together.wait()
            return "busy"

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(contender, range(8))) == ["busy"] * 7 + ["won"]


@pytest.mark.usefixtures("quick")
def test_a_slow_driver_does_not_take_a_number_that_another_had_before_it() -> None:
    store = object_store()
    leave_elsewhere(store)
    successors: list[RunLock] = []

    def be_late(operation: str, path: str) -> Fault:
        if operation == "create":
            store.fs.fault = lambda operation, path: None
            with RunLock(store):
                pass
            successors.append(RunLock(store).__enter__())
        return None

    store.fs.fault = be_late
    with pytest.raises(BusyError), RunLock(store):
        pass
    (successor,) = successors
    successor.check()
    assert store.names("lock") == ["000003.json"]
    successor.__exit__(None, None, None)


@pytest.mark.usefixtures("quick")
def test_a_lost_answer_to_the_creation_of_its_lock_does_not_turn_a_driver_away() -> None:
    answers: list[Fault] = ["lost"]
    store = object_store(lambda operation, path: answers.pop() if operation == "create" and answers else None)
    with RunLock(store) as lock:
        lock.check()
    assert answers == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "error", [OSError("503"), TimeoutError(), UserError("damaged"), RuntimeError("botocore")], ids=repr
)
def test_a_heart_beats_on_after_any_error_of_the_store(error: Exception) -> None:
    failing = threading.Event()
    failures: list[str] = []

    def fault(operation: str, path: str) -> Fault:
        if failing.is_set():
            failures.append(operation)
            raise error
        return None

    store = object_store(fault)
    with RunLock(store) as lock:
        failing.set()
        until(lambda: len(failures) >= 3)
        lock.check()
        failing.clear()
        before = store.read("lock/000001.json")
        until(lambda: store.read("lock/000001.json") != before, 20)
        lock.check()


@pytest.mark.usefixtures("quick")
def test_a_lock_that_could_not_be_given_back_is_free_again_in_the_same_process() -> None:
    failing = threading.Event()
    store = object_store(lambda operation, path: "refused" if failing.is_set() else None)
    with RunLock(store):
        failing.set()
    failing.clear()
    with RunLock(store):
        assert lock_is_live(store)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("shift", [-7200, 7200], ids="clock {:+} s".format)
def test_the_lock_of_a_dead_driver_is_taken_over_however_wrong_its_clock_was(tmp_path: Path, shift: float) -> None:
    store = Store(str(tmp_path))
    leave_elsewhere(store, shift)
    lines: list[str] = []
    began = time.monotonic()
    assert not lock_is_live(store)
    with RunLock(store, lines.append):
        assert lock_is_live(store)
    assert time.monotonic() - began < 20
    assert lines == [
        f"checking for at most 0 s whether process {os.getpid()} on another, which held the run, still runs"
    ]


@pytest.mark.parametrize("shift", [-7200, pytest.param(7200, marks=pytest.mark.slow)], ids="clock {:+} s".format)
def test_a_driver_in_another_container_of_this_host_is_seen_to_live_and_to_die(
    tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 5)
    store = Store(str(tmp_path))
    with process(HOLD, tmp_path, shift, prefix=in_another_container()) as holder:
        record = json.loads(latest(tmp_path).read_text())
        assert record["host"] == os.uname().nodename
        assert lock_is_live(store)
        with pytest.raises(BusyError, match=f"held by process {record['pid']} on "), RunLock(store):
            pass
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        monkeypatch.setattr(lock_module, "STALE_SECONDS", 1)
        assert not lock_is_live(store) or shift < 0  # by that clock it has just beaten
        with RunLock(store):
            pass


def test_the_lock_of_a_killed_process_that_nobody_waited_for_is_taken_over_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with process(HOLD, tmp_path, 0) as holder:
        with pytest.raises(BusyError, match=f"process {holder.pid}"), RunLock(store):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: not lock_is_live(store), 5)
        with RunLock(store):
            pass
        assert time.monotonic() - began < 5
        assert holder.returncode is None  # its process id is still there


@pytest.mark.parametrize("stopped", [False, True], ids=["runs", "is suspended"])
@pytest.mark.usefixtures("quick")
def test_on_a_local_disk_a_driver_keeps_its_run_while_its_process_exists(tmp_path: Path, stopped: bool) -> None:
    store = Store(str(tmp_path))
    with process(HOLD, tmp_path, 0) as holder:
        if stopped:
            os.kill(holder.pid, signal.SIGSTOP)
        assert lock_is_live(store)
        with pytest.raises(BusyError, match=f"held by process {holder.pid} on "), RunLock(store):
            pass


@pytest.mark.parametrize(
    ("kind", "locked"), [("ext4", True), ("NTFS", True), ("nfs4", False), ("fuse.sshfs", False), ("lustre", False)]
)
def test_only_on_local_file_systems_of_known_types_a_lock_of_the_file_system_counts(
    tmp_path: Path, kind: str, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint=place, fstype=name) for place, name in (("/", "ext4"), (str(tmp_path), kind))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts[::-1])
    with RunLock(Store(f"{tmp_path}/run")):
        assert (tmp_path / "run/lock/flock").exists() == locked
        assert json.loads(latest(tmp_path / "run").read_bytes())["flock"] == locked
    assert [path.name for path in (tmp_path / "run/lock").iterdir()] == ["000001.json"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_in_a_lock_that_nobody_holds_is_healed(tmp_path: Path, rubbish: bytes) -> None:
    store = Store(str(tmp_path))
    store.write("lock/000001.json", rubbish)
    store.write("lock/notes.json", rubbish)
    assert not lock_is_live(store)
    with RunLock(store) as lock:
        assert lock_is_live(store)
        lock.check()


@pytest.mark.usefixtures("quick")
def test_rubbish_in_a_lock_that_is_held_is_healed_by_the_next_beat(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with RunLock(store) as lock:
        store.write("lock/000001.json", b"rubbish")
        with pytest.raises(BusyError), RunLock(store):
            pass
        lock.check()
        assert json.loads(latest(tmp_path).read_bytes())["owner"] == lock.owner


def test_a_folder_in_place_of_a_lock_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "lock/000001.json").mkdir(parents=True)
    for look in (lock_is_live, lambda store: RunLock(store).__enter__()):
        with pytest.raises(UserError, match=r"^cannot read [^\n]*000001\.json: Is a directory$"):
            look(Store(str(tmp_path)))


DRIVE = """
import sys, time
from pipeline.errors import BusyError
from pipeline.store import lock
lock.HEARTBEAT_SECONDS, lock.STALE_SECONDS, lock.CONFIRM_SECONDS = 0.1, 2.0, 0.5
lock.LOCAL_FILE_SYSTEMS = frozenset()
with lock.RunLock(lock.Store(sys.argv[1])) as taken:
    print("held", flush=True)
    try:
        while True:
            taken.held.write_json("status.json", {"by": "the first driver"})
            taken.held.remove("scratch.json")
            print("at rest", flush=True)
            time.sleep(0.5)
    except BusyError as error:
        print(error)
"""


def test_a_driver_that_slept_changes_nothing_that_its_successor_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(lock_module, "LOCAL_FILE_SYSTEMS", frozenset())
    store = Store(str(tmp_path))
    with process(DRIVE, tmp_path, prefix=in_another_container()) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "at rest\n", "no change is under way, which nothing could take back"
        os.killpg(driver.pid, signal.SIGSTOP)
        with RunLock(store) as lock:
            lock.held.write_json("status.json", {"by": "the second driver"})
            lock.held.write_json("scratch.json", {})
            os.killpg(driver.pid, signal.SIGCONT)
            assert "was taken over by another driver" in driver.stdout.read()
            assert store.read_json("status.json") == {"by": "the second driver"}
            assert store.exists("scratch.json")
            lock.check()
        assert [path.name for path in (tmp_path / "lock").iterdir()] == ["000002.json"]
