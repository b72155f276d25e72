"""Near-duplicates and groups among scored documents, and the guarantees for independent documents that they break."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.audit.scored import PLACES, Each, RoleRows, Scored
from pipeline.audit.summary import Diagnostic, DuplicateFamily, NearDuplicates, NearDuplicatesDiagnostic
from pipeline.config.corpus import Role
from pipeline.config.selection import Direction
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import SKETCH, Sketches, SketchFile, near_families
from pipeline.report.wording import documents as wording
from pipeline.report.wording.documents import grouped
from pipeline.selection.guarantees import beside
from pipeline.selection.procedures import procedure_of
from pipeline.store.receipts import Receipt

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
"""Approximate maximum of compared documents of a role; of more, a sample that keeps near-duplicates together."""

EXCESS = 1 / 240
"""Maximum of 1 / independent documents - 1 / documents that leaves `storey` within 5% of its error rate.

In simulations the FDR of `storey` grows by about twelve times this difference, as a share of alpha
(`tests/statistical/test_copies_validity.py`).
"""

INFLATION = 1.1
"""Maximum factor by which p-values may be too small before the guarantee counts as contradicted."""

_FAMILIES = PLACES.append(pa.field("family", pa.int64()))


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
    def of(cls, keys: Keys) -> GroupSizes:
        """Count the documents of one shard."""
        names, counts = np.unique(keys.group_keys()[keys.grouped], return_counts=True)
        sizes = dict(zip(names.tolist(), counts.tolist(), strict=True))
        return cls(_smallest(sizes), len(keys), int(counts.sum()))

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


def group_diagnostic(
    procedure: str, direction: Direction, role: Role, audited: GroupSizes, calibrating: GroupSizes
) -> Diagnostic | None:
    """The effect of groups on the bounds of a selection; None where there is none.

    Args:
        procedure: the selection's procedure; `bound` guarantees only a bound.
        direction: the selection's direction.
        role: the role whose documents calibrate.
        audited: groups of the audited documents.
        calibrating: groups of the calibration documents.
    """
    sides = {"audited": audited, role: calibrating}
    roles = [name for name, sizes in sides.items() if sizes.breaks_bounds]
    if not roles:
        return None
    ok = False if procedure_of(procedure).per_list else None
    return Diagnostic(ok=ok, sentence=grouped(roles, instead=direction == "members"))


def near_duplicates_file(role: str) -> str:
    """Path of the list of near-duplicates among the documents of a role in a run directory."""
    return f"diagnostics/near-copies-{role}.parquet"


def read_sketches(scored: Scored, role: str, each: Each, keep: np.ndarray | None = None, most: int = MOST) -> Sketched:
    """Read the sketches of the scored documents of a role.

    Args:
        scored: the score shards.
        role: the role that is compared, without documents that adapters were trained on.
        each: reads the shards.
        keep: bool, (documents,), those that are compared; None: all.
        most: approximate maximum of compared documents; more are sampled.
    """
    receipts = scored.of(role)
    total = sum(receipt.n_scored for receipt in receipts)
    below = 256 if total <= most else max(1, 256 * most // total)

    def of_shard(receipt: Receipt) -> tuple[str, np.ndarray, np.ndarray, GroupSizes]:
        keys = scored.keys(receipt)
        places = np.flatnonzero(keys.sketch[:, SKETCH - 1] < below)  # keeps near-duplicates together
        return receipt.shard, places, keys.sketch[places], GroupSizes.of(keys)

    file = SketchFile()
    read, groups = {}, NO_GROUPS
    for shard, some, sketches, sizes in each(receipts, of_shard):
        read[shard] = (some, file.append(sketches))
        groups += sizes
    places, filed, start = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)], 0
    for receipt in receipts:  # in the order of the receipts, not of the reading
        inside, begin = read.pop(receipt.shard)
        every = start + inside
        kept = np.ones(inside.size, dtype=bool) if keep is None else keep[every]
        start += scored.count(receipt)
        places.append(every[kept])
        filed.append((begin + np.flatnonzero(kept)).astype(np.int32))
    file.places = np.concatenate(filed)
    return Sketched(file, below == 256, RoleRows(scored, role), np.concatenate(places), groups)


@dataclass(frozen=True, slots=True, eq=False)
class Sketched:
    """The documents of a role, to be compared by their sketches."""

    sketches: Sketches
    whole: bool  # whether these are all
    rows: RoleRows
    places: np.ndarray  # int64, (documents,), ascending: among all of the role
    groups: GroupSizes  # group sizes over all documents of the role

    def find_near_duplicates(self, near_copies: float) -> NearDuplicates:
        """Find near-duplicates among the documents, and list them in `near_duplicates_file`.

        Args:
            near_copies: minimum share of common runs of near-duplicates.
        """
        record, family = near_duplicates_among(
            self.sketches, near_copies, self.whole, lambda some: self.rows.ids(self.places[some])
        )
        self._write_families(family)
        return record

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


def near_duplicates_diagnostic(
    procedure: str, n_bh: int | None, role: str, audit: NearDuplicates, calibration: NearDuplicates, alone: bool = True
) -> NearDuplicatesDiagnostic:
    """The effect of near-duplicates on a selection's guarantee.

    Clusters of near-duplicates among the audited documents make an estimate of the share of nulls noisier than its
    procedure assumes. Clusters among those that calibrate make p-values too small: n documents of N families give
    P(p <= t) <= t (n + 1) / (N + 1), and near that at t = 1 / (n + 1).

    Args:
        procedure: the selection's procedure.
        n_bh: documents that bh selects; None where the procedure does not estimate the share of nulls.
        role: the role whose documents calibrate.
        audit: near-duplicates among the audited documents.
        calibration: near-duplicates among the calibration documents.
        alone: whether no other check contradicts the selection; bh is no remedy where one does.
    """
    unsafe = n_bh is not None and is_unsafe(audit)
    factor = inflation(calibration)
    sentences = [wording.counted(audit, "audited documents")]
    if unsafe:
        sentences.append(wording.too_few_independent(audit.effective, procedure))
    if n_bh is not None and unsafe and alone and factor <= INFLATION:
        sentences.append(wording.bh_holds(n_bh))
    sentences.append(wording.counted(calibration, wording.that_calibrate(role)))
    if calibration.n_copies:
        sentences.append(wording.small_p_values(calibration.n_distinct, beside(factor, INFLATION)))
    unbounded = breaks_bounds(audit, calibration)
    if unbounded:
        sentences.append(wording.NO_BOUND)
    failed = unsafe or factor > INFLATION or (procedure_of(procedure).per_list and unbounded)
    return NearDuplicatesDiagnostic(
        ok=False if failed else None if audit.n_copies or calibration.n_copies else True,
        sentence=" ".join(sentences),
        audit=audit,
        calibration=calibration,
        n_selected_by_bh=n_bh if unsafe else None,
        bh_stands=factor <= INFLATION,
    )


def is_unsafe(audit: NearDuplicates) -> bool:
    """Whether near-duplicates leave too few independent documents for an estimate of the share of nulls."""
    return audit.n_documents > 0 and 1 / audit.effective - 1 / audit.n_documents > EXCESS


def breaks_bounds(*roles: NearDuplicates) -> bool:
    """Whether near-duplicates within any of these roles spread counts wider than a bound of independent ones allows.

    Those among calibration documents count too, because they shift the ranks of all audited documents.
    """
    return any(duplicates.n_documents > DEPENDENCE * duplicates.effective for duplicates in roles)


def inflation(calibration: NearDuplicates) -> float:
    """Upper limit of the factor by which near-duplicates among calibration documents make p-values too small."""
    return (calibration.n_documents + 1) / (calibration.n_distinct + 1)
