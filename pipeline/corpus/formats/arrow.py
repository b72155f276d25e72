"""Arrow IPC files in the stream format and the file format, read by record batches.

The file format is a stream of messages between two marks, so both formats are read message by message. The message
headers are parsed here: they contain the rows and the decompressed size of a batch, so that batches can be skipped.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.formats.columns import bounded_parts, check_schema, gathered, table_rows, top_columns
from pipeline.corpus.input_files import BLOCK_BYTES, Extent, has_local_path, is_local
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, error_line

BATCH_BYTES = 1 << 30
"""Maximum bytes of a record batch in memory: a compressed or remote batch is held as a whole."""

_FILE, _OLD_FILE = b"ARROW1", b"FEA1"
_CONTINUES = b"\xff\xff\xff\xff"
_DICTIONARY, _BATCH = 2, 3  # message types
_MOST_HEAD = 1 << 26  # bytes
_KNOWN_BY = 16  # batches from which the number of rows of a remote file is estimated


@dataclass(frozen=True, slots=True)
class _Message:
    """The header of a message."""

    kind: int
    stop: int  # end of its body: byte of the file
    rows: int  # of a record batch
    unpacked: int  # bytes; 0 if it is not compressed


@contextmanager
def _opened(path: str) -> Iterator[tuple[pa.NativeFile, bool]]:
    """A file at its first message, and whether it has the file format. A local file is mapped into memory."""
    fs, name = fsspec.core.url_to_fs(path)
    raw = None if has_local_path(fs, name) else fs.open(name, "rb", block_size=BLOCK_BYTES)
    try:
        with pa.memory_map(name) if raw is None else pa.PythonFile(raw, "r") as file:
            mark = file.read(8)
            if mark.startswith(_OLD_FILE):
                raise pa.ArrowInvalid("Feather of version 1: write it again with a later version of its library")
            in_file = mark.startswith(_FILE)
            file.seek(8 if in_file else 0)
            yield file, in_file
    finally:
        if raw is not None:
            raw.close()


def _message_at(file: pa.NativeFile, start: int, in_file: bool) -> _Message | None:
    """The message that starts at a byte; None at the end. Raises EOFError, ArrowInvalid: the file is damaged."""
    file.seek(start)
    head = file.read(8)
    continues = head.startswith(_CONTINUES)  # before Arrow 0.15 the length came first
    if len(head) < (8 if continues else 4):
        raise EOFError(f"it ends at byte {start} without the mark of its end")
    size = int.from_bytes(head[4:] if continues else head[:4], "little")
    begin, whole = start + (8 if continues else 4), file.size()
    if size == 0:
        if not in_file and begin < whole:
            raise pa.ArrowInvalid(f"more follows the end of the stream at byte {begin}: give every stream as a file")
        return None
    if size > min(_MOST_HEAD, whole - begin):
        raise EOFError(f"the head of the message at byte {start} goes on behind the end of the file")
    file.seek(begin)
    try:
        message = _parsed(file.read(size), file, begin + size)
    except struct.error as error:
        raise pa.ArrowInvalid(f"the head of the message at byte {start} is damaged: {error}") from None
    if not begin + size <= message.stop <= whole:
        raise EOFError(f"the message at byte {start} goes on to byte {message.stop}, and the file ends at {whole}")
    if not 0 <= message.rows <= max(message.stop - start, message.unpacked):  # a text has an offset of 4 bytes at least
        raise pa.ArrowInvalid(f"the message at byte {start} says that it has {message.rows} rows")
    return message


def _parsed(data: bytes, file: pa.NativeFile, body: int) -> _Message:
    """The header of a message, a flatbuffer as defined in Arrow's Message.fbs and Schema.fbs."""
    root = _number(data, 0, "I")
    kind, length = _field(data, root, 1, "B"), _field(data, root, 3, "q")
    table = _table(data, root, 2)
    if kind == _DICTIONARY:
        table = _table(data, table, 1)
    if kind not in (_DICTIONARY, _BATCH):
        return _Message(kind, body + length, 0, 0)
    compression = _table(data, table, 3)
    if not compression:
        return _Message(kind, body + length, _field(data, table, 0, "q"), 0)
    buffers, unpacked = _table(data, table, 2), 0
    for number in range(_number(data, buffers, "I") if buffers else 0):
        offset, size = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        if size >= 8:  # each starts with its decompressed size, or -1
            file.seek(body + max(0, min(offset, length)))
            unpacked += max(size, struct.unpack("<q", file.read(8))[0])
    return _Message(kind, body + length, _field(data, table, 0, "q"), unpacked)


def _number(data: bytes, place: int, kind: str) -> int:
    return int(struct.unpack_from(f"<{kind}", data, place)[0])


def _place(data: bytes, table: int, field: int) -> int:
    """Offset of a field of a table; 0 if it is absent."""
    names = table - _number(data, table, "i")
    offset = _number(data, names + 4 + 2 * field, "H") if 4 + 2 * field < _number(data, names, "H") else 0
    return table + offset if offset else 0


def _field(data: bytes, table: int, field: int, kind: str) -> int:
    place = _place(data, table, field)
    return _number(data, place, kind) if place else 0


def _table(data: bytes, table: int, field: int) -> int:
    """Offset of the table or vector of a field; 0 if it is absent."""
    place = _place(data, table, field) if table else 0
    return place + _number(data, place, "I") if place else 0


