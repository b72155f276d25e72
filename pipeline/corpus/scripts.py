"""Units of a text by its scripts: words, or characters where a script does not put blanks between words.

Words of most scripts stand between blanks. Han, Hiragana, Katakana, Thai, Lao, Khmer, Myanmar, Tibetan and a few
others are written without blanks between words, and there every character is a unit, as in multilingual ROUGE. A piece
between blanks that no word of a language is as long as (a sequence of DNA, base64) is read by characters too. A text
has the units `text.split()` unless most of its units would be characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import islice

_UNSPACED_BELOW = (
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e50-\u0e59"  # Thai
    "\u0e81-\u0edf"  # Lao
    "\u0f00\u0f18\u0f19\u0f20-\u0f33\u0f35\u0f37\u0f39\u0f3e-\u0f84\u0f86-\u0fbc\u0fc6"  # Tibetan
    "\u1000-\u1049\u1050-\u109d\ua9e0-\ua9fe\uaa60-\uaa76\uaa7a-\uaa7f"  # Myanmar
    "\u1780-\u17d3\u17d7\u17dc\u17dd\u17e0-\u17f9"  # Khmer
    "\u1950-\u1974\u1980-\u19da\u1a20-\u1a99\u1aa7\uaa80-\uaadd"  # Tai Le, New Tai Lue, Tai Tham, Tai Viet
    "\u1b00-\u1b4c\u1b50-\u1b59\u1b6b-\u1b73\ua980-\ua9c0\ua9d0-\ua9d9"  # Balinese, Javanese
    "\u2e80-\u2fd5\u3005\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufad9"  # Han
    "\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Hiragana, Katakana
    "\u3105-\u312f\u31a0-\u31bf\ua000-\ua48c"  # Bopomofo, Yi
)
_UNSPACED_ABOVE = (
    "\U000116d0-\U000116e3\U00011700-\U0001173b\U00011740-\U0001174f"  # Myanmar, Ahom
    "\U00016fe0-\U00018dff\U0001aff0-\U0001b2ff\U00020000-\U0003ffff"  # Tangut, Khitan, Kana, Nushu, Han
)
UNSPACED = _UNSPACED_BELOW + _UNSPACED_ABOVE
"""Letters, marks and digits of scripts without blanks between words, as ranges of a character class."""

LONGEST_WORD = 50
"""Letters and digits of the longest word; English has none longer than 45."""

LONGEST_PIECE = 200
"""Characters of the longest piece between blanks that counts as one word, such as an address of a page."""

DECISIVE = 20_000
"""Characters at the beginning of a text by which it is decided whether it is read by characters."""

_WIDE = "\u3001-\u3003\u3008-\u3011\u3014-\u301f\u30a0\u30fb\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
_STACKED = "\u17d2\u1039\u1a60"  # a mark that puts the next letter below its own
_BETWEEN = "\u0f0b\u0f0c\u200b"  # between syllables of Tibetan; a blank that is not seen
_AFTER = "\u200c\u200d\ufe00-\ufe0f"  # belongs to the character before it, as marks do
_PIECE = re.compile(r"\S+")
_SPLIT = re.compile(f"[{UNSPACED}{_WIDE}]")
_LONG = re.compile(rf"(?<!\w)\w{{{LONGEST_WORD + 1},}}")

_SPLIT_BELOW = re.compile(f"[{_UNSPACED_BELOW}{_WIDE}]")  # ten times as fast as a class with characters above U+FFFF
_ABOVE = re.compile("[\U00010000-\U0010ffff]")

Span = tuple[int, int]


@cache
def marks(end: int = 0x1F000) -> str:
    """Combining marks below a code, which belong to the letter before them, as ranges of a character class."""
    codes = [
        code
        for code in range(0x300, end)
        if unicodedata.category(chr(code)) in ("Mn", "Mc") and not 0xFE00 <= code <= 0xFE0F and code != 0x34F
    ]
    ends = [place for place, code in enumerate(codes) if codes[place + 1 : place + 2] != [code + 1]]
    begins = [0, *(place + 1 for place in ends[:-1])]
    return "".join(f"{chr(codes[one])}-{chr(codes[other])}" for one, other in zip(begins, ends, strict=True))


@cache
def word_pattern(unspaced: bool) -> re.Pattern[str]:
    """Words of a text without signs: runs of letters, digits, underscores and combining marks.

    Args:
        unspaced: whether to match single characters, with their marks, of scripts without blanks between words; only
            texts with `has_unspaced` need it, and it is slower.
    """
    if not unspaced:
        return re.compile(rf"\w+(?:[{marks()}][\w{marks()}]*)?")
    return re.compile(f"[{UNSPACED}]{_marked()}|[^\\W{UNSPACED}](?:[^\\W{UNSPACED}]|[{marks()}])*")


def _marked() -> str:
    """The marks, and letters that these put below, of a character of a script without blanks."""
    return f"(?:[{_STACKED}][{_UNSPACED_BELOW}]|[{marks(0x10000)}{_AFTER}])*+"


@cache
def _parts() -> re.Pattern[str]:
    """The units of a piece: a character of a script without blanks, a wide sign, or anything else between these."""
    other = f"[{_WIDE}]|[^{UNSPACED}{_WIDE}{_BETWEEN}]+"
    return re.compile(f"[{_UNSPACED_BELOW}]{_marked()}|{other}|[{_UNSPACED_ABOVE}]{_marked()}")


def is_unspaced(unit: str) -> bool:
    """Whether a unit begins with a character of a script without blanks, or a wide sign."""
    return _SPLIT.match(unit) is not None


def has_unspaced(text: str) -> bool:
    """Whether a text has characters that are units by themselves, of a script without blanks between words."""
    if text.isascii():
        return False
    return bool(_SPLIT_BELOW.search(text) or (_ABOVE.search(text) and _SPLIT.search(text)))


def by_characters(text: str) -> bool:
    """Whether a text is written without blanks between words, or without words.

    Either it has more characters of scripts without blanks than words, or most of it stands in pieces that are longer
    than any word.
    """
    pieces = text[:DECISIVE].split()
    characters = 0
    if has_unspaced(text[:DECISIVE]):
        characters = sum(len(_SPLIT.findall(piece)) for piece in pieces)
        pieces = [piece for piece in pieces if not _SPLIT.search(piece)]
    if max(map(len, pieces), default=0) > LONGEST_WORD:
        long = sum(len(piece) for piece in pieces if _is_long(piece))
        if 2 * long > sum(map(len, pieces)) + characters:
            return True
    return characters > len(pieces)


def units(text: str, characters: bool | None = None) -> list[str]:
    """The words of a text or, if it is read by characters, also its characters; no blanks.

    A character has its combining marks. Between characters there may be words, such as names in Latin letters.

    Args:
        text: any text.
        characters: whether to read by characters; None: as `by_characters` decides.
    """
    if not (by_characters(text) if characters is None else characters):
        return text.split()
    mixed = has_unspaced(text)
    return [unit for piece in text.split() for unit in _split_units(piece, mixed)]


def count_units(text: str, characters: bool | None = None) -> int:
    """Number of `units` of a text."""
    return len(units(text, characters))


def unit_spans(text: str, characters: bool | None = None) -> Iterator[Span]:
    """The beginning and end of each of the `units` of a text, in order; a long text is read only as far as needed."""
    if by_characters(text) if characters is None else characters:
        return _mixed_spans(text)
    return (piece.span() for piece in _PIECE.finditer(text))


def cut_units(text: str, count: int, characters: bool | None = None) -> int:
    """The position after the first `count` units of a text, or after its last one."""
    return max((end for _, end in islice(unit_spans(text, characters), count)), default=0)


def _mixed_spans(text: str) -> Iterator[Span]:
    """The spans of words, and of characters where words are not separated."""
    mixed = has_unspaced(text)
    for piece in _PIECE.finditer(text):
        begin, end = piece.span()
        split = mixed and _SPLIT.search(text, begin, end)
        for part in _parts().finditer(text, begin, end) if split else (piece,):
            if _is_long(part[0]):
                yield from (one.span() for one in _characters().finditer(text, *part.span()))
            else:
                yield part.span()


def _split_units(piece: str, mixed: bool) -> list[str]:
    """The units of a piece of a text that is read by characters; `mixed`: whether the text has unspaced scripts."""
    parts = _parts().findall(piece) if mixed and not piece.isascii() and _SPLIT.search(piece) else [piece]
    if max(map(len, parts), default=0) <= LONGEST_WORD:
        return parts
    return [unit for part in parts for unit in (_characters().findall(part) if _is_long(part) else [part])]


def _is_long(piece: str) -> bool:
    """Whether a piece is longer than any word."""
    return len(piece) > LONGEST_WORD and (len(piece) > LONGEST_PIECE or _LONG.search(piece) is not None)


@cache
def _characters() -> re.Pattern[str]:
    return re.compile(f".[{marks(0x10000)}{_AFTER}]*")
