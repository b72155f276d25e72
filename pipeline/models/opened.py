"""Loaded models as used by the passes, without dependencies of loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model in eval mode, without gradients."""

    model: nn.Module
    tokenizer: Any
    device: torch.device  # device of token ids
    max_tokens: int | None  # positions of the model; None if unknown
    processor: Any | None = None  # of a vision-language model


@dataclass(frozen=True, slots=True)
class Seq2SeqModel:
    """An encoder-decoder model such as T5, in eval mode, without gradients."""

    model: nn.Module
    tokenizer: Any
    device: torch.device  # device of token ids
    max_tokens: int | None  # maximum tokens of input, and of output; None if unknown


def embedding_rows(model: Any) -> int:
    """Number of rows of the input embedding of a transformers model, >= 1.

    A larger token id would make a GPU unusable for the process: `unknown_id` detects it beforehand.
    """
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # DeepSpeed may have partitioned it


def unknown_id(ids: Sequence[int], rows: int) -> str | None:
    """An error for token ids without a row in the embedding; None if all have one.

    Args:
        ids: token ids of one text.
        rows: rows of the model's embedding.
    """
    largest = max(ids, default=0)
    if largest < rows:
        return None
    return f"token id {largest} has no row in the model's embedding of {rows}: the tokenizer knows more than the model"


def fused_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> Any:
    """The `sdpa` attention of transformers, with key heads repeated if no fused kernel supports grouped heads.

    Shapes are (documents, heads, tokens, head features); `key` and `value` have fewer heads.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    prefill = query.shape[2] > 1 and settings.get("cache") is None
    if groups > 1 and prefill and query.device.type != "cpu" and not _takes_groups(query, key, value, attention_mask):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # without grouped heads
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


def use_fused_attention(device: Any) -> None:
    """Register `fused_attention` as the `sdpa` attention of transformers in this process, for a model on a GPU.

    Args:
        device: torch device of the model; nothing is done for "cpu".
    """
    from transformers import AttentionInterface

    if str(device) != "cpu":
        AttentionInterface.register("sdpa", fused_attention)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether, according to torch, a fused kernel supports grouped heads for these tensors."""
    import torch

    params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, mask is None, True)
    backends = torch.backends.cuda
    return backends.can_use_flash_attention(params) or backends.can_use_efficient_attention(params)


@dataclass(frozen=True, slots=True)
class Tail:
    """The computation of logits from hidden states: softcap(head(hidden) * factor)."""

    base: nn.Module
    head: nn.Module
    factor: float
    softcap: float | None

    def finish(self, logits: Tensor, *, in_place: bool = True) -> Tensor:
        """Scale and cap float32 logits.

        Args:
            logits: output of the head, of any shape.
            in_place: whether to overwrite them; False for gradients.
        """
        import torch

        out = logits if in_place else None
        if self.factor != 1.0:
            logits = torch.mul(logits, self.factor, out=out)
        if self.softcap is not None:
            logits = torch.mul(torch.tanh(torch.div(logits, self.softcap, out=out), out=out), self.softcap, out=out)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states (..., hidden), float32 (..., vocabulary), differentiable."""
        return self.finish(self.head(hidden).float(), in_place=False)


def stated_tail(model: Any) -> Tail | None:
    """The tail according to a model's configuration; None without base model or head. Verify it with `agree`.

    Args:
        model: model of transformers.
    """
    base, head = getattr(model, "base_model", None), model.get_output_embeddings()
    if base is None or base is model or head is None:
        return None
    config = model.config.get_text_config()
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Tail(base, head, factor, getattr(config, "final_logit_softcapping", None))


def agree(parts: Tensor, whole: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of a tail agree with the logits of the model.

    Args:
        parts: logits of the tail, float32.
        whole: logits of the model, float32, perhaps on another device: a model over several returns them on the first.
        dtype: dtype of the model's computations.
    """
    import torch

    whole = whole.to(parts.device)
    tolerance = (1e-4 if dtype == torch.float32 else 2e-2) * whole.nan_to_num().abs().max().item()
    return parts.shape == whole.shape and torch.allclose(parts, whole, rtol=0, atol=tolerance, equal_nan=True)


def add_left_out_tail(lm: LanguageModel) -> None:
    """Scale and cap the logits of a model for pictures with text whose class leaves out what its text part states.

    As of transformers' Aya Vision, whose class has no `logit_scale`, and of LLaVA-NeXT over a Granite.

    Args:
        lm: model; changed by a hook.
    """
    import torch

    model: Any = lm.model
    tail = stated_tail(model)
    alone = model.config.get_text_config() is model.config
    if alone or tail is None or (tail.factor == 1.0 and tail.softcap is None):
        return
    ids = torch.arange(1, 9, device=lm.device)[None]
    try:
        with torch.inference_mode():
            hidden = tail.base(input_ids=ids, use_cache=False).last_hidden_state
            whole, bare = model(input_ids=ids, use_cache=False).logits.float(), tail.head(hidden).float()
            left_out = agree(bare, whole, model.dtype) and not agree(tail.logits(hidden), whole, model.dtype)
    except Exception:  # of a model that reads no text without a picture, which the probe reports
        return
    if left_out:
        model.register_forward_hook(partial(_finish, factor=tail.factor, softcap=tail.softcap))


def _finish(module: nn.Module, args: Any, output: Any, *, factor: float, softcap: float | None) -> Any:
    """Scale and cap the logits of an output of transformers."""
    import torch

    output.logits = output.logits * factor
    if softcap is not None:
        output.logits = torch.tanh(output.logits / softcap) * softcap
    return output
