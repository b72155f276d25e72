"""The run directory on any fsspec file system: atomic writes, and files that are created once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import DamagedError, UserError, one_line
from pipeline.store.address import check_address, check_local_folder, real_address
from pipeline.store.space import remove_quietly, write_error

SIDE_BY_SIDE = 16
"""Requests to an object store that are under way together."""

KEPT_BYTES = 1 << 28
"""Of files that a process keeps of what it read."""

_OPTIONS = {protocol: {"max_concurrency": 1} for protocol in ("s3", "s3a")}
"""Else s3fs asks for the size of a file before it reads it, to read a large one in parts."""


class _Kept:
    """Files that never change under their names, those that were read last."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str]) -> bytes | None:
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def put(self, key: tuple[str, str], data: bytes) -> bytes:
        with self._lock:
            if key not in self._files:
                self._files[key] = data
                self._size += len(data)
            while self._size > KEPT_BYTES:
                self._size -= len(self._files.popitem(last=False)[1])
        return data

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._size = 0


_kept = _Kept()


class Store:
    """One run directory. Cheap to make, so every process makes its own from the URL."""

    def __init__(self, url: str) -> None:
        """Open the directory at a local path or fsspec URL; it need not exist yet.

        Raises:
            UserError: the file system of the URL is unknown or its package is not installed, or a path leads to a file.
        """
        check_address(url)
        try:
            protocol = url.split("://")[0] if "://" in url else ""
            self.fs, root = fsspec.core.url_to_fs(
                url if protocol else os.path.expanduser(url), **_OPTIONS.get(protocol, {})
            )
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"cannot open run directory {url}: {one_line(str(error))}") from None
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, fsspec.implementations.local.LocalFileSystem)
        if self.local:
            check_local_folder(self.root)
            self.root = real_address(self.root)
        self.url = self.root if self.local else self.fs.unstrip_protocol(self.root)
        self.check: Callable[[], None] = lambda: None
        """Called before each change."""
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}

    def guarded(self, check: Callable[[], None]) -> Store:
        """The same directory for a writer that calls `check` before each change; what that raises stops the change."""
        guarded = Store.__new__(Store)
        guarded.__dict__.update(vars(self))
        guarded.check = check
        return guarded

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url,)

    def path(self, name: str) -> str:
        """The full path of a name in the directory."""
        return f"{self.root}/{name}"

    def exists(self, name: str) -> bool:
        """Whether the file or folder exists."""
        return bool(self.fs.exists(self.path(name)))

    def names(self, folder: str, suffix: str = "") -> list[str]:
        """File names (without the folder) in a folder, sorted; empty if the folder does not exist."""
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self.path(folder), detail=False)
        except FileNotFoundError:
            return []
        bases = (entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)
        return sorted(base for base in bases if base.endswith(suffix) and not base.startswith("."))

    def listing(self, folder: str) -> dict[str, list[str]]:
        """What stands in a folder, by name, and how it is: equal marks mean that a file was not changed.

        Of a folder only that it is one; empty if the folder does not exist.
        """
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self.path(folder).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        marks = {entry["name"].rstrip("/").rsplit("/", 1)[-1]: _mark(entry) for entry in entries}
        return {name: marks[name] for name in sorted(marks) if not name.startswith(".")}

    def state(self, folder: str, passing: Sequence[str] = ()) -> str:
        """A digest of a folder's listing, by which a change of any file in it shows.

        Args:
            folder: in the directory; it need not exist.
            passing: how names begin that do not count.
        """
        kept = [item for item in self.listing(folder).items() if not item[0].startswith(tuple(passing))]
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises FileNotFoundError."""
        return bytes(self.fs.cat_file(self.path(name)))

    def find(self, name: str) -> bytes | None:
        """The bytes of a file; None where it is not there.

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
        """The SHA-256 of a file, hexadecimal, read in blocks; None where it is not there.

        A local file is read again only where its size or its time of change differ from those of the last call.

        Raises:
            UserError: it cannot be read.
        """
        try:
            if not self.local and not name.endswith(".parquet"):
                return hashlib.sha256(self.read(name)).hexdigest()  # one request
            with self.fs.open(self.path(name), "rb") as file:
                state = os.stat(self.path(name)) if self.local else None
                mark = () if state is None else (state.st_ino, state.st_size, state.st_mtime_ns)
                known, digest = self._digests.get(name, ((), ""))
                if not mark or known != mark:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    self._digests[name] = (mark, digest)
                return digest
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if not self.local:
                raise
            raise UserError(f"cannot read {self.url}/{name}: {error.strerror}") from None

    def read_many(self, names: Sequence[str], keep: bool = False) -> list[bytes | None]:
        """The bytes of files, in order; None for one that is not there. Side by side where each costs a request.

        Args:
            names: of the files.
            keep: whether they never change under their names: then this process asks for them once, if there is room.
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
        """The bytes of a file that never changes under its name, kept by this process while there is room.

        Raises:
            FileNotFoundError: it is not there.
        """
        if self.local:
            return self.read(name)
        if (data := _kept.get((self.url, name))) is None:
            data = _kept.put((self.url, name), self.read(name))
        return data

    def fetch(self, sizes: Mapping[str, int]) -> None:
        """Read files ahead, side by side, that never change under their names, if there is room to keep all of them.

        Args:
            sizes: bytes, by name.
        """
        if not self.local and sum(sizes.values()) <= KEPT_BYTES:
            self.read_many(list(sizes), keep=True)

    def begin(self) -> None:
        """A command begins: what an earlier one of this process kept is forgotten."""
        _kept.clear()

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all, replacing what was there."""
        self.check()
        if not self.local:
            self.fs.pipe_file(self.path(name), data)
            return
        temporary = self._temporary(name, data)
        try:
            os.replace(temporary, self.path(name))
        except OSError as error:
            raise write_error(error, f"run directory {self.url}") from None
        finally:
            remove_quietly(temporary)

    def create(self, name: str, data: bytes, last_may_win: bool = True) -> bool:
        """Write a file only if it is absent; False when it was there already.

        Args:
            name: of the file.
            data: its bytes.
            last_may_win: whether the last of several writers at once may win, on a store that cannot tell the first.

        Raises:
            UserError: the store cannot tell the first, and must; or a local folder cannot be written to.
        """
        self.check()
        if not self.local:
            return self._create_remote(name, data, last_may_win)
        temporary = self._temporary(name, data)
        try:
            os.link(temporary, self.path(name))
        except FileExistsError:
            return False
        except OSError as error:
            raise write_error(error, f"run directory {self.url}") from None
        finally:
            remove_quietly(temporary)
        if not last_may_win:  # who is told that it was the first is not to find the file gone after a power cut
            _sync_folder(os.path.dirname(self.path(name)))
        return True

    def append(self, name: str, data: bytes) -> None:
        """Append to a file. On stores without appending, write a part beside it; `read_grown` reads all parts."""
        self.check()
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
            raise write_error(error, f"run directory {self.url}") from None

    def read_grown(self, name: str) -> bytes:
        """All data that was appended under a name, in order; empty if there is none."""
        return b"".join(self.read(part) for part in self._grown(name))

    def remove_grown(self, name: str) -> None:
        """Remove the data that was appended under a name."""
        for part in self._grown(name):
            self.remove(part)

    def _grown(self, name: str) -> list[str]:
        folder, base = os.path.split(name)
        stem, suffix = os.path.splitext(base)
        return [f"{folder}/{part}" for part in self.names(folder, suffix) if part.split(".")[0] == stem]

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self.check()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its content if it exists."""
        self.check()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)

    def read_json(self, name: str) -> Any:
        """A JSON file, or None when it is not there.

        Raises:
            DamagedError: the file is there and is not JSON.
            UserError: it cannot be read.
        """
        data = self.find(name)
        try:
            return None if data is None else json.loads(data)
        except (ValueError, RecursionError):
            raise DamagedError(f"{self.url}/{name} is damaged: not JSON") from None

    def write_json(self, name: str, value: Any) -> str:
        """Write a value as readable JSON, atomically; the SHA-256 of the file, hexadecimal."""
        data = to_json(value)
        self.write(name, data)
        return hashlib.sha256(data).hexdigest()

    def create_json(self, name: str, value: Any) -> bool:
        """Write a value as JSON only if the name is absent."""
        return self.create(name, to_json(value))

    def read_table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A Parquet file.

        Raises:
            UserError: missing or damaged.
        """
        try:
            wanted = list(columns) if columns is not None else None
            return pq.read_table(io.BytesIO(self.read(name)), columns=wanted, page_checksum_verification=True)
        except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
            raise UserError(f"cannot read {self.url}/{name}: {' '.join(str(error).split())}") from None

    def write_table(self, name: str, table: pa.Table) -> str:
        """Write a Parquet file with a checksum of every page, atomically; the same table gives the same bytes.

        Returns:
            The SHA-256 of the file, hexadecimal.
        """
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        self.write(name, buffer.getvalue())
        return hashlib.sha256(buffer.getbuffer()).hexdigest()

    def _temporary(self, name: str, data: bytes) -> str:
        """Write the data durably to a temporary file beside its final place, and return that file's path.

        Raises:
            UserError: the directory cannot be written to: it is a file, it is full, or it may not be changed.
                Then nothing is left of the temporary file.
        """
        path = self.path(name)
        folder, base = os.path.split(path)
        temporary = os.path.join(folder, f".{base}.{uuid.uuid4().hex[:8]}")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.check()  # writing durably may have taken a while
        except BaseException as error:
            remove_quietly(temporary)
            if isinstance(error, OSError):
                raise write_error(error, f"run directory {self.url}") from None
            raise
        return temporary

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


_MARKS = ("type", "size", "mtime", "ETag", "etag", "md5Hash", "generation", "created", "LastModified", "last_modified")


def _mark(entry: dict[str, Any]) -> list[str]:
    """What a listing says of a file's content and time; of a folder, whose time changes with what is in it, nothing."""
    return ["directory"] if entry["type"] == "directory" else [str(entry.get(key)) for key in _MARKS]


def to_json(value: Any) -> bytes:
    """Readable JSON with a final newline; NaN is refused."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")


def _sync_folder(path: str) -> None:
    """Write a folder's entries to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
