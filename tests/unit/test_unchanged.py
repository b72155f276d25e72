"""What a worker reads is what the fingerprint of its stage names, wherever it runs and for as long as it works."""

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.models import ModelConfig
from pipeline.errors import StopError
from pipeline.models.load import fingerprint_model, open_model
from pipeline.models.sharing import SharedModels
from pipeline.models.unchanged import ModelDigests, check_same_files, model_marks
from pipeline.plan.description import load_config
from pipeline.run.plan import Plan, make_plan
from pipeline.stages.base import Placement, Stage
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from tests.helpers.commands import user_error


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A model whose weights are behind a link."""
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    shutil.move(folder / "model.safetensors", tmp_path / "first.safetensors")
    os.symlink(tmp_path / "first.safetensors", folder / "model.safetensors")
    return folder


@pytest.fixture
def plan(folder: Path, make_audit: Callable[..., Path]) -> Plan:
    resources = {"shard_bytes": 400}
    settings = {"model": {"path": str(folder), "dtype": "float32"}, "detectors": ["loss", "reference"]}
    settings["reference_model"] = settings["model"]
    return make_plan(load_config(str(make_audit(30, 30, selections=[], resources=resources, **settings))))


def lead_elsewhere(folder: Path) -> None:
    """Let the link lead to other weights of the same size and time of change."""
    first = folder.parent / "first.safetensors"
    other = folder.parent / "other.safetensors"
    save_file({key: value * 2 for key, value in load_file(first).items()}, other, {"format": "pt"})
    assert other.stat().st_size == first.stat().st_size
    os.utime(other, ns=(first.stat().st_atime_ns, first.stat().st_mtime_ns))
    (folder / "model.safetensors").unlink()
    os.symlink(other, folder / "model.safetensors")


def rewrite_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text + " ")


def add_index(folder: Path) -> None:
    """A file that was not there."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize("change", [lead_elsewhere, rewrite_tokenizer, add_index])
def test_files_that_change_behind_the_fingerprint_stop_the_stage(
    plan: Plan, folder: Path, change: Callable[[Path], None]
) -> None:
    (stage,), store = plan_stages(plan.config), Store(plan.config.run)
    stage.make(stage, Placement())
    change(folder)
    message = user_error(list, finish_shards(stage, plan.shards, store, workers=2))
    assert "is not the file with which the run has started" in message
    assert not store.names("receipts/score", ".json")


def test_files_that_change_under_way_keep_the_finished_shards(plan: Plan, folder: Path) -> None:
    (stage,), store = plan_stages(plan.config), Store(plan.config.run)
    finished: list[Receipt] = []

    def finish() -> None:
        for event in finish_shards(stage, plan.shards, store, workers=1):
            if isinstance(event, Receipt):
                finished.append(event)
                if len(finished) == 1:
                    lead_elsewhere(folder)

    with pytest.raises(StopError, match=r"model\.safetensors is not the file"):
        finish()
    assert 1 <= len(finished) < len(plan.shards)
    assert len(store.names("receipts/score", ".json")) == len(finished)


def test_a_copy_with_other_time_stamps_is_the_same_model(plan: Plan, folder: Path, tmp_path: Path) -> None:
    """As on another node: the stage travels to it, and its files are hashed there."""
    (stage,), store = plan_stages(plan.config), Store(plan.config.run)
    travelled: Stage = pickle.loads(pickle.dumps(stage))
    assert travelled.marks == stage.marks
    assert {"model", "reference_model"} == stage.marks.keys()
    for file in list(folder.iterdir()):
        shutil.copy(file, tmp_path / "copy")
        file.unlink()
        shutil.move(tmp_path / "copy", file)
    receipts = [e for e in finish_shards(travelled, plan.shards, store, workers=1) if isinstance(e, Receipt)]
    assert len(receipts) == len(plan.shards)


def test_weights_are_hashed_once_and_again_only_where_marks_differ(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, opened, original = time.time_ns(), [], Path.open

    def counted(path: Path, *arguments: Any, **settings: Any) -> Any:
        opened.append(path.name)
        return original(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", counted)  # safetensors opens files itself
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)  # files that were changed just now are hashed again
    config = ModelConfig(path=str(folder))
    digests = ModelDigests()
    for _ in range(3):
        fingerprint = digests(config)
        check_same_files(config, digests.marks(config), fingerprint)
        check_same_files(config, {}, fingerprint)
        open_model(config)
    assert opened.count("first.safetensors") == 1
    lead_elsewhere(folder)
    with pytest.raises(StopError):
        check_same_files(config, digests.marks(config), fingerprint)
    assert opened.count("other.safetensors") == 1


def test_a_model_that_was_opened_before_a_change_is_opened_again(folder: Path) -> None:
    config, shared = ModelConfig(path=str(folder), dtype="float32"), SharedModels()
    first = shared.copy_model(open_model, config, 0)
    same = shared.copy_model(open_model, config, 0)
    lead_elsewhere(folder)
    other = shared.copy_model(open_model, config, 0)
    weights = [model.model.get_input_embeddings().weight for model in (first, same, other)]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    assert torch.equal(weights[0] * 2, weights[2])


def test_marks_are_of_the_adapter_too(folder: Path, tmp_path: Path) -> None:
    from test_model_files import own_adapter

    own_adapter(folder)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.move(folder / name, adapter / name)
    config = ModelConfig(path=str(folder), adapter=str(adapter))
    marks, fingerprint = model_marks(config), fingerprint_model(config)
    assert {"adapter_config.json", "adapter_model.safetensors", "model.safetensors"} <= marks.keys()
    weights = {key: value * 2 for key, value in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(StopError, match=r"adapter_model\.safetensors is not the file"):
        check_same_files(config, marks, fingerprint)
