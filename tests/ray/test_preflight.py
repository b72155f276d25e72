"""Two nodes for real, one of which has another transformers: preflight names it, and plan and run refuse it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from made_up import MakeAudit
from two_nodes import on_two_nodes


@pytest.mark.slow
def test_a_node_with_another_version_is_named_before_anything_is_scored(tmp_path: Path, make_audit: MakeAudit) -> None:
    place = tmp_path / "other/transformers-4.0.1.dist-info"  # the record of an installed package
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.1\n")
    audit = make_audit(20, 20, resources={"cluster": "auto", "actors": "auto"})
    none, four = (["--set", f"resources.gpus_per_actor={gpus}"] for gpus in (0, 4))
    paths = f"{place.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # where the second node looks first
    (code, out, err), too_many, *ended = on_two_nodes(
        {"num_cpus": 2},
        {"num_cpus": 2, "num_gpus": 2, "env_vars": {"PYTHONPATH": paths}},
        ["cluster.preflight", "--json", str(audit), *none],
        ["cluster.preflight", str(audit), *four],
        *(["ray_jobs.cli", command, str(audit), *none] for command in ("plan", "run")),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="of-this-test" * 4,
    )
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
    code, out, err = too_many
    assert code == 2, err
    assert "resources.gpus_per_actor is 4, the largest of 2 nodes has 2 GPUs and 2 CPUs" in out
    assert "Traceback" not in out + err
    for code, _, err in ended:
        assert code != 0
        assert "transformers 4.0.1 (here " in err
        assert "Traceback" not in err
    assert not list((tmp_path / "run").glob("preflight-*"))
