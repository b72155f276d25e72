"""A score learnt from the unordered pool of calibration and audited documents: a mixture of normal populations.

The fit is a function of the multiset of rows, so it is the same when a null document and a calibration document swap
places, and all calibration documents can be ranked by its score (Marandon, Lei, Mary & Roquain 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

CLIP = 8.0
"""Limit of standardised scores, so that outliers have a limited effect on the fit."""

STEPS = 40
"""Steps of EM."""

RIDGE = 0.05
"""Added to the variances of standardised scores, so that constant and equal columns have a solution."""

SHARES = 0.01, 0.95
"""Limits of the share of a population beside the first."""

START, SLOPE = 0.85, 3.0
"""Quantile of a column where a row starts with a half, and the slope there in standard deviations."""

DISTANCE, REST = 4.0, 0.125
"""A population that is so many standard deviations higher in one column, and less than this part of it in the others on
average, is not taken for members: documents of another kind, such as another language, which one detector sees."""

DIGITS, SHOWN = 9, 6
"""Decimals of what scores are computed from, and of the weights that are stated: processors differ in later ones."""

TINY = 1e-12
"""Least number of documents of a population, for divisions."""

SAME = 1e-6
"""Difference of two log-likelihoods per row up to which the earlier start is kept, and size of a weight or of a summed
shift up to which it is taken as 0: processors differ by less."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearScore:
    """A linear function of standardised columns."""

    weights: np.ndarray  # (detectors,)
    offset: float = 0.0

    def rounded(self) -> LinearScore:
        """The same with DIGITS decimals."""
        return LinearScore(np.round(self.weights, DIGITS), round(self.offset, DIGITS))

    def values(self, z: np.ndarray) -> np.ndarray:
        """Its values, (documents,), column by column: the same bits for the same row in any shard."""
        total = np.full(len(z), self.offset)
        for weight, column in zip(self.weights, z.T, strict=True):
            total += weight * column
        return total


@dataclass(frozen=True, slots=True, eq=False)
class PoolScore:
    """A score of standardised columns z = (score - center) / scale, clipped: the log-odds of a population.

    It is linear in z without outliers; with outliers the logarithm of 1 + their odds is subtracted.
    """

    center: np.ndarray  # (detectors,)
    scale: np.ndarray  # (detectors,), negative where lower scores are evidence against the null
    direction: LinearScore
    outliers: LinearScore | None = None  # log-odds of a population that is not taken for members; None: there is none
    limit: float = CLIP

    @property
    def weights(self) -> np.ndarray:
        """Weight of each detector, (detectors,); absolute values sum to 1."""
        weights = self.direction.weights
        return np.round(weights / max(float(np.abs(weights).sum()), 1e-300), SHOWN)

    def score(self, matrix: np.ndarray) -> np.ndarray:
        """Scores of documents; higher: more evidence against the null, in both directions.

        Args:
            matrix: scores, (documents, detectors).

        Returns:
            float64, (documents,). Rank it with `ranks(..., "members")` for either direction of the selection.
        """
        z = standardised_scores(matrix, self.center, self.scale, self.limit)
        total = self.direction.values(z)
        return total if self.outliers is None else np.round(total - np.logaddexp(0, self.outliers.values(z)), DIGITS)


