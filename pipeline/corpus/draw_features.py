"""What the texts of a document with versions show of its draw, without scores: for the shuffle check and dependence.

Whether a published order or version was drawn at random cannot be seen in one document, but in many: no feature of the
texts may say which one was published (docs/methods.md, section 7).
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import xxhash

from pipeline.corpus.marks import OptionMarks, option_marks
from pipeline.corpus.near_duplicates import sketches_of_texts

UNKNOWN = -1
"""Code of a feature that does not order a document, or that names no option."""

UNMARKED, IN_PLACE, OUT_OF_PLACE = 0, 1, 2
"""Codes of marks: none were taken off; those taken off stood in their places; they did not."""

ASCENDING, DESCENDING = 0, 1
"""Codes of two orders of the values of a feature; other orders follow."""

ORDERED = ("code points", "length", "first number")
"""Features that order texts."""

FURTHER = (
    "last word",
    "last character",
    "last word of one character",
    "first occurrence in the other columns",
    "last occurrence in the other columns",
)
"""Further features that order options: their ends, and where the other columns of the item hold them."""

EXTREMES = (
    "length",
    "words",
    "first number",
    "capitals",
    "digits",
    "punctuation",
    "non-ASCII characters",
    "line breaks",
)
"""Features by which one text may have the most or the least."""

STYLES = (
    "blanks beyond one between words",
    "capitals at the start",
    "characters of its own at the end",
    "conjunctions at the start",
)
"""Features of how a text is written as a part of a list, by which one text alone may have some or none."""

LETTER, NUMBER, TEXT, STATED = 0, 100, 200, 300
"""How a column names an option, added to the option's place or, for a number, to the number."""

WORD_SKETCH = 64
"""Bytes of a sketch of words."""

