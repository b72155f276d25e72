"""Confidence intervals of a mean that hold for few repeats and for rare events."""

from __future__ import annotations

import math

import numpy as np

from pipeline.audit.detection import CONFIDENCE

_GRID = 2001
_TRUNCATION = 0.75


def mean_interval(values: np.ndarray, level: float = CONFIDENCE) -> tuple[float, float]:
    """Confidence interval of a mean of numbers in [0, 1], by betting (Waudby-Smith & Ramdas 2024, theorem 3).

    For each candidate mean, two gamblers bet that the numbers lie above and below it; a candidate is excluded
    when either grows rich. The stakes are the predictable plug-in, which adapts to a small variance.

    Guaranteed: the interval covers the mean with probability at least `level`, for any number of values and any
    distribution on [0, 1], provided that each value has that mean given the ones before it. No normal approximation:
    a share of wrong selections that was zero in all of 20 repeats is not reported as certainly zero.

    Args:
        values: float, (repeats,), in [0, 1]; the order matters a little.
        level: in (0, 1).

    Returns:
        Lower and upper bound, on a grid of 0.0005 that is rounded outwards; (0, 1) without values. The mean of the
        values lies between them, also where the later values differ from the earlier ones.
    """
    x = np.asarray(values, dtype=np.float64)
    n = x.size
    if n == 0:
        return 0.0, 1.0
    count = np.arange(1, n + 1)
    running = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - running) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    stake = np.sqrt(2 * math.log(2 / (1 - level)) / (n * before))
    means = np.linspace(0, 1, _GRID)
    above, below = np.zeros(_GRID), np.zeros(_GRID)
    most_above, most_below = above.copy(), below.copy()
    with np.errstate(divide="ignore"):
        for value, bet in zip(x, stake, strict=True):
            above += np.log1p(np.minimum(bet, _TRUNCATION / means) * (value - means))
            below += np.log1p(-np.minimum(bet, _TRUNCATION / (1 - means)) * (value - means))
            np.maximum(most_above, above, out=most_above)
            np.maximum(most_below, below, out=most_below)
    limit = math.log(2 / (1 - level))
    plausible = np.flatnonzero((most_above < limit) & (most_below < limit))
    if plausible.size == 0:  # the values contradict one common mean
        return 0.0, 1.0
    low, high = max(plausible[0] - 1, 0), min(plausible[-1] + 1, _GRID - 1)
    return min(float(means[low]), float(x.mean())), max(float(means[high]), float(x.mean()))
