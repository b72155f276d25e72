"""The kinds of adapters, and trainings that several ranks share."""

from __future__ import annotations

import json
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from architectures import GPT2
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.small_model import WORDS, save_small_model
from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.load import RECORD, LanguageModel, fingerprint_model, open_model
from pipeline.training.adapter import linear_modules
from pipeline.training.loss import batch_loss
from pipeline.training.steps import ProcessGroup, read_zero_settings, zero_stage
from pipeline.training.train import FinetuneConfig, TrainingOptions, TrainingStep, encode, train

TEXTS = [" ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(5 + i % 9)) for i in range(22)]
CONFIG = FinetuneConfig(epochs=3, batch_size=4, learning_rate=5e-3, dtype="float32", rank=4, seed=3)


@pytest.fixture
def opened(tiny_model_folder: Path) -> LanguageModel:
    return open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))


def config_of(**settings: Any) -> FinetuneConfig:
    return CONFIG.model_copy(update=settings)


def mean_loss(model: Any, tokenizer: Any) -> float:
    with torch.no_grad():
        return float(batch_loss(model, encode(tokenizer, TEXTS, 1024))[0])


def test_dropout_of_the_base_model_plays_no_part(opened: LanguageModel, tmp_path: Path) -> None:
    """Its draws would depend on how the documents of a batch are shared."""
    weights = []
    for share in (0.0, 0.5):
        torch.manual_seed(0)
        sizes = {**GPT2, "vocab_size": len(opened.tokenizer)}
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=share, embd_pdrop=share, attn_pdrop=share))
        train(model, opened.tokenizer, TEXTS, CONFIG, tmp_path / f"{share}")
        weights.append((tmp_path / f"{share}" / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_weights_that_the_last_step_spoils_are_not_kept(opened: LanguageModel, tmp_path: Path) -> None:
    def spoil(step: TrainingStep) -> None:
        if step.step == step.steps:
            weights = dict(opened.model.named_parameters())
            weights[next(name for name in weights if "lora_B" in name)].data[0, 0] = float("nan")

    with pytest.raises(UserError, match=r"^the fine-tuned weights are no finite numbers after step 18 of 18; a lower"):
        train(opened.model, opened.tokenizer, TEXTS, CONFIG, tmp_path / "a", TrainingOptions(spoil))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_deepspeed_does_not_stop_a_training_without_it(opened: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / ".a.checkpoint").mkdir()
    train(opened.model, opened.tokenizer, TEXTS, CONFIG, tmp_path / "a", TrainingOptions(checkpoint_seconds=0.0))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install '.[deepspeed]'")
def test_deepspeed_settings_have_a_name_or_a_path(tmp_path: Path) -> None:
    for stage in (2, 3):
        assert zero_stage(read_zero_settings(f"zero{stage}")) == stage
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(read_zero_settings("zero2")))
    assert read_zero_settings(str(path)) == read_zero_settings("zero2")
    with pytest.raises(UserError, match=r"did you mean 'zero3'\? known names: zero2, zero3, or the path"):
        read_zero_settings("zero4")
    with pytest.raises(UserError, match=r"cannot read DeepSpeed settings none\.json: No such"):
        read_zero_settings("none.json")


@pytest.mark.parametrize("method", ["lora", "adalora", "ia3"])
def test_every_kind_learns_and_is_the_same_once_loaded_or_merged(
    method: str, opened: LanguageModel, tiny_model_folder: Path, tmp_path: Path
) -> None:
    before = mean_loss(opened.model, opened.tokenizer)
    config = config_of(method=method, epochs=6, learning_rate=2e-2)
    result = train(opened.model, opened.tokenizer, TEXTS, config, tmp_path / "a")
    assert mean_loss(opened.model, opened.tokenizer) == before  # the base is as it was
    assert {weight.dtype for weight in load_file(tmp_path / "a" / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    adapted = peft.PeftModel.from_pretrained(opened.model, str(tmp_path / "a"))
    loaded = mean_loss(adapted, opened.tokenizer)
    assert loaded < before - (0.01 if method == "ia3" else 0.05)  # a random model has little for IA3 to scale
    assert loaded == pytest.approx(sum(result.losses[-6:]) / 6, rel=0.1)
    adapted.unload()
    merged = open_model(ModelConfig(path=str(tiny_model_folder), adapter=str(tmp_path / "a"), dtype="float32"))
    assert mean_loss(merged.model, merged.tokenizer) == pytest.approx(loaded, abs=1e-4)


@pytest.mark.parametrize("method", ["adalora", "ia3"])
def test_a_killed_training_of_every_kind_ends_with_the_same_bytes(
    method: str, opened: LanguageModel, tmp_path: Path
) -> None:
    config = config_of(method=method)

    def kill(step: TrainingStep) -> None:
        if step.step == 8:
            raise KeyboardInterrupt

    train(opened.model, opened.tokenizer, TEXTS, config, tmp_path / "whole")
    arguments = (opened.model, opened.tokenizer, TEXTS, config, tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        train(*arguments, TrainingOptions(kill, checkpoint_seconds=0.0))
    seen: list[TrainingStep] = []
    train(*arguments, TrainingOptions(seen.append, checkpoint_seconds=0.0))
    assert seen[0].step == 9
    assert json.loads((tmp_path / "cut" / RECORD).read_text())["began_at"] == [0, 8]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_adalora_ends_with_the_mean_rank_that_was_asked_for(opened: LanguageModel, tmp_path: Path) -> None:
    train(opened.model, opened.tokenizer, TEXTS, config_of(method="adalora"), tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    ranks = [sum(kept) for kept in settings["rank_pattern"].values()]
    assert (settings["init_r"], settings["target_r"], settings["total_step"]) == (6, 4, 18)
    assert sum(ranks) == 4 * len(linear_modules(opened.model))
    assert len(set(ranks)) > 1
    one_step = config_of(method="adalora", epochs=1, batch_size=22)
    with pytest.raises(UserError, match="needs at least 2, got 1"):
        train(opened.model, opened.tokenizer, TEXTS, one_step, tmp_path / "b")


def test_ia3_scales_the_inputs_of_the_feed_forward_output_and_the_outputs_of_the_others(
    opened: LanguageModel, tmp_path: Path
) -> None:
    train(opened.model, opened.tokenizer, TEXTS, config_of(method="ia3"), tmp_path / "a")
    for name, weight in load_file(tmp_path / "a" / "adapter_model.safetensors").items():
        assert weight.shape == ((1, 64) if "down_proj" in name else (weight.shape[0], 1)), name


@pytest.mark.parametrize("method", ["lora", "adalora", "ia3"])
def test_target_modules_are_the_ones_that_are_trained(method: str, opened: LanguageModel, tmp_path: Path) -> None:
    config = config_of(method=method, target_modules=["q_proj", "layers.1.mlp.down_proj"])
    train(opened.model, opened.tokenizer, TEXTS, config, tmp_path / "a")
    names = {
        name.rsplit(".lora", 1)[0].rsplit(".ia3", 1)[0] for name in load_file(tmp_path / "a/adapter_model.safetensors")
    }
    ends = sorted(name.split("layers.")[1] for name in names)
    assert ends == ["0.self_attn.q_proj", "1.mlp.down_proj", "1.self_attn.q_proj"]


def test_target_modules_that_do_not_exist_are_refused_with_those_that_do(opened: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^target_modules: no linear layer 'q_prj' in the model; did you mean 'q_proj'\? "
        r"known: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$",
    ):
        train(opened.model, opened.tokenizer, TEXTS, config_of(target_modules=["v_proj", "q_prj"]), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValidationError, match="target_modules is for adapters"):
        FinetuneConfig(method="full", target_modules=["q_proj"])
    with pytest.raises(ValidationError):
        FinetuneConfig(target_modules=[])


def test_a_setting_that_is_unset_changes_no_name() -> None:
    assert "target_modules" not in FinetuneConfig().settings()
    assert FinetuneConfig(target_modules=["q_proj"]).settings()["target_modules"] == ["q_proj"]


def test_an_adapter_for_another_base_model_is_refused(
    opened: LanguageModel, tiny_model_folder: Path, tmp_path: Path
) -> None:
    base = fingerprint_model(ModelConfig(path=str(tiny_model_folder)))
    train(opened.model, opened.tokenizer, TEXTS, CONFIG, tmp_path / "a", TrainingOptions(base=base))
    own = ModelConfig(path=str(tiny_model_folder), adapter=str(tmp_path / "a"))
    assert fingerprint_model(own)["model"] != base["model"]
    save_small_model(tmp_path / "wide", hidden=64)
    save_small_model(tmp_path / "shallow", hidden=32, layers=1)
    for other in ("wide", "shallow"):
        config = ModelConfig(path=str(tmp_path / other), adapter=str(tmp_path / "a"))
        with pytest.raises(UserError, match=r"^adapter .* is for another base model: trained on weights [^\n]*$"):
            fingerprint_model(config)
        with pytest.raises(UserError, match=r"^adapter .* is for another base model than [^\n]*$"):
            open_model(config)
    (tmp_path / "a" / RECORD).unlink()  # an adapter of other software says nothing of its base
    assert fingerprint_model(own)["model"] != base["model"]


SHARED = ("adalora", "full")
ODD = TEXTS[:21]


def _rank(rank: int, size: int, folder: Path, root: Path) -> None:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    for method in SHARED:
        opened = open_model(ModelConfig(path=str(folder), dtype="float32"))
        group = ProcessGroup.joined()
        train(
            opened.model,
            opened.tokenizer,
            ODD,
            config_of(method=method),
            root / method,
            TrainingOptions(processes=group),
        )
    distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_share_each_batch_come_to_the_weights_of_one_process(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Two ranks and a last batch of one text: one rank has nothing to do there."""
    other = torch.multiprocessing.get_context("spawn").Process(target=_rank, args=(1, 2, tiny_model_folder, tmp_path))
    other.start()
    _rank(0, 2, tiny_model_folder, tmp_path)
    other.join(120)
    assert other.exitcode == 0
    for method in SHARED:
        alone = tmp_path / f"{method} alone"
        opened = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
        train(opened.model, opened.tokenizer, ODD, config_of(method=method), alone)
        (file,) = (path.name for path in alone.glob("*.safetensors"))
        ours, expected = load_file(tmp_path / method / file), load_file(alone / file)
        assert ours.keys() == expected.keys()
        assert max(float((ours[name] - expected[name]).abs().max()) for name in expected) < 1e-4
