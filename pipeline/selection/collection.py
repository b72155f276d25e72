"""Was a collection trained on? A permutation test of a linear score, over whole blocks of documents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.errors import UserError

PERMUTATIONS = 9_999
SPLITS = 10
LEAST_BLOCKS = 20
"""Of each role. Half of them are permuted: 20 blocks of one size in 184,756 ways."""

MOST_BLOCKS = 5_000
"""Of each role; more are drawn from, which costs no level and next to no power."""

_AT_ONCE = 500
"""Permutations in memory at a time."""

_ROUNDING = 1e-9
"""A permuted statistic this close to the observed one counts as a tie."""

_BLOCKS, _SPLIT, _PERMUTE = 1, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of documents that are moved whole, each of one role."""

    scores: np.ndarray  # float64, (blocks, columns): means over the block's documents
    sizes: np.ndarray  # int64, (blocks,): documents
    audited: np.ndarray  # bool, (blocks,)
    n_mixed: int  # documents of blocks that stand in both roles, which nothing can move; they are left out


@dataclass(frozen=True, slots=True)
class PermutationTest:
    """What ten splits of the blocks say against: audited and unseen blocks are exchangeable."""

    p_value: float  # twice the median over the splits, at most 1
    p_values: list[float]  # of the splits, each in (0, 1]
    auc: float  # of the fitted score on the blocks that it was not fitted on, mean over the splits
    differences: list[float]  # by column: mean of audited less mean of unseen blocks, in standard deviations


