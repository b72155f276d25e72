"""Items of benchmarks as texts, and orders as versions: of their options or of the rows of a file.

Whether a document is left out, and which orders are its versions, depends on the unordered options or rows alone: a
rule that reads the published order would break the guarantee.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from hashlib import sha256
from typing import Any

from pipeline.config.corpus import fill_template
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.marks import option_marks
from pipeline.corpus.reasons import Reason
from pipeline.corpus.referring_options import refers_to_others

MOST_OPTIONS = 7
MOST_ORDERS = 24
"""Maximum number of versions of an item: the orders of four options. More orders are split into equal parts."""

COLUMNS = 4
"""Number of sets of positions whose orders are the versions of a run of rows."""

_LETTERS = [
    f"{''.join(letters)}. " for length in (1, 2) for letters in itertools.product(string.ascii_uppercase, repeat=length)
]
_PLAIN = (int, float, Decimal, date)

_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion once "
    "twice half first second third fourth fifth sixth seventh eighth ninth tenth "
    "january february march april may june july august september october november december "
    "monday tuesday wednesday thursday friday saturday sunday"
)
_NUMBER = re.compile(rf"[ivxlc]+|{'|'.join(_NUMBER_WORDS.split())}|\W*\d[\d.,:/^]*(st|nd|rd|th|s)?\W*", re.IGNORECASE)
_MEASURES = (  # units, and words around numbers
    "mm cm m km in ft mi mg g kg lb oz ml l s sec min h hr ms hz khz mhz ghz k c f v kv w kw j kj n pa kpa mol a ma "
    "% percent per degrees dollars cents euros pounds years months weeks days hours minutes seconds times meters "
    "metres miles feet inches bc ad bce ce am pm a.m. p.m. century centuries the of to and or about around between "
    "than less more over under at least most in on"
)


def item_text(
    template: str, values: Mapping[str, Any], text_problem: Callable[[Any], Unreadable | None]
) -> str | Unreadable:
    """The text of an item, whose columns hold texts, numbers, dates, truth values, or lists of texts, the options.

    Args:
        template: template of the text; each option is one line, with its mark or, where options have none, a letter.
        values: values of the columns of the template.
        text_problem: returns why a text cannot be scored.
    """
    written = {}
    for name, value in values.items():
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                return Unreadable(Reason.UNDECODABLE, f"column {name!r}: byte {error.start} is not UTF-8")
        if value is None or value != value:
            return Unreadable(Reason.NOT_TEXT, f"no value in column {name!r}")
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            if len(value) > len(_LETTERS):
                return Unreadable(
                    Reason.NOT_TEXT, f"column {name!r} holds {len(value):,} texts, more than {len(_LETTERS)} options"
                )
            marks = option_marks(value)
            before = _LETTERS if marks is None else marks.prefixes
            value = _option_lines(before, value if marks is None else marks.bare)
        elif isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, _PLAIN):
            value = str(value)
        if not isinstance(value, str):
            return Unreadable(Reason.NOT_TEXT, f"column {name!r} holds {_what_it_holds(value)}")
        if (problem := text_problem(value)) is not None:
            return Unreadable(problem.reason, f"column {name!r}: {problem.message}")
        written[name] = value
    return fill_template(template, written)


def _what_it_holds(value: Any) -> str:
    """What a value holds that is not rendered, in words."""
    if not isinstance(value, list):
        return f"a {type(value).__name__}, not a text, a number or a list of texts"
    if not value:
        return "an empty list"
    place, option = next((place, one) for place, one in enumerate(value, 1) if not isinstance(one, str))
    kind = "null" if option is None else f"a {type(option).__name__}, not a text"
    return f"a list in which option {place} of {len(value)} is {kind}"


def _option_lines(marks: Sequence[str], options: Sequence[str]) -> str:
    """The options of an item, one in a line behind its mark."""
    return "\n".join(f"{mark}{option}" for mark, option in zip(marks, options, strict=False))


def order_options(
    options: Any, column: str, values: Mapping[str, Any], template: str, keep_marks: bool = False
) -> tuple[list[str], int, list[str], list[bytes]] | Unreadable:
    """The orders of the options of an item as versions: texts, published index, kinds and forms of sites.

    All orders, sorted by SHA-256 of their texts, are cut into equal parts of at most `MOST_ORDERS`; the versions are
    those of the part with the published order, which is uniform among them if it was uniform among all. A site is a
    position; its form is the number of options that are shorter than the option at that position. Marks of places, such
    as "(A) ", stay in their places.

    Args:
        options: value of the column of options.
        column: name of that column.
        values: values of the other columns of the template.
        template: template of the text; each option is one line, with its mark or, where options have none, a letter.
        keep_marks: whether what looks like a mark is a part of its option.
    """
    if not isinstance(options, (list, tuple)) or not all(isinstance(one, str) and one.strip() for one in options):
        return Unreadable(Reason.NOT_TEXT, f"column {column!r} holds no list of texts")
    for name, value in values.items():
        if value is None:
            return Unreadable(Reason.NOT_TEXT, f"no value in column {name!r}")
    marks = None if keep_marks else option_marks(options)
    before = _LETTERS
    if marks is not None:
        before, options = list(marks.prefixes), marks.bare
    if (left := why_left_out(options)) is not None:
        return left
    texts = {}
    for order in itertools.permutations(range(len(options))):
        lines = _option_lines(before, [options[i] for i in order])
        texts[fill_template(template, {**values, column: lines})] = order
    (published, _), *_ = texts.items()  # permutations begin with the order as it stands
    ordered = sorted(texts, key=lambda text: sha256(text.encode(errors="surrogatepass")).digest())
    parts = -(-len(ordered) // MOST_ORDERS)
    size = len(ordered) // parts
    start = ordered.index(published) // size * size
    chosen = ordered[start : start + size]
    shorter = [sum(len(other) < len(one) for other in options) for one in options]
    kinds = [f"position {place + 1}" for place in range(len(options))]
    return chosen, chosen.index(published), kinds, [bytes(shorter[i] for i in texts[text]) for text in chosen]


def why_left_out(options: Sequence[str]) -> Unreadable | None:
    """Why the orders of some options are not equally likely; None if they may be. Does not depend on the order."""
    options = sorted(options)
    if not 2 <= len(options) <= MOST_OPTIONS:
        return _not_permutable("too few or many options", f"{len(options)}; 2 to {MOST_OPTIONS} are permuted")
    if len({one.strip().casefold() for one in options}) < len(options):
        return _not_permutable("equal options", "two are equal")
    if refers := [one for one in options if refers_to_others(one, options)]:
        detail = f"{refers[0][:40]!r} refers to others or has a place of its own"
        return _not_permutable("options that refer to others", detail)
    words = [one.casefold().split() for one in options]
    numbers = [[word for word in each if _NUMBER.fullmatch(word.strip(".,;()"))] for each in words]
    others = [tuple(word for word in each if not _NUMBER.fullmatch(word.strip(".,;()"))) for each in words]
    measures = all(word.strip(".,;()") in _MEASURES.split() for each in others for word in each)
    if all(numbers) and (measures or len(set(others)) == 1):
        return _not_permutable("ordered options", "all are numbers, dates or measures, which have an order")
    return None


def _not_permutable(cause: str, detail: str) -> Unreadable:
    return Unreadable(Reason.NOT_PERMUTABLE, f"{cause}: {detail}", cause)


def window_orders(
    texts: Sequence[Any], first: int, text_problem: Callable[[Any], Unreadable | None]
) -> tuple[list[str], int] | Unreadable:
    """Orders of consecutive rows as versions: texts, a line break between rows, and the index of the published one.

    The positions, shuffled by SHA-256 of their numbers, fill a grid of 4 columns row by row; positions of an incomplete
    row keep their texts. The versions are the at most 24 orders of the columns. These are a group of permutations, so
    the published order is uniform among them if it was uniform among all.

    Args:
        texts: texts of the rows, in the published order.
        first: number of the first row.
        text_problem: returns why a text cannot be scored.
    """
    for place, text in enumerate(texts):
        if (problem := text_problem(text)) is not None:
            return Unreadable(problem.reason, f"row {first + place}: {problem.message}")
    columns = min(COLUMNS, len(texts))
    places = sorted(range(len(texts)), key=lambda place: sha256(f"{first} {place}".encode()).digest())
    whole = len(texts) // columns * columns
    versions = Counter[str]()
    for order in itertools.permutations(range(columns)):
        version = list(texts)
        for cell, place in enumerate(places[:whole]):
            version[place] = texts[places[cell - cell % columns + order[cell % columns]]]
        versions["\n".join(version)] += 1
    # With equal rows every text has the same number of orders; rows with line breaks may violate this.
    if len(versions) < 2 or len(set(versions.values())) > 1:
        return _not_permutable("equal rows", f"orders of {len(texts)} row{'s' * (len(texts) != 1)} give the same text")
    published, *_ = versions  # permutations begin with the order as it stands
    ordered = sorted(versions, key=lambda text: sha256(text.encode(errors="surrogatepass")).digest())
    return ordered, ordered.index(published)
