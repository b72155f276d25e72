"""Tests whether a collection was trained on: a permutation test of a linear score, and a count, by blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.errors import UserError
from pipeline.selection.conformal import hash_keys

PERMUTATIONS = 9_999
FOLDS = 5
RIDGE = 0.1
"""Ridge added to the diagonal of the covariance of the standardized columns."""

LEAST_BLOCKS = 20
"""Minimum blocks of each role for a permutation test."""

MOST_BLOCKS = 5_000
"""Maximum blocks of each role; larger numbers are subsampled, which preserves the level and nearly all power."""

REACHED = Fraction(4, 5)
"""Share of the blocks of either role that have at least the number of documents drawn per block for the count."""

_AT_ONCE = 500
"""Number of permutations in memory."""

_ROUNDING = 1e-9
"""A permuted statistic this close to the observed one counts as a tie."""

_BLOCKS, _FOLDS, _PERMUTE = 1, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of documents of one role, which are permuted as a whole."""

    scores: np.ndarray  # float64, (blocks, columns): means over the block's documents
    sizes: np.ndarray  # int64, (blocks,): documents
    audited: np.ndarray  # bool, (blocks,)
    n_mixed: int  # documents of blocks with both roles, which cannot be permuted and are left out

    @property
    def differences(self) -> np.ndarray:
        """Per column: mean of audited minus mean of unseen blocks, in standard deviations of all: (columns,)."""
        scale = self.scores.std(axis=0)
        difference = self.scores[self.audited].mean(axis=0) - self.scores[~self.audited].mean(axis=0)
        return np.asarray(difference / np.where(scale > 0, scale, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class DrawnBlocks:
    """Blocks of one role each, represented by the mean of an equal number of their documents."""

    each: int  # number of documents drawn per block
    scores: np.ndarray  # float64, (blocks, columns)
    keys: np.ndarray  # int64, (blocks,): the smallest key of the block's documents
    audited: np.ndarray  # bool, (blocks,)
    n_audited: int  # audited blocks, including smaller ones
    n_smaller: int  # of these, blocks with too few documents, which have no score
    n_mixed: int  # documents of blocks with both roles, which are left out


@dataclass(frozen=True, slots=True)
class PermutationTest:
    """The evidence against the hypothesis that audited and unseen blocks are exchangeable."""

    p_value: float  # in (0, 1], exact
    auc: float  # out-of-fold AUC of the fitted score, mean over the folds


def joined_blocks(family: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Number the blocks: connected components of documents with a common family or group.

    Args:
        family: int64, (documents,), from 0.
        group: int64, (documents,), from 0; -1 for none.

    Returns:
        int64, (documents,), in 0..blocks - 1.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    families = int(family.max(initial=-1)) + 1
    nodes = families + int(group.max(initial=-1)) + 1
    inside = group >= 0
    edges = (np.ones(int(inside.sum())), (family[inside], families + group[inside]))
    _, block = connected_components(coo_array(edges, shape=(nodes, nodes)), directed=False)
    return np.unique(np.asarray(block)[family], return_inverse=True)[1].astype(np.int64)


def make_blocks(scores: np.ndarray, block: np.ndarray, audited: np.ndarray, seed: int) -> Blocks:
    """The blocks that can be permuted, at most MOST_BLOCKS of each role, with their means.

    Args:
        scores: float64, (documents, columns), finite.
        block: int64, (documents,), from `joined_blocks`.
        audited: bool, (documents,); the others are unseen.
        seed: seed of the subsample if there are more.
    """
    count = int(block.max(initial=-1)) + 1
    sizes = np.bincount(block, minlength=count)
    n_audited = np.bincount(block[audited], minlength=count)
    pure = (n_audited == 0) | (n_audited == sizes)
    sums = np.stack([np.bincount(block, column, minlength=count) for column in scores.T], axis=1)
    rng = np.random.default_rng([seed, _BLOCKS])
    kept = []
    for role in (n_audited > 0, n_audited == 0):
        places = np.flatnonzero(pure & role)
        drawn = rng.choice(places, MOST_BLOCKS, replace=False) if places.size > MOST_BLOCKS else places
        kept.append(np.sort(drawn))
    at = np.concatenate(kept)
    return Blocks(sums[at] / sizes[at, None], sizes[at], n_audited[at] > 0, int(sizes[~pure].sum()))


def check_blocks(blocks: Blocks) -> None:
    """Check that there are enough blocks of each role for a permutation test.

    Raises:
        UserError: there are too few; the message states the required number.
    """
    counts = {"audited": int(blocks.audited.sum()), "unseen": int((~blocks.audited).sum())}
    for role, count in counts.items():
        if count < LEAST_BLOCKS:
            mixed = (
                f"; {blocks.n_mixed:,} documents are left out, because their blocks stand in both roles and a block "
                "moves whole: give each group to one role, or take only near-duplicates for blocks with --blocks family"
                if blocks.n_mixed
                else ""
            )
            raise UserError(
                f"too few documents for the permutation test: it needs at least {LEAST_BLOCKS} blocks of audited and "
                f"{LEAST_BLOCKS} of unseen documents, and has {count:,} {role} ones (a block is a group, or documents "
                f"that are near-duplicates){mixed}"
            )


def permutation_test(blocks: Blocks, seed: int, permutations: int = PERMUTATIONS) -> PermutationTest | None:
    """Test the exchangeability of audited and unseen blocks with a cross-fitted linear score, refitted per permutation.

    Columns are standardized over all blocks; folds and covariance do not depend on labels. T is the sum over folds of
    the difference of the means of a linear discriminant that is fitted on the other folds. Labels are permuted within
    size classes (1, 2 to 3, 4 to 7, ... documents): p = (1 + #{T* >= T}) / 10,000 (docs/methods.md, section 3.13).
    p = 1 if audited blocks do not score higher on average over the columns: training raises scores.

    Guaranteed: if blocks of one class are exchangeable between the roles, P(p <= t) <= t, for any dependence of
    documents within a block.

    Args:
        blocks: at least LEAST_BLOCKS of each role.
        seed: seed of the folds and permutations.
        permutations: number of permutations of the labels.

    Returns:
        The test; None if no size class has blocks of both roles, so that no labels can be permuted.

    Raises:
        UserError: as `check_blocks`.
    """
    check_blocks(blocks)
    strata = _strata(blocks)
    if not any(audited.size and unseen.size for audited, unseen in strata):
        return None
    order = np.concatenate([places for stratum in strata for places in stratum])
    counts = [(audited.size + unseen.size, audited.size) for audited, unseen in strata]
    spread = blocks.scores.std(axis=0)
    varying = spread > 0
    z = (blocks.scores[order][:, varying] - blocks.scores[:, varying].mean(axis=0)) / spread[varying]
    labels = blocks.audited[order]
    fold = np.random.default_rng([seed, _FOLDS]).permutation(order.size) % FOLDS
    cross = _CrossFit(z, fold)
    observed, size = cross.statistic(labels[None].astype(np.float64))
    p_value = 1.0
    if blocks.differences.mean() > 0:
        reached = observed[0] - _ROUNDING * size[0]
        rng, above = np.random.default_rng([seed, _PERMUTE]), 0
        for start in range(0, permutations, _AT_ONCE):
            drawn = _permuted(counts, min(_AT_ONCE, permutations - start), rng)
            above += int((cross.statistic(drawn)[0] >= reached).sum())
        p_value = (1 + above) / (permutations + 1)
    return PermutationTest(p_value, cross.auc(labels))


class _CrossFit:
    """The cross-fitted discriminant of labellings of blocks."""

    def __init__(self, z: np.ndarray, fold: np.ndarray) -> None:
        """Prepare the columns, standardized over all blocks, and the fold of each block.

        Args:
            z: float64, (blocks, columns).
            fold: int64, (blocks,), in 0..FOLDS - 1.
        """
        self.z, self.fold = z, fold
        columns = z.shape[1]
        covariance = z.T @ z / (len(z) - 1)
        self.inverse = np.linalg.inv(covariance + RIDGE * np.eye(columns))

    def _sums(self, labels: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Per fold: differences of the means of the two kinds in the fold and in the other folds: (rows, columns).

        0 if a kind is missing in the fold or in the other folds.
        """
        whole, number = self.z.sum(axis=0), len(self.z)
        audited, count = labels @ self.z, labels.sum(axis=1)
        for one in range(FOLDS):
            inside = self.fold == one
            z, some = self.z[inside], labels[:, inside]
            sums, n = some @ z, some.sum(axis=1)
            within = _difference(sums, z.sum(axis=0) - sums, n, len(z) - n)
            rest = audited - sums
            n_rest = count - n
            others = whole - z.sum(axis=0) - rest
            outside = _difference(rest, others, n_rest, number - len(z) - n_rest)
            yield within, outside

    def statistic(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """T of each labelling, and the sum of the absolute values of its terms: float64, (rows,) each.

        Args:
            labels: float64, (rows, blocks), 1 for audited.
        """
        total, size = np.zeros(len(labels)), np.zeros(len(labels))
        for within, outside in self._sums(labels):
            parts = within * (outside @ self.inverse)
            total += parts.sum(axis=1)
            size += np.abs(parts).sum(axis=1)
        return total, size

    def auc(self, labels: np.ndarray) -> float:
        """Area under the ROC curve of each fold's score in the fold, mean over the folds; 0.5 without folds."""
        areas = []
        for one, (_, outside) in enumerate(self._sums(labels[None].astype(np.float64))):
            inside = self.fold == one
            score, audited = self.z[inside] @ (outside[0] @ self.inverse), labels[inside]
            if audited.any() and not audited.all():
                areas.append(_area(score[audited], score[~audited]))
        return float(np.mean(areas)) if areas else 0.5


def _difference(first: np.ndarray, second: np.ndarray, n: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Difference of the means of two kinds, from sums (rows, columns) and numbers (rows,); 0 if one is missing."""
    both = ((n > 0) & (m > 0))[:, None]
    means = first / np.maximum(n, 1)[:, None] - second / np.maximum(m, 1)[:, None]
    return np.asarray(np.where(both, means, 0.0))


def draw_blocks(scores: np.ndarray, block: np.ndarray, audited: np.ndarray, keys: np.ndarray, seed: int) -> DrawnBlocks:
    """The blocks of one role each, with the mean of b of their documents, the same b for all blocks.

    b is the largest size that 80% of the blocks of either role reach, so 1 if most blocks of a role are single
    documents. The b documents are drawn by a hash of their keys. Means of different numbers of documents would not be
    exchangeable, because their variance depends on the number. Assumption: a block's size is not informative on its
    score.

    Args:
        scores: float64, (documents, columns), finite.
        block: int64, (documents,), from `joined_blocks`.
        audited: bool, (documents,); the others are unseen.
        keys: int64, (documents,), hashes of the ids.
        seed: seed of the draw.
    """
    count = int(block.max(initial=-1)) + 1
    sizes = np.bincount(block, minlength=count)
    n_audited = np.bincount(block[audited], minlength=count)
    roles = [sizes == n_audited, n_audited == 0]
    each = min(_reached(sizes[role]) for role in roles)
    order = np.lexsort((keys, hash_keys(keys, seed), block))
    place = np.arange(block.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    drawn = order[(place < each) & (sizes >= each)[block[order]] & (roles[0] | roles[1])[block[order]]]
    number = np.unique(block[drawn], return_inverse=True)[1]
    means = np.stack([np.bincount(number, column[drawn]) / each for column in scores.T], axis=1)
    smallest = np.full(means.shape[0], np.iinfo(np.int64).max)
    np.minimum.at(smallest, number, keys[drawn])
    kept = np.unique(block[drawn])
    few = sizes < each
    return DrawnBlocks(
        each=each,
        scores=means,
        keys=smallest,
        audited=roles[0][kept],
        n_audited=int(roles[0].sum()),
        n_smaller=int((roles[0] & few).sum()),
        n_mixed=int(sizes[~(roles[0] | roles[1])].sum()),
    )


def _reached(sizes: np.ndarray) -> int:
    """The largest size that a share REACHED of the blocks has; 1 without blocks."""
    if not sizes.size:
        return 1
    return int(np.sort(sizes)[::-1][math.ceil(REACHED * sizes.size) - 1])


def _strata(blocks: Blocks) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions of the audited and of the unseen blocks of each size class; sizes in a class differ by a factor < 2."""
    classes = np.floor(np.log2(blocks.sizes)).astype(np.int64)
    each = [np.flatnonzero(classes == one) for one in np.unique(classes)]
    return [(places[blocks.audited[places]], places[~blocks.audited[places]]) for places in each]


def _permuted(counts: list[tuple[int, int]], rows: int, rng: np.random.Generator) -> np.ndarray:
    """Labels permuted within each class: float64, (rows, blocks), 1 for audited."""
    parts = []
    for n, k in counts:
        labels = np.broadcast_to((np.arange(n) < k).astype(np.uint8), (rows, n))
        parts.append(rng.permuted(labels, axis=1) if 0 < k < n else labels)
    return np.concatenate(parts, axis=1).astype(np.float64)


def _area(audited: np.ndarray, unseen: np.ndarray) -> float:
    """Share of pairs in which the audited block has the higher score; ties count half."""
    ordered = np.sort(unseen)
    below, upto = (np.searchsorted(ordered, audited, side=side).sum() for side in ("left", "right"))
    return float((below + upto) / (2 * audited.size * unseen.size))
