"""Claims about the ways to calibrate: given the calibration set, by group, and with ties broken at random."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.selection.calibrations import calibrate_by_group, ranks_by_group, simes_grid
from pipeline.selection.conformal import calibrate, ranks, tie_draws

TENTH = Fraction(1, 10)

# ---------------------------------------------------------------- calibration-conditional p-values


def coverage(b: list[float]) -> float:
    """P(U_(1) <= b_1, ..., U_(n) <= b_n) for n sorted uniform variables: at least i of them up to each b_i."""
    n = len(b)
    state = np.zeros(n + 1)  # probability of each number of variables up to the last b
    state[0] = 1.0
    before = 0.0
    for i, here in enumerate(b, start=1):
        q = min(1.0, (here - before) / (1 - before)) if before < 1 else 1.0
        moved = np.zeros(n + 1)
        for k in range(n + 1):
            if state[k]:
                left = n - k
                moved[k:] += state[k] * np.array(
                    [math.comb(left, j) * q**j * (1 - q) ** (left - j) for j in range(left + 1)]
                )
        moved[:i] = 0.0
        state, before = moved, here
    return float(state.sum())


@pytest.mark.parametrize("delta", ["0.05", "0.1", "0.5"])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 25, 60])
def test_simes_p_values_bound_all_order_statistics_with_exactly_the_promised_probability(n: int, delta: str) -> None:
    grid = simes_grid(n, Fraction(delta))
    assert coverage(grid.values[:-1].tolist()) == pytest.approx(1 - float(delta), abs=1e-9)


@given(st.integers(1, 80), st.fractions(Fraction(1, 1000), Fraction(999, 1000)))
@example(1, Fraction(91907, 92000))  # near 1 a logarithm of the rounded delta is too far off
def test_simes_p_values_are_the_formula_rounded_up(n: int, delta: Fraction) -> None:
    grid, s = simes_grid(n, delta), max(1, n // 2)
    for k in range(1, n + 1):
        i = n + 1 - k
        ratio = delta * math.comb(i, s) / Fraction(math.comb(n, s))  # (1 - b)^s, exact
        assert (1 - grid.p(k)) ** s <= ratio
        if ratio:
            assert float(grid.p(k)) == pytest.approx(1 - float(ratio) ** (1 / s), rel=1e-9)
    assert grid.p(n + 1) == 1


def test_simes_p_values_of_a_hundred_thousand_calibration_documents_stay_sharp() -> None:
    grid = simes_grid(100_000, TENTH)
    assert float(grid.p(1)) == pytest.approx(-math.expm1(math.log(0.1) / 50_000), rel=1e-12)
    assert grid.n == 100_000


# ---------------------------------------------------------------- by group


def test_a_document_is_ranked_within_its_group_and_no_other() -> None:
    rng = np.random.default_rng(2)
    names = np.array(["b", "a", "c"])
    known, audit = names[rng.integers(0, 3, 40)], names[rng.integers(0, 3, 60)]
    seen, scores = rng.integers(0, 9, 40).astype(float), rng.integers(-1, 10, 60).astype(float)
    calibration = calibrate_by_group(seen, known.tolist())
    for groups in (
        audit.tolist(),
        audit,
        pa.array(audit.tolist()),
        pa.chunked_array([audit[:10].tolist(), audit[10:].tolist()]),
    ):
        found = ranks_by_group(scores, groups, calibration, "members")
        for k, score, group in zip(found.tolist(), scores, audit, strict=True):
            own = seen[known == group]
            assert calibration.grid.p(k) == Fraction(1 + int((own >= score).sum()), own.size + 1)
    one = calibrate_by_group(seen, ["x"] * 40)
    assert ranks_by_group(scores, ["x"] * 60, one, "clean").tolist() == ranks(scores, calibrate(seen), "clean").tolist()
    assert ranks_by_group(np.empty(0), [], one, "clean").size == 0


def test_a_document_whose_group_cannot_be_calibrated_is_refused_in_one_line() -> None:
    calibration = calibrate_by_group(np.array([1.0, 2.0]), ["a", "b"])
    with pytest.raises(UserError, match="group 'z' has audit documents and no calibration documents"):
        ranks_by_group(np.array([0.0, 1.0]), ["a", "z"], calibration, "members")
    with pytest.raises(UserError, match="1 of 2 audit documents have no group"):
        ranks_by_group(np.array([0.0, 1.0]), ["a", None], calibration, "members")
    with pytest.raises(UserError, match="1 of 1 calibration documents have no group"):
        calibrate_by_group(np.array([1.0]), [None])
    with pytest.raises(UserError, match="no calibration documents"):
        calibrate_by_group(np.empty(0), [])
    with pytest.raises(UserError, match="NaN"):
        calibrate_by_group(np.array([1.0, math.nan]), ["a", "b"])


# ---------------------------------------------------------------- ties at random


@settings(max_examples=50)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=20),
    st.lists(st.integers(-4, 4), min_size=1, max_size=20),
    st.sampled_from(["members", "clean"]),
    st.integers(0, 5),
)
def test_random_ties_stay_between_the_best_and_the_worst_place_and_repeat(
    unseen: list[int], audit: list[int], direction: str, seed: int
) -> None:
    calibration, scores = calibrate(np.array(unseen)), np.array(audit)
    keys = np.random.default_rng(len(audit)).integers(-(2**63), 2**63, len(audit))
    worst = ranks(scores, calibration, direction)  # type: ignore[arg-type]
    found = ranks(scores, calibration, direction, tie_draws(keys, seed))  # type: ignore[arg-type]
    tied = np.array([sum(s == a for s in unseen) for a in audit])
    assert ((worst - tied <= found) & (found <= worst)).all()
    order = np.arange(len(audit))[::-1]
    again = ranks(scores[order], calibration, direction, tie_draws(keys[order], seed))  # type: ignore[arg-type]
    assert again[order].tolist() == found.tolist()


def test_random_ties_take_every_place_equally_often_and_differ_by_seed() -> None:
    calibration, count = calibrate(np.zeros(9)), 100_000
    keys = np.arange(count)  # keys that are as regular as can be
    first, second = (ranks(np.zeros(count), calibration, "members", tie_draws(keys, seed)) for seed in (0, 1))
    for found in (first, second):
        assert np.abs(np.bincount(found, minlength=11)[1:] - count / 10).max() < 4.5 * math.sqrt(count * 0.09)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(count)
