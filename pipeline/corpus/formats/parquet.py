"""Parquet files: reading from any row, and copies with their schema, metadata and compression.

A row in a row group can only be read by decoding the rows before it. Shards of one file are usually read in order, so
a process keeps a reader open at its row until the following rows are requested.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.formats.columns import AT_ONCE, check_schema, edited_tables, table_rows, write_parquet
from pipeline.corpus.input_files import has_local_path, is_local
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, error_line

_ROWS = 1024  # maximum number decoded together
_PACKING = 12  # maximum compression ratio of texts
_CODECS = {"SNAPPY", "GZIP", "BROTLI", "LZ4", "ZSTD"}

BUFFER_BYTES = {True: 1 << 20, False: 1 << 23}
"""Bytes per read of a column, by whether the file is local: a request to an object store costs as much as 8 MiB."""

IDLE = 4
"""Maximum number of idle readers of a process."""

FOOTER_BYTES = 1 << 25
"""Maximum bytes of the footers of other files that are kept parsed beside the last one."""

_idle: list[_Reader] = []
_footers: OrderedDict[tuple[Any, ...], _Footer] = OrderedDict()  # the last used is the last
_lock = threading.RLock()  # a reader may be returned during garbage collection


@dataclass(slots=True)
class _Footer:
    """The parsed footer of a file, which takes some ten times its bytes in memory."""

    metadata: pq.FileMetaData
    checked: set[str] = field(default_factory=set)  # columns that passed `check_chunks`


@dataclass(slots=True, eq=False)
class _Reader:
    """An open reader: the current batch and the remaining batches of a file."""

    key: tuple[Any, ...]  # path, columns, and the version of the file
    batches: Generator[tuple[int, int, pa.RecordBatch]]  # from `_from`
    first: int = 0  # first row of the batch in the file
    end: int = 0  # row after its row group
    batch: pa.RecordBatch | None = None

    def advance(self) -> None:
        """Advance to the next batch; `batch` is None after the last one."""
        self.first, self.end, self.batch = next(self.batches, (0, 0, None))


def parquet_batches(
    path: str, columns: Sequence[str], start: int, stop: int, long: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows [start, stop) of some columns in batches, each with the number of its first row.

    There are fewer rows if the file holds fewer. Memory holds one batch, and one buffer per column.

    Args:
        path: local path or fsspec URL of the file.
        columns: columns to read.
        start: first row in the file.
        stop: row after the last one.
        long: columns whose lengths determine how many rows are decoded together.

    Raises:
        OSError: the file cannot be read.
        pyarrow.ArrowException: it is damaged.
    """
    reader = _take(path, columns, start, long)
    try:
        while reader.batch is not None and reader.first < stop:
            begin, end = max(start - reader.first, 0), min(stop - reader.first, len(reader.batch))
            if begin < end:
                yield reader.first + begin, reader.batch.slice(begin, end - begin)
            if reader.first + len(reader.batch) >= stop:
                break  # the next batch is of other rows, and may be damaged
            reader.advance()
    except GeneratorExit:
        _leave(reader)
        raise
    except BaseException:
        reader.batches.close()
        raise
    if reader.batch is not None and reader.end > stop:
        _leave(reader)
    else:
        reader.batches.close()


def _take(path: str, columns: Sequence[str], row: int, long: Sequence[str]) -> _Reader:
    """An idle reader of the file that is at or before the row in its row group; else a new one."""
    fs, name = fsspec.core.url_to_fs(path)
    file_key = _file_key(path, fs, name)
    key = (*file_key, tuple(columns))
    with _lock:
        usable = [reader for reader in _idle if reader.key == key and reader.first <= row < reader.end]
        if usable:
            reader = max(usable, key=lambda reader: reader.first)
            _idle.remove(reader)
            return reader
    reader = _Reader(key, _from(fs, name, list(columns), row, long, file_key))
    reader.advance()
    return reader


def _file_key(path: str, fs: Any, name: str) -> tuple[Any, ...]:
    """Identifies the present content of a path, which may be another file in another file system."""
    return path, id(fs), fs.ukey(os.path.realpath(name) if is_local(fs) else name)


def _leave(reader: _Reader) -> None:
    """Keep a reader open; if there are too many, close the one that was idle for longest."""
    with _lock:
        _idle.append(reader)
        gone = [_idle.pop(0) for _ in range(len(_idle) - IDLE)]
    for other in gone:
        other.batches.close()


