"""The documents of several runs side by side: rows that are sorted by id, of which only pieces stand in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline.audit.records import Record
from pipeline.audit.summary import Summary
from pipeline.compare.finished_runs import FinishedRun, documents_of
from pipeline.errors import UserError
from pipeline.report.wording.comparison import shared_documents
from pipeline.store.pieces import SortedRows

COLUMNS = (
    ("doc_id", pa.string()),
    ("run", pa.int32()),
    ("quarantined", pa.bool_()),
    ("p_value", pa.float64()),
    ("selected", pa.bool_()),
    ("text_key", pa.int64()),
)
"""Columns of joined rows before the scores."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPart:
    """Some of the documents of several runs, all rows of an id together."""

    shared: list[pa.Table]  # of each run, rows of the same documents in the same order
    n_other_text: int  # ids that all runs have, with texts that differ
    n_documents: np.ndarray  # int64, (runs,): different ids
    n_repeated: np.ndarray  # int64, (runs,): rows that repeat an id


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


class JoinedRuns:
    """The documents of several runs, sorted by id; rows beyond some thousands are on disk until `close`."""

    def __init__(self, runs: int, scores: int = 0) -> None:
        """Hold no documents yet.

        Args:
            runs: number of runs.
            scores: number of score columns.
        """
        self.runs = runs
        columns = [*COLUMNS, *((f"score_{index}", pa.float64()) for index in range(scores))]
        self._rows = SortedRows(pa.schema(columns), ["doc_id"])

    def add(self, run: int, documents: pa.Table) -> None:
        """Add documents of a run, from `documents_of`."""
        documents = documents.append_column("run", pa.array(np.full(len(documents), run, dtype=np.int32)))
        self._rows.add(documents.select(self._rows.schema.names).cast(self._rows.schema))

    def parts(self) -> Iterator[JoinedPart]:
        """All documents in the order of their ids; may be read several times."""
        waiting = self._rows.schema.empty_table()
        for piece in self._rows.pieces():
            waiting = pa.concat_tables([waiting, piece]).combine_chunks()
            if len(waiting):  # more rows of the last id may follow
                end = pc.index(waiting["doc_id"], waiting["doc_id"][-1]).as_py()
                yield _part(waiting.slice(0, end), self.runs)
                waiting = waiting.slice(end)
        yield _part(waiting, self.runs)

    def count(self) -> Shared:
        """How many documents the runs have in common: one pass over their rows."""
        shared = other = 0
        documents, repeated = np.zeros((2, self.runs), dtype=np.int64)
        for part in self.parts():
            shared += len(part.shared[0])
            other += part.n_other_text
            documents += part.n_documents
            repeated += part.n_repeated
        return Shared(n_documents=documents.tolist(), n_repeated=repeated.tolist(), n_shared=shared, n_other_text=other)

    def close(self) -> None:
        """Remove the temporary files."""
        self._rows.close()


@contextmanager
def joined_runs(
    runs: Sequence[FinishedRun], summaries: Sequence[Summary], scores: Sequence[Sequence[str]] | None = None
) -> Iterator[JoinedRuns]:
    """The audited documents of several runs.

    Args:
        runs: at least one.
        summaries: of a selection of each.
        scores: equally many detectors of each selection; None: no scores.

    Raises:
        UserError: as `documents_of`.
    """
    scores = [()] * len(runs) if scores is None else scores
    joined = JoinedRuns(len(runs), len(scores[0]))
    try:
        for place, (run, summary, columns) in enumerate(zip(runs, summaries, scores, strict=True)):
            for table in documents_of(run, summary, columns):
                joined.add(place, table)
        yield joined
    finally:
        joined.close()


def _part(rows: pa.Table, runs: int) -> JoinedPart:
    """What sorted rows hold, with all rows of their ids."""
    ids = rows["doc_id"].combine_chunks()
    number = np.zeros(len(rows), dtype=np.int64)  # of the id
    number[1:] = np.cumsum(pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False))
    order = np.lexsort((rows["quarantined"].to_numpy(), rows["run"].to_numpy(), number))
    rows, number = rows.take(pa.array(order)), number[order]
    places = rows["run"].to_numpy()
    first = np.ones(len(rows), dtype=bool)  # of an id in a run: the row that was scored, if one was
    first[1:] = (number[1:] != number[:-1]) | (places[1:] != places[:-1])
    number = number[first]
    common = rows.filter(pa.array(first)).filter(pa.array(np.bincount(number)[number] == runs))
    keys, quarantined = (common[name].to_numpy().reshape(-1, runs) for name in ("text_key", "quarantined"))
    scored_key = np.take_along_axis(keys, quarantined.argmin(axis=1)[:, None], axis=1)
    alike = ((keys == scored_key) | quarantined).all(axis=1)  # the runs that scored a document read the same text
    starts = np.flatnonzero(alike) * runs
    return JoinedPart(
        [common.take(pa.array(starts + run)) for run in range(runs)],
        int((~alike).sum()),
        np.bincount(places[first], minlength=runs),
        np.bincount(places[~first], minlength=runs),
    )


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
