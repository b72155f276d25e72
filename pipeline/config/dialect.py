"""Encoding of text files, and delimiter and quoting of CSV files."""

from __future__ import annotations

import codecs
import difflib
import json
import sys
from dataclasses import asdict, dataclass
from encodings.aliases import aliases
from typing import Literal

_ASCII = "".join(map(chr, range(128)))
_WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
_EXAMPLES = "utf-8, utf-16, cp1252, latin-1, shift_jis, gb18030"
_NAMES = sorted({*aliases, *aliases.values()} - {"ansi", "dbcs", "mbcs"})
_DELIMITERS = {"tab": "\t", "\\t": "\t", "semicolon": ";", "comma": ",", "pipe": "|", "bar": "|", "space": " "}


Quoting = Literal["double", "none"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Encoding of a text file, and delimiter and quoting of a CSV file."""

    encoding: str = "utf-8"  # name in `codecs`
    delimiter: str = ","
    quoting: Quoting = "double"

    def differing(self) -> dict[str, str]:
        """The fields that differ from the defaults, which earlier versions always used."""
        return {name: value for name, value in asdict(self).items() if value != getattr(PLAIN, name)}

    @property
    def is_wide(self) -> bool:
        """Whether every character takes two or more bytes, so that a line end is not a single byte."""
        return self.encoding in _WIDE

    @property
    def codec(self) -> str:
        """The codec that decodes a whole file without its byte order mark."""
        return "utf-8-sig" if self.encoding == "utf-8" else self.encoding

    @property
    def errors(self) -> str:
        """The error handler: bytes outside the encoding decode to surrogates, which are refused in a text."""
        return "surrogatepass" if self.is_wide else "surrogateescape"

    def encoding_after(self, mark: bytes) -> str:
        """The encoding of a file after its start, which writes no byte order mark.

        Args:
            mark: byte order mark at the start of the file; empty if it has none.
        """
        if not self.is_wide or self.encoding.endswith(("-le", "-be")):
            return self.encoding
        big = mark in (codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE) if mark else sys.byteorder == "big"
        return f"{self.encoding}-{'be' if big else 'le'}"

    @property
    def label(self) -> str:
        """The encoding for messages."""
        return self.encoding.upper() if self.encoding.startswith("utf") else self.encoding


PLAIN = Dialect()

MARKS = (
    ("utf-32", codecs.BOM_UTF32_LE),  # before the mark of UTF-16, which is its prefix
    ("utf-32", codecs.BOM_UTF32_BE),
    ("utf-8", codecs.BOM_UTF8),
    ("utf-16", codecs.BOM_UTF16_LE),
    ("utf-16", codecs.BOM_UTF16_BE),
)
"""Encodings and the byte order marks at the start of their files."""

LONGEST_MARK = max(len(mark) for _, mark in MARKS)
"""Bytes of the longest byte order mark."""


def mark_of(head: bytes) -> tuple[str, bytes] | None:
    """The encoding and the byte order mark at the start of a file; None if it has no mark."""
    return next(((encoding, mark) for encoding, mark in MARKS if head.startswith(mark)), None)


def checked_encoding(value: str) -> str:
    """The name of an encoding in `codecs`; UTF-8 with a byte order mark is UTF-8.

    Raises:
        ValueError: an unknown encoding, or one that is neither an extension of ASCII nor UTF-16 or UTF-32.
    """
    try:
        name = codecs.lookup(value).name
    except (LookupError, ValueError):  # ValueError: a null character
        plain = value.lower().replace("-", "_")
        near = ["cp1252"] if plain == "ansi" else difflib.get_close_matches(plain, _NAMES, n=1)
        guess = f"did you mean {near[0].replace('_', '-')!r}? " if near else ""
        raise ValueError(f"unknown encoding, got {value!r}; {guess}examples: {_EXAMPLES}") from None
    name = "utf-8" if name == "utf-8-sig" else name
    if name not in _WIDE and not _keeps_ascii(name):
        raise ValueError(f"must be an extension of ASCII, or UTF-16 or UTF-32, got {value!r}")
    return name


def _keeps_ascii(name: str) -> bool:
    try:
        return not name.startswith("iso2022") and _ASCII.encode("ascii").decode(name) == _ASCII
    except (LookupError, ValueError):  # LookupError: not a text encoding
        return False


def checked_delimiter(value: str) -> str:
    """One character that may separate fields.

    Raises:
        ValueError: another value.
    """
    if len(value) == 1 and value not in '"\r\n\0':
        return value
    near = _DELIMITERS.get(value.lower())
    guess = "" if near is None else f"; did you mean {json.dumps(near)}?"
    guess = guess if value else "; put a sign such as | in quotes"
    raise ValueError(f"must be one character, and no quotation mark or line end, got {value!r}{guess}")
