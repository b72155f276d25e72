"""Input files: compression, encoding, delimiter, and reading within limits."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

import fsspec
import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from pipeline.config.corpus import LIMITS, LimitsConfig, SourceConfig
from pipeline.config.dialect import PLAIN, Dialect, mark_of
from pipeline.corpus.shard import InputFile, Shard, whole_shard
from pipeline.corpus.unpacking import Unpacked, suffix_compression
from pipeline.errors import UserError

BLOCK_BYTES = 1 << 22
"""Bytes per request to an object store."""

_EDGE = 1 << 16
_PLACES = 16
_COMPRESSED_HEAD = 1 << 23


def is_local(fs: Any) -> bool:
    """Whether a file system is local."""
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def has_local_path(fs: Any, path: str) -> bool:
    """Whether pyarrow opens a file by its path: a local one, in UTF-8."""
    return is_local(fs) and path == path.encode("utf-8", "replace").decode()


def line_digest(*parts: str) -> str:
    """16 hexadecimal digits of the SHA-256 of some lines."""
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _open(path: str) -> IO[bytes]:
    """Open a file without decompression. Object stores are read in blocks of some MiB: s3fs prefetches 50 MiB."""
    fs, name = fsspec.core.url_to_fs(path)
    if is_local(fs):
        return open(name, "rb", buffering=1 << 16)  # a long line is read in blocks of this size
    return cast(IO[bytes], fs.open(name, "rb", block_size=BLOCK_BYTES))


def open_plain(path: str, most: int = LIMITS.unpacked_bytes) -> IO[bytes]:
    """Open a file for reading, decompressed if the suffix of its name indicates a compression.

    Args:
        path: path of the file.
        most: maximum decompressed bytes; reading beyond raises UserError.
    """
    file = _open(path)
    if suffix_compression(path) is not None:
        return io.BufferedReader(Unpacked(path, file, most), 1 << 16)
    if isinstance(file, AbstractBufferedFile):  # its `readline` has no size limit
        return io.BufferedReader(file, 1 << 16)
    return file


@dataclass(frozen=True, slots=True)
class Extent:
    """Number of rows and bytes of an input, obtained without reading it completely."""

    rows: int
    exact: bool  # whether the rows were counted
    text_bytes: int  # approximate, decompressed, including what surrounds the texts


def estimated_extent(
    entry: InputFile, count: Callable[[bytes], int | None], ends: Callable[[bytes, bytes], int]
) -> Extent:
    """The extent of a text file: counted if it is small, else estimated.

    A seekable file is read in several places, since rows may be longer in one part than in another; a compressed file
    is read at its start only, which also gives the compression ratio.

    Args:
        entry: the file.
        count: returns the number of rows of a whole file; None if rows cannot be distinguished.
        ends: returns the number of rows that end in a part of the file, given that part and the start of the file.

    Raises:
        OSError: the file is damaged.
    """
    compressed = suffix_compression(entry.path) is not None
    most = _COMPRESSED_HEAD if compressed else _PLACES * _EDGE
    with open_plain(entry.path) as file:
        data = file.read(most)
        whole = len(data) < most or not file.read(1)
        raw = getattr(file, "raw", None)
        packed = raw.compressed if isinstance(raw, Unpacked) else len(data)
    if whole and (counted := count(data)) is not None:
        return Extent(counted, True, len(data))
    parts = [data] if whole or compressed or entry.dialect.is_wide else list(_places(entry))
    size = len(data) if whole else round(entry.size * (len(data) / max(1, packed)))
    rows = size * sum(ends(part, data) for part in parts) / sum(map(len, parts))
    return Extent(max(1, round(rows)), False, size)


def _places(entry: InputFile) -> Iterator[bytes]:
    """Evenly spaced parts of a file, including its start and its end."""
    with fsspec.open(entry.path, "rb") as file:
        for place in range(_PLACES):
            file.seek(place * (entry.size - _EDGE) // (_PLACES - 1))
            yield file.read(_EDGE)


class _Unclosed(io.RawIOBase):
    """A file that stays open when the compressor that writes to it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._file.write(cast(bytes, data))


@contextmanager
def packed_file(sink: BinaryIO, compression: str | None) -> Iterator[BinaryIO]:
    """A file that compresses what is written to it; the same content gives the same bytes."""
    if compression is None:
        yield sink
        return
    with pa.CompressedOutputStream(pa.PythonFile(_Unclosed(sink), "w"), compression) as stream:
        yield cast(BinaryIO, stream)


_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Overlong:
    """Placeholder for a line or record that is too long: its size."""

    size: int  # of a line: bytes including the line end; of a record: characters
    whole: bool = True  # False if the line was not read to its end and may be longer


