"""Whether a run directory can be where a user says: told before anything is written or read there."""

from __future__ import annotations

import os

from pipeline.errors import UserError

LONGEST_NAME = 255
LONGEST_PATH = 4095
ROOM = 200
"""Bytes of a path that names of files in the directory may take."""


def check_address(url: str) -> None:
    """Check what a run directory is called.

    Raises:
        UserError: it is empty, or holds a control character or no valid text.
    """
    if not url.rstrip("/").rpartition("/")[2].strip():
        raise UserError(f"a run directory needs a name, got {url!r}")
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in url):
        raise UserError(f"a run directory's name may hold no line break or other control character, got {url!r}")
    try:
        url.encode()
    except UnicodeEncodeError:
        raise UserError(f"a run directory's name must be valid Unicode text, got {url!a}") from None
    if "://" in url and not url.partition("://")[0]:
        raise UserError(f"a run directory is a local path or an address such as s3://bucket/run, got {url!r}")


def real_address(url: str) -> str:
    """The one address of a run directory, however it was written: a local path without links, `.` and `..`."""
    return url if "://" in url else os.path.realpath(os.path.expanduser(url))


def check_local_folder(path: str) -> None:
    """Check that a local path is that of a folder, or could become one.

    Raises:
        UserError: it leads to or through a file or a link to nothing, or is too long.
    """
    if len(os.fsencode(path)) > LONGEST_PATH - ROOM:
        raise UserError(f"run directory {path[:50]}... has {len(os.fsencode(path)):,} bytes, more than a path may have")
    for name in path.split("/"):
        if len(os.fsencode(name)) > LONGEST_NAME:
            raise UserError(f"run directory {path[:50]}...: a part has {len(os.fsencode(name)):,} bytes")
    place = path
    while not os.path.lexists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    if not os.path.exists(place):
        raise UserError(f"run directory {path}: {place} is a link to nothing")
    if not os.path.isdir(place):
        raise UserError(f"run directory {path}: {place} is a file, not a folder")
