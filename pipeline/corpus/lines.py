"""Lines and records of bounded length: what is longer is passed over in pieces, and never held in memory."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

_PIECE = 1 << 20

csv.field_size_limit(1 << 31)


@dataclass(frozen=True, slots=True)
class Overlong:
    """In the place of a line or a record: how long it is."""

    size: int  # bytes, with the end of the line; of a record characters


def bounded_lines(
    file: IO[bytes], most: int, within: int = sys.maxsize, passed: int = sys.maxsize
) -> Iterator[bytes | Overlong]:
    """The lines of a file from where it stands, with their ends.

    Args:
        file: opened for reading.
        most: bytes of a line, without its end, >= 1.
        within: bytes after which no line begins.
        passed: bytes after which a line that is too long is not read to its end, so that its size is not known.
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
        yield Overlong(len(line) + rest)


def skip_line(file: IO[bytes], most: int = sys.maxsize) -> int:
    """Read to the end of a line, or `most` bytes of it, and say how many bytes that was."""
    size = 0
    while size < most and (piece := file.readline(min(_PIECE, most - size))):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def csv_records(file: IO[bytes], most: int) -> Iterator[dict[str, str | None] | Overlong]:
    """The records of a CSV file by the names of its first one, as `csv.DictReader` gives them.

    A record that is too long ends with the first line after which its quotes are even in number.

    Args:
        file: at its beginning.
        most: characters of a record, >= 1.

    Raises:
        csv.Error: the first record is too long, or no CSV.
    """
    source = _RecordLines(file, most)
    reader = csv.DictReader(source)
    names = _names(reader, most)
    while True:
        source.begin()
        try:
            record = next(reader)
        except StopIteration:
            return
        except _TooLongError:
            yield Overlong(source.skip_record())
            reader = csv.DictReader(source, fieldnames=names)
        else:
            yield record


def csv_pieces(file: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """All bytes of a CSV file in pieces, each with the number of its record as `csv_records` gives them; the first: -1.

    Lines that are empty stand with the record behind them; of a record that is too long memory holds a piece.

    Args:
        file: at its beginning, behind a byte order mark if it has one.
        most: characters of a record, >= 1.

    Raises:
        csv.Error: as `csv_records`.
    """
    source = _RecordLines(file, most, kept=True)
    reader = csv.DictReader(source)
    names = _names(reader, most)
    yield -1, source.taken()
    for row in itertools.count():
        source.begin()
        try:
            next(reader)
        except StopIteration:
            yield row, source.taken()
            return
        except _TooLongError:
            yield row, source.taken()
            yield from ((row, _bytes_of(piece)) for piece in source.rest_of_record())
            reader = csv.DictReader(source, fieldnames=names)
        else:
            yield row, source.taken()


def csv_columns(file: IO[bytes], most: int) -> list[str]:
    """The names of a CSV file, from its first record.

    Raises:
        csv.Error: it is too long, or no CSV.
    """
    return _names(csv.DictReader(_RecordLines(file, most)), most)


def _names(reader: csv.DictReader[str], most: int) -> list[str]:
    try:
        return list(reader.fieldnames or [])
    except _TooLongError:
        raise csv.Error(f"its first record has more than {most:,} characters (limits.document_bytes)") from None


class _TooLongError(Exception):
    """The record at hand is longer than any may be."""


class _RecordLines:
    """The lines of a text for `csv.reader`, with an eye on how long the record at hand is."""

    def __init__(self, file: IO[bytes], most: int, kept: bool = False) -> None:
        self.text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
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
        line = self.text.readline(self.most + 2)
        if not line:
            raise StopIteration
        if self.lines is not None:
            self.lines.append(line)
        self.size += len(line)
        self.quotes += line.count('"')
        if self.size > self.most + 2 or not (line.endswith(("\n", "\r")) or len(line) < self.most + 2):
            self.ended = line.endswith(("\n", "\r"))
            raise _TooLongError
        return line

    def skip_record(self) -> int:
        """Read to the end of a record that is too long, and say how many characters it has."""
        for _ in self.rest_of_record():
            pass
        return self.size

    def rest_of_record(self) -> Iterator[str]:
        """Read to the end of a record that is too long, in pieces."""
        while not (self.ended and self.quotes % 2 == 0):
            line = self.text.readline(_PIECE)
            if not line:
                break
            self.size += len(line)
            self.quotes += line.count('"')
            self.ended = line.endswith(("\n", "\r"))
            yield line

    def taken(self) -> bytes:
        """The lines that were kept since this was called last, as the file has them."""
        lines, self.lines = self.lines or [], []
        return _bytes_of("".join(lines))


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
