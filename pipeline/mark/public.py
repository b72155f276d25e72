"""Copies of files in which texts are edited and everything else is as it was."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.corpus.formats import compression_of, first_columns, open_plain
from pipeline.corpus.shard import Shard
from pipeline.export.tables import codecs_of, write_parquet
from pipeline.export.text_files import copy_text, line_pieces, packed_sink, record_pieces

_ROWS = 1 << 10  # of a Parquet file at a time
_BLANK = re.compile(r"[\r\n]*")
_ENDING = re.compile(r"[\r\n]*\Z")

OpenPublic = Callable[[str], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True, slots=True)
class TextEdit:
    """The text of a row, and the one in its place; None: the row stays as it is."""

    row: int
    before: str
    after: str | None


class RowEdits:
    """Edits in the order of their rows, looked up by rows in the same order."""

    def __init__(self, edits: Iterator[TextEdit]) -> None:
        """Take the edits of a file; they are made while its copy is written."""
        self._edits = edits
        self._next = next(edits, None)

    def of(self, row: int) -> TextEdit | None:
        """The edit of a row; None where it stays as it is."""
        while self._next is not None and self._next.row < row:
            self._next = next(self._edits, None)
        edit = self._next
        return edit if edit is not None and edit.row == row and edit.after is not None else None

    def finish(self) -> None:
        """Make the edits of rows that were not looked up."""
        for _ in self._edits:
            pass


def write_edited(shard: Shard, names: list[str], edits: RowEdits, open_file: OpenPublic) -> None:
    """Copy an input with edited texts, in its format and compression.

    Args:
        shard: all of the input.
        names: of the copy; of a folder of text files, one for each.
        edits: of its rows.
        open_file: opens a file of the copy by its name.

    Raises:
        OSError: the input cannot be read.
    """
    if shard.format == "txt":
        for row, (inner, name) in enumerate(zip(shard.files, names, strict=True)):
            with open_file(name) as sink:
                _write_text(shard, inner, edits.of(row), sink)
    else:
        with open_file(names[0]) as sink:
            {"jsonl": _write_lines, "csv": _write_records, "parquet": _write_rows}[shard.format](shard, edits, sink)
    edits.finish()


def _write_text(shard: Shard, inner: str, edit: TextEdit | None, sink: BinaryIO) -> None:
    if edit is None or edit.after is None:
        copy_text(shard, inner, sink)
        return
    with fsspec.open(f"{shard.path}/{inner}" if inner else shard.path, "rb") as file:
        mark = codecs.BOM_UTF8 if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else b""
    sink.write(mark + edit.after.encode())


def _write_lines(shard: Shard, edits: RowEdits, sink: BinaryIO) -> None:
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        packed_sink(sink, compression_of(shard.path)) as out,
    ):
        for row, pieces in itertools.groupby(line_pieces(file), key=itemgetter(0)):
            edit = edits.of(row)
            if edit is None:
                out.writelines(piece for _, piece in pieces)
            else:
                out.write(_edited_line(b"".join(piece for _, piece in pieces), shard.text, edit))


def _edited_line(line: bytes, column: str, edit: TextEdit) -> bytes:
    """A line of JSON with another text: only the characters of the string change where it stands there once."""
    mark = codecs.BOM_UTF8 if line.startswith(codecs.BOM_UTF8) else b""
    line = line[len(mark) :]
    value = {**json.loads(line), column: edit.after}
    for ascii_only in (False, True):
        before, after = (json.dumps(text, ensure_ascii=ascii_only).encode() for text in (edit.before, edit.after))
        if line.count(before) == 1 and json.loads(edited := line.replace(before, after)) == value:
            return mark + edited
    return mark + json.dumps(value, ensure_ascii=line.isascii()).encode() + line[len(line.rstrip(b"\r\n")) :]


def _write_records(shard: Shard, edits: RowEdits, sink: BinaryIO) -> None:
    columns = first_columns("csv", shard.path, shard.name, shard.limits, shard.dialect)
    position = columns.index(shard.text)
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        packed_sink(sink, compression_of(shard.path)) as out,
    ):
        for row, piece in record_pieces(shard, file):
            edit = edits.of(row) if row >= 0 else None
            out.write(piece if edit is None else _edited_record(piece, position, shard.delimiter, edit))


def _edited_record(piece: bytes, position: int, delimiter: str, edit: TextEdit) -> bytes:
    """A CSV record with another text: only the quoted field changes where it stands there once."""
    text = piece.decode("utf-8", "surrogateescape")
    start, end = _BLANK.match(text).end(), _ENDING.search(text).start()  # type: ignore[union-attr]
    fields = _fields_of(text[start:], delimiter)
    fields[position] = str(edit.after)
    before, after = ('"{}"'.format(str(value).replace('"', '""')) for value in (edit.before, edit.after))
    if text.count(before) == 1 and _fields_of((edited := text.replace(before, after))[start:], delimiter) == fields:
        return edited.encode("utf-8", "surrogateescape")
    record = io.StringIO(newline="")
    csv.writer(record, delimiter=delimiter, lineterminator="").writerow(fields)
    return f"{text[:start]}{record.getvalue()}{text[end:]}".encode("utf-8", "surrogateescape")


def _fields_of(record: str, delimiter: str) -> list[str]:
    return next(csv.reader(io.StringIO(record, newline=""), delimiter=delimiter))


def _write_rows(shard: Shard, edits: RowEdits, sink: BinaryIO) -> None:
    with fsspec.open(shard.path, "rb") as file, closing(pq.ParquetFile(file, buffer_size=1 << 20)) as parquet:
        tables = _edited_tables(parquet, shard.text, edits)
        write_parquet(sink, parquet.schema_arrow, tables, codecs_of(parquet.metadata))


def _edited_tables(parquet: pq.ParquetFile, column: str, edits: RowEdits) -> Iterator[pa.Table]:
    schema, first = parquet.schema_arrow, 0
    place = schema.get_field_index(column)
    for batch in parquet.iter_batches(_ROWS):
        table = pa.Table.from_batches([batch], schema)
        changed = [edits.of(row) for row in range(first, first + len(batch))]
        first += len(batch)
        values = _replaced(batch.column(place), [None if edit is None else edit.after for edit in changed])
        yield table.set_column(place, schema.field(place), values)


def _replaced(column: pa.Array, texts: list[str | None]) -> Any:
    """A column of texts with others in the place of some, of its type."""
    kind = column.type
    if not any(text is not None for text in texts):
        return column
    plain = pa.large_binary() if kind in (pa.binary(), pa.large_binary()) else pa.large_string()
    values = (column.dictionary_decode() if pa.types.is_dictionary(kind) else column).cast(plain)
    news = [text.encode() if plain == pa.large_binary() else text for text in texts if text is not None]
    replaced = pc.replace_with_mask(values, pa.array([text is not None for text in texts]), pa.array(news, plain))
    return replaced.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else replaced.cast(kind)
