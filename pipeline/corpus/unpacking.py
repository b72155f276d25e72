"""Decompression of .gz and .zst files as streams, with a bound on memory and one line for what is wrong with a file.

A file is a sequence of members (gzip) or frames (zstd), which may be padded with zeros. Where something else follows
the last one, or a member is not whole, the message states the byte.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import zstandard

from pipeline.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> compression of files that are read."""

UNPACK = {
    ".bz2": "bunzip2 -k {}",
    ".xz": "xz -dk {}",
    ".lz4": "lz4 -d {}",
    ".br": "brotli -d {}",
    ".zip": "unzip {}",
    ".7z": "7z x {}",
    ".rar": "unrar x {}",
    ".tgz": "tar -xzf {}",
    ".tbz": "tar -xjf {}",
    ".tbz2": "tar -xjf {}",
    ".txz": "tar -xJf {}",
    ".tzst": "tar --zstd -xf {}",
    ".lzma": "xz -dk {}",
    ".z": "gunzip -k {}",
    ".tar.gz": "gunzip -k {}",
    ".tar.zst": "zstd -d {}",
    ".gz": "gunzip -k {}",
    ".zst": "zstd -d {}",
}
"""Suffix -> command that unpacks such a file; those of .gz and .zst are for files whose content is not read in them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files that is recognised by its first bytes."""

    magic: bytes
    words: str
    suffix: str  # of the names of such files
    place: int = 0  # of the magic bytes
    packs: bool = False  # whether it is one compressed file, whose name goes before the suffix


