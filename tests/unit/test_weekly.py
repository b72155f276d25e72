"""What starts the week's RayJob: one RayJob a week, found again by a pod that starts again, against a stand-in API."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

import certifi
import pytest

from cluster.weekly import AwayError, RayJobs, begin, follow, start_week, week_of
from pipeline.errors import UserError

TEMPLATE = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "seenset", "namespace": "seenset", "labels": {"kueue.x-k8s.io/queue-name": "seenset"}},
    "spec": {"entrypoint": "bash /etc/seenset/scan.sh"},
}
OWNER = ("seenset-29400000", "uid-1")


class Kubernetes:
    """The little of Kubernetes' API that is asked: RayJobs of one namespace, each passing through given states."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.states: dict[str, list[str]] = {}
        self.next_states = ["Initializing", "Running", "Complete"]
        self.failures = 0  # answers of 503 before the next good one
        self.lose_answers = 0  # creations that are done and answered with 503
        self.tokens: list[str] = []

    def __call__(self, request: dict[str, Any], start: Callable[..., object]) -> list[bytes]:
        body = request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        self.tokens.append(request["HTTP_AUTHORIZATION"])
        if self.failures:
            self.failures -= 1
            code, answer = 503, {}
        elif request["REQUEST_METHOD"] == "GET":
            code, answer = self.find(request["PATH_INFO"].rpartition("/")[2])
        else:
            assert request["PATH_INFO"] == "/apis/ray.io/v1/namespaces/seenset/rayjobs"
            code, answer = self.create(json.loads(body))
        start(f"{code} Answer", [])
        return [json.dumps(answer).encode()]

    def find(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self.jobs:
            return 404, {"reason": "NotFound"}
        states, job = self.states[name], self.jobs[name]
        state = states.pop(0) if len(states) > 1 else states[0]
        job["status"] = {"jobDeploymentStatus": state, "reason": "AppFailed", "message": "exit code\n3"}
        return 200, job

    def create(self, job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = job["metadata"]["name"]
        if name in self.jobs:
            return 409, {"reason": "AlreadyExists"}
        self.jobs[name], self.states[name] = job, list(self.next_states)
        if self.lose_answers:
            self.lose_answers -= 1
            return 503, {}
        return 201, job


@pytest.fixture
def server() -> Iterator[WSGIServer]:
    with make_server("127.0.0.1", 0, Kubernetes()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def kubernetes(server: WSGIServer) -> Kubernetes:
    return server.get_app()


@pytest.fixture
def jobs(server: WSGIServer, tmp_path: Path) -> RayJobs:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("seenset")
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    return RayJobs(f"http://127.0.0.1:{server.server_port}", tmp_path, patience=5, pause=0.01)


def run(jobs: RayJobs, owner: tuple[str, str] | None = OWNER) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return follow(jobs, begin(jobs, TEMPLATE, "2026-w48", owner), lines.append), lines


def test_a_scan_is_started_once_and_followed_to_its_end(kubernetes: Kubernetes, jobs: RayJobs) -> None:
    states = ["New", "Initializing", "Running", "Complete"]
    assert run(jobs) == (True, [f"seenset-2026-w48: {state}" for state in states])
    (job,) = kubernetes.jobs.values()
    assert job["spec"] == TEMPLATE["spec"]
    assert job["metadata"]["labels"] == TEMPLATE["metadata"]["labels"]  # type: ignore[index]
    assert [each["uid"] for each in job["metadata"]["ownerReferences"]] == ["uid-1"]


def test_a_pod_that_starts_again_finds_what_it_began_and_reads_a_renewed_token(
    kubernetes: Kubernetes, jobs: RayJobs
) -> None:
    kubernetes.next_states = ["Running", "Running", "Running", "Complete"]
    begin(jobs, TEMPLATE, "2026-w48", OWNER)
    (jobs.account / "token").write_text("second\n")
    assert run(jobs)[0]
    assert run(jobs) == (True, ["seenset-2026-w48: Complete"])
    assert list(kubernetes.jobs) == ["seenset-2026-w48"]
    assert {*kubernetes.tokens} == {"Bearer first", "Bearer second"}


def test_a_failed_scan_fails_its_job_and_is_resumed_by_another(kubernetes: Kubernetes, jobs: RayJobs) -> None:
    kubernetes.next_states = ["Failed"]
    complete, lines = run(jobs)
    assert not complete
    assert lines[-1] == "seenset-2026-w48: AppFailed exit code 3"
    assert not run(jobs)[0]  # the same Job, in another pod: no second try of its own
    assert list(kubernetes.jobs) == ["seenset-2026-w48"]
    kubernetes.next_states = ["Complete"]
    assert run(jobs, ("by-hand", "uid-2"))[0]
    assert list(kubernetes.jobs) == ["seenset-2026-w48", "seenset-2026-w48-2"]


@pytest.mark.parametrize("lost", [0, 1])
def test_an_api_that_is_away_for_a_while_starts_no_second_scan(
    kubernetes: Kubernetes, jobs: RayJobs, lost: int
) -> None:
    kubernetes.failures, kubernetes.lose_answers = 3, lost
    assert run(jobs)[0]
    assert list(kubernetes.jobs) == ["seenset-2026-w48"]


def test_a_scan_that_somebody_deletes_and_an_api_that_stays_away_are_said(
    kubernetes: Kubernetes, tmp_path: Path, jobs: RayJobs
) -> None:
    job = begin(jobs, TEMPLATE, "2026-w48", OWNER)
    kubernetes.jobs.clear()
    with pytest.raises(UserError, match="was deleted before its end"):
        follow(jobs, job, lambda line: None)
    kubernetes.failures = 10**6
    with pytest.raises(AwayError, match="503"):
        begin(RayJobs(jobs.url, tmp_path, patience=0.1, pause=0.01), TEMPLATE, "2026-w48", OWNER)


def test_the_week_is_that_of_the_entry_point() -> None:
    """Both sides of midnight and of a year, in any zone; scan.sh takes `date -u +%G-W%V`."""
    assert week_of(datetime(2026, 11, 23, 3, tzinfo=UTC)) == "2026-w48"
    assert week_of(datetime(2027, 1, 3, 23, 59, tzinfo=UTC)) == "2026-w53"
    assert week_of(datetime(2027, 1, 4, 1, tzinfo=timezone(timedelta(hours=2)))) == "2026-w53"


@pytest.mark.parametrize(
    ("manifests", "line"),
    [
        (None, "cannot be read as a file of manifests"),
        ("a: [", "cannot be read as a file of manifests"),
        ("- a", "it holds: no manifest"),
        ("kind: ConfigMap\n---\nkind: Namespace\n", "it holds: ConfigMap, Namespace"),
        ("kind: RayJob", "needs apiVersion, metadata.name and spec"),
        ("{kind: RayJob, apiVersion: ray.io/v1, metadata: {name: scan}, spec: {}}", "needs a service account"),
    ],
)
def test_what_it_cannot_start_from_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    manifests: str | None,
    line: str,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    path = tmp_path / "rayjob.yaml"
    if manifests is not None:
        path.write_text(manifests)
    assert start_week([str(path)]) == 2
    error = capsys.readouterr().err
    assert line in error
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert start_week([]) == start_week(["rayjob.yaml"]) == 2
    assert f"{error}{capsys.readouterr().err}".count("\n") == 3
