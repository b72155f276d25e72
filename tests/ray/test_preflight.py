"""Two nodes for real, one of which has another transformers: preflight names it, and plan and run refuse it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight import CHECKS
from tests.helpers.made_up import MakeAudit
from tests.helpers.two_nodes import on_two_nodes


@pytest.mark.slow
def test_a_node_with_another_version_is_named_before_anything_is_scored(tmp_path: Path, make_audit: MakeAudit) -> None:
    place = tmp_path / "other/transformers-4.0.1.dist-info"  # the record of an installed package
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.1\n")
    audit = make_audit(20, 20, resources={"cluster": "auto", "actors": "auto"})
    none = ["--set", "resources.gpus_per_actor=0"]
    paths = f"{place.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # where the second node looks first
    (code, out, err), alone, *ended = on_two_nodes(
        {"num_cpus": 2},
        {"num_cpus": 2, "num_gpus": 2, "env_vars": {"PYTHONPATH": paths}},
        ["cluster.preflight", "--json", str(audit), *none],
        ["cluster.preflight", str(audit), *none, "--set", "resources.cluster=local"],
        *(["ray_jobs.cli", command, str(audit), *none] for command in ("plan", "run")),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="of-this-test" * 4,
    )
    assert code == 2, err
    lines: list[dict[str, Any]] = json.loads(out)["lines"]
    red = [line for line in lines if line["outcome"] == "failed"]
    assert [(line["check"], line["value"].partition(" (here")[0]) for line in red] == [
        ("versions", "transformers 4.0.1")
    ]
    assert all(line["remedy"] for line in red)
    (other,) = {line["node"] for line in red}
    (good,) = {line["node"] for line in lines} - {other}
    assert {line["check"] for line in lines if line["node"] == good} == {*CHECKS, "versions"}
    code, out, err = alone
    assert code == 0, err
    assert "none of 4 lines red" in out
    for code, _, err in ended:
        assert code != 0
        assert "transformers 4.0.1 (here " in err
        assert "Traceback" not in err
    assert not list((tmp_path / "run").glob("preflight-*"))
