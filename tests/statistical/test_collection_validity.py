"""The permutation test of a collection: its level on grouped data, where a t-test over documents alarms falsely."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_ind

from pipeline.errors import UserError
from pipeline.selection.collection import (
    LEAST_BLOCKS,
    MOST_BLOCKS,
    check_blocks,
    joined_blocks,
    make_blocks,
    permutation_test,
)

LEVEL = 0.05
RUNS = 600
ERROR = math.sqrt(LEVEL * (1 - LEVEL) / RUNS)
"""Standard error of the share of false alarms at that level."""


def posts(rng: np.random.Generator, audited: int, unseen: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores (documents, 3) of the parts of posts of one author, the post of each part, and who is audited.

    The parts of a post share its topic and style: nearly all that differs between documents differs between posts.
    """
    sizes = rng.integers(1, most + 1, audited + unseen)
    post = np.repeat(np.arange(audited + unseen), sizes)
    style = rng.normal(size=(audited + unseen, 3)) @ np.array([[1, 0.6, 0.3], [0, 0.8, 0.4], [0, 0, 0.9]])
    scores = 3 * style[post] + rng.normal(size=(post.size, 3))
    return scores, post, post < audited


@pytest.mark.parametrize(("audited", "unseen", "most"), [(40, 40, 1), (60, 30, 8), (25, 80, 20)])
def test_the_permutation_of_whole_blocks_keeps_its_level_and_a_t_test_does_not(
    audited: int, unseen: int, most: int
) -> None:
    """A share of false alarms has the standard error ERROR at the level: four of them are passed once in 30,000."""
    rng = np.random.default_rng(audited)
    alarms = np.zeros(2)
    for run in range(RUNS):
        scores, post, is_audited = posts(rng, audited, unseen, most)
        made = make_blocks(scores, joined_blocks(post, np.full(post.size, -1)), is_audited, run)
        (p_value,) = permutation_test(made, run, splits=1, permutations=99).p_values
        fitted = scores.mean(axis=1)
        t_test = ttest_ind(fitted[is_audited], fitted[~is_audited], alternative="greater").pvalue
        alarms += (p_value <= LEVEL, t_test <= LEVEL)
    exact, naive = alarms / RUNS
    assert abs(exact - LEVEL) < 4 * ERROR
    if most > 1:
        assert naive > 0.2
    else:
        assert naive < LEVEL + 4 * ERROR


def test_twice_the_median_of_ten_splits_alarms_no_more_often_than_its_level() -> None:
    runs = 100
    rng = np.random.default_rng(5)
    alarms = 0
    for run in range(runs):
        scores, post, audited = posts(rng, 40, 40, 4)
        alarms += permutation_test(make_blocks(scores, post, audited, run), run, permutations=199).p_value <= LEVEL
    assert alarms / runs < LEVEL + 4 * math.sqrt(LEVEL * (1 - LEVEL) / runs)


def test_sizes_that_differ_between_the_roles_make_no_alarm() -> None:
    """Means of long posts vary less: only blocks of like size are exchanged."""
    rng = np.random.default_rng(6)
    alarms = 0
    for run in range(RUNS):
        sizes = np.concatenate([rng.integers(1, 6, 60), rng.integers(2, 9, 60)])
        post = np.repeat(np.arange(120), sizes)
        made = make_blocks(rng.normal(size=(post.size, 2)), post, post < 60, run)
        alarms += permutation_test(made, run, splits=1, permutations=99).p_values[0] <= LEVEL
    assert abs(alarms / RUNS - LEVEL) < 4 * ERROR


def test_a_collection_half_of_which_was_trained_on_softly_is_noticed() -> None:
    """AUC .71 among 300 audited documents of which half were trained on: most collections give p <= .05."""
    rng = np.random.default_rng(7)
    shift = 0.78  # of a standard normal score: AUC .71
    noticed = 0
    for run in range(40):
        common = rng.normal(size=(500, 1))
        scores = 0.9 * common + math.sqrt(1 - 0.81) * rng.normal(size=(500, 5))
        scores[:150] += shift
        made = make_blocks(scores, np.arange(500), np.arange(500) < 300, run)
        noticed += permutation_test(made, run, permutations=999).p_value <= LEVEL
    assert noticed >= 24


def test_the_same_blocks_give_the_same_p_value_whatever_the_order_of_columns_scale_and_ties() -> None:
    rng = np.random.default_rng(8)
    scores = rng.normal(size=(100, 3))
    made = make_blocks(scores, np.arange(100), np.arange(100) < 50, 0)
    one = permutation_test(made, 3, permutations=999)
    assert one == permutation_test(made, 3, permutations=999)
    scaled = make_blocks(scores * [1e6, 1, 1e-6], np.arange(100), np.arange(100) < 50, 0)
    assert permutation_test(scaled, 3, permutations=999).p_value == pytest.approx(one.p_value, abs=0.01)
    flat = make_blocks(np.ones((100, 2)), np.arange(100), np.arange(100) < 50, 0)
    assert permutation_test(flat, 3, permutations=999).p_value == 1


def test_blocks_are_what_a_family_or_a_group_joins_and_mixed_ones_are_left_out() -> None:
    family = np.array([0, 0, 1, 2, 3, 4])
    group = np.array([-1, 0, 0, -1, 1, 1])
    assert joined_blocks(family, group).tolist() == [0, 0, 0, 1, 2, 2]
    audited = np.array([True, True, False, True, False, False])
    made = make_blocks(np.arange(6.0)[:, None], joined_blocks(family, group), audited, 0)
    assert made.n_mixed == 3
    assert made.scores[:, 0].tolist() == [3, 4.5]
    assert (made.sizes.tolist(), made.audited.tolist()) == ([1, 2], [True, False])


def test_of_very_many_blocks_a_part_is_drawn_and_that_by_the_seed() -> None:
    count = 3 * MOST_BLOCKS
    scores = np.arange(float(count))[:, None]
    one, same, other = (make_blocks(scores, np.arange(count), np.arange(count) < 2 * MOST_BLOCKS, s) for s in (0, 0, 1))
    assert one.audited.sum() == (~one.audited).sum() == MOST_BLOCKS
    assert np.array_equal(one.scores, same.scores)
    assert not np.array_equal(one.scores, other.scores)


def test_too_few_blocks_say_how_many_it_takes() -> None:
    few = make_blocks(np.zeros((60, 1)), np.arange(60), np.arange(60) < 45, 0)
    with pytest.raises(UserError, match=f"at least {LEAST_BLOCKS} blocks of audited and {LEAST_BLOCKS} of unseen.* 15"):
        check_blocks(few)
    groups = np.repeat(np.arange(30), 4)
    mixed = make_blocks(np.zeros((120, 1)), groups, np.arange(120) % 4 < 2, 0)
    with pytest.raises(UserError, match=r"120 documents are left out.*--blocks family"):
        check_blocks(mixed)
    unlike = np.concatenate([np.arange(30), 30 + np.repeat(np.arange(30), 8)])
    with pytest.raises(UserError, match="blocks of like size"):
        check_blocks(make_blocks(np.zeros((270, 1)), unlike, np.arange(270) < 30, 0))
