"""The run directory on any fsspec file system: its address, atomic writes, and exclusive creation of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.misplaced import instead_of_run
from pipeline.errors import DamagedError, FullError, UserError, error_line, is_full, not_opened, write_error

SIDE_BY_SIDE = 16
"""Concurrent requests to an object store."""

KEPT_BYTES = 1 << 28
"""Maximum bytes of files that a process keeps in memory."""

LONGEST_NAME = 255
LONGEST_PATH = 4095
ROOM = 200
"""Bytes of a path that are reserved for names of files in the directory."""

_NO_SPACE_BYTES = 64 << 10
"""Free space below which a device counts as full: some libraries do not report why a write failed."""

_OPTIONS = {protocol: {"max_concurrency": 1} for protocol in ("s3", "s3a")}
"""By default s3fs requests the size of a file before reading it, to read a large one in parts."""


class _Kept(dict[tuple[str, str], bytes]):
    """Cache of immutable files, by address and name, up to `KEPT_BYTES`."""

    size = 0

    def add(self, key: tuple[str, str], data: bytes) -> None:
        if self.size + len(data) <= KEPT_BYTES:
            self[key] = data
            self.size += len(data)


_kept = _Kept()

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")
"""Name of a temporary file."""


class HashedFile(io.BufferedWriter):
    """A new file that is written sequentially, and the digest of its content."""

    def __init__(self, path: str) -> None:
        """Create or truncate the file."""
        super().__init__(io.FileIO(path, "w"))
        self._sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        """Append bytes."""
        self._sha256.update(data)
        return super().write(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far, hexadecimal."""
        return self._sha256.hexdigest()


