"""Multiple-choice items as documents with versions: the orders of their options, if any order was as likely.

Whether an item is left out, and which orders are its versions, depends on the unordered options alone: a rule that
reads the published order would break the guarantee.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from pipeline.corpus.formats.base import Unreadable

MOST_OPTIONS = 7
MOST_ORDERS = 24
"""Versions of an item at most, the orders of four options; those of more options are split into equal parts."""

LEFT_OUT = frozenset({"options_number", "options_equal", "options_ordered", "options_refer"})
"""Reasons why an item is left out by rule, which is no error of its row."""

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
_REFERS = re.compile(
    r"\b(all|none|any|both|neither|either|each|two|one|some) (of )?(the )?(above|below|these|those|them|options|answers"
    r"|choices|statements|other|others|preceding|following)\b"
    r"|^\W*(both|neither|either|only)?\W*\(?([a-h]|[1-9]|[ivx]{1,4})\)?( only)?(\W*(,|and|or|nor|&)\W*\(?([a-h]|[1-9]"
    r"|[ivx]{1,4})\)?)+\W*( only)?\W*$"
    r"|^\W*(all|none|both|neither|other|others|unknown|[a-h] only)\W*$"
    r"|^(it )?(cannot|can not|can't) be (determined|known|inferred|answered)|^not enough information"
    r"|^no (change|error)\b",
    re.IGNORECASE,
)


def orders_of(
    options: Any, column: str, values: Mapping[str, Any], template: str
) -> tuple[list[str], int, list[str], list[bytes]] | Unreadable:
    """The orders of the options of an item as versions: texts, published index, kinds and forms of sites.

    All orders, sorted by SHA-256 of their texts, are cut into equal parts of at most `MOST_ORDERS`; the versions are
    those of the part with the published order, which is uniform among them if it was uniform among all. A site is a
    position, its form how many options are shorter than the one that stands there.

    Args:
        options: value of the column.
        column: of the options.
        values: of the other columns of the template.
        template: of the text; options stand on a line each, with a letter.
    """
    if not isinstance(options, (list, tuple)) or not all(isinstance(one, str) and one.strip() for one in options):
        return Unreadable("not_text", f"column {column!r} holds no list of texts")
    for name, value in values.items():
        if value is None:
            return Unreadable("not_text", f"no value in column {name!r}")
    if (left := why_left_out(options)) is not None:
        return left
    texts = {}
    for order in itertools.permutations(range(len(options))):
        lines = "\n".join(f"{letter}. {options[i]}" for letter, i in zip(string.ascii_uppercase, order, strict=False))
        texts[template.format_map({**values, column: lines})] = order
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
    """Why the orders of some options are not equally likely; None where they may be. Reads no order."""
    options = sorted(options)
    if not 2 <= len(options) <= MOST_OPTIONS:
        return Unreadable("options_number", f"{len(options)} options; 2 to {MOST_OPTIONS} are permuted")
    if len({one.strip().casefold() for one in options}) < len(options):
        return Unreadable("options_equal", "two options are equal")
    if refers := [one for one in options if _REFERS.search(one.strip())]:
        return Unreadable("options_refer", f"option {refers[0][:40]!r} refers to others or has a place of its own")
    words = [one.casefold().split() for one in options]
    numbers = [[word for word in each if _NUMBER.fullmatch(word.strip(".,;()"))] for each in words]
    others = [tuple(word for word in each if not _NUMBER.fullmatch(word.strip(".,;()"))) for each in words]
    measures = all(word.strip(".,;()") in _MEASURES.split() for each in others for word in each)
    if all(numbers) and (measures or len(set(others)) == 1):
        return Unreadable("options_ordered", "all options are numbers, dates or measures, which have an order")
    return None
