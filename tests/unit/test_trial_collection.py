"""A trial of the verdict: what is shown of a collection that was trained on, and of one that was not."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_trial import trial

from pipeline.audit.detection import CONFIDENCE
from pipeline.errors import UserError
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
