"""Open each format of input in one way, and read what planning needs: columns and sizes."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

import fsspec
import pyarrow as pa

from pipeline.errors import UserError, nearest

Format = Literal["parquet", "jsonl", "csv", "txt", "dataset", "hub"]
SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".txt": "txt",
}

HUB_SPLIT = "train"
"""The split of a dataset on the hub whose configuration names none."""

BLOCK_BYTES = 1 << 22
"""Asked for at a time where a file lies in an object store."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def compression_of(path: str) -> str | None:
    """The compression that a file name's suffix stands for, or None."""
    return COMPRESSIONS.get(os.path.splitext(path)[1])


def format_of(path: str) -> Format | None:
    """The format that a file name's suffix stands for, or None."""
    stem, suffix = os.path.splitext(path)
    if suffix in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
        return SUFFIXES.get(suffix) if SUFFIXES.get(suffix) in ("jsonl", "csv") else None
    return SUFFIXES.get(suffix.lower())


class _Decompressed(io.RawIOBase):
    """The decompressed content of a file as a stream; a file that ends too early raises OSError."""

    def __init__(self, path: str, compression: str) -> None:
        self._file = _open(path)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @property
    def compressed(self) -> int:
        """Bytes of the file that were read so far, in its blocks."""
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _open(path: str) -> IO[bytes]:
    """Open a file as it is. An object store is asked for some MiB at a time: by default s3fs reads 50 MiB ahead."""
    fs, name = fsspec.core.url_to_fs(path)
    local = isinstance(fs, fsspec.implementations.local.LocalFileSystem)
    return cast(IO[bytes], fs.open(name, "rb") if local else fs.open(name, "rb", block_size=BLOCK_BYTES))


def open_plain(path: str) -> IO[bytes]:
    """Open a file for reading, decompressed if its name says that it is compressed."""
    compression = compression_of(path)
    if compression is None:
        return _open(path)
    return io.BufferedReader(_Decompressed(path, compression), 1 << 16)


def read_beginning(path: str, count: int) -> tuple[bytes, bool, float]:
    """At most `count` bytes from the beginning, decompressed; whether that is all; and its size to that in the file.

    Raises:
        OSError: the file is damaged.
    """
    with open_plain(path) as file:
        data = file.read(count)
        whole = len(data) < count or not file.read(1)
        raw = getattr(file, "raw", None)
        packed = raw.compressed if isinstance(raw, _Decompressed) else len(data)
        return data, whole, len(data) / max(1, packed)


def first_columns(form: str, path: str, name: str) -> list[str]:
    """The column names of a JSONL or CSV file, from its first row.

    Raises:
        UserError: the first row is not of the format.
    """
    try:
        with open_plain(path) as file:
            if form == "csv":
                text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
                return list(csv.DictReader(text).fieldnames or [])
            for line in file:
                if line.strip():
                    value = json.loads(line.decode("utf-8-sig", "surrogateescape"))
                    if isinstance(value, dict):
                        return list(value)
                    break
    except (
        ValueError,
        OSError,
        EOFError,
        csv.Error,
        RecursionError,
    ) as error:
        raise UserError(f"{name} is not a readable {form.upper()} file: {' '.join(str(error).split())}") from None
    raise UserError(f"{name} is not JSONL: its first line is no object with named fields")


def open_saved_dataset(path: str, split: str | None, name: str) -> Any:
    """Open a dataset that `save_to_disk` wrote; of a dictionary of splits, the split named `split`, or its only one.

    Raises:
        UserError: not such a folder, no such split, or several and none is named.
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


@dataclass(frozen=True, slots=True)
class HubDataset:
    """The metadata of one split of a dataset on the hub."""

    columns: list[str]
    rows: int
    size: int


def hub_dataset_info(name: str, subset: str | None, split: str) -> HubDataset:
    """Ask the hub (or its local cache) for one split's columns and size.

    Raises:
        UserError: no such dataset or split, or the hub cannot be reached.
    """
    import datasets

    try:
        info = datasets.load_dataset_builder(name, subset).info
        if not info.splits or not info.features:
            dataset = datasets.load_dataset(name, subset, split=split)
            return HubDataset(list(dataset.column_names), dataset.num_rows, int(dataset.dataset_size or 0))
    except Exception as error:  # the library raises a dozen kinds, all about a name or a connection
        raise UserError(f"cannot open dataset {name}: {' '.join(str(error).split())[:300]}") from None
    if split not in info.splits:
        raise UserError(f"no split {split!r} in dataset {name}; {nearest(split, info.splits, 'splits')}")
    split_info = info.splits[split]
    return HubDataset(list(info.features), int(split_info.num_examples), int(split_info.num_bytes or 0))
