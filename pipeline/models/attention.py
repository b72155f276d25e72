"""Attention with grouped heads on a GPU: never the kernel whose memory grows with the square of a text's length.

torch's fused kernels take fewer heads of keys than of queries only in some cases (in half precision, on a recent GPU).
Where none of them does, the heads of keys are repeated, and a fused kernel takes them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch costs seconds, and a model's files are checked in one
    from torch import Tensor


def fused_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> Any:
    """The `sdpa` attention of transformers, with the heads of keys repeated where no fused kernel takes fewer of them.

    Shapes are (documents, heads, tokens, features of a head), of `key` and `value` with fewer heads.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    prefill = query.shape[2] > 1 and settings.get("cache") is None
    if groups > 1 and prefill and query.device.type != "cpu" and not _takes_groups(query, key, value, attention_mask):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # without groups
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


def use_fused_attention(device: Any) -> None:
    """Make `fused_attention` what transformers calls `sdpa`, in this process, for a model on a GPU.

    Args:
        device: of the model, as torch names it; with "cpu" nothing is done.
    """
    from transformers import AttentionInterface

    if str(device) != "cpu":
        AttentionInterface.register("sdpa", fused_attention)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel takes fewer heads of keys than of queries, by torch's answer for these tensors."""
    import torch

    params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, mask is None, True)
    backends = torch.backends.cuda
    return backends.can_use_flash_attention(params) or backends.can_use_efficient_attention(params)
