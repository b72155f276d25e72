"""Parts of alpha: they are spent once, whatever the number of scans."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeline.selection.schedule import share_of


@pytest.mark.parametrize("horizon", [1, 3, 52])
def test_the_parts_of_a_schedule_with_an_end_are_even_and_sum_to_one(horizon: int) -> None:
    assert sum(share_of(number, horizon) for number in range(1, horizon + 1)) == 1


def test_the_parts_of_a_schedule_without_an_end_never_sum_to_more_than_one() -> None:
    last = 2000
    spent = sum(share_of(number, None) for number in range(1, last + 1))
    least_to_come, most_to_come = ((last + step) ** -0.6 / 0.6 / 2.28576566568013 for step in (1, 0))  # integrals
    assert float(spent) + most_to_come > 1 - 1e-4
    assert spent + Fraction(least_to_come) <= 1
    assert share_of(1, None) == pytest.approx(1 / 2.28576566568013, abs=1e-4)
