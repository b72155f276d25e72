"""Datasets of the `datasets` library: folders written by `save_to_disk`, and datasets on the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.files import digest_of
from pipeline.corpus.formats import base
from pipeline.corpus.formats.columns import bounded_parts, gathered, table_rows, write_parquet
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, nearest

HUB_SPLIT = "train"
"""Default split of a dataset on the hub."""

_ROWS = 1 << 10
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
SAVED_MARKS = (_INFO, _SPLITS)
"""Files that identify a saved dataset and a dictionary of saved datasets."""


def open_saved_dataset(path: str, split: str | None, name: str) -> Any:
    """Open a dataset written by `save_to_disk`; of a dictionary of splits, the one named `split` or the only one.

    Raises:
        UserError: not a saved dataset, no such split, or several splits and no name.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_from_disk(path)
    except (OSError, ValueError, pa.ArrowException, FileNotFoundError) as error:
        raise UserError(f"{name} is not a readable saved dataset: {' '.join(str(error).split())}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split is None and len(dataset) > 1:
            rows = ", ".join(f"{key} ({part.num_rows} rows)" for key, part in dataset.items())
            raise UserError(
                f"{name} holds several splits, {rows}: say which beside its path, as in split: {next(iter(dataset))}"
            )
        split = split or next(iter(dataset), "")
        if split not in dataset:
            raise UserError(f"no split {split!r} in {name}; {nearest(split, dataset, 'splits')}")
        return dataset[split]
    return dataset


def hub_dataset_info(name: str, subset: str | None, split: str) -> tuple[list[str], int, int]:
    """Request the columns, rows and bytes of one split from the hub or its local cache.

    Raises:
        UserError: the dataset or split does not exist, or the hub cannot be reached.
    """
    import datasets

    try:
        info = datasets.load_dataset_builder(name, subset).info
        if not info.splits or not info.features:
            dataset = datasets.load_dataset(name, subset, split=split)
            return list(dataset.column_names), dataset.num_rows, int(dataset.dataset_size or 0)
    except Exception as error:  # the library raises a dozen types, all for a name or a connection
        raise UserError(f"cannot open dataset {name}: {' '.join(str(error).split())[:300]}") from None
    if split not in info.splits:
        raise UserError(f"no split {split!r} in dataset {name}; {nearest(split, info.splits, 'splits')}")
    return list(info.features), int(info.splits[split].num_examples), int(info.splits[split].num_bytes or 0)


def _inspect_saved(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    dataset = open_saved_dataset(entry.path, source.split, entry.name)
    base.check_columns(source, entry.name, dataset.column_names)
    size = int(dataset.dataset_size or dataset.data.nbytes)
    content = digest_of(str(dataset._fingerprint), str(dataset.num_rows))
    return replace(entry, size=size, rows=dataset.num_rows, content=content)


def _inspect_hub(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    split = source.split or HUB_SPLIT
    columns, rows, size = hub_dataset_info(entry.path, source.subset, split)
    base.check_columns(source, entry.name, columns)
    content = digest_of(entry.path, str(source.subset), split, str(rows), str(size))
    return replace(entry, size=size, rows=rows, content=content)


def _open(shard: Shard) -> Any:
    """Open a saved dataset. Raises UserError: it cannot be opened."""
    return open_saved_dataset(shard.path, shard.split, shard.name)


def _load(shard: Shard) -> Any:
    """Load a dataset of the hub."""
    import datasets

    return datasets.load_dataset(shard.path, shard.subset, split=shard.split or HUB_SPLIT)


def _batches(dataset: Any, shard: Shard) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a shard with its columns, in batches of bounded size, each with the number of its first row."""
    stop = dataset.num_rows if shard.stop is None else min(shard.stop, dataset.num_rows)
    columns = dataset.select_columns(base.wanted_columns(shard)).with_format("arrow")
    row = shard.start
    for first in range(shard.start, stop, _ROWS):
        for batch in columns[first : min(first + _ROWS, stop)].to_batches():
            yield from ((row + offset, part) for offset, part in bounded_parts(batch))
            row += len(batch)


def _names(source: base.ExportSource) -> list[str]:
    inner, split = _split_of(source.first)
    folder = f"{source.name}/{inner}".rstrip("/")
    state = _json(f"{source.first.path}/{inner}".rstrip("/") + f"/{_STATE}")
    names = [f"{folder}/{file}" for file in (*(entry["filename"] for entry in state["_data_files"]), _STATE, _INFO)]
    return names if split is None else [*names, f"{source.name}/{_SPLITS}"]


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Write the kept rows of a saved dataset, or of one split of a dictionary, with the same number of files."""
    shard, name = source.first, source.name
    inner, split = _split_of(shard)
    place = f"{shard.path}/{inner}".rstrip("/")
    folder = f"{name}/{inner}".rstrip("/")
    state, info = _json(f"{place}/{_STATE}"), _json(f"{place}/{_INFO}")
    rows = 0
    for entry in state["_data_files"]:
        with open_file(f"{folder}/{entry['filename']}") as sink:
            rows += _copy_arrow(f"{place}/{entry['filename']}", marks, sink)
    digest = hashlib.sha256(f"{state['_fingerprint']} {rows}".encode()).hexdigest()[:16]
    for key in ("splits", "dataset_size", "size_in_bytes", "download_size", "download_checksums"):
        if key in info:  # of the dataset that it was made from
            info[key] = None
    _write_json(open_file, f"{folder}/{_STATE}", {**state, "_fingerprint": digest})
    _write_json(open_file, f"{folder}/{_INFO}", info)
    if split is not None:
        _write_json(open_file, f"{name}/{_SPLITS}", {"splits": [split]})


def _split_of(shard: Shard) -> tuple[str, str | None]:
    """The folder of a saved dataset that is read, and its split; None if the dataset is not a dictionary."""
    try:
        splits = _json(f"{shard.path}/{_SPLITS}")["splits"]
    except FileNotFoundError:
        return "", None
    split = shard.split or splits[0]
    return split, split


def _copy_arrow(path: str, marks: base.Marks, sink: BinaryIO) -> int:
    """Copy the kept rows of an Arrow stream and return their number; `marks` continues from the previous file."""
    kept = 0
    with (
        fsspec.open(path, "rb") as file,
        pa.ipc.open_stream(pa.PythonFile(file, "r")) as reader,
        pa.ipc.new_stream(sink, reader.schema) as writer,
    ):
        for table in gathered(base.kept_rows((pa.Table.from_batches([batch]) for batch in reader), marks), _ROWS):
            writer.write_table(table.combine_chunks())
            kept += len(table)
    return kept


def _json(path: str) -> Any:
    with fsspec.open(path, "rb") as file:
        data = file.read()
    try:
        return json.loads(data)
    except ValueError:
        raise UserError(f"{path} is damaged: not JSON") from None


def _write_json(open_file: base.OpenFile, name: str, value: Any) -> None:
    with open_file(name) as sink:
        sink.write(json.dumps(value, indent=2).encode())


def _tables(dataset: Any) -> Iterator[pa.Table]:
    return iter(dataset.with_format("arrow").iter(_ROWS))


def split_of(shard: Shard) -> str:
    """The split that an input is exported as."""
    split = shard.split or HUB_SPLIT
    return split if _SPLIT_NAME.fullmatch(split) else HUB_SPLIT


def _hub_names(source: base.ExportSource) -> list[str]:
    return [f"{source.name}-{split_of(source.first)}.parquet"]


def _copy_hub(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    with open_file(*_hub_names(source)) as sink:
        dataset = _load(source.first)
        write_parquet(sink, dataset.features.arrow_schema, base.kept_rows(_tables(dataset), marks))


SAVED = base.Format(
    "dataset",
    "row",
    _inspect_saved,
    lambda shard, watch, _: table_rows(shard, _batches(_open(shard), shard), watch),
    base.Exporter(
        _copy,
        _names,
        schema=lambda shard: _open(shard).features.arrow_schema,
        tables=lambda shard: _tables(_open(shard)),
    ),
    columns=lambda shard: list(_open(shard).column_names),
    is_folder=True,
    place=7,
)

HUB = base.Format(
    "hub",
    "row",
    _inspect_hub,
    lambda shard, watch, _: table_rows(shard, _batches(_load(shard), shard), watch),
    base.Exporter(
        _copy_hub,
        _hub_names,
        schema=lambda shard: _load(shard).features.arrow_schema,
        tables=lambda shard: _tables(_load(shard)),
    ),
    has_path=False,
    place=8,
)
