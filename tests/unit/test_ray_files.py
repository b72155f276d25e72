"""The files of cluster/ that Ray reads: its own checks take them, and they are in the package."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = sorted((ROOT / "cluster/ray").glob("*.yaml"))


def settings(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert {settings(path)["provider"]["type"] for path in CLUSTERS} == {"aws", "gcp", "local"}


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_ray_takes_a_cluster_file(path: Path) -> None:
    schema = json.loads(files("ray.autoscaler").joinpath("ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(settings(path), schema)
    with pytest.raises(jsonschema.ValidationError, match="worker_count"):
        jsonschema.validate({**settings(path), "worker_count": 2}, schema)
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(settings(path))  # with Ray's defaults in it, as `ray up` has it
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_of_a_file_lets_nobody_in_without_a_token(path: Path) -> None:
    read = settings(path)
    assert "~/.ray/auth_token" in read["file_mounts"]
    for commands in (read["head_start_ray_commands"], read["worker_start_ray_commands"]):
        starts = [command for command in commands if "ray start" in command]
        assert len(starts) == 1
        assert "RAY_AUTH_MODE=token" in starts[0].split("ray start")[0]
        assert "--dashboard-host" not in starts[0], "the dashboard is for who may log in to the head"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_names_extras_and_a_python_that_there_are(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = "\n".join(settings(path)["setup_commands"])
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', commands)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (python,) = re.findall(r"--python (3\.\d+) ", commands)
    assert project["requires-python"] == f">={python}"


def test_every_file_of_the_cluster_folder_is_in_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    packed = {path for pattern in patterns["cluster"] for path in (ROOT / "cluster").glob(pattern)}
    wanted = {
        path for folder in ("deepspeed", "grafana", "ray", "slurm") for path in (ROOT / "cluster" / folder).iterdir()
    }
    assert wanted <= packed
