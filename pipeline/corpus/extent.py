"""How much an input holds: counted where that is cheap, else estimated from several places in it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import fsspec
import pyarrow as pa

from pipeline.config.dialect import Dialect
from pipeline.corpus.formats import compression_of, read_beginning
from pipeline.corpus.inputs import InputFile
from pipeline.corpus.picture_files import tar_rows
from pipeline.errors import UserError

_EDGE = 1 << 16
_PLACES = 16
_COMPRESSED_HEAD = 1 << 23


@dataclass(frozen=True, slots=True)
class Extent:
    """How much an input holds, without reading it whole."""

    rows: int
    exact: bool  # whether the rows were counted
    text_bytes: int  # decompressed, with what stands around the texts; about


@lru_cache(maxsize=1024)
def extent_of(entry: InputFile) -> Extent:
    """How much an input holds: counted, where its metadata say so or it is small; else estimated.

    A file that can be sought in is read in several places, so that rows may be longer in one part than in another; of
    a compressed file only the beginning is read, which says how well it packs too.

    Raises:
        UserError: the file is damaged.
    """
    if entry.rows is not None:
        return Extent(entry.rows, True, entry.size)
    compressed = compression_of(entry.path) is not None
    try:
        if entry.format == "tar":
            samples, counted_all = tar_rows(entry.path, entry.size)
            return Extent(samples, counted_all, entry.size)
        data, whole, packing = read_beginning(entry.path, _COMPRESSED_HEAD if compressed else _PLACES * _EDGE)
        is_csv, dialect = entry.format == "csv", entry.dialect
        text = data.decode(dialect.codec, "replace") if is_csv else ""
        counted = _csv_rows_in(text, dialect) if is_csv else _lines_in(data)
        if whole and counted is not None:
            return Extent(counted, True, len(data))
        parts = [data] if whole or compressed or dialect.is_wide else list(_places(entry))
    except (OSError, EOFError, pa.ArrowException) as error:
        raise UserError(f"{entry.name} is damaged: {' '.join(str(error).split())}") from None
    size = len(data) if whole else round(entry.size * packing)
    columns = len(next(csv.reader([text.split("\n")[0]], delimiter=dialect.delimiter), []))
    ends = sum(_csv_ends_in(part, columns, dialect) if is_csv else _ends_in(part) for part in parts)
    return Extent(max(1, round(size * ends / sum(map(len, parts)))), False, size)


def _places(entry: InputFile) -> Iterator[bytes]:
    """Parts of a file, evenly spread over it, its beginning and its end among them."""
    with fsspec.open(entry.path, "rb") as file:
        for place in range(_PLACES):
            file.seek(place * (entry.size - _EDGE) // (_PLACES - 1))
            yield file.read(_EDGE)


def _lines_in(data: bytes) -> int:
    """Lines that are not blank."""
    return sum(1 for line in data.split(b"\n") if line.strip())


def _ends_in(data: bytes) -> int:
    """Ends of lines that are not blank."""
    return sum(1 for line in data.split(b"\n")[:-1] if line.strip())


def _csv_rows_in(text: str, dialect: Dialect) -> int | None:
    """Rows below the first; None where they cannot be told apart."""
    try:
        return sum(1 for _ in csv.DictReader(io.StringIO(text, newline=""), delimiter=dialect.delimiter))
    except csv.Error:
        return None


def _csv_ends_in(data: bytes, columns: int, dialect: Dialect) -> int:
    """Rows that end in a part of a CSV file. It may begin inside quotes: the reading with more whole rows is taken."""
    text = data.decode(dialect.encoding, "replace")
    readings = []
    for start in ("", '"') if '"' in text else ("",):
        try:
            lines = io.StringIO(start + text, newline="")
            rows = [len(row) for row in csv.reader(lines, delimiter=dialect.delimiter) if row]
        except csv.Error:
            continue
        readings.append((-rows[1:-1].count(columns) / max(1, len(rows) - 2), len(rows)))
    return min(readings)[1] - 1 if readings else _ends_in(data)
