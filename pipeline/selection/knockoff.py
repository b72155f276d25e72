"""The knockoff+ filter on a signed statistic W, by counting, and a test of the symmetry that it assumes.

The filter uses float32(|W|), rounded to nearest: the rounding is monotone and the same for both signs, so it does not
affect the guarantee; W with float32(|W|) = 0 is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.selection.guarantees import Outcome
from pipeline.selection.shares import clopper_pearson
from pipeline.selection.thresholds import (
    INFINITY,
    NO_VALUE,
    Moments,
    Threshold,
    bit_patterns,
    find_place,
    pattern_value,
)
from pipeline.selection.version_scores import FLOOR, LEAST_DOCUMENTS, shrinkage
from pipeline.wording import format_against

GROUPS = 10
LEAST_IN_GROUP = 10
SYMMETRY_LEVEL = 0.01


def magnitudes(w: np.ndarray) -> np.ndarray:
    """float32(|W|), shape as `w`, for the filter; infinity beyond the range of float32."""
    with np.errstate(over="ignore", under="ignore"):
        return np.abs(np.asarray(w, dtype=np.float64)).astype(np.float32)


def is_selected(w: np.ndarray, threshold: Threshold) -> np.ndarray:
    """Whether each W >= the threshold, on float32(|W|): bool, shape as `w`."""
    if threshold.value is None:
        return np.zeros(np.shape(w), dtype=bool)
    return (np.asarray(w) > 0) & (magnitudes(w) >= np.float32(threshold.value))


def fewest(q: Fraction, m: int, draws: int = 1) -> tuple[int, str]:
    """Minimum number of m documents that the filter can select, and a sentence that explains it.

    Args:
        q: exact level.
        m: number of documents.
        draws: paraphrases of simultaneous knockoffs, with the minimum ceil(1 / (draws q)).
    """
    least = math.ceil(1 / (q * draws))
    sentence = f"The shortest possible list of the knockoff filter has {least:,} documents"
    if least <= m:
        return least, f"{sentence}."
    return least, (
        f"{sentence} and only {m:,} are audited, so nothing can be selected: give more documents, or allow a larger "
        "alpha."
    )


def find_threshold(q: Fraction) -> Generator[Callable[[np.ndarray], Any], Any, Threshold]:
    """The knockoff+ threshold (Barber & Candes 2015; the filter of KTD, Hu et al. 2025) of W distributed over shards.

        tau = min over t in {|W_j| : W_j != 0} with (1 + #{W <= -t}) / max(1, #{W >= t}) <= q; none: no selection.

    KTD's published code uses the t of the best ratio, which violates the guarantee. At least ceil(1 / q) documents are
    selected, or none. The filter of simultaneous knockoffs (Gimenez & Zou 2019), with m paraphrases that compete with
    each text, counts a negative W as 1/m: (1/m) (1 + #{W <= -t}) / max(1, #{W >= t}) <= q, which is this threshold at
    m q; m q can be 1 or more, and a threshold that no positive W reaches selects nothing.

    Guaranteed: FDR <= q if, given all |W| and the signs of the members' W, the signs of the nulls' W are independent
    fair coins. Lemma 1 of KTD derives that from perfect paraphrases. For m > 1 draws it is wrong even then: the m
    differences share the document's own score, so W is as skewed as the score. With m = 10, exponential scores,
    10% members and q = .1 the FDR is .46. `sign_symmetry` tests for it.

    The folds are those of `thresholds.find_place` over W, float64.

    Args:
        q: exact.
    """

    def holds(place: int, before: Sequence[int], reached: Sequence[int]) -> bool:
        return (1 + before[1]) * q.denominator <= q.numerator * max(1, reached[0])

    last = yield from find_place(_places, lambda count: holds)
    if last is None or not last[1][0]:
        return NO_VALUE
    return Threshold(pattern_value(INFINITY - last[0]), last[1][0])


def _places(w: np.ndarray) -> list[np.ndarray]:
    """The places of positive and of negative W, large |W| first, without zeros."""
    w = np.asarray(w, dtype=np.float64)
    size = magnitudes(w)
    return [np.uint32(INFINITY) - bit_patterns(size[(size > 0) & (sign * w > 0)]) for sign in (1, -1)]


# --- the scale of W


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale s of W of simultaneous knockoffs, with log s^2 = m0 + b (log v - m0)."""

    median: float = 0.0  # median of v, exp(m0); 0: s = 1
    share: float = 0.0  # b

    def of(self, spread: np.ndarray) -> np.ndarray:
        """The s of documents from v, the variance of all scores except the largest; float64, shape as `spread`."""
        if not self.median:
            return np.ones(np.shape(spread))
        return np.asarray(np.exp((math.log(self.median) + self.share * self.about_median(spread)) / 2))

    def about_median(self, spread: np.ndarray) -> np.ndarray:
        """Deviation log v - m0, v at least 1e-6 of its median."""
        return np.log(np.maximum(spread, FLOOR * self.median) / self.median)


def find_scale(draws: int) -> Generator[Callable[[np.ndarray], Any], Any, Scale]:
    """The scale of documents distributed over shards, from their v: exact, in any order, with little communication.

    The shrinkage is that of `versions.gap_statistic`, with the median and the variance of log v over documents; v
    excludes a document's largest score. v, the median and the variance do not depend on which text scores highest, so
    the distribution of the signs of W given |W| / s is unchanged. The median is the lower one, as float32. s = 1 for
    fewer than 20 documents, for fewer than 3 draws, or if the median is 0.

    Args:
        draws: paraphrases of each document.
    """
    last = yield from find_place(_spread_places, lambda total: lambda place, before, _: 4 * before[1] < total)
    scale = Scale(pattern_value(last[0]) if last is not None else 0.0)
    if draws < 3 or not 0 < scale.median < math.inf:
        return Scale()
    moments = yield lambda spread: Moments.of(scale.about_median(spread), 0.0)
    if moments.count < LEAST_DOCUMENTS:
        return Scale()
    return Scale(scale.median, shrinkage(moments.variance, draws + 1))


def _spread_places(spread: np.ndarray) -> list[np.ndarray]:
    """The places of v, and the next places: the second kind up to a place counts the first kind before it."""
    bits = bit_patterns(np.asarray(spread).astype(np.float32))
    return [bits, bits + np.uint32(1)]


# --- test of the filter's assumption


@dataclass(frozen=True, slots=True)
class SignSymmetry:
    """A sign test of W in groups of similar |W|, and its result in words."""

    p_value: float
    shares: tuple[float, ...]  # share of positive W in each group, |W| ascending
    n: int  # documents with W != 0
    outcome: Outcome  # failed if p_value < 0.01: the filter's guarantee does not hold here; else it proves nothing
    sentence: str


def sign_symmetry(w: np.ndarray, draws: int = 1) -> SignSymmetry:
    """Test whether the signs of null documents' W are fair coins for any |W|: the knockoff filter's assumption.

    For simultaneous knockoffs W is positive if the text scores higher than all `draws` paraphrases, which is expected
    for 1 / (draws + 1) of the documents.

    Documents are sorted by |W| and split into up to 10 groups of equal size, of at least 10 documents. In each group
    the number of positive W is tested against a fair coin, exactly and two-sided; the p-value is the smallest of these
    times their number (Bonferroni).

    Guaranteed: under symmetry P(p_value <= x) <= x for each x, for independent documents. With few documents a large
    p-value proves nothing. Documents of equal |W| are grouped in the given order, which must not depend on their signs.

    Args:
        w: W of calibration documents (known nulls), in any order; zeros are ignored. Not for audit documents, whose
            members are positive by design.
        draws: number of paraphrases that compete with a text; 1 for other statistics.
    """
    fair = 1 / (draws + 1)
    due = "half" if draws == 1 else f"1 in {draws + 1}"
    w = np.asarray(w, dtype=np.float64)
    w = w[magnitudes(w) > 0]
    groups = min(GROUPS, w.size // LEAST_IN_GROUP)
    if not groups:
        sentence = f"Whether the signs of W are symmetric cannot be tested on {w.size} documents of known membership."
        return SignSymmetry(1.0, (), w.size, Outcome.INCONCLUSIVE, sentence)
    parts = np.array_split(w[np.argsort(np.abs(w), kind="stable")] > 0, groups)
    p = [_fair_coin(int(part.sum()), part.size, fair) for part in parts]
    worst = int(np.argmin(p))
    p_value = min(1.0, groups * p[worst])
    shares = tuple(float(part.mean()) for part in parts)
    outcome = Outcome.FAILED if p_value < SYMMETRY_LEVEL else Outcome.INCONCLUSIVE
    positive = int((w > 0).sum())
    low, high = clopper_pearson(positive, w.size, 0.025)
    shown = format_against(p_value, SYMMETRY_LEVEL, kind="g")
    where = "of all" if groups == 1 else f"of the {worst + 1}. of {groups} groups by size of W, smallest first,"
    sentence = (
        f"Of {w.size} documents of known membership {positive / w.size:.0%} have a positive W (95% interval {low:.0%} "
        f"to {high:.0%}); the knockoff filter assumes {due}, at every size of W. The test finds no contradiction "
        f"(p = {shown}), which is no proof: a skew within that interval would break the guarantee unseen."
        if outcome != Outcome.FAILED
        else f"The signs of W among {w.size} documents of known membership are not fair coins (p = {shown}): "
        f"{where} {shares[worst]:.0%} are positive where {due} should be. The knockoff filter's guarantee does not "
        "hold here."
    )
    return SignSymmetry(p_value, shares, w.size, outcome, sentence)


def _fair_coin(heads: int, tosses: int, fair: float) -> float:
    """Exact two-sided p-value of a coin that should show heads with probability `fair`: twice the smaller tail."""
    from scipy.stats import binom

    tails = binom.cdf(heads, tosses, fair), binom.sf(heads - 1, tosses, fair)
    return min(1.0, 2 * float(min(tails)))
