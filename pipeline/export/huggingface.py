"""A Hugging Face dataset folder: every input as Parquet under data/, all with one set of columns."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource, kept_numbered, kept_rows
from pipeline.corpus.formats.saved import split_of
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.export.verdicts import RowMarks

_ROWS = 1 << 10

MarksOf = Callable[[ExportSource], RowMarks]


@dataclass(slots=True)
class LeftOut:
    """Documents that can be no row of a table: broken lines, and text files that are not text."""

    count: int = 0


def parquet_names(sources: Sequence[ExportSource]) -> list[str]:
    """A file an input, in the names that a Hugging Face folder has."""
    split = split_of(sources[0].first)
    return [f"data/{split}-{number:05d}-of-{len(sources):05d}.parquet" for number in range(len(sources))]


def common_schema(sources: Sequence[ExportSource], marks_of: MarksOf) -> pa.Schema:
    """The columns of all inputs; JSONL has to be read for that.

    Raises:
        UserError: a column holds different kinds of values, or some that a table cannot hold.
    """
    schemas = [_schema_of(source, marks_of) for source in sources]
    for source, schema in zip(sources, schemas, strict=True):
        repeated = [name for name in schema.names if schema.names.count(name) > 1]
        if repeated:
            raise UserError(f"column {repeated[0]!r} stands several times in {source.name}: rename all but one")
    whole = schemas[0]
    for source, schema in zip(sources[1:], schemas[1:], strict=True):
        try:
            whole = pa.unify_schemas([whole, schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UserError(f"{source.name} has other columns than {sources[0].name}: {_line(error)}") from None
    if any(schema.metadata != whole.metadata or not schema.equals(whole) for schema in schemas):
        whole = whole.remove_metadata()
    return pa.schema([field.with_type(_plain(field.type)) for field in whole], whole.metadata)


def tables_of(source: ExportSource, marks: RowMarks, schema: pa.Schema, left_out: LeftOut) -> Iterator[pa.Table]:
    """The kept rows of an input, with the columns of all.

    Args:
        source: the input.
        marks: of its rows.
        schema: from `common_schema`.
        left_out: counts documents that are no rows.

    Raises:
        UserError: a value that the column cannot hold.
    """
    shard = source.first
    tables = format_named(shard.format).export.tables
    if tables is None:
        for first, rows in _blocks(_rows(source, marks, left_out)):
            arrays = [_array(shard, field.name, first, rows, field.type) for field in schema]
            yield pa.table(arrays, schema=schema)
        return
    for table in kept_rows(tables(shard), marks):
        columns = [
            table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
            for field in schema
        ]
        yield pa.table(columns, schema=schema)


def _schema_of(source: ExportSource, marks_of: MarksOf) -> pa.Schema:
    shard = source.first
    stated = format_named(shard.format).export.schema
    if stated is not None:
        return stated(shard)
    schema = pa.schema([])
    for first, rows in _blocks(_rows(source, marks_of(source), LeftOut())):
        names = dict.fromkeys(name for row in rows for name in row)
        fields = [pa.field(name, _array(shard, name, first, rows).type) for name in names]
        try:
            schema = pa.unify_schemas([schema, pa.schema(fields)], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _mixed(shard, first, error) from None
    return schema if schema.names else pa.schema([(shard.text, pa.string())])  # of no row


def _array(
    shard: Shard, name: str, first: int, rows: Sequence[dict[str, Any]], kind: pa.DataType | None = None
) -> pa.Array:
    """A column of some rows, of a type or of the one that its values have. Raises UserError: they have none."""
    try:
        return pa.array([row.get(name) for row in rows], kind)
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError) as error:
        raise _mixed(shard, first, error, name) from None


def _blocks(rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows in blocks, each with the number of its first one."""
    block: list[dict[str, Any]] = []
    first = size = 0
    for number, row in rows:
        first = number if not block else first
        block.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, (str, list, dict)))
        if len(block) == _ROWS or size > 1 << 24:
            yield first, block
            block, size = [], 0
    if block:
        yield first, block


def _rows(source: ExportSource, marks: RowMarks, left_out: LeftOut) -> Iterator[tuple[int, dict[str, Any]]]:
    """The kept rows of a text format with their numbers, without those that are none."""
    for number, row in kept_numbered(format_named(source.first.format).export.records(source), marks):
        if row is None:
            left_out.count += 1
        elif None in row:
            raise UserError(f"record {number} of {source.first.name} has more fields than the first one names")
        else:
            yield number, row


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type as `datasets` reads it: it knows no dictionaries and no views."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    return pa.large_string() if str(kind) == "string_view" else kind


def _mixed(shard: Shard, first: int, error: Exception, name: str = "") -> UserError:
    column = f"column {name!r} of {shard.name}" if name else f"a column of {shard.name}"
    return UserError(
        f"{column} holds what no one type of a table can hold, from row {first} on ({_line(error)}): without "
        "--huggingface the lines are copied as they are"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def check_features(schema: pa.Schema) -> None:
    """Check that Parquet can hold the columns, and `datasets` read them.

    Raises:
        UserError: not so, and which.
    """
    import datasets

    for field in schema:
        try:
            datasets.Features.from_arrow_schema(pa.schema([field]))
            pq.ParquetWriter(io.BytesIO(), pa.schema([field])).close()
        except Exception as error:  # the library raises several kinds, all about a type
            raise UserError(
                f"column {field.name!r} is {field.type}, which a dataset folder cannot hold ({_line(error)}): without "
                "--huggingface the files keep their format"
            ) from None
