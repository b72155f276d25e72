"""Calibration: conformal ranks of scores, their counts, p-values on an exact grid, and splits of documents."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from pipeline.config.selection import Direction
from pipeline.errors import UserError

SAMPLE_SIZE = 20_000
POOL_SIZE = 200_000
"""Maximum number of documents of both roles together that a learnt score or weights of groups are computed from."""
# A split and a sample need different hashes: with the same ones the half of the larger hashes would hardly be in the
# sample while audit documents would, and the sample would depend on the roles (simulated: FDR .116 for .100).
_SPLIT, _SAMPLE = 1, 2
BLOCKS = 3
"""Purpose of the hash that orders the documents of a block."""


def calibrate(scores: np.ndarray) -> np.ndarray:
    """Sort the scores of the null role's documents, once, for `ranks`.

    Args:
        scores: shape (n,), n >= 1, any order; `unseen` documents for direction `members`, `seen` for `clean`.

    Returns:
        float64, shape (n,), ascending.

    Raises:
        UserError: no calibration documents, or a NaN among their scores.
    """
    values = np.array(scores, dtype=np.float64).ravel()
    if values.size == 0:
        raise UserError("no calibration documents: without documents of known membership there is no p-value")
    refuse_nan(values, "calibration")
    values.sort()
    return values


def ranks(
    scores: np.ndarray,
    calibration_sorted: np.ndarray,
    direction: Direction,
    draws: np.ndarray | None = None,
) -> np.ndarray:
    """Conformal rank k = (n + 1) p of each audit document; without draws ties count against selection.

    With calibration scores s_1..s_n and an audit score s, direction `members` (the null is "unseen", a high
    score is evidence against it) has k = 1 + #{s_i >= s}, and direction `clean` (the null is "seen", a low
    score is evidence against it) has k = 1 + #{s_i <= s}. TD4Eval's eq. 4 has neither the +1, without which
    the FDR can reach 1, nor this direction: taken literally it selects the contaminated documents.

    Guaranteed: for a null document whose score is exchangeable with the n calibration scores,
    P(k <= j) <= j / (n + 1) for every j, with equality without ties (Vovk, Gammerman & Shafer 2005).

    With draws, k = 1 + #{more extreme} + floor(U (1 + #{ties})), U = draw / 2^32. Then the equality holds with ties
    too, because k is uniform on the tied positions, up to 2^-32 and as far as the hash of `tie_draws` is random. BH
    keeps its guarantee: given U, the ranks of other documents still do not decrease as this one increases.

    Args:
        scores: shape (documents,), finite or infinite.
        calibration_sorted: shape (n,), from `calibrate`; n < 2^31.
        direction: `members` or `clean`.
        draws: shape (documents,), from `tie_draws`; None: ties count against selection.

    Returns:
        int64, shape (documents,), in 1..n + 1.

    Raises:
        UserError: a NaN among the scores.
    """
    values = np.asarray(scores, dtype=np.float64)
    refuse_nan(values, "audit")

    def extreme(side: Literal["left", "right"]) -> np.ndarray:
        below = np.searchsorted(calibration_sorted, values, side=side).astype(np.int64, copy=False)
        return calibration_sorted.size - below if direction == "members" else below

    as_extreme = extreme("left" if direction == "members" else "right")
    if draws is None:
        return as_extreme + 1
    more_extreme = extreme("right" if direction == "members" else "left")
    places = (as_extreme - more_extreme + 1).astype(np.uint64)
    return more_extreme + 1 + (draws * places >> np.uint64(32)).astype(np.int64)


def tie_draws(keys: np.ndarray, seed: int) -> np.ndarray:
    """A random number per document with which `ranks` orders equal scores: uint64, (documents,), in [0, 2^32).

    Results depend on the seed, so choose the seed once, before scores are read.

    Args:
        keys: int64, (documents,), a hash of each document's id.
        seed: >= 0.
    """
    return hash_keys(keys, seed) >> np.uint64(32)


def p_values(ranks: np.ndarray, against: int | Grid) -> np.ndarray:
    """The p-values of ranks against n calibration documents, k / (n + 1), or over a grid: float64 in (0, 1].

    Over a grid of p-values that were divided by weights these are the p-values before the division.
    """
    positions = np.asarray(ranks)
    against = against.unweighted if isinstance(against, Grid) else against
    return against.values[positions - 1] if isinstance(against, Grid) else positions.astype(np.float64) / (against + 1)


def mix(values: np.ndarray) -> np.ndarray:
    """A step of SplitMix64 (Steele, Lea & Flood 2014): uint64 to uint64, modulo 2^64, one to one."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_keys(keys: np.ndarray, seed: int) -> np.ndarray:
    """A hash of each key, int64, and the seed: uint64, (keys,), a bijection of the keys."""
    return mix(np.asarray(keys, dtype=np.int64).view(np.uint64) ^ mix(np.array([seed], dtype=np.uint64)))


