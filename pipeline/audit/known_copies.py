"""What the search for near copies has listed of single documents: nothing is searched anew."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.audit.dependence import copies_file
from pipeline.store.files import Store

NAMED = 10
"""Near copies of a document that are named, at most."""

Place = tuple[str, int]
"""Of an audited document: its input and the number of its row there."""


def families_of(store: Store, places: Collection[Place]) -> dict[Place, list[str]]:
    """The first other audited documents of the family of each document, by id; none where it has no near copy.

    A family is of near copies, and of near copies of these. Memory holds a batch of the list.

    Args:
        store: the run directory, in which the near copies are listed.
        places: of the documents.
    """
    name = copies_file("audit")
    if not places or not store.exists(name):
        return {}
    rows = np.unique([row for _, row in places])
    family: dict[Place, int] = {}
    for batch in _batches(store, name):
        near = batch.filter(pa.array(np.isin(batch["row"].to_numpy(), rows)))
        for source, row, number in _tuples(near, ["source", "row", "family"]):
            if (source, row) in places:
                family[source, row] = number
    wanted = np.unique(list(family.values())).astype(np.int64)
    members: dict[int, list[tuple[Place, str]]] = {int(number): [] for number in wanted}
    for batch in _batches(store, name) if members else ():
        of_these = batch.filter(pa.array(np.isin(batch["family"].to_numpy(), wanted)))
        for doc_id, source, row, number in _tuples(of_these, ["doc_id", "source", "row", "family"]):
            if len(members[number]) <= NAMED:
                members[number].append(((source, row), doc_id))
    return {
        place: [doc_id for other, doc_id in members[number] if other != place][:NAMED]
        for place, number in family.items()
    }


def _batches(store: Store, name: str) -> Iterator[pa.Table]:
    with store.fs.open(store.path(name), "rb") as file:
        for batch in pq.ParquetFile(file).iter_batches():
            yield pa.Table.from_batches([batch])


def _tuples(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple]:
    return zip(*(table[column].to_pylist() for column in columns), strict=True)
