"""The kinds of adapters, trainings that several ranks share, and FSD, which switches adapters over one model."""

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
from pipeline.detectors.base import FORWARD, LOWERCASE, Evidence, Pass, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import RECORD, LanguageModel, fingerprint_model, open_model
from pipeline.models.sharing import Adapters
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from pipeline.passes.gradient import gradient_norms
from pipeline.training.adapter import linear_modules
from pipeline.training.memory import batch_loss
from pipeline.training.steps import ProcessGroup, read_zero_settings, zero_stage
from pipeline.training.train import FinetuneConfig, TrainingOptions, TrainingStep, train
from pipeline.training.training_documents import encode

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


@pytest.mark.parametrize("method", ["lora", "adalora", "ia3"])
def test_every_kind_learns_and_is_the_same_once_loaded_or_merged(
    method: str, opened: LanguageModel, tiny_model_folder: Path, tmp_path: Path
) -> None:
    before = mean_loss(opened.model, opened.tokenizer)
    config = config_of(method=method, epochs=6, learning_rate=2e-2)
    result = train(opened.model, opened.tokenizer, TEXTS, config, tmp_path / "a")
    assert mean_loss(opened.model, opened.tokenizer) == before  # the base is as it was
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    if method == "ia3":  # inputs of the output of the feed-forward layer are scaled, and outputs of the others
        for name, weight in weights.items():
            assert weight.shape == ((1, 64) if "down_proj" in name else (weight.shape[0], 1)), name
    adapted = peft.PeftModel.from_pretrained(opened.model, str(tmp_path / "a"))
    loaded = mean_loss(adapted, opened.tokenizer)
    assert loaded < before - (0.01 if method == "ia3" else 0.05)  # a random model has little for IA3 to scale
    assert loaded == pytest.approx(sum(result.losses[-6:]) / 6, rel=0.1)
    adapted.unload()
    merged = open_model(ModelConfig(path=str(tiny_model_folder), adapter=str(tmp_path / "a"), dtype="float32"))
    assert mean_loss(merged.model, merged.tokenizer) == pytest.approx(loaded, abs=1e-4)


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


@pytest.mark.parametrize("method", ["lora", "adalora", "ia3"])
def test_target_modules_are_the_ones_that_are_trained(method: str, opened: LanguageModel, tmp_path: Path) -> None:
    config = config_of(method=method, target_modules=["q_proj", "layers.1.mlp.down_proj"])
    train(opened.model, opened.tokenizer, TEXTS, config, tmp_path / "a")
    files = load_file(tmp_path / "a/adapter_model.safetensors")
    names = {name.rsplit(".lora", 1)[0].rsplit(".ia3", 1)[0] for name in files}
    ends = sorted(name.split("layers.")[1] for name in names)
    assert ends == ["0.self_attn.q_proj", "1.mlp.down_proj", "1.self_attn.q_proj"]


def test_target_modules_that_do_not_exist_are_refused_with_those_that_do(opened: LanguageModel, tmp_path: Path) -> None:
    known = "known: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    line = rf"^target_modules: no linear layer 'q_prj' in the model; did you mean 'q_proj'\? {known}$"
    with pytest.raises(UserError, match=line):
        train(opened.model, opened.tokenizer, TEXTS, config_of(target_modules=["v_proj", "q_prj"]), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValidationError, match="target_modules is for adapters"):
        FinetuneConfig(method="full", target_modules=["q_proj"])
    with pytest.raises(ValidationError):
        FinetuneConfig(target_modules=[])
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
        alone = ModelConfig(path=str(tmp_path / other))
        with pytest.raises(UserError, match=r"^adapter .* is for another base model: trained on weights [^\n]*$"):
            Adapters(open_model(alone), {"a": tmp_path / "a"}, fingerprint_model(alone)["model"], alone.path)
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
        options = TrainingOptions(processes=group)
        train(opened.model, opened.tokenizer, ODD, config_of(method=method), root / method, options)
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


