"""Which rows of a shard were selected and which could not be scored, as its verdicts state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.audit.digests import VerdictTables
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, UserError
from pipeline.export.request import ExportQuestion
from pipeline.stages import SCORING
from pipeline.store.receipts import Receipt, read_receipts


@dataclass(frozen=True, slots=True, eq=False)
class ShardVerdicts:
    """What became of the documents of a shard, in the order of their rows."""

    ids: pa.Array  # strings, (documents,)
    rows: np.ndarray  # int64, (documents,): of the input, ascending
    selected: np.ndarray  # bool, (documents,)
    scored: np.ndarray  # bool, (documents,)

    @classmethod
    def of(cls, table: pa.Table) -> ShardVerdicts:
        """Those that a file of verdicts holds."""
        table = table.sort_by("row").combine_chunks()
        scored = pc.is_valid(table.column(3))  # the first detector's scores
        columns = (table["row"], table["selected"], scored)
        return cls(table["doc_id"], *(column.to_numpy() for column in columns))

    def kept(self, question: ExportQuestion) -> np.ndarray:
        """Which documents an export keeps, bool, (documents,)."""
        if question.keeps_selected:
            return self.selected
        return ~self.selected if question.keeps_quarantined else ~self.selected & self.scored


@dataclass(frozen=True, slots=True)
class AnsweredRun:
    """The receipts of a finished run's audited shards, by shard, and the verdicts on their documents."""

    question: ExportQuestion
    receipts: dict[str, Receipt]
    tables: VerdictTables

    def verdicts(self, shard: Shard) -> ShardVerdicts:
        """The verdicts on the documents of a shard.

        Raises:
            DamagedError: their file is gone, or was changed.
        """
        return ShardVerdicts.of(self.tables.read(shard.id))

    def runs(self, shards: Iterable[Shard]) -> Iterator[np.ndarray]:
        """The rows that count in copying: those that are kept, or those that are left out where the rest is kept."""
        for shard in shards:
            verdicts = self.verdicts(shard)
            kept = verdicts.kept(self.question)
            yield verdicts.rows[kept if self.question.keeps_selected else ~kept]


def read_answered(question: ExportQuestion) -> AnsweredRun:
    """The receipts of a run, all of whose audited documents were judged.

    Raises:
        IncompleteError: a shard is not scored.
        UserError: a damaged receipt, or an answer that was made from other scores.
    """
    wanted = {shard.id for shard in question.shards}
    receipts = {r.shard: r for r in read_receipts(question.store, SCORING) if r.shard in wanted}
    if missing := sorted(wanted - receipts.keys()):
        raise IncompleteError(f"run {question.store.url}: {len(missing)} shards are not scored, first {missing[0]}")
    judged = sum(receipt.n_judged for receipt in receipts.values())
    if judged and not question.keeps_selected:
        raise UserError(
            f"{judged:,} documents of run {question.store.url} were judged by earlier runs (against), and what is kept "
            "of those only their answers tell: export those runs, or what this run has selected"
        )
    tables = VerdictTables.of(question.store, question.summary.name, receipts.values())
    return AnsweredRun(question, receipts, tables)


class RowMarks:
    """Which rows of an input an export keeps, gone through once and in order; memory holds the rows of one shard."""

    def __init__(self, runs: Iterable[np.ndarray], keeps: bool) -> None:
        """Begin at the first row.

        Args:
            runs: rows, int64, ascending within a run and over all of them.
            keeps: whether these rows are kept, or left out.
        """
        self._runs = iter(runs)
        self._rows = np.empty(0, dtype=np.int64)
        self._keeps = keeps
        self._next = 0

    def following(self, count: int) -> np.ndarray:
        """Whether each of the next rows is kept, bool, (count,)."""
        start, stop = self._next, self._next + count
        self._next = stop
        flags = np.full(count, not self._keeps)
        while True:
            met = int(np.searchsorted(self._rows, stop))
            flags[self._rows[:met] - start] = self._keeps
            self._rows = self._rows[met:]
            if self._rows.size:
                return flags
            run = next(self._runs, None)
            if run is None:
                return flags
            self._rows = run

    def unmet(self) -> bool:
        """Whether rows are left that the input did not have."""
        return bool(self._rows.size) or any(run.size for run in self._runs)
