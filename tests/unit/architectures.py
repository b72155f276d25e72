"""Sizes of tiny random models of several architectures, one that none of our rules fits, and plain statistics."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from pipeline.passes.statistics import MODIFIED_ORDERS

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.4}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
OPT |= {"init_std": 0.4, "max_position_embeddings": 64}


class HalvedLogits(LlamaForCausalLM):
    """Logits that do not follow from the head and the configuration."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def documents(lengths: tuple[int, ...] = (9, 2, 30, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def plain_statistics(logits: Tensor, tokens: list[int]) -> dict[str, Tensor]:
    """Every statistic of one token a row, in float64."""
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    targets = torch.tensor(tokens)[:, None]
    own = log_p.gather(1, targets).squeeze(1)
    is_own = torch.zeros_like(p, dtype=torch.bool).scatter_(1, targets, True)
    mean = (p * log_p).sum(1)
    return {
        "log_prob": own,
        "mean": mean,
        "variance": (p * (log_p - mean[:, None]).square()).sum(1),
        "m_entropy": -(1 - own.exp()) * own - (p * torch.log1p(-p)).masked_fill(is_own, 0).sum(1),
        "renyi_0.5": 2 * p.sqrt().sum(1).log(),
        "renyi_1": -mean,
        "renyi_2": -p.square().sum(1).log(),
        "renyi_inf": -log_p.amax(1),
        **{f"mod_renyi_{order}": modified(p, own.exp(), is_own, abs(1 - float(order))) for order in MODIFIED_ORDERS},
    }


def modified(p: Tensor, p_own: Tensor, is_own: Tensor, q: float) -> Tensor:
    others = (p * (1 - p) ** q - p).masked_fill(is_own, 0).sum(1)
    return -((1 - p_own) * p_own**q - (1 - p_own) + others) / q


def found_of(statistics: Any, name: str) -> Tensor:
    if name.startswith("mod_renyi_"):
        return statistics.mod_renyi[name.removeprefix("mod_renyi_")]
    return statistics.renyi[name.removeprefix("renyi_")] if name.startswith("renyi_") else getattr(statistics, name)


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """The arguments of a module's calls."""
    calls: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    yield calls
    hook.remove()
