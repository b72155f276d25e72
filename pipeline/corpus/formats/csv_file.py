"""CSV files: the first record contains the column names. Kept records are copied byte for byte."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import IO

import pyarrow as pa

from pipeline.config.corpus import PLAIN, Dialect, LimitsConfig, SourceConfig, mark_of
from pipeline.corpus.csv_records import (
    BadRecord,
    count_ends,
    count_records,
    csv_columns,
    csv_pieces,
    csv_records,
    record_of,
    split_record,
)
from pipeline.corpus.files import (
    Extent,
    Overlong,
    columns_in_dialect,
    delimiter_of,
    estimated_extent,
    head_of,
    open_plain,
    packed_file,
    separator_of,
)
from pipeline.corpus.formats import base
from pipeline.corpus.formats.jsonl import Numbered, copy_pieces, line_ends
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import InputFile, Shard
from pipeline.corpus.unpacking import compression_of
from pipeline.errors import UserError

_BLANK = re.compile(r"[\r\n]*")
_LINE_END = re.compile(r"[\r\n]*\Z")

_LONGEST_MARK = 4
_TABS = ".tsv"


def _columns(shard: Shard) -> list[str]:
    """The column names of a file. Raises UserError: its first record is too long or is not CSV."""
    try:
        with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
            return csv_columns(file, shard.limits.document_bytes, shard.dialect)
    except (ValueError, OSError, EOFError, csv.Error) as error:
        raise UserError(f"{shard.name} is not a readable CSV file: {' '.join(str(error).split())}") from None


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    entry = replace(entry, dialect=_own_dialect(entry))
    dialect, columns = entry.dialect, columns_in_dialect(_columns, entry, source, limits)
    if len(columns) == 1 and (missing := [column for column in source.columns if column not in columns]):
        delimiter = delimiter_of(head_of(entry.path).decode(dialect.codec, "replace"))
        if delimiter not in (None, dialect.delimiter):
            raise UserError(
                f"no column {missing[0]!r} in {entry.name}, whose single column is {columns[0]!r}; set delimiter: "
                f"{json.dumps(delimiter)}"
            )
    base.check_columns(source, entry.name, columns)
    return entry


def _own_dialect(entry: InputFile) -> Dialect:
    """The dialect of a file whose delimiter is not configured: that of a first line `sep=;`, or of a .tsv file."""
    dialect = entry.dialect
    if dialect.delimiter != PLAIN.delimiter or entry.size == 0:
        return dialect
    try:
        first = head_of(entry.path).decode(dialect.codec, "replace").splitlines(keepends=True)[:1]
    except (OSError, EOFError):
        return dialect  # the error of the file is raised when its columns are read
    line = "".join(first)
    tabs = _TABS in entry.path[-len(_TABS) - 4 :] and ("\t" in line or "," not in line)
    return replace(dialect, delimiter=separator_of(line) or ("\t" if tabs else dialect.delimiter))


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        wanted, most = base.wanted_columns(shard), shard.limits.document_bytes
        for row, value in enumerate(csv_records(file, most, shard.dialect, wanted, notes)):
            if isinstance(value, Overlong):
                yield row, base.overlong(value, "characters", shard), *base.NOTHING
            elif isinstance(value, BadRecord):
                yield row, base.Unreadable("undecodable", value.message), *base.NOTHING
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
        named = separator_of("".join(first[:1])) is not None
        ended = count_ends(part, len(split_record("".join(first[named:][:1]), dialect)), dialect)
        return line_ends(part) if ended is None else ended

    return estimated_extent(entry, count, ends)


def _mark(shard: Shard) -> bytes:
    """The byte order mark of a file; empty if it has none of its encoding."""
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        encoding, mark = mark_of(file.read(_LONGEST_MARK)) or ("", b"")
    return mark if encoding == shard.dialect.encoding else b""


def _pieces(shard: Shard, file: IO[bytes]) -> Numbered:
    if mark := _mark(shard):
        yield -1, file.read(len(mark))
    yield from csv_pieces(file, shard.limits.document_bytes, shard.dialect.reversible(mark))


def _schema(shard: Shard) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in _columns(shard)])


def _records(source: base.ExportSource) -> base.Records:
    shard = source.first
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        most, wanted = shard.limits.document_bytes, base.wanted_columns(shard)
        for number, record in enumerate(csv_records(file, most, shard.dialect, wanted)):
            yield number, dict(record) if isinstance(record, dict) else None


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    position, mark = _columns(shard).index(shard.text), _mark(shard)
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        open_file(names[0]) as sink,
        packed_file(sink, compression_of(shard.path)) as out,
    ):
        for row, piece in _pieces(shard, file):
            edit = edits.of(row) if row >= 0 else None
            out.write(piece if edit is None else _edited_record(piece, position, shard, mark, edit))


def _edited_record(piece: bytes, position: int, shard: Shard, mark: bytes, edit: base.TextEdit) -> bytes:
    """A CSV record with another text: only the characters of the field change if the field occurs once."""
    dialect = shard.dialect
    encoding = dialect.reversible(mark).encoding if dialect.is_wide else dialect.encoding
    text = piece.decode(encoding, dialect.errors)
    start, end = _BLANK.match(text).end(), _LINE_END.search(text).start()  # type: ignore[union-attr]
    fields = split_record(text[start:], dialect)
    fields[position] = str(edit.after)
    before, after = ('"{}"'.format(str(value).replace('"', '""')) for value in (edit.before, edit.after))
    if text.count(before) == 1 and split_record((edited := text.replace(before, after))[start:], dialect) == fields:
        return base.encoded(edit, edited, shard, mark)
    return base.encoded(edit, f"{text[:start]}{record_of(fields, dialect)}{text[end:]}", shard, mark)


CSV = base.Format(
    "csv",
    "line",
    _inspect,
    _rows,
    columns=_columns,
    export=base.Exporter(partial(copy_pieces, pieces=_pieces), schema=_schema, records=_records),
    edit=_edit,
    suffixes=(".csv", _TABS),
    estimate=_estimate,
    settings=frozenset({"encoding", "delimiter", "quoting"}),
    compressed=True,
    place=2,
)
