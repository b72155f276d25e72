"""CSV files: the first record contains the column names. Kept records are copied byte for byte."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO

import pyarrow as pa

from pipeline.config.corpus import Dialect, LimitsConfig, SourceConfig, mark_of
from pipeline.corpus.files import (
    Extent,
    Overlong,
    columns_in_dialect,
    compression_of,
    csv_columns,
    csv_pieces,
    csv_records,
    delimiter_of,
    estimated_extent,
    head_of,
    open_plain,
    packed_file,
)
from pipeline.corpus.formats import base
from pipeline.corpus.formats.jsonl import Numbered, copy_pieces, line_ends
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError

_BLANK = re.compile(r"[\r\n]*")
_LINE_END = re.compile(r"[\r\n]*\Z")

_LONGEST_MARK = 4


def _columns(shard: Shard) -> list[str]:
    """The column names of a file. Raises UserError: its first record is too long or is not CSV."""
    try:
        with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
            return csv_columns(file, shard.limits.document_bytes, shard.dialect)
    except (ValueError, OSError, EOFError, csv.Error) as error:
        raise UserError(f"{shard.name} is not a readable CSV file: {' '.join(str(error).split())}") from None


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    dialect, columns = source.dialect, columns_in_dialect(_columns, entry, source, limits)
    if len(columns) == 1 and (missing := [column for column in source.columns if column not in columns]):
        delimiter = delimiter_of(head_of(entry.path).decode(dialect.codec, "replace"))
        if delimiter not in (None, dialect.delimiter):
            raise UserError(
                f"no column {missing[0]!r} in {entry.name}, whose single column is {columns[0]!r}; set delimiter: "
                f"{json.dumps(delimiter)}"
            )
    base.check_columns(source, entry.name, columns)
    return entry


def _rows(shard: Shard, watch: base.Watch) -> Iterator[base.Row]:
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        for row, value in enumerate(csv_records(file, shard.limits.document_bytes, shard.dialect)):
            if isinstance(value, Overlong):
                yield row, base.overlong(value, "characters", shard), *base.NOTHING
            else:
                yield row, base.DEADLY if watch(row, False) else value.get(shard.text), *base.other_fields(value, shard)


def _estimate(entry: InputFile) -> Extent:
    dialect = entry.dialect

    def count(data: bytes) -> int | None:
        """Number of records without the column names; None if records cannot be distinguished."""
        text = io.StringIO(data.decode(dialect.codec, "replace"), newline="")
        try:
            return sum(1 for _ in csv.DictReader(text, delimiter=dialect.delimiter))
        except csv.Error:
            return None

    def ends(part: bytes, head: bytes) -> int:
        first = head.decode(dialect.codec, "replace").split("\n")[0]
        return _row_ends(part, len(next(csv.reader([first], delimiter=dialect.delimiter), [])), dialect)

    return estimated_extent(entry, count, ends)


def _row_ends(data: bytes, columns: int, dialect: Dialect) -> int:
    """Rows that end in a part of a CSV file, which may start inside quotes: the parse with more whole rows is used."""
    text = data.decode(dialect.encoding, "replace")
    parses = []
    for start in ("", '"') if '"' in text else ("",):
        try:
            lines = io.StringIO(start + text, newline="")
            rows = [len(row) for row in csv.reader(lines, delimiter=dialect.delimiter) if row]
        except csv.Error:
            continue
        parses.append((-rows[1:-1].count(columns) / max(1, len(rows) - 2), len(rows)))
    return min(parses)[1] - 1 if parses else line_ends(data)


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
        for number, record in enumerate(csv_records(file, shard.limits.document_bytes, shard.dialect)):
            yield number, None if isinstance(record, Overlong) else dict(record)


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
    dialect, delimiter = shard.dialect, shard.dialect.delimiter
    encoding = dialect.reversible(mark).encoding if dialect.is_wide else dialect.encoding
    text = piece.decode(encoding, dialect.errors)
    start, end = _BLANK.match(text).end(), _LINE_END.search(text).start()  # type: ignore[union-attr]
    fields = _fields_of(text[start:], delimiter)
    fields[position] = str(edit.after)
    before, after = ('"{}"'.format(str(value).replace('"', '""')) for value in (edit.before, edit.after))
    if text.count(before) == 1 and _fields_of((edited := text.replace(before, after))[start:], delimiter) == fields:
        return base.encoded(edit, edited, shard, mark)
    record = io.StringIO(newline="")
    csv.writer(record, delimiter=delimiter, lineterminator="").writerow(fields)
    return base.encoded(edit, f"{text[:start]}{record.getvalue()}{text[end:]}", shard, mark)


def _fields_of(record: str, delimiter: str) -> list[str]:
    return next(csv.reader(io.StringIO(record, newline=""), delimiter=delimiter))


CSV = base.Format(
    "csv",
    "line",
    _inspect,
    _rows,
    columns=_columns,
    export=base.Exporter(partial(copy_pieces, pieces=_pieces), schema=_schema, records=_records),
    edit=_edit,
    suffixes=(".csv",),
    estimate=_estimate,
    settings=frozenset({"encoding", "delimiter"}),
    compressed=True,
    place=2,
)
