"""A trial of the verdict: what is shown of a collection that was trained on, and of one that was not."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_trial import trial

from pipeline.audit.detection import CONFIDENCE
from pipeline.errors import UserError
from pipeline.selection.collection import PermutationTest, draw_blocks, make_blocks, permutation_test
from pipeline.selection.engine import Scores
from pipeline.trial.collection import collection_rows, collection_table, measure_collections
from pipeline.trial.config import TrialConfig, build_trial
from pipeline.trial.repeats import Pool


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


def test_the_groups_of_a_trial_move_whole_and_a_verdict_needs_a_selection_that_seeks_members() -> None:
    with pytest.raises(UserError, match="at least 20 blocks"):
        measure_collections(soft_pool(groups=True), configured(split={"unseen": 30}), 0)
    clean = [{"name": "clean", "direction": "clean", "detectors": ["loss"], "procedure": "bh"}]
    with pytest.raises(UserError, match="give a selection of direction members"):
        configured(selections=clean)


def test_the_permutation_test_of_blocks_of_many_sizes_is_the_recorded_one_and_takes_at_most_5000_of_a_role() -> None:
    rng = np.random.default_rng(11)
    block = np.repeat(np.arange(124), rng.integers(1, 8, 124))
    scores = rng.normal(size=(block.size, 3)) * [0.01, 1, 0] + (block < 24)[:, None] * [0.001, 0.1, 0]
    test = permutation_test(make_blocks(scores, block, block < 24, 0), 3, permutations=1_199)
    assert test == PermutationTest(260 / 1_200, pytest.approx(0.6294025974025974))
    many = make_blocks(np.zeros((5_020, 1)), np.arange(5_020), np.arange(5_020) < 5_001, 0)
    assert (many.audited.sum(), many.audited.size) == (5_000, 5_019)


def test_blocks_are_counted_by_as_many_documents_as_four_in_five_of_either_role_have() -> None:
    """By the sizes of audited blocks 2: 8 of 10 have as many. The last block is of both roles."""
    sizes = [1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 2]
    block, keys = np.repeat(np.arange(13), sizes), np.arange(50) ** 2
    drawn = draw_blocks(keys[:, None] + 0.0, block, (block < 10) | (keys == 49**2), keys, 0)
    assert (drawn.each, drawn.n_audited, drawn.n_smaller, drawn.n_mixed) == (2, 10, 2, 2)
    assert drawn.audited.tolist() == [True] * 8 + [False] * 2
    other = 2 * drawn.scores[:, 0] - drawn.keys  # of two documents, of which one has the smaller key
    for number, *pair in zip(range(2, 12), drawn.keys, other, strict=True):
        assert pair == sorted(set(pair) & set(keys[block == number].tolist()))