def _from(
    fs: Any, name: str, columns: list[str], row: int, long: Sequence[str], key: tuple[Any, ...]
) -> Generator[tuple[int, int, pa.RecordBatch]]:
    """The batches of a file from the row group that holds a row: first row, row after the row group, batch.

    Checksums of pages are verified where a file has them.
    """
    local = is_local(fs)
    with contextlib.ExitStack() as stack:
        direct = has_local_path(fs, name)
        file = None if direct else stack.enter_context(fs.open(name, "rb", cache_type="none"))
        footer = _kept_footer(key)
        parquet = _opened(
            name if file is None else file,
            metadata=None if footer is None else footer.metadata,
            buffer_size=BUFFER_BYTES[local],
            page_checksum_verification=True,
        )
        stack.callback(parquet.close, force=True)
        footer = footer or _keep_footer(key, parquet.metadata)
        if not footer.checked.issuperset(columns):
            check_chunks(footer.metadata, columns, os.path.getsize(name) if file is None or local else file.size)
            footer.checked.update(columns)
        end = 0
        for group in range(footer.metadata.num_row_groups):
            first, end = end, end + footer.metadata.row_group(group).num_rows
            if end <= row:
                continue
            rows = _rows_at_once(footer.metadata, group, long)
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns):
                yield first, end, batch
                first += len(batch)


def _kept_footer(key: tuple[Any, ...]) -> _Footer | None:
    """The footer of a file that was read shortly before; a footer of many row groups takes seconds to parse."""
    with _lock:
        if key in _footers:
            _footers.move_to_end(key)
        return _footers.get(key)


def _keep_footer(key: tuple[Any, ...], metadata: pq.FileMetaData) -> _Footer:
    """Keep the footer of a file for its next readers, and forget those used least recently."""
    with _lock:
        footer = _footers.setdefault(key, _Footer(metadata))
        size = sum(one.metadata.serialized_size for one in _footers.values())
        while len(_footers) > 1 and (size > FOOTER_BYTES or len(_footers) > IDLE):
            size -= _footers.popitem(last=False)[1].metadata.serialized_size
    return footer


def open_footer(path: str, name: str, tail: bytes) -> pq.ParquetFile:
    """Open a Parquet file for its schema and metadata, from its last bytes if these contain the footer.

    Raises:
        UserError: the file has no readable footer.
    """
    try:
        if int.from_bytes(tail[-8:-4], "little") + 8 <= len(tail):
            return _opened(pa.BufferReader(tail))
        with fsspec.open(path, "rb") as file:
            return _opened(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not a readable Parquet file: {error_line(error)}") from None


def _opened(source: Any, **options: Any) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source, **options)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"a column's name is damaged: {error}") from None


class _Content(io.BytesIO):
    """An empty file that reports a given size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.wanted = False  # whether a read was attempted

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return super().seek(offset + self._size) if whence == os.SEEK_END else super().seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        self.wanted = True
        return b""


def check_chunks(metadata: pq.FileMetaData, columns: Sequence[str], size: int) -> None:
    """Check the footer's metadata of some columns before `RowGroupMetaData.column` is called.

    That method aborts the process if the footer is inconsistent, but a reader of the file raises for the same fault.
    This function starts a reader up to its first page. Some artificial footers make the reader abort as well.

    Args:
        metadata: metadata from the footer of the file.
        columns: columns to check; names that the file does not contain are ignored.
        size: size of the file in bytes.

    Raises:
        OSError: the footer is damaged.
        pyarrow.ArrowException: the footer is damaged.
    """
    content = _Content(size)
    parquet = pq.ParquetFile(pa.PythonFile(content, "r"), metadata=metadata, pre_buffer=True)
    try:
        next(parquet.iter_batches(1, columns=list(columns), use_threads=False), None)
    except (OSError, pa.ArrowException):
        if not content.wanted:  # else the footer is consistent up to a page
            raise


def column_chunks(metadata: pq.FileMetaData, columns: Sequence[str]) -> list[int]:
    """Indices of the chunks of each row group that hold these columns, including nested parts."""
    paths = (metadata.schema.column(index).path for index in range(metadata.num_columns))
    parts = tuple(f"{column}." for column in columns)
    return [index for index, path in enumerate(paths) if path in columns or path.startswith(parts)]


def count_text_bytes(metadata: pq.FileMetaData, columns: Sequence[str]) -> int:
    """Decompressed bytes of columns that were checked."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = column_chunks(metadata, columns)
    return sum(group.column(index).total_uncompressed_size for group in groups for index in chunks)


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    footer = open_footer(entry.path, entry.name, tail)
    metadata, name = footer.metadata, entry.name
    try:
        check_chunks(metadata, source.columns, entry.size or sys.maxsize)  # 0: the server does not report it
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is damaged: {error_line(error)}") from None
    rows = _rows_of_footer(metadata, source.columns, name)
    fs, place = fsspec.core.url_to_fs(entry.path)
    if is_local(fs):  # of a remote file it would take a request
        _keep_footer(_file_key(entry.path, fs, place), metadata)
    check_schema(footer.schema_arrow, source, name)
    return replace(entry, rows=rows, text_bytes=count_text_bytes(metadata, source.item or [source.content]))


