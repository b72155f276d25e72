"""Arrow columns: checks for texts and pictures, conversion to rows, and writing as Parquet."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.corpus import ANSWER_COLUMNS, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, nearest

AT_ONCE = 1 << 25
"""Approximate bytes of rows that are collected before they are written."""

_ROWS, _ROWS_BYTES = 1024, 1 << 26  # decoded together


def check_schema(schema: pa.Schema, source: SourceConfig, name: str) -> None:
    """Check that a table has the columns of a source, and that they can hold its texts or pictures.

    Raises:
        UserError: a column is missing or holds something else.
    """
    base.check_columns(source, name, column_names(schema, source.columns))
    if source.image is not None:
        _check_picture_column(schema, source.image, name)
        return
    for column in source.score_columns:
        held = _column_type(schema, column)
        if not _is_number(held) and not (column in ANSWER_COLUMNS and _is_list(held)):
            numbers = [field.name for field in schema if _is_number(field.type)]
            hint = nearest(column, numbers, "columns of numbers") if numbers else "no column holds numbers"
            raise UserError(f"column {column!r} in {name} holds {held}, not numbers; {hint}")
    if not source.has_text:
        return
    if source.item:
        _check_item_columns(schema, source.item, name)
        return
    kind = _column_type(schema, source.content)
    listed = _is_list(kind)
    if source.tokens is not None:
        if not listed or not pa.types.is_integer(kind.value_type):
            raise UserError(f"column {source.content!r} in {name} holds {kind}, not lists of integers, the token ids")
        return
    if source.has_chats:
        for column in filter(None, (source.content, source.completion)):
            kind = _column_type(schema, column)
            held = kind.value_type if _is_list(kind) else None
            if not _is_text(kind) and not (held and (pa.types.is_struct(held) or pa.types.is_map(held))):
                raise UserError(
                    f"column {column!r} in {name} holds {kind}, not lists of messages {{role, content}}, nor JSON "
                    "texts of such lists"
                )
        return
    if source.companions:
        if not listed or pa.types.is_fixed_size_list(kind) or not _is_text(kind.value_type):
            raise UserError(f"column {source.content!r} in {name} holds {kind}, not lists of texts")
        return
    if not _is_text(kind):
        raise base.not_text(source, name, *_described(kind), schema.names)


def _described(kind: pa.DataType) -> tuple[str, list[str]]:
    """What a column of a type holds, and the names of its fields."""
    nested = pa.types.is_nested(kind) and not pa.types.is_struct(kind)
    fields = kind.value_type if nested and not pa.types.is_map(kind) and not pa.types.is_union(kind) else kind
    names = [field.name for field in fields.fields] if pa.types.is_struct(fields) else []
    if not nested:
        return ("objects" if names else str(kind)), names
    return ("lists of messages" if base.is_message(names) else "lists"), []


def column_names(schema: pa.Schema, wanted: Iterable[str]) -> list[str]:
    """The columns of a schema, and the fields of its structs if a wanted column may be one of them."""
    names = list(schema.names)
    if any("." in column and column not in names for column in wanted):
        names += [f"{field.name}.{inner}" for field in schema for inner in _fields_in(field.type)]
    return names


def _fields_in(kind: pa.DataType) -> Iterator[str]:
    for field in kind.fields if pa.types.is_struct(kind) else ():
        yield field.name
        yield from (f"{field.name}.{inner}" for inner in _fields_in(field.type))


def _path_in(fields: Sequence[pa.Field], name: str) -> tuple[str, ...] | None:
    """A column, and the fields of structs within it, that a name stands for, as `field_value` reads it; or None."""
    types = {field.name: field.type for field in fields}
    if name in types:
        return (name,)
    for first, rest in base.dotted(name):
        inner = types.get(first)
        if inner is not None and pa.types.is_struct(inner) and (path := _path_in(inner.fields, rest)) is not None:
            return first, *path
    return None


def _column_type(schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column, or of a field `a.b` of a struct."""
    first, *rest = _path_in(list(schema), name) or (name,)
    return functools.reduce(lambda kind, part: kind.field(part).type, rest, schema.field(first).type)


def top_columns(schema: pa.Schema, wanted: Iterable[str]) -> list[str]:
    """The columns of a table that hold wanted columns, or structs with wanted fields, each once."""
    return list(dict.fromkeys((_path_in(list(schema), name) or (name,))[0] for name in wanted))


def column_values(batch: pa.RecordBatch | pa.Table, name: str) -> Any:
    """A column, or the field `a.b` of a struct."""
    first, *rest = _path_in(list(batch.schema), name) or (name,)
    return pc.struct_field(batch.column(first), rest) if rest else batch.column(first)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    stringlike = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(check(kind) for check in stringlike) or str(kind) == "string_view"


def _check_item_columns(schema: pa.Schema, columns: Sequence[str], name: str) -> None:
    """Check that the columns of a template hold texts, numbers, dates or lists of texts. Raises UserError."""
    for column in columns:
        kind = _column_type(schema, column)
        held = kind.value_type if _is_list(kind) else kind
        dates = pa.types.is_date(held) or pa.types.is_timestamp(held)
        plain = dates or pa.types.is_boolean(held) or pa.types.is_null(held) or _is_number(held)
        if not _is_text(held) and not (plain and held is kind):
            raise UserError(
                f"column {column!r} in {name} holds {kind}, and template takes texts, numbers, dates and lists of "
                f"texts; columns: {', '.join(schema.names)}"
            )


