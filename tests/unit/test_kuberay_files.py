"""The files of Kubernetes: what they say is what KubeRay, Kubernetes and Seenset take."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from kustomizations import Object, containers, render
from typer.main import get_command

from pipeline import __version__
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from ray_jobs.cli import app

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "cluster" / "kuberay"
DOCKERFILE = ROOT / "cluster" / "Dockerfile"
KUBERNETES = "1.33"
"""The oldest version whose fields the built-in kinds are held to."""

SCANS = ("base", "large")
"""Folders of a RayJob: as it stands, and with the values of its commented lines."""

COMMENTED = re.compile(r"^( +)(\w+): .*\n\1# \2: (.*)$", re.MULTILINE)
"""A line of the RayJob, and the commented line below it with another value."""

PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cluster/kuberay after the page's command that writes the RayJob of the CronJob."""
    place = tmp_path_factory.mktemp("kuberay")
    shutil.copytree(KUBERAY, place, dirs_exist_ok=True)
    shutil.copytree(place / "base", place / "large")
    text, changed = COMMENTED.subn(r"\1\2: \3", (place / "base/rayjob.yaml").read_text(encoding="utf-8"))
    assert changed == 8
    (place / "large/rayjob.yaml").write_text(text, encoding="utf-8")
    (job,) = render(place / "large")
    (place / "cronjob/rayjob.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def rendered(folder: Path) -> dict[str, list[Object]]:
    return {name: render(folder / name) for name in ("setup", *SCANS, "raycronjob", "cronjob")}


@pytest.fixture(scope="module")
def every(rendered: dict[str, list[Object]]) -> list[Object]:
    return [one for objects in rendered.values() for one in objects]


def of_kind(objects: list[Object], kind: str) -> Object:
    (one,) = (one for one in objects if one["kind"] == kind)
    return one


def pod_templates(node: Any) -> Iterator[Object]:
    if isinstance(node, list):
        for each in node:
            yield from pod_templates(each)
    elif isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for each in node.values():
            yield from pod_templates(each)


def jobs_of(every: list[Object]) -> list[Object]:
    """The spec of every RayJob, also of those that a schedule starts."""
    jobs = [one["spec"] for one in every if one["kind"] == "RayJob"]
    return [*jobs, *(one["spec"]["jobTemplate"] for one in every if one["kind"] == "RayCronJob")]


def test_every_folder_is_rendered_as_kubectl_renders_it(folder: Path, rendered: dict[str, list[Object]]) -> None:
    tool = next((name for name in ("kustomize", "kubectl") if shutil.which(name)), None)
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    command = ["kustomize", "build"] if tool == "kustomize" else ["kubectl", "kustomize"]
    for name, objects in rendered.items():
        environment = {**os.environ, "KUBECONFIG": os.devnull}
        done = subprocess.run([*command, str(folder / name)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        theirs = [one for one in yaml.safe_load_all(done.stdout) if one]
        assert sorted(map(_text, theirs)) == sorted(map(_text, objects)), name


def _text(one: Object) -> str:
    return json.dumps(one, sort_keys=True)


def test_kuberay_knows_every_field(every: list[Object]) -> None:
    schema = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    ours = [one for one in every if one["apiVersion"] == "ray.io/v1"]
    assert {one["kind"] for one in ours} == {"RayJob", "RayCronJob"}
    for one in ours:
        validator.validate(one)
    ours[0]["spec"]["backofLimit"] = 3
    assert not validator.is_valid(ours[0]), "a misspelt field"
    del ours[0]["spec"]["backofLimit"]


def test_kubernetes_knows_every_field(every: list[Object]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    built_in = [one for one in every if one["apiVersion"] != "ray.io/v1"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        for one in every
        for template in pod_templates(one)
    ]
    assert len(pods) > 6
    different = {_text(one): one for one in [*built_in, *pods]}
    for one in different.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_every_container_is_the_image_of_this_version_with_its_ray(every: list[Object]) -> None:
    assert {one["image"] for one in containers(every)} == {f"REGISTRY/seenset:{__version__}"}
    assert f"REGISTRY/seenset:{__version__}" in DOCKERFILE.read_text(encoding="utf-8")
    assert {job["rayClusterSpec"]["rayVersion"] for job in jobs_of(every)} == {PINNED["ray"]}


def test_gpus_memory_and_shared_memory_are_asked_for_as_they_are_limited(every: list[Object]) -> None:
    for job in jobs_of(every):
        groups = job["rayClusterSpec"]["workerGroupSpecs"]
        assert all(_limits(group)["nvidia.com/gpu"] > 0 for group in groups)
        for group in (job["rayClusterSpec"]["headGroupSpec"], *groups):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            assert container["resources"]["requests"] == container["resources"]["limits"]
            (shared,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
            (memory,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == shared)
            assert memory["medium"] == "Memory"
            sizes = [int(one.removesuffix("Gi")) for one in (memory["sizeLimit"], _limits(group)["memory"])]
            assert 2 * sizes[0] <= sizes[1]


def _limits(group: Object) -> Object:
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_no_container_is_root_and_no_job_is_open_to_who_reaches_it(every: list[Object]) -> None:
    for template in pod_templates(every):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == context
    assert all(job["rayClusterSpec"]["authOptions"] == {"mode": "token"} for job in jobs_of(every))


def test_no_file_holds_a_secret(every: list[Object]) -> None:
    assert "Secret" not in {one["kind"] for one in every}
    wanted = [variable for each in containers(every) for variable in each.get("env", [])]
    assert {variable["name"] for variable in wanted if re.search("TOKEN|KEY|SECRET", variable["name"])} == {"HF_TOKEN"}
    assert all("value" not in variable for variable in wanted if variable["name"] == "HF_TOKEN")


def test_a_retry_resumes_and_all_of_them_end_within_the_week(every: list[Object]) -> None:
    """The run directory is that of the ISO week: an attempt of the next week would begin another one."""
    schedules = [one["spec"]["schedule"] for one in every if one["kind"] in ("CronJob", "RayCronJob")]
    minute, hour, *days = schedules[0].split()
    assert set(schedules) == {schedules[0]}
    assert days == ["*", "*", "1"]
    left = timedelta(days=7) - timedelta(hours=int(hour), minutes=int(minute))
    for job in jobs_of(every):
        assert job["backoffLimit"] >= 1
        attempt = timedelta(seconds=job["activeDeadlineSeconds"] + job["ttlSecondsAfterFinished"])
        assert (job["backoffLimit"] + 1) * attempt < left
        assert job["preRunningDeadlineSeconds"] < job["activeDeadlineSeconds"]


def test_a_job_is_queued_by_kueue_whole(rendered: dict[str, list[Object]]) -> None:
    for name in SCANS:
        job = of_kind(rendered[name], "RayJob")
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "seenset"
        assert job["spec"]["shutdownAfterJobFinishes"] is True
        assert "suspend" not in job["spec"]  # Kueue sets it
        groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert all(group["replicas"] == group["minReplicas"] == group["maxReplicas"] for group in groups)


def test_the_commented_lines_change_machines_alone(rendered: dict[str, list[Object]]) -> None:
    small, large = (of_kind(rendered[name], "RayJob") for name in SCANS)
    for job, gpus in ((small, 1), (large, 64)):
        cluster = job["spec"]["rayClusterSpec"]
        groups = cluster["workerGroupSpecs"]
        assert sum(group["replicas"] * _limits(group)["nvidia.com/gpu"] for group in groups) == gpus
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            for key in ("replicas", "minReplicas", "maxReplicas"):
                group.pop(key, None)
            group["template"]["spec"]["containers"][0].pop("resources")
            group["template"]["spec"]["volumes"][0].pop("emptyDir")
    assert small == large


def test_the_schedule_starts_one_scan_at_a_time_and_may_do_no_more(rendered: dict[str, list[Object]]) -> None:
    cron = of_kind(rendered["cronjob"], "CronJob")
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    account = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["serviceAccountName"]
    binding, role = of_kind(rendered["setup"], "RoleBinding"), of_kind(rendered["setup"], "Role")
    assert [(each["name"], each["namespace"]) for each in binding["subjects"]] == [(account, "seenset")]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["rules"] == [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get"]}]
    accounts = {one["metadata"]["name"] for one in rendered["setup"] if one["kind"] == "ServiceAccount"}
    assert {pod["spec"]["serviceAccountName"] for pod in pod_templates(list(rendered.values()))} == accounts
    (starter,) = containers(cron)
    bash, script, manifest = starter["command"]
    (mount,) = starter["volumeMounts"]
    files = of_kind(rendered["cronjob"], "ConfigMap")["data"]
    assert bash == "bash"
    assert {f"{mount['mountPath']}/{name}" for name in files} == {script, manifest}
    assert [one["kind"] for one in yaml.safe_load_all(files["rayjob.yaml"])] == ["RayJob"]
    assert set(re.findall(r"kubectl (\w+)", files["week.sh"])) - {"has"} == {"patch", "create", "get"}
    assert "kubectl patch --local" in files["week.sh"], "the account may not patch"


def test_every_config_map_that_is_mounted_is_made(rendered: dict[str, list[Object]]) -> None:
    made = {
        one["metadata"]["name"] for name in ("setup", "cronjob") for one in rendered[name] if one["kind"] == "ConfigMap"
    }
    pods = [template["spec"] for template in pod_templates(list(rendered.values()))]
    mounted = {
        volume["configMap"]["name"] for pod in pods for volume in pod.get("volumes", []) if "configMap" in volume
    }
    assert mounted == made


def test_the_entry_point_runs_the_scan_of_the_iso_week(rendered: dict[str, list[Object]], every: list[Object]) -> None:
    """A second job of the week has the same run directory, so that it goes on with what the week has."""
    script = of_kind(rendered["setup"], "ConfigMap")["data"]["scan.sh"]
    assert {job["entrypoint"] for job in jobs_of(every)} == {"bash /etc/seenset/scan.sh"}
    shown = 'seenset() { printf "%s\\n" "$@"; }\n' + script  # what it would run, without running it
    environment = {**os.environ, "SEENSET_SCANS": "/scans", "SEENSET_AUDIT": "/audit.yaml"}
    weeks = {f"{datetime.now(UTC):%G-W%V}"}
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True, env=environment)
    weeks.add(f"{datetime.now(UTC):%G-W%V}")
    words = done.stdout.splitlines()
    assert words[:2] == ["run", "/audit.yaml"]
    assert words[words.index("--set") + 1] in {f"run=/scans/{week}" for week in weeks}
    options = {option for each in get_command(app).commands["run"].params for option in each.opts}  # type: ignore[attr-defined]
    assert {word for word in words if word.startswith("--")} <= options


def test_the_audit_of_the_config_map_is_an_audit(
    rendered: dict[str, list[Object]], tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Loaded as it stands, and planned with files of this machine in the place of the bucket's."""
    (tmp_path / "audit.yaml").write_text(of_kind(rendered["setup"], "ConfigMap")["data"]["audit.yaml"])
    config = load_config(str(tmp_path / "audit.yaml"))
    assert all(selection.alpha == config.series.alpha for selection in config.selections), "the ledger says the level"
    assert config.resources.cluster == "ray"
    paths = [config.run, config.series.ledger, config.corpus.audit.path, config.corpus.unseen.path]  # type: ignore[union-attr]
    assert all(path.startswith("s3://BUCKET/") for path in paths), "what a pod writes to itself is lost with it"

    local = ["model.path=" + str(tiny_model_folder), f"run={tmp_path}/run", f"series.ledger={tmp_path}/ledger"]
    for role, count in (("audit", 40), ("unseen", 30)):
        pq.write_table(
            pa.table({"id": range(count), "text": [f"text {i}" for i in range(count)]}), tmp_path / f"{role}.parquet"
        )
        local.append(f"corpus.{role}.path={tmp_path}/{role}.parquet")
    planned = make_plan(load_config(str(tmp_path / "audit.yaml"), local))
    assert {shard.role for shard in planned.shards} == {"audit", "unseen"}