def _rows_of_footer(metadata: pq.FileMetaData, columns: Sequence[str], name: str) -> int:
    """The number of rows of a Parquet file. The numbers in its footer must agree, or rows would be lost.

    Raises:
        UserError: the footer is inconsistent.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    total = sum(group.num_rows for group in groups)
    if total != metadata.num_rows:
        raise UserError(
            f"{name} is damaged: its footer says {metadata.num_rows} rows, and its row groups have {total} in all"
        )
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    for index in (paths.index(column) for column in columns if column in paths):
        for number, group in enumerate(groups):
            if (values := group.column(index).num_values) > group.num_rows:
                raise UserError(
                    f"{name} is damaged: its footer says {group.num_rows} rows of row group {number}, and column "
                    f"{paths[index]!r} has {values} values there"
                )
    return int(total)


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    assert shard.stop is not None
    long = shard.item or [shard.text]
    batches = parquet_batches(shard.path, base.wanted_columns(shard), shard.start, shard.stop, long)
    yield from table_rows(shard, batches, watch)


def _rows_at_once(metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> int:
    """Number of rows of a row group to decode together: small if the values of some columns are long."""
    group = metadata.row_group(number)
    chunks = [group.column(index) for index in column_chunks(metadata, columns)]
    return max(1, min(_ROWS, AT_ONCE // max(1, sum(_longest(chunk, group.num_rows) for chunk in chunks))))


def _longest(chunk: pq.ColumnChunkMetaData, rows: int) -> int:
    """Maximum bytes of a row of a column.

    A dictionary entry may occur in many rows: if a column compresses better than texts do, every row may be as long
    as the whole column.
    """
    size, packed = int(chunk.total_uncompressed_size), max(1, chunk.total_compressed_size)
    return size if chunk.has_dictionary_page and size > _PACKING * packed else size // max(1, rows)


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    shard = source.first
    footer = open_footer(shard.path, shard.name, b"")
    with open_file(source.name) as sink:
        write_parquet(sink, footer.schema_arrow, base.kept_rows(_tables(shard), marks), _codecs(footer.metadata))


def _tables(shard: Shard) -> Iterator[pa.Table]:
    names = open_footer(shard.path, shard.name, b"").schema_arrow.names
    for _, batch in parquet_batches(shard.path, names, 0, sys.maxsize, names):
        yield pa.Table.from_batches([batch])


def _codecs(metadata: pq.FileMetaData) -> str | dict[str, str]:
    """Compression of the columns of a file."""
    if not metadata.num_row_groups:
        return "zstd"
    group = metadata.row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    named = {chunk.path_in_schema: chunk.compression for chunk in chunks}
    return {path: codec if codec in _CODECS else "NONE" for path, codec in named.items()}


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    footer = open_footer(shard.path, shard.name, b"")
    with open_file(names[0]) as sink:
        tables = edited_tables(_tables(shard), footer.schema_arrow, shard.text, edits)
        write_parquet(sink, footer.schema_arrow, tables, _codecs(footer.metadata))


def _schema(shard: Shard) -> pa.Schema:
    return open_footer(shard.path, shard.name, b"").schema_arrow


PARQUET = base.Format(
    "parquet",
    "row",
    _inspect,
    _rows,
    edit=_edit,
    export=base.Exporter(_copy, schema=_schema, tables=_tables),
    columns=lambda shard: _schema(shard).names,
    suffixes=(".parquet", ".pq"),
    lists=True,
    place=0,
)
