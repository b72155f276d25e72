"""`seenset status RUN --watch` follows a run to its end, from storage alone, and leaves it alone."""

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from pipeline.store.receipts import read_receipts, withdraw_receipt
from pipeline.trial.progress import TrialProgress
from ray_jobs import progress
from ray_jobs.cli import main
from tests.helpers.commands import ended, printed
from tests.helpers.made_up import sentence, write_audit
from tests.helpers.signed import sign_status

SECONDS = 30.0
"""Waited for what must come; a test that waits so long has failed."""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    path = write_audit(
        folder, tiny_model_folder, [sentence(i) for i in range(40)], [sentence(900 + i) for i in range(40)]
    )
    assert ended("run", str(path), "--json") == 0
    return folder / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def write_status(run: Path, **changes: Any) -> None:
    store = Store(str(run))
    store.write_json("status.json", {**store.read_json("status.json"), **changes})
    sign_status(store)


@pytest.fixture
def held(run: Path) -> Iterator[Path]:
    """The run, in the hands of a driver that has finished one shard and works on."""
    store = Store(str(run))
    write_status(run, state="running", exit_code=None, shards_done=1, under_way=5)
    for receipt in list(read_receipts(store, "score"))[1:]:
        withdraw_receipt(store, "score", receipt.shard)
    with RunLock(store):
        yield run


