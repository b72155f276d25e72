"""Detectors that read token log-probabilities and distributions over the vocabulary (docs/methods.md, section 1.2).

Each takes the evidence of a batch and returns (documents,) float64, higher = more member-like. Natural logarithms.
A new detector is one new function with its needs; configurations can then name it.
"""

from __future__ import annotations

import math
import zlib as compression
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.detectors.arguments import Count, NonNegative, Positive, Share
from pipeline.detectors.base import FORWARD, LOWERCASE, REFERENCE, Evidence, Pass, Prefix, WrittenNeeds, detector
from pipeline.passes.statistics import RENYI_ORDERS, SWAPPED, Part

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.passes.forward import TokenStatistics

TINY = 1e-12
LIKELIHOOD = {FORWARD: ["log_prob"]}

ShareOrOne = Annotated[float, Field(ge=0, le=1, description="a number in [0, 1], of which 0 is the single largest")]

Caption = Literal["generated", "given"]
"""Source of the description of a picture: the model, or the corpus."""

WordsPart = Literal["instruction", "description", "instruction_description"]
"""Part of a picture with its description that a detector reads, for detectors of the actual token: only words."""


def picture_pass(part: str | None, caption: Caption) -> Pass:
    """The forward pass over a text, or over a part of a picture with its description."""
    return FORWARD if part is None else Pass("forward", part=part, caption=caption)


def order_named(value: Any, orders: tuple[str, ...]) -> str:
    """The name of an order, such as 0.5 or inf, given as a number or a string.

    Raises:
        ValueError: anything else.
    """
    name = value.strip().lower().replace(".inf", "inf") if isinstance(value, str) else value
    if not isinstance(value, bool):
        for order in orders:
            if name == order or (isinstance(value, (int, float)) and value == float(order)):
                return order
    raise ValueError(f"must be one of {', '.join(orders)}")


