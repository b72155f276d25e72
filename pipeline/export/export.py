"""`seenset export`: write one selection of a finished run as usable files.

These are the data, or lists: ids and rows, or the samples that lm-evaluation-harness evaluates. A Hugging
Face dataset folder has every input as Parquet under data/, all with the same columns.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource, kept_numbered, kept_rows
from pipeline.corpus.formats.columns import write_parquet
from pipeline.corpus.formats.saved import export_split
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, error_line
from pipeline.export import export_text as wording
from pipeline.export.card import ExportCounts, ExportedFile, answer_sentence, make_card, quarantine_sentence
from pipeline.export.export_folder import (
    CARD_FILE,
    ExportFolder,
    begin_folder,
    check_digest,
    check_names,
    check_outside,
    check_unchanged,
    check_untouched,
    export_sources,
)
from pipeline.export.request import (
    AnsweredRun,
    ExportPlan,
    ExportRequest,
    Form,
    RowMarks,
    read_answered,
    resolve_request,
)
from pipeline.results.summary import read_summary

LIST_FILE = "list.jsonl"
SAMPLES_FILE = "samples.json"

_ROWS = 1 << 10

MarksOf = Callable[[ExportSource], RowMarks]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    plan: ExportPlan
    counts: ExportCounts
    files: list[str]  # names of the files except the card
    remarks: list[str]  # notes for readers

    def plain(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        plan, counts = self.plan, self.counts
        return {
            "folder": plan.out,
            "form": plan.form,
            "selection": plan.summary.name,
            "direction": plan.summary.direction,
            "keep": plan.keep,
            "conclusion": plan.summary.conclusion,
            "n_audit": counts.audited,
            "n_selected": counts.selected,
            "n_kept": counts.kept - counts.unwritten,
            "n_quarantined": counts.quarantined,
            "quarantined_kept": plan.keeps_quarantined,
            "files": self.files,
            "remarks": [*self.remarks, *plan.summary.remarks],
        }

    def sentences(self) -> list[str]:
        """The output of the command: the written files, the quarantined documents, and notes on the guarantee."""
        summary = self.plan.summary
        remarks = [f"{summary.name}: {remark}" for remark in summary.remarks]
        counted = [answer_sentence(self.plan, self.counts), quarantine_sentence(self.plan, self.counts)]
        return [*remarks, *counted, *self.remarks]


@dataclass(frozen=True, slots=True)
class _Draft:
    """An export before any file is written."""

    names: list[str]  # names of the files that may be written
    write: Callable[[ExportFolder], int]  # writes them; returns the number of documents that the form cannot hold
    remarks: list[str] = field(default_factory=list)
    data_files: list[dict[str, Any]] = field(default_factory=list)  # for the configuration of a dataset folder


def write_export(request: ExportRequest) -> Exported:
    """Export a selection of a finished run. The same request writes the same bytes, and replaces an unfinished export.

    Raises:
        UserError: errors of `resolve_request`; an output folder that is an input or has other files; inputs that are
            missing, were changed since the run, or have content that the form cannot hold.
    """
    plan = resolve_request(request)
    check_outside(plan)
    sources = export_sources(plan)
    answered = read_answered(plan)
    counts = _count(answered, sources)
    if plan.form == "huggingface" and not counts.kept:
        raise UserError("no document is kept, and datasets opens no dataset folder without rows: nothing is written")
    with _in_one_line():
        inputs = [] if plan.form == "list" else check_unchanged(plan)
        for shard in plan.shards if inputs else ():
            check_digest(shard, answered.receipts[shard.id])
        draft = _DRAFTS[plan.form](answered, sources)
        check_names(draft.names)
        folder = begin_folder(plan, draft.names)
        unwritten = draft.write(folder)
        check_untouched(inputs)
    if read_summary(plan.store, plan.summary.name) != plan.summary:
        raise UserError(f"selection {plan.summary.name} was repeated while it was exported: export it again")
    files = list(folder.names)
    counts, remarks = replace(counts, unwritten=unwritten), list(draft.remarks)
    if unwritten:
        remarks.append(wording.no_table_rows(unwritten))
    folder.write(CARD_FILE, make_card(plan, counts, remarks, draft.data_files))
    folder.finish()
    return Exported(plan, counts, files, remarks)


def _count(answered: AnsweredRun, sources: Sequence[ExportSource]) -> ExportCounts:
    """Count all verdicts in one pass. Raises UserError where the counts differ from the summary."""
    plan, summary, files = answered.plan, answered.plan.summary, []
    selected = quarantined = 0
    for source in sources:
        documents = kept = 0
        for shard in source.shards:
            verdicts = answered.verdicts(shard)
            documents += verdicts.rows.size
            kept += int(np.count_nonzero(verdicts.kept(plan)))
            selected += int(np.count_nonzero(verdicts.selected))
            quarantined += int(np.count_nonzero(~verdicts.scored))
        files.append(ExportedFile(source.name, documents, kept))
    audited = sum(file.documents for file in files)
    if (audited, selected) != (summary.n_audit, summary.n_selected):
        raise UserError(
            f"selection {summary.name} counts {summary.n_selected:,} of {summary.n_audit:,}, and its documents are "
            f"{selected:,} of {audited:,}: seenset select {plan.store.url} makes it again"
        )
    return ExportCounts(audited, selected, quarantined, sum(file.kept for file in files), tuple(files))


def _draft_files(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Draft:
    exporters = {source.name: format_named(source.first.format).export for source in sources}

    def write(folder: ExportFolder) -> int:
        for source in sources:
            marks = _row_marks(answered, source)
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
                f"{source.name} holds pictures as files, which are not rows: export it without --huggingface"
            )
    names, left_out = parquet_names(sources), LeftOut()
    schema = common_schema(sources, lambda source: _row_marks(answered, source))
    check_features(schema)

    def write(folder: ExportFolder) -> int:
        for source, name in zip(sources, names, strict=True):
            with folder.file(name) as sink:
                write_parquet(sink, schema, kept_tables(source, _row_marks(answered, source), schema, left_out))
        return left_out.count

    return _Draft(names, write, data_files=[{"split": export_split(sources[0].first), "path": names}])


_DRAFTS: dict[Form, Callable[[AnsweredRun, Sequence[ExportSource]], _Draft]] = {
    "files": _draft_files,
    "list": _draft_list,
    "samples": _draft_samples,
    "huggingface": _draft_dataset,
}


def _row_marks(answered: AnsweredRun, source: ExportSource) -> RowMarks:
    return RowMarks(answered.runs(source.shards), answered.plan.keeps_selected)


@dataclass(frozen=True, slots=True)
class _Samples:
    """The kept items of each task."""

    indices: dict[str, array[int]]  # by task, ascending and not empty
    empty: list[str]  # tasks without a kept item
    without: int  # documents without a task


def _write_list(answered: AnsweredRun, sources: Sequence[ExportSource], sink: BinaryIO) -> None:
    """Write one JSON object per line for every kept document: id, source, row. No input is read.

    The id of a document without an id column is its place, as in the run, but without the folders
    that all inputs share.

    Args:
        answered: the run.
        sources: its inputs.
        sink: file to write.

    Raises:
        UserError: a damaged file of the run.
    """
    for source in sources:
        for shard in source.shards:
            verdicts = answered.verdicts(shard)
            kept = verdicts.kept(answered.plan)
            ids = verdicts.ids.filter(pa.array(kept)).to_pylist()
            for doc_id, row in zip(ids, verdicts.rows[kept].tolist(), strict=True):
                if shard.id_column is None:
                    doc_id = source.name + doc_id.removeprefix(shard.name)
                line = {"id": doc_id, "source": source.name, "row": row}
                sink.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _find_samples(answered: AnsweredRun, sources: Sequence[ExportSource]) -> _Samples:
    """The kept items of each task, by their number in the task, from 0.

    If the request names a task, all documents are its items, counted over all inputs in order; otherwise the group
    column names the task of each.

    Raises:
        UserError: nothing is kept; or the task of a document is unknown, so that later ones cannot be counted.
    """
    plan = answered.plan
    counts, without = Counter[str](), 0
    indices: dict[str, array[int]] = {}
    for source in sources:
        unit = format_named(source.first.format).unit
        parsed = unit == "line" or (unit == "sample" and not source.first.pictures)  # a bad row has no group either
        for shard in source.shards:
            verdicts = answered.verdicts(shard)
            kept = set(verdicts.rows[verdicts.kept(plan)].tolist())
            for document in read_shard(shard):
                task = plan.task if plan.task is not None else document.group
                if task is None and document.problem is not None and parsed:
                    raise UserError(
                        f"row {document.row} of {shard.name} cannot be read, so it is unknown which task it is an item "
                        "of, and the indices of later ones: correct it and run again, or export a task by itself"
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
    """Write `{"task": [indices]}`, which lm-evaluation-harness accepts for --samples as a path or as text."""
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
    """Reduce an error of a reader to one line; errors of a disk are left to the command.

    Raises:
        UserError: an input is damaged, or has content that its copy cannot hold.
    """
    try:
        yield
    except (EOFError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"an input cannot be exported: {error_line(error)}") from None


@dataclass(slots=True)
class LeftOut:
    """Documents that cannot be rows of a table: broken lines, and text files that are not text."""

    count: int = 0


def parquet_names(sources: Sequence[ExportSource]) -> list[str]:
    """One file per input, with the names of a Hugging Face folder."""
    split = export_split(sources[0].first)
    return [f"data/{split}-{number:05d}-of-{len(sources):05d}.parquet" for number in range(len(sources))]


def common_schema(sources: Sequence[ExportSource], option_marks: MarksOf) -> pa.Schema:
    """The columns of all inputs; JSONL inputs are read for that.

    Raises:
        UserError: a column has values of different types, or of a type that a table cannot hold.
    """
    schemas = [_common_schema(source, option_marks) for source in sources]
    for source, schema in zip(sources, schemas, strict=True):
        repeated = [name for name in schema.names if schema.names.count(name) > 1]
        if repeated:
            raise UserError(f"column {repeated[0]!r} occurs several times in {source.name}: rename all but one")
    whole = schemas[0]
    for source, schema in zip(sources[1:], schemas[1:], strict=True):
        try:
            whole = pa.unify_schemas([whole, schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UserError(f"{source.name} has other columns than {sources[0].name}: {_line(error)}") from None
    if any(schema.metadata != whole.metadata or not schema.equals(whole) for schema in schemas):
        whole = whole.remove_metadata()
    return pa.schema([field.with_type(_plain(field.type)) for field in whole], whole.metadata)


def kept_tables(source: ExportSource, marks: RowMarks, schema: pa.Schema, left_out: LeftOut) -> Iterator[pa.Table]:
    """The kept rows of an input, with the columns of all inputs.

    Args:
        source: the input.
        marks: marks of its rows.
        schema: schema from `common_schema`.
        left_out: counts documents that cannot be rows.

    Raises:
        UserError: a value that the column cannot hold.
    """
    shard = source.first
    tables = format_named(shard.format).export.tables
    if tables is None:
        for first, rows in _blocks(_rows(source, marks, left_out)):
            arrays = [_array(shard, field.name, first, rows, field.type) for field in schema]
            yield pa.table(arrays, schema=schema)
        return
    for table in kept_rows(tables(shard), marks):
        columns = [
            table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
            for field in schema
        ]
        yield pa.table(columns, schema=schema)


def _common_schema(source: ExportSource, option_marks: MarksOf) -> pa.Schema:
    shard = source.first
    stated = format_named(shard.format).export.schema
    if stated is not None:
        return stated(shard)
    schema = pa.schema([])
    for first, rows in _blocks(_rows(source, option_marks(source), LeftOut())):
        names = dict.fromkeys(name for row in rows for name in row)
        fields = [pa.field(name, _array(shard, name, first, rows).type) for name in names]
        try:
            schema = pa.unify_schemas([schema, pa.schema(fields)], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _mixed(shard, first, error) from None
    return schema if schema.names else pa.schema([(shard.text, pa.string())])  # without rows


def _array(
    shard: Shard, name: str, first: int, rows: Sequence[dict[str, Any]], kind: pa.DataType | None = None
) -> pa.Array:
    """A column of some rows, of a given type or of the type of its values. Raises UserError if they have none."""
    try:
        return pa.array([row.get(name) for row in rows], kind)
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError) as error:
        raise _mixed(shard, first, error, name) from None


def _blocks(rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows in blocks, each with the number of its first one."""
    block: list[dict[str, Any]] = []
    first = size = 0
    for number, row in rows:
        first = number if not block else first
        block.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, (str, list, dict)))
        if len(block) == _ROWS or size > 1 << 24:
            yield first, block
            block, size = [], 0
    if block:
        yield first, block