def _messages(path: str, file: pa.NativeFile, in_file: bool) -> Iterator[_Message]:
    """The messages after the schema, from the current position of the file.

    Raises:
        EOFError: the file is truncated.
        pyarrow.ArrowInvalid: the file is damaged.
        UserError: a batch takes too much memory.
    """
    position = file.tell()
    while (message := _message_at(file, position, in_file)) is not None:
        if message.kind not in (_DICTIONARY, _BATCH):
            raise pa.ArrowInvalid(f"the message at byte {position} is no record batch")
        read = 0 if isinstance(file, pa.MemoryMappedFile) else message.stop - position
        if (size := max(message.unpacked, read)) > BATCH_BYTES:
            raise UserError(
                f"{path}: a record batch takes {size:,} bytes, more than the {BATCH_BYTES:,} that are held at once: "
                "write the file with smaller ones"
            )
        position = message.stop
        yield message


def _batches(
    path: str, columns: list[str] | None = None, start: int = 0, stop: int = sys.maxsize
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows [start, stop) of some or all columns in checked batches of bounded size, each with its first row.

    Earlier batches are skipped unread, unless there are dictionaries between them.
    """
    with _opened(path) as (file, in_file):
        begin = file.tell()
        schema = pa.ipc.open_stream(file).schema
        file.seek(begin)
        tops = None if columns is None else top_columns(schema, columns)
        fields = None if tops is None else [schema.names.index(name) for name in tops]
        reader = pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False))
        row, resume, coded = 0, file.tell(), False
        for message in _messages(path, file, in_file):
            coded = coded or message.kind == _DICTIONARY
            if message.kind == _DICTIONARY:
                continue  # it is read with the following batch
            first, row = row, row + message.rows
            if first >= stop:
                return
            if row > start or coded:
                file.seek(resume)
                batch = reader.read_next_batch()
                if len(batch) != message.rows or file.tell() != message.stop:
                    raise pa.ArrowInvalid(f"the record batch of rows [{first}, {row}) has other rows")
                for column in batch.columns if row > start else ():
                    _check(column)
                skipped = max(start - first, 0)
                for offset, part in bounded_parts(batch.slice(skipped, max(0, min(stop, row) - first - skipped))):
                    yield first + skipped + offset, part
            resume = message.stop


def _check(column: pa.Array) -> None:
    """Refuse a column with offsets out of range. Invalid UTF-8 is a problem of the row."""
    if pa.types.is_dictionary(column.type):
        _check(column.dictionary)
        indices = column.indices
        indices.validate(full=True)
        highest = pc.max(indices.cast(pa.int64())).as_py()
        lowest = pc.min(indices.cast(pa.int64())).as_py()
        if highest is not None and not 0 <= lowest <= highest < len(column.dictionary):
            raise pa.ArrowInvalid("an index leads out of its dictionary")
    else:
        column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind.fields])
    return kind


def _schema(path: str) -> pa.Schema:
    with _opened(path) as (file, _):
        return pa.ipc.open_stream(file).schema


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    try:
        schema = _schema(entry.path)
        extent = _extent(entry, sys.maxsize if is_local(fsspec.core.url_to_fs(entry.path)[0]) else 1)
        with _opened(entry.path) as (_, in_file):
            if in_file and not tail.endswith(_FILE):
                raise EOFError("it ends without the mark of its end")
        check_schema(schema, source, entry.name)
    except (OSError, EOFError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{entry.name} is not a readable Arrow file: {error_line(error)}") from None
    return replace(entry, rows=extent.rows if extent.exact else None)


def _extent(entry: InputFile, most: int = _KNOWN_BY) -> Extent:
    """The number of rows of a file: counted, or estimated from some of its batches."""
    rows = batches = 0
    with _opened(entry.path) as (file, in_file):
        pa.ipc.open_stream(file)
        for message in _messages(entry.path, file, in_file):
            rows, batches = rows + message.rows * (message.kind == _BATCH), batches + 1
            if batches == most:
                return Extent(max(1, rows * entry.size // message.stop), False, entry.size)
    return Extent(rows, True, entry.size)


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    stop = sys.maxsize if shard.stop is None else shard.stop
    yield from table_rows(shard, _batches(shard.path, base.wanted_columns(shard), shard.start, stop), watch)


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Write the kept rows in the file format, with the schema and its metadata."""
    schema = _schema(source.first.path)
    last = schema.empty_table()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with open_file(source.name) as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for table in gathered(base.kept_rows(_tables(source.first), marks), 1 << 16):
            # the dictionaries of a file may only grow: each starts with the one before
            table = pa.concat_tables([last, table]).unify_dictionaries().combine_chunks()
            writer.write_table(table)
            last = table.slice(0, 0)


def _tables(shard: Shard) -> Iterator[pa.Table]:
    for _, batch in _batches(shard.path):
        yield pa.Table.from_batches([batch])


ARROW = base.Format(
    "arrow",
    "row",
    _inspect,
    _rows,
    base.Exporter(_copy, schema=lambda shard: _schema(shard.path), tables=_tables),
    columns=lambda shard: _schema(shard.path).names,
    suffixes=(".arrow",),
    estimate=_extent,
    lists=True,
    place=4,
)
