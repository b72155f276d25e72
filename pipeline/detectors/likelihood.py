"""Detectors that read token log-probabilities and the vocabulary behind them (docs/methods.md, section 1.2).

Each takes the evidence of a batch and returns (documents,) float64, higher = more member-like. Natural logarithms.
A new detector is one new function here: say what it needs, and it can be named in a config.
"""

from __future__ import annotations

import math
import zlib as compression
from typing import TYPE_CHECKING, Any

from pipeline.detectors.arguments import Share
from pipeline.detectors.base import FORWARD, LOWERCASE, REFERENCE, Evidence, WrittenNeeds, detector
from pipeline.passes.statistics import RENYI_ORDERS

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.passes.forward import TokenStatistics

TINY = 1e-12
LIKELIHOOD = {FORWARD: ["log_prob"]}


def renyi_order(value: Any) -> str:
    """A Renyi order as its name: 0.5, 1, 2 or inf, given as a number or a string.

    Raises:
        ValueError: anything else.
    """
    name = value.strip().lower().replace(".inf", "inf") if isinstance(value, str) else value
    if not isinstance(value, bool):
        for order in RENYI_ORDERS:
            if name == order or (isinstance(value, (int, float)) and value == float(order)):
                return order
    raise ValueError(f"must be one of {', '.join(RENYI_ORDERS)}")


def mean_of_all(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row where the mask is True, (documents,) float64; NaN where it never is."""
    return values.double().where(mask, 0.0).sum(1) / mask.sum(1)


def mean_of_lowest(values: Tensor, mask: Tensor, k: float) -> Tensor:
    """Mean of the max(1, int(k * n)) lowest of each row's n values under the mask, (documents,) float64.

    NaN where a row has a NaN or no value.
    """
    import torch

    counts = mask.sum(1)
    taken = (counts.double() * k).long().clamp_min(1)  # on the device: to read the counts would wait for it
    lowest = values.double().where(mask, math.inf).sort(1).values  # sorts NaN behind inf: hence the last line
    among = torch.arange(mask.shape[1], device=mask.device) < taken[:, None]
    means = lowest.where(among, 0.0).sum(1) / taken
    broken = (values.isnan() & mask).any(1) | (counts == 0)
    return means.masked_fill(broken, math.nan)


def standardised(statistics: TokenStatistics) -> Tensor:
    """Token log-probabilities less their mean over the vocabulary, in its standard deviations: (documents, tokens - 1).

    Args:
        statistics: with `mean` and `variance`.
    """
    assert statistics.mean is not None
    assert statistics.variance is not None
    return (statistics.log_prob - statistics.mean) / statistics.variance.clamp_min(TINY).sqrt()


@detector(needs=LIKELIHOOD)
def loss(evidence: Evidence) -> Tensor:
    """Mean token log-probability, <= 0: minus the cross-entropy (Yeom et al. 2018)."""
    t = evidence[FORWARD]
    return mean_of_all(t.log_prob, t.mask)


@detector(needs=LIKELIHOOD)
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


@detector(needs={FORWARD: ["log_prob"], REFERENCE: ["log_prob"]}, signed=True)
def reference(evidence: Evidence) -> Tensor:
    """Mean token log-probability less that under the reference model, each with its own tokenizer (Carlini 2021)."""
    other = evidence[REFERENCE]
    return loss(evidence) - mean_of_all(other.log_prob, other.mask)


@detector(needs=LIKELIHOOD)
def min_k(evidence: Evidence, k: Share = 0.2) -> Tensor:
    """Mean of the lowest k share of token log-probabilities, <= 0 (Shi et al. 2024, eq. 1)."""
    t = evidence[FORWARD]
    return mean_of_lowest(t.log_prob, t.mask, k)


@detector(needs={FORWARD: ["log_prob", "mean", "variance"]}, signed=True)
def min_k_plus_plus(evidence: Evidence, k: Share = 0.2) -> Tensor:
    """Mean of the lowest k share of standardised token log-probabilities (Zhang et al. 2025, eq. 4)."""
    t = evidence[FORWARD]
    return mean_of_lowest(standardised(t), t.mask, k)


@detector(needs={FORWARD: ["m_entropy"]})
def m_entropy(evidence: Evidence) -> Tensor:
    """Minus the mean modified prediction entropy, <= 0 (Song & Mittal 2021, eq. 8; the sign is ours)."""
    t = evidence[FORWARD]
    assert t.m_entropy is not None
    return -mean_of_all(t.m_entropy, t.mask)


def _renyi_needs(order: str) -> WrittenNeeds:
    return {FORWARD: [f"renyi_{order}"]}


@detector(needs=_renyi_needs, checks={"order": renyi_order})
def renyi(evidence: Evidence, order: str = "1", k: Share = 0.2) -> Tensor:
    """Minus the mean of the largest k share of Renyi entropies, <= 0 (MaxRenyi-K%, Li et al. 2024; sign ours)."""
    t = evidence[FORWARD]
    return mean_of_lowest(-t.renyi[order], t.mask, k)
