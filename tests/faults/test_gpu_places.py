"""On clusters whose nodes claim GPUs (to Ray they are numbers), no more actors are asked for than find a place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import sentence
from two_nodes import on_two_nodes

EIGHT_GPUS = """
import json, sys
from types import SimpleNamespace
import ray, ray.data
from ray.util import placement_group
from pipeline.audit.description import load_config
from pipeline.audit.plan import make_plan
from pipeline.store.files import Store
from ray_jobs.actors import map_shards

ray.init("local", num_cpus=64, num_gpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

class Pool(Exception):
    pass

def pool(min_size, **settings):
    raise Pool(min_size)

ray.data.ActorPoolStrategy = pool
plan = make_plan(load_config(sys.argv[1]))
try:
    stage, store = SimpleNamespace(name="score"), Store(plan.config.run)
    next(map_shards(stage, plan.config.resources, plan.shards, store, "driver"))
except Pool as asked:
    size = asked.args[0]
ready = [placement_group([{"GPU": 0.3, "CPU": 1}] * size).wait(30), placement_group([{"GPU": 0.3}]).wait(2)]
print(json.dumps([len(plan.shards), size, *ready]))
"""

NOT_THERE = """
import json, os
import ray
from ray.cluster_utils import Cluster
from pipeline.errors import UserError
from ray_jobs.cluster import gpus_of_cluster

def claim():
    import os
    from types import SimpleNamespace
    import torch
    memory, name = os.environ["CLAIMED_GPU"].split() if "CLAIMED_GPU" in os.environ else (0, "")
    torch.cuda.is_available = lambda: bool(name)
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(total_memory=int(memory) << 30, name=name)

def answer(gpus, same):
    try:
        return gpus_of_cluster(gpus, same)
    except UserError as error:
        return str(error)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2, num_gpus=2, env_vars={"CLAIMED_GPU": "80 H100"})
cluster.add_node(num_cpus=2, num_gpus=1, env_vars={"CLAIMED_GPU": "24 L4"})
cluster.wait_for_nodes()
settings = {"log_to_driver": False, "logging_level": "ERROR"}
ray.init(cluster.address, **settings)
answers = [answer(1.0, False), answer(0.5, True)]
ray.shutdown()
ray.init(cluster.address, runtime_env={"worker_process_setup_hook": claim}, **settings)
answers += [answer(1.0, False), answer(0.3, False), answer(1.0, True)]
print(json.dumps(answers))
ray.shutdown()
cluster.shutdown()
"""


def run_script(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_eight_gpus_at_three_tenths_are_asked_for_24_actors(make_audit: Callable[..., Path]) -> None:
    resources = {"cluster": "ray", "actors": "auto", "gpus_per_actor": 0.3, "shard_bytes": 100}
    path = make_audit([sentence(i) for i in range(200)], [sentence(1000 + i) for i in range(50)], resources=resources)
    shards, size, all_fit, one_more_fits = json.loads(run_script(EIGHT_GPUS, path).stdout.splitlines()[-1])
    assert shards > 26
    assert (size, all_fit, one_more_fits) == (24, True, False)


@pytest.mark.slow
def test_an_actor_larger_than_any_node_is_refused_by_plan_and_by_run(make_audit: Callable[..., Path]) -> None:
    resources = {"cluster": "auto", "actors": "auto"}
    texts = [sentence(i) for i in range(20)], [sentence(1000 + i) for i in range(20)]
    path = make_audit(*texts, resources=resources)
    asked = [("plan", 4), ("plan", 3), ("run", 4)]  # ("run", 3) has a place, but no GPU here to load a model on
    more = ["--set", "model.dtype=float32"]  # else a GPU is asked
    commands = [["ray_jobs.cli", c, str(path), "--set", f"resources.gpus_per_actor={n}", *more] for c, n in asked]
    nodes = {"num_cpus": 4, "num_gpus": 2}, {"num_cpus": 6, "num_gpus": 3}
    refused, fits, run = on_two_nodes(*nodes, *commands, RAY_AUTH_MODE="disabled")
    assert (refused[0], fits[0], run[0]) == (2, 0, 2)
    for _, _, errors in (refused, run):
        assert "seenset: resources.gpus_per_actor is 4, the largest of 2 nodes has 3 GPUs and 6 CPUs" in errors


@pytest.mark.slow
def test_the_nodes_of_a_cluster_tell_their_gpus_or_that_they_have_none(tmp_path: Path) -> None:
    done = run_script(NOT_THERE, tmp_path)
    missing, missing_share, least, least_share, unlike = json.loads(done.stdout.splitlines()[-1])
    for line in (missing, missing_share):
        reason = "torch sees no GPU on a node that has one for Ray: install the torch of its CUDA there"
        assert re.fullmatch(rf"GPUs of the node at [\d.]+ \(\w+\), and 1 more cannot be used: {reason}", line)
    assert "Traceback" not in done.stderr
    assert "Unhandled error" not in done.stderr
    assert least[0] == least_share[0] == 24 << 30
    assert unlike.startswith("resources.deterministic needs GPUs of one model, the cluster has H100, L4: ")
