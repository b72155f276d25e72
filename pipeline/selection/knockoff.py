"""The knockoff+ filter on a signed statistic W, by counting, and a test of the symmetry that it rests on.

The filter is defined on float32(|W|), rounded to nearest: the rounding is monotone and the same for both signs, so
the guarantee is untouched, and W with float32(|W|) = 0 is zero. `find_threshold` makes two passes: `candidate_bins`
comes after the first, `threshold` after the second, as in `fusion`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from pipeline.selection.digits import beside
from pipeline.selection.fusion import Threshold
from pipeline.selection.value_counts import BINS, MOST_BINS, HighCounts, LowCounts, value_of

GROUPS = 10
LEAST_IN_GROUP = 10
SYMMETRY_LEVEL = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class SignedHigh:
    """`HighCounts` of float32(|W|) of the positive and of the negative W; zeros are left out."""

    positive: HighCounts
    negative: HighCounts

    @classmethod
    def empty(cls) -> SignedHigh:
        """No documents yet."""
        return cls(HighCounts.empty(), HighCounts.empty())

    @classmethod
    def of(cls, w: np.ndarray) -> SignedHigh:
        """Count signed statistics, float64, not NaN. Quarantined documents have none and count as zeros."""
        positive, negative = _parts(w)
        return cls(HighCounts.of(positive), HighCounts.of(negative))

    def __add__(self, other: SignedHigh) -> SignedHigh:
        """The counts of both; exact, commutative and associative."""
        return SignedHigh(self.positive + other.positive, self.negative + other.negative)


@dataclass(frozen=True, slots=True, eq=False)
class SignedLow:
    """`LowCounts` of the positive and of the negative W."""

    positive: LowCounts
    negative: LowCounts

    @classmethod
    def empty(cls, bins: tuple[int, ...]) -> SignedLow:
        """No documents yet."""
        return cls(LowCounts.empty(bins), LowCounts.empty(bins))

    @classmethod
    def of(cls, w: np.ndarray, bins: tuple[int, ...]) -> SignedLow:
        """Count those of the statistics that lie in `bins`."""
        positive, negative = _parts(w)
        return cls(LowCounts.of(positive, bins), LowCounts.of(negative, bins))

    def __add__(self, other: SignedLow) -> SignedLow:
        """The counts of both, of the same bins."""
        return SignedLow(self.positive + other.positive, self.negative + other.negative)


def magnitudes(w: np.ndarray) -> np.ndarray:
    """float32(|W|), shape as `w`, by which the filter decides; beyond the range of float32 it is infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return np.abs(np.asarray(w, dtype=np.float64)).astype(np.float32)


def is_selected(w: np.ndarray, threshold: Threshold) -> np.ndarray:
    """Whether each W >= the threshold, on float32(|W|): bool, shape as `w`."""
    if threshold.value is None:
        return np.zeros(np.shape(w), dtype=bool)
    return (np.asarray(w) > 0) & (magnitudes(w) >= np.float32(threshold.value))


def candidate_bins(high: SignedHigh, q: Fraction, above: int = -1) -> tuple[int, ...]:
    """The high bins that can hold the filter's threshold, from the bottom; the last one holds it if none before does.

    The threshold is the least t in {|W|: W != 0} with 1 + #{W <= -t} <= q max(1, #{W >= t}). With N_h and P_h
    counting bins from h upwards, a value of bin h can satisfy this only if 1 + N_(h + 1) <= q max(1, P_h), and
    the least value of the bin does if and only if 1 + N_h <= q max(1, P_h), where the walk ends.

    Args:
        high: of all documents.
        q: exact.
        above: bins up to this one are known not to hold it.

    Returns:
        at most MOST_BINS bins, ascending; empty if nothing can be selected.
    """
    positive, negative = _from_top(high.positive.counts), _from_top(high.negative.counts)
    bins: list[int] = []
    filled = np.flatnonzero(high.positive.counts + high.negative.counts)
    for h in filled[filled > above].tolist():
        further = int(negative[h + 1]) if h + 1 < BINS else 0
        if _holds(further, int(positive[h]), q):
            bins.append(h)
            if len(bins) == MOST_BINS or _holds(int(negative[h]), int(positive[h]), q):
                break
    return tuple(bins)