class Store:
    """One run directory. It is cheap to construct, so every process constructs its own from the URL."""

    def __init__(self, url: str, noun: str = "run directory") -> None:
        """Open the directory at a local path or fsspec URL; it need not exist yet.

        Args:
            url: the path or URL.
            noun: what the directory is, for messages.

        Raises:
            UserError: the file system of the URL is unknown or its package is not installed, or a path leads to a file.
        """
        self.noun = noun
        _check_address(url, noun)
        try:
            protocol = url.split("://")[0] if "://" in url else ""
            self.fs, root = fsspec.core.url_to_fs(
                url if protocol else os.path.expanduser(url), **_OPTIONS.get(protocol, {})
            )
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"cannot open {noun} {url}: {not_opened(error)}") from None
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, fsspec.implementations.local.LocalFileSystem)
        if self.local:
            _check_local_folder(self.root, noun)
            self.root = real_address(self.root)
        self.url = self.root if self.local else self.fs.unstrip_protocol(self.root)
        self.check: Callable[[], None] = lambda: None
        """Function called before each change."""
        self._keeps = False
        self._marks: list[str] = []

    def with_check(self, check: Callable[[], None]) -> Store:
        """The same directory with a `check` that is called before each change and prevents the change if it raises."""
        return self._copy(check=check)

    def keeping(self, *marks: str) -> Store:
        """The same directory, where a file that is written with the bytes it has is left untouched.

        Args:
            marks: names of files that are removed before the first change, such as the mark of a finished answer.
        """
        return self._copy(_keeps=True, _marks=[*self._marks, *marks] if marks else self._marks)

    def _copy(self, **changes: Any) -> Store:
        copy = Store.__new__(Store)
        copy.__dict__.update(vars(self), **changes)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.url, self.noun, self._keeps, self._marks)

    def _begin_change(self) -> None:
        """Call `check` and remove the marks, which copies in this process share; each change starts with it."""
        self.check()
        marks = self._marks.copy()
        self._marks.clear()
        for name in marks:
            self.remove(name)

    def path(self, name: str) -> str:
        """The full path of a name in the directory."""
        return f"{self.root}/{name}"

    def exists(self, name: str) -> bool:
        """Whether the file or folder exists."""
        return bool(self.fs.exists(self.path(name)))

    def names(self, folder: str, suffix: str = "") -> list[str]:
        """File names (without the folder) in a folder, sorted; empty if the folder does not exist."""
        names: Iterable[str]
        if self.local and not os.path.isfile(self.path(folder)):
            try:
                names = os.listdir(self.path(folder))  # fsspec takes a kilobyte of memory for each
            except FileNotFoundError:
                return []
        else:
            names = map(_base, self._entries(folder))
        return sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))

    def listing(self, folder: str) -> dict[str, list[str]]:
        """The entries of a folder: name -> mark. Equal marks mean that a file was not changed.

        The mark of a subfolder is constant; empty if the folder does not exist.
        """
        marks = {_base(entry["name"]): _mark(entry) for entry in self._entries(folder, detail=True)}
        return {name: marks[name] for name in sorted(marks) if not name.startswith(".")}

    def _entries(self, folder: str, detail: bool = False) -> list[Any]:
        """The entries of a folder as listed by fsspec: paths, or their details."""
        self.fs.invalidate_cache()
        try:
            return list(self.fs.ls(self.path(folder).rstrip("/"), detail=detail))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises FileNotFoundError."""
        if self.local:  # fsspec takes three times as long, which matters for many receipts
            with open(self.path(name), "rb") as file:
                return file.read()
        return bytes(self.fs.cat_file(self.path(name)))

    def find(self, name: str) -> bytes | None:
        """The bytes of a file; None if it does not exist.

        Raises:
            UserError: it cannot be read.
        """
        try:
            return self.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self.local:
                raise
            raise UserError(f"cannot read {self.url}/{name}: {error.strerror}") from None

    def digest(self, name: str) -> str | None:
        """The hexadecimal SHA-256 of a file, read in blocks; None if it does not exist.

        Raises:
            UserError: it cannot be read.
        """
        try:
            if not self.local and not name.endswith(".parquet"):
                return hashlib.sha256(self.read(name)).hexdigest()  # one request
            with self.fs.open(self.path(name), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if not self.local:
                raise
            raise UserError(f"cannot read {self.url}/{name}: {error.strerror}") from None

    def read_many(self, names: Sequence[str], keep: bool = False) -> list[bytes | None]:
        """The bytes of files, in order; None for a missing one. Remote files are read concurrently.

        Args:
            names: names of the files.
            keep: whether the files are immutable; this process then keeps them in memory, up to `KEPT_BYTES`.
        """

        def read(name: str) -> bytes | None:
            try:
                return self.read_fixed(name) if keep else self.read(name)
            except FileNotFoundError:
                return None

        if self.local or len(names) < 2:
            return [read(name) for name in names]
        with ThreadPoolExecutor(min(SIDE_BY_SIDE, len(names))) as pool:
            return list(pool.map(read, names))

    def read_fixed(self, name: str) -> bytes:
        """The bytes of an immutable file, kept in memory up to `KEPT_BYTES`. Raises FileNotFoundError."""
        if self.local:
            return self.read(name)
        data = _kept.get((self.url, name))
        if data is None:
            data = self.read(name)
            _kept.add((self.url, name), data)
        return data

    def fetch(self, sizes: Mapping[str, int]) -> None:
        """Prefetch immutable files concurrently, if all of them fit into `KEPT_BYTES`.

        Args:
            sizes: name -> bytes.
        """
        if not self.local and sum(sizes.values()) <= KEPT_BYTES:
            self.read_many(list(sizes), keep=True)

    def begin(self) -> None:
        """Discard the files that an earlier command of this process kept in memory."""
        _kept.clear()
        _kept.size = 0

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file atomically."""
        if self.local:
            with self.replaced(name) as file:
                file.write(data)
        elif not self._keeps or self.digest(name) != hashlib.sha256(data).hexdigest():
            self._begin_change()
            self.fs.pipe_file(self.path(name), data)

    @contextlib.contextmanager
    def replaced(self, name: str) -> Iterator[HashedFile]:
        """A file to write in pieces; it replaces the file of that name when the block ends without an error.

        Raises:
            UserError: the run directory, or the folder for temporary files, cannot be written to.
        """
        self.check()
        with self._temporary(name) as file:
            yield file
            if self._keeps and self.digest(name) == file.sha256:
                return
            self._finish(file)
            self._begin_change()
            if self.local:
                os.replace(file.name, self.path(name))
            else:
                self.fs.put_file(file.name, self.path(name))

    def create(self, name: str, data: bytes, last_may_win: bool = True) -> bool:
        """Write a file only if it is absent; False if it exists.

        Args:
            name: name of the file.
            data: content of the file.
            last_may_win: whether the last of concurrent writers may win, on a store without conditional writes.

        Raises:
            UserError: the store has no conditional writes and `last_may_win` is False, or the folder is not writable.
        """
        self._begin_change()
        if not self.local:
            return self._create_remote(name, data, last_may_win)
        with self._temporary(name) as file:
            file.write(data)
            self._finish(file)
            try:
                os.link(file.name, self.path(name))
            except FileExistsError:
                return False
        if not last_may_win:  # the file must survive a power failure after True was returned
            _sync_folder(os.path.dirname(self.path(name)))
        return True

    def append(self, name: str, data: bytes) -> None:
        """Append to a file. A store without appending gets a separate part; `read_grown` reads all parts."""
        self._begin_change()
        if not self.local:
            stem, suffix = os.path.splitext(self.path(name))
            self.fs.pipe_file(f"{stem}.{time.time_ns()}-{uuid.uuid4().hex[:8]}{suffix}", data)
            return
        path = self.path(name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
                except OSError:
                    file.truncate(size)
                    if size == 0:
                        os.unlink(path)
                    raise
        except OSError as error:
            raise write_error(error, f"{self.noun} {self.url}") from None

    def read_grown(self, name: str) -> bytes:
        """All data appended under a name, in order; empty if there are none."""
        return b"".join(self.read(part) for part in self._grown(name))

    def remove_grown(self, name: str) -> None:
        """Remove the data appended under a name."""
        for part in self._grown(name):
            self.remove(part)

    def _grown(self, name: str) -> list[str]:
        folder, base = os.path.split(name)
        stem, suffix = os.path.splitext(base)
        return [f"{folder}/{part}" for part in self.names(folder, suffix) if part.split(".")[0] == stem]

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        if self._marks and not self.exists(name):
            return
        self._begin_change()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its content if it exists."""
        if self._marks and not self.exists(name):
            return
        self._begin_change()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)

    def remove_temporaries(self) -> None:
        """Remove temporary files that killed writers left on a local disk; nothing may be written at the same time.

        The lock, whose heartbeat goes on, keeps its files.
        """
        self.check()
        if not self.local:
            return
        for folder, folders, names in os.walk(self.root):
            if folder == self.root and "lock" in folders:
                folders.remove("lock")
            for name in filter(_TEMPORARY.fullmatch, names):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))

    def read_json(self, name: str) -> Any:
        """The value of a JSON file; None if it does not exist.

        Raises:
            DamagedError: the file is not JSON.
            UserError: it cannot be read.
        """
        data = self.find(name)
        try:
            return None if data is None else json.loads(data)
        except (ValueError, RecursionError):
            raise DamagedError(f"{self.url}/{name}", "is damaged: not JSON") from None

    def write_json(self, name: str, value: Any) -> str:
        """Write a value atomically as readable JSON and return the hexadecimal SHA-256 of the file."""
        data = to_json(value)
        self.write(name, data)
        return hashlib.sha256(data).hexdigest()

    def read_table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a Parquet file.

        Raises:
            UserError: it is missing or damaged.
        """
        try:
            wanted = list(columns) if columns is not None else None
            return pq.read_table(io.BytesIO(self.read(name)), columns=wanted, page_checksum_verification=True)
        except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
            raise UserError(f"cannot read {self.url}/{name}: {error_line(error)}") from None

    def write_table(self, name: str, table: pa.Table) -> str:
        """Write a Parquet file with a checksum of every page, atomically; the same table gives the same bytes.

        Returns:
            The SHA-256 of the file, hexadecimal.
        """
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        self.write(name, buffer.getvalue())
        return hashlib.sha256(buffer.getbuffer()).hexdigest()

    @contextlib.contextmanager
    def _temporary(self, name: str) -> Iterator[HashedFile]:
        """A new local temporary file, in the folder of `name` if that is local; removed at the end of the block.

        Raises:
            UserError: the directory cannot be written to: it is a file, its device is full, or it is read-only.
        """
        folder, base = os.path.split(self.path(name))
        folder = folder if self.local else tempfile.gettempdir()
        temporary = os.path.join(folder, f".{base}.{uuid.uuid4().hex[:8]}")  # as _TEMPORARY
        try:
            os.makedirs(folder, exist_ok=True)
            with HashedFile(temporary) as file:
                yield file
        except OSError as error:
            if error.errno is None and not is_full(error):  # raised by a read in the block
                raise
            raise write_error(error, f"{self.noun} {self.url}") from None
        finally:
            with contextlib.suppress(OSError):  # already renamed
                os.unlink(temporary)

    def _finish(self, file: HashedFile) -> None:
        """Flush a file to disk."""
        file.flush()
        os.fsync(file.fileno())
        self.check()  # the flush may have taken long

    def _create_remote(self, name: str, data: bytes, last_may_win: bool) -> bool:
        path = self.path(name)
        try:
            self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, ValueError, NotImplementedError):
            if not last_may_win:
                raise UserError(
                    f"{self.url} cannot create a file only where it is absent, which keeps two writers apart: "
                    "take a local folder, s3:// or gs://"
                ) from None
            if self.fs.exists(path):
                return False
            # A store without conditional writes: both attempts hold the same rows, so the last one may win.
            self.fs.pipe_file(path, data)
        return True


