"""Actors are counted as Ray places them: a share on one GPU, several GPUs on one node, CPUs beside them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.audit import ResourcesConfig
from pipeline.config.yaml import build
from pipeline.models.devices import CONTEXT_BYTES, cap_memory
from pipeline.run.machine import GPU_UNITS, ActorShape, Node, actor_shape, places, places_beside
from pipeline.stages.base import Placement
from pipeline.store.files import Store
from ray_jobs.actors import ShardActor, actors
from ray_jobs.cluster import versions_here
from tests.helpers.commands import user_error

NODES = st.lists(st.builds(Node, st.integers(0, 40).map(float), st.integers(0, 9).map(float)), min_size=1, max_size=5)
GPUS = st.one_of(st.just(0.0), st.floats(0.05, 1.0), st.integers(1, 9).map(float))


class Machine:
    """A node on which actors are put one after the other."""

    def __init__(self, node: Node) -> None:
        self.cpus = node.cpus
        self.gpus = [GPU_UNITS] * int(node.gpus)

    def put(self, gpus: float, cpus: int) -> bool:
        """Whether there was room for one more."""
        share = int(gpus * GPU_UNITS + 1e-6)
        whole = [index for index, left in enumerate(self.gpus) if left == GPU_UNITS]
        wide = [index for index, left in enumerate(self.gpus) if left >= share]
        chosen = wide[:1] if gpus < 1 else whole[: int(gpus)]
        if self.cpus < cpus or (gpus and len(chosen) < max(1, int(gpus))):
            return False
        self.cpus -= cpus
        for index in chosen if gpus else ():
            self.gpus[index] -= min(share, GPU_UNITS)
        return True


def fitting(machines: list[Machine], gpus: float, cpus: int) -> int:
    """How many actors found room, on all machines."""
    count = 0
    while any(machine.put(gpus, cpus) for machine in machines):
        count += 1
    return count


@given(nodes=NODES, gpus=GPUS, cpus=st.integers(1, 9))
def test_as_many_actors_are_counted_as_fit_one_by_one(nodes: list[Node], gpus: float, cpus: int) -> None:
    expected = fitting([Machine(node) for node in nodes], gpus, cpus)
    resources = ResourcesConfig(gpus_per_actor=gpus, cpus_per_actor=cpus)
    if expected == 0:
        assert "resources" in user_error(actor_shape, resources, nodes)
        return
    assert places(nodes, actor_shape(resources, nodes)) == expected


@given(nodes=NODES, gpus=GPUS, cpus=st.integers(1, 4), trainers=st.integers(0, 12))
def test_beside_trainings_only_actors_that_fit_count(nodes: list[Node], gpus: float, cpus: int, trainers: int) -> None:
    machines = [Machine(node) for node in nodes]
    started = sum(any(machine.put(float(gpus > 0), cpus) for machine in machines) for _ in range(trainers))
    shape = ActorShape(int(gpus * GPU_UNITS + 1e-6) / GPU_UNITS, cpus)
    if started == trainers:
        assert places_beside(nodes, shape, trainers) == fitting(machines, gpus, cpus)


def test_eight_gpus_at_three_tenths_hold_24_actors_and_what_fits_no_node_is_refused() -> None:
    nodes, resources = [Node(64.0, 8.0)], ResourcesConfig(gpus_per_actor=0.3)
    assert actors(resources, nodes, 1000)[:2] == (24, 48)
    assert actors(resources, nodes, 5)[:2] == (5, 5)
    assert actors(ResourcesConfig(gpus_per_actor=0.3, actors=30), nodes, 1000)[0] == 24
    assert actors(ResourcesConfig(gpus_per_actor=0.16667), nodes, 1000)[0] == 48  # a sixth, to what Ray tells apart
    assert actors(ResourcesConfig(gpus_per_actor=3), [Node(8.0, 4.0)] * 2, 1000)[0] == 2  # 8 GPUs, 2 of them left over
    two, behind = "the largest of 2 nodes has", "this machine has 0 GPUs and 8 CPUs"
    for nodes, gpus, cpus, message in (
        ([Node(16.0, 2.0), Node(64.0, 4.0)], 8, 1, f"gpus_per_actor is 8, {two} 4 GPUs and 64 CPUs"),
        ([Node(8.0)], 0.5, 1, f"gpus_per_actor is 0.5, {behind}"),
        ([Node(64.0), Node(2.0, 8.0)], "auto", 4, f"cpus_per_actor is 4 with 1 GPUs, {two} 8 GPUs and 2 CPUs"),
        ([Node(4.0), Node(8.0)], "auto", 16, f"cpus_per_actor is 16, {two} 0 GPUs and 8 CPUs"),
    ):
        resources = ResourcesConfig(gpus_per_actor=gpus, cpus_per_actor=cpus)  # type: ignore[arg-type]
        assert user_error(actor_shape, resources, nodes) == f"resources.{message}"
    for gpus in (1.5, 0.00001, 2.25):
        error = user_error(build, ResourcesConfig, {"gpus_per_actor": gpus})
        assert error.startswith("gpus_per_actor: input should be 'auto' or 0, a share of a GPU ")
        assert error.endswith(f", got {gpus:g}")


def test_actors_that_share_a_gpu_keep_to_their_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)
    stage = SimpleNamespace(
        name="score", make=lambda stage, placement: calls.append("load"), check_models=lambda hub: None
    )
    ShardActor(stage, Placement(0.3333), Store(str(tmp_path)), "driver", versions_here(), None)  # type: ignore[arg-type]
    for whole in (0.0, 1.0, 4.0):  # who shares no GPU has no limit
        cap_memory(whole)
    share, loaded = calls
    assert loaded == "load"
    assert 0.3 < share < 0.3333
    assert 3 * (share * (80 << 30) + CONTEXT_BYTES) <= 80 << 30
