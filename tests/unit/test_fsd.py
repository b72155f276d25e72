"""FSD: adapters that are switched over one model, documents that are split, and the scores' difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.small_model import WORDS, save_small_model
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.detectors.base import FORWARD, LOWERCASE, Evidence, Pass, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import LanguageModel, fingerprint_model, open_model
from pipeline.models.sharing import Adapters
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from pipeline.passes.gradient import gradient_norms
from pipeline.training.train import TrainingOptions, train

TEXTS = [" ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(5 + i % 9)) for i in range(12)]
KINDS = {"lora": {}, "ia3": {}, "adalora": {}, "narrow": {"method": "lora", "target_modules": ["q_proj", "down_proj"]}}


@pytest.fixture(scope="module")
def adapters(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each kind, each with a record of its base."""
    folder = tmp_path_factory.mktemp("adapters")
    opened = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    base = fingerprint_model(ModelConfig(path=str(tiny_model_folder)))
    for name, own in KINDS.items():
        settings = {"method": name, "epochs": 2, "batch_size": 4, "learning_rate": 5e-2, "dtype": "float32", **own}
        train(
            opened.model, opened.tokenizer, TEXTS, FinetuneConfig(**settings), folder / name, TrainingOptions(base=base)
        )
    return {name: folder / name for name in KINDS}


def log_probs(lm: LanguageModel) -> torch.Tensor:
    ids = [entry.ids for entry in tokenize(lm.tokenizer, TEXTS, 64)]
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
    ids = [entry.ids for entry in tokenize(one.tokenizer, TEXTS, 64)]
    assert torch.equal(gradient_norms(one, ids), gradient_norms(open_model(config), ids))


def test_an_adapter_for_another_base_model_is_refused_by_the_actor_that_would_switch_it(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    save_small_model(tmp_path / "other", hidden=32, seed=4)
    config = ModelConfig(path=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"^adapter .* is for another base model: trained on weights [^\n]*$"):
        Adapters(open_model(config), adapters, fingerprint_model(config)["model"], config.path)


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
        texts = TEXTS if needed.text == "plain" else [text.upper() for text in TEXTS]
        with switched.on(needed.adapter):
            found[needed] = forward(one, [entry.ids for entry in tokenize(one.tokenizer, texts, 64)], statistics)
    evidence = Evidence(TEXTS, found)
    for detector in detectors:
        base = detector.arguments["base"]
        name = detector.arguments["adapter"]
        assert detector.column == f"fsd(base={base.column}, adapter={name})"
        assert detector.signed
        without = Evidence(TEXTS, {key: found[key] for key in (FORWARD, LOWERCASE)})
        adapted = Evidence(TEXTS, {key: found[Pass("forward", text=key.text, adapter=name)] for key in without.passes})
        difference = base.score(adapted) - base.score(without)
        assert torch.equal(detector.score(evidence), -difference)
        assert difference.abs().max() > 0
    rises = parse_detectors([{"fsd": {"adapter": "lora"}}])[0].score(evidence)
    assert rises.mean() < 0  # what the adapter was trained on is predicted better with it: nothing like a member
