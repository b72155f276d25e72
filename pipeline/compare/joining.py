"""The documents of several runs side by side: a merge of sorted rows, of which only pieces stand in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline.audit.records import Record
from pipeline.errors import UserError
from pipeline.report.wording.comparison import shared_documents
from pipeline.store.pieces import SortedRows


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """Some of the documents of several runs, all rows of an id together."""

    shared: list[pa.Table]  # of each run, rows of the same documents in the same order
    only: list[pa.Table]  # of each run, rows whose id some other run lacks, or has with another text
    n_other_text: int  # ids that all runs have, and not with the same text
    n_repeated: list[int]  # of each run, rows that repeat an id


class Shared(Record):
    """How many documents several runs have in common."""

    n_documents: list[int] = Field(description="Audited documents of each run, each id once.")
    n_repeated: list[int] = Field(description="Rows of each run that repeat an id; they are in quarantine.")
    n_shared: int = Field(description="Documents that all runs audited: the same id, and the same text where scored.")
    n_other_text: int = Field(description="Ids that all runs audited, with texts that differ; they are not shared.")

    @property
    def alike(self) -> bool:
        """Whether all runs audited the same documents."""
        return set(self.n_documents) == {self.n_shared}

    def sentence(self) -> str:
        """How many documents the runs share."""
        return shared_documents(self.n_documents, self.n_shared, self.n_other_text)


def side_by_side(runs: Sequence[SortedRows]) -> Iterator[JoinedPart]:
    """The documents of several runs side by side, in the order of their ids; may be asked for several times.

    Args:
        runs: rows as `sorted_documents` gives them, sorted by doc_id.
    """
    heads = [_Head(rows.pieces(), rows.schema.empty_table()) for rows in runs]
    while True:
        for head in heads:
            head.fill()
        limits = [head.rows["doc_id"][-1].as_py() for head in heads if head.more is not None]
        parts = [head.take_below(min(limits)) if limits else head.take_all() for head in heads]
        if any(len(part) for part in parts):
            yield _part(parts)
        elif not limits:
            return
        else:  # one id fills a head: its other rows are still to come
            for head in heads:
                head.extend(min(limits))


@dataclass(slots=True)
class _Head:
    """The rows of a run that are next: some of them, sorted, and the piece behind them."""

    pieces: Iterator[pa.Table]
    rows: pa.Table
    more: pa.Table | None = None  # the next piece; None at the end
    begun: bool = False

    def fill(self) -> None:
        """Hold at least one row, and know whether there are more behind."""
        if not self.begun:
            self.begun, self.more = True, self._next()
        if not len(self.rows) and self.more is not None:
            self.rows, self.more = self.more, self._next()

    def extend(self, last: str) -> None:
        """Hold the next piece too, if the rows end with this id."""
        if self.more is not None and self.rows["doc_id"][-1].as_py() == last:
            self.rows, self.more = pa.concat_tables([self.rows, self.more]), self._next()

    def take_below(self, limit: str) -> pa.Table:
        """The rows whose id is less; they are no longer held."""
        count = pc.sum(pc.less(self.rows["doc_id"], pa.scalar(limit, pa.string()))).as_py() or 0
        taken, self.rows = self.rows.slice(0, count), self.rows.slice(count)
        return taken

    def take_all(self) -> pa.Table:
        """All rows; they are no longer held."""
        taken, self.rows = self.rows, self.rows.slice(len(self.rows))
        return taken

    def _next(self) -> pa.Table | None:
        return next((piece for piece in self.pieces if len(piece)), None)


def _part(parts: Sequence[pa.Table]) -> JoinedPart:
    single = [_once(part) for part in parts]
    ids = single[0]["doc_id"]
    places = [pc.index_in(ids, value_set=_array(part["doc_id"])) for part in single]
    common = np.ones(len(ids), dtype=bool)
    for place in places:
        common &= place.is_valid().to_numpy()
    rows = [part.take(_array(place.filter(pa.array(common)))) for part, place in zip(single, places, strict=True)]
    alike = _same_text(rows)
    shared = [part.filter(pa.array(alike)) for part in rows]
    known = _array(shared[0]["doc_id"])
    only = [part.filter(pc.invert(pc.is_in(part["doc_id"], value_set=known))) for part in single]
    repeated = [len(part) - len(one) for part, one in zip(parts, single, strict=True)]
    return JoinedPart(shared, only, int((~alike).sum()), repeated)


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _once(part: pa.Table) -> pa.Table:
    """One row an id: the one that was scored, if any; the others of an id are in quarantine."""
    if pc.count_distinct(part["doc_id"]).as_py() == len(part):
        return part
    part = part.sort_by([("doc_id", "ascending"), ("scored", "descending")])
    ids = _array(part["doc_id"])
    first = np.ones(len(part), dtype=bool)
    first[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    return part.filter(pa.array(first))


def _same_text(rows: Sequence[pa.Table]) -> np.ndarray:
    """Where the runs that scored a document read the same text: bool, (documents,)."""
    keys = np.stack([part["text_key"].to_numpy() for part in rows])
    scored = np.stack([part["scored"].to_numpy() for part in rows])
    first = keys[np.argmax(scored, axis=0), np.arange(keys.shape[1])]
    return np.asarray(((keys == first) | ~scored).all(axis=0))


def count_shared(runs: Sequence[SortedRows]) -> Shared:
    """How many documents runs have in common: one pass over their rows."""
    shared = other = 0
    repeated = np.zeros(len(runs), dtype=np.int64)
    for part in side_by_side(runs):
        shared += len(part.shared[0])
        other += part.n_other_text
        repeated += part.n_repeated
    counts = [len(rows) - int(count) for rows, count in zip(runs, repeated, strict=True)]
    return Shared(n_documents=counts, n_repeated=repeated.tolist(), n_shared=shared, n_other_text=other)


def refuse_different(shared: Shared, on_shared: bool) -> None:
    """Refuse runs that audited different documents, unless the shared ones alone are wanted.

    Raises:
        UserError: how many they share.
    """
    if not shared.n_shared:
        raise UserError(
            f"{shared.sentence()}: nothing can be compared; give both corpora an id column, or the same file names"
        )
    if not shared.alike and not on_shared:
        raise UserError(f"{shared.sentence()}: --shared answers for those alone")
