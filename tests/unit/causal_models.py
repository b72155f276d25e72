"""Tiny random models of the architectures that transformers opens for causal language modelling."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 97
WIDTH = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "emb_dim", "embedding_size"), 32)
DEPTH = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2)
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
)
INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 64)
NARROW = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
ONE = dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "mamba_n_groups", "mamba_ngroups"), 1)
EIGHT = dict.fromkeys(
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "state_size", "mamba_d_state", "mamba_n_heads",
     "mamba_d_head", "mamba_headdim", "linear_key_head_dim", "linear_value_head_dim"), 8,
)  # fmt: skip
SIZES = {
    **WIDTH, **DEPTH, **HEADS, **INNER, **NARROW, **EXPERTS, **ONE, **EIGHT, "vocab_size": VOCABULARY,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64, "n_positions": 64,
    "word_embed_proj_dim": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "first_k_dense_replace": 1,
    "mamba_dt_rank": 4, "mamba_expand": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Settings that a configuration gets if it has one of that name."""

OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "num_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "reformer": {
        "is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "attention_head_size": 8,
        "feed_forward_size": 64, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "num_buckets": 2,
    },
    "zamba": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3], "num_hidden_layers": 4,
        "n_mamba_heads": 8,
    },
}  # fmt: skip


def tiny_config(model_type: str, **own: Any) -> Any:
    """A configuration of two layers, or of one layer of each type."""
    kind: Any = CONFIG_MAPPING[model_type]
    usual = kind().to_dict()
    settings = {name: size for name, size in SIZES.items() if name in usual and name not in kind.attribute_map}
    if "kv_lora_rank" in settings:  # multi-head latent attention
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= {**OWN.get(model_type, {}), **own}
    types = list(dict.fromkeys(usual.get("layer_types") or []))
    if types and "layer_types" not in settings:
        settings["layer_types"] = (2 * types)[: max(2, len(types))]
        settings |= {
            name: len(settings["layer_types"]) for name in ("num_hidden_layers", "n_layer") if name in settings
        }
    if isinstance(usual.get("mlp_layer_types"), list):
        settings["mlp_layer_types"] = (2 * list(dict.fromkeys(usual["mlp_layer_types"])))[
            : settings["num_hidden_layers"]
        ]
    return kind(**settings)


def tiny_model(model_type: str, **own: Any) -> Any:
    """A random model whose logits differ clearly from token to token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **own)).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.weight.normal_(0, 0.2)
    return model


class PlainTokenizer:
    """Token ids of characters, for models that are not read from a folder."""

    all_special_ids = (0, 1, 2)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(character) % (VOCABULARY - 3) for character in text]}
