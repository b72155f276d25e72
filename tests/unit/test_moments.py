"""Claims about exact sums that hold for all numbers, in any order."""

from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.selection.thresholds import Moments, exact_sum

numbers = st.lists(st.floats(-1e300, 1e300), max_size=40)


@given(numbers)
def test_a_sum_is_that_of_exact_rationals(values: list[float]) -> None:
    assert exact_sum(np.array(values)) == sum(map(Fraction, values))


@given(numbers, st.randoms(use_true_random=False), st.floats(-10, 10))
def test_moments_do_not_depend_on_order_or_shards(values: list[float], random: object, centre: float) -> None:
    whole = Moments.of(np.array(values), centre)
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [Moments.of(np.array(shuffled[i::3]), centre) for i in range(3)]
    assert reduce(add, parts) == whole


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_mean_and_variance_are_those_of_the_numbers(values: list[float]) -> None:
    moments = Moments.of(np.array(values), float(np.median(values)))
    spread = 1e-9 * max(1.0, float(np.ptp(values)))
    assert moments.mean == pytest.approx(float(np.mean(values)), abs=spread)
    assert moments.variance == pytest.approx(float(np.var(values, ddof=1)), rel=1e-6, abs=spread**2)


def test_many_numbers_do_not_overflow_and_one_or_none_have_no_variance_or_mean() -> None:
    values = np.full(300_000, np.nextafter(1.0, 0.0))
    assert exact_sum(-values) == -300_000 * Fraction(float(values[0]))
    assert (Moments.of(np.array([3.0]), 1.0).variance, Moments.of(np.array([]), 1.5).mean) == (0, 1.5)
