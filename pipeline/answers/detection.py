"""How well a detector distinguishes trained from untrained documents: AUC and TPR at small FPR, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from pipeline.checks.held_out_auc import LEAST_BLOCKS, Compared, auc_with_error
from pipeline.selection.shares import clopper_pearson, hoeffding_limit

CONFIDENCE = 0.95
LEAST_MODELS = 3  # fewer give no interval over models: the spread of two is too uncertain
RATES = (0.01, 0.05, 0.10)

_LEAST_PAIRS = 5
"""Minimum of disjoint pairs in the wrong order, in the right one, and with different scores for DeLong's interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate with its 95% interval; None where the value or the interval is not defined."""

    value: Annotated[float | None, Field(description="The number; null where it is not defined.")]
    low: Annotated[float | None, Field(description="Lower end of its 95% interval; null where it has none.")]
    high: Annotated[float | None, Field(description="Upper end of its 95% interval; null where it has none.")]


@dataclass(frozen=True, slots=True)
class Detection:
    """The results of one detector, over the models of a trial or for the one model of an evaluation."""

    auc: Estimate
    tpr: dict[float, Estimate]  # by false positive rate
    n_untrained: int = 0  # independent untrained documents, of the model that has the fewest


UNDEFINED = Estimate(None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class DetectorScores:
    """Scores of the documents of one model, with their blocks; without blocks, all documents are independent."""

    trained: np.ndarray  # float, (documents,)
    untrained: np.ndarray  # float, (documents,)
    blocks: np.ndarray | None = None
    """int64, of the trained, then of the untrained documents; documents with the same number depend on each other."""

    keys: np.ndarray | None = None
    """int64, in the same order, independent of the scores: the document with the smallest key of a block is drawn."""

    @property
    def independent(self) -> tuple[np.ndarray, np.ndarray]:
        """The scores of one document of each block: of the trained, and of the untrained ones."""
        if self.blocks is None or self.keys is None:
            return self.trained, self.untrained
        order = np.lexsort((self.keys, self.blocks))
        first = np.append(True, np.diff(self.blocks[order]) != 0)
        drawn = np.zeros(order.size, dtype=bool)
        drawn[order[first]] = True
        one, other = np.split(drawn, [self.trained.size])
        return self.trained[one], self.untrained[other]


def detection(samples: Sequence[DetectorScores]) -> Detection:
    """AUC and TPR at FPR 1, 5 and 10%, means over models, with 95% intervals over documents, given the models.

    A false positive is an untrained document at or above a threshold. The TPR at a rate is the largest of any
    threshold whose FPR does not exceed the rate. Intervals: `area_interval` and `_tpr_interval`.

    Args:
        samples: scores of each model.

    Returns:
        Undefined estimates where a model has no documents of one kind.
    """
    if not samples or any(one.trained.size == 0 or one.untrained.size == 0 for one in samples):
        return Detection(UNDEFINED, dict.fromkeys(RATES, UNDEFINED))
    curves = [roc(one.trained, one.untrained) for one in samples]
    tpr = {}
    for rate in RATES:
        value = float(np.mean([tpr_at(*curve, rate) for curve in curves]))
        tpr[rate] = Estimate(value, *_tpr_interval(samples, rate, value))
    areas = [Area.measure(one) for one in samples]
    auc = Estimate(float(np.mean([area.value for area in areas])), *area_interval(areas))
    return Detection(auc, tpr, min(one.independent[1].size for one in samples))


def roc(trained: np.ndarray, untrained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FPR and TPR at every threshold, descending, from (0, 0) to (1, 1): float64, (thresholds + 1,)."""
    scores, place = np.unique(np.concatenate([trained, untrained]), return_inverse=True)
    kinds = (place[: trained.size], place[trained.size :])
    counts = (np.bincount(kind, minlength=scores.size)[::-1] for kind in kinds)
    tpr, fpr = (np.concatenate([[0.0], np.cumsum(c) / c.sum()]) for c in counts)
    return fpr, tpr


def tpr_at(fpr: np.ndarray, tpr: np.ndarray, rate: float) -> float:
    """The largest TPR of a threshold whose FPR is at most the rate."""
    return float(tpr[fpr <= rate + 1e-12].max(initial=0.0))


def least_untrained(rate: float, models: int = 1) -> int:
    """The minimum number of independent untrained documents for an interval of the TPR at this false positive rate."""
    return math.ceil(math.log(_tail(models)) / math.log1p(-rate))


def _tail(models: int) -> float:
    """The error probability of each of the four limits of a model's interval of a TPR."""
    return (1 - CONFIDENCE) / 4 / models


def _tpr_interval(samples: Sequence[DetectorScores], rate: float, value: float) -> tuple[float | None, float | None]:
    """The interval of a mean over models of the TPR at a false positive rate; distribution-free, for any sample size.

    The TPR is at least the share of trained documents above the first threshold of `threshold_places`, and at most the
    share at or above the second. Both shares have the limits of Clopper and Pearson, and each of these four may fail
    with probability `_tail`. Of several models, which may share documents, the ends are the means of the models' ends,
    whose errors add up to that of the interval.

    None where even the highest score may have a larger FPR than the rate: then the lower limit would always be 0.
    """
    tail = _tail(len(samples))
    ends = []
    for sample in samples:
        trained, untrained = sample.independent
        if trained.size == 0 or untrained.size < least_untrained(rate, len(samples)):
            return None, None
        strict, generous = threshold_places(untrained.size, rate, tail)
        ordered = np.sort(untrained)[::-1]
        least = int((trained > ordered[strict - 1]).sum())
        most = int((trained >= ordered[generous - 1]).sum()) if generous <= untrained.size else trained.size
        low, _ = clopper_pearson(least, trained.size, tail)
        _, high = clopper_pearson(most, trained.size, tail)
        ends.append((low, high))
    low, high = np.mean(ends, axis=0).tolist()
    return min(low, value), max(high, value)


def threshold_places(count: int, rate: float, tail: float) -> tuple[int, int]:
    """Ranks among `count` independent untrained scores, 1 the highest, that enclose the threshold of a FPR.

    The share of untrained documents above the k-th highest score is stochastically at most, and the share at or above
    it at least, Beta(k, count - k + 1). At the first rank the former exceeds the rate, and at the second the latter is
    below it, each with a probability of at most `tail`.

    Returns:
        the largest k of the first kind, 0 if there is none; the smallest of the second, count + 1 if there is none.
    """
    from scipy.special import betainc  # slow to import, and tables of other results do not need it

    k = np.arange(1, count + 1)
    at_most = betainc(k, count - k + 1, rate)  # P(Beta(k, count - k + 1) <= rate), falls with k
    return int(np.count_nonzero(at_most >= 1 - tail)), 1 + int(np.count_nonzero(at_most > tail))


@dataclass(frozen=True, slots=True)
class Area:
    """An AUC and the inputs of its interval."""

    value: float
    error: float  # standard error; 0 where it was not estimated
    blocks: float  # effective number of independent documents of the rarer kind
    untied: float  # share of pairs of a trained and an untrained document whose scores differ

    @classmethod
    def measure(cls, sample: DetectorScores) -> Area:
        """The AUC of one model, with the standard error of `pipeline.checks.held_out_auc.auc_with_error`."""
        fpr, tpr = roc(sample.trained, sample.untrained)
        value, untied = float(np.trapezoid(tpr, fpr)), 1 - float(np.diff(tpr) @ np.diff(fpr))
        scores = np.concatenate([sample.trained, sample.untrained])
        compared = Compared.of(np.arange(scores.size) < sample.trained.size, sample.blocks)
        blocks = effective_blocks(compared)
        error = auc_with_error(compared, scores)[1] if blocks >= LEAST_BLOCKS else 0.0
        return cls(value, error, blocks, untied)


def effective_blocks(compared: Compared) -> float:
    """Effective number of blocks of equal size of the rarer role: (sum of sizes)^2 / sum of their squares."""
    sizes = [np.bincount(compared.block[role]).astype(np.float64) for role in (compared.audited, ~compared.audited)]
    return min(float(size.sum() ** 2 / (size @ size)) for size in sizes)


def area_interval(areas: Sequence[Area]) -> tuple[float | None, float | None]:
    """The interval of a mean of AUCs, Student's on the logit scale.

    The standard error of the mean is at most the mean of theirs, however the models depend on one another. Where fewer
    than `_LEAST_PAIRS` disjoint pairs are expected in the wrong order, in the right one, or with different scores, the
    standard error is estimated from a few documents: then the interval is Hoeffding's, which holds for any number.

    None where a kind has fewer than `LEAST_BLOCKS` independent documents.
    """
    from scipy.special import expit, logit, stdtrit

    count = min(area.blocks for area in areas)
    if count < LEAST_BLOCKS:
        return None, None
    value, error = (float(np.mean([getattr(area, name) for area in areas])) for name in ("value", "error"))
    if min(value, 1 - value, *(area.untied for area in areas)) * count < _LEAST_PAIRS:
        tail = (1 - CONFIDENCE) / 2
        return hoeffding_limit(value, count, tail), 1 - hoeffding_limit(1 - value, count, tail)
    reach = stdtrit(count - 1, (1 + CONFIDENCE) / 2) * error / (value * (1 - value))
    return float(expit(logit(value) - reach)), float(expit(logit(value) + reach))
