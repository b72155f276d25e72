"""Claims about intervals of accuracies: known values, and how often they cover, counted over all outcomes."""

import numpy as np
import pytest
from scipy.special import gammaln, xlogy
from scipy.stats import beta, binom

from pipeline.compare.ranking import paired_differences, rank_interval
from pipeline.selection.shares import difference_to_all, hoeffding_limit, paired_difference, share_interval

SHARES = np.unique([*np.linspace(0, 1, 21), 0.002, 0.01, 0.02, 0.98, 0.99, 0.998])


def first(count: int, size: int, start: int = 0) -> np.ndarray:
    """Results of which `count` are right, from `start` on: float64, (size,)."""
    at = np.arange(size)
    return ((at >= start) & (at < start + count)).astype(np.float64)


def test_the_interval_of_a_share_is_that_of_clopper_and_pearson() -> None:
    """Newcombe 1998 (one share), table I, method 5; and the Beta quantiles that define it."""
    assert share_interval(first(81, 263)) == pytest.approx((0.2527, 0.3676), abs=5e-5)
    assert share_interval(first(15, 148)) == pytest.approx((0.0578, 0.1617), abs=5e-5)
    assert share_interval(first(0, 20)) == pytest.approx((0.0, 0.1684), abs=5e-5)
    assert share_interval(first(1, 29)) == pytest.approx((0.0009, 0.1776), abs=5e-5)
    assert share_interval(first(7, 30), 0.9) == pytest.approx((beta.ppf(0.05, 7, 24), beta.ppf(0.95, 8, 23)))


def test_the_limits_of_shares_between_0_and_1_are_those_of_bentkus_and_hoeffding() -> None:
    """The larger of two lower limits: e times the binomial tail at the whole number below the sum, and Chernoff's."""
    shares = np.array([0.9, 0.7, 0.95, 0.8])
    low, high = share_interval(shares)
    assert 0 < low < shares.mean() < high <= 1
    assert share_interval(1 - shares) == pytest.approx((1 - high, 1 - low))
    assert share_interval(np.array([0.95, 0, 0, 0, 0]))[0] == pytest.approx(hoeffding_limit(0.19, 5, 0.025))
    assert share_interval(np.array([0.5, 0.5, 0.5, 0.5, 0]))[0] == pytest.approx(beta.ppf(0.025 / np.e, 2, 4))
    assert share_interval(np.array([0.5, 0.5, 0.5, 0.45, 0]))[0] < beta.ppf(0.025 / np.e, 2, 4)
    ahead, behind = np.tile([0.5, 0.5, 0, 0, 0], 20), np.tile([0, 0, 0.25, 0, 0], 20)
    (l1, u1), (l2, u2) = share_interval(ahead, 0.975), share_interval(behind, 0.975)
    assert paired_difference(ahead, behind) == (pytest.approx(0.15), pytest.approx(l1 - u2), pytest.approx(u1 - l2))


@pytest.mark.parametrize(("right", "wrong"), [(9, 3), (12, 1), (1, 12)])
def test_the_limits_of_a_paired_difference_are_the_extremes_over_rate_and_share(right: int, wrong: int) -> None:
    """Of 40 items: the rate of those that differ takes a fifth of the error, and the share of right ones the rest."""
    differ, difference = right + wrong, paired_difference(first(right, 40), first(wrong, 40, start=right))
    rates = beta.ppf([0.005, 0.995], [differ, differ + 1], [41 - differ, 40 - differ])
    ends = np.outer(rates, 2 * beta.ppf([0.02, 0.98], [right, right + 1], [wrong + 1, wrong]) - 1)
    assert difference == pytest.approx(((right - wrong) / 40, ends.min(), ends.max()))


def test_no_interval_of_a_share_covers_less_often_than_stated() -> None:
    for n in (1, 2, 5, 10, 30):
        ends = np.array([share_interval(first(k, n)) for k in range(n + 1)])
        covers = (ends[:, :1] <= SHARES) & (ends[:, 1:] >= SHARES)
        assert (binom.pmf(np.arange(n + 1)[:, None], n, SHARES) * covers).sum(axis=0).min() >= 0.95


@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 5), (10, 10), (20, 40), (40, 15)])
def test_the_difference_of_clean_and_all_items_is_covered_as_often_as_stated(n: int, m: int) -> None:
    """Over all outcomes, at every pair of accuracies."""
    made = [[difference_to_all(first(i, n), first(j, m)) or (0, 0, 0) for j in range(m + 1)] for i in range(n + 1)]
    ends = np.array(made)[..., 1:] * (n + m) / m
    p, q = (binom.pmf(np.arange(size + 1)[:, None], size, SHARES) for size in (n, m))
    truth = SHARES[:, None] - SHARES[None]
    covers = (ends[..., 0, None, None] <= truth + 1e-12) & (truth - 1e-12 <= ends[..., 1, None, None])
    assert np.einsum("ia,jb,ijab->ab", p, q, covers, optimize=True).min() >= 0.95


