"""Near-duplicates within one role: how many, in which families, and how many independent documents they amount to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import Field

from pipeline.audit.records import Record
from pipeline.corpus.near_copies import Sketches, near_families

DEPENDENCE = 1.05
"""Documents over the independent ones that near-duplicates or groups leave: the most with which a bound is stated.

A bound assumes the spread of independent counts; this many more widen it by a fortieth.
"""

NAMED_FAMILIES = 10
NAMED_COPIES = 5
LARGE = 5
"""Documents of a family, at least, for a test of whether it has documents in one role only."""


class CopyFamily(Record):
    """Documents that are near-duplicates of one another, directly or through others."""

    size: int = Field(description="Documents of the family.")
    ids: list[str] = Field(description="Ids of the first of them.")


class NearCopies(Record):
    """Near-duplicates among the documents of one role."""

    n_documents: int = Field(description="Documents that were compared.")
    whole: bool = Field(description="Whether these are all; else a sample that keeps near-duplicates together.")
    n_copies: int = Field(description="Of these, those that have a near-duplicate among the others.")
    n_families: int = Field(description="Families of near-duplicates, of two documents or more.")
    largest: int = Field(
        description="Documents of the largest family; 1 where there are no near-duplicates, 0 for none."
    )
    n_distinct: int = Field(description="Documents that remain if one of each family is kept.")
    effective: float = Field(
        description="Independent documents that a mean over all of them is worth: (sum of sizes)^2 / sum of sizes^2."
    )
    families: list[CopyFamily] = Field(description="The largest families.")
    n_large: int = Field(0, description="Families of at least 5 documents.")


def near_copies_among(
    sketches: Sketches, threshold: float, whole: bool, ids_of: Callable[[Sequence[int]], Sequence[str]]
) -> tuple[NearCopies, np.ndarray]:
    """Find near-duplicates among documents.

    Args:
        sketches: of the documents.
        threshold: the share of common runs from which documents are near-duplicates.
        whole: whether these are all documents of the role.
        ids_of: ids of documents by their places, ascending.

    Returns:
        The record, and the family of each document: int64, (documents,).
    """
    family = near_families(sketches, threshold)
    sizes = np.bincount(family)
    several = np.flatnonzero(sizes > 1)
    largest = several[np.argsort(-sizes[several], kind="stable")][:NAMED_FAMILIES]
    members = {int(name): np.flatnonzero(family == name)[:NAMED_COPIES] for name in largest}
    places = sorted({int(place) for some in members.values() for place in some})
    ids = dict(zip(places, ids_of(places), strict=True))
    record = NearCopies(
        n_documents=family.size,
        whole=whole,
        n_copies=int(sizes[several].sum()),
        n_families=several.size,
        largest=int(sizes.max(initial=0)),
        n_distinct=sizes.size,
        effective=round(family.size**2 / max(1, int(np.dot(sizes, sizes))), 1),
        families=[
            CopyFamily(size=int(sizes[name]), ids=[ids[int(place)] for place in some]) for name, some in members.items()
        ],
        n_large=int(np.count_nonzero(sizes >= LARGE)),
    )
    return record, family
