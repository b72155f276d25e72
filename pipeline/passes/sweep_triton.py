"""The sweep over the vocabulary as one GPU kernel; requires Triton, which is part of torch's CUDA builds.

Each row of logits is read once, in blocks: its maximum, and relative to it the sum of exp and its first two moments,
which are rescaled when a block has a larger maximum. Modified entropies need the normalizer, and therefore a second
sweep. Only the statistics are written. Sums are float32 for any dtype of logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
ROWS = {name: row for row, name in enumerate(("log_prob", "mean", "variance", "renyi_0.5", "renyi_2", "renyi_inf"))}
ROWS |= {name: len(ROWS) + place for place, name in enumerate(("m_entropy", "mod_renyi_0.5", "mod_renyi_2"))}
"""Row of the result for each statistic; `renyi_1` uses the row of the mean."""

_LOWEST = tl.constexpr(-3e38)  # below every logit, and finite: no -inf - -inf
_FLOOR = tl.constexpr(-200.0)  # exp(-200) is 0 in float32; avoids 0 * -inf in sums


@triton.jit
def _at_least(values: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The larger of the two; unlike `tl.maximum` it propagates NaN."""
    return tl.where(values < limit, limit, values)


@triton.jit
def _finished(
    logits: tl.tensor, factor: tl.tensor, softcap: tl.tensor, SCALED: tl.constexpr, CAPPED: tl.constexpr
) -> tl.tensor:
    """As `models.tail.Tail.finish`, in float32."""
    logits = logits.to(tl.float32)
    if SCALED:
        logits = logits * factor
    if CAPPED:
        ratio = logits / softcap
        small = tl.exp(-2.0 * tl.abs(ratio))
        tanh = (1.0 - small) / (1.0 + small)
        logits = tl.where(ratio < 0, -tanh, tanh) * softcap
    return logits


@triton.jit
def _surprise_of_not(p: tl.tensor) -> tl.tensor:
    """-ln(1 - p) for p in [0, 1/2], to 2e-8 of it: 2 atanh(s) at s = p / (2 - p) <= 1/3. Finite up to p = 1."""
    s = p / (2.0 - p)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))


