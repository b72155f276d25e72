"""Memory for weights: what a machine has free, and the share of a GPU that one of several processes may take."""

from __future__ import annotations

from pathlib import Path

import psutil

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


def free_memory() -> int:
    """Bytes that this process and its children may take, by the machine and by the limit of its container."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(counts.get("inactive_file", 0)))  # of files that were read: given back
    except (OSError, ValueError):  # no such limit
        return free