def bounded_lines(
    file: IO[bytes], most: int, within: int = sys.maxsize, passed: int = sys.maxsize
) -> Iterator[bytes | Overlong]:
    """The lines of a file from its current position, including line ends.

    Args:
        file: file open for reading.
        most: maximum bytes of a line without its end, >= 1.
        within: lines that start after this many bytes are not returned.
        passed: a line that is too long is read at most up to this many bytes; >= `within`.
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
    """Read to the end of a line, or `most` bytes of it, and return the number of bytes read."""
    size, line = 0, b""
    while size < most and not line.endswith(b"\n") and (line := file.readline(min(_PIECE, most - size))):
        size += len(line)
    return size


_HEAD = 1 << 20
_DELIMITERS = ",;\t|"
_RECORDS = 50
_ZEROS = 0.05  # share of zeros at one of four byte positions above which they are part of the encoding
_ZERO_BYTES: dict[tuple[bool, ...], str] = {
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
}


def _recognise_encoding(data: bytes) -> str | None:
    """The encoding of the start of a file; None if it is not recognised.

    The encoding is recognised by a byte order mark, by zero bytes where UTF-16 and UTF-32 have them for Latin letters,
    or as UTF-8 or cp1252. A file is UTF-8 if at least half of the lines that are not ASCII are: the others are damaged
    documents.
    """
    if (marked := mark_of(data)) is not None:
        return marked[0]
    if (wide := wide_encoding(data)) is not None:
        return wide
    lines = [line for line in data.splitlines(keepends=True) if not line.isascii()]
    if 2 * sum(map(_is_utf8, lines)) >= len(lines):
        return "utf-8"
    return "cp1252" if all(_decodes(line, "cp1252") for line in lines) else None


def _is_utf8(line: bytes) -> bool:
    """Whether a line is UTF-8; only the last one, which has no line break, may end within a character."""
    if not line.endswith((b"\n", b"\r")):
        return _decodes(line, "utf-8")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


_SEPARATOR = re.compile(r'"?sep=(.)"?[\r\n]*')


def named_separator(first_line: str) -> str | None:
    """The delimiter that a first line `sep=;` names, as spreadsheet programs write it, or None."""
    match = _SEPARATOR.fullmatch(first_line)
    return match[1] if match else None


def find_delimiter(text: str) -> str | None:
    """The delimiter that splits all records at the start of a CSV file into the same number of fields, at least two.

    A comma is preferred, then the delimiter with the most fields; None if no delimiter fits. A first line `sep=;` takes
    precedence.
    """
    if (named := named_separator(text.partition("\n")[0])) is not None:
        return named
    counts = {delimiter: _fields(text, delimiter) for delimiter in _DELIMITERS}
    if counts[","] > 1:
        return ","
    best = max(counts, key=lambda delimiter: counts[delimiter])
    return best if counts[best] > 1 else None


def detected(path: str, settings: Container[str]) -> Dialect:
    """The dialect of a text file, detected from its start; the default if no other is recognised.

    Args:
        path: path of the file.
        settings: settings of a dialect that apply to its format.

    Raises:
        OSError: the file is damaged.
    """
    if "encoding" not in settings:
        return PLAIN
    data = read_head(path)
    encoding = _recognise_encoding(data) or PLAIN.encoding
    if "delimiter" not in settings:
        return Dialect(encoding)
    text = data.decode(Dialect(encoding).codec, "replace")
    return Dialect(encoding, find_delimiter(text) or PLAIN.delimiter)


def suggested_encoding(path: str, dialect: Dialect) -> str | None:
    """The detected encoding of a file; None if the configured one fits, or if none is recognised."""
    try:
        data = read_head(path)
    except (OSError, EOFError, UserError):
        return None
    encoding = _recognise_encoding(data)
    wide = encoding is not None and Dialect(encoding).is_wide
    misfit = not _decodes(data, dialect.codec) or (wide if b"\0" in data else dialect.is_wide)
    return encoding if misfit and encoding != dialect.encoding else None


def read_head(path: str) -> bytes:
    """The start of a file, decompressed."""
    with open_plain(path) as file:
        return file.read(_HEAD)


def columns_in_dialect(
    object_columns: Callable[[Shard], list[str]],
    entry: InputFile,
    source: SourceConfig,
    limits: LimitsConfig,
    wide: bool,
) -> list[str]:
    """The columns of a JSON or CSV file.

    Args:
        object_columns: reads the columns in the dialect of a shard.
        entry: the file.
        source: source whose columns are required.
        limits: limits of reading.
        wide: whether files of the format may be in UTF-16 and UTF-32.

    Raises:
        UserError: as `object_columns`, or a column is missing that exists in another encoding.
    """
    path, dialect = entry.path, entry.dialect
    try:
        columns = object_columns(whole_shard(entry, source, limits=limits))
    except UserError as error:
        if encoding := suggested_encoding(path, dialect):
            convert = Dialect(encoding).is_wide and not wide
            remedy = "convert it to UTF-8" if convert else f"set encoding: {encoding}"
            raise UserError(f"{error}; it is not {dialect.label}: {remedy}") from None
        raise
    missing = next((column for column in source.columns if column not in columns), None)
    if missing is not None and (encoding := suggested_encoding(path, dialect)):
        raise UserError(
            f"no column {missing!r} in {entry.name}, which is not {dialect.label}; set encoding: {encoding}"
        )
    return columns


def single_column_note(columns: Sequence[str]) -> str:
    """A warning for a CSV file with a single column whose name contains a delimiter; otherwise empty."""
    if len(columns) != 1 or not any(delimiter in columns[0] for delimiter in _DELIMITERS):
        return ""
    return f"It has a single column named {columns[0]!r}: set delimiter if these are several columns."


def _fields(text: str, delimiter: str) -> int:
    """Number of fields of each of the first records; 0 if the numbers differ."""
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        counts = [len(record) for _, record in zip(range(_RECORDS), reader, strict=False) if record]
    except csv.Error:
        return 0
    counts = counts if len(counts) < 2 or len(text) < _HEAD else counts[:-1]
    return counts[0] if len(set(counts)) == 1 else 0


def wide_encoding(data: bytes) -> str | None:
    """UTF-16 or UTF-32 without a byte order mark, if part of the text is in Latin script."""
    quarter = len(data) // 4
    if not quarter:
        return None
    zeros = tuple(data[position : 4 * quarter : 4].count(0) > _ZEROS * quarter for position in range(4))
    encoding = _ZERO_BYTES.get(zeros)
    return encoding if encoding is not None and _decodes(data, encoding) else None


def _decodes(data: bytes, encoding: str) -> bool:
    """Whether data can be decoded with an encoding; their last character may be truncated."""
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start > 0 and error.start >= len(data) - 3 and not encoding.startswith("cp")
    return True
