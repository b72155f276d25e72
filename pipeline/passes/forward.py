"""The forward pass: statistics of every token of a batch, in one sweep over chunks of logits.

The model runs up to its hidden states; padding and last positions are dropped; then the head is applied to a few
hundred positions at a time, so that the logits of a batch are never in memory as a whole. On a GPU a Triton kernel
sweeps over them, after it has been verified there.

The CPU and the device do not synchronize within a batch: there is one copy to the device before it and one back after
it. The CPU computes the counted positions from the lengths of a batch; indexing with a boolean mask on the device would
block the CPU until all previous work is done.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import error_line
from pipeline.models.lengths import length_rule
from pipeline.models.opened import LanguageModel, Tail, agree, stated_tail
from pipeline.passes.statistics import GIVEN, MODIFIED_ORDERS, RENYI_ORDERS, STATISTICS

HEAD_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}  # maximum logits in memory
TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # logits per sweep: on a CPU they stay in its cache
OWN_BEST = "own_best"
"""Pseudo-statistic: some rows have no token and are measured at their likeliest token."""

FLOOR = -200.0  # exp(-200) is 0 in float32; avoids 0 * -inf in sums if a model masks its vocabulary


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Statistics of the tokens of a padded batch of documents, from one forward pass.

    Shapes are (documents, tokens - 1), column t for the token t + 2 of the text; `mask` is False on padding, where the
    statistics are 0. Natural logarithms, float32. Statistics that were not requested are None, or missing from `renyi`.
    """

    log_prob: Tensor  # of the token in the text, <= 0
    mask: Tensor  # bool
    mean: Tensor | None = None  # of the log-probability over the vocabulary, weighted by probability, <= 0
    variance: Tensor | None = None  # of the same, >= 0
    m_entropy: Tensor | None = None  # -(1-p_y) ln p_y - sum over i != y of p_i ln(1-p_i), >= 0 (Song & Mittal 2021)
    renyi: dict[str, Tensor] = field(default_factory=dict)  # entropy by order, >= 0
    mod_renyi: dict[str, Tensor] = field(default_factory=dict)  # modified entropy by order, >= 0 (Li et al. 2024)
    token: Tensor | None = None  # int64, its id in the model's vocabulary

    def per_document(self, values: Sequence[float]) -> Tensor:
        """One number per document from the CPU, (documents,) float64, on the device of the statistics."""
        return to_device(torch.tensor(values, dtype=torch.float64), self.mask.device)


def restricted(statistics: TokenStatistics, keep: Sequence[Sequence[bool]]) -> TokenStatistics:
    """The statistics of some tokens, without gaps.

    Args:
        statistics: statistics of a batch.
        keep: for each document, whether each token from the second on is kept; at least one is.
    """
    kept = torch.zeros(statistics.mask.shape, dtype=torch.bool)
    for row, tokens in enumerate(keep):
        kept[row, : len(tokens)] = torch.tensor(tokens)
    kept = to_device(kept, statistics.mask.device) & statistics.mask
    order = torch.argsort((~kept).to(torch.int8), dim=1, stable=True)[:, : int(kept.sum(dim=1).max())]
    return rearranged(statistics, kept.gather(1, order), lambda values: values.gather(1, order))


def rearranged(statistics: TokenStatistics, mask: Tensor, moved: Callable[[Tensor], Tensor]) -> TokenStatistics:
    """Statistics at other places.

    Args:
        statistics: statistics of a batch.
        mask: bool, the mask of the result.
        moved: returns the values of the result, from one table of statistics; those outside of the mask are not used.
    """

    def table(values: Tensor) -> Tensor:
        there = moved(values)
        return torch.where(mask, there, torch.zeros_like(there[:, :1]))

    def optional(values: Tensor | None) -> Tensor | None:
        return None if values is None else table(values)

    return TokenStatistics(
        log_prob=table(statistics.log_prob),
        mask=mask,
        mean=optional(statistics.mean),
        variance=optional(statistics.variance),
        m_entropy=optional(statistics.m_entropy),
        renyi={order: table(values) for order, values in statistics.renyi.items()},
        mod_renyi={order: table(values) for order, values in statistics.mod_renyi.items()},
        token=optional(statistics.token),
    )


