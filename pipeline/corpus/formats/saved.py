"""Datasets of the `datasets` library: folders written by `save_to_disk`, and datasets on the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.formats.columns import (
    bounded_parts,
    check_schema,
    gathered,
    table_rows,
    top_columns,
    write_parquet,
)
from pipeline.corpus.input_files import line_digest
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, error_line, nearest, visible

HUB_SPLIT = "train"
"""Default split of a dataset on the hub."""

_ROWS = 1 << 10
_ONE_FILE = "data-00000-of-00001.arrow"
_PLAIN_STATE: dict[str, Any] = {
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
SAVED_MARKS = (_INFO, _SPLITS)
"""Files that identify a saved dataset and a dictionary of saved datasets."""


def open_saved_dataset(path: str, split: str | None, name: str) -> Any:
    """Open a dataset written by `save_to_disk`; of a dictionary of splits, the one named `split` or the only one.

    Args:
        path: folder of the dataset.
        split: a split, or an expression such as `train[:1000]+test`; None: the only one.
        name: name of the input, for messages.

    Raises:
        UserError: not a saved dataset, no such split, or several splits and no name.
    """
    import datasets

    split = _plain_split(split) if split else None
    datasets.disable_progress_bars()
    try:
        _check_names(path, name)
        dataset = datasets.load_from_disk(path)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, pa.ArrowException) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error_line(error)
        raise UserError(f"{name} is not a readable saved dataset: {reason}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split is None and len(dataset) > 1:
            rows = ", ".join(f"{key} ({part.num_rows} rows)" for key, part in dataset.items())
            raise UserError(
                f"{name} holds several splits, {rows}: say which beside its path, as in split: {next(iter(dataset))}"
            )
        splits = dict(dataset)
        split = split or next(iter(splits), "")
    else:
        only = str(dataset.split or _name_in_dictionary(path) or _names_in(split or HUB_SPLIT)[0])
        splits, split = {only: dataset}, split or only
    if split in splits:
        return splits[split]
    parts = _parts(split, {key: part.num_rows for key, part in splits.items()}, name)
    return datasets.concatenate_datasets([splits[key].select(range(start, stop)) for key, start, stop in parts])


def _name_in_dictionary(path: str) -> str | None:
    """The split that the folder of a dataset is in its dictionary of datasets; None if it is in none."""
    folder, _, name = path.rstrip("/").rpartition("/")
    fs, place = fsspec.core.url_to_fs(f"{folder}/{_SPLITS}")
    return name if fs.exists(place) else None


def _check_names(path: str, name: str) -> None:
    """Check that the files and splits that a saved dataset names are in its folder, by their letters.

    Raises:
        UserError: one is elsewhere, such as `../other/data.arrow`.
        ValueError, TypeError, LookupError: the dataset is damaged.
    """
    fs, root = fsspec.core.url_to_fs(path)
    splits = json.loads(fs.cat_file(f"{root}/{_SPLITS}"))["splits"] if fs.exists(f"{root}/{_SPLITS}") else []
    for inner in splits:
        _check_inside(name, _SPLITS, inner)
    for state in (_STATE, *(f"{inner}/{_STATE}" for inner in splits)):
        for entry in json.loads(fs.cat_file(f"{root}/{state}"))["_data_files"] if fs.exists(f"{root}/{state}") else []:
            _check_inside(name, state, entry["filename"])


def _check_inside(name: str, origin: str, inner: str) -> None:
    """Check that a path is relative and leads nowhere else. Raises UserError."""
    path = PurePosixPath(inner)
    if path.is_absolute() or ".." in path.parts or "\\" in inner or "\0" in inner:
        raise UserError(f"{name}: {origin} names {visible(inner)[:200]!r}, which is outside of its folder")


def _plain_split(split: str | None) -> str:
    """A split or an expression without blanks, which not all readers of the `datasets` library accept."""
    return "".join((split or HUB_SPLIT).split())


def _names_in(split: str) -> list[str]:
    """The splits that an expression names."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