def fit_pool(pool: np.ndarray, sign: float = 1.0) -> PoolScore:
    """Learn to distinguish members in a pool of documents whose roles are not known.

    Two normal populations with one covariance are fitted by EM from several starts: the upper end of each column, and
    of the mean of all. The most likely fit whose second population has the higher scores on the whole is kept; its
    score is Fisher's. If that population is far off in one column and like the others elsewhere, a third one is
    fitted beside it, and the one of both that is raised in more columns is taken for members.

    Guaranteed: FDR <= (share of nulls) alpha in finite samples by BH on the ranks of the audit documents' score among
    those of ALL calibration documents, and <= alpha by Storey's, if the null audit documents and the calibration
    documents are exchangeable given the others: the score is a function of the multiset of rows. The model affects only
    the power. Of audit documents that depend on one another one of each block must be in the pool: several draw the
    score to their block (without members, three families of 30 near-duplicates: FDR .22 at alpha = .1).

    Args:
        pool: scores of calibration and audit documents, (documents, detectors), all or a `Sample`, in any order.
        sign: -1 where lower scores are evidence against the null, as in direction clean.
    """
    rows = sign * np.asarray(pool, dtype=np.float64)
    width = rows.shape[1]
    if width == 1:  # nothing to learn
        return PoolScore(np.zeros(1), np.full(1, sign), LinearScore(np.ones(1)), limit=np.inf)
    rows = rows[np.lexsort(rows.T)]
    center, scale = center_and_scale(rows)
    z = standardised_scores(rows, center, scale)
    with _libraries().limit(limits=1):  # the same sums on every machine, and faster
        members, outliers = _find_members(_Rows.of(z))
    if members is None or np.abs(members.weights).max() <= SAME:
        members, outliers = LinearScore(np.full(width, 1 / width)), None
    return PoolScore(sign * center, sign * scale, members, outliers)


