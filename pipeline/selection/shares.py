"""Intervals of accuracies and of their differences, exact for any number of results in [0, 1]."""

from __future__ import annotations

import math

import numpy as np

CONFIDENCE_OF_SHARES = 0.95

_OF_RATE = 0.2
"""Part of the error of a paired interval that its rate of items with different results may use."""


_LEAST_MEAN = 1e-300


def share_interval(values: np.ndarray, confidence: float = CONFIDENCE_OF_SHARES) -> tuple[float, float]:
    """Confidence interval of the mean of independent results in [0, 1]; each end fails with at most half of the error.

    Of results that are 0 or 1 it is the interval of Clopper and Pearson. Of others it inverts the tail bounds of
    Hoeffding (1963, eq. 2.1) and Bentkus (2004), of which the smaller one counts. Both hold for any number of results.

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
    """Limits of a share, of which each fails with a probability of at most `tail` (Clopper & Pearson 1934)."""
    from scipy.special import betaincinv

    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1 - tail)) if successes < trials else 1.0
    return low, high


def hoeffding_limit(mean: float, size: float, tail: float) -> float:
    """Lower limit of the mean of `size` results in [0, 1], which fails with at most `tail` (Hoeffding 1963, eq. 2.1).

    It is the p below the mean at which size * KL(mean, p) = -log(tail). It holds for a U-statistic too, with `size`
    the number of disjoint subsets of its arguments.
    """
    from scipy.optimize import brentq  # slow to import, and `seenset status` does not need it
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
    """The accuracy on a part of the items less that on all of them, with its interval.

    The part is among all items, so the two accuracies depend on each other. What does not is part and rest: with w the
    share of the part, part - all = (1 - w) (part - rest). With (l1, u1) and (l2, u2) the `share_interval` of part and
    rest, each with half of the error, the interval is (1 - w) times l1 - u2 to u1 - l2. It is of items like these, of
    which so many are in the part.

    Args:
        part: results on the part's items, in [0, 1].
        rest: results on the others.

    Returns:
        the difference and the ends of its interval; None without a part; zeros without a rest, as it is then all.
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
    """The accuracy of one model less that of another on the same items, with its interval.

    Of results that are 0 or 1 the difference is r (2 s - 1), with r the rate of items on which the results differ and
    s the share of these on which the first is right. Given how many items differ, both counts are binomial: r has the
    interval of Clopper and Pearson with a fifth of the error, s with the rest, and the limits are the least and the
    largest value of r (2 s - 1) in both. Of other results the limits are l1 - u2 and u1 - l2, with (l1, u1) and
    (l2, u2) the `share_interval` of what the first and the second is ahead by, each with half of the error.

    Args:
        one: results of the first model, in [0, 1], at least one.
        other: of the other, on the same items.
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
