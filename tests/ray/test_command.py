"""The command as a user has it: processes, exit codes, one line of error, a driver killed in mid-run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import here, refusal
from finished import selection_digest
from made_up import sentence

from pipeline.store.files import Store
from pipeline.store.lock import RunLock, lock_is_live
from pipeline.store.receipts import read_receipts

MakeAudit = Callable[..., Path]
SEENSET = [sys.executable, "-m", "ray_jobs.cli"]


def seenset(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "COLUMNS": "200"}
    return subprocess.run([*SEENSET, *arguments], capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["local", "ray"])
def test_a_killed_driver_resumes_to_the_same_bytes(
    cluster: str, make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_audit([sentence(i, 60) for i in range(500)], [sentence(10_000 + i, 60) for i in range(100)]))
    shards = "resources.shard_bytes=4000"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    here(capsys, "run", path, "--set", f"run={whole}", "--set", shards)

    command = [*SEENSET, "run", path, "--set", f"run={cut}", "--set", shards, "--set", f"resources.cluster={cluster}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    total = len(list((whole / "receipts/score").iterdir()))
    deadline = time.monotonic() + 120
    while len(list((cut / "receipts/score").glob("*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    drivers = psutil.Process(process.pid).children()  # one on a cluster: it dies with its parent
    process.send_signal(signal.SIGKILL)
    process.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        while drivers and drivers[0].status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
    done = len(list((cut / "receipts/score").glob("[a-z]*.json")))
    assert 3 <= done < total, "the driver should have died in mid-run"
    status = json.loads(here(capsys, "status", str(cut), "--json", code=3)[0])
    assert status["state"] == "incomplete"
    assert status["shards_done"] >= done

    before = {p.name: p.stat().st_mtime_ns for p in (cut / "receipts/score").glob("[a-z]*.json")}
    here(capsys, "run", path, "--set", f"run={cut}", "--set", shards)
    assert selection_digest(cut) == selection_digest(whole)
    after = {p.name: p.stat().st_mtime_ns for p in (cut / "receipts/score").glob("[a-z]*.json")}
    assert {name: after[name] for name in before} == before, "finished shards were scored again"
    assert sum(r.n_in for r in read_receipts(Store(str(cut)), "score")) == 600


def test_a_run_from_plan_to_report(make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = [sentence(i, 80) for i in range(60)]  # which zlib takes for members: enough to select some
    path, folder = str(make_audit(longer)), str(tmp_path / "run")
    planned = json.loads(here(capsys, "plan", path, "--json")[0])
    assert planned["roles"]["unseen"]["shards"] >= 1
    assert planned["selections"][0]["minimum_selectable"] >= 1
    assert planned["estimated_seconds_one_worker"] > 0
    assert "documents" in here(capsys, "plan", path)[0]
    assert not (tmp_path / "run").exists(), "a plan writes nothing"

    done = seenset("run", path)
    assert done.returncode == 0, done.stderr
    assert "documents/s" in done.stdout
    assert "\x1b" not in done.stdout, "no bar and no colours where nobody watches"
    assert (tmp_path / "run/report/report.html").exists()

    again = json.loads(here(capsys, "run", path, "--json")[0])
    assert again["state"] == "complete"
    status = json.loads(here(capsys, "status", folder, "--json")[0])
    assert (status["state"], status["documents"], status["exit_code"]) == ("complete", 100, 0)
    assert "complete" in here(capsys, "status", folder)[0]
    chosen = json.loads(here(capsys, "select", folder, "--set", "selections.0.alpha=0.3", "--json")[0])
    assert chosen["selections"][0]["alpha"] == 0.3
    assert "report.html" in here(capsys, "report", folder, "--no-text")[0]
    assert longer[0] not in (tmp_path / "run/report/report.html").read_text()
    some = ["--set", "selections.0.detectors=[zlib]", "--fail-if-selected"]
    here(capsys, "select", folder, *some, code=5)  # their words give the longer ones away


def test_an_error_that_a_user_can_mend_is_one_line(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_audit())
    assert "nothing.yaml" in refusal(capsys, "run", "nothing.yaml")
    assert "not a run directory" in refusal(capsys, "status", str(tmp_path / "nothing"))
    assert "not a run directory" in refusal(capsys, "report", str(tmp_path / "nothing"))
    assert refusal(capsys, "run")
    assert refusal(capsys, "audit", path)
    assert "--limit" in refusal(capsys, "plan", path, "--limit", "0")
    done = seenset("plan", path, "--set", "selections.0.alpha=7")
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")


@pytest.mark.parametrize(("cluster", "number"), [("local", signal.SIGINT), ("ray", signal.SIGTERM)])
def test_a_signal_leaves_a_run_that_resumes_and_one_line(
    cluster: str, number: signal.Signals, make_audit: MakeAudit, tmp_path: Path
) -> None:
    path = str(make_audit([sentence(i, 60) for i in range(1000)], [sentence(10_000 + i) for i in range(40)]))
    settings = ["resources.shard_bytes=4000", f"resources.cluster={cluster}"]
    command = [*SEENSET, "run", path, *(word for setting in settings for word in ("--set", setting))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run/receipts/score").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "seenset: interrupted; the same command goes on from here\n")
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", 130)
    assert not lock_is_live(Store(str(tmp_path / "run")))


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.5, 1.5])
def test_a_signal_while_ray_starts_leaves_one_line_and_nothing_else(
    after: float, make_audit: MakeAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds are those after the folder of the cluster appeared."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:  # short, for the names of sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        command = [*SEENSET, "run", str(make_audit()), "--set", "resources.cluster=ray"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while not list(Path(folder).iterdir()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(after)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (130, "seenset: interrupted; the same command goes on from here\n")
        assert list(Path(folder).iterdir()) == []
        assert time.monotonic() - began < 30
        left = [other for other in psutil.process_iter(["cmdline"]) if folder in " ".join(other.info["cmdline"] or ())]
        assert left == []


def test_a_cluster_that_is_not_there_is_one_line(
    make_audit: MakeAudit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    error = refusal(capsys, "run", str(make_audit()), "--set", "resources.cluster=auto")
    assert f"no Ray cluster answers at RAY_ADDRESS {address}" in error


def test_a_ray_that_does_not_start_is_one_line(make_audit: MakeAudit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")
    done = seenset("run", str(make_audit()), "--set", "resources.cluster=ray")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "Ray did not start on this machine in 3 attempts" in done.stderr


def test_a_second_driver_on_a_live_run_exits_75(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_audit())
    with RunLock(Store(str(tmp_path / "run"))):
        assert f"held by process {os.getpid()}" in refusal(capsys, "run", path, code=75)


@pytest.mark.skipif(not os.path.exists("/dev/ptmx"), reason="no pseudo-terminals here")
def test_a_terminal_gets_a_live_bar(make_audit: MakeAudit) -> None:
    import pty

    path = str(make_audit())
    seen = b""

    def read(descriptor: int) -> bytes:
        nonlocal seen
        data = os.read(descriptor, 65536)
        seen += data
        return data

    code = pty.spawn([*SEENSET, "run", path], read)
    assert os.waitstatus_to_exitcode(code) == 0
    assert b"\x1b[?25l" in seen, "a bar hides the cursor"
    assert b"documents/s" in seen
