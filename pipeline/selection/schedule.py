"""One error rate over a schedule of scans (docs/methods.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from pipeline.config.selection import SelectionConfig
from pipeline.config.series import Rule
from pipeline.errors import UserError
from pipeline.selection.digits import percentage
from pipeline.selection.evalues import dependence_factor, largest_e_rank
from pipeline.selection.passes import Answer
from pipeline.selection.procedures import Decision, decide, decision
from pipeline.selection.rank_counts import RankCounts

PARTS = 10**12
"""Shares of a schedule without an end are whole numbers of 1 / PARTS, rounded down."""

ZETA = Fraction(22858, 10**4)
"""Above the sum of 1 / j^1.6 over all j, 2.28577, so that no sum of shares reaches 1."""

COVERED = {"prds": "bh", "e-lond": "ebh"}
"""The procedure that each rule but `spend` is proved for."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one scan in its schedule, and what its selection may spend there."""

    number: int  # 1 for the first scan of the schedule
    rule: Rule
    alpha: Fraction  # of the whole schedule, in (0, 1)
    share: Fraction  # of alpha that is this scan's, in (0, 1]; over all scans they sum to at most 1
    before: int  # documents that earlier scans had selected by the same selection, as filed when the slot was claimed
    asked_before: bool = False  # whether its run had answered before it took the slot: nothing is promised then

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
        """The selection's, or the part of a schedule's that is a slot's.

        Raises:
            UserError: the rule of the schedule does not cover the selection.
        """
        if slot is None:
            return cls(selection.exact_alpha, selection.exact_confidence)
        refuse_uncovered(selection, slot.rule)
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

    Raises:
        UserError: a number below 1, or one so late that nothing is left.
    """
    if number < 1:
        raise UserError(f"scans of a schedule are numbered from 1, got {number}")
    if horizon is not None:
        return Fraction(1, horizon)

    def fits(parts: int) -> bool:  # parts / PARTS <= 1 / (ZETA number^1.6), to the fifth power
        return Fraction(parts) ** 5 * ZETA**5 * number**8 <= PARTS**5

    parts = int(PARTS / float(ZETA) / number**1.6)
    while not fits(parts):
        parts -= 1
    while fits(parts + 1):
        parts += 1
    if parts == 0:
        raise UserError(f"scan {number} of a schedule without an end has no part of alpha left; open another ledger")
    return Fraction(parts, PARTS)


def refuse_uncovered(selection: SelectionConfig, rule: Rule) -> None:
    """Refuse a selection for which the rule of a schedule is not proved.

    Raises:
        UserError: with what would be covered.
    """
    where = f"selection {selection.name}: series.rule {rule}"
    if selection.calibration == "conditional":
        raise UserError(
            f"{where} does not cover calibration conditional, which may fail for a share delta of calibration sets in "
            "every scan anew; use calibration: pooled"
        )
    needed = COVERED.get(rule)
    if needed is None:
        return
    if selection.procedure != needed:
        raise UserError(
            f"{where} is proved for procedure {needed} alone, got {selection.procedure}; use procedure: {needed}, or "
            "rule: spend in a ledger of its own"
        )
    if selection.calibration == "weighted":
        raise UserError(f"{where} does not cover calibration weighted; use calibration: pooled")


def level_of_prds(slot: Slot, m: int) -> Fraction:
    """The level at which BH judges m documents in a slot: alpha g (m + before) / m, never above alpha.

    The cap takes nothing from the proof, as the level still does not fall where more was selected before. Without it a
    few documents after a rich history would be judged at a level of almost 1.
    """
    return min(slot.alpha, slot.level * (m + slot.before) / m)


def decide_in_slot(counts: RankCounts, slot: Slot) -> Decision:
    """Select by rule prds or e-lond.

    Guaranteed: over all scans of the schedule FDR <= alpha, for prds if the p-values of all scans together are PRDS,
    for e-lond if each null document is, taken by itself, exchangeable with its calibration documents. A scan's list
    alone has no such promise at its level, as `before` is itself made of scores.

    Args:
        counts: of the m >= 1 audit documents, quarantined ones at the last rank.
        slot: of rule prds or e-lond.

    Raises:
        UserError: no audit documents.
    """
    if counts.m == 0:
        raise UserError("no audit documents")
    if slot.rule == "prds":
        return decide("bh", counts, level_of_prds(slot, counts.m))
    factor, rank = largest_e_rank(counts, slot.level, slot.before)
    return decision("ebh", counts, slot.level, rank, details={"dependence_factor": float(factor)}, factor=factor)


def fewest_in_slot(smallest: Fraction, factor: Fraction, m: int, slot: Slot) -> int:
    """The fewest of m documents that a slot can select if it selects any.

    Args:
        smallest: the smallest p-value.
        factor: by which the procedure divides alpha, as at a share of nulls of 1.
        m: audited documents, >= 1.
        slot: of any rule.
    """
    if slot.rule == "prds":
        return max(1, -(-factor * m * smallest // level_of_prds(slot, m)))
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


def in_slot(answer: Answer, level: Level, selection: SelectionConfig) -> Answer:
    """An answer with the terms of its slot, and with what a slot can select; itself where there is none."""
    slot = level.slot
    if slot is None:
        return answer
    assumption = f"{answer.assumption} {_ASSUMED[slot.rule]}"
    answer = replace(answer, assumption=assumption, promise=_promise(answer, slot, selection))
    if slot.rule != "e-lond" or answer.counts is None:
        return answer
    grid = answer.counts.grid

    def resolution(m: int) -> tuple[int, int]:
        factor = dependence_factor(grid, m, slot.level)
        return fewest_in_slot(grid.p(1), factor, m, slot), known_in_slot(m, max(1, m // 100), slot, factor)

    return replace(answer, factor=None, resolution=resolution)


_FIXED = (
    "What each scan audits and asks, and how many scans there are, was settled without looking at what earlier scans "
    "answered."
)

_ASSUMED: dict[Rule, str] = {
    "spend": f"This holds in every scan of the schedule. {_FIXED}",
    "prds": "This holds for the documents of all scans of the schedule together, which share one unchanged model, "
    "score and set of calibration documents. "
    f"{_FIXED}",
    "e-lond": "This holds in every scan of the schedule; how the scans depend on one another, and whether the model "
    f"changes between them, is free. {_FIXED}",
}


def _promise(answer: Answer, slot: Slot, selection: SelectionConfig) -> str:
    """What holds of all scans together, and of this one where anything does."""
    if slot.asked_before:
        return (
            "Nothing is promised of this list, nor of all scans of the schedule together with it: its run had answered "
            "before it took its place, so what was asked may have been picked by an answer."
        )
    whole, part = percentage(slot.alpha), f"{float(slot.level):.3g}"
    over_all = (
        "Over all scans of the schedule together, the expected share of wrong documents among all that this question "
        f"selects is at most {whole}"
    )
    if slot.rule == "spend":
        here = f"{answer.promise} Here alpha is {part}, the part of this scan."
        if selection.procedure == "bound":
            sure = percentage(selection.exact_confidence)
            return f"{here} With {sure} confidence this holds of every scan of the schedule at once, each at its part."
        return f"{here} {over_all}{'' if answer.guarantee == 'finite-sample' else ', if every scan keeps its part'}."
    return (
        f"{over_all}, for any number of documents. That is an average over repetitions of the whole schedule with "
        "fresh documents: nothing is promised of the list of this scan alone, which may hold a larger share of wrong "
        "ones because earlier scans selected much, and no single document is proven to be selected rightly."
    )
