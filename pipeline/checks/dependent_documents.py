"""Scored documents that depend on one another: near-duplicates and groups, and which of them calibrate an answer.

The checks `near_copies` and `groups` state what these do to a guarantee.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.checks.diagnostic import Diagnostic, DuplicateFamily, NearDuplicates
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.documents import id_key
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import SKETCH, Sketches, SketchFile, near_families
from pipeline.run.scored import PLACES, RoleRows, Scored, ShardMap
from pipeline.selection.blocks import EXCESS, INFLATION, NONE, Blocks, Dependence, Related, Sizes
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.folds import Answer
from pipeline.selection.procedures.estimating import STOREY
from pipeline.store.receipts import Receipt
from pipeline.wording import documents

DEPENDENCE = 1.05
"""Maximum ratio of documents to independent documents, by near-duplicates or groups, for which a bound is stated.

A bound assumes the spread of independent counts; this ratio widens it by 1/40.
"""

NAMED_FAMILIES = 10
NAMED_DUPLICATES = 5
LARGE = 5
"""Minimum size of a family for the test of whether it has documents in one role only."""

MOST_GROUPS = 1_000
"""Maximum number of groups to count: those with the smallest keys, a random sample by the hash."""

MOST = 1 << 22
"""Approximate maximum of compared audited documents; of more, a sample that keeps near-duplicates together."""

_FAMILIES = PLACES.append(pa.field("family", pa.int64()))


class GroupsDiagnostic(Diagnostic):
    """The effect of groups on the guarantee, and on bounds of numbers of documents."""

    n_selected_by_bh: int | None = Field(
        None, description="Documents that bh selects, where groups break the guarantee of the procedure only."
    )
    n_selected_by_storey: int | None = Field(
        None, description="Documents that storey selects, where groups break the guarantee of the procedure only."
    )
    bh_stands: bool = Field(True, description="Whether the groups leave the guarantee of bh as it is.")


class NearDuplicatesDiagnostic(Diagnostic):
    """Near-duplicates among the audited documents, and among those that calibrate."""

    audit: NearDuplicates = Field(description="Near-duplicates among the audited documents.")
    calibration: NearDuplicates = Field(description="Near-duplicates among the documents that calibrate.")
    n_selected_by_bh: int | None = Field(
        None,
        description="Documents that bh selects, where near-duplicates break the guarantee of the procedure only.",
    )
    n_selected_by_storey: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description="Documents that storey selects, where bh is stated; left out elsewhere.",
    )
    bh_stands: bool = Field(description="Whether the near-duplicates leave the guarantee of bh as it is.")


def near_duplicates_among(
    sketches: Sketches, threshold: float, whole: bool, ids_of: Callable[[Sequence[int]], Sequence[str]]
) -> tuple[NearDuplicates, np.ndarray]:
    """Find near-duplicates among documents.

    Args:
        sketches: sketches of the documents.
        threshold: minimum share of common runs of near-duplicates.
        whole: whether these are all documents of the role.
        ids_of: returns the ids of documents at ascending places.

    Returns:
        The record, and the family of each document: int64, (documents,).
    """
    family = near_families(sketches, threshold)
    sizes = np.bincount(family)
    several = np.flatnonzero(sizes > 1)
    largest = several[np.argsort(-sizes[several], kind="stable")][:NAMED_FAMILIES]
    members = {int(name): np.flatnonzero(family == name)[:NAMED_DUPLICATES] for name in largest}
    places = sorted({int(place) for some in members.values() for place in some})
    ids = dict(zip(places, ids_of(places), strict=True))
    record = NearDuplicates(
        n_documents=family.size,
        whole=whole,
        n_copies=int(sizes[several].sum()),
        n_families=several.size,
        largest=int(sizes.max(initial=0)),
        n_distinct=sizes.size,
        effective=round(family.size**2 / max(1, int(np.dot(sizes, sizes))), 1),
        families=[
            DuplicateFamily(size=int(sizes[name]), ids=[ids[int(at)] for at in some]) for name, some in members.items()
        ],
        n_large=int(np.count_nonzero(sizes >= LARGE)),
    )
    return record, family


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The sizes of the groups of a role."""

    sizes: dict[int, int]  # key of the group -> documents, of at most MOST_GROUPS groups
    n_documents: int
    n_grouped: int  # documents that have a group

    @classmethod
    def of(cls, group: np.ndarray) -> GroupSizes:
        """Count documents by their groups: int64, (documents,); NONE for none."""
        names, counts = np.unique(group[group != NONE], return_counts=True)
        sizes = dict(zip(names.tolist(), counts.tolist(), strict=True))
        return cls(_smallest(sizes), group.size, int(counts.sum()))

    @classmethod
    def of_names(cls, groups: pa.Array) -> GroupSizes:
        """Count documents by the names of their groups, as `of` counts them by `group_numbers`."""
        encoded = groups.dictionary_encode()
        keys = np.array([*map(id_key, encoded.dictionary.to_pylist()), NONE], dtype=np.int64)
        return cls.of(keys[encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)])

    def __add__(self, other: GroupSizes) -> GroupSizes:
        """The sum of both counts."""
        documents, grouped = self.n_documents + other.n_documents, self.n_grouped + other.n_grouped
        return GroupSizes(_smallest(Counter(self.sizes) + Counter(other.sizes)), documents, grouped)

    @property
    def breaks_bounds(self) -> bool:
        """Whether groups could spread counts wider than a bound of independent documents allows."""
        counted = sum(self.sizes.values())
        if not counted:
            return False
        shared = self.n_grouped * sum(size**2 for size in self.sizes.values()) / counted
        return self.n_documents - self.n_grouped + shared > DEPENDENCE * self.n_documents


