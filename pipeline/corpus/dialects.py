"""Which encoding and delimiter a text file has, from its beginning."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from pipeline.config.corpus import PLAIN, Dialect, LimitsConfig, SourceConfig, mark_of
from pipeline.corpus.files import open_plain
from pipeline.corpus.shard import InputFile, Shard, whole_shard
from pipeline.errors import UserError

_HEAD = 1 << 20
_DELIMITERS = ",;\t|"
_RECORDS = 50
_ZEROS = 0.05  # of the bytes at one position of four, above which zeros are part of the encoding
_ZERO_BYTES: dict[tuple[bool, ...], str] = {
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
}


def encoding_of(data: bytes) -> str | None:
    """The encoding of the beginning of a file, None where it is not recognised.

    It has a byte order mark, or zero bytes where the letters of Latin script have them in UTF-16 or UTF-32, or is UTF-8
    or cp1252. A file in which at least half of the lines that tell are UTF-8 is UTF-8: the others are damaged
    documents.
    """
    if (marked := mark_of(data)) is not None:
        return marked[0]
    if (wide := _wide_encoding(data)) is not None:
        return wide
    lines = [line for line in data.splitlines() if not line.isascii()]
    if 2 * sum(_decodes(line, "utf-8") for line in lines) >= len(lines):
        return "utf-8"
    return "cp1252" if all(_decodes(line, "cp1252") for line in lines) else None


def delimiter_of(text: str) -> str | None:
    """The delimiter with which all records of the beginning of a CSV file have equally many fields, at least two.

    A comma is preferred, then the one with the most fields; None where no delimiter fits.
    """
    counts = {delimiter: _fields(text, delimiter) for delimiter in _DELIMITERS}
    if counts[","] > 1:
        return ","
    best = max(counts, key=lambda delimiter: counts[delimiter])
    return best if counts[best] > 1 else None


def detected(path: str, settings: Container[str]) -> Dialect:
    """The dialect of a text file, from its beginning; the default where nothing else is recognised.

    Args:
        path: of the file.
        settings: of a dialect, that apply to its format.

    Raises:
        OSError: the file is damaged.
    """
    if "encoding" not in settings:
        return PLAIN
    data = head_of(path)
    encoding = encoding_of(data) or PLAIN.encoding
    if "delimiter" not in settings:
        return Dialect(encoding)
    text = data.decode(Dialect(encoding).codec, "replace")
    return Dialect(encoding, delimiter_of(text) or PLAIN.delimiter)


def suggested_encoding(path: str, dialect: Dialect) -> str | None:
    """The encoding of a file that is not of the one that is set; None where that fits, or none is recognised."""
    try:
        data = head_of(path)
    except (OSError, EOFError, UserError):
        return None
    encoding = encoding_of(data)
    wide = encoding is not None and Dialect(encoding).is_wide
    misfit = not _decodes(data, dialect.codec) or (wide if b"\0" in data else dialect.is_wide)
    return encoding if misfit and encoding != dialect.encoding else None


def head_of(path: str) -> bytes:
    """The beginning of a file, decompressed."""
    with open_plain(path) as file:
        return file.read(_HEAD)


def columns_in_dialect(
    columns_of: Callable[[Shard], list[str]], entry: InputFile, source: SourceConfig, limits: LimitsConfig
) -> list[str]:
    """The columns of a JSONL or CSV file.

    Args:
        columns_of: reads them in the dialect of a shard.
        entry: the file.
        source: whose columns are wanted.
        limits: of reading.

    Raises:
        UserError: as `columns_of`, or a column is missing that another encoding gives.
    """
    path, dialect = entry.path, source.dialect
    try:
        columns = columns_of(whole_shard(replace(entry, dialect=dialect), source, limits=limits))
    except UserError as error:
        if encoding := suggested_encoding(path, dialect):
            remedy = "convert it to UTF-8" if Dialect(encoding).is_wide else f"set encoding: {encoding}"
            raise UserError(f"{error}; it is not {dialect.label}: {remedy}") from None
        raise
    missing = next((column for column in source.columns if column not in columns), None)
    if missing is not None and (encoding := suggested_encoding(path, dialect)):
        raise UserError(
            f"no column {missing!r} in {entry.name}, which is not {dialect.label}; set encoding: {encoding}"
        )
    return columns


def single_column_note(columns: Sequence[str]) -> str:
    """A warning of a CSV file with one column whose name holds a delimiter; empty where it is not so."""
    if len(columns) != 1 or not any(delimiter in columns[0] for delimiter in _DELIMITERS):
        return ""
    return f"It has a single column named {columns[0]!r}: set delimiter if these are several columns."


def _fields(text: str, delimiter: str) -> int:
    """Fields of each of the first records; 0 where their numbers differ."""
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        counts = [len(record) for _, record in zip(range(_RECORDS), reader, strict=False) if record]
    except csv.Error:
        return 0
    counts = counts if len(counts) < 2 or len(text) < _HEAD else counts[:-1]
    return counts[0] if len(set(counts)) == 1 else 0


def _wide_encoding(data: bytes) -> str | None:
    """UTF-16 or UTF-32 without a byte order mark, if part of the text is in Latin script."""
    quarter = len(data) // 4
    if not quarter:
        return None
    zeros = tuple(data[position : 4 * quarter : 4].count(0) > _ZEROS * quarter for position in range(4))
    encoding = _ZERO_BYTES.get(zeros)
    return encoding if encoding is not None and _decodes(data, encoding) else None


def _decodes(data: bytes, encoding: str) -> bool:
    """Whether data are of an encoding; their last character may be cut."""
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start > 0 and error.start >= len(data) - 3 and not encoding.startswith("cp")
    return True
