"""JSON files that are one array of objects, each a document. They are read from the start, element by element.

The bytes of an element are found without parsing: memory holds one element, within the limit of a document.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from shlex import quote
from typing import IO, Any

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.formats.jsonl import ARRAY, check_first_rows, edited_line, object_columns, parsed_line, parsed_rows
from pipeline.corpus.input_files import Extent, Overlong, columns_in_dialect, estimated_extent, open_plain, packed_file
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import InputFile, Shard
from pipeline.corpus.unpacking import suffix_compression
from pipeline.errors import UserError, error_line

_PIECE = 1 << 20
_FIRST = 100  # elements from which column names are read
_MARK = b"\xef\xbb\xbf"
_OUTSIDE, _INSIDE = re.compile(rb'["\[\]{},]'), re.compile(rb'["\\]')  # of strings
_SPACE = b" \t\r\n"


class _Scanner:
    """The pieces of the elements of an array, by number; pieces of other bytes are left out."""

    def __init__(self) -> None:
        self.depth = 0  # of brackets: 1 in the array
        self.ended = False  # behind the array
        self._string, self._escaped = False, False
        self._number = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Pieces of elements in the next bytes of the file, each with the number of its element; commas are left out.

        Raises:
            OSError: the file is no array, or more follows its end.
        """
        position = start = 0
        while position < len(data) and not self.ended:
            if self._escaped:
                self._escaped, position = False, position + 1
                continue
            match = (_INSIDE if self._string else _OUTSIDE).search(data, position)
            if match is None:
                break
            position = match.end()
            mark = match[0]
            if self._string:
                self._escaped, self._string = mark == b"\\", mark == b"\\"
            elif mark == b'"':
                self._string = True
            elif mark in b"[{":
                self.depth += 1
                start = position if self.depth == 1 else start
            elif mark in b"]}" or self.depth == 1:
                self.depth -= mark in b"]}"
                if self.depth == 0 or (mark == b"," and self.depth == 1):
                    yield self._number, data[start : match.start()]
                    self._number += 1
                    start = position
                self.ended = self.depth == 0
        if self.ended:
            start = position
            if data[start:].strip(_SPACE + b"\0"):
                raise OSError("more follows the end of its array: give every array as a file")
        elif self.depth and start < len(data):
            yield self._number, data[start:]
        elif data[start:].strip(_SPACE):
            raise OSError("it is no array of objects")


def _pieces(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """All pieces of elements of a file. Raises OSError and EOFError: it is not a whole array."""
    scanner = _Scanner()
    data = file.read(_PIECE).removeprefix(_MARK)
    while data:
        yield from scanner.feed(data)
        data = file.read(_PIECE)
    if not scanner.ended:
        raise EOFError("it ends before its array does")


def _elements(shard: Shard) -> Iterator[tuple[int, bytes | Overlong]]:
    """The elements of an array with their row numbers. What is blank, as behind a last comma, is no element."""
    most, row = shard.limits.document_bytes, 0
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        for _, pieces in itertools.groupby(_pieces(file), key=lambda piece: piece[0]):
            kept, size = list[bytes](), 0
            for _, piece in pieces:
                piece = piece if size else piece.lstrip(_SPACE)
                size += len(piece)
                if size <= most:
                    kept.append(piece)
                elif kept:
                    kept.clear()
            if size:
                yield row, b"".join(kept) if size <= most else Overlong(size)
                row += 1


def _first_rows(shard: Shard) -> list[dict[str, Any]]:
    """The first objects of a file. Raises UserError: none of the first elements is an object, or it is damaged."""
    try:
        first = [element for _, element in itertools.islice(_elements(shard), _FIRST)]
    except (OSError, EOFError) as error:
        raise UserError(f"{shard.name} is not a readable JSON array: {error_line(error)}") from None
    rows = [parsed_line(element, shard) for element in first]
    objects = [row for row in rows if isinstance(row, dict)]
    if not objects and first:
        problem = next((row.message for row in rows if isinstance(row, base.Unreadable)), "")
        jq = f"; write objects: jq -c '.[] | {{text: .}}' {quote(os.path.basename(shard.path))} > lines.jsonl"
        remedy = jq if rows and all(isinstance(element, bytes) and element[:1] == b'"' for element in first) else ""
        raise UserError(f"{shard.name}: its array holds no object with named fields ({problem}){remedy}")
    return objects


def _columns(shard: Shard) -> list[str]:
    return object_columns(_first_rows(shard), base.wanted_columns(shard))


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    if len(bytes(range(256)).decode(source.encoding, "replace")) != 256 and source.encoding != "utf-8":
        raise UserError(f"{entry.name}: a JSON array is read in UTF-8 or an encoding of one byte a character")
    rows: list[dict[str, Any]] = []  # read once: elements may be long

    def read(shard: Shard) -> list[str]:
        rows.extend(_first_rows(shard))
        return object_columns(rows, source.columns)

    columns = columns_in_dialect(read, entry, source, limits, wide=False)
    if not rows:
        return replace(entry, rows=0)
    check_first_rows(source, entry.name, rows, columns)
    return entry


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    return parsed_rows(_elements(shard), shard, watch)


def _estimate(entry: InputFile) -> Extent:
    def count(data: bytes) -> int:
        """Number of elements that end in the start of a file."""
        scanner = _Scanner()
        numbers = {number for number, piece in scanner.feed(data.removeprefix(_MARK)) if piece.strip(_SPACE)}
        return len(numbers) if scanner.ended else max(1, len(numbers) - 1)

    return estimated_extent(entry, count, lambda part, head: count(head) * len(part) // max(1, len(head)))


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Copy the kept elements byte for byte into an array, one a line."""
    _write(source.first, source.name, open_file, base.kept_numbered(_numbered(source.first), marks))


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    def edited() -> Iterator[tuple[int, bytes]]:
        for row, pieces in itertools.groupby(_numbered(shard), key=lambda piece: piece[0]):
            edit = edits.at(row)
            if edit is None:
                yield from pieces
            else:
                yield row, edited_line(b"".join(piece for _, piece in pieces), shard, edit)

    _write(shard, names[0], open_file, edited())


def _numbered(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """The pieces of elements with the row numbers of `_elements`; memory holds one piece."""
    row = -1
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        for _, pieces in itertools.groupby(_pieces(file), key=lambda piece: piece[0]):
            begun = False
            for _, piece in pieces:
                piece = piece if begun else piece.lstrip(_SPACE)
                row, begun = row + (bool(piece) and not begun), begun or bool(piece)
                if piece:
                    yield row, piece


def _write(shard: Shard, name: str, open_file: base.OpenFile, pieces: Iterator[tuple[int, bytes]]) -> None:
    """Write pieces of elements as an array, with the compression of the file."""
    last = None
    with open_file(name) as sink, packed_file(sink, suffix_compression(shard.path)) as out:
        for row, piece in pieces:
            out.write((b"[\n" if last is None else b",\n" if row != last else b"") + piece)
            last = row
        out.write(b"[]\n" if last is None else b"\n]\n")


def _records(source: base.ExportSource) -> base.Records:
    for number, element in _elements(source.first):
        row = parsed_line(element, source.first)
        yield number, None if isinstance(row, base.Unreadable) else row


JSON_ARRAY = base.Format(
    ARRAY,
    "line",
    _inspect,
    _rows,
    columns=_columns,
    export=base.Exporter(_copy, records=_records),
    edit=_edit,
    estimate=_estimate,
    settings=frozenset({"encoding"}),
    compressed=True,
    lists=True,
    place=2,
)
