"""A GGUF file with scaled position embeddings gives the logits of its model, or is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import write_gguf
from torch import Tensor

from pipeline.config.models import ModelConfig
from pipeline.models.checkpoints import _set_scaling
from pipeline.models.load import check_model, open_model
from pipeline.models.opened import LanguageModel
from tests.helpers.commands import user_error

IDS = torch.tensor([[5, 9, 13, 17, 21, 3, 7, 33, 41, 5, 6, 12] * 4])
DIVISORS = [1.0, 1.5, 4.0, 8.0]
"""Of the frequencies of 4 pairs of values, as of Llama 3.1."""

Edit = Callable[[Any], None]


def linear(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def linear_without_type(writer: Any) -> None:
    writer.add_rope_scaling_factor(4.0)


def divided(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.array(DIVISORS, dtype=np.float32))


def divided_in_half_precision(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.array(DIVISORS, dtype=np.float16))


def both(writer: Any) -> None:
    linear(writer)
    divided(writer)


def no_scaling(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(4.0)


def ones(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))


def yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def by_length(writer: Any) -> None:
    writer.add_tensor("rope_factors_long.weight", np.full(4, 4, dtype=np.float32))
    writer.add_tensor("rope_factors_short.weight", np.ones(4, dtype=np.float32))


SCALED: dict[str, tuple[Edit, list[float]]] = {
    "linear": (linear, [4.0] * 4),
    "linear without its name": (linear_without_type, [4.0] * 4),
    "a tensor of divisors": (divided, DIVISORS),
    "a tensor in half precision": (divided_in_half_precision, DIVISORS),
    "both": (both, [4 * value for value in DIVISORS]),
    "none": (no_scaling, [1.0] * 4),
    "a tensor of ones": (ones, [1.0] * 4),
}


@pytest.fixture
def opened(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Edit], ModelConfig]:
    """Writes a GGUF file with further entries."""
    monkeypatch.setenv("SEENSET_CACHE", str(tmp_path / "cache"))

    def make(edit: Edit) -> ModelConfig:
        return ModelConfig(path=str(write_gguf(tiny_model_folder, tmp_path / "model.gguf", edit)), dtype="float32")

    return make


def logits(lm: LanguageModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = lm.model(IDS).logits
    return found


@pytest.mark.parametrize("name", SCALED)
def test_the_scaling_of_a_gguf_file_is_that_of_its_model(name: str, opened: Callable[[Edit], ModelConfig]) -> None:
    edit, divisors = SCALED[name]
    plain = open_model(opened(lambda writer: None))
    model: Any = copy.deepcopy(plain.model)
    model.model.rotary_emb.inv_freq /= torch.tensor(divisors)
    with torch.no_grad():
        expected = model(IDS).logits
    if set(divisors) != {1.0}:
        assert (expected - logits(plain)).abs().max() > 2e-4, "the scaling makes a difference"
    config = opened(edit)
    check_model(config)
    for lm in (open_model(config), open_model(config)):  # unpacked, and from the cache
        torch.testing.assert_close(logits(lm), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("edit", "stated"), [(yarn, "(yarn, factor 4)"), (by_length, "(longrope, factor 1)")], ids=["YaRN", "LongRoPE"]
)
def test_a_scaling_that_is_not_read_is_refused(edit: Edit, stated: str, opened: Callable[[Edit], ModelConfig]) -> None:
    config = opened(edit)
    for work in (check_model, open_model):
        refused = user_error(work, config)
        assert f"it scales position embeddings {stated}, which transformers does not read from such a file" in refused


def test_where_layers_differ_the_scaling_is_of_those_with_full_attention() -> None:
    """As of Gemma 3; Gemma 4 rotates a part of each vector, which its file states by divisors of 1e30."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    config: Any = transformers.Gemma3TextConfig(**sizes)
    before = copy.deepcopy(config.rope_parameters)
    _set_scaling(config, scaling)
    assert config.rope_parameters == {**before, "full_attention": {**before["full_attention"], **scaling}}
    config.rope_parameters["full_attention"]["rope_type"] = "proportional"
    before = copy.deepcopy(config.rope_parameters)
    _set_scaling(config, {"rope_type": "longrope", "short_factor": [1e30], "long_factor": [1e30]})
    assert config.rope_parameters == before
