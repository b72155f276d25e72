"""Versions as a collection: was any document learnt, do documents that arrive later add evidence, are ranks uniform?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.selection.versions import VersionScores

REDRAWS = 9_999
BETS = (0.1, 0.2, 0.5, 0.9)
"""Stakes of the e-values, all below 1: each factor stays positive."""

LEAST_IN_CELL = 5
"""Expected documents of a cell of the chi-squared test."""

_ROUNDING = 1e-12
"""Of a sum of standardised scores, for each version: a redrawn sum this close to the observed one is a tie."""

_COMBINATIONS = 1 << 13
"""Of versions of some documents, drawn together, at most: their sums fit a processor's cache."""

_REDRAW = int.from_bytes(b"redraw", "big")
"""Keeps the redraws apart from all else that is drawn by the same seed, the published indices among it."""


def redraw_p_value(scores: VersionScores, seed: int, redraws: int = REDRAWS) -> float:
    """Was anything of the collection learnt? p of T, the sum of the published versions' standardised scores.

    All indices are drawn anew `redraws` times: p = (1 + #{T* >= T}) / (1 + redraws), ties against (the exchangeability
    test of Oren et al. 2023, arXiv 2310.17623, with T in place of the mean of likelihoods). Memory O(redraws).

    Guaranteed: P(p <= t) <= t if no document was learnt, in finite samples.

    Args:
        scores: of k versions of each document.
        seed: of the redraws, >= 0, fixed before scores are read.
        redraws: >= 1.
    """
    values, rng = scores.standardised(), np.random.default_rng([seed, _REDRAW])
    observed, redrawn, sums, size = 0.0, np.zeros(redraws), np.zeros(1), 0
    for start, k, index in np.stack([scores.offsets[:-1], scores.sizes, scores.published], axis=1).tolist():
        versions = values[start : start + k]
        if not versions.any():
            continue
        if sums.size * k > _COMBINATIONS:
            redrawn += sums[rng.integers(sums.size, size=redraws, dtype=np.min_scalar_type(sums.size))]
            sums = np.zeros(1)
        sums = np.add.outer(sums, versions).ravel()
        observed += float(versions[index])
        size += k
    redrawn += sums[rng.integers(sums.size, size=redraws)]
    return float((1 + int((redrawn >= observed - _ROUNDING * size).sum())) / (1 + redraws))


def log_e_values(ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Evidence on a collection that grows: the mean over stakes L of prod_j (1 + L (k_j + 1 - 2 r_j) / (k_j - 1)).

    Guaranteed: of a null collection E has mean at most 1 at every stopping time, and P(max E >= 1 / a) <= a (Ville).
    The order of documents must not depend on their published indices.

    Args:
        ranks: int64, (documents,), in order of arrival, from `version_ranks` with ties against.
        sizes: int64, (documents,): versions of each.

    Returns:
        float64, (documents,): the natural logarithm of E after each document.
    """
    bets = np.array(BETS)[:, None] * ((sizes + 1 - 2 * ranks) / (sizes - 1))
    return np.asarray(np.logaddexp.reduce(np.log1p(bets).cumsum(axis=1), axis=0) - math.log(len(BETS)))


def uniformity_p_value(ranks: np.ndarray, sizes: np.ndarray) -> float:
    """Chi-squared test that ranks are uniform, for a model that cannot have seen the collection; 1 with too few.

    Documents of each k are counted in cells of neighbouring ranks that expect at least 5; statistics and degrees of
    freedom add up over k.

    Args:
        ranks: int64, (documents,), from `version_ranks`.
        sizes: int64, (documents,): versions of each.
    """
    from scipy.special import chdtrc

    statistic, freedom = 0.0, 0
    for k in np.unique(sizes).tolist():
        same = ranks[sizes == k]
        cells = min(k, k // math.ceil(LEAST_IN_CELL * k / same.size))
        if cells < 2:
            continue
        cell = np.arange(k) * cells // k
        due = np.bincount(cell) * (same.size / k)
        statistic += float(((np.bincount(cell[same - 1], minlength=cells) - due) ** 2 / due).sum())
        freedom += cells - 1
    return float(chdtrc(freedom, statistic)) if freedom else 1.0


@dataclass(frozen=True, slots=True)
class ExpectedShare:
    """What one may expect of documents that a model of 8B parameters read so often among 500B tokens."""

    copies: int
    auc: float  # of members against others, across documents (Hubble, arXiv 2510.19811)
    least: float  # share of those documents that are selected, at least
    most: float


EXPECTED = (
    ExpectedShare(1, 0.54, 0.0, 0.0),
    ExpectedShare(4, 0.56, 0.0, 0.0),
    ExpectedShare(16, 0.73, 0.0, 0.6),
    ExpectedShare(64, 0.996, 0.9, 0.9),
)
"""Read once or four times, the collection shows and no document does."""