def _written(column: Any) -> list[Any]:
    """The values of a column, single-precision numbers with the digits that they were written with."""
    single = pa.types.is_float32(column.type) or pa.types.is_float16(column.type)
    to_digits = column.type.to_pandas_dtype() if single else None
    values = column.to_pylist()
    return [None if one is None else float(str(to_digits(one))) for one in values] if to_digits else values


def _check_picture_column(schema: pa.Schema, column: str, name: str) -> None:
    """Check that a column holds bytes, records of bytes and path, or text. Raises UserError."""
    kind = _column_type(schema, column)
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


def bounded_parts(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch in parts that may be decoded together, each with its first row. Texts may be dictionary-encoded."""
    size = batch.nbytes // max(1, len(batch))
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            words = column.dictionary
            size += words.nbytes // max(1, len(words))
            if pa.types.is_string(words.type) or pa.types.is_large_string(words.type):
                size += pc.max(pc.binary_length(words)).as_py() or 0
    rows = max(1, min(_ROWS, _ROWS_BYTES // max(1, size)))
    for offset in range(0, len(batch), rows):
        yield offset, batch.slice(offset, rows)


def table_rows(shard: Shard, batches: Iterable[tuple[int, pa.RecordBatch]], watch: base.Watch) -> Iterator[base.Row]:
    """The rows of a shard.

    Args:
        shard: shard of a table.
        batches: its rows and columns, each batch with the number of its first row.
        watch: receives every row.

    Raises:
        EOFError: there are fewer rows than planned.
    """
    given = 0
    for first, batch in batches:
        column = column_values(batch, shard.text)
        texts = map(_picture, column) if shard.pictures else _decoded(column)
        *names, caption = base.other_columns(shard)
        others = [column_values(batch, name).to_pylist() if name else itertools.repeat(None) for name in names]
        captions = _decoded(column_values(batch, caption), binary=False) if caption else itertools.repeat(None)
        if shard.value_columns:
            values = (column_values(batch, name) for name in shard.value_columns)
            captions = zip(*(_written(one) if shard.item else one.to_pylist() for one in values), strict=True)
        for row, (text, *rest) in enumerate(zip(texts, *others, captions, strict=False), first):
            yield row, base.DEADLY if watch(row, False) else text, *rest
        given += len(batch)
    if shard.stop is not None and given != shard.stop - shard.start:
        raise EOFError(f"rows [{shard.start}, {shard.stop}) were planned, and {given} of them are in it")


def _picture(held: pa.Scalar) -> Any:
    """A value of a column of pictures: bytes, a path, or a record of both. An invalid path affects one document."""
    (value,) = _decoded([held], binary=False)
    if isinstance(value, base.Unreadable) and isinstance(held, pa.StructScalar) and "bytes" in held:
        return held["bytes"].as_py() or value
    return value


def _decoded(column: Iterable[pa.Scalar], binary: bool = True) -> Iterator[Any]:
    """The values of an Arrow column of texts or lists of texts. Invalid UTF-8 affects only one document.

    Args:
        column: the column.
        binary: whether bytes are decoded as texts.
    """
    for held in column:
        try:
            value = held.as_py()
            if binary and isinstance(value, list):
                yield [text.decode() if isinstance(text, bytes) else text for text in value]
            else:
                yield value.decode() if binary and isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            yield base.Unreadable(Reason.UNDECODABLE, f"byte {error.start} is not UTF-8")


def edited_tables(
    tables: Iterable[pa.Table], schema: pa.Schema, column: str, edits: base.RowEdits
) -> Iterator[pa.Table]:
    """The rows of an input with edited texts.

    Args:
        tables: all rows in order.
        schema: schema of the tables.
        column: column of the texts.
        edits: edits of the rows.
    """
    top, *inner = _path_in(list(schema), column) or (column,)
    place, row = schema.get_field_index(top), itertools.count()
    for table in tables:
        changed = [edits.at(next(row)) for _ in range(len(table))]
        texts = [None if edit is None else edit.after for edit in changed]
        edited = _replaced_field(table.column(place).combine_chunks(), inner, texts)
        yield table.set_column(place, schema.field(place), edited)


def _replaced_field(column: pa.Array, inner: Sequence[str], texts: list[str | None]) -> Any:
    """A column in which some texts are replaced, of its own or of a field of its structs."""
    if not inner:
        return _replaced(column, texts)
    place = column.type.get_field_index(inner[0])
    children = column.flatten()
    children[place] = _replaced_field(children[place], inner[1:], texts)
    return pa.StructArray.from_arrays(children, fields=list(column.type.fields), mask=column.is_null())


def _replaced(column: pa.Array, texts: list[str | None]) -> Any:
    """A column in which some texts are replaced, with the same type."""
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
    """The same rows in larger tables of about `AT_ONCE` bytes and at most about `rows` rows."""
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
