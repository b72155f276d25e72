"""Copies between the CPU and a device that make neither wait: one there before a batch, one back after it.

The CPU knows the lengths of a batch, so it knows which positions count. A boolean mask on the device would make the CPU
wait until everything before is computed, to learn how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A padded batch of documents on a device, and which of its positions predict a token; all int64 but `mask`."""

    ids: Tensor  # (documents, tokens), 0 on padding
    targets: Tensor  # (rows,): the tokens that are predicted, document by document
    positions: Tensor  # (rows,): where they are predicted, in ids.flatten()
    cells: Tensor  # (rows,): their places in mask.flatten()
    mask: Tensor  # (documents, tokens - 1) bool, False on padding
    counts: tuple[int, ...]  # predicted tokens of each document, known on the CPU


def pad(ids: Sequence[Sequence[int]], device: torch.device) -> PaddedBatch:
    """Pad tokenised documents on the right, and copy them to a device at once.

    Args:
        ids: of each document.
        device: of the result.
    """
    longest = max([1, *map(len, ids)])
    padded = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in ids])
    counts = torch.tensor([max(0, len(sequence) - 1) for sequence in ids])
    mask = torch.arange(longest - 1) < counts[:, None]
    cells = mask.flatten().nonzero().squeeze(1)
    positions = cells + cells // max(1, longest - 1)  # a row of ids is longer by one
    parts = [padded.flatten(), padded.flatten()[positions + 1], positions, cells, mask.flatten().long()]
    there = to_device(torch.cat(parts), device).split([len(part) for part in parts])
    return PaddedBatch(
        ids=there[0].view(padded.shape),
        targets=there[1],
        positions=there[2],
        cells=there[3],
        mask=there[4].view(mask.shape).bool(),
        counts=tuple(counts.tolist()),
    )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device. CUDA copies it from pinned memory, on a stream of its own beside the kernels."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return values.to(device, non_blocking=True)
    computing, copying = torch.cuda.current_stream(device), _copying_stream(device)
    with torch.cuda.stream(copying):
        copied = values.pin_memory().to(device, non_blocking=True)
    computing.wait_stream(copying)
    copied.record_stream(computing)
    return copied


@cache
def _copying_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def in_one_copy(columns: Sequence[Tensor]) -> Tensor:
    """Columns of numbers on the CPU: (rows, columns) float64, copied once from each device.

    Args:
        columns: (rows,) each.
    """
    places: dict[torch.device, list[int]] = {}
    for index, column in enumerate(columns):
        places.setdefault(column.device, []).append(index)
    table = torch.empty(len(columns[0]), len(columns), dtype=torch.float64)
    for indices in places.values():
        table[:, indices] = torch.stack([columns[index].double() for index in indices], dim=1).cpu()
    return table
