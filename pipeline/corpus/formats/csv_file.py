"""CSV files: the first record contains the column names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.config.dialect import LONGEST_MARK, PLAIN, Dialect, mark_of
from pipeline.corpus.csv_records import (
    BadRecord,
    DelimiterError,
    count_ends,
    count_records,
    csv_columns,
    csv_record,
    csv_records,
    csv_rows,
    split_record,
)
from pipeline.corpus.formats import base
from pipeline.corpus.formats.jsonl import line_ends
from pipeline.corpus.input_files import (
    Extent,
    Overlong,
    columns_in_dialect,
    estimated_extent,
    find_delimiter,
    named_separator,
    open_plain,
    packed_file,
    read_head,
)
from pipeline.corpus.notes import Notes
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import InputFile, Shard
from pipeline.corpus.unpacking import suffix_compression
from pipeline.errors import UserError, error_line

_LINE_END = re.compile("\r\n|\r|\n")
_FIRST_LINE = re.compile("[^\r\n]*(\r\n|\r|\n)?")

_Records = Iterator[tuple[int, list[str] | str]]
_TABS = ".tsv"


def _columns(shard: Shard) -> list[str]:
    """The column names of a file. Raises UserError: its first record is too long or is not CSV."""
    try:
        with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
            return csv_columns(file, shard.limits.document_bytes, shard.dialect)
    except (ValueError, OSError, EOFError, csv.Error) as error:
        raise UserError(f"{shard.name} is not a readable CSV file: {error_line(error)}") from None


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    entry = replace(entry, dialect=_own_dialect(entry))
    dialect, columns = entry.dialect, columns_in_dialect(_columns, entry, source, limits, wide=True)
    if len(columns) == 1 and (missing := [column for column in source.columns if column not in columns]):
        delimiter = find_delimiter(read_head(entry.path).decode(dialect.codec, "replace"))
        if delimiter not in (None, dialect.delimiter):
            problem = f"no column {missing[0]!r} in {entry.name}, whose single column is {columns[0]!r}"
            raise DelimiterError(problem, json.dumps(delimiter))
    base.check_columns(source, entry.name, columns)
    return entry


def _own_dialect(entry: InputFile) -> Dialect:
    """The dialect of a file whose delimiter is not configured: that of a first line `sep=;`, or of a .tsv file."""
    dialect = entry.dialect
    if dialect.delimiter != PLAIN.delimiter or entry.size == 0:
        return dialect
    try:
        first = read_head(entry.path).decode(dialect.codec, "replace").splitlines(keepends=True)[:1]
    except (OSError, EOFError):
        return dialect  # the error of the file is raised when its columns are read
    line = "".join(first)
    tabs = _TABS in entry.path[-len(_TABS) - 4 :].lower() and ("\t" in line or "," not in line)
    return replace(dialect, delimiter=named_separator(line) or ("\t" if tabs else dialect.delimiter))


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        wanted, most = base.wanted_columns(shard), shard.limits.document_bytes
        for row, value in enumerate(csv_records(file, most, shard.dialect, wanted, notes)):
            if isinstance(value, Overlong):
                yield row, base.overlong(value, "characters", shard), *base.NOTHING
            elif isinstance(value, BadRecord):
                yield row, base.Unreadable(Reason.UNDECODABLE, value.message), *base.NOTHING
            else:
                yield row, base.DEADLY if watch(row, False) else value.get(shard.text), *base.other_fields(value, shard)


def _estimate(entry: InputFile) -> Extent:
    dialect = entry.dialect

    def count(data: bytes) -> int | None:
        """Number of records without the column names; None if they cannot be distinguished."""
        try:
            return count_records(data, dialect)
        except UnicodeDecodeError:
            return None

    def ends(part: bytes, head: bytes) -> int:
        first = head.decode(dialect.codec, "replace").splitlines(keepends=True)[:2]
        named = named_separator("".join(first[:1])) is not None
        ended = count_ends(part, len(split_record("".join(first[named:][:1]), dialect)), dialect)
        return line_ends(part) if ended is None else ended

    return estimated_extent(entry, count, ends)


@dataclass(frozen=True, slots=True)
class _Start:
    """What a copy of a file has in common with it besides its dialect."""

    mark: bytes  # byte order mark; empty if it has none of its encoding
    separator: str  # first line `sep=;`; empty if it has none
    line_end: str  # of the column names


def _start(shard: Shard) -> _Start:
    head, dialect = read_head(shard.path), shard.dialect
    encoding, mark = mark_of(head[:LONGEST_MARK]) or ("", b"")
    mark = mark if encoding and dialect.encoding.startswith(encoding) else b""
    text = head.decode(dialect.codec, "replace").removeprefix("\ufeff")
    first = _FIRST_LINE.match(text)[0]  # type: ignore[index]
    separator = first if named_separator(first) else ""
    end = _LINE_END.search(text, len(separator))
    return _Start(mark, separator, end[0] if end else "\n")


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Write the kept records. An export of the selected documents drops records that cannot be read."""
    _rewrite(source.first, source.name, open_file, lambda records: base.kept_numbered(records, marks))


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    position = _columns(shard).index(shard.text)

    def edited(records: _Records) -> _Records:
        for row, record in records:
            edit = edits.at(row) if row >= 0 else None
            if edit is not None and isinstance(record, list):
                record[position] = str(edit.after)
            yield row, record

    _rewrite(shard, names[0], open_file, edited)


def _rewrite(shard: Shard, name: str, open_file: base.OpenFile, change: Callable[[_Records], _Records]) -> None:
    """Write records with the delimiter, encoding and compression of their file; quoting may differ.

    Args:
        shard: shard of the file.
        name: name of the copy.
        open_file: opens the copy.
        change: leaves out or edits records; one that cannot be read is its text, and is written as it is.
    """
    start = _start(shard)
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        open_file(name) as sink,
        packed_file(sink, suffix_compression(shard.path)) as out,
    ):
        out.write(start.mark + base.encoded(-1, start.separator, shard, start.mark))
        for row, record in change(csv_rows(file, shard.limits.document_bytes, shard.dialect)):
            text = record if isinstance(record, str) else csv_record(record, shard.dialect) + start.line_end
            out.write(base.encoded(row, text, shard, start.mark))


def _schema(shard: Shard) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in _columns(shard)])


def _records(source: base.ExportSource) -> base.Records:
    shard = source.first
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        most, wanted = shard.limits.document_bytes, base.wanted_columns(shard)
        for number, record in enumerate(csv_records(file, most, shard.dialect, wanted)):
            yield number, dict(record) if isinstance(record, dict) else None


CSV = base.Format(
    "csv",
    "line",
    _inspect,
    _rows,
    columns=_columns,
    export=base.Exporter(_copy, schema=_schema, records=_records),
    edit=_edit,
    suffixes=(".csv", _TABS),
    estimate=_estimate,
    settings=frozenset({"encoding", "delimiter", "quoting"}),
    compressed=True,
    place=2,
)
