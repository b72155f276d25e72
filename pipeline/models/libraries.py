"""What the libraries of models take and change: time to import, the dtype while they build one, and the terminal."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import threading
import warnings

BUILDING = threading.RLock()
"""Held by a thread while it builds a model: transformers sets torch's default dtype for all threads meanwhile, and two
models that are built at once come out with weights of each other's dtype."""

OBJECTS_BETWEEN_COLLECTIONS = (100_000, 50, 100)
"""Thresholds of Python's collector in a process of ours; 700, 10 and 10 by default."""


def collect_rarely() -> None:
    """Search rarely for objects that refer to each other alone, and not when the process ends.

    Libraries and a model are a million objects, all in use: to look through them takes a second of opening a model,
    and nearly two of the end.
    """
    gc.set_threshold(*OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)


KEPT = {-3: 1 << 25, -1: 1 << 28}
"""Settings of the GNU C library: what is larger is mapped by itself (M_MMAP_THRESHOLD), and so much that is free at the
end of the heap is kept (M_TRIM_THRESHOLD). In bytes."""


def keep_memory() -> None:
    """Let the C library keep what a batch has freed for the next one, up to some hundred MB, until `give_back`.

    By default it gives arrays of a batch back to the machine one by one, and each comes anew as empty pages: a sixth of
    the time of a small model.
    """
    with contextlib.suppress(OSError, AttributeError):  # not the GNU one
        library = ctypes.CDLL(None)
        for name, size in KEPT.items():
            library.mallopt(name, size)


def free_memory() -> None:
    """Give what is no longer used back to the machine; the C library by itself keeps much of what a training took."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Return unused memory of the C library to the machine."""
    with contextlib.suppress(OSError, AttributeError):  # not the GNU one
        ctypes.CDLL(None).malloc_trim(0)


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


def import_package() -> None:
    """Import the package transformers itself, before a thread imports more of it beside this one.

    While it is imported, the package puts another module in its own place. A thread that waits for it then holds the
    one before, which has none of its names.
    """
    import transformers.models.auto  # noqa: F401


def quieten() -> None:
    """Keep the progress bars and notices of libraries off the terminal."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # For good: to catch the warnings of one block would let another thread's through.
    warnings.filterwarnings("ignore", module=r"(peft|transformers)\b")
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # imported to save a model; says on stdout that no GPU is there


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
