"""Where the work of an audit is done, and threads that share weights make the rows that a single worker makes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.audit import ResourcesConfig
from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.load import check_model, open_model
from pipeline.models.sharing import SharedModels
from pipeline.plan.description import load_config
from pipeline.run import machine
from pipeline.run.machine import LOCAL_WORKERS, LocalMachine, local_machine, may_need_cluster, runs_locally
from pipeline.run.plan import Plan, make_plan
from pipeline.stages.base import BatchSize, Placement
from pipeline.stages.events import Advance, Failure, Ready
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from tests.helpers.commands import user_error

MakePlan = Callable[..., Plan]


@pytest.fixture
def plan_of(make_audit: Callable[..., Path]) -> MakePlan:
    """Plans an audit of 100 documents with these resources."""

    def plan_of(**resources: Any) -> Plan:
        resources = {"cluster": "auto", "actors": "auto", "shard_bytes": 400, "batch_tokens": 64, **resources}
        detectors = ["loss", "lowercase", "min_k_plus_plus", "gradient_norm"]
        return make_plan(load_config(str(make_audit(detectors=detectors, selections=[], resources=resources))))

    return plan_of


def test_rows_are_the_same_bytes_however_many_threads_make_them(plan_of: MakePlan, tmp_path: Path) -> None:
    plan, threads = plan_of(shard_bytes=1500, batch_tokens=1), torch.get_num_threads()
    (stage,), tables = plan_stages(plan.config), []
    worker = stage.make(stage, Placement())
    assert (worker.window.kept, worker.batch_size) == (512, BatchSize(1, 64)), "several windows a shard"
    for workers in (1, 4):
        store = Store(f"{tmp_path}/run-{workers}")
        events = list(finish_shards(stage, plan.shards, store, workers))
        assert any(isinstance(e, Ready) for e in events)
        assert sum(e.documents for e in events if isinstance(e, Advance)) >= 100
        receipts = [e for e in events if isinstance(e, Receipt)]
        tables.append({receipt.shard: store.read_table(receipt.data) for receipt in receipts})
    assert tables[0] == tables[1]
    assert tables[0].keys() == {shard.id for shard in plan.shards}
    assert torch.get_num_threads() == threads


def test_a_model_opened_beside_others_has_its_dtype(tiny_model_folder: Path) -> None:
    """While transformers builds a model, its dtype is what every thread's torch takes by default."""
    half, single = (ModelConfig(path=str(tiny_model_folder), dtype=dtype) for dtype in ("bfloat16", "float32"))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(40):
            other = pool.submit(check_model, single)
            assert {parameter.dtype for parameter in open_model(half).model.parameters()} == {torch.bfloat16}
            other.result()


def test_weights_are_shared_and_layers_and_tokenizers_are_not(tiny_model_folder: Path) -> None:
    shared = SharedModels()
    one, other = (shared.copy_model(open_model, ModelConfig(path=str(tiny_model_folder)), 0) for _ in range(2))
    weights = dict(one.model.named_parameters())
    assert weights
    assert all(weight.data_ptr() == weights[name].data_ptr() for name, weight in other.model.named_parameters())
    assert not {id(module) for module in one.model.modules()} & {id(module) for module in other.model.modules()}
    assert one.tokenizer is not other.tokenizer


def test_a_damaged_file_fails_its_shards_and_a_missing_model_the_stage(plan_of: MakePlan, tmp_path: Path) -> None:
    plan = plan_of()
    (stage,), store = plan_stages(plan.config), Store(plan.config.run)
    object.__setattr__(plan.shards[0], "path", str(tmp_path / "elsewhere.jsonl"))
    events = list(finish_shards(stage, plan.shards, store, workers=2))
    assert [event.shard for event in events if isinstance(event, Failure)] == [plan.shards[0].id]
    assert sum(isinstance(event, Receipt) for event in events) == len(plan.shards) - 1
    object.__setattr__(stage.settings, "model", ModelConfig(path=str(tmp_path / "gone")))
    assert "gone" in user_error(list, finish_shards(stage, plan.shards, store, workers=2))


def on_machine(patch: pytest.MonkeyPatch, cores: int, small: float = 0.0) -> None:
    """Take this machine for one of so many cores without a GPU, on which so many tokens are small work."""
    patch.setattr(machine, "usable_cores", lambda: cores)
    patch.setattr(machine, "_gpu_files", list)
    patch.setitem(machine.LOCAL_TOKENS, "cpu", small)


SMALL, LARGE = {"cores": 16, "small": 5e6}, partial(dict, small=0.0)


def test_small_work_and_few_workers_need_no_cluster(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, resources, named, gpus, expected in (
        (SMALL, {}, False, 0, True),
        (SMALL, {}, False, 1, True),
        (SMALL, {}, False, 2, False),
        (SMALL, {}, True, 0, False),
        (SMALL, {"cluster": "local"}, True, 2, True),
        (SMALL, {"cluster": "ray"}, False, 0, False),
        (SMALL, {"finetune_workers": 2}, False, 0, False),
        (SMALL, {"deepspeed": "zero2"}, False, 0, False),
        (LARGE(cores=LOCAL_WORKERS), {}, False, 0, True),
        (LARGE(cores=LOCAL_WORKERS + 1), {}, False, 0, False),
        (LARGE(cores=2 * LOCAL_WORKERS), {"cpus_per_actor": 2}, False, 0, True),
        (LARGE(cores=16), {"actors": 4}, False, 0, True),
        (LARGE(cores=16), {"cluster": "local"}, False, 0, True),
    ):
        on_machine(monkeypatch, **here)
        assert runs_locally(plan_of(**resources), named, gpus) is expected


def test_a_machine_with_one_gpu_may_need_a_cluster(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 2)
    plan, holding = plan_of(), plan_of(gpus_per_actor=1)
    assert not may_need_cluster(plan.config.resources, plan)
    assert may_need_cluster(holding.config.resources, holding), "a GPU of another maker"
    monkeypatch.setattr(machine, "_gpu_files", lambda: ["/dev/nvidia0"])
    assert may_need_cluster(holding.config.resources, holding)
    monkeypatch.setitem(machine.LOCAL_TOKENS, "cuda", 0)
    assert may_need_cluster(plan.config.resources, plan), "Ray does what is large for one GPU"


def test_settings_for_a_cluster_are_refused_without_one(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 8)
    refused = user_error(runs_locally, plan_of(cluster="local", finetune_workers=2), False, 0)
    assert "finetune_workers is 2, which needs resources.cluster: ray" in refused
    assert "gpus_per_actor is 2, this machine has 1" in user_error(local_machine, ResourcesConfig(gpus_per_actor=2), 1)
    with pytest.raises(UserError, match="cpus_per_actor is 4096, this machine has"):
        local_machine(ResourcesConfig(cpus_per_actor=4096), 0)
    assert local_machine(ResourcesConfig(), 0) == LocalMachine(8, 0.0, 1)
    assert local_machine(ResourcesConfig(actors=1), 0).workers == 1
    assert local_machine(ResourcesConfig(), 1).workers == 1
