"""Accelerators without one: tensors that claim a device, compute on the CPU and refuse what an accelerator refuses.

    with ClaimedDevices() as devices:  # "meta:0", "meta:1", ...
        model = devices.claim(model, lambda name: "meta:1" if name.startswith("lm_head") else "meta:0")
        forward(LanguageModel(model, None, torch.device("meta", 0), None), ids, frozenset())
    devices.copies, devices.waits  # Counters by (kind, "file.py:line" of this project)

An operation on tensors of two devices raises, as CUDA does; one that makes the CPU wait for the device is counted.
`real(tensor)` is the value as a CPU tensor. The devices are torch's own "meta", which needs no driver and no compiled
guard; with `ClaimedDevices(cuda=True)` the tensors' `is_cuda` is True, so that code which looks at it goes that way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}
WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "nonzero",
    aten.equal.default: "equal",
}


class ClaimedTensor(torch.Tensor):
    """A tensor on the CPU that says it is on another device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> ClaimedTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=device, **layout)
        tensor.inner = inner
        return tensor

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return bool(_entered) and _entered[-1].cuda

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.inner} claimed by {self.device}"

    def tolist(self) -> Any:
        if _entered:
            _entered[-1].note(_entered[-1].waits, "tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert _entered, f"{func} on a claimed tensor outside of ClaimedDevices"
        return _entered[-1].run(func, args, kwargs or {})


_entered: list[ClaimedDevices] = []


def real(value: Tensor) -> Tensor:
    """The value of a claimed tensor, or a plain one as it is."""
    return value.inner if isinstance(value, ClaimedTensor) else value


def in_place() -> AbstractContextManager[Any]:
    """Accelerate's hooks are added to modules whose parameters are on their devices already, and move none."""
    return mock.patch("accelerate.hooks.set_module_tensor_to_device")


def _device(value: Any) -> torch.device:
    device = torch.device(value)
    return torch.device("meta", 0) if device.type == "meta" and device.index is None else device


class ClaimedDevices(TorchDispatchMode):
    """Within it claimed devices can be used; see the module's text."""

    def __init__(self, *, cuda: bool = False) -> None:
        super().__init__()
        self.cuda = cuda
        self.copies: Counter[tuple[str, str]] = Counter()  # between devices
        self.waits: Counter[tuple[str, str]] = Counter()  # of the CPU for a device
        self.operations: Counter[str] = Counter()  # by name
        self._depth = 0  # `run` enters again
        self._inference = mock.patch("torch.inference_mode", _WithoutGradients)  # inference tensors bypass the dispatch

    def __enter__(self) -> ClaimedDevices:
        if not self._depth:
            self._inference.start()
        self._depth += 1
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) fills on the CPU, then copies
        _entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _entered.pop()
        torch._C._set_only_lift_cpu_tensors(bool(_entered))
        self._depth -= 1
        if not self._depth:
            self._inference.stop()

    def claim(self, module: nn.Module, device: Callable[[str], str | torch.device]) -> nn.Module:
        """Move a module's parameters and buffers, in place, to the claimed device of each name; ties stay tied."""
        moved: dict[int, Tensor] = {}
        for prefix, part in module.named_modules():
            for values in (part._parameters, part._buffers):
                for name, value in values.items():
                    if value is None:
                        continue
                    if id(value) not in moved:
                        tensor = ClaimedTensor(value.detach(), _device(device(f"{prefix}.{name}".lstrip("."))))
                        is_parameter = isinstance(value, nn.Parameter)
                        moved[id(value)] = nn.Parameter(tensor, value.requires_grad) if is_parameter else tensor
                    values[name] = moved[id(value)]
        return module

    def spread(self, module: nn.Module, devices: dict[str, str]) -> nn.Module:
        """As `claim`, by accelerate's hooks, as `device_map` does: from the names of modules to their devices."""
        from accelerate import dispatch_model

        def device(name: str) -> str:
            return devices[max((key for key in devices if f"{name}.".startswith(f"{key}.")), key=len)]

        self.claim(module, device)
        first = torch.device(next(iter(devices.values())))
        places = {name: torch.device(place) for name, place in devices.items()}
        skip = getattr(module, "_skip_keys_device_placement", None)
        with in_place():
            return dispatch_model(module, places, main_device=first, skip_keys=skip)

    def note(self, counter: Counter[tuple[str, str]], kind: str) -> None:
        """Count an event at the innermost line of this project."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__):
                counter[kind, f"{path.name}:{frame.f_lineno}"] += 1
                return
            frame = frame.f_back
        counter[kind, "elsewhere"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        claimed = any(isinstance(value, ClaimedTensor) for value in tree_leaves((args, kwargs)))
        device = kwargs.get("device")
        if claimed or (device is not None and torch.device(device).type == "meta"):
            return self.run(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation on claimed tensors, or one that makes a claimed tensor."""
        kwargs = dict(kwargs)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if composite and func is not aten.scaled_dot_product_attention.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten._fused_sdp_choice.default:
            return 0
        self.operations[str(func)] += 1
        device = self._check(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(real, args), tree_map(real, kwargs)
        if "out_dtype" in kwargs or func.name().endswith("mm.dtype"):  # a product that only CUDA has
            left, right, dtype = plain_args[:3]
            return ClaimedTensor(torch.matmul(left.to(dtype), right.to(dtype)), device)
        result = func(*plain_args, **plain_kwargs)
        outputs = tree_leaves((args, kwargs)) if func._schema.is_mutable else []
        written = {id(value.inner): value for value in outputs if isinstance(value, ClaimedTensor)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or device.type == "cpu":
                return value
            return written[id(value)] if id(value) in written else ClaimedTensor(value, device)

        return tree_map(wrap, result)

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
        """Refuse mixed devices, count copies and waits; the device of the result."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        claimed = [value for value in tensors if isinstance(value, ClaimedTensor)]
        places = {value.device for value in claimed}
        mixed = len(places) > 1
        if func not in COPIES | INDEXING:  # these take plain indices and sources from the CPU
            mixed |= bool(places) and any(value.device.type == "cpu" and value.dim() for value in tensors)
        if mixed and func not in COPIES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {sorted({str(v.device) for v in tensors})}"
                f" in {func}"
            )
        source = tensors[-1].device if func is aten.copy_.default else (tensors or [torch.empty(0)])[0].device
        device = next(iter(places), torch.device("cpu"))
        if kwargs.get("device") is not None:
            device = _device(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        if func is aten.copy_.default:
            device = tensors[0].device
        if func in COPIES and source != device:
            self.note(self.copies, f"{source.type} to {device.type}")
            pinned = bool(kwargs.get("non_blocking")) or (func is aten.copy_.default and args[2:3] == (True,))
            if device.type == "cpu" or (source.type == "cpu" and not pinned):
                self.note(self.waits, f"copy {source.type} to {device.type}")
        if kind := WAITS.get(func):
            self.note(self.waits, kind)
        if func in INDEXING:
            indices = [value for value in args[1] if value is not None]
            if any(value.dtype in (torch.bool, torch.uint8) for value in indices):
                self.note(self.waits, "boolean mask")
            if any(not isinstance(value, ClaimedTensor) for value in indices):
                self.note(self.waits, "index from the CPU")
        return device


class _WithoutGradients(ContextDecorator):
    """Stands in for torch.inference_mode."""

    def __init__(self, mode: bool = True) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.before and not self.mode)

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self.before)
