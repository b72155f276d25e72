"""Estimators of the null proportion pi0: the share of the audit documents for which the null holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.selection.summary import RankCounts

MIN_BANDWIDTH = 1e-3
MAX_BANDWIDTH = 1.0


def storey(counts: RankCounts) -> Fraction:
    """Storey's estimate of pi0, exact and uncapped.

        pi0 = (1 + #{k >= kL}) (n + 1) / (m (n + 1 - kL)), kL = floor((n + 2) / 2),

    which is (1 + #{p >= t}) / (m (1 - t)) (Storey 2002; Storey, Taylor & Siegmund 2004) at
    t = kL / (n + 1), about one half. A value above 1 is left as it is: a cap would select more than the
    proof allows.

    Guaranteed: BH at alpha / pi0 with this pi0 has FDR <= alpha for every n and m, when the null audit
    documents and the calibration documents are exchangeable given the scores of the others (Marandon, Lei,
    Mary & Roquain 2024). Of the estimate itself nothing is guaranteed in a single audit.

    Args:
        counts: of m >= 1 audit documents.

    Returns:
        a positive rational; it can exceed 1.
    """
    n, m = counts.n, counts.m
    start = (n + 2) // 2
    above = m - counts.at_most(start - 1)
    return Fraction((1 + above) * (n + 1), m * (n + 1 - start))


@dataclass(frozen=True, slots=True)
class JKBB:
    """A jackknifed kernel estimate of pi0 and what it was computed from."""

    c: float  # fitted shape of the density c p^(c - 1); inf when every p is 1
    bandwidth: float  # in [MIN_BANDWIDTH, MAX_BANDWIDTH]
    unclipped: float  # the estimate; it can be negative or exceed 1
    pi0: float  # the estimate clipped to [1/m, 1]


def jkbb(counts: RankCounts, gamma: float = 2.0) -> JKBB:
    """PTDI's jackknife kernel boundary estimate of the density of p at 1 (Liu et al. 2026, eqs. 11 and 38).

    With K_b(t) = (1/b + 1) t^(1/b) and f_b the mean of K_b(p) over the m p-values,

        pi0 = (gamma f_b - f_(gamma b)) / (gamma - 1),

    clipped to [1/m, 1]. c = -m / sum ln p is the maximum-likelihood shape of f(t) = c t^(c - 1), the
    reference density that `bandwidth` uses. Sums are exactly rounded (math.fsum over the counts), so they
    depend on the counts alone. If every p is 1 then c is infinite, b takes its least value, and pi0 = 1.

    Guaranteed: nothing at any fixed m. The estimate is consistent for the density of p at 1 when the
    p-values are independent, m and n grow, and that density is smooth at 1; the density at 1 is pi0 only if
    that of the members' p-values vanishes there; otherwise it exceeds pi0, which selects less. PTDI
    resamples gamma and keeps the least pi0; that minimum is biased downwards and is not taken here.

    Args:
        counts: of m >= 1 audit documents.
        gamma: ratio of the two bandwidths, > 1.
    """
    occupied = np.flatnonzero(counts.counts)
    weights = counts.counts[occupied].astype(np.float64)
    p = (occupied + 1) / (counts.n + 1)
    m = counts.m
    log_sum = math.fsum(weights * np.log(p))
    c = -m / log_sum if log_sum else math.inf
    b = bandwidth(c, m, gamma)
    narrow, wide = _density_at_one(p, weights, b), _density_at_one(p, weights, gamma * b)
    unclipped = (gamma * narrow - wide) / (gamma - 1)
    return JKBB(c=c, bandwidth=b, unclipped=unclipped, pi0=min(1.0, max(1 / m, unclipped)))


def bandwidth(c: float, m: int, gamma: float) -> float:
    """The bandwidth that minimises the asymptotic error of `jkbb` if p has density f(t) = c t^(c - 1).

        b = (Omega c / (4 m gamma^2 c2^2))^(1/5), Omega = (gamma^2 + 3 gamma + 1) / (2 gamma (gamma + 1)),
        c2 = c^2 (c - 1), clipped to [MIN_BANDWIDTH, MAX_BANDWIDTH].

    Bias: E K_b(p) = c (1 + b) / (1 + c b) = c - c (c - 1) b + c2 b^2 - ...; the jackknife cancels the term
    in b and leaves -gamma c2 b^2. (The paper prints c (c - 1)^2, which belongs to the kernel
    (1/b) t^(1/b - 1).)

    Variance: f(1) = c and the integral of K_a K_b is about 1 / (a + b), so m times the variance is about
    c (gamma^2 / 2 + 1 / (2 gamma) - 2 gamma / (gamma + 1)) / ((gamma - 1)^2 b) = Omega c / b.

    The mean squared error gamma^2 c2^2 b^4 + Omega c / (m b) is least at this b. A flat density, c = 1, has
    no bias at this order, so it takes the largest bandwidth.

    Args:
        c: shape, in (0, inf].
        m: number of p-values, >= 1.
        gamma: > 1.
    """
    if math.isinf(c):
        return MIN_BANDWIDTH
    c2 = c * c * (c - 1)
    if c2 == 0:
        return MAX_BANDWIDTH
    omega = (gamma * gamma + 3 * gamma + 1) / (2 * gamma * (gamma + 1))
    best = (omega * c / (4 * m * gamma * gamma * c2 * c2)) ** 0.2
    return min(MAX_BANDWIDTH, max(MIN_BANDWIDTH, best))


def _density_at_one(p: np.ndarray, weights: np.ndarray, b: float) -> float:
    """f_b: the mean of K_b(p), each p counted `weights` times."""
    return (1 / b + 1) * math.fsum(weights * p ** (1 / b)) / math.fsum(weights)
