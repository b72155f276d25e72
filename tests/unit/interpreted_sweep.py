"""What `test_sweep_triton.py` has pytest run in a process where Triton interprets its kernels."""

import math

import pytest
import torch
from architectures import LLAMA, VOCABULARY, HalvedLogits
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, LlamaConfig, LlamaForCausalLM

from pipeline.models.load import LanguageModel
from pipeline.models.opened import Tail
from pipeline.passes import forward as module
from pipeline.passes.forward import forward
from pipeline.passes.statistics import MODIFIED_ORDERS, STATISTICS
from pipeline.passes.sweep_triton import BLOCK, fused_sweep

ROUNDING = 2.0**-24
IDENTITY = Tail(torch.nn.Identity(), torch.nn.Identity(), 1.0, None)


def exact_and_bounds(logits: Tensor, targets: Tensor, tail: Tail) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Statistics by the present sweep in float64, and how far those of float32 sums may be from them, at most.

    With u = x - max x, a term e^u |u|^k is off by at most (3|u| + 6) roundings of itself: of u, of u log2(e), of the
    exponential. A sum of terms of one sign adds 12 in a block of 2^12, and 6 for each block: a scale of 3, its products
    and its sum. So a sum is off by 3 m_(k+1) + K m_k, with K = 24 + 6 blocks and m_k the mean of |u|^k weighted by e^u.
    """
    finished = tail.finish(logits.double())
    expected = module._sweep(finished.clone(), targets, STATISTICS)
    u = finished - finished.amax(1, keepdim=True)
    p, size = u.softmax(1), u.clamp_min(-200).abs()
    m = [(p * size**k).sum(1) for k in range(4)]
    halved = (u / 2).softmax(1)
    terms = 24 + 6 * math.ceil(logits.shape[1] / min(BLOCK, 2 ** math.ceil(math.log2(logits.shape[1]))))
    if tail.factor != 1.0 or tail.softcap is not None:  # each logit is off by a few roundings, and so is each ln p
        terms += 16 * finished.masked_fill(finished.isinf(), 0).abs().amax().item()
    sums = [3 * m[k + 1] + terms * m[k] for k in range(3)]
    y = expected["log_prob"].masked_fill(expected["log_prob"].isinf(), 0).abs()
    mean = sums[1] + m[1] * sums[0] + sums[0] + 2 * (m[1] + expected["renyi_inf"])
    bounds = {
        "log_prob": sums[0] + 3 * y,
        "mean": mean,
        "renyi_1": mean,
        "variance": sums[2] + m[2] * sums[0] + 2 * m[1] * (sums[1] + m[1] * sums[0]) + 4 * m[2],
        "renyi_0.5": 2 * (3 * (halved * size).sum(1) + terms) + sums[0] + 4 * expected["renyi_0.5"],
        "renyi_2": 4 * sums[0],
        "renyi_inf": sums[0],
        "m_entropy": 3 * (1 + y + expected["renyi_1"]) * (sums[0] + terms + 2 * y),
        **{f"mod_renyi_{order}": 12 * (sums[0] + terms + y) for order in MODIFIED_ORDERS},
    }
    of_float64 = 2.0**-52 * terms * (1 + expected["renyi_1"] ** 2)  # it takes a square off a square
    return expected, {name: bound * ROUNDING + of_float64 for name, bound in bounds.items()}


def check(logits: Tensor, targets: Tensor, tail: Tail = IDENTITY) -> None:
    before = logits.clone()
    swept = fused_sweep(logits, targets, STATISTICS, tail.factor, tail.softcap)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    expected, bounds = exact_and_bounds(logits, targets, tail)
    assert swept.keys() == STATISTICS
    for name, values in swept.items():
        assert values.dtype == torch.float32
        off = torch.where(values.isinf(), 0, (values - expected[name]).abs())
        assert torch.equal(values.isinf(), expected[name].isinf()), name
        assert (off <= bounds[name]).all(), f"{name}: {off.tolist()} above {bounds[name].tolist()}"


def noise(rows: int, columns: int, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    targets = torch.randint(0, columns, (rows,), generator=generator)
    return scale * torch.randn(rows, columns, generator=generator), targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (1, 2), (5, 97), (1, BLOCK), (2, BLOCK + 1), (1, 128256)])
def test_every_statistic_is_that_of_the_present_sweep_whatever_the_shape(rows, columns, dtype):
    logits, targets = noise(rows, columns)
    check(logits.to(dtype), targets)


def test_a_block_larger_than_all_before_it_rescales_them_and_equal_ones_do_not():
    columns = 3 * BLOCK
    rising = torch.linspace(-300, 300, columns)
    equal = torch.full_like(rising, -7.5)
    check(torch.stack([rising, rising.flip(0), rising / 100, equal]), torch.tensor([columns - 1, 1, 9000, 5]))


def test_tokens_that_a_model_masks_have_no_weight():
    logits, targets = noise(6, 4500)
    logits[0, ::2] = -math.inf
    logits[1, :BLOCK] = -math.inf  # the whole first block
    logits[2, BLOCK:] = -math.inf  # all that follow
    logits[3, 1:] = -math.inf  # all but one token
    logits[4, 5] = logits[5, 5] = -math.inf
    targets[:] = torch.tensor([1, BLOCK, 0, 0, 5, 6])  # the fifth is masked itself
    check(logits, targets)
    assert fused_sweep(logits, targets, STATISTICS)["log_prob"][4] == -math.inf


@pytest.mark.parametrize("likeliest", [1, 2, 3, 5000])
def test_ties_for_the_first_place_are_all_counted(likeliest):
    logits, targets = noise(3, 5100)
    logits[:, :likeliest] = torch.tensor([20.0, 100.0, 17.0])[:, None]
    targets[:] = torch.tensor([0, likeliest - 1, 5099])
    check(logits, targets)
    check(logits.bfloat16(), targets)


def test_certainty_loses_nothing():
    logits = torch.full((3, VOCABULARY), -25.0)
    logits[:, 7] = 25.0
    targets = torch.tensor([7, 8, 9])
    check(logits, targets)
    entropy = fused_sweep(logits, targets, STATISTICS)["m_entropy"]
    assert entropy[1].item() == pytest.approx(100.0 - math.log(VOCABULARY - 1), rel=1e-6)
    halves = torch.tensor([[0.0, -0.01]] * 2)
    entropy = fused_sweep(halves, targets[:2] - 7, STATISTICS)["m_entropy"]
    expected, _ = exact_and_bounds(halves, targets[:2] - 7, IDENTITY)
    assert entropy.tolist() == pytest.approx(expected["m_entropy"].tolist(), rel=5e-7)


@pytest.mark.parametrize(("factor", "softcap"), [(1.6, None), (1.0, 30.0), (0.5, 3.0)])
def test_logits_are_scaled_and_capped_as_the_tail_says(factor, softcap):
    logits, targets = noise(2, 4201, scale=20.0)
    logits[1, :9] = -math.inf
    tail = Tail(torch.nn.Identity(), torch.nn.Identity(), factor, softcap)
    check(logits, targets, tail)
    check(logits.bfloat16(), targets, tail)


def test_logits_may_be_a_part_of_a_wider_tensor():
    logits, targets = noise(4, 1500)
    check(torch.cat([logits, torch.full((4, 36), 99.0)], 1)[:, :1500], targets)
    check(torch.cat([logits, logits])[::2], targets)
    check(logits.T.contiguous().T, targets)


def test_nan_and_inf_give_nan_in_their_row_alone():
    logits, targets = noise(5, 4200)
    logits[1, 0] = logits[2, 4199] = math.nan
    logits[3, 0] = logits[4, 4199] = math.inf
    for name, values in fused_sweep(logits, targets, STATISTICS).items():
        assert values.isnan().tolist() == [False, True, True, True, True], name


def test_a_row_without_tokens_and_an_id_without_a_row_give_nan_and_no_row_gives_none():
    logits, targets = noise(3, 50)
    logits[0] = -math.inf
    targets[1:] = torch.tensor([50, -1])
    swept = fused_sweep(logits, targets, STATISTICS)
    assert swept["log_prob"].isnan().all()
    assert all(values[0].isnan() for values in swept.values())
    assert all(len(v) == 0 for v in fused_sweep(torch.zeros(0, 9), torch.zeros(0).long(), STATISTICS).values())


@pytest.mark.parametrize("name", ["mean", "m_entropy", "renyi_0.5", "renyi_2", "mod_renyi_0.5"])
def test_a_statistic_does_not_depend_on_which_others_are_computed(name):
    logits, targets = noise(2, 900)
    alone = fused_sweep(logits, targets, frozenset({name}))
    together = fused_sweep(logits, targets, STATISTICS)
    assert alone.keys() == {"log_prob", name}
    assert all(torch.equal(alone[key], together[key]) for key in alone)


MODELS = {
    "capped": lambda: AutoModelForCausalLM.from_config(Gemma2Config(**LLAMA, head_dim=8, final_logit_softcapping=3.0)),
    "scaled, with a padded head": lambda: AutoModelForCausalLM.from_config(GraniteConfig(**LLAMA, logits_scaling=4.0)),
    "of unknown tail": lambda: HalvedLogits(LlamaConfig(**LLAMA)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_forward_pass_with_the_kernel_is_that_without_it(kind, monkeypatch, caplog):
    torch.manual_seed(0)
    model = MODELS[kind]().eval().requires_grad_(False)
    if "padded" in kind:
        model.resize_token_embeddings(VOCABULARY + 24, mean_resizing=False)
        model.config.vocab_size = VOCABULARY
    lm = LanguageModel(model, None, torch.device("cpu"), None)
    ids = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in (4, 2, 1)]
    calls = []
    kernel = module.fused
    monkeypatch.setattr(module, "_proofs", {})
    monkeypatch.setattr(module, "fused", lambda *given: calls.append(given) or kernel(*given))
    fused = forward(lm, ids, STATISTICS)
    assert len(calls) >= 2  # the proof, and the pass
    assert not caplog.records
    monkeypatch.setattr(module, "interpreted", False)
    plain = forward(lm, ids, STATISTICS)
    for name in ("log_prob", "mean", "variance", "m_entropy", "renyi", "mod_renyi"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["wrong by .1%", "fails", "is not there", "has no memory"])
def test_a_kernel_that_does_not_prove_itself_is_left_out_with_a_line_in_the_log(fault, monkeypatch, caplog):
    kernel = module.fused

    def faulty(*given):
        if fault == "wrong by .1%":
            return {name: values * (1.001 if name == "variance" else 1) for name, values in kernel(*given).items()}
        raise torch.OutOfMemoryError if fault == "has no memory" else RuntimeError("no compiler\n")

    monkeypatch.setattr(module, "fused", None if fault == "is not there" else faulty)
    monkeypatch.setattr(module, "_proofs", {})
    torch.manual_seed(0)
    lm = LanguageModel(LlamaForCausalLM(LlamaConfig(**LLAMA)).eval(), None, torch.device("cpu"), None)
    if fault == "has no memory":
        with pytest.raises(torch.OutOfMemoryError):
            forward(lm, [[1, 2, 3]], STATISTICS)
        assert module._proofs == {}
        return
    statistics = [forward(lm, [[1, 2, 3]], STATISTICS) for _ in range(2)]
    monkeypatch.setattr(module, "interpreted", False)
    plain = forward(lm, [[1, 2, 3]], STATISTICS)
    assert all(torch.equal(each.variance, plain.variance) for each in statistics)
    expected = {
        "wrong by .1%": "it gives another variance than PyTorch",
        "fails": "RuntimeError: no compiler",
        "is not there": "Triton is not installed",
    }
    line = f"token statistics are computed without the Triton kernel on cpu: {expected[fault]}"
    assert [record.getMessage() for record in caplog.records] == [line]
