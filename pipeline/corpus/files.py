"""Files of input: plain or compressed, read within limits, from their beginning or in several places."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

import fsspec
import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from pipeline.config.corpus import LIMITS
from pipeline.corpus.shard import InputFile
from pipeline.errors import UserError

BLOCK_BYTES = 1 << 22
"""Asked for at a time where a file lies in an object store."""

_EDGE = 1 << 16
_PLACES = 16
_COMPRESSED_HEAD = 1 << 23

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def compression_of(path: str) -> str | None:
    """The compression that a file name's suffix stands for, or None."""
    return COMPRESSIONS.get(os.path.splitext(path)[1])


def is_local(fs: Any) -> bool:
    """Whether a file system is that of this machine."""
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def digest_of(*parts: str) -> str:
    """16 hexadecimal digits of the SHA-256 of some lines."""
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


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
    if is_local(fs):
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


@dataclass(frozen=True, slots=True)
class Extent:
    """How much an input holds, without reading it whole."""

    rows: int
    exact: bool  # whether the rows were counted
    text_bytes: int  # decompressed, with what stands around the texts; about


def estimated_extent(
    entry: InputFile, count: Callable[[bytes], int | None], ends: Callable[[bytes, bytes], int]
) -> Extent:
    """How much a text file holds: counted, if it is small, else estimated.

    A file that can be sought in is read in several places, so that rows may be longer in one part than in another; of
    a compressed file only the beginning is read, which says how well it packs too.

    Args:
        entry: the file.
        count: how many rows a whole file has; None where they cannot be told apart.
        ends: how many rows end in a part of the file, given its beginning too.

    Raises:
        OSError: the file is damaged.
    """
    compressed = compression_of(entry.path) is not None
    most = _COMPRESSED_HEAD if compressed else _PLACES * _EDGE
    with open_plain(entry.path) as file:
        data = file.read(most)
        whole = len(data) < most or not file.read(1)
        raw = getattr(file, "raw", None)
        packed = raw.compressed if isinstance(raw, _Decompressed) else len(data)
    if whole and (counted := count(data)) is not None:
        return Extent(counted, True, len(data))
    parts = [data] if whole or compressed or entry.dialect.is_wide else list(_places(entry))
    size = len(data) if whole else round(entry.size * (len(data) / max(1, packed)))
    rows = size * sum(ends(part, data) for part in parts) / sum(map(len, parts))
    return Extent(max(1, round(rows)), False, size)


def _places(entry: InputFile) -> Iterator[bytes]:
    """Parts of a file, evenly spread over it, its beginning and its end among them."""
    with fsspec.open(entry.path, "rb") as file:
        for place in range(_PLACES):
            file.seek(place * (entry.size - _EDGE) // (_PLACES - 1))
            yield file.read(_EDGE)


class _Unclosed(io.RawIOBase):
    """A file that stays open when what packs into it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._file.write(cast(bytes, data))


@contextmanager
def packed_file(sink: BinaryIO, compression: str | None) -> Iterator[BinaryIO]:
    """The file through which a compressed one is written; the same content gives the same bytes."""
    if compression is None:
        yield sink
        return
    with pa.CompressedOutputStream(pa.PythonFile(_Unclosed(sink), "w"), compression) as stream:
        yield cast(BinaryIO, stream)