def _parts(split: str, lengths: Mapping[str, int], name: str) -> list[tuple[str, int, int]]:
    """The rows of a split expression such as `train[:1000]+test[:10%]`: each split with its first and last row.

    Args:
        split: the expression, as the `datasets` library defines it.
        lengths: number of rows of every split.
        name: name of the input, for messages.

    Raises:
        UserError: no such split, or no such rows.
    """
    import datasets

    for one in _names_in(split):
        if one not in lengths:
            raise UserError(f"no split {one!r} in {name}; {nearest(one, lengths, 'splits')}")
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(lengths))
    except (ValueError, AssertionError) as error:
        example = next(iter(lengths))
        raise UserError(
            f"split {split!r} of {name}: {error_line(error, 300)}; examples: {example}[:1000], "
            f"{example}[10%:20%], {example}[-500:]"
        ) from None
    return [(part.splitname, part.from_, max(part.from_, part.to)) for part in parts]


@dataclass(frozen=True, slots=True)
class HubInfo:
    """Facts about the rows of a dataset on the hub, from its metadata."""

    schema: pa.Schema
    rows: int
    size: int  # bytes; 0 if unknown
    version: str  # commit of the dataset, or a digest of its files


def hub_dataset_info(name: str, subset: str | None, split: str, revision: str | None = None) -> HubInfo:
    """Request facts about one split, or an expression of splits, from the hub or its local cache.

    Raises:
        UserError: the dataset or split does not exist, or the hub cannot be reached.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, subset, revision=revision)
        info, version = builder.info, str(builder.hash or "")
        if not info.splits or not info.features:
            dataset = datasets.load_dataset(name, subset, split=split, revision=revision)
            info = dataset.info
        if not info.splits or not info.features:
            return HubInfo(dataset.features.arrow_schema, dataset.num_rows, int(dataset.dataset_size or 0), version)
    except Exception as error:  # the library raises a dozen types, all for a name or a connection
        raise UserError(f"cannot open dataset {name}: {error_line(error, 300)}") from None
    lengths = {key: int(one.num_examples) for key, one in info.splits.items()}
    parts = _parts(split, lengths, f"dataset {name}")
    shares = [(stop - start) / max(1, lengths[key]) for key, start, stop in parts]
    size = sum(share * int(info.splits[key].num_bytes or 0) for share, (key, _, _) in zip(shares, parts, strict=True))
    rows = sum(stop - start for _, start, stop in parts)
    return HubInfo(info.features.arrow_schema, rows, round(size), version)


def _inspect_saved(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    dataset = open_saved_dataset(entry.path, source.split, entry.name)
    check_schema(dataset.features.arrow_schema, source, entry.name)
    size = int(dataset.dataset_size or dataset.data.nbytes)
    content = line_digest(str(dataset._fingerprint), str(dataset.num_rows))
    return replace(entry, size=size, rows=dataset.num_rows, content=content)


def _inspect_hub(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    split = _plain_split(source.split)
    info = hub_dataset_info(entry.path, source.subset, split, source.revision)
    check_schema(info.schema, source, entry.name)
    content = line_digest(entry.path, str(source.subset), split, str(info.rows), str(info.size), info.version)
    return replace(entry, size=info.size, rows=info.rows, content=content)


def _open(shard: Shard) -> Any:
    """Open a saved dataset. Raises UserError: it cannot be opened."""
    return open_saved_dataset(shard.path, shard.split, shard.name)


def _load(shard: Shard) -> Any:
    """Load a dataset of the hub."""
    import datasets

    return datasets.load_dataset(shard.path, shard.subset, split=_plain_split(shard.split), revision=shard.revision)


def _batches(dataset: Any, shard: Shard) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a shard with its columns, in batches of bounded size, each with the number of its first row."""
    stop = dataset.num_rows if shard.stop is None else min(shard.stop, dataset.num_rows)
    columns = dataset.select_columns(
        top_columns(dataset.features.arrow_schema, base.wanted_columns(shard))
    ).with_format("arrow")
    row = shard.start
    for first in range(shard.start, stop, _ROWS):
        for batch in columns[first : min(first + _ROWS, stop)].to_batches():
            yield from ((row + offset, part) for offset, part in bounded_parts(batch))
            row += len(batch)


