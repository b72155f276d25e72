"""Choice of the dtype of loaded weights: fast on the device, and not less exact than the checkpoint's dtype."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.checkpoints import check_files, weight_files
from pipeline.models.stored import TYPES, refuse_integers, stored_weights

FLAGS_VARIABLE = "SEENSET_CPU_FLAGS"
"""Environment variable that replaces the CPU flags, for a machine that reports too few or too many."""

RELEVANT_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Flags of a CPU that multiplies bfloat16 natively, and so at least as fast as float32."""

AMPERE = (8, 0)
"""Minimum compute capability of a GPU with native bfloat16 products."""

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""

HALVES = ("bfloat16", "float16")

_NAMES = ", ".join(WIDTHS)


@dataclass(frozen=True, slots=True)
class Processor:
    """Properties of a CPU, or of GPUs of one compute capability, that determine the dtype of weights."""

    capability: tuple[int, int] | None = None  # minimum of the GPUs; None: a CPU
    flags: tuple[str, ...] = ()  # flags of the CPU that are in RELEVANT_FLAGS
    free: int | None = None  # bytes of memory for the weights; None: unknown

    @property
    def name(self) -> str:
        """CPU or GPU."""
        return "CPU" if self.capability is None else "GPU"

    @property
    def native(self) -> bool:
        """Whether it multiplies bfloat16 natively; False for a CPU whose flags are unknown, as on macOS."""
        if self.capability is None:
            return any(flag in self.flags for flag in NATIVE_BFLOAT16)
        return self.capability >= AMPERE

    def is_slow(self, dtype: str) -> bool:
        """Whether products in a dtype may be slower than in float32: on a CPU, halves that are not native."""
        return self.capability is None and dtype in HALVES and not (dtype == "bfloat16" and self.native)


@dataclass(frozen=True, slots=True)
class Choice:
    """The dtype of loaded weights, and the reason."""

    dtype: str  # such as float32
    reason: str  # such as "chosen for this CPU"
    warning: str = ""  # one line if the choice is slow


OWN = "the checkpoint's own"


def choose(stored: str, size: int, processor: Processor) -> Choice:
    """The dtype of weights with `dtype: auto`.

    A GPU of compute capability 8.0 or higher uses the dtype of the checkpoint; an older one float16 if the checkpoint
    is float16, else float32. A CPU uses bfloat16 only if the checkpoint is bfloat16 and its flags contain one of
    NATIVE_BFLOAT16, and never float16: bfloat16 and float16 weights convert to float32 without loss. If float32 weights
    exceed the free memory, the dtype of the checkpoint is kept.

    Args:
        stored: dtype of the weights in the files, from `stored_type`.
        size: bytes of the weights in the files, for all copies that the machine loads.
        processor: processor of the workers.
    """
    gpu = processor.capability is not None
    if stored not in HALVES or (processor.native and (gpu or stored == "bfloat16")) or (gpu and stored == "float16"):
        return Choice(stored, OWN)
    needed = size * WIDTHS["float32"] // WIDTHS[stored]
    if processor.free is None or needed <= processor.free:
        return Choice("float32", f"chosen for this {processor.name}")
    slow = f"; {_slow(stored)}" if processor.is_slow(stored) else ""
    return Choice(
        stored,
        f"{OWN}: float32 does not fit into memory",
        f"dtype auto keeps {stored}: in float32 the weights take {needed / 2**30:.1f} GiB, and "
        f"{processor.free / 2**30:.1f} GiB of memory are free{slow}",
    )


def _slow(dtype: str) -> str:
    """Why products in a dtype are slow on a CPU."""
    lacks = f", which lists neither {' nor '.join(NATIVE_BFLOAT16)}" if dtype == "bfloat16" else ""
    return f"products in {dtype} may take many times as long as in float32 on this CPU{lacks}"


def choose_model(config: ModelConfig, size: int, processor: Processor) -> Choice:
    """The dtype of a model with `dtype: auto`: as `choose`; float32 for a GGUF file, which is unpacked to it.

    Args:
        config: configuration of the model.
        size: as in `choose`.
        processor: processor of the workers.

    Raises:
        UserError: as `stored_type`.
    """
    if check_files(config).gguf:
        return Choice("float32", "unpacked from GGUF")
    return choose(stored_type(config), size, processor)


