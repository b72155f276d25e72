"""An adapter that is merged into the weights, or stays beside them, gives the logits that peft gives with it."""

import copy
import gc
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
import transformers
from architectures import GPT2, LLAMA
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import seenset
from pipeline.answers.top_documents import read_attributions
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.models.devices import give_back
from pipeline.models.load import check_model, fingerprint_model, open_model
from pipeline.models.merging import rounded_at_random
from pipeline.models.opened import LanguageModel
from pipeline.models.probe import is_exact, rounding_error
from pipeline.models.sharing import Adapters
from pipeline.passes.gradient import gradient_norms
from pipeline.store.files import Store
from pipeline.training.train import train
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence

IDS = torch.tensor([[5, 9, 13, 17, 21, 3, 7, 33, 41, 5, 6, 12]])
FEW = ["q_proj", "down_proj"]


def lora(**settings: Any) -> peft.LoraConfig:
    usual = {"r": 4, "lora_alpha": 8, "target_modules": FEW, "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**usual, **settings})


def other(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", **{"target_modules": FEW, **settings})


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SAVED = ["embed_tokens", "lm_head"]
MERGED: dict[str, tuple[str, Callable[[], Any]]] = {
    "LoRA": ("tied", lora),
    "LoRA of the head": ("tied", lambda: lora(target_modules=["lm_head", "q_proj"])),
    "LoRA of the embedding": ("tied", lambda: lora(target_modules=["embed_tokens", "q_proj"])),
    "LoRA of both": ("tied", lambda: lora(target_modules=SAVED)),
    "LoRA of both, tied": ("tied", lambda: lora(target_modules=SAVED, ensure_weight_tying=True)),
    "LoRA of both, apart": ("untied", lambda: lora(target_modules=SAVED)),
    "repeated layers": ("untied", lambda: lora(layer_replication=[[0, 2], [0, 2]])),
    "repeated layers, tied": ("tied", lambda: lora(layer_replication=[[0, 2], [1, 2]], target_modules=["v_proj"])),
    "a head that was trained": ("tied", lambda: lora(modules_to_save=["lm_head"])),
    "an embedding that was trained": ("tied", lambda: lora(modules_to_save=["embed_tokens"])),
    "both that were trained": ("tied", lambda: lora(modules_to_save=SAVED)),
    "both that were trained, apart": ("untied", lambda: lora(modules_to_save=SAVED)),
    "a norm that was trained": ("untied", lambda: lora(modules_to_save=["input_layernorm"])),
    "DoRA": ("tied", lambda: lora(use_dora=True)),
    "DoRA of both": ("tied", lambda: lora(use_dora=True, target_modules=SAVED)),
    "rsLoRA": ("tied", lambda: lora(use_rslora=True)),
    "patterns": ("tied", lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 32})),
    "one layer": ("tied", lambda: lora(layers_to_transform=[1])),
    "Conv1D": ("gpt2", lambda: lora(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    "Conv1D with another flag": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=False)),
    "biases": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True, bias="all")),
    "a bias of LoRA": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True)),
    "the table of GPT-2": ("gpt2", lambda: lora(target_modules=["wte"])),
    "parameters of experts": ("experts", lambda: lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "some tokens": ("tied", lambda: lora(trainable_token_indices=[3, 5, 7])),
    "some tokens, apart": ("untied", lambda: lora(trainable_token_indices=[3, 5, 7])),
    "tokens alone": ("tied", other("TrainableTokens", token_indices=[3, 5, 7], target_modules=["embed_tokens"])),
    "AdaLoRA": ("tied", other("AdaLora", init_r=4, target_r=2, total_step=10, init_lora_weights=False)),
    "IA3": ("tied", other("IA3", feedforward_modules=["down_proj"], init_ia3_weights=False)),
    "IA3 of the head": (
        "tied", other("IA3", target_modules=["lm_head"], feedforward_modules=[], init_ia3_weights=False)
    ),
    "LoHa": ("tied", other("LoHa", r=4, init_weights=False)),
    "LoKr of the head": ("tied", other("LoKr", r=4, init_weights=False, target_modules=["lm_head", "v_proj"])),
    "OFT": ("tied", other("OFT", r=0, oft_block_size=8, init_weights=False)),
    "BOFT": ("tied", other("BOFT", boft_block_size=4, init_weights=False)),
    "VeRA": ("tied", other("Vera", r=4, init_weights=False)),
    "HRA": ("tied", other("HRA", r=4, init_weights=False)),
    "AdaMSS": ("tied", other("Adamss")),
    "C3A": ("tied", other("C3A", block_size=8)),
    "DEFT": ("tied", other("Deft")),
    "DeLoRA": ("tied", other("Delora", r=4)),
    "FourierFT": ("tied", other("FourierFT", n_frequency=20)),
    "FRoD": ("tied", other("Frod")),
    "GLoRA": ("tied", other("Glora", r=4)),
    "GraLoRA": ("tied", other("Gralora", r=4, gralora_k=2)),
    "HiRA": ("tied", other("Hira", r=4)),
    "MiSS": ("tied", other("Miss", r=4)),
    "OSF": ("tied", other("OSF")),
    "PEANuT": ("tied", other("Peanut")),
    "PSOFT": ("tied", other("Psoft", r=4)),
    "PVeRA": ("tied", other("Pvera", r=4)),
    "RandLoRA": ("tied", other("RandLora", r=4)),
    "RoAd": ("tied", other("Road", group_size=8)),
    "SHiRA": ("tied", other("Shira", r=4)),
    "super tuning": ("tied", other("Supertuning")),
    "TinyLoRA": ("tied", other("TinyLora")),
    "Uni-LoRA": ("tied", other("UniLora")),
    "VB-LoRA": ("tied", other("VBLoRA", num_vectors=16, vector_length=8)),
    "WaveFT": ("tied", other("WaveFT", n_frequency=20)),
    "norms": ("tied", other("LNTuning", target_modules=["input_layernorm", "norm"])),
}  # fmt: skip
BESIDE: dict[str, tuple[str, Callable[[], Any]]] = {
    "a bias that the layer lacks": ("tied", lambda: lora(lora_bias=True)),
    "BEFT": ("tied", other("Beft")),
    "layers of attention": ("tied", lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2
    )),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "PROMPT_TUNING": ("tied", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "P_TUNING": ("tied", lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
    )),
    "PREFIX_TUNING": ("tied", lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "CPT": ("tied", lambda: peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 1]
    )),
    "CARTRIDGE": ("tied", lambda: peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "MULTITASK_PROMPT_TUNING": ("tied", lambda: peft.MultitaskPromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=2
    )),
    "POLY": ("tied", other("Poly", r=4)),
    "LORA": ("tied", lambda: lora(alora_invocation_tokens=[5, 6])),
}  # fmt: skip
ALL = {**MERGED, **BESIDE, **REFUSED}


