"""A model over several devices gives what it gives on one: nothing meets across devices without a copy.

The devices are claimed (`claimed_device.py`), the hooks between them are accelerate's.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from pipeline.config.models import ModelConfig
from pipeline.models.load import LanguageModel, open_model, open_picture_model
from pipeline.models.picture_prompts import picture_prompt
from pipeline.passes import gradient
from pipeline.passes.forward import find_tail, forward
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.passes.gradient import gradient_coverage, gradient_norms
from pipeline.passes.picture_forward import describe, forward_pictures
from pipeline.passes.statistics import PARTS
from tests.helpers.claimed_device import ClaimedDevices, in_place, real
from tests.helpers.picture_models import SAVE, random_pictures

IDS = [list(range(1, 60)), list(range(3, 50)), list(range(9, 30))]
STATISTICS = frozenset({"log_prob", "mean", "variance", "m_entropy"})
SHAPE = {"hidden_size": 64, "vocab_size": 199, "num_hidden_layers": 2, "num_attention_heads": 4}
FIRST, SECOND = "meta:0", "meta:1"


class NumberTokenizer:
    """A text is its token ids."""

    eos_token_id = None

    def decode(self, ids: Any, **settings: Any) -> str:
        return " ".join(map(str, ids))


def llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {"intermediate_size": 128, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **sizes, **settings))


def opt() -> OPTForCausalLM:
    sizes = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1}
    return OPTForCausalLM(OPTConfig(**SHAPE, **sizes, tie_word_embeddings=False))


MODELS = {
    "untied head": (llama, {"model": FIRST, "model.layers.1": SECOND, "model.norm": SECOND, "lm_head": SECOND}),
    "tied head": (
        lambda: llama(tie_word_embeddings=True),
        {"model": FIRST, "model.layers.1": SECOND, "model.norm": SECOND, "lm_head": FIRST},
    ),
    "split positions": (
        opt,
        {
            "model": FIRST,
            "model.decoder.embed_positions": SECOND,
            "model.decoder.layers.1": SECOND,
            "model.decoder.final_layer_norm": SECOND,
            "lm_head": SECOND,
        },
    ),
}


def places(model: nn.Module, coarse: dict[str, str]) -> dict[str, str]:
    """The device of each module that computes, by the longest prefix, as `device_map="auto"` gives them."""
    parts: dict[str, str] = {}
    for name, module in model.named_modules():
        whole = name in coarse and name != "model"
        leaf = not list(module.children()) and not any(
            name.startswith(f"{other}.") for other in coarse if other != "model"
        )
        if name and (whole or leaf):
            key = max((key for key in coarse if f"{name}.".startswith(f"{key}.")), key=len)
            parts[name] = coarse[key]
    return parts


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model on the CPU, and a copy of it over two devices."""
    # A claimed parameter is a subclass, which this predicate would take for a quantised one.
    monkeypatch.setattr(gradient, "_differentiable", lambda p: isinstance(p, nn.Parameter) and p.is_floating_point())
    torch.manual_seed(0)
    build, coarse = MODELS[request.param]
    model = build().eval().requires_grad_(False)
    plain = LanguageModel(model, NumberTokenizer(), torch.device("cpu"), 64)
    with ClaimedDevices() as devices:
        spread = devices.spread(copy.deepcopy(model), places(model, coarse))
        yield plain, replace(plain, model=spread, device=torch.device(FIRST))