def joined_blocks(family: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Number the blocks: documents of one family or of one group are in one block, and so is what that joins.

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
    """The blocks that can be moved, at most MOST_BLOCKS of each role, by their means.

    Args:
        scores: float64, (documents, columns), finite.
        block: int64, (documents,), from `joined_blocks`.
        audited: bool, (documents,); the others are unseen.
        seed: of the draw where there are more.
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
    """Check that the blocks suffice for a permutation test that could find something.

    Raises:
        UserError: too few blocks of a role, or too few of like size: says how many it takes.
    """
    counts = {"audited": int(blocks.audited.sum()), "unseen": int((~blocks.audited).sum())}
    for role, count in counts.items():
        if count < LEAST_BLOCKS:
            mixed = (
                f"; {blocks.n_mixed:,} documents are left out, because their blocks stand in both roles and a block "
                "moves whole: give each group to one role, or take only near copies for blocks with --blocks family"
                if blocks.n_mixed
                else ""
            )
            raise UserError(
                f"too few documents for the permutation test: it needs at least {LEAST_BLOCKS} blocks of audited and "
                f"{LEAST_BLOCKS} of unseen documents, and has {count:,} {role} ones (a block is a group, or documents "
                f"that are near copies){mixed}"
            )
    ways = sum(
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for n, k in _tested(_strata(blocks), blocks)
    )
    if ways < math.log(PERMUTATIONS + 1):
        sizes = " and ".join(
            f"{role} ones {int(np.median(blocks.sizes[mask])):,}"
            for role, mask in (("audited", blocks.audited), ("unseen", ~blocks.audited))
        )
        raise UserError(
            "too few documents for the permutation test: only blocks of like size are exchanged, at least "
            f"{LEAST_BLOCKS} of each role are needed, and here {sizes} documents at the median"
        )


def permutation_test(
    blocks: Blocks, seed: int, splits: int = SPLITS, permutations: int = PERMUTATIONS
) -> PermutationTest:
    """Are audited blocks like unseen ones? A linear score fitted on half of the blocks is tried on the other half.

    The blocks are split at random, evenly in each role and each class of size (1, 2 to 3, 4 to 7, ... documents).
    On one half a linear discriminant of audited against unseen is fitted, with a covariance shrunk as Ledoit and Wolf
    do; on the other T is its mean over audited less that over unseen blocks. Labels are permuted within the classes of
    size, 9,999 times: p = (1 + #{T* >= T}) / 10,000. Ten splits give p = min(1, twice the median)
    (docs/methods.md, section 3.13).

    Guaranteed: where blocks of like size are exchangeable between the roles, P(p <= t) <= t for each split, because
    the score does not depend on the labels that are permuted; and P(p <= t) <= t for twice the median of the splits,
    however they depend on each other (Rueger 1978). Documents within a block may depend on each other in any way.

    Args:
        blocks: at least LEAST_BLOCKS of each role.
        seed: of the splits and permutations.
        splits: of the blocks into halves.
        permutations: of the labels of one half.

    Raises:
        UserError: as `check_blocks`.
    """
    check_blocks(blocks)
    strata = _strata(blocks)
    tested = [_halves(blocks, strata, np.random.default_rng([seed, _SPLIT, split])) for split in range(splits)]
    fitted = np.stack([_fitted(blocks, half)[half] for half in tested], axis=1)
    counts = _tested(strata, blocks)
    labels = np.concatenate([np.arange(n) < k for n, k in counts])
    observed = fitted[labels].sum(axis=0)
    reached = observed - _ROUNDING * np.abs(fitted).sum(axis=0)
    rng = np.random.default_rng([seed, _PERMUTE])
    above = np.zeros(splits, dtype=np.int64)
    for start in range(0, permutations, _AT_ONCE):
        above += (_permuted(counts, min(_AT_ONCE, permutations - start), rng) @ fitted >= reached).sum(axis=0)
    p_values = (1 + above) / (permutations + 1)
    auc = float(np.mean([_area(column[labels], column[~labels]) for column in fitted.T]))
    return PermutationTest(
        min(1.0, float(2 * np.median(p_values))), p_values.tolist(), auc, _differences(blocks).tolist()
    )


def _strata(blocks: Blocks) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions of the audited and of the unseen blocks of each class of size; sizes in one class differ by a half."""
    classes = np.floor(np.log2(blocks.sizes)).astype(np.int64)
    each = [np.flatnonzero(classes == one) for one in np.unique(classes)]
    return [(places[blocks.audited[places]], places[~blocks.audited[places]]) for places in each]


def _tested(strata: list[tuple[np.ndarray, np.ndarray]], blocks: Blocks) -> list[tuple[int, int]]:
    """Of each class: how many blocks are not fitted on, and how many of these are audited."""
    halves = [tuple(-(-places.size // 2) for places in stratum) for stratum in strata]
    return [(one + other, one) for one, other in halves]


def _halves(blocks: Blocks, strata: list[tuple[np.ndarray, np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    """Positions of the blocks that are not fitted on: by class, audited ones first."""
    parts = [rng.permutation(places)[: -(-places.size // 2)] for stratum in strata for places in stratum]
    return np.concatenate(parts)


def _fitted(blocks: Blocks, tested: np.ndarray) -> np.ndarray:
    """The score of every block by a discriminant that is fitted on all that are not tested: float64, (blocks,)."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    fit = np.ones(blocks.audited.size, dtype=bool)
    fit[tested] = False
    centre, scale = blocks.scores[fit].mean(axis=0), blocks.scores[fit].std(axis=0)
    scores = (blocks.scores - centre) / np.where(scale > 0, scale, 1.0)
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    model.fit(scores[fit], blocks.audited[fit])
    return np.asarray(scores @ model.coef_[0])


def _permuted(counts: list[tuple[int, int]], rows: int, rng: np.random.Generator) -> np.ndarray:
    """Labels permuted within each class: float64, (rows, tested blocks), 1 for audited."""
    parts = []
    for n, k in counts:
        labels = np.broadcast_to((np.arange(n) < k).astype(np.uint8), (rows, n))
        parts.append(rng.permuted(labels, axis=1) if 0 < k < n else labels)
    return np.concatenate(parts, axis=1).astype(np.float64)


def _area(audited: np.ndarray, unseen: np.ndarray) -> float:
    """Share of pairs in which the audited block's score is the higher; ties count half."""
    ordered = np.sort(unseen)
    below, upto = (np.searchsorted(ordered, audited, side=side).sum() for side in ("left", "right"))
    return float((below + upto) / (2 * audited.size * unseen.size))


def _differences(blocks: Blocks) -> np.ndarray:
    """By column, how far the audited blocks lie above the unseen ones, in standard deviations of all: (columns,)."""
    scale = blocks.scores.std(axis=0)
    apart = blocks.scores[blocks.audited].mean(axis=0) - blocks.scores[~blocks.audited].mean(axis=0)
    return np.asarray(apart / np.where(scale > 0, scale, 1.0))
