"""Which rows of a shard were selected and which could not be scored: by place, never by text."""

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
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts
from pipeline.store.tables import read_filed


@dataclass(frozen=True, slots=True, eq=False)
class ShardVerdicts:
    """What became of the documents of a shard; rows of the input, int64, ascending."""

    selected: np.ndarray
    quarantined: np.ndarray
    others: np.ndarray  # judged and not selected

    def kept(self, question: ExportQuestion) -> np.ndarray:
        """The rows that an export keeps, ascending."""
        if question.keeps_selected:
            return self.selected
        rest = [self.others, self.quarantined] if question.keeps_quarantined else [self.others]
        return np.sort(np.concatenate(rest))

    def removed(self, question: ExportQuestion) -> np.ndarray:
        """The rows of documents that an export leaves out, ascending."""
        if question.keeps_selected:
            return np.sort(np.concatenate([self.others, self.quarantined]))
        rows = [self.selected] if question.keeps_quarantined else [self.selected, self.quarantined]
        return np.sort(np.concatenate(rows))


@dataclass(frozen=True, slots=True)
class AnsweredRun:
    """The receipts of a finished run's audited shards, by shard."""

    question: ExportQuestion
    receipts: dict[str, Receipt]
    tables: VerdictTables

    def verdicts(self, shard: Shard) -> ShardVerdicts:
        """The verdicts on the documents of a shard.

        Raises:
            UserError: the selection is not of the scores that the run holds, or a file is damaged.
        """
        return _read_verdicts(self.tables, shard, self.receipts[shard.id])

    def runs(self, shards: Iterable[Shard]) -> Iterator[np.ndarray]:
        """The rows that count in copying: those that are kept, or those that are left out where the rest is kept."""
        for shard in shards:
            verdicts = self.verdicts(shard)
            yield verdicts.kept(self.question) if self.question.keeps_selected else verdicts.removed(self.question)


def read_answered(question: ExportQuestion) -> AnsweredRun:
    """The receipts of a run, all of whose audited documents were judged.

    Raises:
        IncompleteError: a shard is not scored.
        UserError: a damaged receipt.
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
    return AnsweredRun(question, receipts, VerdictTables.of(question.store, question.summary.name))


def _read_verdicts(tables: VerdictTables, shard: Shard, receipt: Receipt) -> ShardVerdicts:
    """Match the verdicts of a shard with its rows: they stand in the order of its scores, those without one last."""
    store, selection = tables.store, tables.digests.selection
    verdicts = tables.read(shard.id)
    scores = read_filed(store, receipt, ["doc_id", "row"])
    empty = pa.table({"row": pa.array([], pa.int64())})
    refused = empty if receipt.quarantine is None else read_filed(store, receipt, ["row"], receipt.quarantine)
    if len(verdicts) != receipt.n_new:
        raise _others(store, selection)
    judged = verdicts.filter(pc.is_valid(verdicts.column(3)))  # the first detector's scores
    repeats = verdicts["doc_id"].slice(len(judged) + len(refused))  # ids that stand in an earlier shard
    repeated = pc.is_in(scores["doc_id"], value_set=repeats.combine_chunks())
    scored = scores.filter(pc.invert(repeated))
    if not scored["doc_id"].equals(judged["doc_id"]):
        raise _others(store, selection)
    rows, selected = scored["row"].to_numpy(), judged["selected"].to_numpy()
    unscored = np.concatenate([refused["row"].to_numpy(), scores.filter(repeated)["row"].to_numpy()])
    return ShardVerdicts(np.sort(rows[selected]), np.sort(unscored), np.sort(rows[~selected]))


def _others(store: Store, selection: str) -> UserError:
    return UserError(
        f"selection {selection} of {store.url} was made from other scores than the run holds: seenset select "
        f"{store.url} makes it anew"
    )


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
