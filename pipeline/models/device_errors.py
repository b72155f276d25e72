"""What an error says of the device: too little memory, or a device that this process can use no more."""

from __future__ import annotations

import re

import torch

from pipeline.errors import LostDeviceError

_MESSAGE_CHARACTERS = 120
_LOST = re.compile(r"\A(CUDA|HIP|cuDNN|XPU) error|device-side assert")
_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was too little memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    return any(mark in message for mark in _NO_MEMORY)


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
    if torch.cuda.is_initialized():
        return not all(map(_answers, range(torch.cuda.device_count())))
    lost = getattr(torch, "AcceleratorError", ())  # torch has it from 2.8 on
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None)


def _answers(device: int) -> bool:
    """Whether a device that this process uses still works; one that it does not use must not be opened."""
    if not torch.cuda.memory_allocated(device):
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
