"""A checkpoint that also reads pictures opens for text audits with the scores of its text backbone."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import seenset
from pipeline.config.models import ModelConfig
from pipeline.models.checkpoints import locate, read_model_config
from pipeline.models.load import check_model, count_parameters, fingerprint_model, open_model, open_paraphraser
from tests.helpers.commands import user_error
from tests.helpers.picture_models import ROPE, SENTENCES, TEXT, TOWER, WORDS, tokenizer_with

VOCABULARY = len(tokenizer_with())
SIZES: dict[str, Any] = {**TEXT, "vocab_size": VOCABULARY, "initializer_range": 0.2}
PIXTRAL: dict[str, Any] = {**TOWER, "image_size": 28, "patch_size": 7, "head_dim": 16}
CLIP: dict[str, Any] = {
    **TOWER,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 32,
    "model_type": "clip_vision_model",
}
SIGLIP: dict[str, Any] = {**TOWER, "image_size": 32, "patch_size": 8, "model_type": "siglip_vision_model"}
QWEN: dict[str, Any] = {"depth": 2, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DETECTORS = ["loss", "min_k_plus_plus", "renyi", "zlib"]
TEXTS = [*dict.fromkeys(SENTENCES), "a quiet river", "a small stone house and a tall tree " * 3, "sky", "a dog. A cat."]


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny checkpoint for pictures with text, and the class of its text backbone alone."""

    kind: str  # model type
    vision: dict[str, Any] | None
    backbone: str  # class for causal language modelling
    text: dict[str, Any] = field(default_factory=dict)  # further settings of the text part
    alone: dict[str, Any] = field(default_factory=dict)  # settings of the backbone's class alone


CASES = [
    Case("mistral3", PIXTRAL, "Mistral", {"model_type": "mistral"}),
    Case("qwen2_vl", {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, "Qwen2",
         {"rope_parameters": ROPE}),
    Case("qwen2_5_vl", {**QWEN, "fullatt_block_indexes": [1], "window_size": 56}, "Qwen2", {"rope_parameters": ROPE}),
    Case("qwen3_vl", {**QWEN, "deepstack_visual_indexes": [0]}, "Qwen3", {"rope_parameters": ROPE, "head_dim": 16}),
    Case("qwen3_vl_moe", {**QWEN, "deepstack_visual_indexes": [0]}, "Qwen3Moe",
         {"rope_parameters": ROPE, "head_dim": 16, "num_experts": 4, **EXPERTS}, {"norm_topk_prob": True}),
    Case("glm4v", QWEN, "Glm4", {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
                                 "head_dim": 16}),
    Case("internvl", {**TOWER, "image_size": [28, 28], "patch_size": [7, 7]}, "Qwen2", {"model_type": "qwen2"}),
    Case("llava", CLIP, "Llama", {"model_type": "llama"}),
    Case("llava_next", CLIP, "Mistral", {"model_type": "mistral"}),
    Case("llava_next", CLIP, "Granite", {"model_type": "granite", "logits_scaling": 4.0}),
    Case("aya_vision", SIGLIP, "Cohere2",
         {"model_type": "cohere2", "layer_types": ["full_attention"] * 2, "logit_scale": 0.25}),
    Case("cohere2_vision", SIGLIP, "Cohere2",
         {"model_type": "cohere2", "layer_types": ["full_attention"] * 2, "logit_scale": 0.25}),
    Case("llava", CLIP, "Gemma2", {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 2.0}),
    Case("llava_onevision", SIGLIP, "Qwen2", {"model_type": "qwen2"}),
    Case("idefics3", {**TOWER, "image_size": 28, "patch_size": 7}, "Llama", {"model_type": "llama"}),
    Case("smolvlm", {**TOWER, "image_size": 28, "patch_size": 7}, "Llama", {"model_type": "llama"}),
]  # fmt: skip


def config_of(case: Case) -> Any:
    """The configuration of the whole checkpoint."""
    kind: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[case.kind]
    settings = {**SIZES, **case.text}
    return kind(vision_config=case.vision, text_config=settings, tie_word_embeddings=False)


def save(config: Any, folder: Path) -> Any:
    """A random model of transformers' image-text mapping with its tokenizer, as a folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer_with().save_pretrained(folder)
    return model


def save_backbone(model: Any, case: Case, folder: Path) -> None:
    """The text part of a model with weights of its own class."""
    settings = {**model.config.get_text_config().to_dict(), "tie_word_embeddings": False, **case.alone}
    settings["rope_parameters"] = {
        name: value for name, value in settings["rope_parameters"].items() if name != "mrope_section"
    }
    config = getattr(transformers, f"{case.backbone}Config")(**settings)
    backbone = getattr(transformers, f"{case.backbone}ForCausalLM")(config).eval()
    part = getattr(model.model, "language_model", None) or model.model.text_model
    backbone.model.load_state_dict(part.state_dict())
    backbone.lm_head.load_state_dict(model.lm_head.state_dict())
    backbone.save_pretrained(folder)
    tokenizer_with().save_pretrained(folder)


def scores(folder: Path) -> dict[str, list[float]]:
    table = seenset.score(ModelConfig(path=str(folder), dtype="float32"), TEXTS, DETECTORS, batch_tokens=256)
    return {name: table[name].to_pylist() for name in (*DETECTORS, "problem")}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind} of {case.backbone}" for case in CASES])
def test_the_scores_of_texts_are_those_of_the_text_backbone(case: Case, tmp_path: Path) -> None:
    """Its positions have one axis, those of Qwen-VL and GLM-4V three; texts of several lengths share a batch."""
    assert case.kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = save(config_of(case), tmp_path / "whole")
    save_backbone(model, case, tmp_path / "backbone")
    config = ModelConfig(path=str(tmp_path / "whole"), dtype="float32")
    facts = check_model(config)
    assert facts["architecture"] == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[case.kind]
    assert facts["parameters"] == count_parameters(config) == sum(one.numel() for one in model.parameters())
    found, expected = scores(tmp_path / "whole"), scores(tmp_path / "backbone")
    assert found["problem"] == expected["problem"] == [None] * len(TEXTS)
    for name in DETECTORS:
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
        assert len(set(expected[name])) == len(TEXTS)


def plain_loss(model: Any, folder: Path) -> list[float]:
    """The detector `loss` of each text by the text backbone of a model, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    part = getattr(model, "language_model", model)  # of Llama 4 a model with its own head
    backbone = getattr(part.model, "language_model", part.model)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            logits = part.lm_head(backbone(input_ids=ids).last_hidden_state)[0, :-1].double()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        found.append(float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).mean()))
    return found


