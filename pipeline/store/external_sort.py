"""Writing of files and sorting of rows in pieces, with at most some tens of MB of memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import UserError
from pipeline.store.files import Store

ROWS = 1 << 15
"""Rows per row group of a table that is written in pieces, and per sorted run."""

_BATCH = 1 << 11  # rows of a run in memory during a merge
_TABLES = 256  # maximum number of small tables: each takes some KB besides its rows
_RUNS = 16  # runs of a level that are merged to one of the next


def write_pieces(store: Store, name: str, schema: pa.Schema, pieces: Iterable[pa.Table]) -> str:
    """Write a Parquet file in row groups of `ROWS`: the same rows give the same bytes for any split into pieces.

    Every page has a checksum.

    Args:
        store: the run directory.
        name: name of the file.
        schema: schema of the pieces.
        pieces: tables of any length.

    Returns:
        The SHA-256 of the file, hexadecimal.

    Raises:
        UserError: as `Store.replaced`.
    """
    options = {"compression": "zstd", "write_page_checksum": True}
    with store.replaced(name) as file, pq.ParquetWriter(file, schema, **options) as writer:
        waiting, written = schema.empty_table(), False
        for piece in pieces:
            waiting = pa.concat_tables([waiting, piece])
            while len(waiting) >= ROWS:
                writer.write_table(waiting.slice(0, ROWS).combine_chunks())
                waiting, written = waiting.slice(ROWS), True
        if len(waiting) or not written:
            writer.write_table(waiting.combine_chunks())
    return file.sha256


class SortedRows:
    """Any number of rows, read in the order of their keys.

    The last rows are in memory, the others in sorted runs in a temporary folder that is removed with the object. The
    order of rows with equal keys is undefined. DuckDB takes half the time, and twice the memory of a driver.
    """

    def __init__(self, schema: pa.Schema, keys: Sequence[str]) -> None:
        """Create an empty collection.

        Args:
            schema: schema of the rows.
            keys: columns of numbers or strings without nulls, in ascending order.
        """
        self.schema = schema
        self.keys = list(keys)
        self.count = 0
        self._waiting: list[pa.Table] = []
        self._held = 0
        self._levels: list[list[str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return self.count

    def add(self, rows: pa.Table) -> None:
        """Add rows, in any order.

        Raises:
            UserError: no space is left for temporary files.
        """
        self._waiting.append(rows)
        self._held += len(rows)
        self.count += len(rows)
        if len(self._waiting) > _TABLES:
            self._waiting = [pa.concat_tables(self._waiting).combine_chunks()]
        if self._held > ROWS:
            self._spill(0, [self._in_memory()])
            self._waiting, self._held = [], 0

    def pieces(self) -> Iterator[pa.Table]:
        """All rows in order, in pieces of bounded length; may be called several times."""
        runs = [path for level in self._levels for path in level]
        if runs:
            yield from self._merged(runs, self._in_memory())
        else:
            yield self._in_memory()

    def first(self, count: int) -> pa.Table:
        """The first `count` rows in order, or all if there are fewer."""
        rows = self.schema.empty_table()
        for piece in self.pieces() if count else ():
            rows = pa.concat_tables([rows, piece.slice(0, count - len(rows))])
            if len(rows) == count:
                break
        return rows

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()

    def _in_memory(self) -> pa.Table:
        return self._ordered(pa.concat_tables([self.schema.empty_table(), *self._waiting]))

    def _ordered(self, rows: pa.Table) -> pa.Table:
        return rows.sort_by([(key, "ascending") for key in self.keys])

    def _spill(self, level: int, pieces: Iterable[pa.Table]) -> None:
        """Write a sorted run, and merge the runs of its level if there are many."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="seenset-sorting-")
        while len(self._levels) <= level:
            self._levels.append([])
        path = os.path.join(self._folder.name, f"{level}-{uuid.uuid4().hex[:8]}")
        try:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, self.schema, options=options) as writer:
                for piece in pieces:
                    writer.write_table(piece.combine_chunks(), max_chunksize=_BATCH)
        except OSError as error:
            raise UserError(f"no space to sort in {self._folder.name}: {error}; set TMPDIR to a larger disk") from None
        self._levels[level].append(path)
        if len(self._levels[level]) == _RUNS:
            runs = self._levels[level]
            self._levels[level] = []
            self._spill(level + 1, self._merged(runs, self.schema.empty_table()))
            for run in runs:
                os.unlink(run)

    def _merged(self, paths: Sequence[str], others: pa.Table) -> Iterator[pa.Table]:
        """Merge sorted runs and one sorted table, with one batch of each run in memory."""
        with contextlib.ExitStack() as stack:
            files = [pa.ipc.open_file(stack.enter_context(pa.OSFile(path, "rb"))) for path in paths]
            unread = [self._batches(file) for file in files] + [iter(())]
            heads = [next(batches, self.schema.empty_table()) for batches in unread[:-1]] + [others]
            live = [index for index, head in enumerate(heads) if len(head)]
            while live:
                # all rows up to the smallest last key of an unfinished run's batch are in memory
                ends = {index: self._key(heads[index], len(heads[index]) - 1) for index in live}
                cut = min(ends.values())
                counts = {index: self._up_to(heads[index], cut) for index in live}
                yield self._ordered(pa.concat_tables([heads[index].slice(0, counts[index]) for index in live]))
                for index in live:
                    heads[index] = heads[index].slice(counts[index])
                    if not len(heads[index]):
                        heads[index] = next(unread[index], heads[index])
                live = [index for index in live if len(heads[index])]

    def _batches(self, file: pa.ipc.RecordBatchFileReader) -> Iterator[pa.Table]:
        return (pa.Table.from_batches([file.get_batch(index)]) for index in range(file.num_record_batches))

    def _key(self, rows: pa.Table, index: int) -> tuple[object, ...]:
        return tuple(rows[key][index].as_py() for key in self.keys)

    def _up_to(self, rows: pa.Table, cut: tuple[object, ...]) -> int:
        """Number of sorted rows with a key <= `cut`."""
        return bisect_right(range(len(rows)), cut, key=lambda index: self._key(rows, index))
