"""How a command ends that cannot go on: one line, and its exit code."""

from __future__ import annotations

import os
import sys

from pipeline.errors import one_line
from ray_jobs import head

LONGEST_LINE = 2000
"""Characters of an error that are printed."""

STORAGE_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "boto3", "botocore", "gcsfs", "google", "requests", "s3fs"}
)


def is_of_storage(error: Exception) -> bool:
    """Whether an error is of a disk, a network or an object store, whose libraries have classes of their own."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in STORAGE_PACKAGES


def message_of_storage(error: Exception) -> str:
    """What an error of storage says, with the path that it is about."""
    path = getattr(error, "filename", None)
    reason = (path and getattr(error, "strerror", None)) or str(error) or type(error).__name__
    return f"storage: {reason}{f': {path}' if path else ''}"


def leave_at_once(message: str, code: int) -> None:
    """End without waiting for threads in the midst of a batch, and with no word from libraries that clean up."""
    print(f"seenset: {one_line(message)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fail(message: str, code: int) -> None:
    """End with one line on standard error and an exit code."""
    if head.head_is_lost():
        leave_at_once(message, code)
    line = one_line(message)
    print(f"seenset: {line if len(line) <= LONGEST_LINE else f'{line[:LONGEST_LINE]}...'}", file=sys.stderr)
    sys.stdout.flush()
    sys.exit(code)
