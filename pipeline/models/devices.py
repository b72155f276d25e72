"""Devices, as far as they decide the bytes of rows, and what libraries of models take and change in a process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import re
import threading
import warnings
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import LostDeviceError, UserError

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Of a process that computes deterministically, before it begins with CUDA."""

UNIT = 4 << 30
"""Memory of a card is counted in whole units: drivers leave a little less or more of the same card."""

_MESSAGE_CHARACTERS = 120
_LOST = re.compile(r"\A(CUDA|HIP|cuDNN|XPU) error|device-side assert")
_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Device:
    """The CPU, or GPUs of one kind."""

    gpus: float = 0.0  # of an actor; 0: the CPU
    memory: int = 0  # bytes of one GPU, from which budgets are made
    name: str = ""  # the model of GPU; empty where its arithmetic is not held to that of one
    deterministic: bool = False  # also attention and gradients

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The type of device."""
        return "cuda" if self.gpus else "cpu"

    @property
    def mark(self) -> str:
        """What a fingerprint holds of it, beside the budgets that follow from its memory."""
        return f"cuda, deterministic on {self.name}" if self.gpus and self.deterministic else self.kind


CPU = Device()


def nominal_memory(total: int) -> int:
    """The memory of a card, in bytes, from what a driver gives of it: down to whole units, or to GiB below one."""
    unit = UNIT if total >= UNIT else 1 << 30
    return max(1 << 30, total // unit * unit)


def gpus_in_sight() -> tuple[int, str]:
    """The least memory of the GPUs that this process sees, in nominal bytes, and the model of the first.

    Raises:
        UserError: it sees none.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU on a node that has one for Ray: install the torch of its CUDA there")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return min(nominal_memory(card.total_memory) for card in cards), cards[0].name


def check_device(mark: str, gpus: float) -> None:
    """Check that a worker is where its rows are said to be made.

    Args:
        mark: of the device, from the fingerprint of its stage.
        gpus: that the worker has.

    Raises:
        UserError: it is not, or it is another model of GPU than the one that the mark names.
    """
    kind = "cuda" if gpus else "cpu"
    if mark.partition(",")[0] != kind:
        raise UserError(f"this stage computes on {mark}, and its worker has {gpus:g} GPUs, which is {kind}")
    name = mark.partition(" on ")[2]
    if name and (here := gpus_in_sight()[1]) != name:
        raise UserError(
            f"resources.deterministic holds this run to GPUs of one model, {name}; this node has {here}: leave such "
            "nodes out, or set resources.deterministic: false in a new run directory"
        )


def compute_as(mark: str, gradients: bool) -> None:
    """Set how CUDA computes in this process: as fast as it can, or the same bits each time.

    The forward kernels of attention are deterministic as they are, once cuBLAS keeps its workspace; the flash and
    memory-efficient backward kernels are only where torch is told so.

    Args:
        mark: of the device, from the fingerprint of the stage; on a CPU nothing is set.
        gradients: whether the stage takes gradients.
    """
    if not mark.startswith("cuda"):
        return
    import torch

    wanted = "deterministic" in mark
    if wanted:
        os.environ.update(ENVIRONMENT)
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(not wanted)
    torch.use_deterministic_algorithms(wanted and gradients)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was too little memory."""
    import torch

    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(mark in str(error) for mark in _NO_MEMORY)


def check_lost(error: BaseException) -> None:
    """Tell an error of one computation from one after which a device refuses all further work of this process.

    A GPU keeps such an error (a failed assertion in a kernel, an access outside its memory) until the process ends.

    Args:
        error: that a computation raised.

    Raises:
        LostDeviceError: the device is lost, from this error on.
    """
    if out_of_memory(error) or not _is_lost(error):
        return
    reason = (" ".join(str(error).split()) or type(error).__name__)[:_MESSAGE_CHARACTERS]
    raise LostDeviceError(
        f"the device refuses all further work of this process ({reason}); the same command goes on: it tries the "
        "documents that were in flight one at a time, and leaves out one that does this again"
    ) from error


def _is_lost(error: BaseException) -> bool:
    """By what the devices say that this process uses; where torch can ask none, by the error."""
    import torch

    if torch.cuda.is_initialized():
        return not all(map(_answers, range(torch.cuda.device_count())))
    lost = getattr(torch, "AcceleratorError", ())  # torch has it from 2.8 on
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None)


def _answers(device: int) -> bool:
    """Whether a device that this process uses still works; one that it does not use must not be opened."""
    import torch

    try:
        if torch.cuda.memory_allocated(device):
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


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
