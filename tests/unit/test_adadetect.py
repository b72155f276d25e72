"""Claims about the learnt score that hold whatever it learns."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.selection.procedures.adadetect import RIDGE, fit_discriminant, fit_score


def made_up(seed: int = 0, shift: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    calibration, mixture = rng.normal(size=(60, 3)), rng.normal(size=(120, 3))
    mixture[:50] += [shift, shift / 2, 0.0]
    return calibration, mixture


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(120)), st.permutations(range(60)))
def test_training_does_not_see_the_order_of_documents(mixed: list[int], known: list[int]) -> None:
    calibration, mixture = made_up()
    score = fit_score(calibration, mixture).score(mixture)
    assert np.array_equal(fit_score(calibration[known], mixture[mixed]).score(mixture), score)


def test_a_row_scores_the_same_bits_in_any_shard_and_after_a_journey() -> None:
    calibration, mixture = made_up()
    learnt = fit_score(calibration, mixture)
    whole = learnt.score(mixture)
    travelled = pickle.loads(pickle.dumps(learnt))
    assert np.array_equal(np.concatenate([travelled.score(mixture[i : i + 7]) for i in range(0, 120, 7)]), whole)
    assert whole.dtype == np.float64
    assert learnt.score(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize("shift", [2.0, -2.0], ids=["members", "clean"])
def test_documents_that_are_not_nulls_score_higher_in_either_direction(shift: float) -> None:
    calibration, mixture = made_up(shift=shift)
    score = fit_score(calibration, mixture).score(mixture)
    assert np.median(score[:50]) > np.quantile(score[50:], 0.8)


def test_constant_and_absurd_scores_do_no_harm() -> None:
    calibration, mixture = made_up()
    calibration[:, 2] = mixture[:, 2] = 4.0
    mixture[0, 0] = 1e200
    score = fit_score(calibration, mixture).score(mixture)
    assert np.isfinite(score).all()


def test_a_discriminant_does_not_see_the_order_of_documents_and_survives_constants() -> None:
    sought, pool = made_up(seed=1)
    sought[:, 2] = pool[:, 2] = 4.0
    pool[0, 0] = 1e200
    score = fit_discriminant(sought, pool).score(pool)
    assert np.isfinite(score).all()
    assert np.array_equal(fit_discriminant(sought[::-1], pool[::-1]).score(pool), score)
    assert np.isfinite(fit_discriminant(sought[:1], pool).score(pool)).all()
    with pytest.raises(UserError, match="documents to learn from and documents to rank, got 0 and 120"):
        fit_discriminant(sought[:0], pool)


@pytest.mark.parametrize("pool", [2, 3, 9])
def test_a_discriminant_has_the_pooled_covariance_with_two_means_taken_off(pool: int) -> None:
    known, rows = np.array([[3.0]]), np.arange(float(pool))[:, None]
    learnt = fit_discriminant(known, rows)
    low, high = np.quantile(rows, [0.16, 0.84])
    z = (rows - np.median(rows)) / ((high - low) / 2)
    covariance = (z**2).sum() / (len(known) + pool - 2) + RIDGE
    difference = (3.0 - np.median(rows)) / ((high - low) / 2) - z.mean()
    assert learnt.coefficients == pytest.approx([difference / covariance, 0.0])


def test_an_empty_half_is_refused_in_one_line() -> None:
    calibration, mixture = made_up()
    with pytest.raises(UserError, match="both halves, got 0 to learn from and 120 in the mixture"):
        fit_score(calibration[:0], mixture)
    with pytest.raises(UserError, match="both halves"):
        fit_score(calibration, mixture[:0])
