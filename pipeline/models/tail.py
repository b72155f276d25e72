"""How a model's logits follow from its hidden states, for whatever needs them a piece at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Tail:
    """What a model does with its hidden states: softcap(head(hidden) * factor)."""

    base: nn.Module
    head: nn.Module
    factor: float
    softcap: float | None

    def finish(self, logits: Tensor, *, in_place: bool = True) -> Tensor:
        """Scale and cap float32 logits.

        Args:
            logits: of the head, of any shape.
            in_place: whether they are overwritten; gradients need them as they were.
        """
        out = logits if in_place else None
        if self.factor != 1.0:
            logits = torch.mul(logits, self.factor, out=out)
        if self.softcap is not None:
            logits = torch.mul(torch.tanh(torch.div(logits, self.softcap, out=out), out=out), self.softcap, out=out)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states (..., hidden), float32 (..., vocabulary); gradients can be taken of them."""
        return self.finish(self.head(hidden).float(), in_place=False)


def stated_tail(model: Any) -> Tail | None:
    """The tail that a model's configuration states; None where it has no base, or no head. It is yet to be proved.

    Args:
        model: of transformers.
    """
    base, head = getattr(model, "base_model", None), model.get_output_embeddings()
    if base is None or base is model or head is None:
        return None
    config = model.config.get_text_config()
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Tail(base, head, factor, getattr(config, "final_logit_softcapping", None))


def agree(parts: Tensor, whole: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits by a tail are those that the model itself gave.

    Args:
        parts: by the tail, float32.
        whole: of the model, float32, perhaps on another device: a model over several hands its logits to the first.
        dtype: in which the model computes.
    """
    whole = whole.to(parts.device)
    tolerance = (1e-4 if dtype == torch.float32 else 2e-2) * whole.nan_to_num().abs().max().item()
    return parts.shape == whole.shape and torch.allclose(parts, whole, rtol=0, atol=tolerance, equal_nan=True)
