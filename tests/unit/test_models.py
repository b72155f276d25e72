"""Models open from every form that a config can name, and what is refused is refused in one line."""

import json
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from pipeline.config.models import ModelConfig
from pipeline.models.load import (
    LanguageModel,
    Seq2SeqModel,
    check_model,
    fingerprint_model,
    open_model,
    open_paraphraser,
)
from pipeline.models.tokens import tokenize
from pipeline.models.weight_dtypes import FLAGS_VARIABLE
from tests.helpers.commands import user_error

TEXTS = ["The river learns the garden letter.", "Winter, a morning of quiet numbers; naïve ☃ twice.", ""]


@pytest.fixture(scope="module")
def tiny(tiny_model_folder):
    return open_model(ModelConfig(path=str(tiny_model_folder)))


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    """A copy of the tiny model, to be broken."""
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


@pytest.fixture(scope="module")
def adapter(tiny_model_folder, tmp_path_factory):
    """A LoRA adapter that changes the tiny model, and the model with it switched on."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(base, settings).eval()
    place = tmp_path_factory.mktemp("adapter") / "lora"
    model.save_pretrained(place)
    return place, model


def refusal(config: ModelConfig) -> str:
    user_error(open_model, config)
    return user_error(check_model, config)


def test_a_folder_opens_in_its_own_dtype_without_gradients(tiny, tiny_model_folder):
    assert not tiny.model.training
    assert not any(parameter.requires_grad for parameter in tiny.model.parameters())
    assert tiny.model.dtype == torch.float32
    assert open_model(ModelConfig(path=str(tiny_model_folder), dtype="bfloat16")).model.dtype == torch.bfloat16
    parameters = sum(parameter.numel() for parameter in tiny.model.parameters())
    facts = {"architecture": "LlamaForCausalLM", "dtype": "float32", "max_tokens": tiny.max_tokens}
    assert check_model(ModelConfig(path=str(tiny_model_folder))) == {**facts, "parameters": parameters}


@pytest.mark.floating_point
@pytest.mark.parametrize(("flags", "dtype"), [("avx2 avx512f avx512_bf16", "bfloat16"), ("avx2 avx512f", "float32")])
def test_dtype_auto_opens_a_checkpoint_in_its_own_dtype_where_that_is_fast(
    tiny_model_folder, tmp_path, monkeypatch, flags, dtype
):
    monkeypatch.setenv(FLAGS_VARIABLE, flags)
    AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    assert check_model(config)["dtype"] == fingerprint_model(config)["dtype"] == "bfloat16"
    assert open_model(config).model.dtype == getattr(torch, dtype)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert check_model(config)["dtype"] == "bfloat16"


def test_an_adapter_is_merged_into_the_weights(tiny, tiny_model_folder, adapter):
    place, adapted = adapter
    merged = open_model(ModelConfig(path=str(tiny_model_folder), adapter=str(place)))
    assert type(merged.model) is type(tiny.model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        torch.testing.assert_close(merged.model(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(merged.model(ids).logits, tiny.model(ids).logits, atol=1e-3)


def test_a_missing_or_foreign_adapter_is_refused(tiny_model_folder, adapter, tmp_path):
    path = str(tiny_model_folder)
    place, _ = adapter
    near = refusal(ModelConfig(path=path, adapter=str(place.with_name("lor"))))
    assert "no folder" in near
    assert "did you mean 'lora'" in near
    copied = shutil.copytree(place, tmp_path / "copied")
    pickle_weights(copied, "adapter_model", "adapter_model.bin")
    assert "allow_pickle" in refusal(ModelConfig(path=path, adapter=str(copied)))
    open_model(ModelConfig(path=path, adapter=str(copied), allow_pickle=True))
    settings = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "SEQ_CLS"}))
    assert "is for SEQ_CLS" in refusal(ModelConfig(path=path, adapter=str(copied)))


def test_a_paraphraser_is_of_the_kind_that_its_checkpoint_says(tiny_model_folder, tiny_t5_folder, tmp_path):
    causal, two_sided = ModelConfig(path=str(tiny_model_folder)), ModelConfig(path=str(tiny_t5_folder))
    assert isinstance(open_paraphraser(causal), LanguageModel)
    opened = open_paraphraser(two_sided)
    assert isinstance(opened, Seq2SeqModel)
    assert not opened.model.training
    assert not any(parameter.requires_grad for parameter in opened.model.parameters())
    parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    facts = {"architecture": "T5ForConditionalGeneration", "dtype": "float32", "max_tokens": None}
    assert check_model(two_sided, "rewriter") == {**facts, "parameters": parameters}
    assert check_model(causal, "rewriter") == check_model(causal)
    assert fingerprint_model(two_sided)["model"] != fingerprint_model(causal)["model"]
    assert "no causal language model: T5ForConditionalGeneration" in refusal(two_sided)


def pickle_weights(folder: Path, name: str = "model", pickled: str = "pytorch_model.bin") -> None:
    torch.save(load_file(folder / f"{name}.safetensors"), folder / pickled)
    (folder / f"{name}.safetensors").unlink()


def configured(**settings: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(old | settings))

    return change


def masked(folder: Path) -> None:
    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=99)
    BertForMaskedLM(small).save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pickle_weights, "allow_pickle: true"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot read its tokenizer"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read its config.json"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (masked, "no causal language model: BertForMaskedLM"),
        (configured(model_type="home_made", auto_map={"AutoConfig": "home.Config"}), "trust_remote_code: true"),
    ],
)
def test_a_broken_or_foreign_folder_is_one_line(folder, change, message):
    change(folder)
    assert message in refusal(ModelConfig(path=str(folder)))


def test_wrong_paths_and_damaged_weights_are_one_line_and_pickles_open_if_allowed(folder):
    assert "is a file that is not GGUF" in refusal(ModelConfig(path=str(folder / "config.json")))
    assert "did you mean 'model'" in refusal(ModelConfig(path=str(folder.parent / "modle")))
    pickle_weights(folder)
    allowed = ModelConfig(path=str(folder), allow_pickle=True)
    check_model(allowed)
    assert open_model(allowed).model.dtype == torch.float32
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    assert "cannot read its weights" in user_error(open_model, ModelConfig(path=str(folder)))


def test_a_paraphraser_is_refused_as_other_models_are(tiny_t5_folder, tmp_path):
    encoder = configured(architectures=["T5EncoderModel"], is_encoder_decoder=False)
    judge = configured(architectures=["T5ForSequenceClassification"])
    for change, message in (
        (encoder, "no causal language model: T5EncoderModel"),
        (judge, "writes no text: T5ForSequenceClassification"),
        (pickle_weights, "allow_pickle: true"),
    ):
        config = ModelConfig(path=str(shutil.copytree(tiny_t5_folder, tmp_path / message[:8])))
        change(Path(config.path))
        assert message in user_error(check_model, config, "rewriter")
        assert message in user_error(open_paraphraser, config)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_quantisation_without_bitsandbytes_says_what_to_install(tiny_model_folder, quantization):
    config = ModelConfig(path=str(tiny_model_folder), quantization=quantization)
    assert "pip install 'seenset[quantization]'" in refusal(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(tiny_model_folder):
    assert "torch finds none" in user_error(open_model, ModelConfig(path=str(tiny_model_folder)), gpus=1)


def test_a_hub_that_cannot_be_reached_is_one_line_and_soon(tmp_path):
    began = time.monotonic()
    message = refusal(ModelConfig(path="seenset-tests/no-such-model"))
    assert "seenset-tests/no-such-model" in message
    assert "hub" in message
    assert time.monotonic() - began < 60
    assert "not a hub id" in refusal(ModelConfig(path="no such: model"))


def test_a_missing_gguf_names_its_neighbours(tmp_path):
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "text.gguf").write_bytes(b"text")
    for config in (
        ModelConfig(path=str(tmp_path / "model-Q5.gguf")),
        ModelConfig(path=str(tmp_path), gguf_file="model-Q5.gguf"),
    ):
        message = refusal(config)
        assert "no GGUF file 'model-Q5.gguf'" in message
        assert "did you mean 'model-Q4.gguf'" in message
    assert "is not a GGUF file" in refusal(ModelConfig(path=str(tmp_path / "text.gguf")))
    assert "name one as gguf_file: model-Q4.gguf" in refusal(ModelConfig(path=str(tmp_path)))
    assert "cannot read its" in refusal(ModelConfig(path=str(tmp_path / "model-Q4.gguf")))


def test_both_forms_of_a_gguf_path_are_the_same_model(smollm2_file):
    whole = ModelConfig(path=str(smollm2_file))
    parts = ModelConfig(path=str(smollm2_file.parent), gguf_file=smollm2_file.name)
    assert fingerprint_model(whole) == fingerprint_model(parts)
    facts = check_model(parts)
    parameters = facts.pop("parameters")
    assert facts == {"architecture": "LlamaForCausalLM", "dtype": "float32", "max_tokens": 8192}
    assert parameters == pytest.approx(134.5e6, rel=0.01)


def test_a_fingerprint_is_of_the_content_and_not_of_the_place(folder, tiny_model_folder, adapter):
    place, _ = adapter
    original = fingerprint_model(ModelConfig(path=str(tiny_model_folder)))
    assert fingerprint_model(ModelConfig(path=str(folder))) == original
    assert set(original) == {"model", "tokenizer", "dtype", "quantization"}
    assert fingerprint_model(ModelConfig(path=str(folder), dtype="bfloat16"))["dtype"] == "bfloat16"
    adapted = fingerprint_model(ModelConfig(path=str(folder), adapter=str(place)))
    assert adapted["model"] != original["model"]
    assert adapted["tokenizer"] == original["tokenizer"]
    (folder / "README.md").write_text("changes nothing")
    assert fingerprint_model(ModelConfig(path=str(folder))) == original
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    changed = fingerprint_model(ModelConfig(path=str(folder)))
    assert changed["model"] != original["model"]
    assert changed["tokenizer"] == original["tokenizer"]


def test_tokens_beyond_the_limit_are_cut_and_the_kept_text_is_known(tiny):
    for limit in range(1, 30):
        for text, tokens in zip(TEXTS, tokenize(tiny.tokenizer, TEXTS, limit), strict=True):
            whole = tiny.tokenizer(text)["input_ids"]
            assert (tokens.ids, tokens.truncated) == (whole[:limit], len(whole) > limit)
            decoded = tiny.tokenizer.decode(tokens.ids, clean_up_tokenization_spaces=False).rstrip("\ufffd")
            assert text[: tokens.kept].startswith(decoded)
            assert tokens.kept - len(decoded) in (0, 1)
            assert tokens.truncated or tokens.kept == len(text)
