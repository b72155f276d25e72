"""Several contaminated models: repeats over one are no further models, and what an interval is over is said."""

import math

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config.selection import SelectionConfig
from pipeline.report.tables import as_text
from pipeline.trial.repeats import ROWS_SCHEMA, mean_exceeds, mean_interval, models_interval
from pipeline.trial.table import model_rows, model_table, selection_rows, selection_table
from pipeline.trial.trial_page import selection_figures
from pipeline.trial.trial_text import detector_title, interval_scope, verification

RUNS = 300

MEMBERS = SelectionConfig(name="members", detectors=["loss"], procedure="bh", alpha=0.1)


@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_the_interval_over_models_covers(spread: float) -> None:
    """Student's interval over normal means covers at its level; four standard errors are once in 30,000."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(RUNS):
        means = np.clip(rng.normal(0.3, spread, 3), 0.02, 0.98)
        samples = [rng.beta(6 * mean, 6 * (1 - mean), 30) for mean in means]
        interval = models_interval(samples)
        covered += interval[0] <= 0.3 <= interval[1]
    assert covered / RUNS > 0.95 - 4 * math.sqrt(0.95 * 0.05 / RUNS)


def test_models_that_agree_by_chance_leave_the_width_of_their_own_intervals() -> None:
    low, high = models_interval([np.zeros(30)] * 4) or (math.nan, math.nan)
    assert low == 0
    assert high == mean_interval(np.zeros(30))[1] > 0.05
    assert models_interval([np.zeros(30)] * 2) is None


def test_values_that_contradict_one_mean_leave_it_open() -> None:
    assert mean_interval(np.repeat([0.0, 1.0], 60)) == (0.0, 1.0)


def test_models_that_keep_a_target_contradict_it_as_rarely_as_they_may() -> None:
    """A true bound is contradicted with a probability of at most 2.5%, whatever the models' means below it."""
    rng = np.random.default_rng(1)
    error = math.sqrt(0.025 * 0.975 / RUNS)
    means = np.repeat([0.1, 0.02, 0.1], 30)
    wrong = sum(mean_exceeds(rng.binomial(4, means) / 4, 0.1) for _ in range(RUNS))
    assert wrong / RUNS <= 0.025 + 4 * error
    assert mean_exceeds(np.repeat([0.05, 0.6, 0.6], 30), 0.1)
    assert not mean_exceeds(np.empty(0), 0.1)


def repeats_of(models: list[list[int]]) -> pa.Table:
    """The rows of models whose repeats select ten documents, so many of them wrongly."""
    of_all = {
        "selection": "members",
        "n_audit": 100,
        "n_members": 50,
        "n_calibration": 80,
        "n_selected": 10,
        "n_sought": 50,
        "null_proportion": 1.0,
        "null_share": 0.5,
        "strict_selected": 10,
        "guarantee": "finite-sample",
    }
    places = [(model, repeat, n) for model, false in enumerate(models) for repeat, n in enumerate(false)]
    rows = [{**of_all, "model": model, "repeat": repeat, "n_false": n} for model, repeat, n in places]
    return pa.Table.from_pylist(rows, schema=ROWS_SCHEMA)


def test_the_table_of_three_models_says_what_intervals_are_over_and_how_they_differ() -> None:
    repeats = repeats_of([[0, 1] * 20, [1, 1] * 20, [2, 3] * 20])
    (row,) = selection_rows({}, [MEMBERS], repeats)
    assert (row["models"], row["repeats"]) == (3, 40)
    assert row["fdr"] == pytest.approx((0.05 + 0.1 + 0.25) / 3)
    assert row["fdr_spread"] == pytest.approx(np.std([0.05, 0.1, 0.25], ddof=1))
    assert row["fdr_low"] == 0
    assert row["fdr_high"] > 0.3
    assert row["contradicted"], "the third model's repeats contradict that it keeps the target"
    rows = model_rows({}, [MEMBERS], repeats)
    page = " ".join(as_text([selection_table([row], []), model_table(rows, [])]).split())
    assert "3 models of 40 repeats, 95% intervals over models (Student's t, 2 degrees of freedom)" in page
    assert "sd 0.104" in page
    assert "40 repeats, 95% intervals over re-splits of these documents, this model" in page
    assert [(one["model"], one["fdr"], one["contradicted"]) for one in rows] == [
        (1, 0.05, False),
        (2, pytest.approx(0.1), False),
        (3, pytest.approx(0.25), True),
    ]
    assert rows[0]["fdr_high"] == mean_interval(np.tile([0, 0.1], 20))[1]
    fdr, power = selection_figures([row], [])
    assert (fdr.file, power.file) == ("fdr.svg", "power.svg")
    assert interval_scope([row]) in fdr.alt
    extent = verification([row], [], 3).extent
    assert "averages over 3 contaminated models, of 40 random splits of these documents each" in extent
    assert "scatter about normally" in extent
    assert detector_title([{"models": 3}]).endswith("over documents, these 3 models")


def test_of_one_model_nothing_is_said_between_models_and_of_two_no_interval_is_given() -> None:
    (one,) = selection_rows({}, [MEMBERS], repeats_of([[0, 1] * 10]))
    assert one["fdr_spread"] is None
    assert interval_scope([one]) == "20 repeats, 95% intervals over re-splits of these documents, this model"
    assert "between models" not in as_text([selection_table([one], [])])
    (two,) = selection_rows({}, [MEMBERS], repeats_of([[0, 1] * 10, [1, 1] * 10]))
    assert (two["fdr_low"], two["contradicted"]) == (None, False)
    assert "0.075 (no interval)" in as_text([selection_table([two], [])])
    assert "of fewer than 3 models there is no interval" in interval_scope([two])
    assert "no interval" in selection_figures([two], [])[0].alt
    assert "fewer than 3 models" in verification([two], [], 2).extent
    assert "scatter" not in verification([one], [], 1).extent
    assert detector_title([{"models": 1}]).endswith("over documents, this model")
