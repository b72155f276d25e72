"""Parquet files: rows from anywhere in them, and copies with their schema, metadata and compression.

Rows within a row group can only be reached by decoding those before them. Shards of one file are mostly read in their
order, so an open reader of a process waits at its row until the rows that follow are requested.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.files import is_local
from pipeline.corpus.formats import base
from pipeline.corpus.formats.columns import AT_ONCE, check_schema, edited_tables, table_rows, write_parquet
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError

_ROWS = 1024  # that are decoded together, at most
_PACKING = 12  # times that texts are packed at most
_CODECS = {"SNAPPY", "GZIP", "BROTLI", "LZ4", "ZSTD"}

BUFFER_BYTES = {True: 1 << 20, False: 1 << 23}
"""Read at a time of each column, by whether the file is local: a request to an object store costs as much as 8 MiB."""

IDLE = 4
"""Readers of a process that wait."""

_idle: list[_Reader] = []
_lock = threading.RLock()  # a reader may be left while garbage is collected


@dataclass(slots=True, eq=False)
class _Reader:
    """The batches of a file that are left, and the one at which its reader stopped."""

    key: tuple[Any, ...]  # path, columns, and what shows that the file was changed
    batches: Generator[tuple[int, int, pa.RecordBatch]]  # from `_from`
    first: int = 0  # row of the file at which the batch begins
    end: int = 0  # row behind its row group
    batch: pa.RecordBatch | None = None

    def advance(self) -> None:
        """Go on to the next batch; `batch` is None behind the last one."""
        self.first, self.end, self.batch = next(self.batches, (0, 0, None))


def parquet_batches(
    path: str, columns: Sequence[str], start: int, stop: int, long: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows [start, stop) of some columns in batches, each with the number of its first row.

    They end early where the file holds fewer rows. Memory holds one batch, and a buffer a column.

    Args:
        path: of the file, local or an fsspec URL.
        columns: to be read.
        start: first row, of the file.
        stop: row behind the last one.
        long: those of the columns whose lengths decide how many rows are decoded together.

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
            if reader.first + len(reader.batch) > stop:
                break
            reader.advance()
    except GeneratorExit:
        _leave(reader)
        raise
    except BaseException:
        reader.batches.close()
        raise
    if reader.batch is not None:
        _leave(reader)


def _take(path: str, columns: Sequence[str], row: int, long: Sequence[str]) -> _Reader:
    """A reader of the file that waits before the row, in its row group; else a new one."""
    fs, name = fsspec.core.url_to_fs(path)
    changes = fs.ukey(os.path.realpath(name) if is_local(fs) else name)
    key = (path, tuple(columns), id(fs), changes)  # of another connection it may be another file
    with _lock:
        usable = [reader for reader in _idle if reader.key == key and reader.first <= row < reader.end]
        if usable:
            reader = max(usable, key=lambda reader: reader.first)
            _idle.remove(reader)
            return reader
    reader = _Reader(key, _from(fs, name, list(columns), row, long))
    reader.advance()
    return reader


def _leave(reader: _Reader) -> None:
    """Let a reader wait; of too many the one that has waited longest goes."""
    with _lock:
        _idle.append(reader)
        gone = [_idle.pop(0) for _ in range(len(_idle) - IDLE)]
    for other in gone:
        other.batches.close()


def _from(
    fs: Any, name: str, columns: list[str], row: int, long: Sequence[str]
) -> Generator[tuple[int, int, pa.RecordBatch]]:
    """The batches of a file from the row group on that holds a row: first row, row behind the row group, batch."""
    local = is_local(fs)
    with contextlib.ExitStack() as stack:
        file = None if local else stack.enter_context(fs.open(name, "rb", cache_type="none"))
        parquet = _opened(name if file is None else file, buffer_size=BUFFER_BYTES[local])
        stack.callback(parquet.close, force=True)
        check_chunks(parquet.metadata, columns, os.path.getsize(name) if file is None else file.size)
        end = 0
        for group in range(parquet.metadata.num_row_groups):
            first, end = end, end + parquet.metadata.row_group(group).num_rows
            if end <= row:
                continue
            rows = _rows_at_once(parquet.metadata, group, long)
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns):
                yield first, end, batch
                first += len(batch)


def open_footer(path: str, name: str, tail: bytes) -> pq.ParquetFile:
    """The schema and the metadata of a Parquet file, from its last bytes where these hold them.

    Raises:
        UserError: it has no readable footer.
    """
    try:
        if int.from_bytes(tail[-8:-4], "little") + 8 <= len(tail):
            return _opened(pa.BufferReader(tail))
        with fsspec.open(path, "rb") as file:
            return _opened(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not a readable Parquet file: {' '.join(str(error).split())}") from None


def _opened(source: Any, **options: Any) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source, **options)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"a column's name is damaged: {error}") from None


class _Content(io.BytesIO):
    """A file of a given size of which nothing can be read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.wanted = False  # whether somebody tried to

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return super().seek(offset + self._size) if whence == os.SEEK_END else super().seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        self.wanted = True
        return b""


