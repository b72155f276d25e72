"""JSONL, CSV and text files: what is kept is copied byte for byte, and never parsed and written anew."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import IO, BinaryIO, TypeVar, cast

import fsspec
import pyarrow as pa

from pipeline.config.dialect import mark_of
from pipeline.corpus.formats import compression_of, open_plain
from pipeline.corpus.lines import csv_pieces
from pipeline.corpus.shard import Shard
from pipeline.export.verdicts import RowMarks

_PIECE = 1 << 20
_AHEAD = 1 << 12  # rows whose marks are looked up together
_LONGEST_MARK = 4

Piece = TypeVar("Piece")


def copy_rows(shard: Shard, marks: RowMarks, sink: BinaryIO) -> None:
    """Copy the kept lines of a JSONL file, or the first record and the kept ones of a CSV file, packed as the file is.

    Lines that are no documents stay where the rest is kept, and go where the selected are.

    Args:
        shard: any one of the file.
        marks: of the rows of the whole file.
        sink: to be written.

    Raises:
        OSError: the file is damaged.
    """
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        packed_sink(sink, compression_of(shard.path)) as out,
    ):
        pieces = line_pieces(file) if shard.format == "jsonl" else record_pieces(shard, file)
        for piece in _kept_pieces(pieces, marks):
            out.write(piece)


def copy_text(shard: Shard, inner: str, sink: BinaryIO) -> None:
    """Copy a text file of a folder of them, or the one that the input is.

    Raises:
        OSError: it cannot be read.
    """
    with fsspec.open(f"{shard.path}/{inner}" if inner else shard.path, "rb") as file:
        while piece := file.read(_PIECE):
            sink.write(piece)


def kept_lines(shard: Shard, marks: RowMarks) -> Iterator[tuple[int, bytes | None]]:
    """Number and content of the kept lines of a JSONL file; None for one that is longer than a document may be."""
    most = shard.limits.document_bytes + len(b"\r\n")
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        for row, group in itertools.groupby(kept_numbered(line_pieces(file), marks), key=itemgetter(0)):
            pieces, size = [], 0
            for _, piece in group:
                size += len(piece)
                pieces.append(piece if size <= most else b"")
            yield row, b"".join(pieces) if size <= most else None


def _kept_pieces(pieces: Iterable[tuple[int, bytes]], marks: RowMarks) -> Iterator[bytes]:
    return (piece for _, piece in kept_numbered(pieces, marks))


def kept_numbered(pieces: Iterable[tuple[int, Piece]], marks: RowMarks) -> Iterator[tuple[int, Piece]]:
    """The pieces of kept rows, and of row -1, which is what stands before them."""
    start, flags = 0, list[bool]()
    for row, piece in pieces:
        while row >= start + len(flags):
            start += len(flags)
            flags = marks.following(_AHEAD).tolist()
        if row < 0 or flags[row - start]:
            yield row, piece


def line_pieces(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, long ones in several pieces."""
    row = 0
    while piece := file.readline(_PIECE):
        yield row, piece
        row += piece.endswith(b"\n")


def record_pieces(shard: Shard, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The records of a CSV file with their numbers, as the file has them; the first, and a byte order mark, as -1."""
    with open_plain(shard.path, shard.limits.unpacked_bytes) as other:
        encoding, mark = mark_of(other.read(_LONGEST_MARK)) or ("", b"")
    if encoding != shard.encoding:
        mark = b""
    elif mark:
        yield -1, file.read(len(mark))
    yield from csv_pieces(file, shard.limits.document_bytes, shard.dialect.reversible(mark))


class _Unclosed(io.RawIOBase):
    """A file that stays open when what packs into it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._file.write(cast(bytes, data))


@contextmanager
def packed_sink(sink: BinaryIO, compression: str | None) -> Iterator[BinaryIO]:
    """The file through which a compressed one is written; the same content gives the same bytes."""
    if compression is None:
        yield sink
        return
    with pa.CompressedOutputStream(pa.PythonFile(_Unclosed(sink), "w"), compression) as stream:
        yield cast(BinaryIO, stream)
