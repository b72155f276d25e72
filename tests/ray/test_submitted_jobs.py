"""`ray job submit` of an audit to a cluster that somebody started: killed, stopped, submitted again."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import psutil
import pytest

from tests.helpers.clusters import free_port, shared_cluster, until
from tests.helpers.finished import run, selection_digest
from tests.helpers.made_up import MakeAudit, sentence

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads the processes of Linux")]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SCAN = str(files("cluster").joinpath("kuberay/setup/scan.sh"))
SEENSET = [sys.executable, "-m", "ray_jobs.cli"]


@dataclass(frozen=True)
class Head:
    """A cluster of one node, with a dashboard and a token."""

    dashboard: str
    environment: dict[str, str]

    def job(self, verb: str, *rest: str) -> subprocess.CompletedProcess[str]:
        """A command of `ray job`."""
        command = [*RAY, "job", verb, "--address", self.dashboard, *rest]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, env=self.environment, text=True, timeout=600, **pipes)

    def state(self, name: str) -> str:
        """How a job is."""
        shown = self.job("status", name).stdout
        states = ("SUCCEEDED", "FAILED", "STOPPED", "RUNNING", "PENDING")
        return next((state for state in states if state in shown.upper()), shown)

    def wait(self, name: str, state: str) -> None:
        """Until a job is in a state."""
        until(lambda: self.state(name) == state, pause=0.5)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    (tmp_path / "token").write_text(os.urandom(16).hex())
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "COLUMNS": "300"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    dashboard = free_port()
    options = [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--object-store-memory=100000000"]
    options += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
    with shared_cluster(*options, **environment):
        head = Head(f"http://127.0.0.1:{dashboard}", {**os.environ, **environment})
        until(lambda: head.job("list").returncode == 0, 90, pause=1)
        yield head


@pytest.mark.timeout(1200)
def test_a_submitted_audit_that_is_killed_and_stopped_goes_on_when_submitted_again(
    head: Head, make_audit: MakeAudit, tmp_path: Path
) -> None:
    path = make_audit(
        [sentence(i, 80) for i in range(1000)],
        [sentence(10_000 + i, 60) for i in range(60)],
        resources={"shard_bytes": 2000, "cluster": "auto", "actors": 1},
        selections=[{"name": "members", "detectors": ["zlib"], "procedure": "bh", "alpha": 0.2}],
    )
    run(path, f"run={tmp_path / 'whole'}", "resources.cluster=local")
    command = [*SEENSET, "run", str(path)]
    folder = tmp_path / "run"

    def done() -> set[str]:
        return {file.name for file in (folder / "receipts/score").glob("[a-z]*.json")}

    def drivers() -> list[psutil.Process]:
        """Of this run: the command, and the child in which it works."""
        return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-3:] == command[-3:]]

    head.job("submit", "--submission-id", "first", "--no-wait", "--", *command)
    until(done)
    for driver in drivers():
        with contextlib.suppress(psutil.NoSuchProcess):
            driver.kill()
    head.wait("first", "FAILED")
    after_kill = done()
    assert not (folder / "selection").exists(), "it should have died in mid-run"

    head.job("submit", "--submission-id", "second", "--no-wait", "--", *command)
    until(lambda: len(done()) > len(after_kill))
    head.job("stop", "second")
    head.wait("second", "STOPPED")
    after_stop = {name: (folder / "receipts/score" / name).stat().st_mtime_ns for name in done()}
    assert not (folder / "selection").exists(), "it should have been stopped in mid-run"
    assert set(after_stop) > after_kill

    followed = head.job("submit", "--submission-id", "third", "--", *command)
    assert followed.returncode == 0, followed.stdout
    assert "report:" in followed.stdout, "what the command prints is followed"
    assert "is open to" not in followed.stdout, "a token closes it"
    times = {name: (folder / "receipts/score" / name).stat().st_mtime_ns for name in done()}
    assert {name: times[name] for name in after_stop} == after_stop, "finished shards were scored again"
    assert selection_digest(folder) == selection_digest(tmp_path / "whole")

    failing = head.job("submit", "--submission-id", "selected", "--", *command, "--fail-if-selected")
    assert (failing.returncode, head.state("selected")) == (1, "FAILED"), "Ray Jobs know done and failed alone"
    assert json.loads((folder / "status.json").read_text())["exit_code"] in (4, 5)
    succeeded = head.job("submit", "--submission-id", "as-zero", "--", "bash", SCAN, str(path), "--fail-if-selected")
    assert (succeeded.returncode, head.state("as-zero")) == (0, "SUCCEEDED")
    assert json.loads((folder / "status.json").read_text())["exit_code"] in (4, 5)
