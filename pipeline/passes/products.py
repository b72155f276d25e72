"""Squared norms of matrix products without storing the products: by Gram matrices, or band by band."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PRODUCT_ELEMENTS = 1 << 26  # of a product that are in memory at a time


def square(values: Tensor) -> Tensor:
    """Squared norm of each document's vector: (documents, features) -> (documents,) float64."""
    return values.square().sum(1, dtype=torch.float64)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each document's two matrices, (documents,) float64."""
    return (left * right).flatten(1).sum(1, dtype=torch.float64)


def gram(rows: Tensor) -> Tensor:
    """Inner products of each document's rows: (documents, rows, features) -> (documents, rows, rows) float32."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16) and _gives_float32():
        return torch.bmm(rows, rows.mT, out_dtype=torch.float32)
    rows = rows.float()
    return torch.bmm(rows, rows.mT)


def _gives_float32() -> bool:
    """Whether this torch multiplies half-precision matrices into float32 ones, as it does from 2.8."""
    return "dtype" in torch.ops.aten.bmm.overloads()


def gram_is_cheaper(rows: int, inputs: int, outputs: int) -> bool:
    """Whether two Gram matrices of `rows` rows cost less than the product (outputs, inputs) of each document."""
    return rows * (inputs + outputs) < inputs * outputs


def product_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Squared norm of outputs' inputs for each document: (documents, rows, *) twice -> (documents,) float64.

    Computed one document at a time, and a large product one band at a time.
    """
    inputs, outputs = inputs.float(), outputs.float()
    bands = -(-inputs.shape[2] * outputs.shape[2] // PRODUCT_ELEMENTS)
    squares = [
        sum(torch.linalg.vector_norm(band.T @ a).double() ** 2 for band in b.tensor_split(bands, dim=1))
        for a, b in zip(inputs, outputs, strict=True)
    ]
    return torch.stack([torch.as_tensor(value) for value in squares])


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