def choose_training(processor: Processor) -> Choice:
    """The dtype of computations in a training with `dtype: auto`: bfloat16 where it is native, else float32."""
    return Choice("bfloat16" if processor.native else "float32", f"chosen for this {processor.name}")


def stored_type(config: ModelConfig) -> str:
    """The dtype of the weights in a model's files, such as bfloat16.

    Raises:
        UserError: a file is missing, the files do not state the dtype, or it is an 8-bit float or an integer.
    """
    source = check_files(config)
    settings = _read_json(source.folder / "config.json")
    kinds = {kind for kind, _ in stored_weights(source.folder).values()}
    if any(kind.startswith("F8") for kind in kinds) or "fp8" in _quantised_by(settings):
        raise UserError(
            f"model {config.shown}: its weights are 8-bit floats, which cannot be opened here; take the checkpoint in "
            "bfloat16 or float32"
        )
    if not _quantised_by(settings):
        refuse_integers(f"model {config.shown}", source.folder)
    parts = [settings, settings.get("text_config") or {}]
    stated = [part.get("dtype") or part.get("torch_dtype") for part in parts if isinstance(part, dict)]
    named = next((str(name).removeprefix("torch.") for name in stated if name), None)
    stored = named or next((name for kind, name in TYPES.items() if kind in kinds), None)
    if stored not in WIDTHS:
        kind = f"of type {stored}" if stored else "of a type that neither config.json nor a safetensors file states"
        raise UserError(
            f"model {config.shown}: its weights are {kind}, and dtype auto knows {_NAMES}; set dtype: float32"
        )
    return stored


def stored_bytes(config: ModelConfig) -> int:
    """Bytes of a model's weight files; 0 if they are not on this machine yet."""
    source = check_files(config)
    return sum((source.folder / name).stat().st_size for name in weight_files(source))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the loader reports the problem
        return {}
    return settings if isinstance(settings, dict) else {}


def _quantised_by(settings: dict[str, Any]) -> str:
    method = settings.get("quantization_config") or {}
    return str(method.get("quant_method", "")) if isinstance(method, dict) else ""


# --- the device of this process


def processor_here(gpus: float = 0) -> Processor:
    """The processor that this process computes on.

    Args:
        gpus: GPUs per worker; 0: the CPU.
    """
    if gpus:
        import torch

        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        free = int(min(card.total_memory for card in cards) * gpus)
        return Processor(capability=min((card.major, card.minor) for card in cards), free=free)
    return Processor(flags=flags_here(), free=free_memory())


def free_memory() -> int:
    """Bytes of free memory for this process and its children, within the limit of the container."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(counts.get("inactive_file", 0)))  # page cache, which can be freed
    except (OSError, ValueError):  # no such limit
        return free


def flags_here() -> tuple[str, ...]:
    """The flags of the CPU that are in RELEVANT_FLAGS; empty if the system does not report flags."""
    text = os.environ.get(FLAGS_VARIABLE)
    if text is None:
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            text = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    words = set((text or "").split())
    return tuple(flag for flag in RELEVANT_FLAGS if flag in words)


def flags_differ(decided: Sequence[str]) -> str:
    """A warning if the flags of this CPU differ from those that determined the dtypes of a run; otherwise empty.

    Args:
        decided: flags of the CPU that determined the dtypes.
    """
    here = flags_here()
    if here == tuple(decided):
        return ""
    shown, wanted = (" ".join(flags) or "none of them" for flags in (here, decided))
    return (
        f"its CPU has other flags than the one that decided the types of this run ({shown}, not {wanted}): bfloat16 "
        "may be slow there, and the last digits of scores may differ"
    )


def check_explicit(key: str, dtype: str, processor: Processor) -> str:
    """A warning if a configured dtype may be slow on this processor, by its flags; otherwise empty.

    Args:
        key: setting, such as model.dtype.
        dtype: value of the setting.
        processor: processor of the workers.

    Raises:
        UserError: the GPU does not support the dtype.
    """
    if processor.capability is not None and dtype == "bfloat16" and not processor.native:
        shown = ".".join(map(str, processor.capability))
        raise UserError(
            f"{key}: bfloat16 needs a GPU of compute capability 8.0 or higher, this one has {shown}; "
            "leave dtype out, or set float32 or float16"
        )
    if not processor.is_slow(dtype):
        return ""
    return (
        f"warning: {key} is {dtype}, and {_slow(dtype)}; leave dtype out, which takes the fastest type without loss, "
        "or set dtype: float32"
    )