_MOST_OPTIONS = 7
_ANSWERS = re.compile(
    r"answer|correct|gold|label|target|solution|truth|(?<![a-z])(key|ans|sol|gt|right|true|idx|index)(?![a-z])"
    r"|respuesta|r[ée]ponse"
    r"|antwort|l[öo]sung|risposta|resposta|ответ|答案|正解|정답|إجابة|الجواب|उत्तर"
)
_UNIT = re.compile(r"[0-9a-z\u00b5-\u0dff]+|\S")  # words of scripts with blanks, characters of others
_CONJUNCTION = re.compile(
    r"\W*(?:(?:and|or|und|oder|et|ou|y|e|o|u|en|of|och|eller|og|ja|tai|i|lub|albo|a|nebo|és|vagy|și|sau|ve|veya|dan|atau|và"
    r"|hoặc|и|или|та|або|και|ή)\s|ו|أو |و|और |या |和|或|以及|及|または|および|そして|또는 |그리고 )",  # noqa: RUF001
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_LETTERS = "ABCDEFG"
_LETTER = re.compile(r"\W*([A-Ga-g])\W*")
_DIGITS = re.compile(r"\W*(\d)(?:\.0)?\W*")
_NAMING = r"(?i:answers?|correct|key|solution|gold|label|option|choice|respuesta|réponse|antwort|ответ|答案|正解)"
_STATED = re.compile(rf"{_NAMING}(?:\W{{1,4}}|\W{{0,3}}(?i:is|es|est|ist|是)\W{{1,3}})(?:([A-G])|([1-7]))(?![^\W_])")
_STATED_LAST = re.compile(rf"{_NAMING}[^\n]{{0,20}}?(?<![^\W_])(?:([A-Ga-g])|([1-7]))\W*$")


@dataclass(frozen=True, slots=True)
class DrawFeatures:
    """Features of one document. A code depends on the published version, the other fields on the unordered ones."""

    number: int  # options or rows, of which the published order is one of number! ones; or versions
    equal: int  # key: equal for equal documents, whatever was published
    sketches: (
        bytes  # of an item: of its text, 128 bytes, and of the words of its options; of versions: 128 bytes of the
    )
    # published one, and 128 of all together
    marks: int = UNMARKED
    options: int | None = None  # key of the unordered options
    order: int = UNKNOWN  # code of the published order of the options, of all orders of the same ones
    orders: tuple[int, ...] = ()  # codes of the published order by the features that order it
    places: tuple[int, ...] = ()  # of options: place of the one that stands out; of versions: whether it was published
    columns: tuple[str, ...] = ()  # names of the columns that may name the right answer
    answers: tuple[int, ...] = ()  # of each column: how it names an option, and which

    def row(self) -> dict[str, Any]:
        """The values of a row of a score file."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """An item with options, as its row holds it."""

    options: Sequence[str]  # in the published order
    others: Mapping[str, Any]  # values of the other columns of the template
    answers: Mapping[str, Any] = field(default_factory=dict)  # values of columns that may name the right answer
    keep_marks: bool = False  # whether marks are a part of the options

    @property
    def marks(self) -> OptionMarks | None:
        """The marks that are taken off and put back by place; None for none."""
        return None if self.keep_marks else option_marks(self.options)

    @property
    def bare(self) -> Sequence[str]:
        """The options without marks."""
        return self.options if (marks := self.marks) is None else marks.bare


class _Folding(dict[int, str | None]):
    """Maps punctuation, blanks and control characters to one text; for `str.translate`."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to

    def __missing__(self, point: int) -> str:
        character = chr(point)
        value = self.to if unicodedata.category(character)[0] in "PZC" else character
        self[point] = value
        return value


_TO_BLANK, _TO_NOTHING = _Folding(" "), _Folding("")


def folded(text: str) -> str:
    """A text by which texts are ordered: NFKC, case folded, punctuation as blanks, one blank between words."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(plain.translate(_TO_BLANK).split()) or plain.strip()


def folded_key(text: str) -> str:
    """A text by which texts are equal: NFKC, case folded, without blanks and punctuation."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return plain.translate(_TO_NOTHING) or plain.strip()


def item_features(item: ChoiceItem) -> DrawFeatures:
    """The features of an item whose options are permuted."""
    marks = item.marks
    bare = item.options if marks is None else marks.bare
    checked = option_marks(item.options) if item.keep_marks else None  # of kept marks too, the options behind them
    plain, keys = list(map(folded, bare)), sorted(map(folded_key, bare))
    values = [str(value) for value in item.others.values()]
    rest, columns = folded("\n".join(values)), {**item.others, **item.answers}
    spots = [_spot_in(rest, one) for one in plain]
    canonical = "\n".join([*values, *(one for _, one in sorted(zip(plain, bare, strict=True)))])
    raw = _orders(item.options) if marks is None else [UNKNOWN] * len(ORDERED)
    return DrawFeatures(
        number=len(bare),
        equal=value_key([list(map(folded_key, values)), keys]),
        sketches=sketches_of_texts([canonical])[0] + word_sketch(_UNIT.findall(" ".join(plain))),
        marks=UNMARKED if marks is None else IN_PLACE if marks.in_place else OUT_OF_PLACE,
        options=value_key(keys),
        order=order_code(list(zip(plain, bare, strict=True))),
        orders=(
            *raw,
            *_orders(bare if checked is None else checked.bare),
            *_ends(plain),
            *_occurrences(spots),
        ),
        places=(*_outstanding(bare), _only_one(spots), *_outstanding_styles(bare)),
        columns=(*columns, ""),
        answers=(
            *(names_option(value, item, bare) for value in columns.values()),
            _stated(values, len(bare)),
        ),
    )


def versions_features(texts: Sequence[str], published: int, forms: Sequence[bytes] = ()) -> DrawFeatures:
    """The features of a document with versions of its own.

    Args:
        texts: at least two distinct texts.
        published: index of the published one.
        forms: of each version, a byte for each edited site; empty if unknown.
    """
    ordered = sorted(texts)
    union, alone = sketches_of_texts(["\n".join(ordered), texts[published]])
    by_forms = [UNKNOWN if place is None else place for place in _extremes(_first_forms(forms))]
    places = [*_outstanding(texts), *by_forms, *_outstanding_styles(texts)]
    drawn = [UNKNOWN if place == UNKNOWN else int(place == published) for place in places]
    return DrawFeatures(
        number=len(texts),
        equal=value_key(sorted(map(folded_key, texts))),
        sketches=alone + union,
        places=tuple(drawn),
    )


def rows_features(texts: Sequence[str]) -> DrawFeatures:
    """The features of a run of rows, in the published order."""
    return DrawFeatures(number=len(texts), equal=value_key(sorted(texts)), sketches=b"", orders=tuple(_orders(texts)))


def word_sketch(words: Iterable[str]) -> bytes:
    """A sketch of a set of words: equal bytes of two sketches estimate their share of common words (MinHash).

    Args:
        words: at least one.
    """
    hashes = np.array([xxhash.xxh32_intdigest(word.encode("utf-8", "surrogatepass")) for word in {*words}], np.uint32)
    values = _word_factors()[:, None] * (hashes ^ (hashes >> np.uint32(16)))[None, :]
    mixed = (values ^ (values >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    least = mixed.min(axis=1) * np.uint32(0x9E3779B1)  # the high bits of the minimum of many hashes are small
    return bytes((least >> np.uint32(24)).astype(np.uint8))


@cache
def _word_factors() -> np.ndarray:
    rng = np.random.RandomState(2)  # its numbers are the same in every version of NumPy
    return rng.randint(0, 1 << 31, WORD_SKETCH, dtype=np.uint32) * np.uint32(2) + np.uint32(1)


def value_key(value: Any) -> int:
    """A 64-bit key of a value of lists and texts."""
    data = json.dumps(value).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def order_code(values: Sequence[Any]) -> int:
    """The code of the order in which values stand; UNKNOWN unless all are distinct.

    ASCENDING, DESCENDING, or one of the other numbers below k!, in lexicographic order; for more than seven values 2.
    """
    ordered = sorted(values)
    if any(a == b for a, b in itertools.pairwise(ordered)):
        return UNKNOWN
    if list(values) == ordered:
        return ASCENDING
    if list(values) == ordered[::-1]:
        return DESCENDING
    if len(values) > _MOST_OPTIONS:
        return 2
    code, ranks = 0, [ordered.index(value) for value in values]
    while len(ranks) > 1:
        first, *ranks = ranks
        code = code * (len(ranks) + 1) + sum(rank < first for rank in ranks)
    return code + 1


def _orders(texts: Sequence[str]) -> list[int]:
    """Codes of the order of some texts by `ORDERED`."""
    numbers = list(map(_first_number, texts))
    return [
        order_code(list(map(folded, texts))),
        order_code([len(text.strip()) for text in texts]),
        UNKNOWN if None in numbers else order_code(numbers),
    ]


def _first_number(text: str) -> float | None:
    """The first number of a text, in any script."""
    match = _NUMBER.search(text)
    if match is None:
        return None
    whole, *behind = match[0].replace(",", "").split(".")
    value = float(f"{whole}.{''.join(behind)}" if behind else whole)
    before = text[: match.start()]
    return -value if before.endswith(("-", "\N{MINUS SIGN}")) and not before[-2:-1].isalnum() else value


def _ends(texts: Sequence[str]) -> list[int]:
    """Codes of the order of folded texts by how they end, where a mark of places may stand too."""
    words = [one.split() for one in texts]
    single = [next((word for word in reversed(each) if len(word) == 1), None) for each in words]
    return [
        order_code([each[-1] if each else "" for each in words]),
        order_code([one[-1:] for one in texts]),
        UNKNOWN if None in single else order_code(single),
    ]


def _occurrences(spots: Sequence[tuple[int, int] | None]) -> list[int]:
    """Codes of the order of options by their occurrence; UNKNOWN unless the other columns hold all of them."""
    places = [pair for pair in spots if pair is not None]
    if len(places) < len(spots):
        return [UNKNOWN, UNKNOWN]
    return [order_code([first for first, _ in places]), order_code([last for _, last in places])]


def _spot_in(rest: str, option: str) -> tuple[int, int] | None:
    """The first and the last position of an option in a text, as whole words if there are any; None for none."""
    first = rest.find(option) if option else -1
    if first < 0:
        return None
    whole, at = [], first
    while at >= 0:
        end = at + len(option)
        if not (rest[at - 1 : at].isalnum() or rest[end : end + 1].isalnum()):
            whole.append(at)
        at = rest.find(option, at + 1)
    return (whole[0], whole[-1]) if whole else (first, rest.rfind(option))


def _only_one(spots: Sequence[tuple[int, int] | None]) -> int:
    """The place of the only option that the other columns hold; UNKNOWN for none or several."""
    places = [place for place, pair in enumerate(spots) if pair is not None]
    return places[0] if len(places) == 1 else UNKNOWN


def _outstanding(texts: Sequence[str]) -> list[int]:
    """Places of the first and last text by code points, and of the one with the most and the least by `EXTREMES`."""
    order = _extremes(list(map(folded, texts)))
    pairs = [order, *map(_extremes, _values(texts))]
    return [UNKNOWN if place is None else place for pair in pairs for place in pair]


def _outstanding_styles(texts: Sequence[str]) -> list[int]:
    """Places of the text that alone has some, and of the one that alone has none, of each of `STYLES`.

    The last item of a list in prose ends in a full stop, and begins with "or"; its first begins with a capital.
    """
    ends = Counter(text.strip()[-1:] for text in texts)
    (usual, count), *_ = ends.most_common()
    own_end = count == len(texts) - 1 > 1  # all others end in the same character
    values = [
        (
            len(text) != len(" ".join(text.split())),
            text.strip()[:1].isupper(),
            own_end and text.strip()[-1:] != usual,
            _CONJUNCTION.match(text) is not None,
        )
        for text in texts
    ]
    pairs = [(_only(column, True), _only(column, False)) for column in zip(*values, strict=True)]
    return [UNKNOWN if place is None else place for pair in pairs for place in pair]


def _values(texts: Sequence[str]) -> list[list[float]]:
    """The value of each text by `EXTREMES`; an empty list where one has none."""
    numbers = [number for number in map(_first_number, texts) if number is not None]
    counts = [_counts(text) for text in texts]
    columns: list[list[float]] = [list(column) for column in zip(*counts, strict=True)]
    return [*columns[:2], numbers if len(numbers) == len(texts) else [], *columns[2:]]


def _counts(text: str) -> tuple[int, ...]:
    """Characters, words, capitals, digits, punctuation, non-ASCII characters and line breaks of a text."""
    kinds: Counter[str] = Counter()
    for character, count in Counter(text).items():
        for kind, holds in (
            ("capital", character.isupper()),
            ("digit", character.isdecimal()),
            ("punctuation", not character.isalnum() and not character.isspace()),
            ("other", not character.isascii()),
            ("break", character in "\r\n"),
        ):
            kinds[kind] += count * holds
    counted = [kinds[kind] for kind in ("capital", "digit", "punctuation", "other", "break")]
    return (len(text), len(text.split()), *counted)


def _first_forms(forms: Sequence[bytes]) -> list[float]:
    """Of each version, the number of sites with the first form; empty if forms are unknown."""
    return [float(form.count(0)) for form in forms]


def _extremes(values: Sequence[Any]) -> tuple[int | None, int | None]:
    """Places of the only largest and the only smallest value; None where several share it, or there are no values."""
    if not values:
        return None, None
    most, least = max(values), min(values)
    return _only(values, most), _only(values, least)


def _only(values: Sequence[Any], value: Any) -> int | None:
    return values.index(value) if values.count(value) == 1 else None


# --- columns that name an option


def names_answers(column: str) -> bool:
    """Whether the name of a column, such as `answer` or `label`, says that it holds right answers."""
    return _ANSWERS.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).casefold()) is not None


def names_option(value: Any, item: ChoiceItem, bare: Sequence[str]) -> int:
    """How the value of a column names an option of an item, with the option or the number; UNKNOWN if it does not.

    Args:
        value: a letter, a number, the text of an option, or a list with one of them or with a 1 among zeros.
        item: the item.
        bare: its options without marks.
    """
    number = len(item.options)
    if isinstance(value, (list, tuple)):
        return _of_list(value, item, bare)
    if isinstance(value, bool) or value is None:
        return UNKNOWN
    if isinstance(value, (int, float)):
        return NUMBER + int(value) if value in range(number + 1) else UNKNOWN
    text = str(value)
    if len(text) > 2 * max(map(len, item.options)):
        return UNKNOWN
    if digits := _DIGITS.fullmatch(text):
        return NUMBER + int(digits[1]) if int(digits[1]) <= number else UNKNOWN
    if letter := _LETTER.fullmatch(text):
        place = _LETTERS.index(letter[1].upper())
        return LETTER + place if place < number else UNKNOWN
    same = partial(_find_places, folded_key(text))
    places = same(map(folded_key, item.options)) or same(map(folded_key, bare))
    return TEXT + places[0] if len(places) == 1 else UNKNOWN


def _of_list(values: Sequence[Any], item: ChoiceItem, bare: Sequence[str]) -> int:
    """As `names_option` for a list: one value that names an option, or a 1 among zeros for each option."""
    if len(values) == 1:
        return UNKNOWN if isinstance(values[0], (list, tuple)) else names_option(values[0], item, bare)
    if len(values) == len(item.options) and all(one in (0, 1) for one in values) and sum(values) == 1:
        return TEXT + [int(one) for one in values].index(1)
    return UNKNOWN


def _find_places(wanted: str, keys: Iterable[str]) -> list[int]:
    return [place for place, one in enumerate(keys) if one == wanted]


def _stated(values: Sequence[str], number: int) -> int:
    """The option that a column states by letter or number within its text, such as "Answer: B"; UNKNOWN for none."""
    for value in values:
        for match in (_STATED.search(value), _STATED_LAST.search(value[-80:])):
            if match is None:
                continue
            place = _LETTERS.index(match[1].upper()) if match[1] else int(match[2]) - 1
            if place < number:
                return STATED + place
    return UNKNOWN
