"""Squared norms of matrix products without storing the products: by Gram matrices, or band by band."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PRODUCT_ELEMENTS = 1 << 26
"""Of a product that are in memory at a time."""


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
    if left.dtype == right.dtype and multiplies_into_float32(left.device, left.dtype):
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


@cache
def multiplies_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.mm` of matrices of this dtype can give float32 on this device without rounding in between.

    On CUDA, from torch 2.8 on, for bfloat16 and float16: tried once.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(ones, ones, out=ones.float(), out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # a torch that has no such argument, or a card that has no such product
        return False
    return True
