"""Threads that share one set of weights make the rows that a single worker makes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.small_model import WORDS
from pipeline.audit.description import build_config
from pipeline.audit.machine import local_machine, runs_locally
from pipeline.audit.plan import make_plan
from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.load import check_model, open_model
from pipeline.models.sharing import SharedModels
from pipeline.stages.base import Placement
from pipeline.stages.events import Advance, Failure, Ready
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import stages_of
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt


def audit_of(tmp_path: Path, model: Path, run: str, **settings: Any) -> AuditConfig:
    path = tmp_path / "audit.jsonl"
    if not path.exists():
        texts = [" ".join(WORDS[(7 * row + step) % len(WORDS)] for step in range(5 + row % 9)) for row in range(60)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return build_config(
        {
            "run": str(tmp_path / run),
            "model": {"path": str(model)},
            "corpus": {"audit": {"path": str(path)}},
            "detectors": ["loss", "lowercase", "min_k_plus_plus", "gradient_norm"],
            "resources": {"shard_bytes": 400, "batch_tokens": 64, **settings},
        }
    )


def test_rows_are_the_same_bytes_however_many_threads_make_them(tmp_path: Path, tiny_model_folder: Path) -> None:
    threads = torch.get_num_threads()
    tables = []
    for workers in (1, 4):
        config = audit_of(tmp_path, tiny_model_folder, f"run-{workers}")
        (stage,), shards, store = stages_of(config), make_plan(config).shards, Store(config.run)
        events = list(finish_shards(stage, shards, store, workers))
        receipts = sorted((e for e in events if isinstance(e, Receipt)), key=lambda receipt: receipt.shard)
        assert len(receipts) == len(shards) > 4
        assert any(isinstance(e, Ready) for e in events)
        assert sum(e.documents for e in events if isinstance(e, Advance)) >= 60
        tables.append([store.read_table(receipt.data) for receipt in receipts])
    assert all(one.equals(other) for one, other in zip(*tables, strict=True))
    assert torch.get_num_threads() == threads


def test_a_model_opened_beside_others_has_its_dtype(tiny_model_folder: Path) -> None:
    """While transformers builds a model, its dtype is what every thread's torch takes by default."""
    ended = threading.Event()

    def build_others() -> None:
        while not ended.is_set():
            check_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))

    other = threading.Thread(target=build_others)
    other.start()
    try:
        for _ in range(40):
            lm = open_model(ModelConfig(path=str(tiny_model_folder), dtype="bfloat16"))
            assert {parameter.dtype for parameter in lm.model.parameters()} == {torch.bfloat16}
    finally:
        ended.set()
        other.join()


def test_weights_are_shared_and_layers_are_not(tiny_model_folder: Path) -> None:
    shared = SharedModels()
    one, other = (shared.copy_of(open_model, ModelConfig(path=str(tiny_model_folder)), 0) for _ in range(2))
    weights = dict(one.model.named_parameters())
    assert weights
    assert all(weight.data_ptr() == weights[name].data_ptr() for name, weight in other.model.named_parameters())
    assert not {id(module) for module in one.model.modules()} & {id(module) for module in other.model.modules()}
    assert one.tokenizer is not other.tokenizer


def test_a_model_that_cannot_be_opened_ends_the_stage_in_one_line(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = audit_of(tmp_path, tiny_model_folder, "run")
    (stage,), shards = stages_of(config), make_plan(config).shards
    gone = tmp_path / "gone"
    object.__setattr__(stage.settings, "model", ModelConfig(path=str(gone)))
    with pytest.raises(UserError, match="gone"):
        list(finish_shards(stage, shards, Store(config.run), workers=2))


def test_a_damaged_file_fails_its_shards_alone(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = audit_of(tmp_path, tiny_model_folder, "run")
    (stage,), shards, store = stages_of(config), make_plan(config).shards, Store(config.run)
    lost = shards[:1]
    path = tmp_path / "elsewhere.jsonl"
    object.__setattr__(lost[0], "path", str(path))
    events = list(finish_shards(stage, shards, store, workers=2))
    assert [event.shard for event in events if isinstance(event, Failure)] == [lost[0].id]
    assert sum(isinstance(event, Receipt) for event in events) == len(shards) - 1


@pytest.mark.parametrize(
    ("settings", "ray_address", "gpus", "expected"),
    [
        ({}, False, 0, True),
        ({}, False, 1, True),
        ({}, False, 2, False),
        ({}, True, 0, False),
        ({"cluster": "local"}, True, 2, True),
        ({"cluster": "ray"}, False, 0, False),
        ({"finetune_workers": 2}, False, 0, False),
        ({"deepspeed": "zero2"}, False, 0, False),
    ],
)
def test_small_work_on_one_device_needs_no_cluster(
    settings: dict[str, Any], ray_address: bool, gpus: int, expected: bool, tmp_path: Path, tiny_model_folder: Path
) -> None:
    plan = make_plan(audit_of(tmp_path, tiny_model_folder, "run", **settings))
    assert runs_locally(plan, ray_address, gpus) is expected


def test_settings_for_a_cluster_are_refused_without_one(tmp_path: Path, tiny_model_folder: Path) -> None:
    plan = make_plan(audit_of(tmp_path, tiny_model_folder, "run", cluster="local", finetune_workers=2))
    with pytest.raises(UserError, match=r"finetune_workers is 2, which needs resources\.cluster: ray"):
        runs_locally(plan, False, 0)
    with pytest.raises(UserError, match="gpus_per_actor is 2, this machine has 1"):
        local_machine(ResourcesConfig(gpus_per_actor=2), 1)
    with pytest.raises(UserError, match="cpus_per_actor is 4096, this machine has"):
        local_machine(ResourcesConfig(cpus_per_actor=4096), 0)
    assert local_machine(ResourcesConfig(actors=1), 0).workers == 1
    assert local_machine(ResourcesConfig(), 1).workers == 1


def test_rows_of_shards_of_several_windows_are_the_same_bytes_however_many_workers_make_them(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    tables = []
    for workers in (1, 3):
        config = audit_of(tmp_path, tiny_model_folder, f"run-{workers}", shard_bytes=1500, batch_tokens=1)
        (stage,), shards, store = stages_of(config), make_plan(config).shards, Store(config.run)
        assert stage.make(stage, Placement()).window.kept == 512, "several windows a shard"
        events = list(finish_shards(stage, shards, store, workers))
        receipts = sorted((e for e in events if isinstance(e, Receipt)), key=lambda receipt: receipt.shard)
        tables.append([store.read_table(receipt.data) for receipt in receipts])
    assert 1 < len(shards) < 6
    assert all(one.equals(other) for one, other in zip(*tables, strict=True))
