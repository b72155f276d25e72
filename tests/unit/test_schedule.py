"""Parts of alpha: they are spent once, whatever the number of scans."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
from test_fused_selections import verdict_of

from pipeline.config.selection import SelectionConfig
from pipeline.selection.conformal import Grid
from pipeline.selection.engine import in_slot
from pipeline.selection.schedule import Level, Slot, fewest_in_slot, known_in_slot, share_of
from pipeline.selection.step_up import dependence_factor


def promise(asked_before: bool) -> str:
    """What is guaranteed for a list of a scan."""
    selection = SelectionConfig(name="s", detectors=["loss"])
    slot = Slot(2, "spend", Fraction(1, 10), share_of(2, 4), 0, asked_before)
    answer = verdict_of(np.zeros((9, 1)), np.zeros((9, 1)), procedure="bh").answer
    return in_slot(answer, Level.of(selection, slot), selection).promise


def test_what_a_slot_of_e_lond_can_select_is_that_of_its_level() -> None:
    selection = SelectionConfig(name="s", detectors=["loss"], procedure="ebh")
    slot = Slot(2, "e-lond", Fraction(1, 10), Fraction(1, 4), 15)
    answer = verdict_of(np.zeros((99, 1)), np.zeros((9, 1)), procedure="ebh").answer
    for m, hundredth in ((1000, 10), (150, 1)):
        factor = dependence_factor(Grid.uniform(99), m, slot.level)
        fewest = fewest_in_slot(Fraction(1, 100), factor, m, slot)
        expected = (fewest, known_in_slot(m, hundredth, slot, factor))
        assert in_slot(answer, Level.of(selection, slot), selection).resolution(m) == expected
        assert fewest > 1


def test_nothing_is_guaranteed_of_a_list_whose_question_an_answer_may_have_picked() -> None:
    assert "Here alpha is 0.025, the part of this scan. Over all scans of the schedule together" in promise(False)
    assert promise(True).startswith("Nothing is guaranteed for this list")
    assert "expected share" not in promise(True)


def test_the_parts_of_a_schedule_sum_to_one_and_without_an_end_never_to_more() -> None:
    for horizon in (1, 3, 52):
        assert [share_of(number, horizon) for number in range(1, horizon + 1)] == [Fraction(1, horizon)] * horizon
    last = 2000
    spent = sum(share_of(number, None) for number in range(1, last + 1))
    least_to_come, most_to_come = ((last + step) ** -0.6 / 0.6 / 2.28576566568013 for step in (1, 0))  # integrals
    assert float(spent) + most_to_come > 1 - 1e-4
    assert spent + Fraction(least_to_come) <= 1
    parts = [int(10**12 / Decimal("2.2858") / Decimal(number) ** Decimal("1.6")) for number in (1, 2, 7, last)]
    assert [share_of(number, None) for number in (1, 2, 7, last)] == [Fraction(part, 10**12) for part in parts]


def test_known_documents_that_a_slot_needs_to_select_a_few() -> None:
    """The fewest n with n + 1 >= factor m / (level k), of m = 1,000 and a level of 1/20."""
    parts = (Fraction(1, 10), Fraction(1, 2))
    kinds = (("spend", 3), ("e-lond", 3), ("e-lond", 15), ("prds", 15), ("prds", 5_000))
    slots = [Slot(2, rule, *parts, before) for rule, before in kinds]
    assert [known_in_slot(1_000, 5, slot) for slot in slots] == [3_999, 2_499, 999, 3_940, 1_999]
    assert [fewest_in_slot(Fraction(1, 4_000), Fraction(1), 1_000, slot) for slot in slots] == [5, 2, 1, 5, 3]
    assert known_in_slot(1_000, 5, slots[0], Fraction(2)) == 7_999
    assert known_in_slot(1, 50, Slot(1, "spend", *parts, 0)) == 1


def test_a_scan_has_its_share_of_alpha_and_of_the_chance_that_its_bounds_fail() -> None:
    selection = SelectionConfig(name="s", detectors=["loss"], confidence=0.95)
    level = Level.of(selection, Slot(1, "spend", Fraction(1, 10), Fraction(1, 3), 0))
    assert (level.alpha, level.confidence) == (Fraction(1, 30), 1 - Fraction("0.0166"))
