"""The CPU does not wait for a device in the midst of a batch: what would make it wait on CUDA is counted, by its kind.

A tensor here says that it is on another device, and computes on the CPU. Whatever needs a value of it on the CPU is a
wait: a boolean mask, a number, a copy back, and a copy there that is not told to go on.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architectures import LLAMA, VOCABULARY, HalvedLogits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.audit import DetectorEntry
from pipeline.detectors.base import FORWARD, Evidence, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.models.load import LanguageModel
from pipeline.passes.forward import forward, in_one_copy, pad

DEVICE = torch.device("meta")
MOST_WAITS = 4
FOUR: list[DetectorEntry] = ["loss", "zlib", "min_k", "min_k_plus_plus"]
ALL: list[DetectorEntry] = [*FOUR, "m_entropy", {"renyi": {"order": [0.5, 1, 2, "inf"]}}]
TEXTS = ["some text " * 20, "other text " * 20, "a third text"]
aten = torch.ops.aten
MASKED = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default)
COUNTED = (aten.nonzero.default, aten.masked_select.default, aten._local_scalar_dense.default, aten.equal.default)


class Claimed(torch.Tensor):
    """A tensor that says it is elsewhere. Torch has guards of CUDA only where it can compute on it, of meta always."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Claimed:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operation} on a claimed device outside of its mode")


class Waits(TorchDispatchMode):
    """Computes on the claimed device, and counts what would make the CPU wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        claimed = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Claimed)]
        target = kwargs.get("device")
        if not claimed and (target is None or torch.device(target).type == "cpu"):
            return operation(*args, **kwargs)
        if operation not in MASKED and (whole := self.decomposed(operation, args, kwargs)) is not NotImplemented:
            return whole
        self.note(operation, args, kwargs, bool(claimed))
        there = target is None or torch.device(target).type != "cpu"
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        result = operation(*plain(args), **plain(kwargs))
        written = {id(value.inner): value for value in claimed}
        if not there:
            return result
        return tree_map(lambda v: written.get(id(v), Claimed(v)) if isinstance(v, torch.Tensor) else v, result)

    def decomposed(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if operation is aten.scaled_dot_product_attention.default:
            return NotImplemented
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd"):
            with self:
                return operation.decompose(*args, **kwargs)
        return NotImplemented

    def note(self, operation: Any, args: Any, kwargs: Any, from_device: bool) -> None:
        if operation in COUNTED:
            self.counts[str(operation)] += 1
        elif operation in MASKED and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.counts["boolean mask"] += 1
        elif operation is aten._to_copy.default and (target := kwargs.get("device")) is not None:
            if torch.device(target).type == "cpu":
                self.counts["copy back"] += 1
            elif not from_device and not kwargs.get("non_blocking"):
                self.counts["copy there"] += 1
        elif operation is aten.copy_.default and args[0].device != args[1].device:
            self.counts["copy in place"] += 1
        elif kwargs.get("device") is not None and operation is aten.lift_fresh.default:
            self.counts["a list on the device"] += 1


def plain(values: Any) -> Any:
    return tree_map(lambda value: value.inner if isinstance(value, Claimed) else value, values)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    with Waits() as mode:
        yield mode.counts


def on_the_device(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, values in list(module._parameters.items()):
            if values is not None:
                module._parameters[name] = torch.nn.Parameter(Claimed(values.detach()), requires_grad=False)
        for name, values in list(module._buffers.items()):
            if values is not None:
                module._buffers[name] = Claimed(values)


def make(device: torch.device, kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> LanguageModel:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**LLAMA)).eval().requires_grad_(False)
    if device == DEVICE:
        with Waits():
            on_the_device(model)
    return LanguageModel(model, None, device, None)


def scores(lm: LanguageModel, ids: list[list[int]], entries: list[DetectorEntry]) -> torch.Tensor:
    detectors = parse_detectors(entries)
    evidence = Evidence(TEXTS, {FORWARD: forward(lm, ids, plan_passes(detectors)[FORWARD])})
    return in_one_copy([detector.score(evidence) for detector in detectors])


@pytest.fixture
def ids() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in (30, 9, 17)]


@pytest.fixture(autouse=True)
def _a_device_without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch makes no inference tensors, which are of no other class."""
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    torch._C._set_only_lift_cpu_tensors(True)
    yield
    torch._C._set_only_lift_cpu_tensors(False)


