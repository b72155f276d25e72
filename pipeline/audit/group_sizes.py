"""How documents are spread over groups, and whether that leaves a bound of documents what it requires."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from pipeline.audit.copies import DEPENDENCE
from pipeline.audit.summary import Diagnostic
from pipeline.config.corpus import Role
from pipeline.config.selection import Direction
from pipeline.corpus.keys import Keys
from pipeline.report.wording.documents import grouped
from pipeline.selection.procedures import procedure_of

MOST_GROUPS = 1_000
"""Groups whose documents are counted: those with the smallest keys, which are drawn at random by the hash."""


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
        """The counts of both."""
        merged = dict(self.sizes)
        for key, size in other.sizes.items():
            merged[key] = merged.get(key, 0) + size
        documents, grouped = self.n_documents + other.n_documents, self.n_grouped + other.n_grouped
        return GroupSizes(_smallest(merged), documents, grouped)

    @property
    def breaks_bounds(self) -> bool:
        """Whether documents of one group could spread counts wider than a bound of independent documents allows."""
        counted = sum(self.sizes.values())
        if not counted:
            return False
        shared = self.n_grouped * sum(size**2 for size in self.sizes.values()) / counted
        return self.n_documents - self.n_grouped + shared > DEPENDENCE * self.n_documents


def _smallest(sizes: dict[int, int]) -> dict[int, int]:
    """The groups with the smallest keys: one that is among the smallest of all is among those of every part."""
    return sizes if len(sizes) <= MOST_GROUPS else {key: sizes[key] for key in heapq.nsmallest(MOST_GROUPS, sizes)}


NO_GROUPS = GroupSizes({}, 0, 0)


def group_diagnostic(
    procedure: str, direction: Direction, role: Role, audited: GroupSizes, calibrating: GroupSizes
) -> Diagnostic | None:
    """What groups take from the bounds of a selection; None where they leave them as they are.

    Args:
        procedure: of the selection; `bound` promises nothing but a bound.
        direction: what it seeks.
        role: whose documents calibrate.
        audited: groups of the audited documents.
        calibrating: groups of those that calibrate.
    """
    sides = {"audited": audited, role: calibrating}
    roles = [name for name, sizes in sides.items() if sizes.breaks_bounds]
    if not roles:
        return None
    ok = False if procedure_of(procedure).per_list else None
    return Diagnostic(ok=ok, sentence=grouped(roles, instead=direction == "members"))
