"""A digest of documents as they are read, by which a change of an input shows."""

from __future__ import annotations

import hashlib
from typing import Any


class ContentDigest:
    """SHA-256 over the numbers, ids, groups and texts of documents, before any transform, in their order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._whole = True

    def add(self, row: int, text: Any, identity: Any, group: Any) -> None:
        """Take in a row; a value in the place of a text that is none counts by its representation."""
        kind, value = ("text", text) if isinstance(text, str) else ("none", repr(text))
        data = value.encode("utf-8", "surrogatepass")
        head = f"{row} {identity!r} {group!r} {kind} {len(data)}\n"
        self._digest.update(head.encode("utf-8", "backslashreplace"))
        self._digest.update(data)

    def add_picture(self, picture: bytes | None, caption: Any) -> None:
        """Take in the picture of the row that was added last, and its caption."""
        data = picture or b""
        self._digest.update(f"{picture is None} {len(data)} {caption!r}\n".encode("utf-8", "backslashreplace"))
        self._digest.update(data)

    def skip(self) -> None:
        """A row could not be read, so nothing can be said of the whole."""
        self._whole = False

    def hexdigest(self) -> str:
        """Of all rows so far, hexadecimal; empty where one could not be read, because it kills its reader."""
        return self._digest.hexdigest() if self._whole else ""


def text_digest(text: str) -> str:
    """16 hexadecimal digits of the SHA-256 of a text as it is."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
