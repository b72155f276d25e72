"""Finished runs for comparison: their answers on single documents, sorted by ids that several runs can share.

The documents of several runs are joined by id; only pieces of these rows are in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline.compare.comparison_text import same_model, shared_documents
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, nearest
from pipeline.report.contents import common_folder, model_name
from pipeline.results.history import answer_names, read_history
from pipeline.results.status import read_status
from pipeline.results.summary import Summary, read_summary
from pipeline.run.digests import VerdictTables, verdicts_file
from pipeline.run.manifest import Manifest, read_run
from pipeline.run.records import Record
from pipeline.run.remedies import answered_by
from pipeline.stages import SCORING
from pipeline.store.external_sort import SortedRows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed, read_receipts

COLUMNS = (
    ("doc_id", pa.string()),
    ("run", pa.int32()),
    ("quarantined", pa.bool_()),
    ("p_value", pa.float64()),
    ("selected", pa.bool_()),
    ("text_key", pa.int64()),
)
"""Columns of joined rows before the scores."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run with answers: its origin, and the location of its answers on documents."""

    store: Store
    manifest: Manifest
    shards: dict[str, Shard]
    receipts: tuple[Receipt, ...]  # receipts of the audited documents
    folder: str  # prefix of the ids of this run, removed for comparison

    @property
    def model(self) -> str:
        """The name of the audited model."""
        return model_name(self.manifest.config.model)

    @property
    def fingerprint(self) -> str:
        """Digest of the content of the audited model, or of its known properties; 16 characters."""
        text = json.dumps(self.manifest.fingerprint.get("model", self.manifest.fingerprint), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def summary(self, selection: str) -> Summary:
        """The answer of a selection.

        Raises:
            UserError: no selection of this name, or an unfinished or damaged one, or one of another version.
        """
        names = answer_names(self.store, self.manifest.config)
        if selection not in names:
            raise UserError(f"no selection {selection!r} in {self.store.url}; {nearest(selection, names, 'it has')}")
        summary = read_summary(self.store, selection)
        if summary is None:
            raise UserError(f"{self.store.url} is unfinished: selection {selection} has no answer; run it again")
        return summary

    def settings(self, selection: str) -> dict[str, object]:
        """The settings of a selection as last requested, with every default."""
        history = read_history(self.store)
        for question in history[-1].questions if history else []:
            if question.name == selection:
                return dict(question.settings)
        for configured in self.manifest.config.selections:
            if configured.name == selection:
                return configured.model_dump(mode="json", by_alias=True)
        return {}


def open_finished(run: str) -> FinishedRun:
    """Open a run with answers, without writing into it.

    Raises:
        UserError: not a run directory, or a run without audited documents, unfinished, damaged or of another version.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    if manifest.config.corpus.audit is None:
        raise UserError(f"{run} compares documents of known membership: it has selected nothing to compare")
    status = read_status(store)
    if status is None or status.state != "complete":
        state = "no status" if status is None else status.state
        raise UserError(f"{run} is unfinished ({state}): the same seenset run finishes it")
    by_id = {shard.id: shard for shard in shards}
    receipts = tuple(one for one in read_receipts(store, SCORING) if one.shard in by_id and one.role == "audit")
    missing = {shard.id for shard in shards if shard.role == "audit"} - {receipt.shard for receipt in receipts}
    if missing:
        raise UserError(f"{run} is unfinished: {len(missing)} shards are not scored; the same seenset run resumes it")
    names = [entry.name for entry in manifest.inputs if entry.role == "audit"]
    return FinishedRun(store, manifest, by_id, receipts, common_folder(names))


def chosen_selection(runs: Sequence[FinishedRun], selection: str | None) -> str:
    """The selection to compare: the named one, or the only one that all runs have.

    Raises:
        UserError: a run has none of that name, or the runs share none or several.
    """
    if selection is not None:
        for run in runs:
            run.summary(selection)
        return selection
    names = shared_selections(runs)
    if len(names) != 1:
        raise UserError(f"choose with --selection one of the selections that these runs share: {', '.join(names)}")
    return names[0]


def shared_selections(runs: Sequence[FinishedRun]) -> list[str]:
    """The names of selections that all runs have, in the order of the first run.

    Raises:
        UserError: there are none.
    """
    first, *others = [answer_names(run.store, run.manifest.config) for run in runs]
    shared = [name for name in first if all(name in names for names in others)]
    if not shared:
        named = zip(runs, [first, *others], strict=True)
        each = "; ".join(f"{run.store.url}: {', '.join(names)}" for run, names in named)
        raise UserError(f"these runs have no selection of the same name ({each})")
    return shared


def shared_ids(run: FinishedRun, ids: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Ids without the folder of the corpus, so that runs over copies of the files have equal ids."""
    if not run.folder:
        return ids
    inside = pc.starts_with(ids, run.folder)
    return pc.if_else(inside, pc.utf8_slice_codeunits(ids, len(run.folder)), ids)


def read_answer_tables(run: FinishedRun, summary: Summary, scores: Sequence[str] = ()) -> Iterator[pa.Table]:
    """All audited documents of a selection, one table per shard.

    Columns are doc_id and source (both without the folder of the corpus), row, p_value, selected, quarantined, text_key
    and the scores, named score_0, score_1 and so on. Documents in quarantine have p = 1, text_key 0 and null scores.

    Args:
        run: run of the selection.
        summary: summary of the selection.
        scores: score columns of detectors of the selection.

    Raises:
        UserError: files of the selection are missing, or do not match its summary.
    """
    verdicts, count = VerdictTables.open(run.store, summary.name, run.receipts), 0
    for receipt in run.receipts:
        table = verdicts.read(receipt.shard)
        for column in ("doc_id", "p_value", "selected", *summary.detectors):
            if column not in table.column_names:
                name = f"{run.store.url}/{verdicts_file(summary.name, receipt.shard)}"
                remedy = answered_by(run.store.url)
                raise UserError(f"{name} has no column {column} and belongs to another selection: {remedy}")
        filed = read_filed(run.store, receipt, ["row", "text_key"])
        keys = filed["text_key"].take(pc.index_in(table["row"], value_set=filed["row"].combine_chunks()))
        scored = pc.is_valid(table[summary.detectors[0]])
        columns = {
            "doc_id": shared_ids(run, table["doc_id"]),
            "source": shared_ids(run, table["source"]),
            "row": table["row"],
            "p_value": table["p_value"],
            "selected": table["selected"],
            "quarantined": pc.invert(scored),
            "text_key": pc.if_else(scored, keys, pa.scalar(0, pa.int64())),
        }
        yield pa.table({**columns, **{f"score_{index}": table[name] for index, name in enumerate(scores)}})
        count += len(table)
    if count != summary.n_audit:
        raise UserError(
            f"{run.store.url}/selection/{summary.name}/documents holds {count:,} documents, and the summary says "
            f"{summary.n_audit:,}: {answered_by(run.store.url)}"
        )


class RunRecord(Record):
    """A run in a comparison."""

    run: str = Field(description="The run directory.")
    model: str = Field(description="The audited model, by its name in the configuration.")
    fingerprint: str = Field(description="Digest of the content of the audited model.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")


def run_record(run: FinishedRun) -> RunRecord:
    """The record of a run in a comparison."""
    return RunRecord(run=run.store.url, model=run.model, fingerprint=run.fingerprint, limit=run.manifest.limit)


def same_models(runs: Sequence[FinishedRun]) -> list[str]:
    """A warning for every run whose model an earlier run has also audited, by the fingerprints."""
    first: dict[str, FinishedRun] = {}
    warnings = []
    for run in runs:
        earlier = first.setdefault(run.fingerprint, run)
        if earlier is not run:
            warnings.append(same_model(earlier.store.url, run.store.url, run.fingerprint))
    return warnings


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPart:
    """A part of the documents of several runs, with all rows of each id."""

    shared: list[pa.Table]  # for each run, rows of the same documents in the same order
    n_other_text: int  # ids that all runs have, with texts that differ
    n_documents: np.ndarray  # int64, (runs,): distinct ids
    n_repeated: np.ndarray  # int64, (runs,): rows that repeat an id


class Shared(Record):
    """The number of documents that several runs share."""

    n_documents: list[int] = Field(description="Audited documents of each run; each id counts once.")
    n_repeated: list[int] = Field(description="Rows of each run that repeat an id; they are in quarantine.")
    n_shared: int = Field(description="Documents that all runs audited: the same id, and the same text where scored.")
    n_other_text: int = Field(description="Ids that all runs audited, with texts that differ; they are not shared.")

    @property
    def alike(self) -> bool:
        """Whether all runs audited the same documents."""
        return set(self.n_documents) == {self.n_shared}

    def sentence(self) -> str:
        """States how many documents the runs share."""
        return shared_documents(self.n_documents, self.n_shared, self.n_other_text)


class JoinedRuns:
    """The documents of several runs, sorted by id; rows beyond some thousands are on disk until `close`."""

    def __init__(self, runs: int, scores: int = 0) -> None:
        """Start without documents.

        Args:
            runs: number of runs.
            scores: number of score columns.
        """
        self.runs = runs
        columns = [*COLUMNS, *((f"score_{index}", pa.float64()) for index in range(scores))]
        self._rows = SortedRows(pa.schema(columns), ["doc_id"])

    def add(self, run: int, documents: pa.Table) -> None:
        """Add documents of a run, from `read_answer_tables`."""
        documents = documents.append_column("run", pa.array(np.full(len(documents), run, dtype=np.int32)))
        self._rows.add(documents.select(self._rows.schema.names).cast(self._rows.schema))

    def parts(self) -> Iterator[JoinedPart]:
        """All documents in the order of their ids; can be read several times."""
        waiting = self._rows.schema.empty_table()
        for piece in self._rows.pieces():
            waiting = pa.concat_tables([waiting, piece]).combine_chunks()
            if len(waiting):  # more rows of the last id may follow
                end = pc.index(waiting["doc_id"], waiting["doc_id"][-1]).as_py()
                yield _part(waiting.slice(0, end), self.runs)
                waiting = waiting.slice(end)
        yield _part(waiting, self.runs)

    def count(self) -> Shared:
        """Count the documents that the runs share, in one reading of their rows."""
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
    """Join the audited documents of several runs.

    Args:
        runs: at least one run.
        summaries: summary of a selection of each run.
        scores: for each selection, equally many detectors; None: no scores.

    Raises:
        UserError: the errors of `read_answer_tables`.
    """
    scores = [()] * len(runs) if scores is None else scores
    joined = JoinedRuns(len(runs), len(scores[0]))
    try:
        for place, (run, summary, columns) in enumerate(zip(runs, summaries, scores, strict=True)):
            for table in read_answer_tables(run, summary, columns):
                joined.add(place, table)
        yield joined
    finally:
        joined.close()


def _part(rows: pa.Table, runs: int) -> JoinedPart:
    """Join sorted rows, which include all rows of their ids."""
    ids = rows["doc_id"].combine_chunks()
    number = np.zeros(len(rows), dtype=np.int64)  # number of the id
    number[1:] = np.cumsum(pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False))
    order = np.lexsort((rows["quarantined"].to_numpy(), rows["run"].to_numpy(), number))
    rows, number = rows.take(pa.array(order)), number[order]
    places = rows["run"].to_numpy()
    first = np.ones(len(rows), dtype=bool)  # first row of an id in a run: the scored one, if any
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
    """Refuse runs that audited different documents, unless only the shared ones are requested.

    Raises:
        UserError: the runs differ; the message states how many documents they share.
    """
    if not shared.n_shared:
        raise UserError(
            f"{shared.sentence()}: nothing can be compared; give both corpora an id column, or the same file names"
        )
    if not shared.alike and not on_shared:
        raise UserError(f"{shared.sentence()}: --shared covers only those")
