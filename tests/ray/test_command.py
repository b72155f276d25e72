"""The command as a user has it: processes, exit codes, one line of error, a driver killed in mid-run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.store.files import Store
from pipeline.store.lock import lock_is_live
from tests.helpers.clusters import free_port, until, words_of
from tests.helpers.commands import refusal
from tests.helpers.made_up import MakeAudit, sentence

SEENSET = [sys.executable, "-m", "ray_jobs.cli"]


@pytest.mark.slow
def test_a_signal_leaves_a_run_on_a_cluster_that_resumes_and_one_line(make_audit: MakeAudit, tmp_path: Path) -> None:
    texts = [sentence(i, 60) for i in range(1000)], [sentence(10_000 + i) for i in range(40)]
    path = make_audit(*texts, resources={"cluster": "ray", "shard_bytes": 4000})
    process = subprocess.Popen(
        [*SEENSET, "run", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: list((tmp_path / "run/receipts/score").glob("*.json")))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "seenset: interrupted; the same command goes on from here\n")
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", 130)
    assert not lock_is_live(Store(str(tmp_path / "run")))


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.5, 1.5])
def test_a_signal_while_ray_starts_leaves_one_line_and_nothing_else(
    after: float, make_audit: MakeAudit, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds are those after the folder of the cluster appeared."""
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    command = [*SEENSET, "run", str(make_audit()), "--set", "resources.cluster=ray"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: list(short_folder.iterdir()))
    time.sleep(after)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "seenset: interrupted; the same command goes on from here\n")
    assert list(short_folder.iterdir()) == []
    assert time.monotonic() - began < 30
    assert [other for other in psutil.process_iter(["cmdline"]) if str(short_folder) in " ".join(words_of(other))] == []


def test_a_cluster_that_is_not_there_is_one_line(
    make_audit: MakeAudit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    error = refusal(capsys, "run", str(make_audit()), "--set", "resources.cluster=auto")
    assert f"no Ray cluster answers at RAY_ADDRESS {address}" in error


def test_a_ray_that_does_not_start_is_one_line(make_audit: MakeAudit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")
    command = [*SEENSET, "run", str(make_audit()), "--set", "resources.cluster=ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "Ray did not start on this machine in 3 attempts" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/ptmx"), reason="no pseudo-terminals here")
def test_a_terminal_gets_a_live_bar(make_audit: MakeAudit) -> None:
    import pty

    seen: list[bytes] = []

    def read(descriptor: int) -> bytes:
        seen.append(os.read(descriptor, 65536))
        return seen[-1]

    code = pty.spawn([*SEENSET, "run", str(make_audit())], read)
    assert os.waitstatus_to_exitcode(code) == 0
    assert b"\x1b[?25l" in b"".join(seen), "a bar hides the cursor"
    assert b"documents/s" in b"".join(seen)
