"""Parquet files and saved datasets: rows are taken out of batches, and columns are written as they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.formats import HUB_SPLIT, open_saved_dataset
from pipeline.corpus.parquet import check_chunks
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.export.verdicts import RowMarks

AT_ONCE = 1 << 25
"""Bytes of rows that are held before they are written, about."""

_ROWS = 1 << 10
_PACKING = 12  # a column that packs better than that may be a dictionary: any row may be as long as all of it is
_CODECS = {"SNAPPY", "GZIP", "BROTLI", "LZ4", "ZSTD"}
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"

OpenFile = Callable[[str], AbstractContextManager[BinaryIO]]


def copy_parquet(shard: Shard, marks: RowMarks, sink: BinaryIO) -> None:
    """Write the kept rows of a Parquet file with its schema, its metadata and its compression.

    Raises:
        OSError: the file cannot be read.
        pyarrow.ArrowException: it is damaged.
    """
    with fsspec.open(shard.path, "rb") as file, closing(pq.ParquetFile(file, buffer_size=1 << 20)) as parquet:
        write_parquet(sink, parquet.schema_arrow, _kept_of(parquet, file, marks), codecs_of(parquet.metadata))


def parquet_schema(shard: Shard) -> pa.Schema:
    """The schema of a Parquet file."""
    with fsspec.open(shard.path, "rb") as file:
        return pq.ParquetFile(file).schema_arrow


def parquet_tables(shard: Shard, marks: RowMarks) -> Iterator[pa.Table]:
    """The kept rows of a Parquet file."""
    with fsspec.open(shard.path, "rb") as file, closing(pq.ParquetFile(file, buffer_size=1 << 20)) as parquet:
        yield from _kept_of(parquet, file, marks)


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


def _kept_of(parquet: pq.ParquetFile, file: Any, marks: RowMarks) -> Iterator[pa.Table]:
    file.seek(0, 2)
    check_chunks(parquet.metadata, parquet.schema_arrow.names, file.tell())
    for group in range(parquet.metadata.num_row_groups):
        for batch in parquet.iter_batches(_rows_of(parquet.metadata.row_group(group)), row_groups=[group]):
            yield pa.Table.from_batches([batch.filter(pa.array(marks.following(len(batch))))])


def _rows_of(group: pq.RowGroupMetaData) -> int:
    """How many rows of a row group to decode together: few where rows are long in any column."""
    longest = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        size, packed = chunk.total_uncompressed_size, max(1, chunk.total_compressed_size)
        alike = chunk.has_dictionary_page and size > _PACKING * packed
        longest += size if alike else size // max(1, group.num_rows)
    return max(1, min(_ROWS, AT_ONCE // max(1, longest)))


def codecs_of(metadata: pq.FileMetaData) -> str | dict[str, str]:
    """How the columns of a file are compressed."""
    if not metadata.num_row_groups:
        return "zstd"
    group = metadata.row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    named = {chunk.path_in_schema: chunk.compression for chunk in chunks}
    return {path: codec if codec in _CODECS else "NONE" for path, codec in named.items()}


def copy_saved_dataset(shard: Shard, name: str, marks: RowMarks, open_file: OpenFile) -> None:
    """Write the kept rows of a saved dataset, or of one split of a dictionary, in as many files as it has.

    Args:
        shard: any one of it.
        name: of its folder in the export.
        marks: of its rows.
        open_file: opens a file of the export by its name.

    Raises:
        UserError: it is no saved dataset.
        OSError: a file cannot be read.
    """
    inner, split = _split_of(shard)
    source = f"{shard.path}/{inner}".rstrip("/")
    folder = f"{name}/{inner}".rstrip("/")
    state, info = _json(f"{source}/{_STATE}"), _json(f"{source}/{_INFO}")
    rows = 0
    for entry in state["_data_files"]:
        with open_file(f"{folder}/{entry['filename']}") as sink:
            rows += _copy_arrow(f"{source}/{entry['filename']}", marks, sink)
    digest = hashlib.sha256(f"{state['_fingerprint']} {rows}".encode()).hexdigest()[:16]
    for key in ("splits", "dataset_size", "size_in_bytes", "download_size", "download_checksums"):
        if key in info:  # of what it was made from
            info[key] = None
    _write_json(open_file, f"{folder}/{_STATE}", {**state, "_fingerprint": digest})
    _write_json(open_file, f"{folder}/{_INFO}", info)
    if split is not None:
        _write_json(open_file, f"{name}/{_SPLITS}", {"splits": [split]})


def saved_names(shard: Shard, name: str) -> list[str]:
    """The files of a saved dataset in an export."""
    inner, split = _split_of(shard)
    folder = f"{name}/{inner}".rstrip("/")
    files = [entry["filename"] for entry in _json(f"{shard.path}/{inner}".rstrip("/") + f"/{_STATE}")["_data_files"]]
    names = [f"{folder}/{file}" for file in (*files, _STATE, _INFO)]
    return names if split is None else [*names, f"{name}/{_SPLITS}"]


def dataset_of(shard: Shard) -> Any:
    """A saved dataset, or one of the hub.

    Raises:
        UserError: it cannot be opened.
    """
    if shard.format == "dataset":
        return open_saved_dataset(shard.path, shard.split, shard.name)
    import datasets

    return datasets.load_dataset(shard.path, shard.subset, split=shard.split or HUB_SPLIT)


def dataset_tables(dataset: Any, marks: RowMarks) -> Iterator[pa.Table]:
    """The kept rows of a dataset."""
    for table in dataset.with_format("arrow").iter(_ROWS):
        yield table.filter(pa.array(marks.following(len(table))))


def _split_of(shard: Shard) -> tuple[str, str | None]:
    """The folder inside a saved dataset that is read, and the split that it is; none where it is no dictionary."""
    try:
        splits = _json(f"{shard.path}/{_SPLITS}")["splits"]
    except FileNotFoundError:
        return "", None
    split = shard.split or splits[0]
    return split, split


def _copy_arrow(path: str, marks: RowMarks, sink: BinaryIO) -> int:
    """Copy the kept rows of an Arrow stream, and say how many they are; the file begins where the last one ended."""
    kept = 0
    with (
        fsspec.open(path, "rb") as file,
        pa.ipc.open_stream(pa.PythonFile(file, "r")) as reader,
        pa.ipc.new_stream(sink, reader.schema) as writer,
    ):
        for table in gathered(_filtered(reader, marks), _ROWS):
            writer.write_table(table.combine_chunks())
            kept += len(table)
    return kept


def _filtered(reader: Any, marks: RowMarks) -> Iterator[pa.Table]:
    for batch in reader:
        yield pa.Table.from_batches([batch.filter(pa.array(marks.following(len(batch))))])


def _json(path: str) -> Any:
    with fsspec.open(path, "rb") as file:
        data = file.read()
    try:
        return json.loads(data)
    except ValueError:
        raise UserError(f"{path} is damaged: not JSON") from None


def _write_json(open_file: OpenFile, name: str, value: Any) -> None:
    with open_file(name) as sink:
        sink.write(json.dumps(value, indent=2).encode())
