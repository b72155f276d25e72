"""How well a detector tells trained from untrained documents: AUC and TPR at small FPR, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

CONFIDENCE = 0.95
RATES = (0.01, 0.05, 0.10)
RESAMPLES = 1000
_CELLS = 1 << 22
"""Resampled counts in memory at a time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval; None where it is not defined."""

    value: Annotated[float | None, Field(description="The number; null where it is not defined.")]
    low: Annotated[float | None, Field(description="Lower end of its 95% interval.")]
    high: Annotated[float | None, Field(description="Upper end of its 95% interval.")]


@dataclass(frozen=True, slots=True)
class Detection:
    """One detector over the models of a trial, or over the one model of an evaluation."""

    auc: Estimate
    tpr: dict[float, Estimate]  # by false positive rate


UNDEFINED = Estimate(None, None, None)


def detection(samples: Sequence[tuple[np.ndarray, np.ndarray]], seed: int, resamples: int = RESAMPLES) -> Detection:
    """AUC and TPR at FPR 1, 5 and 10%, means over models, with 95% percentile bootstrap intervals.

    A false positive is an untrained document at or above a threshold. The TPR at a rate is the largest of any
    threshold whose FPR does not exceed the rate. Trained and untrained documents are resampled apart, within models.

    A bootstrap interval is too short where a figure is within 1/n of 1 or 0, because hardly a resample differs from
    it. There the interval is extended to that of Clopper and Pearson for n successes in n: down to .025^(1/n), or up
    to 1 - .025^(1/n). n is the number of independent chances to fail, summed over models. For a TPR these are the
    trained documents (the threshold counts as fixed). For AUC they are disjoint pairs of a trained and an untrained
    document: as many as there are documents of the rarer kind.

    Args:
        samples: per model, the scores of the trained and of the untrained documents, float, (documents,).
        seed: of the resampling.
        resamples: how many.

    Returns:
        Undefined estimates where a model has no documents of one kind.
    """
    if not samples or any(trained.size == 0 or untrained.size == 0 for trained, untrained in samples):
        return Detection(UNDEFINED, dict.fromkeys(RATES, UNDEFINED))
    rng = np.random.default_rng(seed)
    values = np.mean([_figures(*_counts(*sample)) for sample in samples], axis=0)[0]
    resampled = np.mean([_resampled(*_counts(*sample), resamples, rng) for sample in samples], axis=0)
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    pairs = sum(min(trained.size, untrained.size) for trained, untrained in samples)
    chances = [pairs] + [sum(trained.size for trained, _ in samples)] * len(RATES)
    estimates = [
        _estimate(float(value), float(one), float(other), n)
        for value, one, other, n in zip(values, low, high, chances, strict=True)
    ]
    return Detection(estimates[0], dict(zip(RATES, estimates[1:], strict=True)))


def roc(trained: np.ndarray, untrained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FPR and TPR at every threshold, descending, from (0, 0) to (1, 1): float64, (thresholds + 1,)."""
    counts = _counts(trained, untrained)
    tpr, fpr = (np.concatenate([[0.0], np.cumsum(c[0]) / c.sum()]) for c in counts)
    return fpr, tpr


def _estimate(value: float, low: float, high: float, chances: int) -> Estimate:
    """The bootstrap interval, extended as `detection` says where the value is within 1/chances of 1 or 0."""
    reach = ((1 - CONFIDENCE) / 2) ** (1 / chances)
    if value >= 1 - 1 / chances:
        low = min(low, reach)
    elif value <= 1 / chances:
        high = max(high, 1 - reach)
    return Estimate(value, low, high)


def _counts(trained: np.ndarray, untrained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of trained and of untrained documents at each score, the highest first: int64, (1, scores) each."""
    scores, place = np.unique(np.concatenate([trained, untrained]), return_inverse=True)
    kinds = (place[: trained.size], place[trained.size :])
    first, second = (np.bincount(kind, minlength=scores.size)[::-1][None] for kind in kinds)
    return first, second


def _resampled(trained: np.ndarray, untrained: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    at_once = max(1, _CELLS // trained.size)
    parts = []
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = [rng.multinomial(kind.sum(), kind[0] / kind.sum(), size) for kind in (trained, untrained)]
        parts.append(_figures(*drawn))
    return np.concatenate(parts)


def _figures(trained: np.ndarray, untrained: np.ndarray) -> np.ndarray:
    """AUC and the TPR at each rate, float64, (samples, 1 + rates), of counts (samples, scores), highest score first."""
    above_trained, above_untrained = np.cumsum(trained, axis=1), np.cumsum(untrained, axis=1)
    n_trained, n_untrained = above_trained[:, -1], above_untrained[:, -1]
    before = above_trained - trained
    auc = ((before + trained / 2) * untrained).sum(axis=1) / (n_trained * n_untrained)
    rows = [auc]
    for rate in RATES:
        allowed = above_untrained <= np.floor(rate * n_untrained + 1e-9)[:, None]
        rows.append(np.where(allowed, above_trained, 0).max(axis=1) / n_trained)
    return np.stack(rows, axis=1)