_KINDS = (
    Kind(b"ustar", "a .tar archive", ".tar", 257),
    Kind(b"\x1f\x8b\x08", "a gzip file", ".gz", packs=True),
    Kind(b"\x28\xb5\x2f\xfd", "a zstd file", ".zst", packs=True),
    Kind(b"PK\x03\x04", "a zip archive (as documents of office programs are)", ".zip"),
    Kind(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program", ".doc"),
    Kind(b"1AY&SY", "a bzip2 file", ".bz2", 4, packs=True),
    Kind(b"\xfd7zXZ\0", "an xz file", ".xz", packs=True),
    Kind(b"7z\xbc\xaf\x27\x1c", "a 7z archive", ".7z"),
    Kind(b"Rar!\x1a\x07", "a rar archive", ".rar"),
    Kind(b"\x04\x22\x4d\x18", "an lz4 file", ".lz4", packs=True),
    Kind(b"PAR1\x15", "a Parquet file", ".parquet"),
    Kind(b"ARROW1\0\0", "an Arrow file", ".arrow"),
    Kind(b"%PDF-", "a PDF", ".pdf"),
    Kind(b"SQLite format 3\0", "an SQLite database", ".sqlite"),
    Kind(b"\x89HDF\r\n\x1a\n", "an HDF5 file", ".h5"),
    Kind(b"\x80\x04\x95", "a pickle", ".pickle"),
)


LFS_POINTER = b"version https://git-lfs"
LFS_REMEDY = "it is a pointer of Git LFS and not the file itself: run git lfs pull where it was cloned"


def stand_in(head: bytes) -> str | None:
    """What stands in the place of documents, by its first bytes, and what to do; None for other files."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:200].lower()
    if start.startswith(LFS_POINTER):
        return LFS_REMEDY
    if start.startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, as servers send in place of a file: download the file itself"
    if head[:200] and not head.strip(b"\0"):
        return "it holds null bytes alone, as an interrupted copy does: copy it again"
    return None


def binary_kind(head: bytes) -> Kind | None:
    """The kind of a file that is no text, by its first bytes; None if they are of no known kind."""
    return next((kind for kind in _KINDS if head.startswith(kind.magic, kind.place)), None)


MOST_POWER = 31
"""The largest value of `zstd --long`."""

MOST_WINDOW = 1 << MOST_POWER
"""Maximum window of a zstd frame, in bytes."""

USUAL_WINDOW = 1 << 27
"""Window up to which the free memory is not checked."""

_BLOCK = 1 << 16
_STEP = {"gzip": 1 << 14, "zstd": 1 << 9}
"""Compressed bytes that are unpacked together: of zstd they may become 128 KiB for 4 bytes each."""
_SKIPPED = tuple(bytes([0x50 + number]) + b"\x2a\x4d\x18" for number in range(16))  # frames without content
_MAGIC = {"gzip": (b"\x1f\x8b",), "zstd": (b"\x28\xb5\x2f\xfd", *_SKIPPED)}
_HEADER = 18  # maximum bytes of the header of a zstd frame
_GROUP = Path("/sys/fs/cgroup")


def suffix_compression(path: str) -> str | None:
    """The compression indicated by a file name's suffix, or None."""
    return COMPRESSIONS.get(os.path.splitext(path)[1].lower())


class Unpacked(io.RawIOBase):
    """The decompressed content of a file as a stream.

    Raises:
        OSError: the file is damaged, or something else follows its data.
        EOFError: the file is truncated.
        UserError: it unpacks to too many bytes, or takes too much memory.
    """

    def __init__(self, path: str, file: IO[bytes], most: int) -> None:
        """Read a file whose suffix indicates its compression.

        Args:
            path: path of the file, for messages.
            file: the file, open at its start; it is closed with the stream.
            most: maximum decompressed bytes.
        """
        self._path, self._file, self._most = path, file, most
        self._compression = suffix_compression(path) or ""
        self._member: Any = None  # the decompressor of the current member
        self._data, self._place = b"", 0  # compressed bytes, and the first that is not unpacked
        self._ready, self._given = b"", 0  # decompressed bytes, and the first that was not returned
        self._read = self._size = 0  # compressed and decompressed bytes

    @property
    def compressed(self) -> int:
        """Number of compressed bytes read so far, in whole blocks."""
        return self._read

    def readable(self) -> bool:
        """Whether the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as the buffer holds."""
        if self._given == len(self._ready):
            self._ready, self._given = self._unpacked(len(buffer)), 0
            self._size += len(self._ready)
            if self._size > self._most:
                raise UserError(f"{self._path} unpacks to more than limits.unpacked_bytes, which is {self._most:,}")
        data = self._ready[self._given : self._given + len(buffer)]
        buffer[: len(data)] = data
        self._given += len(data)
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()

    def _unpacked(self, most: int) -> bytes:
        """The next decompressed bytes, about `most` or as many as a step gives; empty at the end."""
        while True:
            if self._member is None and not self._begin():
                return b""
            whole = self._place < len(self._data) or self._refill()
            step = self._data[self._place : self._place + _STEP[self._compression]]
            try:
                piece: bytes = self._member.decompress(step, *([most] if self._compression == "gzip" else []))
            except (zlib.error, zstandard.ZstdError) as error:
                self._refuse_memory(error)
                raise OSError(f"its data are damaged at about byte {self._position():,}: {error}") from None
            except MemoryError as error:
                self._refuse_memory(error)
                raise
            ended = self._member.eof
            left = self._member.unused_data if ended else getattr(self._member, "unconsumed_tail", b"")
            self._place += len(step) - len(left)
            if ended:
                self._member = None
            if piece:
                return piece
            if not whole and not ended:
                raise EOFError(f"it is truncated: its data do not end where the file does, at byte {self._read:,}")

    def _begin(self) -> bool:
        """Start the next member; False at the end of the file. Zeros between and behind members are skipped."""
        started = self._position() > 0
        while self._place == len(self._data) or (started and self._data[self._place] == 0):
            rest = self._data[self._place :].lstrip(b"\0") if started else b""
            self._place = len(self._data) - len(rest)
            if not rest and not self._refill():
                return False
        while len(self._data) - self._place < _HEADER and self._refill():
            pass
        if not self._data.startswith(_MAGIC[self._compression], self._place):
            end = self._position()
            raise OSError(
                f"its data end at byte {end:,}, and something else follows: cut it there (head -c {end} {self._name})"
                if started
                else f"it does not start as a {self._compression} file does; if it is not compressed, take the suffix "
                f"{os.path.splitext(self._path)[1]} off its name"
            )
        if self._compression == "gzip":
            self._member = zlib.decompressobj(31)
        else:
            if not self._data.startswith(_SKIPPED, self._place):
                self._check_frame(self._data[self._place : self._place + _HEADER])
            self._member = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).decompressobj()
        return True

    def _check_frame(self, header: bytes) -> None:
        """Check that a zstd frame can be unpacked here. Raises UserError."""
        try:
            frame = zstandard.get_frame_parameters(header)
        except zstandard.ZstdError:  # of a frame that is too short; its decompression states what is wrong
            return
        window = min(frame.window_size, frame.content_size)  # an unknown size of the content is the largest number
        if frame.dict_id:
            raise UserError(
                f"{self._path} was compressed with dictionary {frame.dict_id}: unpack it with zstd -d -D DICTIONARY "
                f"{self._name}"
            )
        if window > MOST_WINDOW or (window > USUAL_WINDOW and window > _free_memory() / 2):
            self._refuse_window(frame.window_size)

    def _refuse_window(self, window: int) -> None:
        power = max(window - 1, 1).bit_length()
        if power > MOST_POWER:
            raise OSError(
                f"its header states a window of {window >> 20:,} MiB, which no program unpacks: it is damaged"
            )
        raise UserError(
            f"{self._path} takes a window of {window >> 20:,} MiB to unpack, too much for the memory that is free: "
            f"unpack it with zstd -d --long={power} {self._name}"
        )

    def _refuse_memory(self, error: Exception) -> None:
        """Raise UserError for an error that states that memory is short."""
        if isinstance(error, MemoryError) or "not enough memory" in str(error) or "too much memory" in str(error):
            self._refuse_window(MOST_WINDOW)

    @property
    def _name(self) -> str:
        return os.path.basename(self._path)

    def _position(self) -> int:
        """Number of compressed bytes that are unpacked."""
        return self._read - (len(self._data) - self._place)

    def _refill(self) -> bool:
        """Read the next block; False at the end of the file."""
        block = self._file.read(_BLOCK)
        self._data, self._place = self._data[self._place :] + block, 0
        self._read += len(block)
        return bool(block)


def _free_memory() -> int:
    """Bytes of memory that this process may still take, within its control group."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(counts.get("inactive_file", 0)))  # the cache of files can be freed
    return free
