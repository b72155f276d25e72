"""How the next token of a continuation is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn: temperature, then the top k, then the top p of those.

    Raises:
        UserError: a value outside its limits.
    """

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # of the tokens, the k likeliest; None takes all
    top_p: float = 1.0  # of those, the likeliest that together have this share of their probability
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, or null for no limit, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


def sample_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """Draw one token a row by inverting the distribution function, in the order of the token ids.

    Args:
        logits: (rows, vocabulary), any floating dtype.
        sampling: Temperature, top k, top p: applied in this order, as transformers does, in float32. Of tokens that
            tie for the k-th place, some are taken.
        uniforms: (rows,) float64 in [0, 1).

    Returns:
        Token ids, (rows,); -1 where the logits are not finite. The order of the ids, unlike that of the probabilities,
        is not changed by rounding, so that only a uniform at the very edge of a token can give another one.
    """
    values = logits.float()
    if sampling.temperature == 0:
        best, tokens = values.max(1)
        return tokens.masked_fill(~best.isfinite(), -1)
    values = values / sampling.temperature
    ids: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < values.shape[1]:
        values, ids = values.topk(sampling.top_k, dim=1)
    elif sampling.top_p < 1:
        values, ids = values.sort(dim=1, descending=True)
    p = values.softmax(1)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(1) - p >= sampling.top_p, 0.0)  # the first stays, and so does NaN
    if ids is not None:
        ids, order = ids.sort(dim=1)
        p = p.gather(1, order)
    below = p.double().cumsum(1)
    total = below[:, -1:]
    sought = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(below, sought, right=True).clamp_max(p.shape[1] - 1)
    tokens = (place if ids is None else ids.gather(1, place)).squeeze(1)
    return tokens.masked_fill(~total.squeeze(1).isfinite(), -1)
