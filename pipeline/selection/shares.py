"""Confidence intervals of accuracies and of their differences, valid for any number of results in [0, 1]."""

from __future__ import annotations

import math

import numpy as np

CONFIDENCE_OF_SHARES = 0.95

_OF_RATE = 0.2
"""Part of the error of a paired interval for the rate of items with different results."""


_LEAST_MEAN = 1e-300


def share_interval(values: np.ndarray, confidence: float = CONFIDENCE_OF_SHARES) -> tuple[float, float]:
    """Confidence interval of the mean of independent results in [0, 1]; each end has at most half of the error.

    For results that are 0 or 1 it is the interval of Clopper and Pearson. Otherwise it inverts the smaller of the tail
    bounds of Hoeffding (1963, eq. 2.1) and Bentkus (2004). Both hold for any number of results.

    Args:
        values: float, (results,); without results the interval is (0, 1).
        confidence: in (0, 1).
    """
    x = np.asarray(values, dtype=np.float64)
    tail = (1 - confidence) / 2
    if not x.size:
        return 0.0, 1.0
    if np.all((x == 0) | (x == 1)):
        return clopper_pearson(int(x.sum()), x.size, tail)
    return _lower_of_bounded(x, tail), 1 - _lower_of_bounded(1 - x, tail)


def clopper_pearson(successes: int, trials: int, tail: float) -> tuple[float, float]:
    """Limits of a share, each of which fails with probability at most `tail` (Clopper & Pearson 1934)."""
    from scipy.special import betaincinv

    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1 - tail)) if successes < trials else 1.0
    return low, high


def hoeffding_limit(mean: float, size: float, tail: float) -> float:
    """Lower limit of the mean of `size` results in [0, 1], with error at most `tail` (Hoeffding 1963, eq. 2.1).

    It is the p below the mean with size * KL(mean, p) = -log(tail). It also holds for a U-statistic, with `size` the
    number of disjoint subsets of its arguments.
    """
    from scipy.optimize import brentq  # slow import, not needed by `seenset status`
    from scipy.special import xlogy

    least = -math.log(tail) / size
    if mean >= 1:
        return math.exp(-least)

    def excess(p: float) -> float:
        return float(xlogy(mean, mean / p) + xlogy(1 - mean, (1 - mean) / (1 - p))) - least

    return float(brentq(excess, _LEAST_MEAN, mean, xtol=1e-12)) if excess(_LEAST_MEAN) > 0 else 0.0


def _lower_of_bounded(x: np.ndarray, tail: float) -> float:
    mean = float(x.mean())
    bentkus, _ = clopper_pearson(math.floor(x.sum() + 1e-9), x.size, tail / math.e)
    return min(mean, max(bentkus, hoeffding_limit(mean, x.size, tail)))


def difference_to_all(part: np.ndarray, rest: np.ndarray) -> tuple[float, float, float] | None:
    """The accuracy on a part of the items minus that on all items, with its interval.

    All items include the part, so the two accuracies are dependent, but part and rest are independent: with w the share
    of the part, part - all = (1 - w) (part - rest). With (l1, u1) and (l2, u2) the `share_interval` of part and rest,
    each with half of the error, the interval is (1 - w) times l1 - u2 to u1 - l2. It is conditional on the number of
    items in the part.

    Args:
        part: results on the part's items, in [0, 1].
        rest: results on the other items.

    Returns:
        The difference and the ends of its interval; None without a part; zeros without a rest.
    """
    if not part.size:
        return None
    if not rest.size:
        return 0.0, 0.0, 0.0
    share = rest.size / (part.size + rest.size)
    (l1, u1), (l2, u2) = (share_interval(values, (1 + CONFIDENCE_OF_SHARES) / 2) for values in (part, rest))
    return share * float(part.mean() - rest.mean()), share * (l1 - u2), share * (u1 - l2)


def paired_difference(
    one: np.ndarray, other: np.ndarray, confidence: float = CONFIDENCE_OF_SHARES
) -> tuple[float, float, float]:
    """The accuracy of one model minus that of another on the same items, with its interval.

    For results that are 0 or 1 the difference is r (2 s - 1), with r the rate of items with different results and s the
    share of these on which the first is correct. Given the number of such items, both counts are binomial: r has the
    interval of Clopper and Pearson with a fifth of the error, s with the rest, and the limits are the extremes of
    r (2 s - 1) over both. For other results the limits are l1 - u2 and u1 - l2, with (l1, u1) and (l2, u2) the
    `share_interval` of the positive and of the negative part of the difference, each with half of the error.

    Args:
        one: results of the first model, in [0, 1], at least one.
        other: results of the other model on the same items.
        confidence: in (0, 1).
    """
    d = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    mean, error = float(d.mean()), 1 - confidence
    if not np.all((d == 0) | (abs(d) == 1)):
        (l1, u1), (l2, u2) = (share_interval(np.maximum(sign * d, 0), 1 - error / 2) for sign in (1, -1))
        return mean, l1 - u2, u1 - l2
    least, most = share_interval(d != 0, 1 - _OF_RATE * error)
    low, high = (2 * share - 1 for share in share_interval(d[d != 0] > 0, 1 - (1 - _OF_RATE) * error))
    return mean, low * (least if low > 0 else most), high * (most if high > 0 else least)
