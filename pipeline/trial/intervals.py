"""Confidence intervals of a mean that hold for few repeats and for rare events, over one model or several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline.audit.detection import CONFIDENCE, LEAST_MODELS, UNDEFINED, Estimate

_GRID = 2001
_TRUNCATION = 0.75
_LIMIT = math.log(2 / (1 - CONFIDENCE))  # of the logarithm of a wealth, of each of two gamblers


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of a mean of numbers in [0, 1], by betting (Waudby-Smith & Ramdas 2024, theorem 3).

    For each candidate mean, two gamblers bet that the numbers lie above and below it; a candidate is excluded
    when either grows rich. The stakes are the predictable plug-in, which adapts to a small variance.

    Guaranteed: the interval covers the mean with probability at least 0.95, for any number of values and any
    distribution on [0, 1], provided that each value has that mean given the ones before it. No normal approximation:
    a share of wrong selections that was zero in all of 20 repeats is not reported as certainly zero.

    Args:
        values: float, (repeats,), in [0, 1]; the order matters a little.

    Returns:
        Lower and upper bound, on a grid of 0.0005 that is rounded outwards; (0, 1) without values. The mean of the
        values lies between them, also where the later values differ from the earlier ones.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return 0.0, 1.0
    means = np.linspace(0, 1, _GRID)
    plausible = np.flatnonzero(np.maximum(*_wealth(x, means)) < _LIMIT)
    if plausible.size == 0:  # the values contradict one common mean
        return 0.0, 1.0
    low, high = max(plausible[0] - 1, 0), min(plausible[-1] + 1, _GRID - 1)
    return min(float(means[low]), float(x.mean())), max(float(means[high]), float(x.mean()))


def models_interval(samples: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """95% interval, over models, of the mean of numbers in [0, 1]; None with fewer than LEAST_MODELS.

    Repeats over one model's scores share that model: however many there are, each model is one draw. So the interval is
    Student's over the models' means, with as many degrees of freedom as models less one. Means that agree by chance
    would leave it no width, so it is never narrower than the models' own intervals are on average.

    Approximate: it covers at the level where the models' means scatter about normally. Where a rare model is very
    different, as few models as this may hold none of that kind.

    Args:
        samples: of each model, float, (repeats,), in [0, 1], at least one.
    """
    if len(samples) < LEAST_MODELS:
        return None
    from scipy.stats import t

    means = np.array([np.mean(values) for values in samples])
    centre = float(means.mean())
    reach = float(t.ppf((1 + CONFIDENCE) / 2, means.size - 1) * means.std(ddof=1) / math.sqrt(means.size))
    low, high = np.mean([mean_interval(values) for values in samples], axis=0)
    return max(0.0, min(centre - reach, float(low))), min(1.0, max(centre + reach, float(high)))


def mean_exceeds(values: np.ndarray, bound: float) -> bool:
    """Whether numbers in [0, 1] contradict that each has a mean of at most `bound`, given the ones before it.

    The means may differ, as those of several models do. The gambler of `mean_interval` who bets on larger numbers
    loses on average where they keep to the bound, and grows rich with a probability of at most 0.025.

    Args:
        values: float, (repeats,), in [0, 1], in an order that does not depend on them.
        bound: in [0, 1].
    """
    x = np.asarray(values, dtype=np.float64)
    return bool(x.size and _wealth(x, np.array([bound]))[0][0] >= _LIMIT)


def by_model(values: np.ndarray, model: np.ndarray) -> list[np.ndarray]:
    """The values, (repeats,), of each model that has some."""
    return [values[model == one] for one in np.unique(model)]


def estimate_of(samples: Sequence[np.ndarray]) -> Estimate:
    """The mean over models of the means over their repeats, and its 95% interval, over the one model or over models."""
    if not samples:
        return UNDEFINED
    mean = float(np.mean([values.mean() for values in samples]))
    interval = mean_interval(samples[0]) if len(samples) == 1 else models_interval(samples)
    return Estimate(mean, *(interval or (None, None)))


def contradicts(samples: Sequence[np.ndarray], target: float) -> bool | None:
    """Whether repeats contradict that each model has a mean of at most `target`; None without repeats.

    Args:
        samples: of each model, float, (repeats,), in [0, 1].
        target: in [0, 1].
    """
    if not samples:
        return None
    if len(samples) > 1:
        return mean_exceeds(np.concatenate(samples), target)
    return mean_interval(samples[0])[0] > target


def _wealth(x: np.ndarray, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most that the gamblers against each mean had at any time, above and below it: logarithms, (means,)."""
    n = x.size
    count = np.arange(1, n + 1)
    running = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - running) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    stake = np.sqrt(2 * _LIMIT / (n * before))
    above, below = np.zeros(means.size), np.zeros(means.size)
    most_above, most_below = above.copy(), below.copy()
    with np.errstate(divide="ignore"):
        for value, bet in zip(x, stake, strict=True):
            above += np.log1p(np.minimum(bet, _TRUNCATION / means) * (value - means))
            below += np.log1p(-np.minimum(bet, _TRUNCATION / (1 - means)) * (value - means))
            np.maximum(most_above, above, out=most_above)
            np.maximum(most_below, below, out=most_below)
    return most_above, most_below
