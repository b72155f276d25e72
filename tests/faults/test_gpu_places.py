"""On clusters whose nodes claim GPUs (to Ray they are numbers), no more actors are asked for than find a place."""

import json
import re

import pytest

from tests.helpers.clusters import python
from tests.helpers.made_up import MakeAudit
from tests.helpers.two_nodes import on_two_nodes

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


@pytest.mark.slow
def test_an_actor_larger_than_any_node_is_refused_by_plan_and_by_run(make_audit: MakeAudit) -> None:
    resources = {"cluster": "auto", "actors": "auto"}
    path = make_audit(20, 20, resources=resources)
    asked = [("plan", 4), ("plan", 3), ("run", 4)]  # ("run", 3) has a place, but no GPU here to load a model on
    more = ["--set", "model.dtype=float32"]  # else a GPU is asked
    commands = [["ray_jobs.cli", c, str(path), "--set", f"resources.gpus_per_actor={n}", *more] for c, n in asked]
    nodes = {"num_cpus": 4, "num_gpus": 2}, {"num_cpus": 6, "num_gpus": 3}
    refused, fits, run = on_two_nodes(*nodes, *commands, RAY_AUTH_MODE="disabled")
    assert (refused[0], fits[0], run[0]) == (2, 0, 2)
    for _, _, errors in (refused, run):
        assert "seenset: resources.gpus_per_actor is 4, the largest of 2 nodes has 3 GPUs and 6 CPUs" in errors


@pytest.mark.slow
def test_the_nodes_of_a_cluster_tell_their_gpus_or_that_they_have_none() -> None:
    done = python(NOT_THERE, seconds=400, RAY_AUTH_MODE="disabled")
    assert done.returncode == 0, done.stderr[-2000:]
    missing, missing_share, least, least_share, unlike = json.loads(done.stdout.splitlines()[-1])
    for line in (missing, missing_share):
        reason = "torch sees no GPU on a node that has one for Ray: install the torch of its CUDA there"
        assert re.fullmatch(rf"GPUs of the node at [\d.]+ \(\w+\), and 1 more cannot be used: {reason}", line)
    assert "Traceback" not in done.stderr
    assert "Unhandled error" not in done.stderr
    assert least[0] == least_share[0] == 24 << 30
    assert unlike.startswith("resources.deterministic needs GPUs of one model, the cluster has H100, L4: ")