def _smallest(sizes: dict[int, int]) -> dict[int, int]:
    """The groups with the smallest keys; the smallest of a union are among the smallest of its parts."""
    return sizes if len(sizes) <= MOST_GROUPS else {key: sizes[key] for key in heapq.nsmallest(MOST_GROUPS, sizes)}


NO_GROUPS = GroupSizes({}, 0, 0)


def near_duplicates_file(role: str) -> str:
    """Path of the list of near-duplicates among the documents of a role in a run directory."""
    return f"diagnostics/near-copies-{role}.parquet"


def read_sketches(
    scored: Scored, role: str, each: ShardMap, keep: np.ndarray | None = None, most: int | None = MOST
) -> Sketched:
    """Read the sketches of the scored documents of a role.

    Args:
        scored: the score shards.
        role: the role that is compared, without documents that adapters were trained on.
        each: reads the shards.
        keep: bool, (documents,), those that are compared; None: all.
        most: approximate maximum of compared documents, of more a sample; None: all are compared.
    """
    receipts = scored.of(role)
    total = sum(receipt.n_scored for receipt in receipts)
    below = 256 if most is None or total <= most else max(1, 256 * most // total)

    def of_shard(receipt: Receipt) -> tuple[str, np.ndarray, np.ndarray, np.ndarray, GroupSizes]:
        keys = scored.keys(receipt)
        places = np.flatnonzero(keys.sketch[:, SKETCH - 1] < below)  # keeps near-duplicates together
        group = group_numbers(keys)
        return receipt.shard, places, keys.sketch[places], np.stack([keys.id, group])[:, places], GroupSizes.of(group)

    file = SketchFile()
    read, groups = {}, NO_GROUPS
    for shard, some, sketches, numbers, sizes in each(receipts, of_shard):
        read[shard] = (some, file.append(sketches), numbers)
        groups += sizes
    places, filed, start = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)], 0
    related = [np.empty((2, 0), dtype=np.int64)]
    for receipt in receipts:  # in the order of the receipts, not of the reading
        inside, begin, numbers = read.pop(receipt.shard)
        every = start + inside
        kept = np.ones(inside.size, dtype=bool) if keep is None else keep[every]
        start += scored.count(receipt)
        places.append(every[kept])
        filed.append((begin + np.flatnonzero(kept)).astype(np.int32))
        related.append(numbers[:, kept])
    file.places = np.concatenate(filed)
    ids, group = np.concatenate(related, axis=1)
    return Sketched(file, below == 256, RoleRows(scored, role), np.concatenate(places), ids, group, groups)


def group_numbers(keys: Keys) -> np.ndarray:
    """The group of each document by a key that is equal for equal names, NONE for none: int64, (documents,)."""
    return np.where(keys.grouped, keys.group_keys(), NONE)


