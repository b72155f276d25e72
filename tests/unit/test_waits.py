"""The CPU does not wait for a device in the midst of a batch: what would make it wait on CUDA is counted."""

import warnings
from collections import Counter

import pytest
import torch
from architectures import LLAMA, VOCABULARY, HalvedLogits
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.audit import DetectorEntry
from pipeline.detectors.base import FORWARD, Evidence, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.models.load import LanguageModel
from pipeline.passes.forward import forward, in_one_copy, pad
from tests.helpers.claimed_device import ClaimedDevices, real

CPU, DEVICE = torch.device("cpu"), torch.device("meta", 0)
MOST_WAITS = 4
FOUR: list[DetectorEntry] = ["loss", "zlib", "min_k", "min_k_plus_plus"]
ALL: list[DetectorEntry] = [*FOUR, "m_entropy", {"renyi": {"order": [0.5, 1, 2, "inf"]}}]
TEXTS = ["some text " * 20, "other text " * 20, "a third text"]


def waits_of(devices: ClaimedDevices) -> Counter[str]:
    return Counter(kind for kind, place in devices.waits for _ in range(devices.waits[kind, place]))


def make(kind: type[LlamaForCausalLM] = LlamaForCausalLM, devices: ClaimedDevices | None = None) -> LanguageModel:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**LLAMA)).eval().requires_grad_(False)
    if devices is not None:
        devices.claim(model, lambda name: DEVICE)
    return LanguageModel(model, None, CPU if devices is None else DEVICE, None)


def scores(lm: LanguageModel, ids: list[list[int]], entries: list[DetectorEntry]) -> torch.Tensor:
    detectors = parse_detectors(entries)
    evidence = Evidence(TEXTS, {FORWARD: forward(lm, ids, plan_passes(detectors)[FORWARD])})
    return in_one_copy([detector.score(evidence) for detector in detectors])


@pytest.fixture
def ids() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in (30, 9, 17)]


@pytest.mark.parametrize("entries", [FOUR, ALL], ids=["four", "all"])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, HalvedLogits], ids=["known tail", "unknown tail"])
def test_a_batch_makes_the_cpu_wait_at_most_four_times(
    kind: type[LlamaForCausalLM], entries: list[DetectorEntry], ids: list[list[int]]
) -> None:
    expected = scores(make(kind), ids, entries)
    with ClaimedDevices() as devices:
        lm = make(kind, devices)
        scores(lm, ids, entries)  # with the proof of the tail
        devices.waits.clear()
        found = scores(lm, ids, entries)
    counts = waits_of(devices)
    assert counts["copy meta to cpu"] == 1, counts
    assert counts.total() <= MOST_WAITS, counts
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("entries", [FOUR, ALL], ids=["four", "all"])
def test_torch_counts_as_few_waits_on_a_gpu(entries: list[DetectorEntry], ids: list[list[int]]) -> None:
    expected = scores(make(), ids, entries)
    lm = LanguageModel(make().model.to("cuda"), None, torch.device("cuda", 0), None)
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
    with ClaimedDevices() as devices:
        values = torch.arange(3.0).to(DEVICE)
        there = mask.to(DEVICE, non_blocking=True)
        assert waits_of(devices) == {"copy cpu to meta": 1}
        assert real(values[there].cpu()).tolist() == [0.0, 2.0]
        assert values.sum().item() == 3.0
        values[there] = values[there]
        assert there.nonzero().shape == (2, 1)
    counts = waits_of(devices)
    assert counts["boolean mask"] + counts["nonzero"] == 4
    assert (counts["copy meta to cpu"], counts["item"]) == (1, 1)


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
    with ClaimedDevices() as devices:
        columns = [torch.tensor([number, 2.0 * number]) for number in range(4)]
        table = in_one_copy([c.to(DEVICE, non_blocking=True) if i % 2 else c for i, c in enumerate(columns)])
    assert torch.equal(table, torch.stack(columns, dim=1).double())
    assert waits_of(devices) == {"copy meta to cpu": 1}