def fewest(q: Fraction, m: int, draws: int = 1) -> tuple[int, str]:
    """The fewest of m documents that the filter can select, and a sentence on what that means.

    Args:
        q: exact.
        m: documents.
        draws: paraphrases that compete in simultaneous knockoffs: ceil(1 / (draws q)) are the fewest.
    """
    least = math.ceil(1 / (q * draws))
    sentence = f"The shortest possible list of the knockoff filter has {least:,} documents"
    if least <= m:
        return least, f"{sentence}."
    return least, (
        f"{sentence} and only {m:,} are audited, so nothing can be selected: give more documents, or allow a larger "
        "alpha."
    )


def threshold(high: SignedHigh, low: SignedLow, q: Fraction) -> Threshold | None:
    """The knockoff+ threshold (Barber & Candes 2015; the filter of KTD, Hu et al. 2025).

        tau = min over t in {|W_j| : W_j != 0} with (1 + #{W <= -t}) / max(1, #{W >= t}) <= q; none: no selection.

    KTD's published code then takes the t of the best ratio, which breaks the guarantee. At least ceil(1 / q)
    documents are selected, or none. The filter of simultaneous knockoffs (Gimenez & Zou 2019), with m paraphrases that
    compete with each text, counts a negative W as 1/m: (1/m) (1 + #{W <= -t}) / max(1, #{W >= t}) <= q, which is this
    threshold at m q; there m q can be 1 or more, and a threshold that no positive W reaches selects nothing.

    Guaranteed: FDR <= q if, given all |W| and the signs of the members' W, the signs of the nulls' W are independent
    fair coins. Lemma 1 of KTD derives that from perfect paraphrases. For m > 1 draws it is wrong even then: the m
    differences share the document's own score, so W is as skewed as the score. With m = 10, exponential scores,
    10% members and q = .1 the FDR is .46. `sign_symmetry` tests for it.

    Args:
        high: of all documents.
        low: of the `candidate_bins` of `high`.
        q: exact.

    Returns:
        the threshold; None if no counted bin holds it and bins above them still can, which takes a rare further pass
        over `candidate_bins(high, q, above=low.positive.bins[-1])`.
    """
    bins = low.positive.bins
    for row, h in enumerate(bins):
        positives, negatives = low.positive.counts[row], low.negative.counts[row]
        positive = _from_top(positives) + int(high.positive.counts[h + 1 :].sum())
        negative = _from_top(negatives) + int(high.negative.counts[h + 1 :].sum())
        for bits in np.flatnonzero(positives + negatives).tolist():
            if _holds(int(negative[bits]), int(positive[bits]), q):
                selected = int(positive[bits])
                return Threshold(value_of(h << 16 | bits) if selected else None, selected)
    if bins and candidate_bins(high, q, above=bins[-1]):
        return None
    return Threshold(None, 0)


def find_threshold(q: Fraction) -> Generator[Callable[[np.ndarray], Any], Any, Threshold]:
    """The knockoff+ threshold of W, float64, that are spread over shards; a generator as `fusion.find_threshold`.

    Args:
        q: exact.
    """
    high = yield SignedHigh.of
    high = high if high is not None else SignedHigh.empty()
    above = -1
    while True:
        bins = candidate_bins(high, q, above)
        low = (yield partial(SignedLow.of, bins=bins)) if bins else None
        result = threshold(high, low if low is not None else SignedLow.empty(bins), q)
        if result is not None:
            return result
        above = bins[-1]


