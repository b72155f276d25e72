"""Two nodes for real, one of which has another transformers: preflight names it, and plan and run refuse it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import sentence

TWO_NODES = """
import json, os, subprocess, sys
from ray.cluster_utils import Cluster

other, audit, *commands = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
paths = f"{other}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
cluster.add_node(num_cpus=2, num_gpus=2, include_dashboard=False, env_vars={"PYTHONPATH": paths})
cluster.wait_for_nodes()
environment = {**os.environ, "RAY_ADDRESS": cluster.address, "COLUMNS": "250"}
for command in commands:
    words = [sys.executable, "-m", *command.split(), audit, "--set", "resources.gpus_per_actor=0"]
    if "gpus" in command:
        words = [sys.executable, "-m", *command.split()[:-1], audit, "--set", "resources.gpus_per_actor=4"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    print(json.dumps([command, done.returncode, done.stdout, done.stderr]))
cluster.shutdown()
"""


def on_two_nodes(other: Path, audit: Path, *commands: str) -> dict[str, tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each command; the second node looks for packages there first."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test" * 4}
    script = [sys.executable, "-c", TWO_NODES, str(other), str(audit), *commands]
    done = subprocess.run(script, capture_output=True, text=True, timeout=550, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {command: (code, out, err) for command, code, out, err in rows}


def write_package(folder: Path, name: str, version: str) -> Path:
    """The record of an installed package."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.slow
def test_a_node_with_another_version_is_named_before_anything_is_scored(
    tmp_path: Path, make_audit: Callable[..., Path]
) -> None:
    other = write_package(tmp_path / "other", "transformers", "4.0.1")
    resources = {"cluster": "auto", "actors": "auto"}
    audit = make_audit([sentence(i) for i in range(20)], [sentence(1000 + i) for i in range(20)], resources=resources)
    commands = ("cluster.preflight --json", "cluster.preflight gpus", "ray_jobs.cli plan", "ray_jobs.cli run")
    results = on_two_nodes(other, audit, *commands)
    code, out, err = results["cluster.preflight --json"]
    assert code == 2, err
    lines: list[dict[str, Any]] = json.loads(out)["lines"]
    red = [line for line in lines if line["state"] == "red"]
    assert {(line["check"], line["value"].partition(" (here")[0]) for line in red} == {
        ("versions", "transformers 4.0.1"),
        ("gpus", "Ray gives out 2 GPUs, the driver has 0"),
    }
    assert all(line["mend"] for line in red)
    (token,) = (line for line in lines if line["check"] == "token")
    assert token["state"] == "good"
    nodes = {line["node"] for line in lines} - {"cluster"}
    measured = {node: {line["check"] for line in lines if line["node"] == node} for node in nodes}
    assert len(nodes) == 2
    for checks in measured.values():
        assert {"clock", "model", "input", "run directory", "storage", "first batch", "/dev/shm", "memory"} <= checks
    assert {line["state"] for line in lines if line["check"] == "run directory"} == {"good"}
    code, out, err = results["cluster.preflight gpus"]
    assert code == 2, err
    assert "resources.gpus_per_actor is 4, the largest of 2 nodes has 2 GPUs and 2 CPUs" in out
    assert "Traceback" not in out + err
    for command in ("ray_jobs.cli plan", "ray_jobs.cli run"):
        code, _, err = results[command]
        assert code != 0
        assert "transformers 4.0.1 (here " in err
        assert "Traceback" not in err
    assert not list((tmp_path / "run").glob("preflight-*"))
