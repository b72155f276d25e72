"""The share of a GPU's memory that one of several processes on it may take."""

from __future__ import annotations

CONTEXT_BYTES = 600 << 20
"""Left in each share for what CUDA itself takes in a process, which torch does not count."""


def cap_memory(gpus: float) -> None:
    """Keep this process to its share of the memory of its GPU; called before a model is loaded.

    What goes beyond it is out of memory here, where a batch is halved, and not in the actor beside it.

    Args:
        gpus: of this process; a share below 1 is a limit, others are none.
    """
    import torch

    if not 0 < gpus < 1 or not torch.cuda.is_available():
        return
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(max(gpus / 2, gpus - CONTEXT_BYTES / total))
