"""Rows from anywhere in a Parquet file: a reader goes on where an earlier one stopped.

Rows within a row group can only be reached by decoding those before them. Shards of one file are mostly read in their
order, so the readers of a process wait where they stopped for whoever wants the rows that follow.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import UserError

BATCH_ROWS = 1024
BUFFER_BYTES = {True: 1 << 20, False: 1 << 23}
"""Read at a time of each column, by whether the file is local: a request to an object store costs as much as 8 MiB."""

IDLE = 4
"""Readers of a process that wait."""

AtOnce = Callable[[pq.FileMetaData, int], int]

_idle: list[_Reader] = []
_lock = threading.RLock()  # a reader may be left while garbage is collected


@dataclass(slots=True, eq=False)
class _Reader:
    """An open file and the batch at which it stopped."""

    key: tuple[Any, ...]  # path, columns, and what shows that the file was changed
    file: Any  # to be closed; None where the library opened it
    parquet: pq.ParquetFile
    ends: list[int]  # of the row groups, in rows
    at_once: AtOnce
    first: int = 0  # row of the file at which the batch begins
    batch: pa.RecordBatch | None = None
    batches: Generator[tuple[int, pa.RecordBatch], None, None] | None = None

    def reaches(self, row: int) -> bool:
        """Whether a row lies ahead, in the row group where the reader stopped."""
        return self.batch is not None and self.first <= row < self._end_of_group(self.first)

    def go_to(self, row: int) -> None:
        """Begin at the row group that holds a row."""
        self.batches = self._from(sum(end <= row for end in self.ends))
        self.advance()

    def advance(self) -> None:
        """Go on to the next batch; `batch` is None behind the last one."""
        assert self.batches is not None
        self.first, self.batch = next(self.batches, (0, None))

    def close(self) -> None:
        """Close the file and let go of its buffers: the reader and its batches refer to each other."""
        if self.batches is not None:
            self.batches.close()
        self.batches = self.batch = None
        self.parquet.close(force=True)
        if self.file is not None:
            self.file.close()

    def _from(self, first: int) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        for group in range(first, len(self.ends)):
            row = self.ends[group - 1] if group else 0
            rows = self.at_once(self.parquet.metadata, group)
            for batch in self.parquet.iter_batches(rows, row_groups=[group], columns=list(self.key[1])):
                yield row, batch
                row += len(batch)

    def _end_of_group(self, row: int) -> int:
        return next((end for end in self.ends if row < end), 0)


def _usual(metadata: pq.FileMetaData, group: int) -> int:
    return BATCH_ROWS


def parquet_batches(
    path: str, columns: Sequence[str], start: int, stop: int, at_once: AtOnce = _usual
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows [start, stop) of some columns in batches, each with the number of its first row.

    They end early where the file holds fewer rows. Memory holds one batch, and a buffer a column.

    Args:
        path: of the file, local or an fsspec URL.
        columns: to be read.
        start: first row, of the file.
        stop: row behind the last one.
        at_once: rows of a batch, given the metadata of the file and the number of a row group.

    Raises:
        OSError: the file cannot be read.
        pyarrow.ArrowException: it is damaged.
    """
    reader = _take(path, columns, start, at_once)
    try:
        if not reader.reaches(start):
            reader.go_to(start)
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
        reader.close()
        raise
    _leave(reader)


def _take(path: str, columns: Sequence[str], row: int, at_once: AtOnce) -> _Reader:
    """A reader of the file that waits before the row, else one that waits elsewhere in it, else a new one."""
    fs, name = fsspec.core.url_to_fs(path)
    local = isinstance(fs, fsspec.implementations.local.LocalFileSystem)
    key = (path, tuple(columns), *_identity(fs, name, local))
    with _lock:
        same = [reader for reader in _idle if reader.key == key]
        ahead = [reader for reader in same if reader.reaches(row)]
        reader = max(ahead, key=lambda reader: reader.first) if ahead else next(iter(same), None)
        if reader is not None:
            _idle.remove(reader)
            return reader
    file = None if local else fs.open(name, "rb", cache_type="none")
    parquet = _opened(name if file is None else file, buffer_size=BUFFER_BYTES[local])
    check_chunks(parquet.metadata, columns, os.path.getsize(name) if file is None else file.size)
    sizes = (parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups))
    ends: list[int] = []
    for size in sizes:
        ends.append(size + (ends[-1] if ends else 0))
    return _Reader(key, file, parquet, ends, at_once)


def _leave(reader: _Reader) -> None:
    """Let a reader wait; of too many the one that has waited longest goes."""
    with _lock:
        _idle.append(reader)
        gone = [_idle.pop(0) for _ in range(len(_idle) - IDLE)]
    for other in gone:
        other.close()


def _identity(fs: Any, name: str, local: bool) -> tuple[Any, ...]:
    """What differs once a file was changed."""
    if local:
        state = os.stat(name)
        return state.st_ino, state.st_size, state.st_mtime_ns
    info = fs.info(name)
    return tuple(str(info.get(key)) for key in ("size", "ETag", "etag", "generation", "LastModified", "created"))


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


class _Unread(Exception):
    """Somebody wants the content of a file of which only the footer is known."""


class _Content(io.RawIOBase):
    """A file of some size whose content nobody gets."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        raise _Unread


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
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_begin_reading, metadata, columns, size).result()


def _begin_reading(metadata: pq.FileMetaData, columns: Sequence[str], size: int) -> None:
    """As `check_chunks`, in a thread: PyArrow keeps `_Unread` for ever, and that the frames of its callers."""
    parquet = pq.ParquetFile(pa.PythonFile(_Content(size), "r"), metadata=metadata, pre_buffer=True)
    try:
        next(parquet.iter_batches(1, columns=list(columns), use_threads=False), None)
    except _Unread:
        return


def chunks_of(metadata: pq.FileMetaData, column: str) -> list[int]:
    """The numbers of the chunks of each row group that hold a column, which may have parts."""
    paths = (metadata.schema.column(index).path for index in range(metadata.num_columns))
    return [index for index, path in enumerate(paths) if path.split(".")[0] == column]


def text_bytes_of(metadata: pq.FileMetaData, text: str) -> int:
    """Bytes of a column that was checked, decompressed."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = chunks_of(metadata, text)
    return sum(group.column(index).total_uncompressed_size for group in groups for index in chunks)