def _parts(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    w = np.asarray(w, dtype=np.float64)
    if np.isnan(w).any():
        raise ValueError(f"{int(np.isnan(w).sum())} of {w.size} signed statistics are NaN")
    size = magnitudes(w)
    filled = size > 0
    return size[filled & (w > 0)], size[filled & (w < 0)]


def _from_top(counts: np.ndarray) -> np.ndarray:
    """How many are counted from each index upwards."""
    return np.cumsum(counts[::-1])[::-1]


def _holds(negative: int, positive: int, q: Fraction) -> bool:
    return (1 + negative) * q.denominator <= q.numerator * max(1, positive)


# --- does the assumption of the filter hold?


@dataclass(frozen=True, slots=True)
class SignSymmetry:
    """A sign test of W over groups of like |W|, and its result in words."""

    p_value: float
    shares: tuple[float, ...]  # of positive W in each group, |W| ascending
    n: int  # documents with W != 0
    ok: bool  # False if p_value < 0.01: the filter's guarantee does not hold here
    sentence: str


def sign_symmetry(w: np.ndarray, draws: int = 1) -> SignSymmetry:
    """Test whether the signs of null documents' W are fair coins whatever |W| is: the knockoff filter's assumption.

    Of simultaneous knockoffs W is positive where the text scores higher than all `draws` paraphrases, which should
    happen to 1 / (draws + 1) of the documents.

    Documents are sorted by |W| and cut into up to 10 groups of equal size, of at least 10 documents. In each the
    number of positive W is tested against a fair coin, exactly and two-sided; the p-value is the least of these
    times their number (Bonferroni).

    Guaranteed: under symmetry P(p_value <= x) <= x for each x, for independent documents. A large p-value proves
    nothing when documents are few. Documents of equal |W| are grouped in their given order, which must not depend
    on their signs.

    Args:
        w: of calibration documents (known nulls), any order; zeros are left out. Never of audit documents, whose
            members are positive by design.
        draws: paraphrases that compete with a text; 1 for every other statistic.
    """
    fair = 1 / (draws + 1)
    due = "half" if draws == 1 else f"1 in {draws + 1}"
    w = np.asarray(w, dtype=np.float64)
    w = w[magnitudes(w) > 0]
    groups = min(GROUPS, w.size // LEAST_IN_GROUP)
    if not groups:
        sentence = f"Whether the signs of W are symmetric cannot be tested on {w.size} documents of known membership."
        return SignSymmetry(1.0, (), w.size, True, sentence)
    parts = np.array_split(w[np.argsort(np.abs(w), kind="stable")] > 0, groups)
    p = [_fair_coin(int(part.sum()), part.size, fair) for part in parts]
    worst = int(np.argmin(p))
    p_value = min(1.0, groups * p[worst])
    shares = tuple(float(part.mean()) for part in parts)
    ok = p_value >= SYMMETRY_LEVEL
    positive = int((w > 0).sum())
    low, high = _interval(positive, w.size)
    shown = beside(p_value, SYMMETRY_LEVEL, kind="g")
    where = "of all" if groups == 1 else f"of the {worst + 1}. of {groups} groups by size of W, smallest first,"
    sentence = (
        f"Of {w.size} documents of known membership {positive / w.size:.0%} have a positive W (95% interval {low:.0%} "
        f"to {high:.0%}); the knockoff filter assumes {due}, at every size of W. The test finds no contradiction "
        f"(p = {shown}), which is no proof: a skew within that interval would break the promise unseen."
        if ok
        else f"The signs of W among {w.size} documents of known membership are not fair coins (p = {shown}): "
        f"{where} {shares[worst]:.0%} are positive where {due} should be. The knockoff filter's promise does not hold "
        "here."
    )
    return SignSymmetry(p_value, shares, w.size, ok, sentence)


def _interval(heads: int, tosses: int) -> tuple[float, float]:
    """95% interval of Clopper and Pearson for a coin's share of heads."""
    from scipy.stats import binomtest  # costs a second, and `seenset status` needs none of it

    interval = binomtest(heads, tosses).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def _fair_coin(heads: int, tosses: int, fair: float) -> float:
    """Exact two-sided p-value of a coin that should show heads with probability `fair`: twice the smaller tail."""
    from scipy.stats import binom

    tails = binom.cdf(heads, tosses, fair), binom.sf(heads - 1, tosses, fair)
    return min(1.0, 2 * float(min(tails)))
