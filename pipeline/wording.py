"""Parts of sentences: numbers, shares, counts with their nouns, lists of names, suggestions."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction

MOST_DIGITS = 17
WRITTEN_DIGITS = 12
"""Maximum significant digits of a number that a user wrote; a number with more was computed."""

LISTED = 8
"""Maximum number of names in a line."""


def format_against(value: float, limit: float, digits: int = 2, kind: str = "f") -> str:
    """Format a number with `digits` digits, or more if rounding would move it across a limit.

    Args:
        value: finite.
        limit: the limit in the sentence.
        digits: digits after the point, or significant digits.
        kind: f: digits after the point (,f with thousands separators); g: significant digits.
    """
    for count in range(digits, MOST_DIGITS):
        text = f"{value:{kind[:-1]}.{count}{kind[-1]}}"
        shown = float(text.replace(",", ""))
        if (shown > limit, shown < limit) == (value > limit, value < limit):
            return text
    return repr(value)


def decimal(number: Fraction) -> str:
    """Format a finite decimal exactly, without exponent."""
    text = f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percentage(share: Fraction) -> str:
    """Format a share that is a finite decimal exactly as a percentage: 1/20 is 5%, 0.9999999 is 99.99999%."""
    return f"{decimal(100 * share)}%"


def at_most(share: float) -> Fraction:
    """A share in (0, 1) as written; a computed one, such as a part of alpha, rounded up to 3 digits."""
    number = Decimal(repr(share))
    if len(number.as_tuple().digits) > WRITTEN_DIGITS:
        number = Context(prec=3, rounding=ROUND_CEILING).plus(number)
    return Fraction(number)


def percent(share: float) -> str:
    """A share as a percentage, as written: 0.1 is 10%; a part of alpha is rounded up."""
    return percentage(at_most(float(share)))


def documents(count: int) -> str:
    """A count with its noun."""
    return f"{count:,} document{'' if count == 1 else 's'}"


def was(count: int) -> str:
    """The verb "was" or "were" for a count."""
    return "was" if count == 1 else "were"


def sample_of(limit: int) -> str:
    """States that only the first documents of each role were read."""
    return f"This is a sample: only the first {limit:,} documents of each role were read."


def some_of(names: Sequence[str]) -> str:
    """The first names, and the number of further ones."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def did_you_mean(name: str) -> str:
    """A suggestion of a name, which precedes the list of names."""
    return f"did you mean {name!r}? "


SHOWN_CHARACTERS = 80
"""Maximum length of a shown id."""


def short_id(doc_id: str) -> str:
    """An id in a sentence: on one line, and shortened."""
    line = " ".join(doc_id.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."
