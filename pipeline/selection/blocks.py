"""Blocks of dependent documents: families of near-duplicates, groups, and what both join.

Their sizes, and no scores, determine how many documents of each block enter Storey's estimate of the share of nulls, by
how much dependent calibration documents can shrink p-values, and which documents calibrate with `one_per_block`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.config.selection import SelectionConfig
from pipeline.selection.collection import joined_blocks
from pipeline.selection.conformal import BLOCKS, hash_for

STRATUM = 3
"""Maximum ratio of a group's share of the calibration documents to its share of the audited ones for which its
calibration documents are independent: a group of both roles is then a stratum, such as a language."""

INFLATION = Fraction(11, 10)
"""Maximum factor by which p-values may be too small before a guarantee counts as contradicted."""

EXCESS = Fraction(1, 20)
"""Maximum relative variance that blocks may add to an estimate of the share of nulls that does not allow for them."""

NONE = -1
"""Group of a document without one, and position of a document whose block is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class Related:
    """What makes documents of one role depend on one another."""

    keys: np.ndarray  # int64, (documents,), hashes of the ids
    family: np.ndarray  # int64, (documents,), from 0: equal for near-duplicates
    group: np.ndarray  # int64, (documents,), equal for equal groups in every role; NONE for none

    @classmethod
    def of(cls, keys: np.ndarray, family: np.ndarray | None = None, group: np.ndarray | None = None) -> Related:
        """Documents with their families and groups; by default each is its own family, and none has a group."""
        alone, none = np.arange(keys.size, dtype=np.int64), np.full(keys.size, NONE, dtype=np.int64)
        return cls(keys, alone if family is None else family, none if group is None else group)

    def take(self, chosen: np.ndarray) -> Related:
        """Some of the documents, by a bool mask or int64 positions."""
        family = np.unique(self.family[chosen], return_inverse=True)[1].astype(np.int64)
        return Related(self.keys[chosen], family, self.group[chosen])

    def blocks(self, joins: np.ndarray | None = None) -> np.ndarray:
        """The block of each document, int64, (documents,), from 0.

        Args:
            joins: int64, the groups whose documents form one block; None: groups join no documents.
        """
        inside = np.zeros(self.keys.size, dtype=bool) if joins is None else np.isin(self.group, joins)
        if not inside.any():
            return self.family
        number = np.full(self.keys.size, NONE, dtype=np.int64)
        number[inside] = np.unique(self.group[inside], return_inverse=True)[1]
        return joined_blocks(self.family, number)

    def places(self, blocks: np.ndarray, seed: int) -> np.ndarray:
        """The position of each document in its block by a hash of its id, from 0: int64, (documents,)."""
        position = np.zeros(blocks.size, dtype=np.int64)
        several = np.flatnonzero((np.bincount(blocks) > 1)[blocks]) if blocks.size else np.empty(0, dtype=np.int64)
        keys, block = self.keys[several], blocks[several]
        order = np.lexsort((keys, hash_for(keys, seed, BLOCKS), block))
        ordered = block[order]
        begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: ordered.size])
        sizes = np.diff(np.r_[begins, ordered.size])
        position[several[order]] = np.arange(ordered.size) - np.repeat(begins, sizes)
        return position


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the blocks of some documents."""

    counts: Mapping[int, int]  # size -> number of blocks

    @classmethod
    def of(cls, blocks: np.ndarray) -> Sizes:
        """Count the blocks of documents: int64, (documents,), from 0."""
        counts = np.bincount(np.bincount(blocks))
        return cls({int(size): int(counts[size]) for size in np.flatnonzero(counts) if size})

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(size * count for size, count in self.counts.items())

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(self.counts.values())

    @property
    def largest(self) -> int:
        """Documents of the largest block; 0 without documents."""
        return max(self.counts, default=0)

    @property
    def pairs(self) -> int:
        """Ordered pairs of different documents of one block."""
        return sum(size * (size - 1) * count for size, count in self.counts.items())

    def part(self, t: Fraction) -> int:
        """Maximum number c of documents of a block that enter Storey's estimate at the cut t: 1 for single documents.

        c is the smallest number >= 1 that at most 1 / (1 - t) blocks exceed, which minimises the estimate without
        members and with all p-values above t: c / (1 - t) plus the documents that are left out.
        """
        above = self.blocks
        for size in [1, *sorted(self.counts)]:
            above = sum(count for other, count in self.counts.items() if other > size)
            if above * (1 - t) <= 1:
                return size
        return max(1, self.largest)

    def left_out(self, part: int) -> int:
        """Documents that exceed `part` in their block."""
        return sum(max(0, size - part) * count for size, count in self.counts.items())

    def excess(self, t: Fraction, nulls: Fraction) -> Fraction:
        """Relative variance that blocks add to an estimate of the share of nulls if the documents of each agree.

        Args:
            t: cut of Storey's estimate, in (0, 1).
            nulls: estimated number of nulls among the documents, > 0.
        """
        return self.pairs * t / ((1 - t) * nulls**2)


@dataclass(frozen=True, slots=True)
class Dependence:
    """How documents of a selection depend on one another, by families of near-duplicates alone and with groups."""

    families: Sizes  # of the audited documents
    audited: Sizes  # of the audited documents, with groups
    n_calibration: int
    n_blocks: int  # of the calibration documents, with groups
    n_families: int  # of the calibration documents
    factor: Fraction  # maximum factor by which p-values are too small
    family_factor: Fraction  # the same by families alone
    whole: bool = True  # False: audited documents were sampled, and groups may have others that were not

    @property
    def joined(self) -> bool:
        """Whether groups join documents that are not near-duplicates."""
        return self.audited.blocks < self.families.blocks or self.n_blocks < self.n_families

    @property
    def in_audit(self) -> bool:
        """Whether audited documents depend on one another; also where a sample may have cut their groups."""
        return self.audited.largest > 1 or not self.whole

    def part(self, t: Fraction) -> int | None:
        """`Sizes.part` of the audited documents; None where they are independent."""
        return self.audited.part(t) if self.in_audit else None


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of the documents of a selection.

    A group of one role joins its documents. A group of both roles is a stratum under calibration by group, and joins
    none. Under other calibrations its audited documents are one block, and its calibration documents are one unless
    its share of them is at most STRATUM times its share of the audited documents.

    A learnt score is drawn to audited documents that are like one another and unlike the calibration documents: to
    families, and to groups whose share of the audited documents is more than STRATUM times that of the others.
    """

    audited: np.ndarray  # int64, (audited documents,), from 0
    calibrating: np.ndarray  # int64, (calibration documents,), from 0
    families: tuple[np.ndarray, np.ndarray]  # the same by families alone, of either
    learning: np.ndarray  # int64, (audited documents,), from 0: of each of these one may teach a learnt score
    strata: np.ndarray | None  # under calibration by group, int64, (calibration documents,): groups with audited ones

    @classmethod
    def of(cls, audited: Related, known: Related, by_group: bool) -> Blocks:
        """Find the blocks of audited and of calibration documents.

        Args:
            audited: the audited documents with scores, or a sample of them.
            known: the documents that calibrate.
            by_group: whether documents are ranked within their groups.
        """
        names = np.unique(np.r_[audited.group, known.group])
        names = names[names != NONE]
        m, n = (
            np.bincount(np.searchsorted(names, one.group[one.group != NONE]), minlength=names.size)
            for one in (audited, known)
        )
        if by_group:
            joins = names[n == 0], names[m == 0]
        else:
            joins = names, names[n * max(1, audited.keys.size) > STRATUM * m * known.keys.size]
        alone = names[m * max(1, known.keys.size) > STRATUM * n * audited.keys.size]
        blocks = audited.blocks(joins[0]), known.blocks(joins[1])
        strata = np.where(np.isin(known.group, names[m > 0]), known.group, NONE) if by_group else None
        return cls(*blocks, (audited.family, known.family), audited.blocks(alone), strata)

    def calibrating_in(self, selection: SelectionConfig, known: Related, seed: int) -> tuple[np.ndarray, Blocks]:
        """The calibration documents of a selection, bool, (calibration documents,), and the blocks of these.

        Args:
            selection: with `calibrate: one_per_block`, one document of each block, by a hash of its id.
            known: the calibration documents.
            seed: seed of the hash.
        """
        if selection.calibrate == "all":
            return np.ones(self.calibrating.size, dtype=bool), self
        kept = known.places(self.calibrating, seed) == 0
        return kept, self._thinned(kept)

    def _thinned(self, kept: np.ndarray) -> Blocks:
        """The same with a part of the calibration documents: bool, (calibration documents,)."""
        whole = self.calibrating, self.families[1]
        calibrating, family = (np.unique(one[kept], return_inverse=True)[1] for one in whole)
        strata = None if self.strata is None else self.strata[kept]
        return Blocks(self.audited, calibrating, (self.families[0], family), self.learning, strata)

    def dependence(self, whole: bool = True) -> Dependence | None:
        """The sizes of the blocks; None where no documents depend on one another.

        Args:
            whole: whether these are all audited documents, or groups join none of the others.
        """
        dependence = Dependence(
            families=Sizes.of(self.families[0]),
            audited=Sizes.of(self.audited),
            n_calibration=self.calibrating.size,
            n_blocks=np.unique(self.calibrating).size,
            n_families=np.unique(self.families[1]).size,
            factor=self._factor(self.calibrating),
            family_factor=self._factor(self.families[1]),
            whole=whole,
        )
        return dependence if dependence.in_audit or dependence.n_blocks < dependence.n_calibration else None

    def _factor(self, block: np.ndarray) -> Fraction:
        """(documents + 1) / (blocks + 1) of the calibration documents; by group, the largest of the groups."""
        if self.strata is None:
            return Fraction(block.size + 1, np.unique(block).size + 1)
        stratum, n = np.unique(self.strata, return_counts=True)
        pairs = np.unique(np.stack([self.strata, block]), axis=1)
        blocks = np.unique(pairs[0], return_counts=True)[1]
        factors = [Fraction(int(a) + 1, int(b) + 1) for s, a, b in zip(stratum, n, blocks, strict=True) if s != NONE]
        return max(factors, default=Fraction(1))