def test_transformers_loads_a_model_over_two_devices_with_the_required_accelerate(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`device_map` needs accelerate, which is no requirement of this project or of transformers itself."""
    required = [Requirement(line) for line in metadata.requires("peft") or []]
    assert [line.marker for line in required if line.name == "accelerate"] == [None]
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # claimed devices are those of one thread
    tokenizer: Any = NumberTokenizer()
    plain = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    last = f"model.layers.{plain.model.config.num_hidden_layers - 1}"
    devices_of_parts = places(plain.model, {"model": FIRST, last: SECOND, "model.norm": SECOND, "lm_head": FIRST})
    with ClaimedDevices() as devices, in_place():
        model = AutoModelForCausalLM.from_pretrained(
            tiny_model_folder, dtype=torch.float32, device_map=devices_of_parts
        )
        assert model.hf_device_map == devices_of_parts
        assert model.get_parameter(f"{last}.mlp.up_proj.weight").device == torch.device(SECOND)
        spread = LanguageModel(model.eval().requires_grad_(False), tokenizer, torch.device(FIRST), 64)
        actual = forward(spread, IDS, STATISTICS).log_prob
        assert devices.copies
    torch.testing.assert_close(real(actual), forward(plain, IDS, STATISTICS).log_prob, rtol=1e-7, atol=5e-7)


def test_passes_and_continuations_over_two_devices_agree_with_the_cpu(pair: Any) -> None:
    plain, spread = pair
    expected, actual = forward(plain, IDS, STATISTICS), forward(spread, IDS, STATISTICS)
    assert find_tail(spread.model) is not None
    assert actual.log_prob.device == torch.device(FIRST)
    torch.testing.assert_close(real(actual.log_prob), expected.log_prob, rtol=1e-7, atol=5e-7)
    for name in ("mean", "variance", "m_entropy"):  # the variance is a difference of numbers near 30
        torch.testing.assert_close(real(getattr(actual, name)), getattr(expected, name), rtol=1e-6, atol=5e-5)
    assert gradient_coverage(spread.model).method == "batched"
    norms = gradient_norms(spread, IDS)
    assert norms.device == torch.device(FIRST)
    torch.testing.assert_close(real(norms), gradient_norms(plain, IDS), rtol=1e-6, atol=0)
    prompts = [Prompt((row,), ids[: 20 - row], range(2), None, 8) for row, ids in enumerate(IDS)]
    sampling = Sampling(top_k=50, max_new_tokens=8)
    assert continuations(spread, prompts, sampling, 0) == continuations(plain, prompts, sampling, 0)


@pytest.mark.parametrize("shape", ["LLaVA", "Idefics3", "SmolVLM"])  # Qwen2-VL makes lists of numbers of the device
def test_a_pass_over_pictures_over_two_devices_agrees_with_the_cpu(shape: str, tmp_path: Path) -> None:
    SAVE[shape](tmp_path)
    plain = open_picture_model(ModelConfig(path=str(tmp_path), dtype="float32"))
    prompts = [picture_prompt(plain, picture) for picture in random_pictures([(40, 30), (64, 64), (30, 60)])]
    described = describe(plain, prompts, 5)
    wanted = dict.fromkeys(PARTS, STATISTICS | {"renyi_0.5"})
    expected = forward_pictures(plain, prompts, described, wanted)
    text, tower = ("language_model", "vision_tower") if shape == "LLaVA" else ("text_model", "vision_model")
    coarse = {"model": FIRST, f"model.{tower}": FIRST, "lm_head": SECOND}
    coarse |= {f"model.{text}.{name}": SECOND for name in ("layers.1", "norm")}
    with ClaimedDevices() as devices:
        model: Any = devices.spread(copy.deepcopy(plain.model), places(plain.model, coarse))
        spread = replace(plain, model=model, device=torch.device(FIRST))
        assert find_tail(spread.model) is not None
        actual = forward_pictures(spread, prompts, described, wanted)
    for part in PARTS:
        assert actual[part].log_prob.device == torch.device(FIRST)
        assert torch.equal(real(actual[part].mask), expected[part].mask)
        for name in ("log_prob", "mean", "variance", "m_entropy"):
            got, value = real(getattr(actual[part], name)), getattr(expected[part], name)
            torch.testing.assert_close(got, value, rtol=1e-6, atol=5e-5)
        torch.testing.assert_close(real(actual[part].renyi["0.5"]), expected[part].renyi["0.5"], rtol=1e-6, atol=5e-6)
