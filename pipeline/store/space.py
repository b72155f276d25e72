"""A full disk: nothing stays half written, and it is said in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import FullError, UserError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS = ("No space left on device", "Disk quota exceeded", "os error 28")
STORAGE_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "boto3", "botocore", "gcsfs", "google", "requests", "s3fs"}
)

_NO_SPACE_BYTES = 64 << 10
"""Free space that is none: some libraries do not say why a file could not be written."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there was no space left."""
    if isinstance(error, FullError) or (isinstance(error, OSError) and error.errno in FULL):
        return True
    return any(words in str(error) for words in _WORDS)


def is_of_storage(error: Exception) -> bool:
    """Whether an error is of a disk, a network or an object store, whose libraries have classes of their own."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in STORAGE_PACKAGES


def write_error(error: OSError, where: str) -> UserError:
    """The error of a place that cannot be written to: it is a file, it is full, or it may not be changed."""
    if is_full(error):
        return FullError(f"no space left for {where}: make room, and the same command goes on")
    return UserError(f"cannot write to {where}: {error.strerror}: {error.filename}")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """Remove a temporary file or folder where the block that writes it fails.

    Raises:
        FullError: it failed for want of space, whatever the library that wrote calls that.
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
            raise FullError(f"no space left for {path.parent}: make room, and the same command goes on") from None
        raise


def _has_no_space(folder: Path) -> bool:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    return free < _NO_SPACE_BYTES


def remove_quietly(path: str) -> None:
    """Remove a temporary file that is not needed any more, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def message_of_storage(error: Exception) -> str:
    """What an error of storage states, with the path that it is about."""
    path = getattr(error, "filename", None)
    reason = (path and getattr(error, "strerror", None)) or str(error) or type(error).__name__
    return f"storage: {reason}{f': {path}' if path else ''}"
