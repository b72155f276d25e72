"""Devices, as far as they affect the bytes of results, and process-wide settings of model libraries."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import LostDeviceError, UserError, error_line, is_panic

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables of a deterministic process, set before CUDA is initialized."""

UNIT = 4 << 30
"""Memory of a GPU is rounded down to whole units: drivers report slightly different sizes for the same model."""

_MESSAGE_CHARACTERS = 120
_LOST = re.compile(r"\A(CUDA|HIP|cuDNN|XPU) error|device-side assert")
_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Device:
    """The CPU, or GPUs of one model."""

    gpus: float = 0.0  # per actor; 0: the CPU
    memory: int = 0  # bytes of one GPU, from which budgets are computed
    name: str = ""  # model of the GPU; empty if results may come from several models
    deterministic: bool = False  # including attention and gradients

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The type of device."""
        return "cuda" if self.gpus else "cpu"

    @property
    def mark(self) -> str:
        """The device in a fingerprint, without the budgets that follow from its memory."""
        return f"cuda, deterministic on {self.name}" if self.gpus and self.deterministic else self.kind


CPU = Device()


def nominal_memory(total: int) -> int:
    """Nominal memory of a GPU in bytes: the reported memory rounded down to whole units, or to GiB below one unit."""
    unit = UNIT if total >= UNIT else 1 << 30
    return max(1 << 30, total // unit * unit)


def gpus_in_sight() -> tuple[int, str]:
    """The minimum nominal memory, in bytes, of the visible GPUs, and the model of the first.

    Raises:
        UserError: no GPU is visible.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU on a node that has one for Ray: install the torch of its CUDA there")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return min(nominal_memory(card.total_memory) for card in cards), cards[0].name


def check_device(mark: str, gpus: float) -> None:
    """Check that a worker has the device in the fingerprint of its stage.

    Args:
        mark: device, from the fingerprint of its stage.
        gpus: GPUs of the worker.

    Raises:
        UserError: the worker has another device, or another model of GPU than `mark`.
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
    """Configure CUDA in this process: as fast as possible, or deterministic.

    The forward kernels of attention are deterministic with a fixed cuBLAS workspace; the flash and memory-efficient
    backward kernels only with torch's deterministic setting.

    Args:
        mark: device, from the fingerprint of the stage; nothing is set for a CPU.
        gradients: whether the stage computes gradients.
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
    """Whether an error reports insufficient memory."""
    import torch

    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(mark in str(error) for mark in _NO_MEMORY)


def check_lost(error: BaseException) -> None:
    """Distinguish an error of one computation from one after which a device refuses all further work of this process.

    A GPU stays in such an error (a failed assertion in a kernel, an invalid memory access) until the process ends.

    Args:
        error: exception of a computation.

    Raises:
        LostDeviceError: the device is lost.
    """
    if out_of_memory(error) or not _is_lost(error):
        return
    reason = error_line(error, _MESSAGE_CHARACTERS) or type(error).__name__
    raise LostDeviceError(
        f"the device refuses all further work of this process ({reason}); rerun the command: it processes the "
        "documents that were in flight one at a time, and leaves out one that repeats the fault"
    ) from error


def _is_lost(error: BaseException) -> bool:
    """Whether a device of this process is lost, by a test of the devices, or by the error if torch can test none."""
    import torch

    if torch.cuda.is_initialized():
        return not all(map(_answers, range(torch.cuda.device_count())))
    lost = getattr(torch, "AcceleratorError", ())  # torch >= 2.8
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None)


def _answers(device: int) -> bool:
    """Whether a device that this process uses still works; an unused device must not be initialized."""
    import torch

    try:
        if torch.cuda.memory_allocated(device):
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


BUILDING = threading.RLock()
"""Lock of a thread that builds a model: transformers then changes torch's default dtype for all threads, so two models
built concurrently would get each other's dtype."""

OBJECTS_BETWEEN_COLLECTIONS = (100_000, 50, 100)
"""Thresholds of Python's garbage collector; the defaults are 700, 10 and 10."""


def collect_rarely() -> None:
    """Run Python's garbage collector rarely, and not at the end of the process.

    Libraries and a model are a million objects in use: traversing them takes a second when a model is opened, and
    nearly two at the end.
    """
    gc.set_threshold(*OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)


KEPT = {-3: 1 << 25, -1: 1 << 28}
"""Settings of the GNU C library in bytes: minimum size of separately mapped memory (M_MMAP_THRESHOLD), and free memory
kept at the end of the heap (M_TRIM_THRESHOLD)."""


def keep_memory() -> None:
    """Let the C library keep freed memory of a batch for the next one, up to some hundred MB, until `give_back`.

    By default every large array is returned to the system and allocated again as zeroed pages, which takes a sixth of
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
"""Reserved in each share for the CUDA context of a process, which torch does not count."""


def cap_memory(gpus: float) -> None:
    """Limit this process to its share of the memory of its GPU; called before a model is loaded.

    Excessive use then fails in this process, which halves the batch, and not in another actor on the same GPU.

    Args:
        gpus: GPUs of this process; only a share below 1 sets a limit.
    """
    import torch

    if not 0 < gpus < 1 or not torch.cuda.is_available():
        return
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(max(gpus / 2, gpus - CONTEXT_BYTES / total))


def import_package() -> None:
    """Import the package transformers before several threads import parts of it.

    During its import the package replaces its module object. A thread that waits for the import would keep the old
    object, which has none of the names.
    """
    import transformers.models.auto  # noqa: F401


@contextlib.contextmanager
def quiet_panics() -> Iterator[None]:
    """Suppress what a library in Rust prints when it panics; anything else on standard error appears after the block.

    Only in the main thread: the descriptor belongs to the process, and other threads would replace it at the same time.
    """
    if threading.current_thread() is not threading.main_thread() or _quiet.locked():
        yield
        return
    with _quiet, tempfile.TemporaryFile() as kept:
        try:
            saved = os.dup(2)
        except OSError:  # closed
            yield
            return
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if is_panic(error):
                kept.truncate(0)
                kept.seek(0)
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            kept.seek(0)
            with contextlib.suppress(OSError), open(2, "wb", closefd=False) as errors:
                shutil.copyfileobj(kept, errors)


_quiet = threading.Lock()


def quieten() -> None:
    """Suppress progress bars and notices of libraries on the terminal."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # Permanently: a filter for one block would let warnings of other threads through.
    warnings.filterwarnings("ignore", module=r"(peft|transformers)\b")
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # prints to stdout that there is no GPU


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
