"""Claims about a benchmark that several contaminated models bend: what is clean under all of them ranks rightly."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.report.tables import as_text
from pipeline.selection.joint import joinable
from pipeline.trial.config import build_trial
from pipeline.trial.ranking import ranking_rows, ranking_tables, read_results
from tests.helpers.trials import pool, trial

NAME = "clean, under all models"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Results of four models; m0 knows all that the first pool was trained on, and m1 all of the second."""
    rng = np.random.default_rng(4)
    rows = []
    for model, accuracy in enumerate([0.3, 0.45, 0.6, 0.75]):
        right = rng.random(1500) < accuracy
        if model < 2:
            right |= pool(1500, 3.0, 0.5, seed=model).trained
        rows += [{"model": f"m{model}", "item": f"d{i}", "correct": bool(r)} for i, r in enumerate(right)]
    file = tmp_path_factory.mktemp("results") / "results.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def rows_of(path: str, seeds: tuple[int, ...], **settings: Any) -> list[dict[str, Any]]:
    pools = [pool(1500, 3.0, 0.5, seed=seed) for seed in seeds]
    selection = {"name": "clean", "direction": "clean", "detectors": ["loss"], "alpha": 0.2, **settings}
    config, _ = build_trial(trial(repeats=2, selections=[selection], split={"seen": 300}))
    return ranking_rows({}, config, pools, read_results(path, pools[0].ids))


def test_items_that_are_clean_under_all_contaminated_models_rank_the_models_rightly(path: str) -> None:
    rows = rows_of(path, (0, 1))
    joint = {row["model"]: row for row in rows if row["selection"] == NAME}
    assert [joint[f"m{i}"]["rank_all"] for i in range(4)] != [4, 3, 2, 1]
    assert [joint[f"m{i}"]["rank_selected"] for i in range(4)] == [4, 3, 2, 1]
    assert [joint[f"m{i}"]["rank_clean"] for i in range(4)] == [4, 3, 2, 1]
    assert joint["m0"]["spearman_selected"] > joint["m0"]["spearman_all"]
    assert "truly clean" in as_text(ranking_tables(rows, []))
    # what one model's selection calls clean, the other was trained on: m1 stays too high there
    alone = {row["model"]: row for row in rows if row["selection"] == "clean"}
    assert alone["m1"]["accuracy_selected"] > joint["m1"]["accuracy_selected"]


def test_a_bent_ranking_is_repaired_without_joint_rows_or_e_values_of_a_model(
    path: str,
) -> None:
    rows = rows_of(path, (1,))
    cheat = next(row for row in rows if row["model"] == "m1")
    assert (cheat["rank_clean"], cheat["rank_selected"], cheat["rank_all"] < 4) == (4, 4, True)
    assert rows[0]["spearman_selected"] > rows[0]["spearman_all"]
    assert {row["selection"] for row in rows} == {"clean"}, "one model has no joint rows"
    rows = rows_of(path, (0, 1), calibration="conditional")
    assert {row["selection"] for row in rows} == {"clean"}, "p-values without an e-value have none"


@pytest.mark.parametrize(
    ("settings", "valid"),
    [
        ({}, True),
        ({"calibration": "by_group"}, True),
        ({"calibration": "conditional"}, False),
        ({"procedure": "td4eval"}, False),
        ({"procedure": "td4eval", "reconformal": True}, True),
    ],
)
def test_only_p_values_that_are_valid_one_by_one_are_joined(settings: dict[str, Any], valid: bool) -> None:
    detectors = ["loss", "min_k"] if "procedure" in settings else ["loss"]
    selection = {"name": "clean", "direction": "clean", "detectors": detectors, **settings}
    config, _ = build_trial(trial(selections=[selection], documents={"path": "a.jsonl", "group": "g"}))
    assert joinable(config.selections[0]) == valid
