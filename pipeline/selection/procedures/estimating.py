"""Procedures that estimate the share of nulls only from the p-values of the audited documents."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.selection.conformal import Grid, RankCounts, Weighting
from pipeline.selection.guarantees import EXCHANGEABLE, IN_THE_LIMIT, MANY, ON_AVERAGE, SHARE, UNPROVED, Guarantee
from pipeline.selection.procedures.record import (
    Decision,
    Factor,
    Given,
    Procedure,
    adaptive,
    curve_at_factor,
    decision,
    exact_curve,
)
from pipeline.selection.step_up import ONE, step_up

MANY_DOCUMENTS = 200
LAMBDA_OF_FEW = Fraction(1, 2)
LAMBDA_OF_MANY = Fraction(4, 5)
CONDITIONAL_LAMBDA = Fraction(3, 10)


def storey(counts: RankCounts, lambda_: Fraction | None = None) -> Fraction:
    """Storey's estimate of pi0, exact and uncapped.

        pi0 = (1 + #{k >= kL}) (n + 1) / (m (n + 1 - kL)), kL = ceil(lambda (n + 1)),

    which is (1 + #{p >= t}) / (m (1 - t)) (Storey 2002; Storey, Taylor & Siegmund 2004) at
    t = kL / (n + 1), the first p-value of at least lambda. Values above 1 are not capped: a cap would
    select more than the proof allows. With several grids pooled, t is the largest of their first p-values of
    at least lambda, and the p-values counted are still those of at least lambda. A lambda beyond the last
    p-value below 1 is lowered to it.

    Guaranteed: BH at alpha / pi0 with this pi0 has FDR <= alpha for every n and m, when the null audit
    documents and the calibration documents are exchangeable given the scores of the others (Marandon, Lei,
    Mary & Roquain 2024), for any lambda that was fixed before the scores were seen. The estimate itself has no
    guarantee in a single audit.

    By group the same holds when the groups' null and calibration scores are independent draws. Marandon et
    al. bound the FDR by the sum over nulls i of (alpha / m) E[1 / pi0_i], pi0_i with i put at the smallest p.
    In i's own group g the others then reach kL with a probability Q' ~ Beta(n_g + 2 - kL, kL), in another
    group with one that is stochastically larger than Q ~ Beta(n_g + 1 - kL, kL); Q' is Q weighted by its
    size, and E Q = 1 - t_g >= 1 - t. So (1 - t) E[1 / (1 + #)] <= E[Q_g / (1 + #_{-i})] with Q in every
    group, and these terms sum to P(# > 0) <= 1 over the nulls, # being a sum of independent indicators.

    Documents that depend on one another (`counts.kept`): of each block at most c are kept, by a hash of their ids, and

        pi0 = ((c + #{kept, p >= t}) / (1 - t) + #{not kept}) / m,

    which is the estimate above for single documents. c follows from the sizes of the blocks alone. A null document's
    own block contributes at most c to the sum; that of the others, S kept nulls in blocks of at most c, has its largest
    E[1 / (c + #)] where whole blocks agree, and it is then at most 1 / ((1 - t) (S + c)), by the binomial identity.
    Documents that are not kept count in full, by Jensen's inequality. Within a block the scores of nulls are assumed
    to depend positively on one another (PRDS), as for bh. Of a sample of the documents the estimate is that of the
    sample.

    Args:
        counts: counts of m >= 1 audit documents.
        lambda_: in (0, 1), exact; None: `default_lambda`.

    Returns:
        A positive rational; it can exceed 1.
    """
    m, weighting = counts.m, counts.grid.weighting
    t, below = storey_cut(counts.grid, lambda_)
    if weighting is not None:
        return _weighted_storey(counts, weighting, t, lambda_)
    if counts.kept is None:
        return (1 + m - counts.at_most(below)) / (m * (1 - t))
    kept = counts.kept
    left_out = kept.compared - int(kept.counts.sum())
    nulls = (kept.part + int(kept.counts[below:].sum())) / (1 - t) + left_out
    return (nulls * Fraction(kept.scored, kept.compared) + (m - kept.scored) / (1 - t)) / m


def _weighted_storey(counts: RankCounts, weighting: Weighting, t: Fraction, lambda_: Fraction | None) -> Fraction:
    """Storey's estimate of the weighted share of nulls, with the largest weight in place of 1.

        pi0 = (max w + sum of w over documents with p >= t) / (m (1 - t))

    Guaranteed as in `storey`, by the same steps: with weights that are fixed by the unordered scores of the groups, the
    terms w_i B_i / (max w + sum of w_j B_j over j != i) are at most w_i B_i / sum of w_j B_j, which sum to 1 (Ramdas,
    Barber, Wainwright & Jordan 2019, section 3, for independent p-values).

    Of dependent documents (`counts.kept`) at most c of each block are kept, whose sum is then at most c max w, and
    the others count with the largest weight.
    """
    high = ~_below(counts.grid, lambda_)
    kept = counts.kept
    of_ranks = counts.counts if kept is None else kept.counts
    of_groups = np.bincount(weighting.group[high], of_ranks[high], len(weighting.weights)).tolist()
    total = sum((w * int(count) for w, count in zip(weighting.weights, of_groups, strict=True)), Fraction(0))
    if kept is None:
        return (weighting.largest + total) / (counts.m * (1 - t))
    left_out = (kept.compared - int(kept.counts.sum())) * weighting.largest
    nulls = ((kept.part * weighting.largest + total) / (1 - t) + left_out) * Fraction(kept.scored, kept.compared)
    return (nulls + (counts.m - kept.scored) / (1 - t)) / counts.m


def _below(grid: Grid, lambda_: Fraction | None) -> np.ndarray:
    """Whether the p-value of each rank of a weighted grid, before the division, is below the cut: bool, (ranks,)."""
    cut, plain = _cut(grid, lambda_), grid.unweighted
    denominators, place = np.unique(plain.denominators, return_inverse=True)
    first = np.array([math.ceil(cut * d) for d in denominators.tolist()])
    return np.asarray(plain.numerators < first[place])


def least_storey(grid: Grid, m: int, lambda_: Fraction | None = None) -> Fraction:
    """The smallest possible value of `storey`, without documents of p >= lambda."""
    return 1 / (m * (1 - storey_cut(grid, lambda_)[0]))


def default_lambda(grid: Grid) -> Fraction:
    """The default lambda of `storey`, which depends only on the numbers of calibration documents, not on scores.

    Members bias the estimate less at a larger lambda, but with few calibration documents the share of nulls above it is
    imprecise: 1/2 below 200 calibration documents (of the smallest group), else 4/5. In simulations with 90% shifted
    members the larger one finds .69 of them and 1/2 finds .36 (n = m = 1000); with n = 50 they find .55 and .60.

    Calibration-conditional p-values of nulls are larger than uniform ones, mostly the largest: 46% more than a share .4
    of the nulls are above .6, and 12 to 18% more than a share .7 above .3, which is the default for them.
    """
    if grid.delta is not None:
        return CONDITIONAL_LAMBDA
    return LAMBDA_OF_FEW if int(grid.unweighted.denominators.min()) - 1 < MANY_DOCUMENTS else LAMBDA_OF_MANY


def storey_cut(grid: Grid, lambda_: Fraction | None) -> tuple[Fraction, int]:
    """The cut t of Storey's estimate, below 1, and the number of ranks of the grid with a p-value below lambda."""
    cut = _cut(grid, lambda_)
    t = max(Fraction(math.ceil(cut * d), d) for d in np.unique(grid.unweighted.denominators).tolist())
    if grid.weighting is not None:
        return t, int(np.count_nonzero(_below(grid, lambda_)))  # these are not the first ranks
    return t, bisect_left(range(grid.size), cut, key=lambda k: grid.p(k + 1))


def _cut(grid: Grid, lambda_: Fraction | None) -> Fraction:
    """Lambda, or the last p-value below 1 of the smallest group, which depends only on numbers, if that is smaller."""
    smallest = int(grid.unweighted.denominators.min())
    return min(default_lambda(grid) if lambda_ is None else lambda_, Fraction(smallest - 1, smallest))


def _storey(given: Given) -> Decision:
    """Storey, Taylor & Siegmund 2004, pi0 uncapped: FDR <= alpha under exchangeability, lambda fixed beforehand."""
    counts = given.counts
    cut = default_lambda(counts.grid) if given.lambda_ is None else given.lambda_
    details = {"lambda": float(cut)}
    if counts.kept is not None:
        details |= {"kept_of_a_block": counts.kept.part, "kept": int(counts.kept.counts.sum())}
    return adaptive("storey", given, storey(counts, cut), details)


def strict(decision: Decision, counts: RankCounts, lambda_: Fraction | None = None) -> Decision:
    """The answer with a finite-sample guarantee: the decision itself if it has one, otherwise Storey's.

    Guaranteed: FDR <= alpha under the assumption that the returned decision carries.
    """
    if decision.guarantee == "finite-sample":
        return decision
    return _storey(Given(counts, decision.alpha, lambda_))


STOREY = Procedure(
    "storey",
    Guarantee(
        "finite-sample",
        EXCHANGEABLE,
        f"{SHARE} is at most alpha, for any number of documents, with the share of nulls estimated from the "
        f"audit itself. {ON_AVERAGE}",
    ),
    _storey,
    factor=Factor(least=lambda rule, n, m: least_storey(rule.grid(n), m, rule.lambda_), uncapped=True),
    curve=exact_curve,
    by_blocks=True,
    smooths=True,
    weighs=True,
)
MIN_BANDWIDTH = 1e-3
MAX_BANDWIDTH = 1.0
KERNEL_BANDWIDTH = 0.1


@dataclass(frozen=True, slots=True)
class JKBB:
    """A jackknifed kernel estimate of pi0 and its intermediate values."""

    c: float  # fitted shape of the density c p^(c - 1); inf when every p is 1
    bandwidth: float  # in [MIN_BANDWIDTH, MAX_BANDWIDTH]
    unclipped: float  # the estimate; it can be negative or exceed 1
    pi0: float  # the estimate clipped to [1/m, 1]


def jkbb(counts: RankCounts, gamma: float = 2.0) -> JKBB:
    """PTDI's jackknife kernel boundary estimate of the density of p at 1 (Liu et al. 2026, eqs. 11 and 38).

    With K_b(t) = (1/b + 1) t^(1/b) and f_b the mean of K_b(p) over the m p-values,

        pi0 = (gamma f_b - f_(gamma b)) / (gamma - 1),

    clipped to [1/m, 1]. c = -m / sum ln p is the maximum-likelihood shape of f(t) = c t^(c - 1), the
    reference density of `bandwidth`. Sums are exactly rounded (math.fsum over the counts), so they depend
    only on the counts. If every p is 1 then c is infinite, b has its smallest value, and pi0 = 1.

    Guaranteed: nothing at any fixed m. The estimate is consistent for the density of p at 1 when the
    p-values are independent, m and n grow, and that density is smooth at 1; the density at 1 is pi0 only if
    that of the members' p-values vanishes there; otherwise it exceeds pi0, which selects less. PTDI
    resamples gamma and uses the smallest pi0; that minimum is biased downwards and is not used here.

    Args:
        counts: of m >= 1 audit documents.
        gamma: ratio of the two bandwidths, > 1.
    """
    occupied = np.flatnonzero(counts.counts)
    weights = counts.counts[occupied].astype(np.float64)
    p = counts.grid.values[occupied]
    m = counts.m
    log_sum = math.fsum(weights * np.log(p))
    c = -m / log_sum if log_sum else math.inf
    b = bandwidth(c, m, gamma)
    narrow, wide = _density_at_one(p, weights, b), _density_at_one(p, weights, gamma * b)
    unclipped = (gamma * narrow - wide) / (gamma - 1)
    return JKBB(c=c, bandwidth=b, unclipped=unclipped, pi0=min(1.0, max(1 / m, unclipped)))


def bandwidth(c: float, m: int, gamma: float) -> float:
    """The bandwidth that minimizes the asymptotic error of `jkbb` if p has density f(t) = c t^(c - 1).

        b = (Omega c / (4 m gamma^2 c2^2))^(1/5), Omega = (gamma^2 + 3 gamma + 1) / (2 gamma (gamma + 1)),
        c2 = c^2 (c - 1), clipped to [MIN_BANDWIDTH, MAX_BANDWIDTH].

    Bias: E K_b(p) = c (1 + b) / (1 + c b) = c - c (c - 1) b + c2 b^2 - ...; the jackknife cancels the term
    in b and leaves -gamma c2 b^2. (The paper prints c (c - 1)^2, which belongs to the kernel
    (1/b) t^(1/b - 1).)

    Variance: f(1) = c and the integral of K_a K_b is about 1 / (a + b), so m times the variance is about
    c (gamma^2 / 2 + 1 / (2 gamma) - 2 gamma / (gamma + 1)) / ((gamma - 1)^2 b) = Omega c / b.

    The mean squared error gamma^2 c2^2 b^4 + Omega c / (m b) is smallest at this b. A flat density, c = 1, has
    no bias at this order, so it gets the largest bandwidth.

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


def kernel(counts: RankCounts) -> float:
    """KB: a kernel estimate of the density of p at 1, increased by the effect of one document; uncapped.

        pi0 = f + K(1) (1/m + f / (n + 1)), f = mean K(p), K(p) = 11 p^10,

    PTDI's boundary kernel (eq. 11) at the fixed bandwidth .1, without the jackknife: its bias is upwards
    if the density of p decreases towards 1. The second term accounts for one more audit document at p = 1
    and for the noise of n calibration documents, like the 1 + in Storey's estimate.

    Guaranteed: nothing. In simulations, with members' p-values such as Beta(.7, 5), BH at alpha / pi0 kept
    alpha = .1 (tests/statistical has the settings and the figures).

    Args:
        counts: of m >= 1 audit documents.

    Returns:
        A positive number; it can exceed 1.
    """
    occupied = np.flatnonzero(counts.counts)
    f = _density_at_one(counts.grid.values[occupied], counts.counts[occupied].astype(np.float64), KERNEL_BANDWIDTH)
    at_one = 1 / KERNEL_BANDWIDTH + 1
    return f + at_one * (1 / counts.m + f / (counts.n + 1))


def _density_at_one(p: np.ndarray, weights: np.ndarray, b: float) -> float:
    """f_b: the mean of K_b(p), weighted by `weights`."""
    return (1 / b + 1) * math.fsum(weights * p ** (1 / b)) / math.fsum(weights)


def _ptdi(given: Given) -> Decision:
    """PTDI (Liu et al. 2026): BH at alpha / pi0, pi0 from `jkbb`; FDR <= alpha in the limit."""
    estimate = jkbb(given.counts)
    details = {
        "null_proportion_unclipped": estimate.unclipped,
        "bandwidth": estimate.bandwidth,
        "c": estimate.c,
    }
    return adaptive("ptdi", given, Fraction(estimate.pi0), details)


def _kernel(given: Given) -> Decision:
    """BH at alpha / pi0, pi0 from `kernel`, at most 1: without guarantee, see `kernel`."""
    estimate = kernel(given.counts)
    return adaptive("kernel", given, Fraction(min(1.0, estimate)), {"null_proportion_unclipped": estimate})


PTDI = Procedure(
    "ptdi",
    Guarantee("asymptotic", MANY, f"{IN_THE_LIMIT}; {UNPROVED} {ON_AVERAGE}"),
    _ptdi,
    factor=Factor(least=lambda rule, n, m: Fraction(1, m)),
    curve=curve_at_factor,
)
KERNEL = Procedure(
    "kernel",
    Guarantee(
        "heuristic",
        MANY,
        f"{SHARE} stayed at or below alpha in the simulations that come with this program, and no theorem says that "
        f"it does elsewhere; {UNPROVED} {ON_AVERAGE}",
    ),
    _kernel,
    factor=Factor(least=lambda rule, n, m: min(ONE, (1 / Fraction(repr(KERNEL_BANDWIDTH)) + 1) / m)),
    curve=curve_at_factor,
)


def _bky(given: Given) -> Decision:
    """Benjamini, Krieger & Yekutieli 2006, definition 6: two stages of BH at alpha / (1 + alpha).

    The first selects r1; the second uses pi0 = (m - r1) / m. With r1 = 0 the second selects nothing either; with
    r1 = m everything is selected, as with pi0 = 1/m. They prove FDR <= alpha for independent p-values; conformal
    p-values share their calibration documents, so here it holds in the limit.
    """
    counts, alpha = given.counts, given.alpha
    level = alpha / (1 + alpha)
    first = counts.at_most(step_up(counts, level))
    pi0 = Fraction(max(1, counts.m - first), counts.m)
    rank = step_up(counts, level, pi0)
    return decision("bky", counts, alpha, rank, pi0, {"first_stage": first}, pi0 * (1 + alpha))


BKY = Procedure(
    "bky",
    Guarantee(
        "asymptotic",
        MANY,
        f"{IN_THE_LIMIT}, with the share of nulls estimated by a first selection; {UNPROVED} {ON_AVERAGE}",
    ),
    _bky,
    factor=Factor(lambda rule, n, m: 1 + rule.alpha, lambda rule, n, m: (1 + rule.alpha) / m),
    curve=exact_curve,
)


def slope(counts: RankCounts) -> Fraction:
    """The quantile estimate of pi0 (PTDI, eq. 47; docs/methods.md, section 3.3), exact.

    With the sorted p-values p_(1) <= ... <= p_(m), the slopes S_k = (1 - p_(k)) / (m - k + 1) of the lines from
    (m + 1, 1) to (k, p_(k)) are computed from k = 1 until one is lower than the previous one; at that k0

        pi0 = (m - k0 + 1) / (m (1 - p_(k0))) = 1 / (m S_k0),

    and 1 if this is above 1, or if no slope is lower. Benjamini & Hochberg's (2000) lowest slope is the same,
    rounded up to a multiple of 1 / m. Within equal p-values the slope increases, so it can decrease only at the first
    of them, and it is sufficient to check each occupied rank once.

    Guaranteed: nothing at any fixed m. For independent p-values and growing m the slope stops increasing only by
    chance before the range of the nulls is reached, so the estimate tends to exceed pi0, which selects less.

    Args:
        counts: of m >= 1 audit documents.

    Returns:
        A rational in [1/m, 1].
    """
    m, grid = counts.m, counts.grid
    occupied = np.flatnonzero(counts.counts)
    dens = np.broadcast_to(grid.denominators, grid.size)[occupied].tolist()
    gaps = [d - a for a, d in zip(grid.numerators[occupied].tolist(), dens, strict=True)]  # 1 - p = gap / den
    remaining = m  # number of documents at this p-value and above
    for index, count in enumerate(counts.counts[occupied].tolist()):
        gap, den = gaps[index], dens[index]
        if index and gap * (remaining + 1) * dens[index - 1] < gaps[index - 1] * remaining * den:
            return min(Fraction(1), Fraction(remaining * den, m * gap)) if gap else Fraction(1)
        remaining -= count
    return Fraction(1)


QUANTILE = Procedure(
    "quantile",
    Guarantee(
        "asymptotic",
        MANY,
        f"{IN_THE_LIMIT}, with the share of nulls read off where the sorted p-values first rise more slowly; "
        f"{UNPROVED} {ON_AVERAGE}",
    ),
    lambda given: adaptive("quantile", given, slope(given.counts), {}),
    factor=Factor(least=lambda rule, n, m: Fraction(1, m)),
    curve=curve_at_factor,
)
