"""The recorded scores of a real model come out of whole runs, whatever the number of actors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from pipeline.audit.description import build_config
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter

SHARES = [0.1, 0.2, 0.3, 0.5, 1.0]
COLUMNS = {"loss": "loss", "zlib": "zlib", "lowercase": "lowercase"}
COLUMNS |= {f"{ours}(k={k})": f"{theirs}_{k}" for k in SHARES for ours, theirs in
            (("min_k", "min_k"), ("min_k_plus_plus", "min_k++"))}  # fmt: skip


@pytest.fixture
def rows(shared_folder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Recorded scores; the texts are written to golden.jsonl."""
    rows = [json.loads(line) for line in (shared_folder / "golden/smollm2_wikimia.jsonl").open(encoding="utf-8")][::8]
    with open(tmp_path / "golden.jsonl", "w") as file:
        for row in rows:
            lines = (shared_folder / f"data/wikimia/{row['length']}.jsonl").read_text(encoding="utf-8").splitlines()
            file.write(json.dumps({"text": json.loads(lines[row["row"]])["input"]}) + "\n")
    return rows


def scores_of_a_run(folder: Path, model: Path, cluster: str, actors: int) -> list[dict[str, float]]:
    config = build_config(
        {
            "run": str(folder / f"{cluster}{actors}"),
            "model": {"path": str(model)},
            "corpus": {"audit": {"path": str(folder / "golden.jsonl")}},
            "detectors": [
                "loss",
                "zlib",
                "lowercase",
                {"min_k": {"k": SHARES}},
                {"min_k_plus_plus": {"k": SHARES}},
            ],
            "resources": {"cluster": cluster, "actors": actors, "shard_bytes": 800},
        }
    )
    run_audit(config, Reporter(Console(), quiet=True))
    receipts = list(read_receipts(Store(config.run), "score"))
    assert len(receipts) > 2
    return [row for receipt in receipts for row in pq.read_table(f"{config.run}/{receipt.data}").to_pylist()]


def test_a_run_gives_the_recorded_scores_whatever_the_number_of_threads(
    rows: list[dict[str, Any]], smollm2_folder: Path, tmp_path: Path
) -> None:
    one, two = (scores_of_a_run(tmp_path, smollm2_folder, "local", actors) for actors in (1, 2))
    assert one == two
    for row, scores in zip(rows, one, strict=True):
        for ours, theirs in COLUMNS.items():
            assert scores[ours] == pytest.approx(row[theirs], rel=1e-4), ours


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_gives_the_same_bits_of_a_real_model(
    rows: list[dict[str, Any]], smollm2_folder: Path, tmp_path: Path
) -> None:
    here, there = (scores_of_a_run(tmp_path, smollm2_folder, *place) for place in (("local", 1), ("ray", 2)))
    assert len(here) == len(rows)
    assert here == there, "wherever they were computed"
