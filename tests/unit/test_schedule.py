"""Parts of alpha: they are spent once, whatever the number of scans."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
from test_fused_selections import verdict_of

from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import in_slot
from pipeline.selection.schedule import Level, Slot, alpha_share


def promise(asked_before: bool) -> str:
    """What is guaranteed for a list of a scan."""
    selection = SelectionConfig(name="s", detectors=["loss"])
    slot = Slot(2, Fraction(1, 10), alpha_share(2, 4), asked_before)
    answer = verdict_of(np.zeros((9, 1)), np.zeros((9, 1)), procedure="bh").answer
    return in_slot(answer, Level.of(selection, slot), selection).promise


def test_nothing_is_guaranteed_of_a_list_whose_question_an_answer_may_have_picked() -> None:
    assert "Here alpha is 0.025, the part of this scan. Over all scans of the schedule together" in promise(False)
    assert promise(True).startswith("Nothing is guaranteed for this list")
    assert "expected share" not in promise(True)


def test_the_parts_of_a_schedule_sum_to_one_and_without_an_end_never_to_more() -> None:
    for horizon in (1, 3, 52):
        assert [alpha_share(number, horizon) for number in range(1, horizon + 1)] == [Fraction(1, horizon)] * horizon
    last = 2000
    spent = sum(alpha_share(number, None) for number in range(1, last + 1))
    least_to_come, most_to_come = ((last + step) ** -0.6 / 0.6 / 2.28576566568013 for step in (1, 0))  # integrals
    assert float(spent) + most_to_come > 1 - 1e-4
    assert spent + Fraction(least_to_come) <= 1
    parts = [int(10**12 / Decimal("2.2858") / Decimal(number) ** Decimal("1.6")) for number in (1, 2, 7, last)]
    assert [alpha_share(number, None) for number in (1, 2, 7, last)] == [Fraction(part, 10**12) for part in parts]


def test_a_scan_has_its_share_of_alpha_and_of_the_chance_that_its_bounds_fail() -> None:
    selection = SelectionConfig(name="s", detectors=["loss"], confidence=0.95)
    level = Level.of(selection, Slot(1, Fraction(1, 10), Fraction(1, 3)))
    assert (level.alpha, level.confidence) == (Fraction(1, 30), 1 - Fraction("0.0166"))