@dataclass(frozen=True, slots=True, eq=False)
class Sketched:
    """The documents of a role, to be compared by their sketches."""

    sketches: Sketches
    whole: bool  # whether these are all
    rows: RoleRows
    places: np.ndarray  # int64, (documents,), ascending: among all of the role
    keys: np.ndarray  # int64, (documents,), hashes of the ids
    group: np.ndarray  # int64, (documents,), from `group_numbers`
    groups: GroupSizes  # group sizes over all documents of the role

    def find_near_duplicates(self, near_copies: float) -> RoleDocuments:
        """Find near-duplicates among the documents.

        Args:
            near_copies: minimum share of common runs of near-duplicates.
        """
        record, family = near_duplicates_among(
            self.sketches, near_copies, self.whole, lambda some: self.rows.ids(self.places[some])
        )
        return RoleDocuments(record, Related(self.keys, family, self.group), self.places, self.groups)

    def list_near_duplicates(self, near_copies: float) -> RoleDocuments:
        """Find near-duplicates among the documents, and list them in `near_duplicates_file`."""
        documents = self.find_near_duplicates(near_copies)
        self._write_families(documents.related.family)
        return documents

    def _write_families(self, family: np.ndarray) -> None:
        """List the documents that have near-duplicates, family by family in the order of their first documents."""
        store, name = self.rows.scored.store, near_duplicates_file(self.rows.role)
        repeated = np.flatnonzero((np.bincount(family) > 1)[family])
        if not repeated.size:
            store.remove(name)
            return
        number = np.unique(family[repeated], return_inverse=True)[1].astype(np.int64)
        table = self.rows.of(self.places[repeated]).append_column("family", pa.array(number))
        order = np.argsort(number, kind="stable")
        store.write_table(name, table.take(pa.array(order)).cast(_FAMILIES))


@dataclass(frozen=True, slots=True, eq=False)
class RoleDocuments:
    """The compared documents of a role, and what makes them depend on one another."""

    record: NearDuplicates
    related: Related
    places: np.ndarray  # int64, (documents,), ascending: among all of the role
    groups: GroupSizes  # group sizes over all documents of the role

    @property
    def whole(self) -> bool:
        """Whether no document that is not compared can belong to a block of these."""
        return self.record.whole or not self.groups.n_grouped

    def families(self, count: int) -> np.ma.MaskedArray[Any, Any]:
        """The family of each of the `count` documents of the role, int64.

        Masked where it has no near-duplicate; NONE for audited documents that were not compared with the others.
        """
        family = np.full(count, 0 if self.record.whole else NONE, dtype=np.int64)
        alone = np.full(count, self.record.whole)
        family[self.places] = self.related.family
        alone[self.places] = (np.bincount(self.related.family) == 1)[self.related.family]
        return np.ma.MaskedArray(family, alone)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlaces:
    """The position of each audited document in its block, by shard."""

    begins: Mapping[str, int]  # shard -> number of documents before it
    at: np.ndarray  # int64, ascending: documents
    position: np.ndarray  # int64, their positions
    others: int  # position of all other documents

    @classmethod
    def of(cls, scored: Scored, audited: RoleDocuments, blocks: np.ndarray, seed: int) -> BlockPlaces:
        """Order the documents of each block by a hash of their ids.

        Args:
            scored: the score shards.
            audited: the compared documents.
            blocks: int64, (documents,), the block of each.
            seed: seed of the hash.
        """
        position = audited.related.places(blocks, seed)
        listed = np.arange(position.size) if not audited.record.whole else np.flatnonzero(position)
        begins, start = {}, 0
        for receipt in scored.of("audit"):
            begins[receipt.shard] = start
            start += scored.count(receipt)
        others = 0 if audited.record.whole else NONE
        return cls(begins, audited.places[listed], position[listed], others)

    def of_shard(self, shard: str, count: int) -> np.ndarray:
        """The positions of the documents of a shard: int64, (count,)."""
        begin = self.begins[shard]
        first, last = np.searchsorted(self.at, [begin, begin + count])
        position = np.full(count, self.others, dtype=np.int64)
        position[self.at[first:last] - begin] = self.position[first:last]
        return position


@dataclass(frozen=True, slots=True, eq=False)
class SelectionBlocks:
    """The blocks of the documents of one selection."""

    keep: np.ndarray  # bool, over the documents of the null role: whether they calibrate
    dependence: Dependence | None  # None: all documents are independent
    places: BlockPlaces | None  # None: the audited documents are independent
    learning: BlockPlaces | None  # places in the blocks of which one document may teach a learnt score
    calibrating: GroupSizes  # groups of the documents that calibrate

    @classmethod
    def of(
        cls,
        scored: Scored,
        selection: SelectionConfig,
        roles: tuple[RoleDocuments, RoleDocuments],
        keep: np.ndarray,
        seed: int,
    ) -> SelectionBlocks:
        """Find the blocks.

        Args:
            scored: the score shards.
            selection: the selection.
            roles: the audited documents and those of the null role.
            keep: bool, over the documents of the null role, those that may calibrate.
            seed: seed of the run.
        """
        audited, known = roles
        blocks = Blocks.of(audited.related, known.related, calibration_of(selection.calibration).grouped)
        kept, blocks = blocks.calibrating_in(selection, known.related, seed)
        dependence = blocks.dependence(audited.whole)
        calibrating = known.groups
        if not kept.all():
            keep = np.zeros_like(keep)
            keep[known.places[kept]] = True
            calibrating = GroupSizes.of(known.related.group[kept])
        places = learning = None
        if dependence is not None and dependence.in_audit:
            places, learning = (BlockPlaces.of(scored, audited, of, seed) for of in (blocks.audited, blocks.learning))
        return cls(keep, dependence, places, learning, calibrating)