def _reopened(url: str, noun: str, keeps: bool, marks: Sequence[str]) -> Store:
    """A store in another process."""
    return Store(url, noun).keeping(*marks) if keeps else Store(url, noun)


def _base(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


_MARKS = ("type", "size", "mtime", "ETag", "etag", "md5Hash", "generation", "created", "LastModified", "last_modified")


def _mark(entry: dict[str, Any]) -> list[str]:
    """Content tag and modification time of a file in a listing; constant for a folder, whose time changes."""
    return ["directory"] if entry["type"] == "directory" else [str(entry.get(key)) for key in _MARKS]


def to_json(value: Any) -> bytes:
    """Serialize to readable JSON with a final newline; NaN is refused."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")


def _sync_folder(path: str) -> None:
    """Flush a folder's entries to disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _check_address(url: str, noun: str) -> None:
    """Check the name of a directory.

    Raises:
        UserError: it is empty, has a control character or is not valid Unicode text.
    """
    one = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
    if not url.rstrip("/").rpartition("/")[2].strip():
        raise UserError(f"{one} needs a name, got {url!r}")
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in url):
        raise UserError(f"{one}'s name may hold no line break or other control character, got {url!r}")
    try:
        url.encode()
    except UnicodeEncodeError:
        raise UserError(f"{one}'s name must be valid Unicode text, got {url!a}") from None
    if "://" in url and not url.partition("://")[0]:
        raise UserError(f"{one} is a local path or an address such as s3://bucket/run, got {url!r}")