def look_by_steps(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> list[str]:
    """Do one thing before each look at a run, and nothing more when all are done; the looks."""
    left, looks, before = list(steps), [], progress.read_progress

    def look(run: str) -> Any:
        looks.append(run)
        left.pop(0)() if left else nothing()
        return before(run)

    monkeypatch.setattr(progress, "read_progress", look)
    return looks


def nothing() -> None:
    """No step."""


def changed(run: Path, **changes: Any) -> Callable[[], None]:
    return lambda: write_status(run, **changes)


def end(run: Path, state: str = "complete", code: int = 0, message: str | None = None) -> Callable[[], None]:
    return changed(run, state=state, exit_code=code, message=message, under_way=0)


def test_plain_lines_come_only_when_a_run_is_further_and_the_answers_at_its_end(
    held: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other_rates, further = changed(held, documents_per_s=9.0, eta_s=3.0), changed(held, under_way=9)
    looks = look_by_steps(monkeypatch, nothing, other_rates, nothing, further, nothing, end(held))
    code, out, error = printed(capsys, "status", str(held), "--watch", "--every", "0.1")
    first, second, last, *answers = out.splitlines()
    assert (code, error, len(looks)) == (0, "", 6)
    assert first.startswith("running: shards 1/")
    assert "5 more under way, " in first
    assert "9 more under way, 9.0 documents/s" in second
    assert last.startswith("complete: shards 1/")
    assert any("members" in line for line in answers)
    assert "members" not in first + second


@pytest.mark.parametrize("state", ["incomplete", "failed"])
def test_a_watch_ends_with_3_where_the_run_stops_before_its_end(
    state: str, held: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        end(held, state, 3, "a shard\nis gone")()
        monkeypatch.setattr("pipeline.results.status.lock_is_live", lambda store: False)

    look_by_steps(monkeypatch, nothing, stop)
    code, out, _ = printed(capsys, "status", str(held), "--watch", "--every", "0.1")
    assert code == 3
    assert "a shard⟨U+000A⟩is gone" in out.splitlines()


def test_json_is_one_object_a_line_and_the_last_one_is_how_the_run_ended(
    held: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_by_steps(monkeypatch, nothing, nothing, changed(held, under_way=7), end(held))
    code, out, _ = printed(capsys, "status", str(held), "--watch", "--json", "--every", "0.1")
    objects = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(each["state"], each["under_way"]) for each in objects] == [("running", 5), ("running", 7), ("complete", 0)]
    assert [each["name"] for each in objects[-1]["selections"]] == ["members"]


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_a_run_that_has_ended_is_shown_once(state: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run, state=state)
    assert printed(capsys, "status", str(run), "--watch") == printed(capsys, "status", str(run))
    watched = printed(capsys, "status", str(run), "--watch", "--json")
    once = printed(capsys, "status", str(run), "--json")
    assert (watched[0], json.loads(watched[1])) == (once[0], json.loads(once[1]))


def test_a_run_directory_that_is_not_there_yet_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = printed(capsys, "status", str(tmp_path / "later"), "--watch")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "is not a run directory" in error
    assert printed(capsys, "status", str(tmp_path), "--every", "3")[0] == 2, "--every without --watch"
    assert printed(capsys, "status", str(tmp_path), "--watch", "--every", "0")[0] == 2


def test_a_trial_is_watched_with_the_audit_that_it_is_at(
    held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "trial"))
    with RunLock(store), TrialProgress(store, audits=2, points=1) as progress:

        def finish() -> None:
            progress.end_point()
            progress.__exit__(None, None, None)

        audit, further = lambda: progress.begin_audit(str(held)), changed(held, under_way=6)
        look_by_steps(monkeypatch, nothing, audit, further, progress.end_audit, nothing, finish)
        code, out, _ = printed(capsys, "status", store.url, "--watch", "--every", "0.1")
        lines = out.splitlines()
        assert code == 0
        assert lines[0] == "trial running: audits 0/2, points 0/1"
        assert all(f"; audit {held}: running, score: shards 1/" in line for line in lines[1:3])
        assert lines[3:] == ["trial running: audits 1/2, points 0/1", "trial complete: audits 1/2, points 1/1"]
        objects = printed(capsys, "status", store.url, "--watch", "--json")[1].splitlines()
        assert [json.loads(line)["state"] for line in objects] == ["complete"]
    assert printed(capsys, "status", store.url) == (0, f"{lines[-1]}\n", "")


def test_a_store_that_fails_for_a_moment_is_asked_again_and_a_lost_one_is_one_line(
    held: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    looks = look_by_steps(monkeypatch, nothing, fail, fail, nothing, fail, end(held))
    code, out, error = printed(capsys, "status", str(held), "--watch", "--every", "0.1")
    assert (code, len(looks)) == (0, 6)
    assert error.splitlines() == ["seenset: storage: [Errno 104] Connection reset by peer; looking again"] * 2
    assert [line.partition(":")[0] for line in out.splitlines()[:2]] == ["running", "complete"]

    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.3)
    look_by_steps(monkeypatch, nothing, *[fail] * 50)
    end(held, "running")()
    code, _, error = printed(capsys, "status", str(held), "--watch", "--every", "0.1")
    assert code == 2
    assert error.splitlines()[-1] == "seenset: storage: [Errno 104] Connection reset by peer"
    look_by_steps(monkeypatch, fail)
    code, _, error = printed(capsys, "status", str(held), "--watch")
    assert (code, error.count("\n")) == (2, 1), "what has never answered is not waited for"


def test_what_is_no_fault_of_a_store_is_raised(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_by_steps(monkeypatch, nothing, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["status", str(held), "--watch", "--every", "0.1"])


def test_a_run_is_shown_by_its_stage_and_no_work_is_counted_twice(
    held: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(printed(capsys, "status", str(held), "--json")[1])["under_way"] == 5
    write_status(held, shards_done=0)  # a shard has been finished since its driver wrote that
    assert json.loads(printed(capsys, "status", str(held), "--json")[1])["under_way"] == 0
    write_status(held, stage="paraphrase", shards_done=2, documents=17, scored=16, quarantined=1, under_way=0)
    code, out, _ = printed(capsys, "status", str(held))
    assert code == 0
    assert out.splitlines()[0].startswith("running, paraphrase: shards 2/")
    assert "documents 17, quarantined 1" in out
    write_status(held, state="incomplete", exit_code=3, message="2 shards are missing")
    code, out, _ = printed(capsys, "status", str(held))
    assert (code, out.startswith("running"), "missing" in out) == (0, True, False)


def test_a_terminal_is_redrawn_and_ctrl_c_ends_at_once(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, pressed = bytearray(), []

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 4096)
        screen.extend(data)
        if b"8 more under way" in screen and not pressed:
            pressed.append(time.monotonic())
            os.write(terminal, b"\x03")
        elif b"5 more under way" in screen:
            write_status(held, under_way=8)
        return data

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    command = [sys.executable, "-m", "ray_jobs.cli", "status", str(held), "--watch", "--every", "0.2"]
    assert os.waitstatus_to_exitcode(pty.spawn(command, read)) == 130
    assert time.monotonic() - pressed[0] < 5
    assert screen.endswith(b"seenset: no longer watched; the run is as it was\r\n")
    assert b"\x1b[2K" in screen, "lines are written over"
    assert b"\x1b[?25h" in screen, "the cursor is shown again"


def test_a_reader_that_is_gone_ends_a_watch_without_a_word(held: Path) -> None:
    command = (
        f"{sys.executable} -m ray_jobs.cli status {held} --watch --json --every 0.1 | head -1; echo ${{PIPESTATUS[0]}}"
    )
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert json.loads(process.stdout.readline())["state"] == "running"
    write_status(held, under_way=8)
    out, error = process.communicate(timeout=SECONDS)
    assert (out, error) == ("130\n", "")
