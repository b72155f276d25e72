"""Fuse the ranks of several detectors into one p-value a document (TD4Eval's weighted Cauchy fusion).

The fused p-values are continuous, so their step-up threshold is found by counting (`thresholds`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.step_up import step_up
from pipeline.selection.thresholds import INFINITY, NO_VALUE, Holds, Threshold, bits_of, find_place, value_of

Weights = Literal["rejections", "equal", "random", "max"]


def weights(rejections: Sequence[int], kind: Weights, seed: int = 0) -> np.ndarray:
    """Weights of the detectors, from how many audit documents BH selects by each.

    `rejections` is TD4Eval's choice, R_k / sum R; `equal`, `random` (uniform numbers, normalised) and `max` (the
    first detector of the most rejections alone) are its ablations.

    Returns:
        float64, (detectors,), of sum 1; all zero if every detector rejects nothing, and then nothing is selected.
    """
    counts = np.asarray(rejections, dtype=np.float64)
    if kind == "rejections":
        raw = counts
    elif kind == "equal":
        raw = np.ones_like(counts)
    elif kind == "random":
        raw = np.random.default_rng(seed).random(counts.size)
    else:
        raw = (np.arange(counts.size) == counts.argmax()).astype(np.float64)
    return raw / raw.sum() if counts.any() else np.zeros_like(counts)


def statistic(ranks: np.ndarray, n: int, weights: np.ndarray) -> np.ndarray:
    """The weighted Cauchy statistic of each document: T = sum_k w_k tan(pi (1/2 - p_k)).

    p_k is the rank over n + 1, clipped to [1 / (2(n + 1)), 1 - 1 / (2(n + 1))]. Each tangent is looked up in one
    table and added in the order of the detectors, so equal ranks give equal bits in any shard.

    Args:
        ranks: integers in 1..n + 1, (documents, detectors).
        n: number of documents that they were ranked against.
        weights: (detectors,).

    Returns:
        float64, (documents,); higher is more evidence against the null.
    """
    half = 0.5 / (n + 1)
    table = 1 / np.tan(np.pi * np.clip(np.arange(n + 2) / (n + 1), half, 1 - half))
    total = np.zeros(ranks.shape[0])
    for column in np.flatnonzero(weights):
        total += (weights[column] * table)[ranks[:, column]]
    return total


def fuse(ranks: np.ndarray, n: int, weights: np.ndarray) -> np.ndarray:
    """Fused p-values: arctan2(1, T) / pi with T from `statistic`, exact in the tails, rounded up to float32.

    Guaranteed: nothing. The p-values are uniform for nulls if the detectors are independent and the weights fixed, or
    if all the weight is on one detector that was chosen beforehand; for correlated detectors only the far tail is
    nearly right (Liu & Xie 2020), and BH on many documents uses the body. Simulated with six equicorrelated (.5)
    detectors the FDR is .089 where (share of nulls) alpha is .075. Weights that are chosen by the same documents that
    they then judge add to that: a single null document is selected by six independent detectors with probability
    1 - (1 - alpha)^6, .47 at alpha = .1.

    Args:
        ranks: as in `statistic`.
        n: number of calibration documents.
        weights: from `weights`; all zero gives p = 1 throughout.

    Returns:
        float32, (documents,), in (0, 1].
    """
    if not np.any(weights):
        return np.ones(ranks.shape[0], dtype=np.float32)
    return rounded_up(np.arctan2(1.0, statistic(ranks, n, weights)) / np.pi)


def find_threshold(alpha: Fraction, quarantined: int = 0) -> Generator[Callable[[np.ndarray], Any], Any, Threshold]:
    """BH's threshold of float32 p-values that are spread over shards: the greatest p with m p <= alpha R(p).

    R(p) is the number of p-values up to p. The passes are those of `thresholds.find_place`.

    Guaranteed: equal to sorting the float32 values and comparing in exact rationals, m p alpha_den <= alpha_num R.

    Args:
        alpha: exact, in (0, 1).
        quarantined: further hypotheses at p = 1, which are never selected.
    """

    def rule(count: int) -> Holds:
        m = count + quarantined

        def holds(place: int, before: Sequence[int], reached: Sequence[int]) -> bool:
            if place >= INFINITY:
                return False
            numerator, denominator = value_of(place).as_integer_ratio()
            return m * numerator * alpha.denominator <= alpha.numerator * reached[0] * denominator

        return holds

    last = yield from find_place(lambda p: [bits_of(p)], 1, rule)
    return NO_VALUE if last is None else Threshold(value_of(last[0]), last[1][0])


def rounded_up(values: np.ndarray) -> np.ndarray:
    """float32, each the least that is not below its float64: a p-value so rounded is still a p-value."""
    values = np.asarray(values, dtype=np.float64)
    nearest = values.astype(np.float32)
    return np.where(nearest < values, np.nextafter(nearest, np.float32(np.inf)), nearest)


def symmetric_weights(
    audit: Sequence[RankCounts], calibration: Sequence[RankCounts], alpha: Fraction, kind: Weights, seed: int = 0
) -> np.ndarray:
    """Weights that do not depend on which documents are audited, which makes reconformal fusion exact.

    Calibration documents are split (`split.halves`): one half, the reference, gives everyone's ranks by each
    detector; the other is ranked like the audit documents. BH then runs on audit and calibration documents
    together, at the level (n + m) / (n + m / alpha) at which it has BH's own threshold at alpha on the audit
    documents, were the n calibration p-values evenly spread. Its rejections are what `weights` would see, times
    1 + n alpha / m, plus noise. If no detector rejects anything the weights are equal.

    Guaranteed: T is one function of a document, and the function is unchanged when audit and calibration documents
    swap places. So ranks of the audit documents' T among the calibration documents' T are those of AdaDetect
    (Marandon, Lei, Mary & Roquain 2024) with T as its score, and BH on them has FDR <= (share of nulls) alpha in
    finite samples, if the null audit documents and the calibration documents are exchangeable given the others.

    Args:
        audit: rank counts of the m audit documents against the reference half, one a detector, quarantined ones
            at p = 1.
        calibration: of the n documents of the other half, against the same reference half.
        alpha: exact, of the selection.
        kind: as in `weights`.
        seed: as in `weights`.

    Returns:
        float64, (detectors,), of sum 1.
    """
    m, n = audit[0].m, calibration[0].m
    level = Fraction(n + m) / (n + m / alpha)
    pooled = [a + c for a, c in zip(audit, calibration, strict=True)]
    rejections = [counts.at_most(step_up(counts, level)) for counts in pooled]
    return weights(rejections, kind, seed) if any(rejections) else weights([1] * len(rejections), "equal")
