"""The permutation test of a collection: its level on grouped data, where a t-test over documents alarms falsely."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, ttest_ind

from pipeline.answers.scored_collection import bound_of_blocks
from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.collection import (
    LEAST_BLOCKS,
    MOST_BLOCKS,
    Blocks,
    check_blocks,
    draw_blocks,
    joined_blocks,
    make_blocks,
    permutation_test,
)

LEVEL = 0.05
RUNS = 600
ERROR = math.sqrt(LEVEL * (1 - LEVEL) / RUNS)
"""Standard error of the share of false alarms at that level."""


SELECTION = SelectionConfig(name="members", detectors=["loss"], procedure="bh", alpha=0.1)


def p_of(blocks: Blocks, seed: int) -> float:
    """The p-value of 99 permutations, exact as that of 9,999 is."""
    test = permutation_test(blocks, seed, permutations=99)
    assert test is not None
    return test.p_value


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
        p_value = p_of(made, run)
        fitted = scores.mean(axis=1)
        t_test = ttest_ind(fitted[is_audited], fitted[~is_audited], alternative="greater").pvalue
        alarms += (p_value <= LEVEL, t_test <= LEVEL)
    exact, naive = alarms / RUNS
    assert exact < LEVEL + 4 * ERROR
    if most > 1:
        assert naive > 0.2
    else:
        assert naive < LEVEL + 4 * ERROR


def test_sizes_that_differ_between_the_roles_make_no_alarm() -> None:
    """Means of long posts vary less: only blocks of like size are exchanged."""
    rng = np.random.default_rng(6)
    alarms = 0
    for run in range(RUNS):
        sizes = np.concatenate([rng.integers(1, 6, 60), rng.integers(2, 9, 60)])
        post = np.repeat(np.arange(120), sizes)
        made = make_blocks(rng.normal(size=(post.size, 2)), post, post < 60, run)
        alarms += p_of(made, run) <= LEVEL
    assert alarms / RUNS < LEVEL + 4 * ERROR


@pytest.mark.parametrize(("auc", "power"), [(0.60, 0.33), (0.65, 0.75), (0.71, 0.98)])
def test_a_collection_half_of_which_was_trained_on_softly_is_noticed(auc: float, power: float) -> None:
    """300 audited documents, half trained on, 200 unseen, 5 columns correlated .81: power of METHODS 16.2.

    Ten half-splits had .12, .32 and .80. Four standard errors of 150 runs and .05 for 99 in place of 9,999
    permutations are allowed.
    """
    runs = 150
    rng = np.random.default_rng(7)
    noticed = 0
    for run in range(runs):
        common = rng.normal(size=(500, 1))
        scores = 0.9 * common + math.sqrt(1 - 0.81) * rng.normal(size=(500, 5))
        scores[:150] += math.sqrt(2) * norm.ppf(auc)
        noticed += p_of(make_blocks(scores, np.arange(500), np.arange(500) < 300, run), run) <= LEVEL
    assert noticed / runs > power - 0.05 - 4 * math.sqrt(power * (1 - power) / runs)
    assert noticed / runs > {0.60: 0.12, 0.65: 0.32, 0.71: 0.80}[auc]


def test_lower_scores_are_never_taken_for_training() -> None:
    rng = np.random.default_rng(9)
    scores = rng.normal(size=(200, 3))
    scores[:100] -= 1
    assert p_of(make_blocks(scores, np.arange(200), np.arange(200) < 100, 0), 0) == 1


def test_classes_of_size_with_one_role_only_allow_no_test() -> None:
    block = np.concatenate([np.repeat(np.arange(30), 2), np.arange(30, 60)])
    made = make_blocks(np.random.default_rng(1).normal(size=(90, 2)), block, np.arange(90) < 60, 0)
    assert permutation_test(made, 0) is None


# --- the count of blocks


def counted(scores: np.ndarray, block: np.ndarray, audited: np.ndarray, seed: int) -> int:
    """At least so many audited blocks contain a document that was trained on, at 95% confidence."""
    drawn = draw_blocks(scores[:, None], block, audited, np.arange(scores.size), seed)
    bound = bound_of_blocks(SELECTION, drawn, seed)
    assert bound is not None
    return bound.members_at_least


def grouped(rng: np.random.Generator, size: int, rho: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of 300 audited and 200 unseen documents in groups, the group of each, and who is audited."""
    group = np.repeat(np.arange(500), size)[:500]
    common = rng.normal(size=500)[group]
    return math.sqrt(rho) * common + math.sqrt(1 - rho) * rng.normal(size=500), group, np.arange(500) < 300


@pytest.mark.parametrize(("size", "rho"), [(5, 0.3), (10, 0.3), (10, 0.6), (30, 0.3)])
def test_the_count_of_groups_keeps_its_level_and_that_of_documents_does_not(size: int, rho: float) -> None:
    """With nothing trained in N > 0 in at most 5%; by documents it was .104, .180, .324 and .304 (METHODS 16.1)."""
    rng = np.random.default_rng(size)
    alarms = np.zeros(2)
    for run in range(RUNS):
        scores, group, audited = grouped(rng, size, rho)
        alarms += (counted(scores, group, audited, run) > 0, counted(scores, np.arange(500), audited, run) > 0)
    blocks, documents = alarms / RUNS
    assert blocks < LEVEL + 4 * ERROR
    assert documents > LEVEL + ERROR


def test_the_count_of_groups_notices_groups_that_were_trained_on() -> None:
    """Half of the groups of 10 trained on with an effect of 1 sd, rho .3: P(N > 0) is about .775 (METHODS 16.1)."""
    rng = np.random.default_rng(3)
    noticed = 0
    for run in range(RUNS):
        scores, group, audited = grouped(rng, 10, 0.3)
        noticed += counted(scores + ((group % 2 == 0) & audited), group, audited, run) > 0
    assert abs(noticed / RUNS - 0.775) < 0.03 + 4 * math.sqrt(0.775 * 0.225 / RUNS)


def test_blocks_have_the_mean_of_equally_many_documents_and_smaller_ones_none() -> None:
    sizes = [2, 3, 3, 3, 4, 1, 3, 3, 3, 3]
    block = np.repeat(np.arange(10), sizes)
    audited = block < 5
    drawn = draw_blocks(np.arange(28.0)[:, None], block, audited, np.arange(28), 0)
    assert (drawn.each, drawn.n_audited, drawn.n_smaller) == (3, 5, 1)
    assert drawn.audited.tolist() == [True] * 4 + [False] * 4
    assert drawn.scores[0, 0] == 3, "the mean of the three documents of the second block: 2, 3 and 4"
    order = np.random.default_rng(0).permutation(28)
    again = draw_blocks(np.arange(28.0)[order, None], block[order], audited[order], np.arange(28)[order], 0)
    assert again.scores.tolist() == drawn.scores.tolist(), "the draw is by the keys, whatever the order"
    singles = draw_blocks(
        np.arange(40.0)[:, None],
        np.r_[np.repeat(np.arange(5), 4), np.arange(5, 25)],
        np.arange(40) < 20,
        np.arange(40),
        0,
    )
    assert (singles.each, singles.n_smaller) == (1, 0), "only one role has groups"


def test_the_same_blocks_give_the_same_p_value_whatever_order_scale_and_ties() -> None:
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