def check_chunks(metadata: pq.FileMetaData, columns: Sequence[str], size: int) -> None:
    """Refuse what a damaged footer says of some columns, before `RowGroupMetaData.column` is asked for them.

    That method ends the whole process where the footer contradicts itself; what reads a file sees the same and raises.
    So a reader begins here, up to where it wants the first page. Of some made-up footers the reader ends it too.

    Args:
        metadata: of the file, as its footer has it.
        columns: that are asked for; those that the file does not have do not count.
        size: of the file, in bytes.

    Raises:
        OSError: the footer is damaged.
        pyarrow.ArrowException: likewise.
    """
    content = _Content(size)
    parquet = pq.ParquetFile(pa.PythonFile(content, "r"), metadata=metadata, pre_buffer=True)
    try:
        next(parquet.iter_batches(1, columns=list(columns), use_threads=False), None)
    except (OSError, pa.ArrowException):
        if not content.wanted:  # else the footer led to a page
            raise


def chunks_of(metadata: pq.FileMetaData, columns: Sequence[str]) -> list[int]:
    """The numbers of the chunks of each row group that hold these columns, which may have parts."""
    paths = (metadata.schema.column(index).path for index in range(metadata.num_columns))
    return [index for index, path in enumerate(paths) if path.split(".")[0] in columns]


def text_bytes_of(metadata: pq.FileMetaData, text: str) -> int:
    """Bytes of a column that was checked, decompressed."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = chunks_of(metadata, [text])
    return sum(group.column(index).total_uncompressed_size for group in groups for index in chunks)


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    footer = open_footer(entry.path, entry.name, tail)
    metadata, name = footer.metadata, entry.name
    try:
        check_chunks(metadata, source.columns, entry.size or sys.maxsize)  # 0: the server does not say
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is damaged: {' '.join(str(error).split())}") from None
    rows = _rows_of_footer(metadata, source.columns, name)
    check_schema(footer.schema_arrow, source, name)
    return replace(entry, rows=rows, text_bytes=text_bytes_of(metadata, source.content))


def _rows_of_footer(metadata: pq.FileMetaData, columns: Sequence[str], name: str) -> int:
    """The rows of a Parquet file. Where its footer says fewer in one place than in another, the rest would be lost.

    Raises:
        UserError: its footer contradicts itself.
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


def _rows(shard: Shard, watch: base.Watch) -> Iterator[base.Row]:
    assert shard.stop is not None
    batches = parquet_batches(shard.path, base.wanted_columns(shard), shard.start, shard.stop, [shard.text])
    yield from table_rows(shard, batches, watch)


def _rows_at_once(metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> int:
    """How many rows of a row group to decode together: few where the values of some columns are long."""
    group = metadata.row_group(number)
    chunks = [group.column(index) for index in chunks_of(metadata, columns)]
    return max(1, min(_ROWS, AT_ONCE // max(1, sum(_longest(chunk, group.num_rows) for chunk in chunks))))


def _longest(chunk: pq.ColumnChunkMetaData, rows: int) -> int:
    """Bytes that a row of a column may have.

    A dictionary may stand for much more text than its own: where a column packs better than texts do, every row may be
    as long as the whole column is.
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
    """How the columns of a file are compressed."""
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
