"""Columns of Arrow: checked for texts and pictures, read as rows, and written as Parquet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.corpus import SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError

AT_ONCE = 1 << 25
"""Bytes of rows that are held before they are written, about."""


def check_schema(schema: pa.Schema, source: SourceConfig, name: str) -> None:
    """Check that a table has the columns of a source, and that they can hold its texts or pictures.

    Raises:
        UserError: a column is missing or holds something else.
    """
    base.check_columns(source, name, schema.names)
    if source.image is not None:
        _check_picture_column(schema, source.image, name)
        return
    kind = schema.field(source.content).type
    if source.beside:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not _is_text(kind.value_type):
            raise UserError(f"column {source.content!r} in {name} holds {kind}, not lists of texts")
        return
    if not _is_text(kind):
        raise UserError(f"column {source.text!r} in {name} holds {kind}, not text; columns: {', '.join(schema.names)}")


def _is_text(kind: pa.DataType) -> bool:
    stringlike = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(check(kind) for check in stringlike) or str(kind) == "string_view"


def _check_picture_column(schema: pa.Schema, column: str, name: str) -> None:
    """Check that a column holds bytes, records of bytes and path, or text. Raises UserError."""
    kind = schema.field(column).type
    if pa.types.is_struct(kind):
        parts = {kind.field(index).name for index in range(kind.num_fields)}
        if parts & {"bytes", "path"}:
            return
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    if not any(check(kind) for check in checks):
        raise UserError(
            f"column {column!r} in {name} holds {kind}: a picture is bytes, a record of bytes and path, or a path; "
            f"columns: {', '.join(schema.names)}"
        )


def wanted_columns(shard: Shard) -> list[str]:
    """The columns of a table that a shard reads."""
    return [name for name in (shard.text, *base.other_columns(shard), *shard.beside) if name is not None]


def sampled_rows(schema: pa.Schema) -> int:
    """Rows that `init` looks at: few of a table with bytes in it."""
    kinds = [field.type for field in schema]
    kinds += [inner.type for kind in kinds if pa.types.is_struct(kind) for inner in kind.fields]
    heavy = any(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) for kind in kinds)
    return base.SAMPLED_PICTURES if heavy else base.SAMPLED_ROWS


def batch_rows(shard: Shard, batch: pa.RecordBatch, first: int, watch: base.Watch) -> Iterator[base.Row]:
    """The rows of a batch.

    Args:
        shard: that they are of.
        batch: with the shard's columns.
        first: the number of its first row.
        watch: is told of every row.
    """
    column = batch.column(shard.text)
    texts = _picture_values(column) if shard.pictures else _lists(column) if shard.beside else _decoded(column)
    *names, caption = base.other_columns(shard)
    others = [batch.column(name).to_pylist() if name else itertools.repeat(None) for name in names]
    captions = _words_or_values(batch.column(caption)) if caption else itertools.repeat(None)
    if shard.beside:
        captions = zip(*(batch.column(name).to_pylist() for name in shard.beside), strict=True)
    for offset, (text, *rest) in enumerate(zip(texts, *others, captions, strict=False)):
        yield first + offset, base.DEADLY if watch(first + offset, False) else text, *rest


def _picture_values(column: pa.Array) -> Iterator[Any]:
    """The values of a column of pictures: bytes, paths, or records of them. A bad path costs one document."""
    if not pa.types.is_struct(column.type):
        yield from _words_or_values(column)
        return
    names = [column.type.field(index).name for index in range(column.type.num_fields)]
    for values in zip(*map(_words_or_values, column.flatten()), strict=True):
        value = dict(zip(names, values, strict=True))
        path = value.get("path")
        yield path if isinstance(path, base.Unreadable) and value.get("bytes") is None else value


def _lists(column: pa.Array) -> Iterator[Any]:
    """The lists of texts of an Arrow column. Bytes that are not UTF-8 cost one document, not the batch."""
    for value in column:
        try:
            texts = value.as_py()
            yield [text.decode("utf-8") if isinstance(text, bytes) else text for text in texts] if texts else texts
        except UnicodeDecodeError as error:
            yield base.Unreadable("undecodable", f"byte {error.start} of a version is not UTF-8")


def _words_or_values(column: pa.Array) -> Iterator[Any]:
    """The values of an Arrow column, its texts as `_decoded`."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"
    return _decoded(column) if texts else iter(column.to_pylist())


def _decoded(column: pa.Array) -> Iterator[Any]:
    """The texts of an Arrow column. Bytes that are not UTF-8 cost one document, not the batch."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if str(column.type) == "string_view":
        column = pc.cast(column, pa.large_string())
    binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    for value in (column.cast(binary) if not pa.types.is_large_binary(column.type) else column).to_pylist():
        try:
            yield value if value is None else value.decode("utf-8")
        except UnicodeDecodeError as error:
            yield base.Unreadable("undecodable", f"byte {error.start} is not UTF-8")


def kept_rows(batch: pa.RecordBatch, marks: base.Marks) -> pa.Table:
    """The next rows of an input, without those that an export leaves out."""
    return pa.Table.from_batches([batch.filter(pa.array(marks.following(len(batch))))])


def edited_tables(
    batches: Iterable[tuple[int, pa.RecordBatch]], schema: pa.Schema, column: str, edits: base.RowEdits
) -> Iterator[pa.Table]:
    """The rows of batches with edited texts.

    Args:
        batches: number of the first row, and rows.
        schema: of all of them.
        column: of the texts.
        edits: of the rows.
    """
    place = schema.get_field_index(column)
    for first, batch in batches:
        table = pa.Table.from_batches([batch], schema)
        changed = [edits.of(row) for row in range(first, first + len(batch))]
        values = _replaced(batch.column(place), [None if edit is None else edit.after for edit in changed])
        yield table.set_column(place, schema.field(place), values)


def _replaced(column: pa.Array, texts: list[str | None]) -> Any:
    """A column of texts with others in the place of some, of its type."""
    kind = column.type
    if not any(text is not None for text in texts):
        return column
    plain = pa.large_binary() if kind in (pa.binary(), pa.large_binary()) else pa.large_string()
    values = (column.dictionary_decode() if pa.types.is_dictionary(kind) else column).cast(plain)
    news = [text.encode() if plain == pa.large_binary() else text for text in texts if text is not None]
    replaced = pc.replace_with_mask(values, pa.array([text is not None for text in texts]), pa.array(news, plain))
    return replaced.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else replaced.cast(kind)


def write_parquet(
    sink: BinaryIO, schema: pa.Schema, tables: Iterator[pa.Table], compression: str | dict[str, str] = "zstd"
) -> None:
    """Write tables as one Parquet file, in row groups of `AT_ONCE` bytes."""
    with pq.ParquetWriter(sink, schema, compression=compression) as writer:
        for table in gathered(tables):
            writer.write_table(table, row_group_size=len(table))


def gathered(tables: Iterator[pa.Table], rows: int = 1 << 20) -> Iterator[pa.Table]:
    """The same rows in larger tables, of about `AT_ONCE` bytes and at most about so many rows."""
    waiting: list[pa.Table] = []
    size = count = 0
    for table in tables:
        if not len(table):
            continue
        waiting.append(table)
        size, count = size + table.nbytes, count + len(table)
        if size >= AT_ONCE or count >= rows:
            yield pa.concat_tables(waiting)
            waiting, size, count = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting)
