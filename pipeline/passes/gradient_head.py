"""Gradients by a language model's head and by its last hidden states, without autograd; norms of products.

The gradient of the cross-entropy by the logits is softmax less one-hot. To save memory, it is computed for a few
documents at a time, or for one document and a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.passes.forward import HEAD_ELEMENTS

PRODUCT_ELEMENTS = 1 << 26
"""Of a product that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class HeadGradient:
    """Gradients of a batch at the head."""

    hidden: Tensor  # gradient by the hidden states, (documents, tokens, hidden), in their dtype
    weight: Tensor  # squared norm of the gradient by the weight, (documents,) float64
    bias: Tensor | None  # the same by the bias, if there is one
    by_token: Tensor | None  # rows of the weight's gradient for the documents' tokens, (documents, tokens, hidden)


def head_gradient(
    head: nn.Linear, factor: float, hidden: Tensor, tokens: Tensor, shares: Tensor, tied: bool
) -> HeadGradient:
    """Gradients of each document's mean cross-entropy by what its logits head(hidden) * factor are made of.

    Args:
        head: The head; its weight is (vocabulary, hidden).
        factor: Of the logits.
        hidden: Last hidden states, (documents, tokens, hidden).
        tokens: Token ids, (documents, tokens).
        shares: Of each position but the last in its document's loss, (documents, tokens - 1) float32; 0 on padding.
        tied: Whether to give `by_token`.
    """
    device = head.weight.device
    rows, tokens, shares = hidden[:, :-1].to(device).contiguous(), tokens.to(device), shares.to(device) * factor
    budget = HEAD_ELEMENTS.get(device.type, HEAD_ELEMENTS["cuda"])
    together = max(1, budget // (rows.shape[1] * len(head.weight)))
    parts = [
        _part_of_batch(head, factor, *some, tied, budget)
        for some in zip(rows.split(together), tokens.split(together), shares.split(together), strict=True)
    ]
    return HeadGradient(
        functional.pad(torch.cat([part.hidden for part in parts]), (0, 0, 0, 1)).to(hidden.device),
        torch.cat([part.weight for part in parts]),
        torch.cat([part.bias for part in parts if part.bias is not None]) if head.bias is not None else None,
        torch.cat([part.by_token for part in parts if part.by_token is not None]) if tied else None,
    )


def _part_of_batch(
    head: nn.Linear, factor: float, rows: Tensor, tokens: Tensor, shares: Tensor, tied: bool, budget: int
) -> HeadGradient:
    """As `head_gradient`, for a few documents; `rows` are their hidden states without the last position."""
    positions, features = rows.shape[1:]
    by_gram = gram_is_cheaper(positions, features, len(head.weight))
    weighted = rows.float() * shares[..., None]
    hidden = torch.zeros_like(rows, dtype=torch.float32)
    by_token = torch.zeros(*tokens.shape, features, device=rows.device) if tied else None
    outer: Tensor | None = None
    products, bias = (torch.zeros(len(rows), dtype=torch.float64, device=rows.device) for _ in range(2))
    for start, p in _differences(head, factor, rows, tokens, budget):
        stop = start + p.shape[2]
        hidden += (p.flatten(0, 1) @ head.weight[start:stop]).view_as(rows)
        if by_gram:
            outer = gram(p) if outer is None else outer.add_(gram(p))
        else:
            products += product_squares(weighted, p)
        if head.bias is not None:
            bias += square(torch.bmm(shares[:, None], p.float()).squeeze(1))
        if by_token is not None:
            inside = (tokens >= start) & (tokens < stop)
            columns = (tokens - start).clamp(0, stop - start - 1)[:, None].expand(-1, positions, -1)
            by_token += torch.bmm(p.gather(2, columns).float().mT, weighted).where(inside[..., None], 0.0)
    if outer is not None:
        products = inner(outer, gram(weighted))
    return HeadGradient((hidden * shares[..., None]).to(rows.dtype), products, bias, by_token)


def _differences(
    head: nn.Linear, factor: float, rows: Tensor, tokens: Tensor, budget: int
) -> Iterator[tuple[int, Tensor]]:
    """Softmax less one-hot for one part of the vocabulary after another: its start, and (documents, positions, part).

    In the weight's dtype, as autograd would hand it to the head; taking the next part overwrites it.
    """
    vocabulary, flat = len(head.weight), rows.flatten(0, 1)  # flat: torch multiplies it faster
    width = min(vocabulary, max(1, budget // (rows.shape[0] * rows.shape[1])))

    def logits(start: int) -> Tensor:
        bias = None if head.bias is None else head.bias[start : start + width]
        values = functional.linear(flat, head.weight[start : start + width], bias).float()
        return (values.mul_(factor) if factor != 1.0 else values).view(*rows.shape[:2], -1)

    starts = range(0, vocabulary, width)
    total: Tensor | None = None
    if width < vocabulary:
        for start in starts:
            part = logits(start).logsumexp(2, keepdim=True)
            total = part if total is None else torch.logaddexp(total, part)
    targets = tokens[:, 1:, None]
    for start in starts:
        p = logits(start)
        p = torch.softmax(p, 2, out=p) if total is None else p.sub_(total).exp_()
        inside = (targets >= start) & (targets < start + p.shape[2])
        p.scatter_add_(2, (targets - start).clamp(0, p.shape[2] - 1), -inside.float())
        yield start, p.to(head.weight.dtype)


def square(values: Tensor) -> Tensor:
    """Squared norm of each document's vector: (documents, features) -> (documents,) float64."""
    return values.square().sum(1, dtype=torch.float64)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each document's two matrices, (documents,) float64."""
    return (left * right).flatten(1).sum(1, dtype=torch.float64)


def gram(rows: Tensor) -> Tensor:
    """Inner products of each document's rows: (documents, rows, features) -> (documents, rows, rows) float32."""
    return _product(rows, rows.mT)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Products of each document's matrices, in float32: a GPU multiplies those in 16 bits as they are."""
    halves = left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)
    if halves and "dtype" in torch.ops.aten.bmm.overloads():  # as of torch 2.8
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def gram_is_cheaper(rows: int, inputs: int, outputs: int) -> bool:
    """Whether two Gram matrices of `rows` rows cost less than the product (outputs, inputs) of each document."""
    return rows * (inputs + outputs) < inputs * outputs


def product_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Squared norm of outputs' inputs for each document: (documents, rows, *) twice -> (documents,) float64.

    A large product is computed one band at a time; on a CPU so is each document, whose product stays in its cache.
    """
    size = inputs.shape[2] * outputs.shape[2]
    together = max(1, PRODUCT_ELEMENTS // size) if inputs.is_cuda else 1
    bands = -(-size // PRODUCT_ELEMENTS)
    squares = [
        sum(
            torch.linalg.vector_norm(_product(band.mT, a).flatten(1), dim=1).double().square()
            for band in b.tensor_split(bands, dim=2)
        )
        for a, b in zip(inputs.split(together), outputs.split(together), strict=True)
    ]
    return torch.cat([torch.as_tensor(value) for value in squares])
