"""How small a selection can be, and how many documents of known membership it takes for one."""

from __future__ import annotations

import math
from fractions import Fraction

from pipeline.selection.procedures.record import Rule
from pipeline.selection.step_up import ONE

ROUNDED_UP = 1 + Fraction(1, 1 << 22)
"""More than what td4eval's p-values lose by being rounded up to float32."""

MOST_KNOWN = 1 << 62


def fewest_selectable(rule: Rule, known: int, m: int, factor: Fraction | None = None) -> int:
    """The fewest documents that a selection of m audited ones can hold if it holds any.

    Args:
        rule: how they are selected.
        known: documents of the null role.
        m: audited documents, >= 1.
        factor: by which the procedure divides alpha; by default what it divides by at a share of nulls of 1.
    """
    n = rule.calibrating(known)
    factor = rule.procedure.factor.at_one(rule, n, m) if factor is None else factor
    return math.ceil(factor * m * rule.smallest(n) / rule.alpha)


def fewest_at_best(rule: Rule, known: int, m: int) -> int:
    """As `fewest_selectable`, at the smallest share of nulls that the procedure can ever estimate; a lower limit."""
    factor = rule.procedure.factor.least or rule.procedure.factor.at_one
    return max(1, fewest_selectable(rule, known, m, factor(rule, rule.calibrating(known), m)))


def factor_at(rule: Rule, m: int, share: Fraction) -> Fraction:
    """What a procedure that estimates the share of nulls divides alpha by at this share."""
    return share * rule.procedure.factor.at_one(rule, 0, m)


def known_needed(rule: Rule, m: int, selectable: int, factor: Fraction | None = None) -> int:
    """How many documents of the null role let a selection of m audited documents be as small as `selectable`.

    One fewer would not: the least number that suffices, where more of them never make the fewest larger. That is so
    of every procedure but `ebh`, whose factor steps up here and there. Never more than `MOST_KNOWN`, which no smallest
    p-value of calibration conditional improves on.

    Args:
        rule: how they are selected.
        m: audited documents, >= 1.
        selectable: >= 1.
        factor: as in `fewest_selectable`.
    """
    slack = ROUNDED_UP if rule.procedure.fuses_p else ONE
    divisor = rule.procedure.factor
    fixed = None if divisor.steps else factor

    def suffices(known: int) -> bool:
        n = rule.calibrating(known)
        divided_by = divisor.at_one(rule, n, m) if fixed is None else fixed
        return divided_by * slack * m * rule.smallest(n) <= rule.alpha * selectable

    high = 1
    while high < MOST_KNOWN and not suffices(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
