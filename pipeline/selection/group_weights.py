"""Weights of groups whose shares of members differ, from the scores of each group with roles unread.

The p-values of group g, ranked within the group, are divided by w_g before they enter one step-up. The weights are a
function of the unordered scores of each group, known and audited documents together, which the rank of a null document
does not depend on. The proof is in docs/methods.md, section 2.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.config.selection import Direction
from pipeline.selection.calibrations import Ranking, calibrate_by_group, group_ranking
from pipeline.selection.conformal import POOL_SIZE, Grid, RankCounts, Sample
from pipeline.selection.folds import Fold, Query, RoleScores, SelectionInput, fold_once, together
from pipeline.selection.guarantees import GroupWeight

DIGITS = 30
"""Binary digits of a weight, so that weighted p-values are exact in 64 bits."""

UPPER = Fraction(4, 5)
"""Share of all documents that are not high."""

LOW, CENTRE, HIGH = Fraction(1, 20), Fraction(1, 5), Fraction(3, 10)
"""Shares at whose quantiles a group is standardised: below most members, which have high scores."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPools:
    """Scores of documents by group, and numbers of audited documents; sums of shards in any order."""

    sample: Sample  # rows: score, higher is more evidence against the null; and position of the group
    audited: np.ndarray  # int64, (groups,)

    @classmethod
    def of(cls, batch: RoleScores, code: np.ndarray, direction: Direction, seed: int, n_groups: int) -> GroupPools:
        """The audited documents of a shard; `code` is the position of the group of each, int64."""
        rows = np.stack([batch.first if direction == "members" else -batch.first, code.astype(np.float64)], axis=1)
        return cls(Sample.draw(batch.keys, rows, seed, POOL_SIZE), np.bincount(code, minlength=n_groups))

    def __add__(self, other: GroupPools) -> GroupPools:
        """The sum of both."""
        return GroupPools(self.sample + other.sample, self.audited + other.audited)


def quantile(ascending: np.ndarray, share: Fraction) -> float:
    """The smallest value that at least this share of the values do not exceed; `ascending` is not empty."""
    return float(ascending[max(0, math.ceil(share * ascending.size) - 1)])


def count_high(pools: GroupPools) -> tuple[np.ndarray, np.ndarray]:
    """Number of documents of each group, and of those with a high standardised score: int64, (groups,) each.

    z = (score - q(.2)) / (q(.3) - q(.05)) with the quantiles of the group, or score - q(.2) where these are equal. A
    document is high if its z exceeds the .8 quantile of those of all groups with audited documents. The result does not
    depend on the order or the roles of documents, nor on the level and the scale of a group.
    """
    groups = pools.audited.size
    rows = pools.sample.rows
    scores, code = rows[np.lexsort(rows.T)].T  # by group, then by score
    ends = np.searchsorted(code, np.arange(groups), side="right")
    parts = np.split(scores, ends[:-1])
    standardised: list[np.ndarray] = []
    for part, audited in zip(parts, pools.audited.tolist(), strict=True):
        standardised.append(_standardised(part) if audited and part.size else np.empty(0))
    every = np.sort(np.concatenate(standardised))
    sizes = np.array([part.size for part in standardised])
    cut = quantile(every, UPPER) if every.size else 0.0
    return sizes, np.array([int(np.count_nonzero(part > cut)) for part in standardised])


def _standardised(ascending: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # differences of numbers near the largest float
        width = quantile(ascending, HIGH) - quantile(ascending, LOW)
        z = (ascending - quantile(ascending, CENTRE)) / (width or 1.0)
    return np.nan_to_num(z, nan=0.0)


def group_weights(audited: Sequence[int], sizes: Sequence[int], high: Sequence[int]) -> list[Fraction]:
    """The weights of groups: the odds of a high score, scaled to a mean of 1 over the audited documents.

    With a_g = (high + 1/2) / (size + 1), w_g is proportional to a_g / (1 - a_g). Each weight is then rounded down to 30
    binary digits, so that the mean is at most 1 and short of it by less than 2^-29.

    Args:
        audited: audited documents with a score, by group; the weight of a group without any is 0.
        sizes: documents of both roles.
        high: of these, those with a high standardised score.
    """
    odds = [Fraction(2 * above + 1, 2 * (size - above) + 1) for size, above in zip(sizes, high, strict=True)]
    total = sum((count * one for count, one in zip(audited, odds, strict=True)), Fraction(0))
    return [
        _rounded_down(one * sum(audited) / total) if count else Fraction(0)
        for count, one in zip(audited, odds, strict=True)
    ]


def _rounded_down(weight: Fraction) -> Fraction:
    """The largest number with so few binary digits that does not exceed a weight > 0."""
    places = DIGITS - weight.numerator.bit_length() + weight.denominator.bit_length()
    digits = math.floor(weight * Fraction(2) ** places)
    if digits >> DIGITS:  # one digit too many
        return Fraction(digits >> 1) / Fraction(2) ** (places - 1)
    return Fraction(digits) / Fraction(2) ** places


Counting = Callable[[Callable[[RoleScores], np.ndarray], Grid], Query[RankCounts]]
"""Counts the ranks of the audited documents over a grid, without quarantined ones."""


def boosted(question: SelectionInput, counting: Counting) -> Query[tuple[Ranking, RankCounts, list[GroupWeight]]]:
    """The ranks within groups over a grid of weighted p-values, their counts, and the weights.

    Weights only change the order of the ranks, so one fold of the audited documents both counts and pools them.

    Args:
        question: the selection and its inputs.
        counting: counts ranks.

    Raises:
        UserError: as `calibrations.ranks_by_group`.
    """
    selection, seed, known = question.selection, question.seed, question.known
    assert known.groups is not None  # the configuration has their columns
    groups = calibrate_by_group(known.first, known.groups)
    size, direction = len(groups.names), selection.direction

    def collect(batch: RoleScores) -> GroupPools:
        assert batch.groups is not None
        return GroupPools.of(batch, groups.codes(batch.groups), direction, seed, size)

    pools = GroupPools.of(known, groups.codes(known.groups), direction, seed, size)
    pools = GroupPools(pools.sample, np.zeros(size, dtype=np.int64))
    rank, against = group_ranking(groups, selection, seed)
    assert isinstance(against, Grid)
    counts, audited = yield from together(counting(rank, against), fold_once(Fold(collect)))
    pools = pools if audited is None else pools + audited
    sizes, high = count_high(pools)
    weights = group_weights(pools.audited.tolist(), sizes.tolist(), high.tolist())
    stated = [
        GroupWeight(
            group=groups.names[place],
            n_calibration=groups.scores[place].size,
            n_audit=int(pools.audited[place]),
            n_pooled=int(sizes[place]),
            n_high=int(high[place]),
            weight=float(weights[place]),
        )
        for place in np.flatnonzero(pools.audited).tolist()
    ]
    weighted = groups.weighted(weights)
    return group_ranking(weighted, selection, seed), groups.moved(counts, weighted), stated
