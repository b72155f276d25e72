"""The files of cluster/ that Ray reads: its own checks take them, and they are in the package."""

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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CLUSTERS = sorted((ROOT / "cluster/ray").glob("*.yaml"))


def settings(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_ray_takes_a_cluster_file_that_lets_nobody_in_without_a_token(path: Path) -> None:
    schema = json.loads(files("ray.autoscaler").joinpath("ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(settings(path), schema)
    with pytest.raises(jsonschema.ValidationError, match="worker_count"):
        jsonschema.validate({**settings(path), "worker_count": 2}, schema)
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(settings(path))  # with Ray's defaults in it, as `ray up` has it
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    read = settings(path)
    assert "~/.ray/auth_token" in read["file_mounts"]
    for commands in (read["head_start_ray_commands"], read["worker_start_ray_commands"]):
        (start,) = (command for command in commands if "ray start" in command)
        assert "RAY_AUTH_MODE=token" in start.split("ray start")[0]
        assert "--dashboard-host" not in start, "the dashboard is for who may log in to the head"
    setup = "\n".join(read["setup_commands"])
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', setup)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    (python,) = re.findall(r"--python (3\.\d+) ", setup)
    assert PROJECT["project"]["requires-python"] == f">={python}"


def test_the_package_has_every_cluster_file_and_one_for_each_kind_of_machine() -> None:
    assert {settings(path)["provider"]["type"] for path in CLUSTERS} == {"aws", "gcp", "local"}
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["cluster"]
    packed = {path for pattern in patterns for path in (ROOT / "cluster").glob(pattern)}
    for folder in ("deepspeed", "grafana", "ray", "slurm"):
        assert set((ROOT / "cluster" / folder).iterdir()) <= packed