def is_dependent(answer: Answer) -> bool:
    """Whether documents that depend on one another contradict the guarantee of an answer."""
    dependence = answer.dependence
    return dependence is not None and (dependence.factor > INFLATION or is_unsafe(answer, dependence.audited))


def is_unsafe(answer: Answer, blocks: Sizes) -> bool:
    """Whether dependent documents make an answer's estimate of the share of nulls unsafe.

    Args:
        answer: the answer.
        blocks: blocks of the audited documents.
    """
    return answer.nulls is not None and blocks.excess(*answer.nulls) > EXCESS


def breaks_bounds(*roles: NearDuplicates) -> bool:
    """Whether near-duplicates within any of these roles spread counts wider than a bound of independent ones allows.

    Those among calibration documents count too, because they shift the ranks of all audited documents.
    """
    return any(duplicates.n_documents > DEPENDENCE * duplicates.effective for duplicates in roles)


# --- sentences that both checks share


def answers_that_hold(answer: Answer, what: str) -> list[str]:
    """What bh and storey select, whose guarantees hold, in one sentence; empty where it is not known of bh.

    Args:
        answer: an answer that dependent documents contradict.
        what: the dependent documents, such as "near-duplicates".
    """
    n_bh, n_storey = answer.n_bh, selected_by_storey(answer)
    if n_bh is None:
        return []
    if n_storey is None:
        return [f"The guarantee of bh holds with {what} among the audited documents; bh selects {n_bh:,}."]
    return [
        f"The guarantees of bh and storey hold with {what} among the audited documents; bh selects {n_bh:,}, storey "
        f"{n_storey:,}."
    ]


def selected_by_storey(answer: Answer) -> int | None:
    """The number of documents that storey selects; None where it is not the strict procedure beside an answer."""
    return answer.strict.n_selected if answer.strict.procedure == STOREY.name else None


def estimate_by_blocks(selection: SelectionConfig, answer: Answer, dependence: Dependence) -> list[str]:
    """How the estimate of the share of nulls allows for dependent documents; empty where there is no such estimate."""
    counts = answer.counts
    if counts is None or counts.kept is None or answer.n_bh is None or answer.nulls is not None:
        return []
    kept = counts.kept
    left_out = kept.compared - int(kept.counts.sum())
    null = "not trained on" if selection.direction == "members" else "trained on"
    rest = f", and takes the other {documents(left_out)} as {null}" if left_out else ""
    sample = " It is that of a sample of the audited documents, in which blocks may be smaller."
    return [
        f"The estimate of the share of nulls counts at most {documents(kept.part)} of each block (a group, a family of "
        f"near-duplicates, or what both join){rest}.{'' if dependence.whole else sample}"
    ]


DependenceDiagnostic = NearDuplicatesDiagnostic | GroupsDiagnostic


def what_holds(failures: Sequence[DependenceDiagnostic], n_audit: int) -> str | None:
    """What bh and storey select of n_audit documents, where these checks alone failed; None where neither holds."""
    by_bh = next((check.n_selected_by_bh for check in failures), None)
    if by_bh is None or not all(check.bh_stands for check in failures):
        return None
    by_storey = next((check.n_selected_by_storey for check in failures), None)
    storey = "" if by_storey is None else f", storey {by_storey:,}"
    names = "bh" if by_storey is None else "bh and of storey"
    return (
        f"The finite-sample guarantee of {names} holds with these dependent documents: bh selects {by_bh:,}{storey} of "
        f"{n_audit:,}."
    )


_ONE_PER_BLOCK = "Select with calibrate: one_per_block, which calibrates on one {role} document of each block"
_BH_OR_STOREY = "procedure bh or storey, whose lists need no independent audited documents"


def after_dependence(failed: Mapping[str, DependenceDiagnostic], role: str) -> str:
    """The next step where dependent documents contradict a selection.

    Args:
        failed: failed checks by what joins the documents.
        role: the role whose documents calibrate.
    """
    if all(check.bh_stands for check in failed.values()):
        return f"Select by {_BH_OR_STOREY}, or keep one document of each {next(iter(failed))} and make a new run."
    unsafe = any(check.n_selected_by_bh is not None for check in failed.values())
    return f"{_ONE_PER_BLOCK.format(role=role)}{f', and by {_BH_OR_STOREY}' if unsafe else ''}."
