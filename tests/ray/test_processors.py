"""Two nodes whose processors differ: one decides the type for both, and the other is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_up import sentence

from pipeline.audit.manifest import read_run
from pipeline.models.arithmetic import FLAGS_VARIABLE
from pipeline.store.files import Store

TWO_NODES = f"""
import json, os, subprocess, sys
from ray.cluster_utils import Cluster

audit, *commands = sys.argv[1:]
flags = [{{"env_vars": {{"{FLAGS_VARIABLE}": words}}, "num_cpus": 2, "include_dashboard": False}}
         for words in ("avx2", "avx2 avx512f avx512_bf16")]
cluster = Cluster(initialize_head=True, head_node_args=flags[0])
cluster.add_node(**flags[1])
cluster.wait_for_nodes()
environment = {{**os.environ, "RAY_ADDRESS": cluster.address, "COLUMNS": "250"}}
for command in commands:
    words = [sys.executable, "-m", *command.split(), audit]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250)
    print(json.dumps([command, done.returncode, done.stdout, done.stderr]))
cluster.shutdown()
"""


@pytest.mark.slow
def test_nodes_that_differ_score_in_one_type_and_are_named(
    tmp_path: Path, tiny_model_folder: Path, make_audit: Callable[..., Path]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny_model_folder).to(torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(half)
    texts = [sentence(i) for i in range(60)]
    resources = {"cluster": "ray", "actors": 4}
    audit = make_audit(texts, [sentence(1000 + i) for i in range(40)], model={"path": str(half)}, resources=resources)
    commands = ["cluster.preflight --json", "ray_jobs.cli run"]
    script = [sys.executable, "-c", TWO_NODES, str(audit), *commands]
    done = subprocess.run(script, capture_output=True, text=True, timeout=550, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    (_, code, preflight, _), (_, run_code, out, err) = rows

    states = {line["state"]: line["value"] for line in json.loads(preflight)["lines"] if line["check"] == "processor"}
    assert set(states) == {"good", "note"}
    assert "most nodes have" in states["note"]
    assert code in (0, 2)
    assert run_code == 0, err
    warnings = [line for line in out.splitlines() if "its CPU has other flags" in line]
    assert len(warnings) == 1
    manifest, _ = read_run(Store(str(audit.parent / "run")))
    decided = {"avx2": "float32", "avx2 avx512f avx512_bf16": "bfloat16"}
    wanted = next(words for words in decided if f"not {words})" in warnings[0])
    assert manifest.fingerprint["dtype"] == decided[wanted]