def _rows(source: ExportSource, marks: RowMarks, left_out: LeftOut) -> Iterator[tuple[int, dict[str, Any]]]:
    """The kept rows of a text format with their numbers, without documents that cannot be rows."""
    for number, row in kept_numbered(format_named(source.first.format).export.records(source), marks):
        if row is None:
            left_out.count += 1
        elif None in row:
            raise UserError(f"record {number} of {source.first.name} has more fields than the first one names")
        else:
            yield number, row


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type that `datasets` supports: without dictionaries and views."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    return pa.large_string() if str(kind) == "string_view" else kind


def _mixed(shard: Shard, first: int, error: Exception, name: str = "") -> UserError:
    column = f"column {name!r} of {shard.name}" if name else f"a column of {shard.name}"
    return UserError(
        f"{column} holds values that no single type of a table can hold, from row {first} on ({_line(error)}): without "
        "--huggingface the lines are copied as they are"
    )


def _line(error: Exception) -> str:
    return error_line(error, 200)


def check_features(schema: pa.Schema) -> None:
    """Check that Parquet can hold the columns, and that `datasets` can read them.

    Raises:
        UserError: a column is not supported; the message names it.
    """
    import datasets

    for one in schema:
        try:
            datasets.Features.from_arrow_schema(pa.schema([one]))
            pq.ParquetWriter(io.BytesIO(), pa.schema([one])).close()
        except Exception as error:  # the library raises several kinds, all about a type
            raise UserError(
                f"column {one.name!r} is {one.type}, which a dataset folder cannot hold ({_line(error)}): without "
                "--huggingface the files keep their format"
            ) from None
