"""A pass for which memory ends is done in halves: only that pass, only that batch, and by the batch alone."""

from collections.abc import Sequence

import pytest
import torch
from architectures import LLAMA, found_of
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.load import LanguageModel
from pipeline.passes.forward import forward
from pipeline.passes.parts import PassSizes, forward_in_parts, gradients_in_parts
from pipeline.passes.statistics import STATISTICS


class Memory:
    """A pass that fits so many padded tokens, and notes the sizes that were asked for."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.attempts: list[int] = []
        self.failures = 0  # of attempts to come, whatever their size

    def __call__(self, lengths: Sequence[int]) -> list[int]:
        self.attempts.append(len(lengths))
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("in pieces")
        if len(lengths) * max(lengths) > self.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(lengths)


def run(sizes: PassSizes, memory: Memory, batch: list[int], tokens: int | None = None) -> list[list[int]]:
    return sizes.run(memory, batch, batch, tokens)


def test_parts_hold_the_budget_and_one_document_at_least_whose_errors_are_raised() -> None:
    assert run(PassSizes(), Memory(10**6), [1, 2, 3, 4, 90], tokens=8) == [[1, 2], [3, 4], [90]]
    assert run(PassSizes(), Memory(10**6), [90, 4], tokens=8) == [[90], [4]]
    assert run(PassSizes(), Memory(10**6), [1, 2, 3]) == [[1, 2, 3]]
    assert run(PassSizes(), Memory(10**6), []) == []
    with pytest.raises(torch.OutOfMemoryError):
        run(PassSizes(), Memory(45), [10, 46])
    with pytest.raises(ZeroDivisionError):
        PassSizes().run(lambda some: 1 / 0, [1, 2], [1, 2])


def test_the_parts_of_a_batch_do_not_depend_on_the_batches_before() -> None:
    """What was learned of the memory spares attempts, and changes no part."""
    batches = [[10] * 8, [5] * 16, [12] * 9, [3] * 4, [10] * 8, [40, 41, 42], [11] * 12]
    alone = [run(PassSizes(), Memory(45), batch) for batch in batches[:5]]
    alone += [run(PassSizes(), Memory(45), batch) for batch in batches[5:]]
    for order in (range(7), reversed(range(7)), [6, 0, 3, 5, 1, 2, 4]):
        sizes, memory = PassSizes(), Memory(45)
        together = {place: run(sizes, memory, batches[place]) for place in order}
        assert [together[place] for place in range(7)] == alone
    assert alone[3] == [[3] * 4]  # after the halves of others a batch is whole


def test_a_size_that_failed_is_not_tried_again() -> None:
    sizes, memory = PassSizes(), Memory(45)
    run(sizes, memory, [10] * 8)
    assert memory.attempts == [8, 8, 4, 4]
    memory.attempts.clear()
    run(sizes, memory, [12] * 8)
    assert memory.attempts == [4, 4, 2, 2, 2, 2]  # 8 of 10 tokens have failed; then 4 of 12 do
    memory.attempts.clear()
    assert run(sizes, memory, [10] * 4) == [[10] * 4]
    assert memory.attempts == [4]


def test_memory_that_ends_once_changes_nothing() -> None:
    """Memory in pieces, or another process: after the cache is emptied the whole part is tried again."""
    sizes, memory = PassSizes(), Memory(1000)
    memory.failures = 1
    assert run(sizes, memory, [10] * 8) == [[10] * 8]
    memory.failures = 2  # longer than that: this batch is halved, and a size that has worked stays good
    assert run(sizes, memory, [10] * 8) == [[10] * 4, [10] * 4]
    assert run(sizes, memory, [10] * 8) == [[10] * 8]
    memory.failures = 1
    assert run(sizes, memory, [10]) == [[10]]


IDS = [[(7 * row + column) % 97 for column in range(2 + 3 * row)] for row in range(8)]


def test_passes_in_parts_are_one_table() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval().requires_grad_(False)
    lm = LanguageModel(model, None, torch.device("cpu"), None)
    whole, norms = forward(lm, IDS, STATISTICS), gradients_in_parts(lm, IDS, None, 10**6, PassSizes())
    assert [len(part) for part in PassSizes(failed=[(5, 1)]).run(list, IDS, [len(one) for one in IDS])] == [4, 4]
    parts = forward_in_parts(lm, IDS, STATISTICS, PassSizes(failed=[(5, 1)]))
    assert torch.equal(parts.mask, whole.mask)
    for name in STATISTICS:
        torch.testing.assert_close(found_of(parts, name), found_of(whole, name), rtol=1e-4, atol=1e-5)
    halves = gradients_in_parts(lm, IDS, None, 10**6, PassSizes(failed=[(5, 1)]))
    torch.testing.assert_close(halves, norms, rtol=1e-5, atol=0)
