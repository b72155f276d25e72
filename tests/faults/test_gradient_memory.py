"""A gradient pass that runs out of memory, wherever it does, leaves none of its activations behind."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.load import LanguageModel
from pipeline.passes.gradient import gradient_coverage, gradient_norms

IDS = [list(range(1, 120)), list(range(3, 90))]
PASSES = 3


class Memory(TorchDispatchMode):
    """Remembers what operations allocate, and refuses the one after `operations` of them."""

    def __init__(self, model: nn.Module, operations: float = float("inf")) -> None:
        super().__init__()
        self.limit, self.operations = operations, 0
        self.weights = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        self.made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations > self.limit:
            raise torch.OutOfMemoryError("no memory is left")
        result = func(*args, **(kwargs or {}))
        self.made |= {
            StorageWeakRef(value.untyped_storage())
            for value in tree_leaves(result)
            if isinstance(value, Tensor) and value.numel() > 1000
        }
        return result

    def alive(self) -> int:
        """Number of allocations that still exist."""
        gc.collect()
        return sum(not storage.expired() for storage in self.made - self.weights)


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 199}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.eval().requires_grad_(False)
    assert gradient_coverage(model).method == "batched"
    return LanguageModel(model, None, torch.device("cpu"), 2048)


def run(llama: LanguageModel, memory: Memory) -> Tensor | None:
    """The norms, or None where memory ended."""
    try:
        with memory:
            return gradient_norms(llama, IDS)
    except torch.OutOfMemoryError:
        return None


@pytest.mark.parametrize(
    "share", [0.2, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.4, 0.6, 0.8)), 0.95]
)
def test_a_gradient_pass_that_fails_frees_its_activations(llama: LanguageModel, share: float) -> None:
    whole = Memory(llama.model)
    expected = run(llama, whole)
    assert expected is not None
    assert whole.alive() == 0
    failed = [Memory(llama.model, int(share * whole.operations)) for _ in range(PASSES)]
    for memory in failed:
        assert run(llama, memory) is None
        assert memory.made
    # An error out of a backward pass may live, with what was in flight, until the next one; it never adds up.
    assert [memory.alive() for memory in failed[:-1]] == [0] * (PASSES - 1)
    assert torch.equal(gradient_norms(llama, IDS), expected)
    assert failed[-1].alive() == 0
