"""Texts of tokens as servers write them: plain, with marks of a vocabulary, as bytes, or as names of special tokens."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\[[A-Za-z_]{1,20}\]")
_NUMBERED = re.compile(r"(token_id:)?\d+")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED = re.compile(r"(?:\\x[0-9A-Fa-f]{2})+")
REPLACED = "\N{REPLACEMENT CHARACTER}"
_DROPPED = re.compile(rf"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060\ufeff{REPLACED}▁ġċ]+")
"""Blanks, controls, parts of characters, and marks of blanks and line ends in vocabularies, in lower case."""


def _byte_marks() -> dict[str, int]:
    """Characters of a byte-level vocabulary -> bytes; those that do not print stand behind U+0100, as in GPT-2."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_MARKS = _byte_marks()
_BLANK_MARKS = {mark for mark, byte in _BYTE_MARKS.items() if byte in b" \n\t\r"}


def fold(text: str) -> str:
    """A text without blanks, control characters and differences that tokenizers make, such as of case."""
    return _DROPPED.sub("", unicodedata.normalize("NFKC", text).casefold())


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of a token."""

    data: bytes
    special: str = ""  # the name of a special token
    partial: bool = False  # whether its text is not known: part of a character, or an unknown one
    missing: bool = False  # whether the answer has no text of it, which is so of a first token without a value


@lru_cache(maxsize=1 << 14)
def token_piece(text: str | bytes | None) -> Piece | None:
    """The text of a token without the marks of its vocabulary; None where the answer has only its number."""
    if isinstance(text, bytes):
        return Piece(text, partial=text == REPLACED.encode())
    if text is None or (text.startswith("token_id:") and _NUMBERED.fullmatch(text)):
        return None
    if byte := _BYTE.fullmatch(text):
        return Piece(bytes.fromhex(byte[1]))
    if text.startswith("bytes:") or _ESCAPED.fullmatch(text):
        return Piece(_unescaped(text.removeprefix("bytes:")))
    if _SPECIAL.fullmatch(text):
        return Piece(b"", special=text, partial="unk" in text.lower())
    if len(text) > 2:
        text = text.removeprefix("##").removesuffix("</w>").removesuffix("@@")
    return Piece(text.replace("▁", " ").encode("utf-8", "replace"), partial=REPLACED in text or not text)


def _unescaped(text: str) -> bytes:
    r"""The bytes of a text with escapes such as \xe2."""
    parts = re.split(r"\\x([0-9A-Fa-f]{2})", text)
    return b"".join(
        bytes.fromhex(part) if place % 2 else part.encode("utf-8", "replace") for place, part in enumerate(parts)
    )


def unmarked(text: str) -> str:
    """The text of a token without the marks of a byte-level vocabulary, if it has a blank of one."""
    return "".join(map(chr, _from_marks(text))) if _BLANK_MARKS & set(text) else text


def _from_marks(text: str) -> bytes:
    """The bytes of a text in the characters of a byte-level vocabulary."""
    return b"".join(
        bytes([_BYTE_MARKS[sign]]) if sign in _BYTE_MARKS else sign.encode("utf-8", "replace") for sign in text
    )


def token_pieces(texts: Sequence[Any], marks: bool = False) -> list[Piece] | None:
    """The texts of tokens; None where they have none. The first one's may be missing.

    Args:
        texts: of an answer.
        marks: whether they are known to be in the characters of a byte-level vocabulary.
    """
    known = [piece for text in texts[1:] if (piece := token_piece(text)) is not None]
    if len(known) + 1 < len(texts) or not any(piece.data for piece in known):
        return None
    if all(isinstance(text, str) and _NUMBERED.fullmatch(text) for text in texts):
        return None
    pieces = [token_piece(texts[0]) or Piece(b"", missing=True), *known]
    if marks or are_marks(texts, pieces):
        return [
            piece if piece.special or not isinstance(text, str) else Piece(_from_marks(text))
            for text, piece in zip(texts, pieces, strict=True)
        ]
    return pieces


def are_marks(texts: Sequence[Any], pieces: Sequence[Piece]) -> bool:
    """Whether all tokens are in the characters of a byte-level vocabulary, and one of them has a blank."""
    plain = [text for text, piece in zip(texts, pieces, strict=True) if isinstance(text, str) and not piece.special]
    signs = set[str]().union(*plain)
    return bool(signs & _BLANK_MARKS) and signs <= _BYTE_MARKS.keys()


def folded_pieces(pieces: Sequence[Piece]) -> list[str]:
    """The folded text that each token adds; a character belongs to the token of its last byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [fold(decoder.decode(piece.data)) for piece in pieces]


def bare(text: str) -> str:
    """A folded text without accents, which some tokenizers drop."""
    if text.isascii():
        return text
    return "".join(sign for sign in unicodedata.normalize("NFKD", text) if not unicodedata.combining(sign))


def ordered_parts(parts: Sequence[str], target: str, more: int) -> str:
    """The parts that occur in a text one after the other, joined.

    Args:
        parts: folded texts of tokens.
        target: folded text.
        more: most characters between two parts, beside as many as the parts between them have.
    """
    held, position, missed = list[str](), 0, 0
    for part in filter(None, parts):
        place = target.find(part, position, position + len(part) + more + missed)
        if place < 0:
            missed += len(part)
        else:
            held.append(part)
            position, missed = place + len(part), 0
    return "".join(held)
