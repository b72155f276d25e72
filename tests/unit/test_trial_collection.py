"""A trial of the verdict: what is shown of a collection that was trained on, and of one that was not."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.answers.detection import CONFIDENCE
from pipeline.errors import UserError
from pipeline.selection.collection import PermutationTest, draw_blocks, joined_blocks, make_blocks, permutation_test
from pipeline.selection.engine import Scores
from pipeline.trial.config import TrialConfig, build_trial
from pipeline.trial.repeats import Pool
from pipeline.trial.verdict_trial import collection_rows, collection_table, measure_collections
from tests.helpers.trials import trial


def soft_pool(groups: bool = False) -> Pool:
    """Documents of which a half was trained in so softly that their scores move by one standard deviation."""
    rng, n = np.random.default_rng(0), 300
    trained = np.arange(n) % 2 == 1
    common = rng.normal(size=n) + trained
    columns = {name: common + 0.4 * rng.normal(size=n) for name in ("loss", "zlib")}
    names = pa.array([f"author {i // 6 * 2 + i % 2}" for i in range(n)]) if groups else None
    scores = Scores(columns, np.arange(n), names)
    return Pool([str(i) for i in range(n)], np.arange(n), trained, np.ones(n, dtype=bool), scores)


def configured(**settings: Any) -> TrialConfig:
    described = {"split": {"unseen": 80}, "detectors": ["loss", "zlib"], "repeats": 6, "verdict": True, **settings}
    return build_trial(trial(**described))[0]


def test_a_softly_trained_collection_is_shown_and_the_rest_of_it_is_not() -> None:
    measured = measure_collections(soft_pool(), configured(), 0)
    audited, untrained = collection_rows({}, measured)
    assert (audited["collection"], audited["trained"], audited["audited"]) == ("audited", 150, 220)
    assert audited["by_test"] == 1
    assert audited["by_test_low"] < CONFIDENCE, "six repeats prove little"
    assert (untrained["collection"], untrained["trained"], untrained["audited"]) == ("never trained on", 0, 70)
    assert untrained["by_test"] == 0
    assert measured == measure_collections(soft_pool(), configured(), 0)
    table = collection_table([audited, untrained], [])
    assert "6 repeats, 95% intervals over re-splits of these documents, this model" in str(table.title)
    assert table.row_count == 2


def test_groups_of_a_trial_move_whole_and_a_verdict_needs_a_selection_of_members() -> None:
    with pytest.raises(UserError, match="at least 20 blocks"):
        measure_collections(soft_pool(groups=True), configured(split={"unseen": 30}), 0)
    clean = [{"name": "clean", "direction": "clean", "detectors": ["loss"], "procedure": "bh"}]
    with pytest.raises(UserError, match="needs a selection of direction members"):
        configured(selections=clean)


def blocks_of_many_sizes() -> tuple[np.ndarray, np.ndarray]:
    """Scores and blocks of documents: 46 blocks of 1 to 33 documents, of which the first 20 are audited."""
    rng = np.random.default_rng(2)
    block = np.repeat(np.arange(46), [16, 16, 32, *rng.integers(1, 8, 40), 8, 8, 33])
    common = rng.normal(size=block.size)
    scores = np.stack([0.01 * common, common + 0.4 * rng.normal(size=block.size), 0 * common], axis=1)
    scores[block < 20] += [0.001, 0.2, 0]
    return scores, block


@pytest.mark.recorded
def test_the_permutation_test_of_blocks_of_many_sizes_is_the_recorded_one() -> None:
    """Of 20 audited and 26 unseen blocks; then of single documents, where one fold holds no audited ones."""
    (scores, block), number = blocks_of_many_sizes(), np.arange(183)
    made = make_blocks(scores, block, block < 20, 0)
    assert permutation_test(made, 3) == PermutationTest(0.3178, pytest.approx(0.55657143))
    assert made.differences == pytest.approx([0.33170361, 0.4536978, 0])
    tied = make_blocks(scores[:183, :1] > 0, number, number < 20, 0)
    assert permutation_test(tied, 6, permutations=1_199) == PermutationTest(280 / 1_200, pytest.approx(0.56704340))


def test_contradicting_detectors_show_nothing_and_at_most_5000_blocks_are_taken() -> None:
    (scores, block), number = blocks_of_many_sizes(), np.arange(10_001)
    opposite = make_blocks(np.stack([scores[:, 1], -scores[:, 1]], axis=1), block, block < 20, 0)
    assert permutation_test(opposite, 3).p_value == 1
    assert make_blocks(scores[:0], block[:0], block[:0] < 20, 0).sizes.size == 0
    many = make_blocks(number[:, None], number, number < 5_000, 0)
    assert (many.audited.sum(), many.scores.sum()) == (5_000, number.sum() - 7_200)


def test_blocks_join_a_family_or_group_and_count_by_four_in_five_of_either_role() -> None:
    """By the sizes of audited blocks 2: 8 of 10 have as many. One block of seven is of both roles."""
    assert joined_blocks(np.array([0, 0, 1, 2, 3, 4]), np.array([-1, 0, 0, 1, 1, -1])).tolist() == [0, 0, 0, 1, 1, 2]
    sizes = [1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 3]
    block, keys = np.repeat(np.arange(13), sizes), np.arange(51) ** 2
    drawn = draw_blocks(keys[:, None] + 0.0, block, (block < 10) | (keys == 34**2), keys, 0)
    assert (drawn.each, drawn.n_audited, drawn.n_smaller, drawn.n_mixed) == (2, 10, 2, 7)
    assert drawn.audited.tolist() == [True] * 8 + [False] * 2
    assert draw_blocks(keys[:, None], block, block >= 0, keys, 0).each == 1, "without blocks of the other role"
    other = 2 * drawn.scores[:, 0] - drawn.keys  # of two documents, of which one has the smaller key
    for number, *pair in zip([*range(2, 10), 11, 12], drawn.keys, other, strict=True):
        assert pair == sorted(set(pair) & set(keys[block == number].tolist()))
