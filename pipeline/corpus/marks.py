"""Marks of places before options, such as "(A) ": found, taken off, and put back by place (docs/versions.md).

A mark that stays with its option states the published order in every version. Whether an item has marks depends on the
multiset of its marks alone, never on their order.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

_ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii")
_SERIES: tuple[Sequence[str], ...] = (
    "ABCDEFG",
    "abcdefg",
    _ROMAN,
    tuple(map(str.upper, _ROMAN)),
    "АБВГДЕЖ",  # Cyrillic, from here to the next comment in both cases
    "абвгдеж",
    "ΑΒΓΔΕΖΗ",  # Greek
    "αβγδεζη",
    "אבגדהוז",  # Hebrew
    "أبجدهوز",  # Arabic: abjad, without hamza, alphabet, Persian
    "ابجدهوز",
    "أبتثجحخ",
    ("الف", "ب", "ج", "د", "ه", "و", "ز"),  # noqa: RUF001
    "कखगघङचछ",  # Devanagari, Bengali, Thai
    "কখগঘঙচছ",
    "กขคงจฉช",
    "가나다라마바사",  # Hangul
    "ㄱㄴㄷㄹㅁㅂㅅ",
    "アイウエオカキ",  # Kana
    "あいうえおかき",
    "イロハニホヘト",
    "一二三四五六七",  # Han
    "ԱԲԳԴԵԶԷ",  # Armenian, Georgian
    "აბგდევზ",
    "ሀለሐመሠረሰ",  # Ethiopic
    "കഖഗഘങചഛ",  # Malayalam, Tamil, Telugu, Kannada, Gujarati, Gurmukhi, Sinhala
    "அஆஇஈஉஊஎ",
    "అఆఇఈఉఊఋ",
    "ಅಆಇಈಉಊಋ",
    "કખગઘઙચછ",
    "ੳਅੲਸਹਕਖ",
    "කඛගඝඞචඡ",
    "កខគឃងចឆ",  # Khmer, Lao, Myanmar, Tibetan
    "ກຂຄງຈສຊ",
    "ကခဂဃငစဆ",
    "ཀཁགངཅཆཇ",
    "甲乙丙丁戊己庚",
)
"""Symbols of the first places, as normalised by NFKC. Numbers are recognised in every script, from 0 and from 1."""

_ENCLOSED = "①❶➀➊⓵⑴⒈ⓐⒶ⒜🄐🄰🅐🅰㈠㊀㈎㉮㈀㉠㋐"
"""First characters of series of consecutive characters that are marks by themselves."""

_WORDS = (
    "option|choice|answer|alternative|opción|opcion|respuesta|opção|opcao|alternativa|réponse|reponse|choix|antwort|"
    "вариант|ответ|选项|選項|選択肢|보기"
)
_PAIRS = {"()", "[]", ".", ":", ")", "、", "【】", "〔〕", "().", "():", "[].", "[]:", ".)"}  # noqa: RUF001
"""Characters around a symbol, as normalised by NFKC."""

_INVISIBLE = "\u200b-\u200f\u2060\ufeff"
_BULLET = r"[-*•·‣▪][ \t]+"
_EMPHASIS = r"\*{1,3}|_{1,3}|`+|\$|<(?:b|i|u|em|strong)>|\\(?:mathbf|text(?:bf|it))\{"
_EMPHASIS_END = r"\*{1,3}|_{1,3}|`+|\$|</(?:b|i|u|em|strong)>|\}"
_CLOSE = r"\)[.:]|\][.:]|\.\)|[)\].:）］】〕．：、]"  # noqa: RUF001
_MARK = re.compile(
    rf"[\s{_INVISIBLE}]*(?:{_BULLET})?(?P<emphasis>{_EMPHASIS})?(?P<word>(?:{_WORDS})\s*)?"
    rf"(?P<open>[(\[（［【〔]?)(?P<symbol>[^\W_]{{1,4}})(?P<inner>{_EMPHASIS_END})?(?P<close>{_CLOSE}|)"  # noqa: RUF001
    rf"(?P<outer>{_EMPHASIS_END})?(?P<blank>\s*)(?=\S)",
    re.IGNORECASE,
)
_KEYCAP = re.compile(r"\s*(?P<digit>[0-9])\ufe0f?\u20e3\s*(?=\S)")
_ENCLOSED_MARK = re.compile(r"\s*(?P<symbol>\S)[\ufe0e\ufe0f]?\s*(?=\S)")


@dataclass(frozen=True, slots=True)
class OptionMarks:
    """The marks of the options of an item: exactly those of the first k places, of one style."""

    places: tuple[int, ...]  # the place that the mark of each option names, from 0
    prefixes: tuple[str, ...]  # of each place: its mark with the blanks around it
    bare: tuple[str, ...]  # the options without their marks

    @property
    def in_place(self) -> bool:
        """Whether every mark stands at the place that it names."""
        return self.places == tuple(range(len(self.places)))


def option_marks(options: Sequence[str]) -> OptionMarks | None:
    """The marks of the options of an item; None if they are not the marks of the first places, of one style.

    A mark is (A), (a), [A], A., A:, A), 1., 1), i), "Option 2:" or of another script, followed by a blank and a text;
    after full-width and enclosed characters the blank may be missing. One mark is taken off each option. The marks of
    an item are such only if their multiset is that of the first k places: "E. coli", "B. subtilis" and "S. aureus" are
    none, whatever their order. A bullet before a mark, its emphasis in Markdown, HTML or LaTeX, and invisible
    characters belong to it.

    Args:
        options: texts of the options, in the published order.
    """
    styles = [dict(_styles(option)) for option in options]
    for style in styles[0] if styles else ():
        if not all(style in each for each in styles):
            continue
        places = tuple(each[style][0] for each in styles)
        if sorted(places) != list(range(len(options))):
            continue
        ends = [each[style][1] for each in styles]
        prefixes = {place: option[:end] for place, option, end in zip(places, options, ends, strict=True)}
        bare = tuple(option[end:] for option, end in zip(options, ends, strict=True))
        return OptionMarks(places, tuple(prefixes[place] for place in range(len(options))), bare)
    return None


def _styles(option: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """The styles in which the beginning of an option is a mark: (style, (place that it names, end of the mark))."""
    if keycap := _KEYCAP.match(option):
        yield "keycap 0", (int(keycap["digit"]), keycap.end())
        yield "keycap 1", (int(keycap["digit"]) - 1, keycap.end())
    alone = _ENCLOSED_MARK.match(option)
    if alone and (enclosed := _enclosed().get(alone["symbol"])) is not None:
        yield enclosed[0], (enclosed[1], alone.end())
    mark = _MARK.match(option)
    if mark is None:
        return
    emphasised = mark["emphasis"] is not None
    if emphasised != (mark["inner"] is not None or mark["outer"] is not None):
        return
    if not (mark["blank"] or mark["outer"] or _is_wide(mark["close"], option[mark.end()])):
        return
    around = unicodedata.normalize("NFKC", mark["open"] + mark["close"])
    if around not in _PAIRS and not (len(mark["emphasis"] or "") > 1 and around == ""):
        return
    word = " ".join((mark["word"] or "").casefold().split())
    for series, place in _places(unicodedata.normalize("NFKC", mark["symbol"])):
        yield f"{word} {around} {series}", (place, mark.end())


def _is_wide(close: str, following: str) -> bool:
    """Whether a mark with this last character needs no blank: it is full-width, and no decimal number goes on."""
    return close != "" and not close.isascii() and not following.isdecimal()


def _places(symbol: str) -> Iterator[tuple[str, int]]:
    """The series in which a symbol names a place, with the place, from 0."""
    if len(symbol) <= 2 and symbol.isdecimal():
        yield "0", int(symbol)
        yield "1", int(symbol) - 1
    for number, series in enumerate(_SERIES):
        if symbol in tuple(series):
            yield f"series {number}", tuple(series).index(symbol)


@cache
def _enclosed() -> dict[str, tuple[str, int]]:
    """Each enclosed character of the first places: its series and the place that it names."""
    return {chr(ord(first) + place): (f"enclosed {first}", place) for first in _ENCLOSED for place in range(7)}
