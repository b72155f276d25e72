"""Intervals of accuracies and of their differences, for results in [0, 1] of which right and wrong are the ends."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtri

CONFIDENCE_OF_SHARES = 0.95


def wilson(mean: float, n: int, confidence: float = CONFIDENCE_OF_SHARES) -> tuple[float, float]:
    """Wilson's score interval of a share with correction for continuity (Newcombe 1998, method 4 of one share).

    For results in [0, 1] that are not only 0 and 1 it is on the safe side: a variable in [0, 1] of mean p has a
    variance of at most p (1 - p).

    Args:
        mean: of the n results, in [0, 1].
        n: results; 0 gives (0, 1).
        confidence: in (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    z = _quantile(confidence)
    ends = []
    for sign in (-1, 1):
        root = z * z + 2 * sign - 1 / n + 4 * mean * (n * (1 - mean) - sign)
        ends.append((2 * n * mean + z * z + sign * (1 + z * math.sqrt(max(0.0, root)))) / (2 * (n + z * z)))
    low, high = ends
    return max(0.0, min(mean, low)) if mean > 0 else 0.0, min(1.0, max(mean, high)) if mean < 1 else 1.0


def newcombe(
    mean: float, n: int, other: float, m: int, confidence: float = CONFIDENCE_OF_SHARES
) -> tuple[float, float]:
    """Newcombe's (1998, method 11) interval of the difference of two independent shares, mean - other.

    With Wilson's limits (l, u) of each share, corrected for continuity, the limits are
    d - sqrt((p1 - l1)^2 + (u2 - p2)^2) and d + sqrt((u1 - p1)^2 + (p2 - l2)^2). Approximate, and on the safe side:
    without the correction as few as 86% of intervals cover where shares are near 0 and 1 and items few.

    Args:
        mean: share of the first n results.
        n: >= 1.
        other: share of the other m results.
        m: >= 1.
        confidence: in (0, 1).
    """
    (l1, u1), (l2, u2) = wilson(mean, n, confidence), wilson(other, m, confidence)
    d = mean - other
    return d - math.hypot(mean - l1, u2 - other), d + math.hypot(u1 - mean, other - l2)


def difference_to_all(part: np.ndarray, rest: np.ndarray) -> tuple[float, float, float] | None:
    """The accuracy on a part of the items less that on all of them, with its 95% interval.

    The part is among all items, so the two accuracies depend on each other. What does not is part and rest: with w the
    share of the part, part - all = (1 - w) (part - rest), and the interval is 1 - w times Newcombe's. It speaks of
    items like these, of which so many are in the part.

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
    one, other = float(part.mean()), float(rest.mean())
    low, high = newcombe(one, part.size, other, rest.size)
    return share * (one - other), share * low, share * high


def paired_difference(
    one: np.ndarray, other: np.ndarray, confidence: float = CONFIDENCE_OF_SHARES
) -> tuple[float, float, float]:
    """The accuracy of one model less that of another on the same items, with its interval.

    Bonett & Price (2012) for paired shares: with a the sum of what the first is ahead by where it is ahead, b the same
    of the other, p1 = (a + 1) / (n + 2) and p2 = (b + 1) / (n + 2), the interval is p1 - p2 -+ z sqrt((p1 + p2 -
    (p1 - p2)^2) / (n + 2)). For results between 0 and 1 it is on the safe side, as a difference d in [-1, 1] has d^2
    of at most |d|.

    Args:
        one: results of the first model, in [0, 1], at least one.
        other: of the other, on the same items.
        confidence: in (0, 1).
    """
    d = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    size = d.size + 2
    ahead, behind = (float(np.maximum(sign * d, 0).sum()) + 1 for sign in (1, -1))
    centre = (ahead - behind) / size
    spread = max(0.0, (ahead + behind) / size - centre**2)
    reach = _quantile(confidence) * math.sqrt(spread / size)
    mean = float(d.mean())
    return mean, max(-1.0, min(mean, centre - reach)), min(1.0, max(mean, centre + reach))


def _quantile(confidence: float) -> float:
    return float(ndtri((1 + confidence) / 2))