def mean_of_all(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row under the mask, (documents,) float64; NaN for an empty mask.

    Example:
        >>> import torch
        >>> values = torch.tensor([[-1.0, -3.0, 0.0], [-2.0, -4.0, -6.0]])
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> seenset.mean_of_all(values, mask).tolist()
        [-2.0, -4.0]
    """
    return values.double().where(mask, 0.0).sum(1) / mask.sum(1)


def mean_of_lowest(values: Tensor, mask: Tensor, k: float) -> Tensor:
    """Mean of the max(1, int(k * n)) lowest of each row's n values under the mask, (documents,) float64.

    NaN if a row has a NaN or no value.

    Example:
        >>> import torch
        >>> values = torch.tensor([[-1.0, -3.0, -9.0], [-2.0, -4.0, -6.0]])
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> seenset.mean_of_lowest(values, mask, k=0.7).tolist()
        [-3.0, -5.0]
    """
    import torch

    counts = mask.sum(1)
    taken = (counts.double() * k).long().clamp_min(1)  # on the device, to avoid synchronization
    lowest = values.double().where(mask, math.inf).sort(1).values  # sorts NaN after inf, see the last line
    among = torch.arange(mask.shape[1], device=mask.device) < taken[:, None]
    means = lowest.where(among, 0.0).sum(1) / taken
    broken = (values.isnan() & mask).any(1) | (counts == 0)
    return means.masked_fill(broken, math.nan)


def standardised(statistics: TokenStatistics) -> Tensor:
    """Token log-probabilities standardized by mean and standard deviation over the vocabulary: (documents, tokens - 1).

    Args:
        statistics: with `mean` and `variance`.
    """
    assert statistics.mean is not None
    assert statistics.variance is not None
    return (statistics.log_prob - statistics.mean) / statistics.variance.clamp_min(TINY).sqrt()


def _reads(*statistics: str) -> Callable[[str | None, Caption], WrittenNeeds]:
    """Needs of a detector that reads these statistics of a text, or of a part of a picture with its description."""
    return lambda part, caption: {picture_pass(part, caption): statistics}


@detector(needs=_reads("log_prob"), windows=True)
def loss(evidence: Evidence, part: WordsPart | None = None, caption: Caption = "generated") -> Tensor:
    """Mean token log-probability, <= 0: minus the cross-entropy (Yeom et al. 2018)."""
    t = evidence[picture_pass(part, caption)]
    return mean_of_all(t.log_prob, t.mask)


@detector(needs=_reads("log_prob"), windows=True)
def perplexity(evidence: Evidence, part: WordsPart | None = None, caption: Caption = "generated") -> Tensor:
    """Minus the perplexity exp(cross-entropy), <= -1 (FSD, Zhang et al. 2025, eq. 2; the sign is ours).

    It orders documents as `loss` does, but its difference between two models, in `fsd` and `knockoff`, does not. A
    cross-entropy above 709 has no perplexity in float64: -inf, for which the document is quarantined.
    """
    return -(-loss(evidence, part, caption)).exp()


@detector(needs=LIKELIHOOD, windows=True)
def zlib(evidence: Evidence) -> Tensor:
    """Mean token log-probability over the bytes of the compressed text, <= 0 (Carlini et al. 2021)."""
    sizes = [len(compression.compress(text.encode("utf-8", "surrogatepass"), 6)) for text in evidence.texts]
    scores = loss(evidence)
    return scores / evidence[FORWARD].per_document(sizes)


@detector(needs={FORWARD: ["log_prob"], LOWERCASE: ["log_prob"]})
def lowercase(evidence: Evidence) -> Tensor:
    """Cross-entropy of the lowercased text over that of the text, > 0 (Carlini et al. 2021)."""
    lowered = evidence[LOWERCASE]
    return mean_of_all(lowered.log_prob, lowered.mask) / loss(evidence)


@detector(needs={FORWARD: ["log_prob"], REFERENCE: ["log_prob"]}, signed=True, windows=True)
def reference(evidence: Evidence) -> Tensor:
    """Mean token log-probability minus that of the reference model, each with its own tokenizer.

    Carlini et al. (2021) take the ratio of the two.
    """
    other = evidence[REFERENCE]
    return loss(evidence) - mean_of_all(other.log_prob, other.mask)


@detector(needs=_reads("log_prob"), windows=True)
def min_k(
    evidence: Evidence,
    k: Share = 0.2,
    window: Count = 1,
    part: WordsPart | None = None,
    caption: Caption = "generated",
) -> Tensor:
    """Mean of the lowest k share of token log-probabilities, <= 0 (Shi et al. 2024, eq. 1).

    With a window the lowest moving averages are used (arXiv 2508.01268), except for shorter texts.
    """
    t = evidence[picture_pass(part, caption)]
    values, mask = moving_average(t.log_prob, t.mask, window)
    return mean_of_lowest(values, mask, k)


@detector(needs=_reads("log_prob", "mean", "variance"), signed=True, windows=True)
def min_k_plus_plus(
    evidence: Evidence,
    k: Share = 0.2,
    window: Count = 1,
    part: WordsPart | None = None,
    caption: Caption = "generated",
) -> Tensor:
    """Mean of the lowest k share of standardised token log-probabilities (Zhang et al. 2025, eq. 4).

    The window is as in `min_k`.
    """
    t = evidence[picture_pass(part, caption)]
    values, mask = moving_average(standardised(t), t.mask, window)
    return mean_of_lowest(values, mask, k)


@detector(needs=_reads("log_prob", "mean", "variance", "renyi_inf"), windows=True)
def gap_k(
    evidence: Evidence,
    k: Share = 0.2,
    window: Count = 3,
    part: WordsPart | None = None,
    caption: Caption = "generated",
) -> Tensor:
    """Mean of the lowest k share of moving averages of the token's gap to the likeliest one, <= 0 (arXiv 2601.19936).

    The gap is (ln p of the token - ln p of the likeliest) in standard deviations of ln p over the vocabulary. A text
    with fewer tokens than the window is not averaged.
    """
    t = evidence[picture_pass(part, caption)]
    assert t.variance is not None
    gap = (t.log_prob + t.renyi["inf"]) / t.variance.clamp_min(TINY).sqrt()
    values, mask = moving_average(gap, t.mask, window)
    return mean_of_lowest(values, mask, k)


def moving_average(values: Tensor, mask: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Moving averages in each row, (documents, tokens) float64, and their mask.

    Args:
        values: (documents, tokens).
        mask: bool; True from the first token of each row to its last, or of each window of a document.
        window: number of neighbouring values in a mean; a row without as many is unchanged.
    """
    import torch

    values = values.double().where(mask, 0.0)
    if window == 1 or mask.shape[1] < window:
        return values, mask

    def sums(of: Tensor) -> Tensor:
        running = torch.nn.functional.pad(of.cumsum(1), (1, 0))
        return torch.nn.functional.pad(running[:, window:] - running[:, :-window], (0, window - 1))

    means = sums(values) / window
    whole = sums(mask.long()) == window
    short = ~whole.any(1, keepdim=True)
    return means.where(~short, values), torch.where(short, mask, whole)


def first_occurrences(statistics: TokenStatistics) -> Tensor:
    """Whether each token is the first of its kind, from the second of the text on: (documents, tokens - 1) bool.

    Args:
        statistics: with `token`.
    """
    import torch

    assert statistics.token is not None
    tokens = statistics.token.masked_fill(~statistics.mask, -1)
    ordered, order = tokens.sort(dim=1, stable=True)  # equal tokens keep the order of the text
    new = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    return torch.zeros_like(statistics.mask).scatter(1, order, new) & statistics.mask


@detector(needs={FORWARD: ["log_prob", "mean", "token"]}, signed=True, windows=True)
def etd(evidence: Evidence, beta: NonNegative = 1.0) -> Tensor:
    """Mean of ln p + beta H over the first occurrence of each token (arXiv 2609.21888).

    H is the entropy of the distribution of the token. The paper's beta is not known here.
    """
    t = evidence[FORWARD]
    assert t.mean is not None
    return mean_of_all(t.log_prob.double() - beta * t.mean.double(), first_occurrences(t))


def _counted(documents: int) -> Prefix:
    return Prefix("unseen", documents, counted=True)


@detector(
    needs=lambda documents: {
        FORWARD: ["log_prob", "token"],
        Pass("count", prefix=_counted(documents)): ["rarity"],
    },
    windows=True,
)
def dc_pdd(evidence: Evidence, clip: Positive = 0.01, documents: Count = 100) -> Tensor:
    """Mean of min(clip, p ln(1 / f)) over the first occurrence of each token, > 0 (DC-PDD, Zhang et al. 2024).

    f is the frequency of the token in `documents` unseen documents that do not calibrate, so that tokens that are
    likely because they are common count less. NaN if a log-probability is NaN.
    """
    t = evidence[FORWARD]
    assert t.token is not None
    rarity = evidence.rarity[_counted(documents)].to(t.mask.device)[t.token.masked_fill(~t.mask, 0)]
    return mean_of_all((t.log_prob.double().exp() * rarity).clamp_max(clip), first_occurrences(t))


@detector(needs=_reads("m_entropy"), windows=True)
def m_entropy(evidence: Evidence, part: Part | None = None, caption: Caption = "generated") -> Tensor:
    """Minus the mean modified prediction entropy, <= 0 (Song & Mittal 2021, eq. 8; the sign is ours)."""
    t = evidence[picture_pass(part, caption)]
    assert t.m_entropy is not None
    return -mean_of_all(t.m_entropy, t.mask)


@detector(
    needs=lambda order, part, caption: {
        picture_pass(part, caption): ["m_entropy" if order == "1" else f"mod_renyi_{order}"]
    },
    checks={"order": partial(order_named, orders=("0.5", "1", "2"))},
    windows=True,
)
def mod_renyi(
    evidence: Evidence, order: str = "0.5", part: Part | None = None, caption: Caption = "generated"
) -> Tensor:
    """Minus the mean modified Renyi entropy, <= 0, which depends on the actual token (Li et al. 2024; sign ours).

    Of order 1 it is `m_entropy`.
    """
    t = evidence[picture_pass(part, caption)]
    values = t.m_entropy if order == "1" else t.mod_renyi[order]
    assert values is not None
    return -mean_of_all(values, t.mask)


@detector(
    needs=lambda order, part, caption: {picture_pass(part, caption): [f"renyi_{order}"]},
    checks={"order": partial(order_named, orders=RENYI_ORDERS)},
    windows=True,
)
def renyi(
    evidence: Evidence, order: str = "1", k: ShareOrOne = 0.2, part: Part | None = None, caption: Caption = "generated"
) -> Tensor:
    """Minus the mean of the largest k share of Renyi entropies, <= 0 (MaxRenyi-K%, Li et al. 2024; sign ours).

    With k = 0 it is the single largest.
    """
    t = evidence[picture_pass(part, caption)]
    return mean_of_lowest(-t.renyi[order], t.mask, k)


def _copies(copies: int) -> list[Pass]:
    return [Pass("forward", text=f"{SWAPPED}{copy}") for copy in range(1, copies + 1)]


@detector(needs=lambda copies: {needed: ["log_prob"] for needed in (FORWARD, *_copies(copies))})
def pac(evidence: Evidence, copies: Count = 5, k_high: Share = 0.05, k_low: Share = 0.3) -> Tensor:
    """Polarized distance of copies with swapped words minus that of the text, of any sign.

    Mean of PD over the copies minus PD(x); PD is the mean of the largest k_high of the token log-probabilities minus
    the mean of the lowest k_low, >= 0 (PAC, arXiv 2405.11930). Members have few improbable tokens, and a smaller PD.
    """

    def polarised(needed: Pass) -> Tensor:
        t = evidence[needed]
        return -mean_of_lowest(-t.log_prob, t.mask, k_high) - mean_of_lowest(t.log_prob, t.mask, k_low)

    swapped = [polarised(needed) for needed in _copies(copies)]
    return sum(swapped[1:], swapped[0]) / copies - polarised(FORWARD)
