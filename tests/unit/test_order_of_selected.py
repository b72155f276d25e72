"""Selected documents are listed by their p-value, then by their score, then by their place."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from finished import run
from made_up import sentence, write_audit, write_jsonl

from pipeline.audit.top_documents import read_attributions
from pipeline.store.files import Store

SHORT = [sentence(1000 + i, 10) for i in range(40)]
LONG = [sentence(i, 60 + 37 * i % 50) for i in range(50)]  # of which zlib scores the longest highest
LONGER = [sentence(2000 + i, 120 + 7 * i % 30) for i in range(50)]
SELECTIONS: dict[str, dict[str, Any]] = {
    "members": {"detectors": ["zlib"], "procedure": "bh"},
    "fused": {"detectors": ["loss", "zlib"], "procedure": "td4eval"},
    "learnt": {"detectors": ["loss", "zlib"], "procedure": "adadetect"},
    "clean": {"direction": "clean", "detectors": ["zlib"], "procedure": "bh"},
}


def listed(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / "run" / "selection" / name / "selected.parquet").to_pylist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("strongest")
    selections = [{"name": name, "alpha": 0.4, **settings} for name, settings in SELECTIONS.items()]
    corpus = {
        role: {"path": write_jsonl(folder / f"{role}.jsonl", texts), "id": "id"}
        for role, texts in (("audit", LONG), ("unseen", SHORT), ("seen", LONGER))
    }
    settings = {"detectors": ["loss", "zlib"], "selections": selections, "evidence": 7}
    run(write_audit(folder, tiny_model_folder, corpus=corpus, **settings))
    return folder


def test_of_documents_with_equal_p_values_the_strongest_score_comes_first(folder: Path) -> None:
    """They were in the order of the file, and tokens were shown of the first of these."""
    rows = listed(folder, "members")
    assert len({row["p_value"] for row in rows}) == 1
    scores = [row["zlib"] for row in rows]
    assert len(scores) > 40
    assert scores == sorted(scores, reverse=True)
    assert [row["row"] for row in rows] != sorted(row["row"] for row in rows)
    assert list(read_attributions(Store(str(folder / "run")), "members")) == [row["doc_id"] for row in rows[:7]]
    assert rows[0].keys() == {"doc_id", "p_value", "zlib", "source", "row", "text_key", "excerpt"}
    clean = [row["zlib"] for row in listed(folder, "clean")]
    assert len(clean) > 40
    assert clean == sorted(clean)
    assert pq.read_table(folder / "run/selection/clean/clean.parquet")["zlib"].to_pylist() == clean


def test_a_fused_statistic_orders_before_the_score_of_the_detector_of_the_largest_weight(folder: Path) -> None:
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