@pytest.mark.parametrize("entries", [FOUR, ALL], ids=["four", "all"])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, HalvedLogits], ids=["known tail", "unknown tail"])
def test_a_batch_makes_the_cpu_wait_at_most_four_times(
    kind: type[LlamaForCausalLM], entries: list[DetectorEntry], ids: list[list[int]]
) -> None:
    expected = scores(make(torch.device("cpu"), kind), ids, entries)
    lm = make(DEVICE, kind)
    with waits() as counts:
        scores(lm, ids, entries)  # with the proof of the tail
        counts.clear()
        found = scores(lm, ids, entries)
    assert counts["copy back"] == 1, counts
    assert counts.total() <= MOST_WAITS, counts
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("entries", [FOUR, ALL], ids=["four", "all"])
def test_torch_counts_as_few_waits_on_a_gpu(
    entries: list[DetectorEntry], ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    expected = scores(make(torch.device("cpu")), ids, entries)
    cpu = make(torch.device("cpu"))
    lm = LanguageModel(cpu.model.to("cuda"), None, torch.device("cuda", 0), None)
    scores(lm, ids, entries)  # with the proof of the tail
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            on_gpu = scores(lm, ids, entries)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 1 <= sum("synchronizing" in str(warning.message) for warning in caught) <= MOST_WAITS
    torch.testing.assert_close(on_gpu, expected, rtol=1e-3, atol=1e-4)


def test_what_makes_the_cpu_wait_is_counted() -> None:
    """The count cannot be low because it does not see."""
    mask = torch.tensor([True, False, True])
    with waits() as counts:
        values = torch.arange(3.0).to(DEVICE)
        there = mask.to(DEVICE, non_blocking=True)
        assert counts == {"copy there": 1}
        assert values[there].cpu().tolist() == [0.0, 2.0]
        assert values.sum().item() == 3.0
        values[there] = values[there]
        assert there.nonzero().shape == (2, 1)
    assert counts["boolean mask"] + counts["aten.nonzero.default"] == 4
    assert (counts["copy back"], counts["aten._local_scalar_dense.default"]) == (1, 1)


def test_positions_computed_from_lengths_are_those_of_a_mask() -> None:
    for lengths in ((30, 9, 17), (1, 1), (2, 1, 5), (4,), (0, 3)):
        ids = [list(range(7, 7 + length)) for length in lengths]
        batch = pad(ids, torch.device("cpu"))
        longest = max([1, *lengths])
        mask = torch.arange(1, longest) < torch.tensor(lengths)[:, None]
        assert torch.equal(batch.mask, mask)
        assert torch.equal(batch.targets, batch.ids[:, 1:][mask])
        places = torch.arange(len(lengths) * longest).view(len(lengths), longest)
        assert torch.equal(batch.positions, places[:, :-1][mask])
        assert torch.equal(batch.cells, mask.flatten().nonzero().squeeze(1))
        assert batch.counts == tuple(max(0, length - 1) for length in lengths)


def test_columns_on_several_devices_come_back_in_their_order(ids: list[list[int]]) -> None:
    with waits() as counts:
        columns = [torch.tensor([number, 2.0 * number]) for number in range(4)]
        table = in_one_copy([c.to(DEVICE, non_blocking=True) if i % 2 else c for i, c in enumerate(columns)])
    assert torch.equal(table, torch.stack(columns, dim=1).double())
    assert counts == {"copy back": 1}
