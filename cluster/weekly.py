"""`python -m cluster.weekly RAYJOB.yaml`: start the RayJob of this week on Kubernetes, and wait for its end.

The CronJob of cluster/kuberay/cronjob runs it in a pod. Its exit status is that of the scan: 0 done, 1 failed; 2 is
a user error, 75 an API that does not answer. The RayJob is named after the ISO week, so a restarted pod
finds the RayJob of its predecessor.
"""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import tenacity
import yaml

from pipeline.errors import ExitCode, UserError, one_line

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the token, the namespace and the certificate of a pod's service account."""

LOOK_SECONDS = 15.0
PATIENCE_SECONDS = 1800.0
"""Maximum time without an answer of the API, because control planes are upgraded."""

FAILED = ("Failed", "ValidationFailed")
"""Final states of a RayJob, retries included."""


class AwayError(Exception):
    """The API does not answer, or reports that it is unavailable."""


@dataclass(frozen=True, slots=True)
class RayJobs:
    """The RayJobs of one namespace, through the API of Kubernetes."""

    url: str
    account: Path = ACCOUNT
    patience: float = PATIENCE_SECONDS  # seconds
    pause: float = LOOK_SECONDS  # seconds between two requests

    def get(self, name: str) -> dict[str, Any] | None:
        """The RayJob of this name, or None."""
        answer = self._send("GET", f"/{name}")
        return None if answer.status_code == 404 else _checked(answer)

    def create(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Create a RayJob; None if its name is taken."""
        answer = self._send("POST", "", job)
        return None if answer.status_code == 409 else _checked(answer)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        namespace = (self.account / "namespace").read_text().strip()
        trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        place = f"{self.url}/apis/ray.io/v1/namespaces/{namespace}/rayjobs{path}"

        def once() -> httpx2.Response:
            token = (self.account / "token").read_text().strip()  # a new one comes every hour
            headers = {"Authorization": f"Bearer {token}"}
            try:
                answer = httpx2.request(
                    method, place, json=body, headers=headers, verify=trusted, trust_env=False, timeout=30
                )
            except httpx2.TransportError as error:
                raise AwayError(f"{place}: {error}") from error
            if answer.status_code == 429 or answer.status_code >= 500:
                raise AwayError(f"{place}: {answer.status_code} {answer.text}")
            return answer

        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(AwayError),
            wait=tenacity.wait_random_exponential(max=max(self.pause, 0.01)),
            stop=tenacity.stop_after_delay(self.patience),
            reraise=True,
        )
        return again(once)


def week_of(now: datetime) -> str:
    """The ISO week of a time in UTC, as in scan.sh but in lower case: 2026-w48."""
    return now.astimezone(UTC).strftime("%G-w%V")


def week_job(template: dict[str, Any], week: str, number: int, owner: tuple[str, str] | None) -> dict[str, Any]:
    """The RayJob of a week.

    Args:
        template: a RayJob.
        week: suffix of the name.
        number: number of the week's RayJob, from 1; another one follows a failed one.
        owner: name and uid of the Job that starts it, and whose removal removes it.
    """
    about = template["metadata"]
    name = "-".join([about["name"], week, *([str(number)] if number > 1 else [])])
    metadata = {"name": name, "labels": about.get("labels", {}), "annotations": about.get("annotations", {})}
    if owner is not None:
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner[0], "uid": owner[1]}
        metadata["ownerReferences"] = [reference]
    return {"apiVersion": template["apiVersion"], "kind": "RayJob", "metadata": metadata, "spec": template["spec"]}


def begin(jobs: RayJobs, template: dict[str, Any], week: str, owner: tuple[str, str] | None) -> dict[str, Any]:
    """The RayJob of this week: a running or finished one, or a new one.

    A failed RayJob is followed by another one, which resumes its run, unless the same Job started it.
    """
    number = 1
    while True:
        wanted = week_job(template, week, number, owner)
        job = jobs.get(wanted["metadata"]["name"]) or jobs.create(wanted)
        if job is None:
            continue  # another pod has created its RayJob in the meantime
        owners = {reference["uid"] for reference in job["metadata"].get("ownerReferences", [])}
        if _state(job) not in FAILED or (owner is not None and owner[1] in owners):
            return job
        number += 1


def follow(jobs: RayJobs, job: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Wait for the end of a RayJob, and report each new state. True if it is complete.

    Raises:
        UserError: the RayJob was deleted.
    """
    name, last = job["metadata"]["name"], None
    while True:
        state = _state(job)
        if state != last:
            say(f"{name}: {state}")
            last = state
        if state == "Complete" or state in FAILED:
            break
        time.sleep(jobs.pause)
        seen = jobs.get(name)
        if seen is None:
            raise UserError(f"the RayJob {name} was deleted before its end; what it finished is in its run directory")
        job = seen
    if state in FAILED:
        status = job["status"]
        say(f"{name}: {one_line(' '.join(str(status.get(key, '')) for key in ('reason', 'message')))}")
    return bool(state == "Complete")


def read_template(path: str) -> dict[str, Any]:
    """The only RayJob in a file of manifests.

    Raises:
        UserError: the file cannot be read, has none or several, or one without a name or a spec.
    """
    try:
        documents = [document for document in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")) if document]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a file of manifests: {one_line(str(error))}") from None
    kinds = [str(document.get("kind")) if isinstance(document, dict) else "no manifest" for document in documents]
    if kinds.count("RayJob") != 1:
        holds = ", ".join(kinds) or "nothing"
        raise UserError(f"{path} must hold one RayJob, as `kubectl kustomize` writes it; it holds: {holds}")
    template: dict[str, Any] = documents[kinds.index("RayJob")]
    about = template.get("metadata")
    if not isinstance(about, dict) or not about.get("name") or not {"apiVersion", "spec"} <= template.keys():
        raise UserError(
            f"{path}: its RayJob needs apiVersion, metadata.name and spec, as `kubectl kustomize` writes it"
        )
    return template


def start_week(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if len(given) != 1:
            raise UserError("usage: python -m cluster.weekly RAYJOB.yaml")
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise UserError("cluster.weekly runs in a pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set here")
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        jobs = RayJobs(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
        owner = (os.environ["JOB_NAME"], os.environ["JOB_UID"]) if "JOB_UID" in os.environ else None
        job = begin(jobs, read_template(given[0]), week_of(datetime.now(UTC)), owner)
        return 0 if follow(jobs, job, lambda line: print(line, flush=True)) else 1
    except UserError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:  # files of the service account, also an invalid certificate
        why = (
            f"{ACCOUNT} cannot be used: {one_line(str(error))}; the pod needs a service account with its token mounted"
        )
        print(f"error: {why} (automountServiceAccountToken: true)", file=sys.stderr)
        return 2
    except AwayError as error:
        print(f"error: no answer for half an hour: {one_line(str(error))}", file=sys.stderr)
        return int(ExitCode.BUSY)


def _state(job: dict[str, Any]) -> str:
    return str(job.get("status", {}).get("jobDeploymentStatus") or "New")


def _checked(answer: httpx2.Response) -> dict[str, Any]:
    if answer.is_error:
        raise UserError(f"the API of Kubernetes refused: {answer.status_code} {answer.text}")
    job: dict[str, Any] = answer.json()
    return job


if __name__ == "__main__":
    sys.exit(start_week())
