"""What scores are computed on, and the sizes of their batches, are part of what a run is."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pipeline.errors import UserError
from pipeline.models.devices import CPU, ENVIRONMENT, Device, compute_as
from pipeline.passes.budget import Budget
from pipeline.plan.description import build_config
from pipeline.plan.stage_plan import device_on_file, note_device
from pipeline.run.machine import LocalMachine
from pipeline.stages.base import Placement, Stage, StagePlan
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from ray_jobs.start import device_of_run

GIB = 1 << 30
H100 = Device(1.0, 76 * GIB)
Stages = Callable[..., tuple[Stage, ...]]


@pytest.fixture
def stages(tiny_model_folder: Path) -> Stages:
    """(device, resources) -> the stages of an audit that samples and takes gradients."""

    def make(device: Device = CPU, **resources: Any) -> tuple[Stage, ...]:
        described = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": {"audit": {"path": "a"}}}
        detectors = ["loss", "gradient_norm", {"samia": {"draws": 2}}]
        config = build_config({**described, "detectors": detectors, "resources": resources})
        return plan_stages(StagePlan(config, device))

    return make


def differing(one: Stage, other: Stage) -> set[str]:
    return {key for key in one.fingerprint if one.fingerprint[key] != other.fingerprint.get(key)} - {"reads"}


def test_device_and_budget_are_in_the_fingerprint_the_budget_as_a_number(stages: Stages) -> None:
    for here, there in zip(stages(), stages(H100), strict=True):
        assert "device" in differing(here, there)
    scoring = stages()[-1]
    assert differing(scoring, stages(H100)[-1]) == {"device", "batch_tokens", "gradient_tokens"}
    assert scoring.fingerprint["batch_tokens"] == scoring.fingerprint["gradient_tokens"] == 2048
    assert stages(batch_tokens=2048)[-1].fingerprint == scoring.fingerprint
    few = stages(Device(1.0, 4 * GIB), batch_tokens=512)[-1]
    assert (few.fingerprint["batch_tokens"], few.fingerprint["gradient_tokens"]) == (512, 512)
    assert stages(H100)[-1].fingerprint == stages(H100)[-1].fingerprint


def test_weights_that_leave_nothing_and_a_worker_on_another_device_are_refused(stages: Stages, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leave no memory for a batch on 1 GPUs of 1 GiB an actor; raise resources"):
        stages(Device(1.0, GIB))
    config = build_config({"run": "run", "model": {"path": str(tmp_path)}, "corpus": {"audit": {"path": "a"}}})
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r": 25\.1 GiB of weights leave no memory"):
        StagePlan(config, Device(1.0, 20 * GIB)).budget(config.model)
    assert StagePlan(config, Device(1.0, int(31.9 * GIB))).budget(config.model) == Budget(64, 1, 6)
    LlamaConfig(num_hidden_layers=8).save_pretrained(tmp_path / "small")
    pair = [config.model, config.model.model_copy(update={"path": str(tmp_path / "small")})]
    assert len({StagePlan(config, Device(1.0, 48 * GIB)).budget(*models) for models in (pair, pair[::-1])}) == 1
    for stage in stages(H100):
        with pytest.raises(UserError, match="this stage computes on cuda, and its worker has 0 GPUs, which is cpu"):
            stage.make(stage, Placement())


def test_deterministic_runs_are_held_to_one_model_of_gpu(stages: Stages) -> None:
    one, other = (replace(H100, deterministic=True, name=name) for name in ("H100", "A100"))
    assert differing(stages(one)[-1], stages(other)[-1]) == {"device"}
    assert differing(stages(one)[-1], stages(H100)[-1]) == {"device"}
    assert replace(CPU, deterministic=True).mark == "cpu"


def test_gradients_are_deterministic_where_that_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    compute_as("cpu", gradients=True)
    assert not torch.are_deterministic_algorithms_enabled()
    compute_as("cuda, deterministic on H100", gradients=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert ENVIRONMENT.items() <= os.environ.items()
    compute_as("cuda, deterministic on H100", gradients=False)
    assert not torch.are_deterministic_algorithms_enabled()
    compute_as("cuda", gradients=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_run_keeps_the_memory_that_it_was_begun_with(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    described = {"run": "r", "model": {"path": "m"}, "corpus": {"audit": {"path": "a"}}}
    resources = build_config({**described, "resources": {"gpu_memory": "40 GiB"}}).resources
    machine = LocalMachine(1, 1.0, 1)
    begun = device_of_run(resources, store, machine, waiting=True)
    assert begun == Device(1.0, 40 * GIB)
    note_device(store, begun)
    auto = resources.model_copy(update={"gpu_memory": "auto"})
    assert device_on_file(store, auto) == begun
    assert device_of_run(auto, store, LocalMachine(1, 0.5, 1), waiting=True) == begun  # more actors a GPU: same budget
    assert device_of_run(auto, store, LocalMachine(2, 0.0, 1), waiting=False) == begun  # nothing to do: nobody is asked
    assert device_of_run(auto, store, LocalMachine(2, 0.0, 1), waiting=True) == CPU  # which its receipts refuse
    other = resources.model_copy(update={"gpu_memory": 80 * GIB})
    assert device_of_run(other, store, machine, waiting=True).memory == 80 * GIB
