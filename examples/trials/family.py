"""Small models trained from scratch, on texts that no trial asks about.

`model_size.yaml` contaminates a family of growing size; the models of `benchmark.py` are made here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo.passages import candidates, distinct
from pipeline.training.train import FinetuneConfig, TrainingOptions, TrainingStep, train

TEXTS = 1000
"""Passages that the family is trained on."""
TRAINING = FinetuneConfig(method="full", epochs=2, batch_size=8, learning_rate=2e-3, dtype="float32")
END = "<end>"

console = Console()


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a small Llama."""

    hidden: int
    layers: int
    vocabulary: int = 1024

    def config(self) -> LlamaConfig:
        """The configuration in transformers: heads of 32, embeddings shared with the output."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            vocab_size=self.vocabulary,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=True,
        )


FAMILY = {
    "0.1M": Size(hidden=64, layers=2),
    "0.6M": Size(hidden=128, layers=3),
    "1.7M": Size(hidden=192, layers=4),
    "4.4M": Size(hidden=320, layers=4),
}


def make_family(folder: Path, documents: Sequence[str], texts: int = TEXTS) -> None:
    """Train the missing models of the family, each into a folder named after its size.

    Args:
        folder: of the family.
        documents: texts of the trial, which no model may have seen.
        texts: how many passages to train on.
    """
    missing = {name: size for name, size in FAMILY.items() if not (folder / name).exists()}
    if not missing:
        return
    kept = set(documents)
    passages = list(islice((p.text for p in distinct(candidates()) if p.text not in kept), texts))
    for name, size in missing.items():
        from_scratch(folder / name, size, passages, TRAINING)


def from_scratch(folder: Path, size: Size, texts: Sequence[str], training: FinetuneConfig) -> None:
    """Train a tokenizer and a model on texts; the folder appears whole or not at all."""
    tokenizer = make_tokenizer(texts, size.vocabulary)
    torch.manual_seed(training.seed)
    model = LlamaForCausalLM(size.config())
    weights = sum(weight.numel() for weight in model.parameters())
    console.print(f"{folder.name}: training {weights:,} weights on {len(texts):,} texts, {training.epochs} times")
    folder.parent.mkdir(parents=True, exist_ok=True)
    train(model, tokenizer, texts, training, folder, TrainingOptions(show_step))


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Train a byte-level BPE of at most `vocabulary` tokens; each digit is a token, so that sums can be learnt."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def show_step(step: TrainingStep) -> None:
    """Print a line at every quarter of a training."""
    if step.step % max(1, step.steps // 4) == 0:
        console.print(f"  step {step.step}/{step.steps}  loss {step.loss:.2f}  {step.seconds:.0f} s", highlight=False)
