"""Lines and records of bounded length: what is longer is passed over in pieces, and never held in memory."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from pipeline.config.dialect import PLAIN, Dialect

_PIECE = 1 << 20

csv.field_size_limit(1 << 31)


@dataclass(frozen=True, slots=True)
class Overlong:
    """In the place of a line or a record: how long it is."""

    size: int  # bytes, with the end of the line; of a record characters
    whole: bool = True  # False where the line was not read to its end, so that it is longer


def bounded_lines(
    file: IO[bytes], most: int, within: int = sys.maxsize, passed: int = sys.maxsize
) -> Iterator[bytes | Overlong]:
    """The lines of a file from where it stands, with their ends.

    Args:
        file: opened for reading.
        most: bytes of a line, without its end, >= 1.
        within: bytes after which no line begins.
        passed: bytes after which a line that is too long is not read to its end; >= `within`.
    """
    position = 0
    while position < within and (line := file.readline(most + 2)):
        position += len(line)
        whole = line.endswith(b"\n") or len(line) < most + 2
        if whole and (len(line) <= most or len(line.rstrip(b"\r\n")) <= most):
            yield line
            continue
        rest = 0 if line.endswith(b"\n") else skip_line(file, passed)
        position += rest
        yield Overlong(len(line) + rest, whole=rest < passed)


def skip_line(file: IO[bytes], most: int = sys.maxsize) -> int:
    """Read to the end of a line, or `most` bytes of it, and return how many bytes that was."""
    size, line = 0, b""
    while size < most and not line.endswith(b"\n") and (line := file.readline(min(_PIECE, most - size))):
        size += len(line)
    return size


def csv_records(file: IO[bytes], most: int, dialect: Dialect = PLAIN) -> Iterator[dict[str, str | None] | Overlong]:
    """The records of a CSV file by the names of its first one, as `csv.DictReader` gives them.

    A record that is too long ends with the first line after which its quotes are even in number.

    Args:
        file: at its beginning.
        most: characters of a record, >= 1.
        dialect: of the file.

    Raises:
        csv.Error: the first record is too long, or no CSV.
        UnicodeDecodeError: the file is not of the encoding, and what follows cannot be decoded.
    """
    source = _RecordLines(file, most, dialect)
    for record in itertools.islice(_records(source), 1, None):
        if record is None:
            for _ in source.rest_of_record():
                pass
        yield Overlong(source.size) if record is None else record


def csv_pieces(file: IO[bytes], most: int, dialect: Dialect = PLAIN) -> Iterator[tuple[int, bytes]]:
    """All bytes of a CSV file in pieces, each with the number of its record as `csv_records` gives them; the first: -1.

    Lines that are empty stand with the record behind them; of a record that is too long memory holds a piece.

    Args:
        file: at its beginning, behind a byte order mark if it has one.
        most: characters of a record, >= 1.
        dialect: of the file, from `Dialect.reversible`.

    Raises:
        csv.Error: as `csv_records`.
        UnicodeDecodeError: as `csv_records`.
    """
    source, row = _RecordLines(file, most, dialect, kept=True), -1
    for row, record in enumerate(_records(source), -1):
        yield row, source.taken()
        if record is None:
            yield from ((row, source.bytes_of(piece)) for piece in source.rest_of_record())
    yield row + 1, source.taken()


def csv_columns(file: IO[bytes], most: int, dialect: Dialect = PLAIN) -> list[str]:
    """The names of a CSV file, from its first record.

    Raises:
        csv.Error: it is too long, or no CSV.
        UnicodeDecodeError: as `csv_records`.
    """
    return list(next(_records(_RecordLines(file, most, dialect))))


def _records(source: _RecordLines) -> Iterator[Any]:
    """The names of a CSV file, and then its records; None for one that is too long, before the rest of it is read."""
    reader = csv.DictReader(source, delimiter=source.dialect.delimiter)
    try:
        names = list(reader.fieldnames or [])
    except _TooLongError:
        most = source.most
        raise csv.Error(f"its first record has more than {most:,} characters (limits.document_bytes)") from None
    yield names
    while True:
        source.begin()
        try:
            record = next(reader, None)
        except _TooLongError:
            yield None
            reader = csv.DictReader(source, fieldnames=names, delimiter=source.dialect.delimiter)
        else:
            if record is None:
                return
            yield record


class _TooLongError(Exception):
    """The record at hand is longer than any may be."""


class _RecordLines:
    """The lines of a text for `csv.reader`, with an eye on how long the record at hand is."""

    def __init__(self, file: IO[bytes], most: int, dialect: Dialect, kept: bool = False) -> None:
        self.dialect = dialect
        self.text = io.TextIOWrapper(file, encoding=dialect.codec, errors=dialect.errors, newline="")
        self.most = most
        self.lines: list[str] | None = [] if kept else None  # since they were taken last
        self.begin()

    def begin(self) -> None:
        """The lines that follow are of another record."""
        self.size = 0
        self.quotes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._read(self.most + 2)
        if not line:
            raise StopIteration
        if self.lines is not None:
            self.lines.append(line)
        if self.size > self.most + 2 or not (self.ended or len(line) < self.most + 2):
            raise _TooLongError
        return line

    def _read(self, most: int) -> str:
        """The next line, or the beginning of a longer one; empty at the end of the text."""
        line = self.text.readline(most)
        self.size += len(line)
        self.quotes += line.count('"')
        self.ended = line.endswith(("\n", "\r"))
        return line

    def rest_of_record(self) -> Iterator[str]:
        """Read to the end of a record that is too long, in pieces."""
        while (self.quotes % 2 or not self.ended) and (piece := self._read(_PIECE)):
            yield piece

    def taken(self) -> bytes:
        """The lines that were kept since this was called last, as the file has them."""
        lines, self.lines = self.lines or [], []
        return self.bytes_of("".join(lines))

    def bytes_of(self, text: str) -> bytes:
        """A part of the text as the file has it."""
        return text.encode(self.dialect.encoding, self.dialect.errors)