def _names(source: base.ExportSource) -> list[str]:
    if _is_expression(source.first):
        return [f"{source.name}/{file}" for file in (_ONE_FILE, _STATE, _INFO)]
    inner, split = _shard_split(source.first)
    folder = f"{source.name}/{inner}".rstrip("/")
    state = _json(f"{source.first.path}/{inner}".rstrip("/") + f"/{_STATE}")
    names = [f"{folder}/{file}" for file in (*(entry["filename"] for entry in state["_data_files"]), _STATE, _INFO)]
    return names if split is None else [*names, f"{source.name}/{_SPLITS}"]


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Write the kept rows of a saved dataset, or of one split of a dictionary, with the same number of files.

    Rows of several splits, or of a part of one, become one file.
    """
    shard, name = source.first, source.name
    if _is_expression(shard):
        _copy_parts(source, marks, open_file)
        return
    inner, split = _shard_split(shard)
    place = f"{shard.path}/{inner}".rstrip("/")
    folder = f"{name}/{inner}".rstrip("/")
    state, info = _json(f"{place}/{_STATE}"), _json(f"{place}/{_INFO}")
    rows = 0
    for entry in state["_data_files"]:
        with open_file(f"{folder}/{entry['filename']}") as sink:
            rows += _copy_arrow(f"{place}/{entry['filename']}", marks, sink)
    digest = hashlib.sha256(f"{state['_fingerprint']} {rows}".encode()).hexdigest()[:16]
    _write_json(open_file, f"{folder}/{_STATE}", {**state, "_fingerprint": digest})
    _write_json(open_file, f"{folder}/{_INFO}", _renewed(info))
    if split is not None:
        _write_json(open_file, f"{name}/{_SPLITS}", {"splits": [split]})


def _is_expression(shard: Shard) -> bool:
    """Whether a shard reads parts of splits, or several splits."""
    return any(mark in (shard.split or "") for mark in "[+")


def _copy_parts(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Write the kept rows of a split expression as a saved dataset of one file."""
    shard, name = source.first, source.name
    dataset = _open(shard)
    schema = dataset.features.arrow_schema
    with open_file(f"{name}/{_ONE_FILE}") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in gathered(base.kept_rows(_tables(dataset), marks), _ROWS):
            writer.write_table(table.combine_chunks().cast(schema))
    state = {"_data_files": [{"filename": _ONE_FILE}], "_fingerprint": line_digest(shard.content, "copy")}
    _write_json(open_file, f"{name}/{_STATE}", {**_PLAIN_STATE, **state})
    first = _names_in(str(shard.split))[0] if _has_splits(shard) else ""
    _write_json(open_file, f"{name}/{_INFO}", _renewed(_json(f"{shard.path}/{first}".rstrip("/") + f"/{_INFO}")))


def _shard_split(shard: Shard) -> tuple[str, str | None]:
    """The folder of a saved dataset that is read, and its split; None if the dataset is not a dictionary."""
    if not _has_splits(shard):
        return "", None
    split = shard.split or _json(f"{shard.path}/{_SPLITS}")["splits"][0]
    return split, split


def _has_splits(shard: Shard) -> bool:
    """Whether a saved dataset is a dictionary of splits."""
    fs, path = fsspec.core.url_to_fs(shard.path)
    return bool(fs.exists(f"{path}/{_SPLITS}"))


def _renewed(info: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a dataset for its copy, without the sizes of the dataset that it was made from."""
    old = ("splits", "dataset_size", "size_in_bytes", "download_size", "download_checksums")
    return {key: None if key in old else value for key, value in info.items()}


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


def export_split(shard: Shard) -> str:
    """The split that an input is exported as."""
    names = {*_names_in(shard.split or HUB_SPLIT)}
    split = names.pop() if len(names) == 1 else HUB_SPLIT
    return split if _SPLIT_NAME.fullmatch(split) else HUB_SPLIT


def _hub_names(source: base.ExportSource) -> list[str]:
    return [f"{source.name}-{export_split(source.first)}.parquet"]


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
    has_splits=True,
    lists=True,
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
    has_splits=True,
    lists=True,
    place=8,
)
