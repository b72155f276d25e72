"""Halvings divide no block, and their AUC and standard error are those of the published formulas."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from pipeline.checks.held_out_auc import LEAST_BLOCKS, Compared, auc_with_error, held_out


class First:
    def fit(self, features: np.ndarray, labels: np.ndarray) -> None:
        self.trained = features[:, 1]

    def decision_function(self, features: np.ndarray) -> np.ndarray:
        assert not np.isin(features[:, 1], self.trained).any(), "a block is on both sides"
        return np.asarray(features[:, 0])


def published(scores: np.ndarray, audited: np.ndarray, block: np.ndarray) -> tuple[float, float]:
    """AUC and variance by Obuchowski (1997), pair by pair."""
    pairs = np.sign(scores[audited][:, None] - scores[~audited][None, :]) / 2 + 0.5
    auc = pairs.mean()
    names = np.unique(block)
    x = np.array([(pairs.mean(axis=1) - auc)[block[audited] == name].sum() for name in names])
    y = np.array([(pairs.mean(axis=0) - auc)[block[~audited] == name].sum() for name in names])
    m, n = pairs.shape
    i10, i01, i = np.unique(block[audited]).size, np.unique(block[~audited]).size, names.size
    s10, s01 = i10 / ((i10 - 1) * m) * (x**2).sum(), i01 / ((i01 - 1) * n) * (y**2).sum()
    s11 = i / (i - 1) * (x * y).sum()
    return auc, s10 / m + s01 / n + 2 * s11 / (m * n)


@pytest.mark.parametrize("seed", range(5))
def test_the_standard_error_is_the_published_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    audited = np.arange(60) >= 25
    scores = np.round(rng.normal(size=60) + 0.3 * audited, 1)  # with ties
    block = np.arange(60) // 3  # one of them has documents of both roles
    auc, error = auc_with_error(Compared.of(audited, block), scores)
    expected, variance = published(scores, audited, block)
    assert auc == pytest.approx(expected)
    assert auc == pytest.approx(roc_auc_score(audited, scores))
    assert error == pytest.approx(math.sqrt(variance))


def test_a_perfect_auc_has_a_standard_error_and_equal_scores_the_largest() -> None:
    compared = Compared.of(np.arange(30) >= 20)
    extreme = 1 - 1 / (2 * 10 * 20)
    auc, error = auc_with_error(compared, np.arange(30.0))
    assert (auc, error) == (pytest.approx(1), pytest.approx(math.sqrt(extreme * (1 - extreme) / 10)))
    assert auc_with_error(compared, np.zeros(30)) == (pytest.approx(0.5), pytest.approx(math.sqrt(0.25 / 10)))


def test_a_document_of_twice_the_weight_counts_as_two() -> None:
    rng = np.random.default_rng(0)
    audited, scores = np.arange(40) >= 20, rng.normal(size=40)
    weights = np.where(np.arange(40) < 5, 2.0, 1.0)
    auc, _ = auc_with_error(Compared.of(audited, weights=weights), scores)
    twice = np.r_[np.arange(5), np.arange(40)]
    assert auc == pytest.approx(roc_auc_score(audited[twice], scores[twice]))


def test_halves_hold_whole_blocks_and_half_of_each_role() -> None:
    audited = np.arange(90) >= 30
    block = np.arange(90) // 3
    features = np.c_[np.random.default_rng(0).normal(size=90), block]
    held = held_out(features, Compared.of(audited, block), 7, First())
    for second in held.second:
        assert (second.reshape(30, 3).all(axis=1) | ~second.reshape(30, 3).any(axis=1)).all()
        assert (second[audited].sum(), second[~audited].sum()) == (30, 15)
    assert len({second.tobytes() for second in held.second}) == 5
    again = held_out(features, Compared.of(audited, block), 7, First())
    assert (again.second == held.second).all()


def test_too_few_blocks_of_a_role_make_no_test() -> None:
    audited = np.arange(40) >= 20
    few = np.r_[np.arange(20) % (LEAST_BLOCKS - 1), 10 + np.arange(20)]
    assert held_out(np.zeros((40, 2)), Compared.of(audited, few), 0, First()) is None
    both = np.r_[np.arange(20), np.arange(20)]
    assert held_out(np.zeros((40, 2)), Compared.of(audited, both), 0, First()) is None, "no block of one role alone"
