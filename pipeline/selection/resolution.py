"""How small a selection can be, and how many documents of known membership it takes for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from pipeline.selection.conditional import simes_grid, smallest_simes
from pipeline.selection.evalues import dependence_factor
from pipeline.selection.grid import Grid
from pipeline.selection.proportion import KERNEL_BANDWIDTH, least_storey
from pipeline.selection.step_up import ONE, harmonic_bound

ROUNDED_UP = 1 + Fraction(1, 1 << 22)
"""More than what td4eval's p-values lose by being rounded up to float32."""

MOST_KNOWN = 1 << 62
MOST_COUNTED = 1_000_000
"""Calibration documents up to which the factor of `ebh` is that of their grid; above, it is that of `by`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A procedure and how its p-values are made, as far as they say how small a selection can be."""

    procedure: str
    alpha: Fraction
    delta: Fraction | None = None  # of calibration conditional
    halved: bool = False  # half of the known documents are learnt from, and the others calibrate
    lambda_: Fraction | None = None  # of Storey's estimate; None: by default

    def calibrating(self, known: int) -> int:
        """How many of the known documents calibrate."""
        return known - known // 2 if self.halved else known


@dataclass(frozen=True, slots=True)
class Basis:
    """What the numbers of an answer's resolution refer to."""

    halved: bool = False  # as in `Rule`
    grouped: bool = False  # p-values are of the documents of each group
    share: float | None = None  # of nulls, as the procedure estimated it; None where it takes 1
    sentence: str | None = None  # all that there is to say, where calibration documents do not matter


PLAIN = Basis()
"""Of a procedure that takes a share of nulls of 1 and calibrates on all known documents."""


def fewest_selectable(rule: Rule, known: int, m: int, factor: Fraction | None = None) -> int:
    """The fewest documents that a selection of m audited ones can hold if it holds any.

    Args:
        rule: how they are selected.
        known: documents of the null role.
        m: audited documents, >= 1.
        factor: by which the procedure divides alpha; by default what it divides by at a share of nulls of 1.
    """
    n = rule.calibrating(known)
    factor = _factor(rule, n, m) if factor is None else factor
    return math.ceil(factor * m * _smallest(rule, n) / rule.alpha)


def fewest_at_best(rule: Rule, known: int, m: int) -> int:
    """As `fewest_selectable`, at the smallest share of nulls that the procedure can ever estimate; a lower limit."""
    n = rule.calibrating(known)
    factors: dict[str, Callable[[], Fraction]] = {
        "storey": lambda: least_storey(_grid(rule, n), m, rule.lambda_),
        "bky": lambda: (1 + rule.alpha) / m,
        "quantile": lambda: Fraction(1, m),
        "ptdi": lambda: Fraction(1, m),
        "kernel": lambda: min(ONE, (1 / Fraction(repr(KERNEL_BANDWIDTH)) + 1) / m),
        "ptdi_known_members": lambda: Fraction(0),
        "known_members": lambda: Fraction(0),
    }
    factor = factors.get(rule.procedure, lambda: _factor(rule, n, m))()
    return max(1, fewest_selectable(rule, known, m, factor))


def factor_at(rule: Rule, m: int, share: Fraction) -> Fraction:
    """What a procedure that estimates the share of nulls divides alpha by at this share."""
    return share * _factor(rule, 0, m)


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
    slack = ROUNDED_UP if rule.procedure == "td4eval" else ONE
    fixed = None if rule.procedure == "ebh" else factor

    def suffices(known: int) -> bool:
        n = rule.calibrating(known)
        divided_by = _factor(rule, n, m) if fixed is None else fixed
        return divided_by * slack * m * _smallest(rule, n) <= rule.alpha * selectable

    high = 1
    while high < MOST_KNOWN and not suffices(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _factor(rule: Rule, n: int, m: int) -> Fraction:
    """What the procedure divides alpha by at a share of nulls of 1."""
    if rule.procedure == "by":
        return harmonic_bound(m)
    if rule.procedure == "ebh" and n > MOST_COUNTED:
        return harmonic_bound(m)
    if rule.procedure == "ebh":
        return dependence_factor(_grid(rule, n), m, rule.alpha)
    return 1 + rule.alpha if rule.procedure == "bky" else ONE


def _smallest(rule: Rule, n: int) -> Fraction:
    """The smallest p-value against n calibration documents."""
    if n == 0:
        return ONE
    return Fraction(1, n + 1) if rule.delta is None else smallest_simes(n, rule.delta)


def _grid(rule: Rule, n: int) -> Grid:
    return Grid.uniform(max(1, n)) if rule.delta is None else simes_grid(max(1, n), rule.delta)
