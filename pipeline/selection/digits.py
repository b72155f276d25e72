"""Numbers in sentences: rounded, but never to the other side of what they are held against."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction

MOST_DIGITS = 17
WRITTEN_DIGITS = 12
"""More significant digits than this nobody wrote: the number was computed."""


def beside(value: float, limit: float, digits: int = 2, kind: str = "f") -> str:
    """A number with so many digits, or as many as leave it on its side of a limit.

    Args:
        value: finite.
        limit: what the sentence holds it against.
        digits: after the point, or significant ones.
        kind: f counts digits after the point (,f with commas between thousands), g significant ones.
    """
    for count in range(digits, MOST_DIGITS):
        text = f"{value:{kind[:-1]}.{count}{kind[-1]}}"
        shown = float(text.replace(",", ""))
        if (shown > limit, shown < limit) == (value > limit, value < limit):
            return text
    return repr(value)


def decimal(number: Fraction) -> str:
    """A number that is a finite decimal, as it is: no rounding, no exponent."""
    text = f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percentage(share: Fraction) -> str:
    """A share that is a finite decimal as a percentage, as it is: 1/20 is 5%, 0.9999999 is 99.99999%."""
    return f"{decimal(100 * share)}%"


def at_most(share: float) -> Fraction:
    """A share in (0, 1) as it was written; one that was computed, such as a part of alpha, rounded up to 3 digits."""
    number = Decimal(repr(share))
    if len(number.as_tuple().digits) > WRITTEN_DIGITS:
        number = Context(prec=3, rounding=ROUND_CEILING).plus(number)
    return Fraction(number)
