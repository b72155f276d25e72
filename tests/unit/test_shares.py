"""Claims about intervals of accuracies: known values, and how often they cover, counted over all outcomes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from pipeline.selection.shares import difference_to_all, newcombe, paired_difference, wilson

SHARES = (0.02, 0.1, 0.25, 0.5, 0.8, 0.97)


def test_the_interval_of_a_share_is_the_published_one() -> None:
    """Newcombe 1998 (one share), table I, method 4."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2535, 0.3682), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0598, 0.1644), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.2005), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0018, 0.1963), abs=5e-5)


def test_the_interval_of_a_difference_is_the_published_one() -> None:
    """Newcombe 1998, table II, method 11: 56/70 - 48/80 and 9/10 - 3/10."""
    assert newcombe(56 / 70, 70, 48 / 80, 80) == pytest.approx((0.0428, 0.3422), abs=5e-5)
    assert newcombe(9 / 10, 10, 3 / 10, 10) == pytest.approx((0.1013, 0.8387), abs=5e-5)


def coverage(p: float, q: float, n: int, m: int) -> float:
    """How often the interval of the difference of part and all covers the truth: over all outcomes."""
    total = 0.0
    truth = m / (n + m) * (p - q)
    for i, weight in enumerate(binom.pmf(np.arange(n + 1), n, p)):
        for j, other in enumerate(binom.pmf(np.arange(m + 1), m, q)):
            if weight * other < 1e-9:
                continue
            _, low, high = difference_to_all(np.arange(n) < i, np.arange(m) < j) or (0, 0, 0)
            total += weight * other * (low - 1e-12 <= truth <= high + 1e-12)
    return float(total)


@pytest.mark.parametrize(("n", "m"), [(20, 40), (40, 15), (10, 10)])
def test_the_difference_of_clean_and_all_items_is_covered_as_often_as_stated(n: int, m: int) -> None:
    """By count, not by chance: at 36 pairs of accuracies, 95% on average and nowhere below 94%."""
    covered = [coverage(p, q, n, m) for p in SHARES for q in SHARES]
    assert np.mean(covered) >= 0.95
    assert min(covered) >= 0.94


@pytest.mark.parametrize("n", [10, 20, 60])
def test_the_paired_difference_of_two_models_is_covered_as_often_as_stated(n: int) -> None:
    """Multinomial outcomes of items that one, the other or neither gets right alone, over all of them."""
    covered = []
    for ahead in (0.02, 0.1, 0.3):
        for behind in (0.0, 0.05, 0.3):
            total = 0.0
            for a, weight in enumerate(binom.pmf(np.arange(n + 1), n, ahead)):
                rest = binom.pmf(np.arange(n - a + 1), n - a, behind / (1 - ahead))
                for b, other in enumerate(rest):
                    if weight * other < 1e-9:
                        continue
                    one = np.arange(n) < a
                    _, low, high = paired_difference(one, (np.arange(n) >= a) & (np.arange(n) < a + b))
                    total += weight * other * (low - 1e-12 <= ahead - behind <= high + 1e-12)
            covered.append(total)
    assert np.mean(covered) >= 0.95
    assert min(covered) >= 0.94


def test_results_between_right_and_wrong_are_covered_at_least_as_often() -> None:
    """Monte Carlo, four standard errors: scores such as an F1 vary less than right and wrong of the same mean."""
    rng, runs, hits, paired = np.random.default_rng(71), 1_500, 0, 0
    for _ in range(runs):
        part, rest = rng.beta(2, 3, 40), rng.beta(3, 1, 30)
        _, low, high = difference_to_all(part, rest) or (0, 0, 0)
        hits += low <= 30 / 70 * (0.4 - 0.75) <= high
        one = rng.beta(2, 2, 50)
        mean, low, high = paired_difference(one, np.clip(one - rng.random(50) * one, 0, 1))
        paired += low <= 0.25 <= high
        assert low <= mean <= high
    for count in (hits, paired):
        assert count / runs >= 0.95 - 4 * np.sqrt(0.05 * 0.95 / runs)


def test_no_part_has_no_difference_and_a_part_that_is_all_has_none_by_definition() -> None:
    assert difference_to_all(np.array([]), np.array([1.0])) is None
    assert difference_to_all(np.array([1.0, 0.0]), np.array([])) == (0.0, 0.0, 0.0)
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_the_difference_is_that_of_the_two_accuracies() -> None:
    rng = np.random.default_rng(72)
    part, rest = rng.integers(2, size=30).astype(float), rng.integers(2, size=12).astype(float)
    value, low, high = difference_to_all(part, rest) or (0, 0, 0)
    assert value == pytest.approx(part.mean() - np.concatenate([part, rest]).mean())
    assert low < value < high