def base(kind: str, vocabulary: int) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "vocab_size": vocabulary}))
    sizes = {**LLAMA, "vocab_size": vocabulary}
    if kind == "experts":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))


@pytest.fixture
def saved(tiny_model_folder: Path, tmp_path: Path) -> Callable[[str], ModelConfig]:
    """Saves a model and an adapter whose weights are random."""

    def save(case: str) -> ModelConfig:
        kind, settings = ALL[case]
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
        tokenizer.save_pretrained(tmp_path / "model")
        model = base(kind, len(tokenizer))
        model.save_pretrained(tmp_path / "model")
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.get_peft_model(model, settings())
            with torch.no_grad():
                for weight in adapted.parameters():
                    if weight.requires_grad:
                        weight.mul_(1 + 0.2 * torch.rand_like(weight)).add_(0.05 * torch.randn_like(weight))
            adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        return ModelConfig(path=str(tmp_path / "model"), adapter=str(tmp_path / "adapter"), dtype="float32")

    return save


def of_peft(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of the model and of peft with the adapter, computed in float32; weights are rounded to a type before."""
    model = AutoModelForCausalLM.from_pretrained(config.path).eval().to(dtype).float()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = model(input_ids=IDS).logits
        adapted = peft.PeftModel.from_pretrained(model, config.adapter).eval()
        return plain, adapted(input_ids=IDS).logits


EXACT, ROUNDED = 1e-4, 0.1
"""Of `moved`: by rounding in float32, and of weights in bfloat16. A wrong merge moves logits by about 1."""


def moved(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square of a difference, in standard deviations of the expected logits."""
    return float((found - expected).square().mean().sqrt() / expected.std())


def logits(lm: LanguageModel) -> Tensor:
    with torch.no_grad():
        return lm.model(input_ids=IDS).logits.float()


@pytest.mark.parametrize("case", MERGED)
def test_a_merged_adapter_gives_the_logits_of_peft(case: str, saved: Callable[[str], ModelConfig]) -> None:
    config = saved(case)
    plain, expected = of_peft(config)
    assert (plain - expected).abs().max() > 0.1, "the adapter makes a difference"
    lm = open_model(config)
    assert (logits(lm) - expected).abs().max() < rounding_error(expected)
    assert not any("lora" in name or "base_layer" in name for name, _ in lm.model.named_modules())


@pytest.mark.parametrize(
    "case", ["LoRA", "LoRA of the head", "LoRA of both", "repeated layers", "DoRA", "Conv1D", "IA3"]
)
def test_in_half_precision_a_merge_rounds_weights_and_does_no_more(
    case: str, saved: Callable[[str], ModelConfig]
) -> None:
    config = saved(case)
    lm = open_model(config.model_copy(update={"dtype": "bfloat16"}))
    assert lm.model.dtype == torch.bfloat16
    lm.model.float()
    assert moved(logits(lm), of_peft(config, torch.bfloat16)[1]) < ROUNDED


SHARE = 20
"""Distance of two numbers in half precision, in updates of a weight."""


def distances(values: Tensor, bits: int) -> Tensor:
    """Distance from values to the next number with so many bits behind the first."""
    return torch.exp2(values.float().abs().log2().floor() - bits)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_rounding_at_random_keeps_the_mean_of_a_small_update(dtype: torch.dtype, bits: int) -> None:
    """Each draw is 1 in SHARE times SHARE updates, else 0: a mean of 1 with a variance of SHARE - 1."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(200_000, generator=generator).to(dtype)
    update = distances(base, bits) / SHARE * torch.randn(base.shape, generator=generator).sign()
    exact = base.float() + update
    assert (exact.to(dtype) == base).float().mean() > 0.95, "rounding to the nearest loses it"
    rounded = rounded_at_random(exact, dtype, generator)
    kept = ((rounded.float() - base.float()) / update).mean()
    assert abs(float(kept) - 1) < 5 * (SHARE / len(base)) ** 0.5
    assert torch.equal(rounded_at_random(base.float(), dtype, generator), base)
    assert torch.equal(rounded_at_random(exact, torch.float32, generator), exact)


def test_a_small_update_survives_a_merge_in_half_precision(saved: Callable[[str], ModelConfig]) -> None:
    config = saved("LoRA").model_copy(update={"dtype": "bfloat16"})
    plain = open_model(config.model_copy(update={"adapter": None})).model.state_dict()
    file = Path(config.adapter or "") / "adapter_model.safetensors"
    weights = load_file(file)
    a, b = (next(weights[name] for name in sorted(weights) if part in name) for part in ("lora_A", "lora_B"))
    layer = next(plain[name] for name in sorted(plain) if "down_proj" in name)
    factor = float(distances(layer, 7).mean() / SHARE / (2 * b @ a).abs().mean())
    save_file({name: value * factor if "lora_B" in name else value for name, value in weights.items()}, file)
    merged = [open_model(config).model.state_dict() for _ in range(2)]
    products, squares, variance, nearest = 0.0, 0.0, 0.0, 0.0
    for name, value in plain.items():
        assert torch.equal(merged[0][name], merged[1][name]), "the random numbers are those of the layer's name"
        prefix = f"base_model.model.{name.removesuffix('weight')}"
        if f"{prefix}lora_A.weight" in weights:
            update = 2 * factor * weights[f"{prefix}lora_B.weight"] @ weights[f"{prefix}lora_A.weight"]
            products += float(((merged[0][name].float() - value.float()) * update).sum())
            nearest += float((((value.float() + update).to(torch.bfloat16).float() - value.float()) * update).sum())
            squares += float(update.square().sum())
            variance += float((update.square() * update.abs() * 2 * distances(value, 7)).sum())
    assert abs(products / squares - 1) < 5 * variance**0.5 / squares
    assert 5 * variance**0.5 / squares < 0.5
    assert nearest / squares < 0.5, "rounding to the nearest loses it"


@pytest.mark.parametrize("case", BESIDE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_without_a_merged_form_stays_beside_the_weights(
    case: str, dtype: str, saved: Callable[[str], ModelConfig], caplog: pytest.LogCaptureFixture
) -> None:
    config = saved(case).model_copy(update={"dtype": dtype})
    _, expected = of_peft(config)
    with caplog.at_level(logging.WARNING, "pipeline.models.load"):
        lm = open_model(config)
    assert moved(logits(lm), expected) < (EXACT if dtype == "float32" else ROUNDED)
    (record,) = [record for record in caplog.records if record.name == "pipeline.models.load"]
    assert f"adapter {config.adapter} " in record.getMessage()
    assert "computed beside the weights" in record.getMessage()
    ids = [[5, 9, 13, 17], [21, 3, 7]]
    assert bool(torch.isfinite(gradient_norms(lm, ids)).all())


def test_an_adapter_of_a_quantized_base_stays_beside_the_weights(
    saved: Callable[[str], ModelConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of BitNet, which needs no GPU and no package; the model is within the limits of the probe."""
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # it would compile a function for a minute
    config = saved("LoRA")
    file = Path(config.path) / "config.json"
    method = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}))
    with caplog.at_level(logging.WARNING):
        lm = open_model(config)
    assert "AutoBitLinear" in {type(module).__name__ for module in lm.model.modules()}
    assert not is_exact(lm.model)
    assert "is for weights in full precision, and these are quantized" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        expected = peft.PeftModel.from_pretrained(model, config.adapter).eval()(input_ids=IDS).logits
    assert moved(plain, expected) > 0.1
    assert moved(logits(lm), expected) < EXACT


