"""`seenset export`: one selection of a finished run, written as files that one can use.

They are the data, or lists in their place: ids and rows, or the samples that lm-evaluation-harness evaluates.
"""

from __future__ import annotations

import contextlib
import csv
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from pipeline.audit.summary import read_summary
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.columns import write_parquet
from pipeline.corpus.formats.saved import split_of
from pipeline.errors import UserError
from pipeline.export.card import ExportCounts, ExportedFile, answer_sentence, make_card, quarantine_sentence
from pipeline.export.huggingface import LeftOut, check_features, common_schema, parquet_names, tables_of
from pipeline.export.place import CARD_FILE, ExportFolder, begin_folder, check_outside
from pipeline.export.request import ExportQuestion, ExportRequest, Form, settle_request
from pipeline.export.sources import check_digest, check_names, check_unchanged, check_untouched, sources_of
from pipeline.export.verdicts import AnsweredRun, RowMarks, read_answered
from pipeline.report.wording import export as wording

LIST_FILE = "list.jsonl"
SAMPLES_FILE = "samples.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    question: ExportQuestion
    counts: ExportCounts
    files: list[str]  # without the card
    remarks: list[str]  # what a reader must know of it

    def plain(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        question, counts = self.question, self.counts
        return {
            "folder": question.out,
            "form": question.form,
            "selection": question.summary.name,
            "direction": question.summary.direction,
            "keep": question.keep,
            "supported": question.summary.supported,
            "conclusion": question.summary.conclusion,
            "n_audit": counts.audited,
            "n_selected": counts.selected,
            "n_kept": counts.kept - counts.unwritten,
            "n_quarantined": counts.quarantined,
            "quarantined_kept": question.keeps_quarantined,
            "files": self.files,
            "remarks": [*self.remarks, *question.summary.remarks],
        }

    def sentences(self) -> list[str]:
        """What the command prints: what was written, what became of the quarantined, what to know of the promise."""
        summary = self.question.summary
        remarks = [f"{summary.name}: {remark}" for remark in summary.remarks]
        counted = [answer_sentence(self.question, self.counts), quarantine_sentence(self.question, self.counts)]
        return [*remarks, *counted, *self.remarks]


@dataclass(frozen=True, slots=True)
class _Draft:
    """An export of which nothing is written yet."""

    names: list[str]  # of the files that may be written
    write: Callable[[ExportFolder], int]  # writes them; how many documents the form cannot hold
    remarks: list[str] = field(default_factory=list)
    data_files: list[dict[str, Any]] = field(default_factory=list)  # of a dataset folder's configuration


def write_export(request: ExportRequest) -> Exported:
    """Export a selection of a finished run. The same request writes the same bytes, and goes over an unfinished one.

    Raises:
        UserError: what `settle_request` refuses; an output folder that is an input or somebody else's; inputs that are
            gone, were changed since the run, or hold what the form cannot.
    """
    question = settle_request(request)
    check_outside(question)
    sources = sources_of(question)
    answered = read_answered(question)
    counts = _count(answered, sources)
    if question.form == "huggingface" and not counts.kept:
        raise UserError("no document is kept, and datasets opens no dataset folder without a row: nothing is written")
    with _in_one_line():
        inputs = [] if question.form == "list" else check_unchanged(question)
        for shard in question.shards if inputs else ():
            check_digest(shard, answered.receipts[shard.id])
        draft = _DRAFTS[question.form](answered, sources)
        check_names(draft.names)
        folder = begin_folder(question, draft.names)
        unwritten = draft.write(folder)
        check_untouched(inputs)
    if read_summary(question.store, question.summary.name) != question.summary:
        raise UserError(f"selection {question.summary.name} was made anew while it was exported: export it again")
    files = list(folder.names)
    counts, remarks = replace(counts, unwritten=unwritten), list(draft.remarks)
    if unwritten:
        remarks.append(wording.no_table_rows(unwritten))
    folder.write(CARD_FILE, make_card(question, counts, remarks, draft.data_files))
    folder.finish()
    return Exported(question, counts, files, remarks)


def _count(answered: AnsweredRun, sources: Sequence[ExportSource]) -> ExportCounts:
    """Go through all verdicts once. Raises UserError where they are not those that the summary counts."""
    question, summary, files = answered.question, answered.question.summary, []
    selected = quarantined = 0
    for source in sources:
        documents = kept = 0
        for shard in source.shards:
            verdicts = answered.verdicts(shard)
            documents += verdicts.rows.size
            kept += int(np.count_nonzero(verdicts.kept(question)))
            selected += int(np.count_nonzero(verdicts.selected))
            quarantined += int(np.count_nonzero(~verdicts.scored))
        files.append(ExportedFile(source.name, documents, kept))
    audited = sum(file.documents for file in files)
    if (audited, selected) != (summary.n_audit, summary.n_selected):
        raise UserError(
            f"selection {summary.name} counts {summary.n_selected:,} of {summary.n_audit:,}, and its documents are "
            f"{selected:,} of {audited:,}: seenset select {question.store.url} makes it anew"
        )
    return ExportCounts(audited, selected, quarantined, sum(file.kept for file in files), tuple(files))


def _draft_files(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Draft:
    exporters = {source.name: format_named(source.first.format).export for source in sources}

    def write(folder: ExportFolder) -> int:
        for source in sources:
            marks = _marks_of(answered, source)
            exporters[source.name].copy(source, marks, folder.file)
            if marks.unmet():
                raise UserError(f"{source.name} has fewer rows than the run read: it was changed while it was exported")
        return 0

    return _Draft([name for source in sources for name in exporters[source.name].names(source)], write)


def _draft_list(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Draft:
    def write(folder: ExportFolder) -> int:
        with folder.file(LIST_FILE) as sink:
            _write_list(answered, sources, sink)
        return 0

    return _Draft([LIST_FILE], write)


def _draft_samples(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Draft:
    samples = _find_samples(answered, sources)

    def write(folder: ExportFolder) -> int:
        with folder.file(SAMPLES_FILE) as sink:
            _write_samples(samples, sink)
        return 0

    remarks = [wording.empty_tasks(samples.empty)] if samples.empty else []
    if samples.without:
        remarks.append(wording.without_task(samples.without))
    if len(sources) > 1:
        remarks.append(wording.counted_over([source.name for source in sources]))
    return _Draft([SAMPLES_FILE], write, remarks)


def _draft_dataset(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Draft:
    for source in sources:
        if source.first.pictures and format_named(source.first.format).unit in ("file", "sample"):
            raise UserError(
                f"{source.name} holds pictures as files, which are no rows: export it without --huggingface"
            )
    names, left_out = parquet_names(sources), LeftOut()
    schema = common_schema(sources, lambda source: _marks_of(answered, source))
    check_features(schema)

    def write(folder: ExportFolder) -> int:
        for source, name in zip(sources, names, strict=True):
            with folder.file(name) as sink:
                write_parquet(sink, schema, tables_of(source, _marks_of(answered, source), schema, left_out))
        return left_out.count

    return _Draft(names, write, data_files=[{"split": split_of(sources[0].first), "path": names}])


_DRAFTS: dict[Form, Callable[[AnsweredRun, Sequence[ExportSource]], _Draft]] = {
    "files": _draft_files,
    "list": _draft_list,
    "samples": _draft_samples,
    "huggingface": _draft_dataset,
}


def _marks_of(answered: AnsweredRun, source: ExportSource) -> RowMarks:
    return RowMarks(answered.runs(source.shards), answered.question.keeps_selected)


@dataclass(frozen=True, slots=True)
class _Samples:
    """Which items of each task are kept."""

    indices: dict[str, array[int]]  # of a task, ascending; none is empty
    empty: list[str]  # tasks of which none is kept
    without: int  # documents without a task


def _write_list(answered: AnsweredRun, sources: Sequence[ExportSource], sink: BinaryIO) -> None:
    """Write a JSON object a line for every document that is kept: id, source, row. No input is read.

    The id of a document that has no column for it is made of its place, as in the run, but without the folders
    that all inputs have in common.

    Args:
        answered: the run.
        sources: its inputs.
        sink: to be written.

    Raises:
        UserError: a damaged file of the run.
    """
    for source in sources:
        for shard in source.shards:
            verdicts = answered.verdicts(shard)
            kept = verdicts.kept(answered.question)
            ids = verdicts.ids.filter(pa.array(kept)).to_pylist()
            for doc_id, row in zip(ids, verdicts.rows[kept].tolist(), strict=True):
                if shard.id_column is None:
                    doc_id = source.name + doc_id.removeprefix(shard.name)
                line = {"id": doc_id, "source": source.name, "row": row}
                sink.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _find_samples(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Samples:
    """The items of each task that are kept, by their number in the task: the first is 0.

    With the name of a task all documents are its items, counted over all inputs in their order; else the group column
    names the task of each.

    Raises:
        UserError: nothing is kept; the task of a document is unknown, so that later ones cannot be counted.
    """
    question = answered.question
    counts, without = Counter[str](), 0
    indices: dict[str, array[int]] = {}
    for source in sources:
        unit = format_named(source.first.format).unit
        parsed = unit == "line" or (unit == "sample" and not source.first.pictures)  # a bad row has no group either
        for shard in source.shards:
            verdicts = answered.verdicts(shard)
            kept = set(verdicts.rows[verdicts.kept(question)].tolist())
            for document in read_shard(shard):
                task = question.task if question.task is not None else document.group
                if task is None and document.problem is not None and parsed:
                    raise UserError(
                        f"row {document.row} of {shard.name} cannot be read, so it is unknown which task it is an item "
                        "of, and the indices of later ones: correct it and run anew, or export a task by itself"
                    )
                if task is None:
                    without += 1
                    continue
                if document.row in kept:
                    indices.setdefault(task, array("q")).append(counts[task])
                counts[task] += 1
    if not indices:
        raise UserError(
            "no item is kept, so there are no samples to write: lm-evaluation-harness takes an empty list for all items"
        )
    return _Samples(indices, [task for task in counts if task not in indices], without)


def _write_samples(samples: _Samples, sink: BinaryIO) -> None:
    """Write `{"task": [indices]}`, which lm-evaluation-harness takes for --samples as a path or as it stands."""
    for piece in _sample_pieces(samples):
        sink.write(piece.encode("utf-8", "backslashreplace"))


def _sample_pieces(samples: _Samples) -> Iterator[str]:
    for number, (task, indices) in enumerate(samples.indices.items()):
        yield f"{',' if number else '{'}\n  {json.dumps(task, ensure_ascii=False)}: ["
        for start in range(0, len(indices), 1 << 12):
            yield ("," if start else "") + ",".join(map(str, indices[start : start + (1 << 12)]))
        yield "]"
    yield "\n}\n"


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Let what a reader raises be said in one line; what a disk raises the command says.

    Raises:
        UserError: an input is damaged, or holds what its copy cannot.
    """
    try:
        yield
    except (EOFError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"an input cannot be exported: {' '.join(str(error).split())}") from None
