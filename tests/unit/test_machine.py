"""Where the work of an audit is done: threads of this process, or a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.audit import machine
from pipeline.audit.description import load_config
from pipeline.audit.machine import LOCAL_WORKERS, LocalMachine, local_machine, may_need_cluster, runs_locally
from pipeline.audit.plan import Plan, make_plan


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """All work is large, on a machine of so many cores and no GPU."""
    monkeypatch.setitem(machine.LOCAL_TOKENS, "cpu", 0)
    monkeypatch.setattr(machine, "_gpu_files", list)
    return lambda count: monkeypatch.setattr(machine, "usable_cores", lambda: count)


@pytest.fixture
def path(make_audit: Callable[..., Path]) -> Path:
    return make_audit(resources={"cluster": "auto", "actors": "auto"})


def plan_of(path: Path, *overrides: str) -> Plan:
    return make_plan(load_config(str(path), overrides))


def test_large_work_stays_on_a_machine_of_few_workers(path: Path, cores: Callable[[int], None]) -> None:
    cores(LOCAL_WORKERS)
    plan = plan_of(path)
    assert runs_locally(plan, False, 0)
    assert local_machine(plan.config.resources, 0) == LocalMachine(LOCAL_WORKERS, 0.0, 1)
    assert runs_locally(plan_of(path, "model.path=owner/name"), False, 0), "threads share one set of weights"
    assert not runs_locally(plan, True, 0), "a cluster is named"
    assert not runs_locally(plan, False, 2), "several GPUs"


def test_large_work_of_more_workers_is_done_by_a_cluster(path: Path, cores: Callable[[int], None]) -> None:
    cores(2 * LOCAL_WORKERS)
    assert not runs_locally(plan_of(path), False, 0)
    assert runs_locally(plan_of(path, "resources.cpus_per_actor=2"), False, 0)
    assert runs_locally(plan_of(path, "resources.actors=4"), False, 0)
    assert runs_locally(plan_of(path, "resources.cluster=local"), False, 0)


def test_small_work_stays_here_whatever_the_cores(
    path: Path, cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(2 * LOCAL_WORKERS)
    monkeypatch.setitem(machine.LOCAL_TOKENS, "cpu", 1e9)
    assert runs_locally(plan_of(path), False, 0)


def test_a_machine_with_one_gpu_may_need_a_cluster(
    path: Path, cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(2)
    assert not may_need_cluster(plan_of(path).config.resources, plan_of(path))
    holding = plan_of(path, "resources.gpus_per_actor=1")
    assert may_need_cluster(holding.config.resources, holding), "a GPU of another maker"
    monkeypatch.setattr(machine, "_gpu_files", lambda: ["/dev/nvidia0"])
    assert may_need_cluster(holding.config.resources, holding)
    monkeypatch.setitem(machine.LOCAL_TOKENS, "cuda", 0)
    plan = plan_of(path)
    assert may_need_cluster(plan.config.resources, plan), "Ray does what is large for one GPU"