LATENT_EXPERTS: dict[str, Any] = {**SIZES, **LATENT, **EXPERTS, "n_routed_experts": 4, "q_lora_rank": 16}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
BOTH = ["linear_attention", "full_attention"]
SLIDING = ["sliding_attention", "full_attention"]
IN_PARTS: dict[str, Callable[[], Any]] = {
    "mistral4": lambda: transformers.Mistral4Config(**LATENT_EXPERTS),
    "mistral_large4": lambda: transformers.MistralLarge4Config(
        vision_config={**PIXTRAL, "model_type": "pixtral"}, spatial_merge_size=2,
        text_config={**LATENT_EXPERTS, "index_head_dim": 8, "index_n_heads": 2, "no_rope_layers": [1, 0]},
    ),
    "gemma3": lambda: transformers.Gemma3Config(
        vision_config=SIGLIP, text_config={**SIZES, "head_dim": 16, "sliding_window": 8, "layer_types": SLIDING}
    ),
    "gemma4": lambda: transformers.Gemma4Config(
        vision_config={**TOWER, "head_dim": 16, "global_head_dim": 16, "num_key_value_heads": 2, "patch_size": 7},
        text_config={
            **SIZES, "head_dim": 16, "global_head_dim": 16, "sliding_window": 8, "layer_types": SLIDING,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
        },
    ),
    "llama4": lambda: transformers.Llama4Config(
        vision_config={**TOWER, "image_size": 28, "patch_size": 7, "vision_output_dim": 32,
                       "projector_input_dim": 32, "projector_output_dim": 32},
        text_config={**SIZES, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4},
    ),
    "mllama": lambda: transformers.MllamaConfig(
        vision_config={**TOWER, "image_size": 28, "patch_size": 7, "num_global_layers": 1, "vision_output_dim": 64,
                       "attention_heads": 2, "intermediate_layers_indices": [0], "max_num_tiles": 2,
                       "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
        text_config={**SIZES, "bos_token_id": 0, "cross_attention_layers": [1]},
    ),
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        vision_config={**QWEN, "num_position_embeddings": 16},
        text_config={**SIZES, **LINEAR, "head_dim": 16, "layer_types": BOTH,
                     "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
    ),
}  # fmt: skip
"""Configurations without a class for the text part alone, and checkpoints that have a causal class."""


@pytest.mark.parametrize("kind", IN_PARTS)
def test_a_checkpoint_with_a_class_of_its_own_has_the_scores_of_its_text_part(kind: str, tmp_path: Path) -> None:
    model = save(IN_PARTS[kind](), tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32")
    facts = check_model(config)
    assert facts["parameters"] == sum(one.numel() for one in open_model(config).model.parameters())
    assert scores(tmp_path)["loss"] == pytest.approx(plain_loss(model, tmp_path), abs=1e-5)


CASE = next(case for case in CASES if case.kind == "qwen2_5_vl")
OPENERS = (check_model, open_model, open_paraphraser)


def audit(model: Path, folder: Path) -> dict[str, list[Any]]:
    """Scores of a whole run, in order of the documents."""
    folder.mkdir()
    for role in ("audit", "unseen"):
        rows = [
            {"id": f"{role}-{row}", "text": " ".join((row % 7 + 9) * [*WORDS[row % 5 :], role])} for row in range(20)
        ]
        (folder / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = {role: {"path": str(folder / f"{role}.jsonl"), "id": "id"} for role in ("audit", "unseen")}
    detectors = ["loss", "gradient_norm", {"samia": {"draws": 2}}]
    seenset.audit(
        {
            "run": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "corpus": corpus,
            "max_tokens": 96,
            "detectors": detectors,
            "resources": {"cluster": "local", "shard_documents": 8},
        }
    )
    table = pq.read_table(folder / "run" / "scores").sort_by("doc_id")
    return {name: table[name].to_pylist() for name in ("doc_id", "loss", "gradient_norm", "samia(draws=2)")}


def test_every_pass_of_a_run_is_that_of_the_text_backbone(tmp_path: Path) -> None:
    """Gradients, and continuations of prompts with several lengths in one batch, with positions of three axes."""
    save_backbone(save(config_of(CASE), tmp_path / "whole"), CASE, tmp_path / "backbone")
    found, expected = (audit(tmp_path / name, tmp_path / f"run of {name}") for name in ("whole", "backbone"))
    for name, values in expected.items():
        numbers = isinstance(values[0], float)
        assert found[name] == (pytest.approx(values, abs=1e-5, rel=1e-5) if numbers else values), name


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_weights_of_another_shape_are_refused_before_a_run(kind: str, tmp_path: Path) -> None:
    """In their files they have other names than in the model."""
    save(config_of(next(case for case in CASES if case.kind == kind)), tmp_path)
    config = ModelConfig(path=str(tmp_path))
    names = sorted(load_file(tmp_path / "model.safetensors"))
    text = next(name for name in names if name.endswith("layers.1.mlp.up_proj.weight") and "vis" not in name)
    rewritten(tmp_path, lambda weights: weights.update({text: torch.ones(3, 4)}))
    for opener in OPENERS:
        line = user_error(opener, config)
        assert "ForConditionalGeneration: 1 of another shape (model.language_model.layers.1.mlp.up_proj.weight)" in line


def test_a_lacking_weight_of_the_text_or_of_the_tower_is_named(tmp_path: Path) -> None:
    save(config_of(CASE), tmp_path)
    name = "model.visual.blocks.0.attn.proj.weight"
    names = {one for one in load_file(tmp_path / "model.safetensors") if one.endswith("blocks.0.attn.proj.weight")}
    rewritten(tmp_path, lambda weights: [weights.pop(one) for one in names])
    assert f"1 missing from the file ({name})" in user_error(open_model, ModelConfig(path=str(tmp_path)))


def test_llama_4_names_weights_that_are_unknown_for_pictures_too(tmp_path: Path) -> None:
    save(IN_PARTS["llama4"](), tmp_path)
    rewritten(tmp_path, lambda weights: weights.update({"vision_model.more.weight": torch.ones(2)}))
    line = user_error(open_model, ModelConfig(path=str(tmp_path)))
    assert line.endswith("do not fit Llama4ForCausalLM: 1 unknown to the model (vision_model.more.weight)")


def test_a_text_path_that_is_not_causal_is_refused_with_its_class(tmp_path: Path) -> None:
    """PaliGemma reads a prefix in both directions, BLIP-2 no text without a picture, Florence-2 encodes the text."""
    settings = {**SIZES, "model_type": "gemma", "head_dim": 16}
    vision = {**SIGLIP, "projection_dim": 64}
    prefix = transformers.PaliGemmaConfig(vision_config=vision, text_config=settings, projection_dim=64)
    prefix.vocab_size = VOCABULARY
    save(prefix, tmp_path / "prefix")
    for opener in OPENERS:
        line = user_error(opener, ModelConfig(path=str(tmp_path / "prefix")))
        assert "PaliGemmaForConditionalGeneration is no causal language model: another last token moves" in line
    qformer = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
               "encoder_hidden_size": 32, "vocab_size": 8}  # fmt: skip
    text = {"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}  # fmt: skip
    vision = {**TOWER, "image_size": 28, "patch_size": 7}
    save(transformers.Blip2Config(vision_config=vision, qformer_config=qformer, text_config=text), tmp_path / "blip")
    line = user_error(open_model, ModelConfig(path=str(tmp_path / "blip")))
    assert "Blip2ForConditionalGeneration cannot read a text of 12 tokens: " in line
    (tmp_path / "encoder").mkdir()
    transformers.Florence2Config().save_pretrained(tmp_path / "encoder")
    config = ModelConfig(path=str(tmp_path / "encoder"))
    line = user_error(read_model_config, config, locate(config, weights=False))
    assert "is no causal language model: florence2; it reads pictures with text, and no corpus.*.image is given" in line


def test_the_fingerprint_and_an_adapter_are_those_of_the_class_that_opens(tmp_path: Path) -> None:
    model = save(config_of(CASE), tmp_path / "whole")
    config = ModelConfig(path=str(tmp_path / "whole"), dtype="float32")
    assert len(fingerprint_model(config)["model"]) == 64
    targets = r".*language_model.*\.(q_proj|down_proj)"
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 9, 13, 17, 21, 3, 7]])
    with torch.no_grad():
        expected, plain = adapted(input_ids=ids).logits, adapted.get_base_model()
        found = open_model(config.model_copy(update={"adapter": str(tmp_path / "adapter")})).model(input_ids=ids).logits
        with adapted.disable_adapter():
            assert (plain(input_ids=ids).logits - expected).abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-4
