"""One error rate over a schedule of scans (docs/methods.md)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from pipeline.config.selection import SelectionConfig

PARTS = 10**12
"""Shares of a schedule without a horizon are integer multiples of 1 / PARTS, rounded down."""

ZETA = Fraction(22858, 10**4)
"""Exceeds the sum of 1 / j^1.6 over all j, 2.28577, so that no sum of shares reaches 1."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot of one scan in its schedule, and the alpha that its selection may spend."""

    number: int  # 1 for the first scan of the schedule
    alpha: Fraction  # of the whole schedule, in (0, 1)
    share: Fraction  # share of alpha of this scan, in (0, 1]; the shares of all scans sum to at most 1
    asked_before: bool = False  # whether its run had answered before the claim, which voids the guarantee

    @property
    def level(self) -> Fraction:
        """The alpha of this scan."""
        return self.alpha * self.share


@dataclass(frozen=True, slots=True)
class Level:
    """The error rate of a selection, and the confidence of its bounds."""

    alpha: Fraction  # in (0, 1)
    confidence: Fraction  # in (0, 1)
    slot: Slot | None = None

    @classmethod
    def of(cls, selection: SelectionConfig, slot: Slot | None) -> Level:
        """The level of a selection, or of its slot in a schedule."""
        if slot is None:
            return cls(selection.exact_alpha, selection.exact_confidence)
        return cls(slot.level, 1 - _rounded_down((1 - selection.exact_confidence) * slot.share), slot)


def _rounded_down(chance: Fraction) -> Fraction:
    """A failure probability rounded down to three significant digits, for a readable confidence."""
    whole = Context(prec=3, rounding=ROUND_FLOOR)
    return Fraction(whole.divide(Decimal(chance.numerator), Decimal(chance.denominator)))


def alpha_share(number: int, horizon: int | None) -> Fraction:
    """The share of alpha of a scan; all shares of a schedule sum to at most 1.

    1 / horizon; without a horizon proportional to 1 / number^1.6, rounded down, the same on every machine.

    Args:
        number: number of the scan, from 1; the ledger refuses numbers above the horizon.
        horizon: number of scans of the schedule, >= 1; None: unlimited.
    """
    if horizon is not None:
        return Fraction(1, horizon)

    def exceeds(parts: int) -> bool:  # parts / PARTS > 1 / (ZETA number^1.6), to the fifth power
        return (parts * ZETA) ** 5 * number**8 > PARTS**5

    return Fraction(bisect_left(range(1, PARTS), True, key=exceeds), PARTS)
