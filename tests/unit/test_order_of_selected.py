"""Selected documents of equal p-values are listed by the score that several detectors make."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.answers.top_documents import read_attributions
from pipeline.store.files import Store
from tests.helpers.finished import run
from tests.helpers.made_up import sentence, write_audit

SHORT = [sentence(1000 + i, 10) for i in range(40)]
LONG = [sentence(i, 60 + 37 * i % 50) for i in range(50)]  # of which zlib scores the longest highest


def listed(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / "run" / "selection" / name / "selected.parquet").to_pylist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("strongest")
    asked = {"detectors": ["loss", "zlib"], "alpha": 0.4}
    selections = [
        {"name": name, "procedure": procedure, **asked}
        for name, procedure in (("fused", "td4eval"), ("learnt", "adadetect"))
    ]
    settings = {"detectors": ["loss", "zlib"], "selections": selections, "evidence": 7}
    run(write_audit(folder, tiny_model_folder, LONG, SHORT, **settings))
    return folder


def test_a_fused_statistic_orders_before_the_score_of_the_heaviest_detector(folder: Path) -> None:
    rows = listed(folder, "fused")
    weights = json.loads((folder / "run/selection/fused/summary.json").read_text())["weights"]
    column = ["loss", "zlib"][weights.index(max(weights))]
    assert len(rows) > 20
    for one, other in pairwise(rows):
        assert (one["p_value"], -one[column]) <= (other["p_value"], -other[column]) or one["p_value"] == 1.0


def test_the_learnt_score_orders_documents_of_equal_p_values(folder: Path) -> None:
    shown = list(read_attributions(Store(str(folder / "run")), "learnt").values())
    rows = listed(folder, "learnt")
    assert len({row["p_value"] for row in rows[:7]}) == 1
    assert [one.ranked_by for one in shown] == ["adadetect"] * 7
    scores = [one.score for one in shown]
    assert scores == sorted(scores, reverse=True)
