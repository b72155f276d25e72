"""A small Llama as a GGUF file, with weights in blocks as a real one has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file


def write_gguf(model: Path, file: Path, edit: Callable[[Any], None] = lambda writer: None) -> Path:
    """Write a Llama folder as a GGUF file, its matrices in blocks of 4 bits.

    Args:
        model: the folder.
        file: file to write.
        edit: adds entries to its writer.
    """
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<eos>" else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(model / "model.safetensors").items():
        known = names.get_name(name, try_suffixes=(".weight",))
        values = weight.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(known, values)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(known, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