def center_and_scale(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median of each column and half the range of its central 68%, 1 where that is 0: (detectors,) each."""
    low, center, high = np.quantile(rows / 2, [0.16, 0.5, 0.84], axis=0)  # a difference of scores may be too large
    return 2 * center, np.where(high > low, high - low, 1.0)


def standardised_scores(matrix: np.ndarray, center: np.ndarray, scale: np.ndarray, limit: float = CLIP) -> np.ndarray:
    """Scores in units of the pool, clipped: (documents, detectors)."""
    with np.errstate(over="ignore"):  # of scores near the largest float
        return np.clip((np.asarray(matrix, dtype=np.float64) - center) / scale, -limit, limit)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Standardised rows in a fixed order, with their moments."""

    z: np.ndarray  # (documents, detectors)
    total: np.ndarray  # (detectors,)
    second: np.ndarray  # (detectors, detectors), sums of products

    @classmethod
    def of(cls, z: np.ndarray) -> _Rows:
        return cls(z, z.sum(axis=0), z.T @ z)

    def starts(self) -> Iterator[np.ndarray]:
        """Probabilities of the rows in a further population, (documents,): by each column, and by the mean of all."""
        for x in [*self.z.T, self.z.mean(axis=1)]:
            deviation = float(x.std()) or 1.0
            yield 1 / (1 + np.exp(-SLOPE * (x - np.quantile(x, START)) / deviation))


@dataclass(frozen=True, slots=True, eq=False)
class _Mixture:
    """A first normal population and K further ones with the same covariance."""

    base: np.ndarray  # mean of the first, (detectors,)
    shifts: np.ndarray  # means of the further ones minus that of the first, (detectors, K)
    weights: np.ndarray  # log-odds of each against the first are linear in z: (detectors, K)
    offsets: np.ndarray  # (K,)
    covariance: np.ndarray  # (detectors, detectors)
    left: float  # share of the first

    @classmethod
    def fit(cls, rows: _Rows, members: np.ndarray) -> _Mixture:
        """The most likely mixture for probabilities of each row in the further populations, (documents, K).

        With one covariance for all populations the moments of all rows and the weighted sums suffice.
        """
        n, width = rows.z.shape
        sizes, sums = members.sum(axis=0), rows.z.T @ members
        rest = max(n - float(sizes.sum()), TINY)
        base = (rows.total - sums.sum(axis=1)) / rest
        means = sums / np.maximum(sizes, TINY)
        covariance = (rows.second - rest * np.outer(base, base) - (sizes * means) @ means.T) / n + RIDGE * np.eye(width)
        shares = np.clip(sizes / n, *SHARES)
        left = max(1 - float(shares.sum()), SHARES[0])
        shifts = means - base[:, None]
        weights = np.linalg.solve(covariance, shifts)
        offsets = np.log(shares / left) - (weights * (means + base[:, None])).sum(axis=0) / 2
        return cls(base, shifts, weights, offsets, covariance, left)

    def log_odds(self, z: np.ndarray) -> np.ndarray:
        """Of each row and each further population against the first, (documents, K)."""
        return z @ self.weights + self.offsets

    def members(self, z: np.ndarray) -> np.ndarray:
        """The probability of each row in each further population, (documents, K)."""
        odds = self.log_odds(z)
        largest = np.maximum(odds.max(axis=1, keepdims=True), 0)
        likely = np.exp(odds - largest)
        return likely / (np.exp(-largest) + likely.sum(axis=1, keepdims=True))

    def likelihood(self, rows: _Rows) -> float:
        """Logarithm of the likelihood of all rows, up to a constant."""
        n, crossed = len(rows.z), np.outer(rows.total, self.base)
        around = rows.second - crossed - crossed.T + n * np.outer(self.base, self.base)
        first = n * (np.log(self.left) - np.linalg.slogdet(self.covariance)[1] / 2)
        first -= float(np.trace(np.linalg.solve(self.covariance, around))) / 2
        return float(first + reduce(np.logaddexp, self.log_odds(rows.z).T, np.zeros(n)).sum())

    def direction(self, index: int) -> LinearScore:
        """The log-odds of a further population."""
        return LinearScore(self.weights[:, index], float(self.offsets[index])).rounded()

    @property
    def raised(self) -> np.ndarray:
        """The shifts in standard deviations inside the populations, (detectors, K)."""
        return self.shifts / np.sqrt(np.diag(self.covariance))[:, None]

    def is_outlying(self) -> bool:
        """Whether the only further population is far from the first in one column, and hardly in the others."""
        raised = self.raised[:, 0]
        most = float(raised.max())
        return most >= DISTANCE and (float(raised.sum()) - most) / max(1, raised.size - 1) < REST * most


def _find_members(rows: _Rows) -> tuple[LinearScore | None, LinearScore | None]:
    """The log-odds of members, None where no population is higher, and of outliers, if there are any."""
    fits = [_maximise(rows, start[:, None]) for start in rows.starts()]
    most_likely, _ = _most_likely(rows, fits)
    if most_likely.is_outlying():
        first = most_likely.members(rows.z)[:, 0]
        pairs = (np.stack([first, (1 - first) * start], axis=1) for start in rows.starts())
        beside, _ = _most_likely(rows, [_maximise(rows, pair) for pair in pairs])
        columns = np.clip(beside.raised, -1, 1).sum(axis=0)  # in how many columns, each up to one standard deviation
        chosen = int(columns[1] > columns[0])
        if _is_higher(beside, chosen):
            return beside.direction(chosen), beside.direction(1 - chosen)
    higher = [fit for fit in fits if _is_higher(fit[0])]
    return (_most_likely(rows, higher)[0].direction(0), None) if higher else (None, None)


def _is_higher(mixture: _Mixture, index: int = 0) -> bool:
    """Whether a further population is not lower on the whole; one without a difference is not, whatever is rounded."""
    return float(mixture.shifts[:, index].sum()) >= -SAME


_Fit = tuple[_Mixture, float]  # with the logarithm of its likelihood


def _most_likely(rows: _Rows, fits: Sequence[_Fit]) -> _Fit:
    """The first of the fits with the largest likelihood, up to SAME."""
    return reduce(lambda best, fit: fit if fit[1] > best[1] + SAME * len(rows.z) else best, fits)


def _maximise(rows: _Rows, members: np.ndarray) -> _Fit:
    """The mixture after STEPS steps of EM from the probabilities of each row in the further populations."""
    for _ in range(STEPS):
        members = _Mixture.fit(rows, members).members(rows.z)
    mixture = _Mixture.fit(rows, members)
    return mixture, mixture.likelihood(rows)


@cache
def _libraries() -> ThreadpoolController:
    """The threaded libraries of a fit; searching for them takes longer than a small fit."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