@pytest.mark.parametrize("n", [1, 2, 6, 8, 12, 20, 30])
def test_the_paired_difference_of_two_models_is_covered_at_least_as_often_as_stated(n: int) -> None:
    """Over all outcomes of items that one, the other or neither gets right alone."""
    counts = np.array([(a, b) for a in range(n + 1) for b in range(n + 1 - a)])
    ends = np.array([paired_difference(first(a, n), first(b, n, start=a))[1:] for a, b in counts])
    rest = n - counts.sum(axis=1)
    ways = gammaln(n + 1) - gammaln(counts + 1).sum(axis=1) - gammaln(rest + 1)
    worst = 1.0
    for p in SHARES:
        for q in SHARES[SHARES + p <= 1 + 1e-12]:
            covers = (ends[:, 0] <= p - q + 1e-12) & (p - q - 1e-12 <= ends[:, 1])
            log_probs = ways + xlogy(counts, [p, q]).sum(axis=1) + xlogy(rest, max(0.0, 1 - p - q))
            worst = min(worst, float(np.exp(log_probs)[covers].sum()))
    assert worst >= 0.95


def test_results_between_right_and_wrong_are_covered_at_least_as_often() -> None:
    """Monte Carlo, four standard errors: means of results such as an F1, some of which are rare and extreme."""
    rng, runs = np.random.default_rng(71), 500
    hits = np.zeros(3)
    for _ in range(runs):
        part, rest = rng.beta(2, 3, 40), rng.beta(3, 1, 30)
        _, low, high = difference_to_all(part, rest) or (0, 0, 0)
        hits[0] += low <= 30 / 70 * (0.4 - 0.75) <= high
        one = rng.beta(2, 2, 50)
        mean, low, high = paired_difference(
            one, np.where(rng.random(50) < 0.5, rng.random(50) * one, rng.beta(2, 2, 50))
        )
        hits[1] += low <= 0.125 <= high
        assert low <= mean <= high
        low, high = share_interval(np.where(rng.random(25) < 0.1, 0.99, 0.01))
        hits[2] += low <= 0.108 <= high
    assert hits.min() / runs >= 0.95 - 4 * np.sqrt(0.05 * 0.95 / runs)


def test_hoeffdings_limit_is_on_the_safe_side_of_the_exact_one() -> None:
    for successes in range(31):
        exact, _ = share_interval(first(successes, 30))
        assert hoeffding_limit(successes / 30, 30, 0.025) <= exact + 1e-12
    assert hoeffding_limit(1e-4, 4, 0.025) == 0
    for mean, size in ((0.3, 50), (0.9, 7), (0.01, 2000), (1e-3, 20_000)):  # size times the divergence is log(1 / tail)
        p = hoeffding_limit(mean, size, 0.025)
        divergence = mean * np.log(mean / p) + (1 - mean) * np.log((1 - mean) / (1 - p))
        assert (p < mean, size * divergence) == (True, pytest.approx(np.log(40)))
    assert hoeffding_limit(1.0, 7, 0.025) == pytest.approx(40 ** (-1 / 7))


@pytest.mark.parametrize("items", [1, 5, 10, 30])
def test_the_ranks_of_all_models_are_covered_together_at_least_as_often_as_stated(items: int) -> None:
    """Monte Carlo, four standard errors: three models of which two are equally good, on the same items."""
    rng, runs, covered = np.random.default_rng(72), 400, 0
    truth = [(1, 1), (2, 3), (2, 3)]  # ties share the ranks
    for _ in range(runs):
        values = (rng.random((3, items)) < [[0.9], [0.4], [0.4]]).astype(np.float64)
        differences = paired_differences(values)
        ends = [rank_interval(differences, index, 3) for index in range(3)]
        covered += all(low <= best and worst <= high for (low, high), (best, worst) in zip(ends, truth, strict=True))
    assert covered / runs >= 0.95 - 4 * np.sqrt(0.05 * 0.95 / runs)
    if items == 30:
        assert ends[0][1] < 3  # and they tell something
    assert rank_interval(paired_differences(np.ones((1, items))), 0, 1) == (1, 1), "of one model"
    differences = paired_differences(np.array([[1.0], [0.0]]))
    assert [rank_interval(differences, index, 2) for index in range(2)] == [(1, 2), (1, 2)], "of too few items"


def test_the_difference_is_that_of_the_two_accuracies_and_no_part_has_none() -> None:
    rng = np.random.default_rng(72)
    part, rest = rng.integers(2, size=30).astype(float), rng.integers(2, size=12).astype(float)
    value, low, high = difference_to_all(part, rest) or (0, 0, 0)
    assert value == pytest.approx(part.mean() - np.concatenate([part, rest]).mean())
    (l1, u1), (l2, u2) = share_interval(part, 0.975), share_interval(rest, 0.975)
    assert (low, high) == pytest.approx((12 / 42 * (l1 - u2), 12 / 42 * (u1 - l2)))
    assert difference_to_all(np.array([]), np.array([1.0])) is None
    assert difference_to_all(np.array([1.0, 0.0]), np.array([])) == (0.0, 0.0, 0.0)
    assert share_interval(np.array([])) == (0.0, 1.0)