SOME = TEXTS[:12]
KINDS = {"lora": {}, "ia3": {}, "adalora": {}, "narrow": {"method": "lora", "target_modules": ["q_proj", "down_proj"]}}


@pytest.fixture(scope="module")
def adapters(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each kind, each with a record of its base."""
    folder = tmp_path_factory.mktemp("adapters")
    opened = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    base = fingerprint_model(ModelConfig(path=str(tiny_model_folder)))
    for name, own in KINDS.items():
        config = config_of(**{"method": name, "epochs": 2, "learning_rate": 5e-2, **own})
        train(opened.model, opened.tokenizer, SOME, config, folder / name, TrainingOptions(base=base))
    return {name: folder / name for name in KINDS}


def log_probs(lm: LanguageModel) -> torch.Tensor:
    ids = [entry.ids for entry in tokenize(lm.tokenizer, SOME, 64)]
    return forward(lm, ids, frozenset({"log_prob"})).log_prob


def test_adapters_on_and_off_in_one_model_equal_separate_models(
    tiny_model_folder: Path, adapters: dict[str, Path]
) -> None:
    config = ModelConfig(path=str(tiny_model_folder))
    plain = log_probs(open_model(config))
    one = open_model(config)
    weights = sum(weight.numel() for weight in one.model.parameters())
    base = fingerprint_model(config)["model"]
    switched = Adapters(one, adapters, base, config.path)
    assert sum(weight.numel() for weight in one.model.parameters()) == weights
    for name in [*adapters, *reversed(adapters)]:
        separate = log_probs(open_model(config.model_copy(update={"adapter": str(adapters[name])})))
        with switched.on(name):
            on = log_probs(one)
        assert (on - separate).abs().max() < 1e-6 * separate.abs().max()
        assert (on - plain).abs().max() > 1e-3
        assert torch.equal(log_probs(one), plain)
    with pytest.raises(RuntimeError), switched.on("lora"):
        raise RuntimeError
    ids = [entry.ids for entry in tokenize(one.tokenizer, SOME, 64)]
    assert torch.equal(gradient_norms(one, ids), gradient_norms(open_model(config), ids))


def test_fsd_is_the_score_without_the_adapter_less_the_score_with_it(
    tiny_model_folder: Path, adapters: dict[str, Path]
) -> None:
    bases = ["loss", "zlib", "lowercase", {"min_k": {"k": 0.4}}, "min_k_plus_plus", {"renyi": {"order": 2}}]
    detectors = parse_detectors([{"fsd": {"base": bases, "adapter": ["lora", "ia3"]}}])
    passes = plan_passes(detectors)
    texts = ("plain", "lowercase")
    assert set(passes) == {Pass("forward", text=text, adapter=name) for text in texts for name in ("", "lora", "ia3")}
    config = ModelConfig(path=str(tiny_model_folder))
    one = open_model(config)
    switched = Adapters(one, adapters, fingerprint_model(config)["model"], config.path)
    found = {}
    for needed, statistics in passes.items():
        texts = SOME if needed.text == "plain" else [text.upper() for text in SOME]
        with switched.on(needed.adapter):
            found[needed] = forward(one, [entry.ids for entry in tokenize(one.tokenizer, texts, 64)], statistics)
    evidence = Evidence(SOME, found)
    for detector in detectors:
        base = detector.arguments["base"]
        name = detector.arguments["adapter"]
        assert detector.column == f"fsd(base={base.column}, adapter={name})"
        assert detector.signed
        without = Evidence(SOME, {key: found[key] for key in (FORWARD, LOWERCASE)})
        adapted = Evidence(SOME, {key: found[Pass("forward", text=key.text, adapter=name)] for key in without.passes})
        difference = base.score(adapted) - base.score(without)
        assert torch.equal(detector.score(evidence), -difference)
        assert difference.abs().max() > 0
    rises = parse_detectors([{"fsd": {"adapter": "lora"}}])[0].score(evidence)
    assert rises.mean() < 0  # what the adapter was trained on is predicted better with it: nothing like a member
