"""One error rate over a schedule of scans (docs/methods.md)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from pipeline.config.selection import Rule, SelectionConfig

PARTS = 10**12
"""Shares of a schedule without an end are whole numbers of 1 / PARTS, rounded down."""

ZETA = Fraction(22858, 10**4)
"""Above the sum of 1 / j^1.6 over all j, 2.28577, so that no sum of shares reaches 1."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one scan in its schedule, and what its selection may spend there."""

    number: int  # 1 for the first scan of the schedule
    rule: Rule
    alpha: Fraction  # of the whole schedule, in (0, 1)
    share: Fraction  # of alpha that is this scan's, in (0, 1]; over all scans they sum to at most 1
    before: int  # documents that earlier scans had selected by the same selection, as filed when the slot was claimed
    asked_before: bool = False  # whether its run had answered before it took the slot: nothing is guaranteed then

    @property
    def level(self) -> Fraction:
        """What this scan spends of alpha."""
        return self.alpha * self.share


@dataclass(frozen=True, slots=True)
class Level:
    """At which error rate a selection decides, and with which confidence its bounds hold."""

    alpha: Fraction  # in (0, 1)
    confidence: Fraction  # in (0, 1)
    slot: Slot | None = None

    @classmethod
    def of(cls, selection: SelectionConfig, slot: Slot | None) -> Level:
        """The selection's, or the part of a schedule's that is a slot's."""
        if slot is None:
            return cls(selection.exact_alpha, selection.exact_confidence)
        return cls(slot.level, 1 - _rounded_down((1 - selection.exact_confidence) * slot.share), slot)


def _rounded_down(chance: Fraction) -> Fraction:
    """A chance to fail with three significant digits, never above it: a confidence is a number that people read."""
    whole = Context(prec=3, rounding=ROUND_FLOOR)
    return Fraction(whole.divide(Decimal(chance.numerator), Decimal(chance.denominator)))


def share_of(number: int, horizon: int | None) -> Fraction:
    """The part of alpha that is a scan's; all parts of a schedule sum to at most 1.

    1 / horizon each; without a horizon in proportion to 1 / number^1.6, rounded down, the same on every machine.

    Args:
        number: of the scan, 1 for the first; the ledger lets none pass the horizon.
        horizon: scans of the schedule, >= 1; None: no end.
    """
    if horizon is not None:
        return Fraction(1, horizon)

    def exceeds(parts: int) -> bool:  # parts / PARTS > 1 / (ZETA number^1.6), to the fifth power
        return (parts * ZETA) ** 5 * number**8 > PARTS**5

    return Fraction(bisect_left(range(1, PARTS), True, key=exceeds), PARTS)


def level_of_prds(slot: Slot, m: int) -> Fraction:
    """The level at which BH judges m documents in a slot: alpha g (m + before) / m, never above alpha.

    The cap takes nothing from the proof, as the level still does not fall where more was selected before. Without it a
    few documents after a rich history would be judged at a level of almost 1.
    """
    return min(slot.alpha, slot.level * (m + slot.before) / m)


def fewest_in_slot(smallest: Fraction, factor: Fraction, m: int, slot: Slot) -> int:
    """The fewest of m documents that a slot can select if it selects any.

    Args:
        smallest: the smallest p-value.
        factor: by which the procedure divides alpha, as at a share of nulls of 1.
        m: audited documents, >= 1.
        slot: of any rule.
    """
    if slot.rule == "prds":
        return -(-factor * m * smallest // level_of_prds(slot, m))
    before = slot.before if slot.rule == "e-lond" else 0
    return max(1, -(-factor * m * smallest // slot.level) - before)


def known_in_slot(m: int, selectable: int, slot: Slot, factor: Fraction = Fraction(1)) -> int:
    """Calibration documents that let BH select as few as `selectable` of m in a slot: n + 1 >= factor m / (level k).

    Args:
        m: audited documents, >= 1.
        selectable: k, >= 1.
        slot: of any rule; e-lond counts what was selected before to k, prds raises its level by it.
        factor: by which the procedure divides alpha.
    """
    level = level_of_prds(slot, m) if slot.rule == "prds" else slot.level
    counted = selectable + (slot.before if slot.rule == "e-lond" else 0)
    return max(1, -(-factor * m // (level * counted)) - 1)
