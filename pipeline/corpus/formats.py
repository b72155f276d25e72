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
import pyarrow.parquet as pq
from fsspec.spec import AbstractBufferedFile

from pipeline.config.corpus import LIMITS, LimitsConfig
from pipeline.config.dialect import PLAIN, Dialect
from pipeline.corpus.lines import Overlong, bounded_lines, csv_columns
from pipeline.corpus.parquet import chunks_of
from pipeline.corpus.picture_files import PICTURE_SUFFIXES, is_picture
from pipeline.errors import UserError, nearest

Format = Literal["parquet", "jsonl", "csv", "txt", "dataset", "hub", "picture", "tar"]
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

_HEAD = 1 << 30  # bytes in which a first row must stand
_ROWS, _ROWS_BYTES = 1024, 1 << 26  # of a Parquet file that are decoded together
_PACKING = 12  # times that texts are packed at most

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def compression_of(path: str) -> str | None:
    """The compression that a file name's suffix stands for, or None."""
    return COMPRESSIONS.get(os.path.splitext(path)[1])


def format_of(path: str, pictures: bool = False) -> Format | None:
    """The format that a file name's suffix stands for, or None.

    Args:
        path: of the file.
        pictures: whether the documents are pictures, which may be files themselves, or in .tar files.
    """
    stem, suffix = os.path.splitext(path)
    if pictures and (is_picture(path) or suffix == ".tar"):
        return "tar" if suffix == ".tar" else "picture"
    if suffix in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
        return SUFFIXES.get(suffix) if SUFFIXES.get(suffix) in ("jsonl", "csv") else None
    return SUFFIXES.get(suffix.lower())


def suffixes_of(pictures: bool) -> str:
    """The endings of files that hold documents, for messages.

    Args:
        pictures: whether the documents are pictures.
    """
    return ", ".join([*SUFFIXES, *((*PICTURE_SUFFIXES, ".tar") if pictures else ())])


class _Decompressed(io.RawIOBase):
    """The decompressed content of a file as a stream; a file that ends too early raises OSError.

    One that unpacks to more than `most` bytes raises UserError.
    """

    def __init__(self, path: str, compression: str, most: int) -> None:
        self._path, self._most, self._size = path, most, 0
        self._file = _open(path)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > self._most:
            raise UserError(f"{self._path} unpacks to more than limits.unpacked_bytes, which is {self._most:,}")
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
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        return open(name, "rb", buffering=1 << 16)  # a long line is read in blocks of this size
    return cast(IO[bytes], fs.open(name, "rb", block_size=BLOCK_BYTES))


def open_plain(path: str, most: int = LIMITS.unpacked_bytes) -> IO[bytes]:
    """Open a file for reading, decompressed if its name says that it is compressed.

    Args:
        path: of the file.
        most: bytes that a compressed file may unpack to; reading beyond them raises UserError.
    """
    compression = compression_of(path)
    if compression is not None:
        return io.BufferedReader(_Decompressed(path, compression, most), 1 << 16)
    file = _open(path)
    if isinstance(file, AbstractBufferedFile):  # its `readline` takes no bound
        return io.BufferedReader(file, 1 << 16)
    return file


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


ENCODED: tuple[Format, ...] = ("csv", "jsonl", "txt")
"""Formats to which the setting `encoding` applies; `delimiter` applies to CSV."""


def dialect_of(form: Format, dialect: Dialect) -> Dialect:
    """The part of a dialect that applies to files of a format."""
    encoding = dialect.encoding if form in ENCODED else PLAIN.encoding
    return Dialect(encoding, dialect.delimiter if form == "csv" else PLAIN.delimiter)


def first_columns(
    form: str, path: str, name: str, limits: LimitsConfig = LIMITS, dialect: Dialect = PLAIN
) -> list[str]:
    """The column names of a JSONL or CSV file, from its first row; lines that are too long are passed over.

    Raises:
        UserError: the first row is not of the format, or all of the first GiB is too long.
    """
    most = limits.document_bytes
    overlong = False
    try:
        with open_plain(path, limits.unpacked_bytes) as file:
            if form == "csv":
                return csv_columns(file, most, dialect)
            for line in bounded_lines(file, most, _HEAD, _HEAD):
                if isinstance(line, Overlong):
                    overlong = True
                elif line.strip():
                    value = json.loads(line.decode(dialect.codec, dialect.errors), object_pairs_hook=tuple)
                    if isinstance(value, tuple):  # the pairs of an object, among which a name may stand twice
                        return [name for name, _ in value]
                    break
    except (
        ValueError,
        OSError,
        EOFError,
        csv.Error,
        RecursionError,
    ) as error:
        raise UserError(f"{name} is not a readable {form.upper()} file: {' '.join(str(error).split())}") from None
    if overlong:
        raise UserError(f"{name}: its first line has more bytes than limits.document_bytes, which is {most:,}")
    raise UserError(f"{name} is not JSONL: its first line is no object with named fields")


def rows_at_once(metadata: pq.FileMetaData, group: int, column: str) -> int:
    """How many rows of a row group of a Parquet file to decode together: few where the texts of a column are long.

    A dictionary may stand for much more text than its own: where a column packs better than texts do, every row may be
    as long as the whole column is.
    """
    for index in chunks_of(metadata, column)[:1]:
        chunk = metadata.row_group(group).column(index)
        size, packed = chunk.total_uncompressed_size, max(1, chunk.total_compressed_size)
        longest = size if chunk.has_dictionary_page and size > _PACKING * packed else size // max(1, chunk.num_values)
        return max(1, min(_ROWS, _ROWS_BYTES // max(1, longest)))
    return _ROWS


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
