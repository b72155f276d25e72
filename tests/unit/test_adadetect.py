"""Claims about the learnt score that hold whatever it learns."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from commands import user_error

from pipeline.selection.procedures.adadetect import RIDGE, fit_discriminant, fit_score


def made_up(seed: int = 0, shift: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    calibration, mixture = rng.normal(size=(60, 3)), rng.normal(size=(120, 3))
    mixture[:50] += [shift, shift / 2, 0.0]
    return calibration, mixture


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


@pytest.mark.parametrize("fit", [fit_score, fit_discriminant])
def test_what_is_learnt_does_not_see_the_order_of_documents_and_survives_constants_and_absurd_scores(fit: Any) -> None:
    known, rows = made_up(seed=1)
    known[:, 2] = rows[:, 2] = 4.0
    rows[0, 0] = 1e200
    score = fit(known, rows).score(rows)
    assert np.isfinite(score).all()
    rng = np.random.default_rng(0)
    assert np.array_equal(fit(rng.permutation(known), rng.permutation(rows)).score(rows), score)


@pytest.mark.parametrize("pool", [2, 3, 9])
def test_a_discriminant_has_the_pooled_covariance_with_two_means_taken_off(pool: int) -> None:
    known, rows = np.array([[3.0]]), np.arange(float(pool))[:, None]
    learnt = fit_discriminant(known, rows)
    low, high = np.quantile(rows, [0.16, 0.84])
    z = (rows - np.median(rows)) / ((high - low) / 2)
    covariance = (z**2).sum() / (len(known) + pool - 2) + RIDGE
    difference = (3.0 - np.median(rows)) / ((high - low) / 2) - z.mean()
    assert learnt.coefficients == pytest.approx([difference / covariance, 0.0])


def test_too_few_documents_to_learn_from_are_refused_in_one_line() -> None:
    known, rows = made_up()
    assert np.isfinite(fit_discriminant(known[:1], rows).score(rows)).all()
    for fit, given, part in (
        (fit_score, (known[:0], rows), "both halves, got 0 to learn from and 120 in the mixture"),
        (fit_score, (known, rows[:0]), "both halves"),
        (fit_discriminant, (known[:0], rows), "documents to learn from and documents to rank, got 0 and 120"),
    ):
        assert part in user_error(fit, *given)
