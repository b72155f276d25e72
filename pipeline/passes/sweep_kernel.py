"""Whether the sweep runs as one kernel: on a GPU, where Triton is, once the kernel has proved itself on that device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

fused: Callable[[Tensor, Tensor, frozenset[str], float, float | None], dict[str, Tensor]] | None = None
interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton runs its kernels in Python, on the CPU, as the tests do."""

if interpreted or torch.backends.cuda.is_built():  # Triton costs .2 s, which a build without GPUs need not wait for
    with suppress(ImportError):
        from pipeline.passes.sweep_triton import fused_sweep as fused

PROOF_ERROR = 1e-4
"""The largest error that a statistic x of the proof may have, as a share of 1 + |x|.

Sums over a vocabulary in n blocks of 4,096 are off by at most (24 + 6n) 2^-24 of themselves, 1.3e-5 at 128,256 tokens,
and those of moments by a few times that; a kernel that is wrong is wrong by more.
"""

_log = logging.getLogger(__name__)
_proofs: dict[tuple[object, ...], bool] = {}


def proven_kernel(
    logits: Tensor,
    statistics: frozenset[str],
    factor: float,
    softcap: float | None,
    exact: Callable[[Tensor, Tensor, frozenset[str]], dict[str, Tensor]],
) -> Callable[[Tensor, Tensor, frozenset[str], float, float | None], dict[str, Tensor]] | None:
    """The kernel, if it gives right statistics of a few rows such as these logits on their device; tried once.

    Args:
        logits: what is to be swept; only its device, its dtype and its columns count.
        statistics: what is to be computed.
        factor: of the logits, as `sweep_triton.fused_sweep` takes it.
        softcap: likewise.
        exact: gives the same statistics in float64, from logits such as these and targets.

    Returns:
        The kernel; None on a CPU, and where the log has a line that says why not.

    Raises:
        torch.OutOfMemoryError: the device has no room for a few rows, which says nothing of the kernel.
    """
    if logits.device.type != "cuda" and not interpreted:
        return None
    key = (logits.device, logits.dtype, logits.shape[1], statistics, factor, softcap)
    if key not in _proofs:
        reason = _refutation(logits, statistics, factor, softcap, exact)
        if reason:
            _log.warning("token statistics are computed without the Triton kernel on %s: %s", logits.device, reason)
        _proofs[key] = not reason
    return fused if _proofs[key] else None


def _refutation(
    logits: Tensor,
    statistics: frozenset[str],
    factor: float,
    softcap: float | None,
    exact: Callable[[Tensor, Tensor, frozenset[str]], dict[str, Tensor]],
) -> str:
    """What speaks against the kernel, in a few words; empty where nothing does."""
    if fused is None:
        return "Triton is not installed"
    sample, targets = _sample(logits.shape[1])
    sample, targets = sample.to(logits.device, logits.dtype), targets.to(logits.device)
    try:
        swept = fused(sample, targets, statistics, factor, softcap)
        expected = exact(sample, targets, statistics)
        for name in sorted(swept):
            values = swept[name].double()
            if not torch.allclose(values, expected[name], rtol=PROOF_ERROR, atol=PROOF_ERROR, equal_nan=True):
                return f"it gives another {name} than PyTorch"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler, a driver or a cache that fails in a way of its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _sample(columns: int) -> tuple[Tensor, Tensor]:
    """Rows of logits, (8, columns) float32, that a wrong sweep would get wrong, and a target of each, (8,)."""
    noise = 3 * torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    noise[1, ::2] = -torch.inf  # a vocabulary masked by the model
    noise[2].round_()  # ties
    sure = torch.zeros(2, columns)
    sure[:, columns // 2] = 60.0
    rising = torch.linspace(-20, 20, columns)
    rows = torch.stack([*noise, *sure, torch.zeros(columns), rising, torch.full((columns,), torch.nan)])
    last = columns - 1
    return rows, torch.tensor([0, 0, columns // 3, columns // 2, last, last, last // 2, 0])