def forward(lm: LanguageModel, ids: Sequence[Sequence[int]], statistics: frozenset[str]) -> TokenStatistics:
    """Run a batch of tokenized documents through the model once.

    Args:
        lm: model.
        ids: token ids of each document. Lengths may differ; the batch is padded on the right.
        statistics: names in `STATISTICS` to compute and in `GIVEN` to return; `log_prob` is always computed.

    Returns:
        The statistics, on the model's device. Up to rounding, they do not depend on the other documents of the batch.

    Raises:
        ValueError: an unknown statistic.
    """
    if unknown := statistics - STATISTICS - GIVEN:
        raise ValueError(f"unknown statistics {sorted(unknown)}; known: {sorted(STATISTICS | GIVEN)}")

    def read(some: Sequence[Sequence[int]]) -> TokenStatistics:
        batch = pad(some, lm.device)
        with torch.inference_mode():
            swept = sweep_rows(_logits(lm.model, batch), batch.targets, statistics)
            return statistics_at(swept, batch.cells, batch.mask, statistics)

    return joined_statistics(length_rule(lm.model).apply(read, ids, list(map(len, ids))))


def joined_statistics(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    """Concatenated statistics of the parts of a batch, padded to the longest document."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.mask.shape[1] for part in parts)

    def table(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([functional.pad(value, (0, longest - value.shape[1])) for value in values])

    def optional(values: Sequence[Tensor | None]) -> Tensor | None:
        there = [value for value in values if value is not None]
        return table(there) if there else None

    return TokenStatistics(
        log_prob=table([part.log_prob for part in parts]),
        mask=table([part.mask for part in parts]),
        mean=optional([part.mean for part in parts]),
        variance=optional([part.variance for part in parts]),
        m_entropy=optional([part.m_entropy for part in parts]),
        renyi={order: table([part.renyi[order] for part in parts]) for order in parts[0].renyi},
        mod_renyi={order: table([part.mod_renyi[order] for part in parts]) for order in parts[0].mod_renyi},
        token=optional([part.token for part in parts]),
    )


def sweep_rows(
    chunks: Iterable[tuple[Tensor, Tail | None]], targets: Tensor, statistics: frozenset[str]
) -> dict[str, Tensor]:
    """Statistics of rows of logits, each (rows,) float32; tokens are int64.

    Args:
        chunks: logits (some rows, vocabulary) in order, each with the model's tail; they are overwritten.
        targets: (rows,) token of each row; -1: the likeliest token of the row.
        statistics: names of the statistics.
    """
    swept: list[dict[str, Tensor]] = []
    at = 0
    for logits, tail in chunks:
        some = targets[at : at + len(logits)].to(logits.device)
        if OWN_BEST in statistics:
            some = torch.where(some < 0, logits.argmax(1), some)
        swept.append(_swept(logits, some, statistics - {OWN_BEST} - GIVEN, tail))
        if "token" in statistics:
            swept[-1]["token"] = some
        at += len(logits)
    return {name: torch.cat([piece[name].to(targets.device) for piece in swept]) for name in swept[0]} if swept else {}


def statistics_at(
    swept: Mapping[str, Tensor], cells: Tensor, mask: Tensor, statistics: frozenset[str]
) -> TokenStatistics:
    """Statistics of rows arranged in a table of documents.

    Args:
        swept: result of `sweep_rows`.
        cells: (rows,) index of each row in `mask.flatten()`.
        mask: (documents, tokens) bool.
        statistics: names of the statistics.
    """

    def table(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.zeros(mask.numel(), dtype=dtype, device=mask.device)
        if swept:
            values.index_copy_(0, cells, swept[name].to(mask.device))
        return values.view(mask.shape)

    moments = {name: table(name) for name in ("mean", "variance", "m_entropy") if name in statistics}
    renyi = {order: table(f"renyi_{order}") for order in RENYI_ORDERS if f"renyi_{order}" in statistics}
    modified = [order for order in MODIFIED_ORDERS if f"mod_renyi_{order}" in statistics]
    return TokenStatistics(
        log_prob=table("log_prob"),
        mask=mask,
        mean=moments.get("mean"),
        variance=moments.get("variance"),
        m_entropy=moments.get("m_entropy"),
        renyi=renyi,
        mod_renyi={order: table(f"mod_renyi_{order}") for order in modified},
        token=table("token", torch.int64) if "token" in statistics else None,
    )


def from_log_probs(values: Sequence[Sequence[float]], device: torch.device | str = "cpu") -> TokenStatistics:
    """Statistics of a batch from given log-probabilities.

    Args:
        values: for each document, the log-probabilities of all tokens except the first.
        device: device of the result.
    """
    longest = max(map(len, values))
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in values])
    padded = [[*row, *[0.0] * (longest - len(row))] for row in values]
    place = torch.device(device)
    return TokenStatistics(log_prob=to_device(torch.tensor(padded), place), mask=to_device(mask, place))


_tails: weakref.WeakKeyDictionary[nn.Module, Tail | None] = weakref.WeakKeyDictionary()


def find_tail(model: Any) -> Tail | None:
    """The model's tail, verified on a short input; None if the model computes its logits in another way."""
    if model not in _tails:
        with length_rule(model).alone():
            _tails[model] = _find_tail(model)
    return _tails[model]


def _find_tail(model: Any) -> Tail | None:
    tail = stated_tail(model)
    if tail is None:
        return None
    device = model.get_input_embeddings().weight.device
    probe = torch.arange(min(8, model.config.get_text_config().vocab_size), device=device)[None]
    whole = model(input_ids=probe, use_cache=False).logits.float()
    hidden = getattr(tail.base(input_ids=probe, use_cache=False), "last_hidden_state", None)
    if hidden is None:
        return None
    parts = tail.finish(tail.head(hidden).to(torch.float32, copy=True))
    return tail if agree(parts, whole, hidden.dtype) else None


def _logits(model: Any, batch: PaddedBatch) -> Iterator[tuple[Tensor, Tail | None]]:
    """Logits of a batch's positions, in order, in chunks (rows, vocabulary), and their tail.

    The next chunk overwrites the previous one. The attention mask is omitted: with a causal mask no token attends to
    the padding on its right.
    """
    tail = find_tail(model)
    if tail is None:
        yield from _whole_logits(model, batch)
        return
    hidden = tail.base(input_ids=batch.ids, use_cache=False).last_hidden_state
    yield from logits_of_rows(model, tail, hidden.flatten(0, 1).index_select(0, batch.positions.to(hidden.device)))


def logits_of_rows(model: Any, tail: Tail, rows: Tensor) -> Iterator[tuple[Tensor, Tail]]:
    """Outputs of the head for hidden states (rows, hidden), in chunks (some rows, vocabulary) as in `_logits`."""
    if not len(rows):
        return
    apply = _head(tail.head)
    vocabulary = model.config.get_text_config().vocab_size
    for chunk in rows.tensor_split(_pieces(len(rows), vocabulary, HEAD_ELEMENTS, rows.device)):
        yield apply(chunk), tail


def _whole_logits(model: Any, batch: PaddedBatch) -> Iterator[tuple[Tensor, None]]:
    """As `_logits`, for a model without a tail: the logits of the model, for a few documents at a time."""
    documents, longest = batch.ids.shape
    vocabulary = model.config.get_text_config().vocab_size
    pieces = min(_pieces(documents * longest, vocabulary, HEAD_ELEMENTS, batch.ids.device), documents)
    document = row = 0
    for some in batch.ids.tensor_split(pieces):
        logits = model(input_ids=some, use_cache=False).logits
        rows = sum(batch.counts[document : document + len(some)])
        if rows:
            positions = batch.positions[row : row + rows] - document * longest
            yield logits.flatten(0, 1).index_select(0, positions.to(logits.device)), None
        document, row = document + len(some), row + rows


def _head(head: nn.Module) -> Callable[[Tensor], Tensor]:
    """The head as a function with one output buffer, which saves page faults: the next call overwrites the result.

    On a GPU the logits are float32 even for bfloat16 weights: rounding would change a token by .01 nats.
    """
    if type(head) is not nn.Linear or hasattr(head, "_hf_hook"):
        return head
    buffers: list[Tensor] = []
    widened = {"out_dtype": torch.float32} if multiplies_into_float32(head.weight.device, head.weight.dtype) else {}

    def apply(rows: Tensor) -> Tensor:
        if not buffers:  # the first chunk is the longest
            buffers.append(rows.new_empty(len(rows), head.out_features, dtype=widened.get("out_dtype", rows.dtype)))
        out = torch.mm(rows, head.weight.t(), out=buffers[0][: len(rows)], **widened)
        return out if head.bias is None else out.add_(head.bias)

    return apply


def _float_tiles(logits: Tensor) -> Iterator[Tensor]:
    """Logits (rows, vocabulary) in float32 tiles of a few rows."""
    buffer: Tensor | None = None
    for tile in logits.tensor_split(_pieces(len(logits), logits.shape[1], TILE_ELEMENTS, logits.device)):
        if tile.dtype == torch.float32:
            yield tile
            continue
        if buffer is None:
            buffer = torch.empty(tile.shape, dtype=torch.float32, device=tile.device)  # the first is the longest
        yield buffer[: len(tile)].copy_(tile)


def _pieces(rows: int, vocabulary: int, elements: dict[str, int], device: torch.device) -> int:
    limit = max(1, elements.get(device.type, elements["cuda"]) // vocabulary)
    return max(1, -(-rows // limit))


def _swept(logits: Tensor, targets: Tensor, statistics: frozenset[str], tail: Tail | None) -> dict[str, Tensor]:
    """Statistics of each row of outputs of the head, of any dtype; with one kernel on a GPU if it is verified."""
    factor, softcap = (tail.factor, tail.softcap) if tail is not None else (1.0, None)

    def sweep(values: Tensor, of: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
        return _sweep(tail.finish(values) if tail is not None else values, of, names)

    kernel = proven_kernel(logits, statistics, factor, softcap, lambda rows, *rest: sweep(rows.double(), *rest))
    if kernel is not None:
        return kernel(logits, targets, statistics, factor, softcap)
    pieces: list[dict[str, Tensor]] = []
    for tile in _float_tiles(logits):
        at = sum(len(piece["log_prob"]) for piece in pieces)
        pieces.append(sweep(tile, targets[at : at + len(tile)], statistics))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _sweep(logits: Tensor, targets: Tensor, statistics: frozenset[str]) -> dict[str, Tensor]:
    """Statistics of each row of logits (rows, vocabulary), each (rows,) float32. The logits are overwritten.

    The moments are sums with p = exp(ln p), without renormalization, as in the published code. The variance is that of
    ln p about its mean: as the difference of E[(ln p)^2] and the squared mean, as published, it loses in float32 what a
    nearly flat distribution has of it.
    """
    results: dict[str, Tensor] = {}
    log_p = torch.log_softmax(logits, 1)
    results["log_prob"] = log_prob = log_p.gather(1, targets[:, None]).squeeze(1)
    if not statistics - {"log_prob"}:
        return results
    modified = [name for name in statistics if name.startswith("mod_renyi_")]
    best = log_p.argmax(1, keepdim=True) if modified or "m_entropy" in statistics else None
    log_p.clamp_min_(FLOOR)
    p = torch.exp(log_p, out=logits)
    if "renyi_inf" in statistics:
        results["renyi_inf"] = -log_p.amax(1)
    if statistics & {"mean", "variance", "renyi_1"}:
        product = log_p.mul_(p) if "variance" not in statistics else p * log_p
        results["mean"] = product.sum(1)
        if "renyi_1" in statistics:
            results["renyi_1"] = -results["mean"]
        if "variance" in statistics:
            deviation = torch.sub(log_p, results["mean"][:, None], out=product)
            results["variance"] = deviation.square_().mul_(p).sum(1)
    if "renyi_0.5" in statistics:
        results["renyi_0.5"] = (2 * torch.sqrt(p, out=log_p).sum(1).log()).clamp_min_(0)
    if "renyi_2" in statistics:
        results["renyi_2"] = (-torch.mul(p, p, out=log_p).sum(1).log()).clamp_min_(0)
    for name in modified:
        assert best is not None
        results[name] = _mod_renyi(p, log_prob, best, targets, abs(1 - float(name.removeprefix("mod_renyi_"))))
    if "m_entropy" in statistics:
        assert best is not None
        results["m_entropy"] = _m_entropy(p, log_p, log_prob, best, targets)
    return results


def _mod_renyi(p: Tensor, log_prob: Tensor, best: Tensor, targets: Tensor, q: float) -> Tensor:
    """-((1-p_y)(p_y^q - 1) + sum over j != y of p_j ((1-p_j)^q - 1)) / q, each (rows,); q = |1 - order|.

    The likeliest token is computed separately, as in `_m_entropy`.
    """
    p_best = p.gather(1, best).squeeze(1)
    rest = p.scatter(1, best, 0.0)
    others = rest.sum(1)
    rest_target = rest.gather(1, targets[:, None]).squeeze(1)
    terms = torch.log1p(-rest).mul_(q).expm1_().mul_(rest).sum(1)
    of_best = p_best * (others.pow(q) - 1)
    of_target = rest_target * torch.expm1(q * torch.log1p(-rest_target))
    is_best = best.squeeze(1) == targets
    wrong = torch.where(is_best, terms, terms - of_target + of_best)
    right = torch.where(is_best, others, 1 - rest_target) * torch.expm1(q * log_prob)
    return -(right + wrong) / q


def _m_entropy(p: Tensor, scratch: Tensor, log_prob: Tensor, best: Tensor, targets: Tensor) -> Tensor:
    """-(1-p_y) ln p_y - sum over i != y of p_i ln(1-p_i), each (rows,); `p` and `scratch` are overwritten.

    The likeliest token is computed separately: its 1 - p is the sum of the others, which does not underflow to 0.
    """
    p_best = p.gather(1, best).squeeze(1)
    minus_p = p.scatter_(1, best, 0.0).neg_()
    others = -minus_p.sum(1)
    minus_p_target = minus_p.gather(1, targets[:, None]).squeeze(1)
    terms = torch.log1p(minus_p, out=scratch).mul_(minus_p).sum(1)
    of_best = -p_best * torch.maximum(others.log(), log_prob)  # y is one of the others, despite underflow
    of_target = minus_p_target * torch.log1p(minus_p_target)
    is_best = best.squeeze(1) == targets
    rest = torch.where(is_best, terms, terms - of_target + of_best)
    return torch.where(is_best, others, 1 + minus_p_target) * -log_prob + rest


@cache
def multiplies_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.mm` of matrices of this dtype can return float32 on this device without intermediate rounding.

    True on CUDA with torch >= 2.8 for bfloat16 and float16; tested once.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(ones, ones, out=ones.float(), out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # not supported by torch or the GPU
        return False
    return True


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A padded batch of documents on a device, and its predicting positions; all int64 except `mask`."""

    ids: Tensor  # (documents, tokens), 0 on padding
    targets: Tensor  # (rows,): predicted tokens, document by document
    positions: Tensor  # (rows,): positions that predict them, in ids.flatten()
    cells: Tensor  # (rows,): their indices in mask.flatten()
    mask: Tensor  # (documents, tokens - 1) bool, False on padding
    counts: tuple[int, ...]  # predicted tokens of each document, on the CPU


def pad(ids: Sequence[Sequence[int]], device: torch.device) -> PaddedBatch:
    """Pad tokenized documents on the right, and copy them to a device in one copy.

    Args:
        ids: token ids of each document.
        device: device of the result.
    """
    longest = max([1, *map(len, ids)])
    padded = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in ids])
    counts = torch.tensor([max(0, len(sequence) - 1) for sequence in ids])
    mask = torch.arange(longest - 1) < counts[:, None]
    cells = mask.flatten().nonzero().squeeze(1)
    positions = cells + cells // max(1, longest - 1)  # a row of ids is longer by one
    parts = [padded.flatten(), padded.flatten()[positions + 1], positions, cells, mask.flatten().long()]
    there = to_device(torch.cat(parts), device).split([len(part) for part in parts])
    return PaddedBatch(
        ids=there[0].view(padded.shape),
        targets=there[1],
        positions=there[2],
        cells=there[3],
        mask=there[4].view(mask.shape).bool(),
        counts=tuple(counts.tolist()),
    )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; on CUDA from pinned memory, on a separate stream, concurrently with kernels."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return values.to(device, non_blocking=True)
    computing, copying = torch.cuda.current_stream(device), _copying_stream(device)
    with torch.cuda.stream(copying):
        copied = values.pin_memory().to(device, non_blocking=True)
    computing.wait_stream(copying)
    copied.record_stream(computing)
    return copied


@cache
def _copying_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def in_one_copy(columns: Sequence[Tensor]) -> Tensor:
    """Columns of numbers on the CPU: (rows, columns) float64, with one copy from each device.

    Args:
        columns: (rows,) each.
    """
    places: dict[torch.device, list[int]] = {}
    for index, column in enumerate(columns):
        places.setdefault(column.device, []).append(index)
    table = torch.empty(len(columns[0]), len(columns), dtype=torch.float64)
    for indices in places.values():
        table[:, indices] = torch.stack([columns[index].double() for index in indices], dim=1).cpu()
    return table


fused: Callable[[Tensor, Tensor, frozenset[str], float, float | None], dict[str, Tensor]] | None = None
interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton runs its kernels in Python, on the CPU, as the tests do."""

if interpreted or torch.backends.cuda.is_built():  # importing Triton takes .2 s
    with suppress(ImportError):
        from pipeline.passes.sweep_triton import fused_sweep as fused

PROOF_ERROR = 1e-4
"""Maximum error of a statistic x in the verification, relative to 1 + |x|.

Sums over a vocabulary in n blocks of 4,096 have a relative error of at most (24 + 6n) 2^-24, 1.3e-5 at 128,256 tokens,
and sums of moments a few times that; a wrong kernel has a larger error.
"""

_log = logging.getLogger(__name__)
_proofs: dict[tuple[object, ...], bool] = {}


def proven_kernel(
    logits: Tensor,
    statistics: frozenset[str],
    factor: float,
    softcap: float | None,
    exact: Callable[[Tensor, Tensor, frozenset[str]], dict[str, Tensor]],
) -> Callable[[Tensor, Tensor, frozenset[str], float, float | None], dict[str, Tensor]] | None:
    """The kernel, if it gives correct statistics for a few rows like these logits on their device; tested once.

    Args:
        logits: logits to sweep; only the device, the dtype and the number of columns are used.
        statistics: names of the statistics.
        factor: as in `sweep_triton.fused_sweep`.
        softcap: as in `sweep_triton.fused_sweep`.
        exact: returns the same statistics in float64 for such logits and targets.

    Returns:
        The kernel; None on a CPU, or if the test failed, with a warning in the log.

    Raises:
        torch.OutOfMemoryError: the device has no memory for a few rows, so the kernel could not be tested.
    """
    if logits.device.type != "cuda" and not interpreted:
        return None
    key = (logits.device, logits.dtype, logits.shape[1], statistics, factor, softcap)
    if key not in _proofs:
        reason = _refutation(logits, statistics, factor, softcap, exact)
        if reason:
            _log.warning("token statistics are computed without the Triton kernel on %s: %s", logits.device, reason)
        _proofs[key] = not reason
    return fused if _proofs[key] else None


def _refutation(
    logits: Tensor,
    statistics: frozenset[str],
    factor: float,
    softcap: float | None,
    exact: Callable[[Tensor, Tensor, frozenset[str]], dict[str, Tensor]],
) -> str:
    """Why the kernel cannot be used, in a few words; empty if it can."""
    if fused is None:
        return "Triton is not installed"
    sample, targets = _sample(logits.shape[1])
    sample, targets = sample.to(logits.device, logits.dtype), targets.to(logits.device)
    try:
        swept = fused(sample, targets, statistics, factor, softcap)
        expected = exact(sample, targets, statistics)
        for name in sorted(swept):
            values = swept[name].double()
            if not torch.allclose(values, expected[name], rtol=PROOF_ERROR, atol=PROOF_ERROR, equal_nan=True):
                return f"it gives another {name} than PyTorch"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any failure of a compiler, a driver or a cache
        return f"{type(error).__name__}: {error_line(error, 200)}"
    return ""


def _sample(columns: int) -> tuple[Tensor, Tensor]:
    """Rows of logits, (8, columns) float32, that reveal a wrong sweep, and the target of each, (8,)."""
    noise = 3 * torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    noise[1, ::2] = -torch.inf  # a vocabulary masked by the model
    noise[2].round_()  # ties
    sure = torch.zeros(2, columns)
    sure[:, columns // 2] = 60.0
    rising = torch.linspace(-20, 20, columns)
    rows = torch.stack([*noise, *sure, torch.zeros(columns), rising, torch.full((columns,), torch.nan)])
    last = columns - 1
    return rows, torch.tensor([0, 0, columns // 3, columns // 2, last, last, last // 2, 0])