@triton.jit
def _of_sure(p: tl.tensor, others: tl.tensor, log_p: tl.tensor, HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The terms p ((1-p)^q - 1) and (1-p) (p^q - 1) with 1 - p given as `others`, q = 1/2 or 1."""
    if HALF:
        return p * (tl.sqrt(others) - 1.0), others * (tl.exp(0.5 * log_p) - 1.0)
    return p * (others - 1.0), others * (tl.exp(log_p) - 1.0)


@triton.jit
def _of_other(p: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """The term p ((1-p)^q - 1) for p in [0, 1/2], q = 1/2 or 1."""
    return -p * p / (1.0 + tl.sqrt(1.0 - p)) if HALF else -p * p


@triton.jit
def _modified(
    terms: tl.tensor, p: tl.tensor, log_prob: tl.tensor, others: tl.tensor, log_top: tl.tensor, certain: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`mod_renyi` of one row, of order 1/2 (q = 1/2) or 2 (q = 1), from the terms of all but one likeliest token."""
    of_top, sure = _of_sure(tl.exp(log_top), others, log_top, HALF)
    unlikely = _of_sure(p, 1.0 - p, log_prob, HALF)[1] + terms - _of_other(p, HALF) + of_top
    total = tl.where(certain, sure + terms, unlikely)
    return -2.0 * total if HALF else -total


@triton.jit
def _modified_entropies(
    row: tl.tensor, columns: tl.tensor, factor: tl.tensor, softcap: tl.tensor, peak: tl.tensor, log_sum: tl.tensor,
    logit: tl.tensor, log_prob: tl.tensor, SCALED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    MODIFIED: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """`m_entropy` of one row, and `mod_renyi` of orders 1/2 and 2, in a second sweep.

    The first is -(1-p_y) ln p_y - sum over i != y of p_i ln(1-p_i). The likeliest tokens are counted, not summed: 1 - p
    of one is the sum of the others, which float32 can represent when 1 - p rounds to 0. Other tokens have p <= 1/2.
    """
    lanes = tl.arange(0, BLOCK)
    likeliest = 0.0
    others = 0.0
    terms = 0.0
    halves = 0.0
    squares = 0.0
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        x = _finished(tl.load(row + start + lanes, mask=inside, other=0.0), factor, softcap, SCALED, CAPPED)
        x = tl.where(inside, x, float("-inf"))
        top = x == peak
        p = tl.where(top, 0.0, tl.exp((x - peak) - log_sum))
        likeliest += tl.sum(tl.where(top, 1.0, 0.0), 0)
        others += tl.sum(p, 0)
        if ENTROPY:
            terms += tl.sum(p * _surprise_of_not(p), 0)
        if MODIFIED:
            halves += tl.sum(_of_other(p, True), 0)
            squares += tl.sum(_of_other(p, False), 0)
    p_top = tl.exp(-log_sum)
    ties = likeliest - 1.0  # of two equally likely tokens, each has p <= 1/2
    tied = tl.where(ties > 0, p_top, 0.0)
    others += ties * p_top
    terms += ties * tied * _surprise_of_not(tied)
    halves += ties * _of_other(tied, True)
    squares += ties * _of_other(tied, False)
    p = tl.exp(log_prob)
    certain = logit == peak
    of_top = -p_top * tl.maximum(tl.log(others), log_prob)  # y is one of the others, despite underflow
    unlikely = (1.0 - p) * -log_prob + terms - p * _surprise_of_not(p) + of_top
    entropy = tl.where(certain, others * -log_prob + terms, unlikely)
    half = _modified(halves, p, log_prob, others, -log_sum, certain, True)
    two = _modified(squares, p, log_prob, others, -log_sum, certain, False)
    return entropy, half, two


@triton.jit
def _sweep_row(
    logits: tl.tensor, targets: tl.tensor, results: tl.tensor, rows: tl.tensor, columns: tl.tensor, stride: tl.tensor,
    factor: tl.tensor, softcap: tl.tensor, SCALED: tl.constexpr, CAPPED: tl.constexpr, MOMENTS: tl.constexpr,
    HALF: tl.constexpr, TWO: tl.constexpr, ENTROPY: tl.constexpr, MODIFIED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Statistics of one row of logits (rows, columns), to its column of `results`."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    lanes = tl.arange(0, BLOCK)
    peak = _LOWEST
    total = 0.0  # of exp(x - peak)
    first = 0.0  # of exp(x - peak) (x - peak)
    second = 0.0  # of exp(x - peak) (x - peak)^2
    halves = 0.0  # of exp((x - peak) / 2)
    squares = 0.0  # of exp(x - peak)^2
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        x = _finished(tl.load(row + start + lanes, mask=inside, other=0.0), factor, softcap, SCALED, CAPPED)
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        step = _at_least(peak - higher, _FLOOR)
        scale = tl.exp(step)
        u = _at_least(x - higher, _FLOOR)
        e = tl.exp(u)
        if MOMENTS:
            product = e * u
            second = scale * (second + step * (2.0 * first + step * total)) + tl.sum(product * u, 0)
            first = scale * (first + step * total) + tl.sum(product, 0)
        if HALF:
            halves = halves * tl.exp(0.5 * step) + tl.sum(tl.exp(0.5 * u), 0)
        if TWO:
            squares = squares * (scale * scale) + tl.sum(e * e, 0)
        total = total * scale + tl.sum(e, 0)
        peak = higher
    log_sum = tl.where(total > 0, tl.log(total), float("nan"))
    target = tl.load(targets + index)
    known = (target >= 0) & (target < columns)
    logit = tl.load(row + target, mask=known, other=0.0)
    logit = tl.where(known, _finished(logit, factor, softcap, SCALED, CAPPED), float("nan"))
    log_prob = (logit - peak) - log_sum
    tl.store(results + index, log_prob)
    if MOMENTS:
        centre = first / total
        tl.store(results + rows + index, centre - log_sum)
        tl.store(results + 2 * rows + index, _at_least(second / total - centre * centre, 0.0))
    if HALF:
        tl.store(results + 3 * rows + index, _at_least(2.0 * tl.log(halves) - log_sum, 0.0))
    if TWO:
        tl.store(results + 4 * rows + index, _at_least(2.0 * log_sum - tl.log(squares), 0.0))
    tl.store(results + 5 * rows + index, log_sum)
    if ENTROPY or MODIFIED:
        entropy, half, two = _modified_entropies(
            row, columns, factor, softcap, peak, log_sum, logit, log_prob, SCALED, CAPPED, ENTROPY, MODIFIED, BLOCK
        )
        tl.store(results + 6 * rows + index, entropy)
        tl.store(results + 7 * rows + index, half)
        tl.store(results + 8 * rows + index, two)


def fused_sweep(
    logits: Tensor, targets: Tensor, statistics: frozenset[str], factor: float = 1.0, softcap: float | None = None
) -> dict[str, Tensor]:
    """Statistics of each row of logits, which are read once, or twice for modified entropies.

    Args:
        logits: (rows, vocabulary) float32, bfloat16 or float16, outputs of the head. They are not changed.
        targets: (rows,) ids of the actual tokens. An id outside of the vocabulary gives NaN.
        statistics: names in `STATISTICS`; `log_prob` is always computed.
        factor: factor of the logits, applied first, in float32.
        softcap: c of c tanh(logits / c), applied after the factor; None: no cap.

    Returns:
        Each (rows,) float32. A row that contains NaN or inf, or only -inf, gives NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, columns = logits.shape
    results = torch.empty(len(ROWS), rows, dtype=torch.float32, device=logits.device)
    flags = (
        factor != 1.0,
        softcap is not None,
        bool(statistics & {"mean", "variance", "renyi_1"}),
        "renyi_0.5" in statistics,
        "renyi_2" in statistics,
        "m_entropy" in statistics,
        bool(statistics & {"mod_renyi_0.5", "mod_renyi_2"}),
    )
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            _sweep_row[(rows,)](
                logits, targets, results, rows, columns, logits.stride(0), factor, softcap or 1.0, *flags,
                min(BLOCK, triton.next_power_of_2(columns)), num_warps=8,
            )  # fmt: skip
    swept = {name: results[row] for name, row in ROWS.items() if name == "log_prob" or name in statistics}
    if "renyi_1" in statistics:
        swept["renyi_1"] = -results[ROWS["mean"]]
    return swept