def test_a_merge_that_moves_logits_is_undone(
    saved: Callable[[str], ModelConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a method whose merge peft gets wrong: the weights are read again."""
    config = saved("LoRA")
    merge = peft.tuners.lora.Linear.merge

    def wrong(layer: Any, *args: Any, **settings: Any) -> None:
        merge(layer, *args, **settings)
        layer.get_base_layer().weight.data *= 1.01

    monkeypatch.setattr(peft.tuners.lora.Linear, "merge", wrong)
    _, expected = of_peft(config)
    for dtype, said in (("float32", "moves logits by"), ("bfloat16", "moves the outputs of")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pipeline.models.load"):
            lm = open_model(config.model_copy(update={"dtype": dtype}))
        assert said in caplog.text
        assert moved(logits(lm), expected) < (EXACT if dtype == "float32" else ROUNDED)


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_changes_more_than_layers_is_refused_by_name(
    case: str, saved: Callable[[str], ModelConfig]
) -> None:
    config = saved(case)
    line = user_error(check_model, config)
    assert line == user_error(open_model, config)
    assert line.startswith(f"adapter {config.adapter}: a {case} adapter can be neither merged nor kept beside the weig")


def adapter_of_more_tokens(config: ModelConfig, settings: peft.LoraConfig, tokens: int) -> None:
    """As a training leaves it that has resized the embedding."""
    model = AutoModelForCausalLM.from_pretrained(config.path)
    model.resize_token_embeddings(tokens)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(config.adapter or "", save_embedding_layers=bool(settings.modules_to_save))


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": SAVED},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"trainable_token_indices": [3, 99]},
        {},
    ],
    ids=str,
)
def test_an_adapter_with_added_tokens_is_refused_by_both_numbers(
    settings: dict[str, Any], saved: Callable[[str], ModelConfig]
) -> None:
    """Also where only the tokenizer beside it has them. As many tokens as the base has are no fault."""
    config = saved("LoRA")
    rows = AutoModelForCausalLM.from_pretrained(config.path).config.vocab_size
    if 99 in settings.get("trainable_token_indices", ()):
        settings = {"trainable_token_indices": [3, rows + 2]}
    adapter_of_more_tokens(config, lora(**settings), rows + 3)
    tokenizer = AutoTokenizer.from_pretrained(config.path)
    tokenizer.save_pretrained(config.adapter)
    if not settings:
        assert open_model(config).model is not None
        tokenizer.add_tokens([f"<more {number}>" for number in range(rows + 3 - len(tokenizer))])
        tokenizer.save_pretrained(config.adapter)
    for opener in (check_model, open_model):
        assert user_error(opener, config) == (
            f"adapter {config.adapter} has {rows + 3:,} tokens, and its base {rows:,}: add its tokens to the base, "
            "merge both with peft, and set path to the merged model"
        )


def with_more_tokens(
    config: ModelConfig, settings: dict[str, Any], more: int, whole: bool | Literal["auto"] = "auto"
) -> Tensor:
    """Train-like weights of an adapter with added tokens and its tokenizer; the logits of peft with it."""
    tokenizer = AutoTokenizer.from_pretrained(config.path)
    rows = AutoModelForCausalLM.from_pretrained(config.path).config.vocab_size
    tokenizer.add_tokens([f"<more {number}>" for number in range(rows + more - len(tokenizer))])
    tokenizer.save_pretrained(config.adapter or "")
    model = AutoModelForCausalLM.from_pretrained(config.path)
    model.resize_token_embeddings(len(tokenizer))
    if "trainable_token_indices" in settings:
        settings = {**settings, "trainable_token_indices": [*range(rows, rows + more)]}
    adapted = peft.get_peft_model(model, lora(**settings))
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    adapted.save_pretrained(config.adapter, save_embedding_layers=whole)
    torch.manual_seed(3)  # of the rows that peft adds
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(config.adapter, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        return opened(input_ids=torch.tensor([[*IDS[0].tolist(), rows, rows + more - 1]])).logits


@pytest.mark.parametrize("kind", ["LoRA", "LoRA of both, apart"])
@pytest.mark.parametrize(
    "settings",
    [{"modules_to_save": SAVED}, {"target_modules": SAVED}, {"trainable_token_indices": "added"}, {}],
    ids=str,
)
def test_an_adapter_with_added_tokens_and_its_tokenizer_is_opened_as_by_peft(
    kind: str, settings: dict[str, Any], saved: Callable[[str], ModelConfig]
) -> None:
    """With untied and tied embeddings, which are trained, or saved because they have another size."""
    config = saved(kind)
    before = fingerprint_model(config)
    expected = with_more_tokens(config, settings, 3)
    lm = open_model(config)
    rows = expected.shape[-1] - 3
    assert len(lm.tokenizer) == rows + 3
    assert lm.tokenizer("<more 0>")["input_ids"] == [len(AutoTokenizer.from_pretrained(config.path))]
    with torch.no_grad():
        found = lm.model(input_ids=torch.tensor([[*IDS[0].tolist(), rows, rows + 2]])).logits
    assert (found - expected).abs().max() < rounding_error(expected)
    check_model(config)
    after = fingerprint_model(config)
    assert after["tokenizer"] != before["tokenizer"]
    (Path(config.adapter or "") / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((Path(config.adapter or "") / "tokenizer_config.json").read_text()), "note": 1})
    )
    assert fingerprint_model(config)["tokenizer"] != after["tokenizer"]
    assert bool(torch.isfinite(gradient_norms(lm, [[5, 9, rows, rows + 2], [21, 3, 7]])).all())


@pytest.mark.parametrize(
    ("settings", "where"), [({"modules_to_save": ["lm_head"]}, "embeddings"), ({"modules_to_save": ["embed_tokens"]},
    "rows of the head")]
)  # fmt: skip
def test_an_adapter_without_all_weights_of_its_tokens_is_refused(
    settings: dict[str, Any], where: str, saved: Callable[[str], ModelConfig]
) -> None:
    """PEFT draws the others at random at every opening."""
    config = saved("both that were trained, apart")
    drawn = with_more_tokens(config, settings, 3, whole=False)
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(config.adapter).eval()
    with torch.no_grad():
        rows = drawn.shape[-1] - 3
        again = opened(input_ids=torch.tensor([[*IDS[0].tolist(), rows, rows + 2]])).logits
    assert not torch.equal(drawn, again)
    assert user_error(open_model, config).startswith(
        f"adapter {config.adapter} adds tokens to the {rows} of its base, up to {rows + 3}, and has not all {where} of "
    )


def test_an_audit_reads_texts_by_the_tokenizer_of_an_adapter_with_added_tokens(
    saved: Callable[[str], ModelConfig], make_audit: Callable[..., Path]
) -> None:
    """In windows, and for the tokens of the page too."""
    config = saved("LoRA")
    with_more_tokens(config, {"modules_to_save": SAVED}, 3)
    texts = [[f"<more 0> {sentence(seed, 60)}" for seed in range(start, start + 20)] for start in (0, 100)]
    selection = {"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}
    model = {"path": config.path, "adapter": config.adapter, "dtype": "float32"}
    settings = {"detectors": ["loss"], "selections": [selection], "max_tokens": 20, "windows": 2}
    path = make_audit(*texts, model=model, **settings)
    seenset.audit(path, quiet=True)
    shown = read_attributions(Store(str(path.parent / "run")), "members")
    assert shown
    for one in shown.values():
        values = [value for value in one.values if value is not None]
        assert one.score == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert "<more 0>" in [piece.strip() for piece in one.pieces]


def test_no_other_adapter_is_trained_or_switched_over_one_that_stays_beside(
    saved: Callable[[str], ModelConfig], tmp_path: Path
) -> None:
    config = saved("a bias that the layer lacks")
    lm = open_model(config)
    settings = FinetuneConfig(epochs=1, batch_size=2, rank=2, dtype="float32")
    texts = ["a quiet river", "an old stone house"]
    line = user_error(train, lm.model, lm.tokenizer, texts, settings, tmp_path / "more")
    assert line == "a training needs weights into which the configured adapter is merged, and it stays beside them"
    alone = open_model(ModelConfig(path=config.path, dtype="float32"))
    train(alone.model, alone.tokenizer, texts, settings, tmp_path / "more")
    folders = {"more": tmp_path / "more"}
    digest = fingerprint_model(ModelConfig(path=config.path))["model"]
    assert "needs weights into which" in user_error(Adapters, lm, folders, digest, config.path)
    Adapters(alone, folders, digest, config.path)


@pytest.mark.slow
def test_an_adapter_of_smollm2_is_merged_within_the_tolerance(
    smollm2: LanguageModel, smollm2_folder: Path, tmp_path: Path
) -> None:
    """One of rank 16 for all linear layers, whose weights are as large as those of a training."""
    torch.manual_seed(0)
    ids = torch.tensor([smollm2.tokenizer("A quiet river runs past the old stone house.")["input_ids"]])
    adapted = peft.get_peft_model(copy.deepcopy(smollm2.model), lora(r=16, lora_alpha=32, target_modules="all-linear"))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.02)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        plain, expected = (model(input_ids=ids).logits for model in (smollm2.model, adapted.eval()))
    del adapted, weight
    gc.collect()  # its modules refer to each other: 0.5 GB, before the model is opened again
    give_back()
    lm = open_model(ModelConfig(path=str(smollm2_folder), adapter=str(tmp_path / "adapter"), dtype="float32"))
    assert not any("lora" in name for name, _ in lm.model.named_modules())
    with torch.no_grad():
        found = lm.model(input_ids=ids).logits
    assert (expected - plain).abs().max() > 1
    assert (found - expected).abs().max() < rounding_error(expected) / 4
