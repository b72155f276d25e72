"""Weights that a file lacks would be random: such a model or adapter is refused by the names of the weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from gguf_files import write_gguf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model, open_paraphraser, open_picture_model
from tests.helpers.commands import user_error
from tests.helpers.picture_models import save_llava

Weights = dict[str, torch.Tensor]


def rewritten(folder: Path, change: Callable[[Weights], object], name: str = "model.safetensors") -> Path:
    weights = load_file(folder / name)
    change(weights)
    save_file(weights, folder / name, metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def test_a_checkpoint_whose_weights_do_not_fit_is_refused_by_the_first_three(folder: Path) -> None:
    names = sorted(name for name in load_file(folder / "model.safetensors") if "layers.0" in name)
    rewritten(folder, lambda weights: [weights.pop(name) for name in names])
    lacks = (
        f"model {folder}: its weights do not fit LlamaForCausalLM: {len(names)} missing from the file "
        f"({', '.join(names[:3])}, ...)"
    )
    assert user_error(open_model, ModelConfig(path=str(folder))) == lacks
    shapes = {"model.norm.weight": torch.ones(3), "model.layers.9.more.weight": torch.ones(2)}
    rewritten(folder, lambda weights: weights.update(shapes))
    others = "1 unknown to the model (model.layers.9.more.weight); 1 of another shape (model.norm.weight)"
    assert user_error(open_model, ModelConfig(path=str(folder))) == f"{lacks}; {others}"


def test_tied_weights_of_another_shape_are_refused_by_name(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    config.save_pretrained(folder)
    rewritten(folder, lambda weights: weights.update({"lm_head.weight": torch.ones(3, config.hidden_size)}))
    assert user_error(open_model, ModelConfig(path=str(folder))) == (
        f"model {folder}: its weights do not fit LlamaForCausalLM: 1 of another shape (lm_head.weight)"
    )


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_integers_without_their_scales_are_refused(folder: Path, dtype: Literal["auto", "float32"]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewritten(folder, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    said = user_error(open_model, ModelConfig(path=str(folder), dtype=dtype))
    assert f"1 of its weights are integers of type I8 ({name})" in said


def test_tied_weights_and_buffers_that_the_architecture_ignores_are_no_misfit(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewritten(folder, lambda weights: weights.update(inverse))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert open_model(ModelConfig(path=str(folder))).model is not None


def test_a_paraphraser_that_lacks_weights_is_refused(tiny_t5_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_t5_folder, tmp_path / "t5"))
    rewritten(folder, lambda weights: weights.pop("decoder.final_layer_norm.weight"))
    said = user_error(open_paraphraser, ModelConfig(path=str(folder)))
    assert "1 missing from the file (decoder.final_layer_norm.weight)" in said


def test_a_model_of_pictures_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    save_llava(tmp_path / "llava")
    name = next(name for name in sorted(load_file(tmp_path / "llava/model.safetensors")) if "vision" in name)
    rewritten(tmp_path / "llava", lambda weights: weights.pop(name))
    said = user_error(open_picture_model, ModelConfig(path=str(tmp_path / "llava")))
    assert "1 missing from the file" in said


def test_a_gguf_file_that_lacks_weights_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEENSET_CACHE", str(tmp_path / "cache"))
    file = write_gguf(folder, tmp_path / "model.gguf")
    data = file.read_bytes()
    name = b"blk.0.ffn_down.weight"
    assert data.count(name) == 1
    file.write_bytes(data.replace(name, b"blk.0.ffn_none.weight"))
    assert "layers.0.mlp.down_proj.weight" in user_error(open_model, ModelConfig(path=str(file)))


def test_an_adapter_that_lacks_weights_or_has_others_is_refused_by_the_first_three(
    folder: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "adapter"
    )
    config = ModelConfig(path=str(folder), adapter=str(tmp_path / "adapter"))
    open_model(config)
    names = sorted(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    other = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"

    def change(weights: Weights) -> None:
        for name in names[:4]:
            del weights[name]
        weights[other] = torch.zeros(2, 32)

    rewritten(tmp_path / "adapter", change, "adapter_model.safetensors")
    said = user_error(open_model, config)
    assert f"4 missing from the file ({', '.join(names[:3])}, ...); 1 unknown to the model ({other})" in said
