"""A tiny random T5 with a tokenizer of its own, which a test builds in a second."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from benchmarks.small_model import save_small_model


def save_tiny_t5(folder: Path, mute: bool = False) -> None:
    """Save the model (safetensors) and a byte-level tokenizer; all that a mute one says is special tokens."""
    save_small_model(folder, hidden=32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if mute:
        tokenizer.add_special_tokens({"additional_special_tokens": list(tokenizer.get_vocab())})
        tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "n_positions": 512}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": list(range(1, 30))}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids, vocab_size=len(tokenizer), tie_word_embeddings=False))
    model.lm_head.weight.data.mul_(0.02)  # nearly all tokens alike: answers vary, and end soon
    model.save_pretrained(folder)