def real_address(url: str) -> str:
    """The canonical address of a run directory: a local path is resolved (no links, `.` and `..`)."""
    return url if "://" in url else os.path.realpath(os.path.expanduser(url))


def _check_local_folder(path: str, noun: str) -> None:
    """Check that a local path is a folder or can be created as one.

    Raises:
        UserError: it leads to or through a file or a broken link, or is too long.
    """
    if len(os.fsencode(path)) > LONGEST_PATH - ROOM:
        raise UserError(f"{noun} {path[:50]}... has {len(os.fsencode(path)):,} bytes, more than a path may have")
    for name in path.split("/"):
        if len(os.fsencode(name)) > LONGEST_NAME:
            raise UserError(f"{noun} {path[:50]}...: a part has {len(os.fsencode(name)):,} bytes")
    place = path
    while not os.path.lexists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    if not os.path.exists(place):
        raise UserError(f"{noun} {path}: {place} is a link to nothing")
    if not os.path.isdir(place):
        instead = instead_of_run(place) if place == path else None
        raise UserError(f"{noun} {path}: {place} is a file, not a folder{f'; {instead}' if instead else ''}")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """Remove a temporary file or folder if the block that writes it fails.

    Raises:
        FullError: no space was left, whatever the exception of the library that wrote.
    """
    try:
        yield
    except BaseException as error:
        full = isinstance(error, Exception) and (is_full(error) or _has_no_space(path.parent))
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if full:
            raise FullError(f"no space left for {path.parent}: free some space and rerun the command") from None
        raise


def _has_no_space(folder: Path) -> bool:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    return free < _NO_SPACE_BYTES