def refuse_nan(values: np.ndarray, role: str) -> None:
    """Refuse scores of a role that contain NaN.

    Raises:
        UserError: there are NaN; the message states their number.
    """
    missing = int(np.isnan(values).sum())
    if missing:
        raise UserError(f"{missing} of {values.size} {role} scores are NaN: quarantine those documents first")


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The possible p-values of an audit's documents, ascending; rank k = 1..size is the k-th.

    One group calibrated on n documents has the `uniform` grid k / (n + 1). Calibration by group pools the
    grids of its groups (`calibrations.pool`), and calibration-conditional p-values have another grid
    (`calibrations.simes_grid`). A procedure reads only counts over a grid, so it works with every grid.

    p-values may repeat; the last is 1, where quarantined documents are counted. With a `weighting` the grid holds
    p-values divided by the weights of their groups; those above 1, and the last, are 2^62, which is never selected.
    """

    numerators: np.ndarray  # int64, (size,), read-only
    denominators: np.ndarray  # int64, (size,) or one for all, (); at most 2^62
    n: int  # calibration documents of all groups
    groups: int = 1
    delta: Fraction | None = None  # valid for all but this share of calibration sets; None: on average over them
    weighting: Weighting | None = None  # None: p-values are not divided

    def __post_init__(self) -> None:
        for name in ("numerators", "denominators"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def uniform(cls, n: int) -> Grid:
        """The conformal p-values k / (n + 1), k = 1..n + 1, against n >= 1 calibration documents."""
        return cls(np.arange(1, n + 2), np.array(n + 1), n)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.numerators.size

    @property
    def values(self) -> np.ndarray:
        """The p-values as float64, (size,), each the nearest float to the exact one."""
        return self.numerators / self.denominators

    @property
    def unweighted(self) -> Grid:
        """The p-values before the division by weights, at the same ranks and then not ascending; else the same grid."""
        return self if self.weighting is None else self.weighting.grid

    def p(self, k: int) -> Fraction:
        """The exact p-value of rank k; 0 for k = 0."""
        if k == 0:
            return Fraction(0)
        denominator = self.denominators if self.denominators.ndim == 0 else self.denominators[k - 1]
        return Fraction(int(self.numerators[k - 1]), int(denominator))

    def at_most(self, p: Fraction) -> int:
        """Number of ranks with a p-value of at most p, exact."""
        if self.denominators.ndim == 0:
            reach = p.numerator * int(self.denominators) // p.denominator
            return int(np.searchsorted(self.numerators, min(reach, int(self.denominators)), side="right"))

        def excess(k: int) -> int:
            return int(self.numerators[k]) * p.denominator - p.numerator * int(self.denominators[k])

        return bisect_right(range(self.size), 0, key=excess)

    def same_as(self, other: Grid) -> bool:
        """Whether ranks have the same p-values in both."""
        return self is other or (
            (self.n, self.groups, self.delta) == (other.n, other.groups, other.delta)
            and np.array_equal(self.numerators, other.numerators)
            and np.array_equal(self.denominators, other.denominators)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Weighting:
    """What the ranks of a grid of weighted p-values stand for."""

    grid: Grid  # the p-values before the division, at the same ranks: not ascending
    weights: tuple[Fraction, ...]  # of the groups, exact, >= 0; the last one, 1, is that of documents without a score
    group: np.ndarray  # int64, (ranks,): position in `weights`

    @property
    def largest(self) -> Fraction:
        """The largest weight, at least 1."""
        return max(self.weights)


def hash_for(id_keys: np.ndarray, seed: int, purpose: int) -> np.ndarray:
    """Hash of each id key, the seed and a purpose (splitmix64): uint64, a bijection of the keys for each of those."""
    keys = np.asarray(id_keys, dtype=np.int64).view(np.uint64)
    salt = mix(mix(np.array([seed], dtype=np.uint64)) + np.uint64(purpose))
    return mix(mix(keys ^ salt))


def halves(id_keys: np.ndarray, seed: int) -> np.ndarray:
    """Choose half of the documents by a hash of their ids.

    Guaranteed: the half depends only on ids and seed, so exchangeable documents (with ids independent of scores) remain
    exchangeable, in either half, given the other half.

    Args:
        id_keys: int64, (n,), distinct.
        seed: seed of the selection.

    Returns:
        bool, (n,), True for the floor(n / 2) documents with the smallest hashes.
    """
    order = np.argsort(hash_for(id_keys, seed, _SPLIT), kind="stable")
    chosen = np.zeros(order.size, dtype=bool)
    chosen[order[: order.size // 2]] = True
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The at most `size` documents with the smallest hashes (other hashes than those of `halves`).

    Merging keeps the smallest of both, so the sample of a corpus does not depend on its shards. It does not contain the
    roles of documents, so it is a function of the set of documents, invariant when two of them swap roles.
    """

    size: int
    unsorted_hashes: np.ndarray  # uint64, (k,), in any order: a merge needs none
    unsorted_rows: np.ndarray  # float64, (k, columns), of the same documents

    @classmethod
    def draw(cls, id_keys: np.ndarray, rows: np.ndarray, seed: int, size: int = SAMPLE_SIZE) -> Sample:
        """The sample of one shard: int64 keys (documents,), rows (documents, columns)."""
        return cls._smallest(size, hash_for(id_keys, seed, _SAMPLE), np.asarray(rows, dtype=np.float64))

    @property
    def hashes(self) -> np.ndarray:
        """The hashes, uint64, ascending, (k,)."""
        return np.sort(self.unsorted_hashes)

    @property
    def rows(self) -> np.ndarray:
        """The rows by ascending hash: float64, (k, columns)."""
        return self.unsorted_rows[np.argsort(self.unsorted_hashes, kind="stable")]

    def __add__(self, other: Sample) -> Sample:
        """The sample of both; commutative and associative."""
        one, two, size = self, other, min(self.size, other.size)
        if one.unsorted_hashes.size >= size:  # most documents of a further shard are beyond a full sample
            two = two._below(one.unsorted_hashes.max())
        if two.unsorted_hashes.size >= size:
            one = one._below(two.unsorted_hashes.max())
        hashes = np.concatenate([one.unsorted_hashes, two.unsorted_hashes])
        return Sample._smallest(size, hashes, np.concatenate([one.unsorted_rows, two.unsorted_rows]))

    def _below(self, most: np.uint64) -> Sample:
        """The documents with hashes up to `most`."""
        inside = self.unsorted_hashes <= most
        return Sample(self.size, self.unsorted_hashes[inside], self.unsorted_rows[inside])

    @classmethod
    def _smallest(cls, size: int, hashes: np.ndarray, rows: np.ndarray) -> Sample:
        if hashes.size <= size:
            return cls(size, hashes, rows)
        last = np.partition(hashes, size - 1)[size - 1]
        inside = np.flatnonzero(hashes <= last)
        if inside.size > size:  # of equal hashes at the end, the first
            inside = inside[np.argsort(hashes[inside], kind="stable")[:size]]
        return cls(size, hashes[inside], rows[inside])


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The audit documents that Storey's estimate counts where documents depend on one another, by rank.

    At most `part` of each block of dependent documents are kept (`blocks.Sizes.part`).
    """

    part: int
    counts: np.ndarray  # int64, (ranks,)
    compared: int  # audit documents whose blocks are known, all or a sample
    scored: int  # all audit documents with scores

    def __add__(self, other: Kept) -> Kept:
        """The sum of both, of the same `part`."""
        compared, scored = self.compared + other.compared, self.scored + other.scored
        return Kept(self.part, self.counts + other.counts, compared, scored)


@dataclass(frozen=True, slots=True, eq=False)
class RankCounts:
    """Number of audit documents at each rank.

    `counts` is int64, read-only: index k - 1 holds the number of audit documents at rank k of the grid. By
    default the grid is uniform: `counts` has length n + 1, n is the number of calibration documents, and
    rank k is the p-value k / (n + 1). Counts are additive, so the order and the grouping of shards and retries
    do not affect a distributed count.

    Raises:
        ValueError: counts that are not integers, not one-dimensional, negative, of fewer than two ranks, or
            of another length than the grid.

    Example:
        >>> import numpy as np
        >>> counts = seenset.RankCounts(np.array([3, 0, 1, 0, 0, 0, 0, 0, 0, 1]))  # p-values 0.1, 0.2, ..., 1
        >>> counts.n, counts.m  # calibration documents, audit documents
        (9, 5)
        >>> counts.at_most(3)  # audit documents with p <= 0.3
        4
    """

    counts: np.ndarray
    spacing: Grid | None = None  # None: uniform
    kept: Kept | None = None  # None: no audit documents depend on one another

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts)
        if counts.ndim != 1 or counts.size < 2 or counts.dtype.kind not in "iu":
            raise ValueError(f"counts must be n + 1 >= 2 integers, got shape {counts.shape} of {counts.dtype}")
        if counts.min() < 0:
            raise ValueError("counts must not be negative")
        if self.spacing is not None and self.spacing.size != counts.size:
            raise ValueError(f"counts must be one a rank, got {counts.size} for {self.spacing.size} ranks")
        array = counts.astype(np.int64)
        array.flags.writeable = False
        object.__setattr__(self, "counts", array)

    @classmethod
    def empty(cls, against: int | Grid) -> RankCounts:
        """Zero counts, against n >= 1 calibration documents or over a grid."""
        if isinstance(against, Grid):
            return cls(np.zeros(against.size, dtype=np.int64), against)
        return cls(np.zeros(against + 1, dtype=np.int64))

    @classmethod
    def of(
        cls, ranks: np.ndarray, against: int | Grid, place: np.ndarray | None = None, part: int | None = None
    ) -> RankCounts:
        """Count ranks in any order, against n calibration documents (1..n + 1) or over a grid (1..size).

        Args:
            ranks: int, (documents,).
            against: number of calibration documents, or the grid of the ranks.
            place: int, (documents,), position of each in its block of dependent documents, from 0; -1: not known.
            part: documents of a block to keep, those at the first positions; None: documents are independent.

        Raises:
            ValueError: a rank outside its limits.
        """
        size = against.size if isinstance(against, Grid) else against + 1
        ranks = np.asarray(ranks, dtype=np.int64)
        if ranks.size and (ranks.min() < 1 or ranks.max() > size):
            raise ValueError(f"ranks must be in 1..{size}, got {ranks.min()}..{ranks.max()}")
        kept = None
        if place is not None and part is not None:
            counts = np.bincount(ranks[(place >= 0) & (place < part)] - 1, minlength=size)
            kept = Kept(part, counts, int(np.count_nonzero(place >= 0)), ranks.size)
        return cls(np.bincount(ranks - 1, minlength=size), against if isinstance(against, Grid) else None, kept)

    @property
    def grid(self) -> Grid:
        """The p-values of the ranks."""
        return Grid.uniform(self.n) if self.spacing is None else self.spacing

    @property
    def n(self) -> int:
        """Number of calibration documents."""
        return self.counts.size - 1 if self.spacing is None else self.spacing.n

    @property
    def m(self) -> int:
        """Number of audit documents, including quarantined ones."""
        return int(self.counts.sum())

    def at_most(self, k: int) -> int:
        """Number of audit documents at ranks 1..k (R_k); 0 for k = 0."""
        return int(self.counts[:k].sum())

    def __add__(self, other: RankCounts) -> RankCounts:
        """The sum of both; exact, commutative and associative.

        Raises:
            ValueError: they have different numbers of calibration documents or different grids.
        """
        if not isinstance(other, RankCounts):
            return NotImplemented
        if self.n != other.n:
            raise ValueError(f"cannot merge counts against {self.n} and {other.n} calibration documents")
        if self.spacing is not other.spacing and not self.grid.same_as(other.grid):
            raise ValueError("cannot merge counts over two different sets of p-values")
        kept = self.kept + other.kept if self.kept is not None and other.kept is not None else None
        return RankCounts(self.counts + other.counts, self.spacing, kept)

    def with_quarantined(self, q: int) -> RankCounts:
        """The counts with q additional audit documents at p = 1: they have no scores, but are hypotheses.

        Raises:
            ValueError: q is negative.
        """
        if q < 0:
            raise ValueError(f"the number of quarantined documents must not be negative, got {q}")
        counts = self.counts.copy()
        counts[-1] += q
        return RankCounts(counts, self.spacing, self.kept)

    def over(self, grid: Grid) -> RankCounts:
        """The same counts with the p-values of another grid of the same size, such as a `simes_grid`."""
        return RankCounts(self.counts, grid, self.kept)
