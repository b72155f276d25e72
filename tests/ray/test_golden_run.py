"""The recorded scores of a real model come out of whole runs, whatever the number of actors."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.usefixtures("cluster")
def test_runs_in_this_process_and_on_a_cluster_give_the_recorded_scores(
    shared_folder: Path, smollm2_folder: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (shared_folder / "golden/smollm2_wikimia.jsonl").open(encoding="utf-8")][::8]
    with open(tmp_path / "golden.jsonl", "w") as file:
        for row in rows:
            lines = (shared_folder / f"data/wikimia/{row['length']}.jsonl").read_text(encoding="utf-8").splitlines()
            file.write(json.dumps({"text": json.loads(lines[row["row"]])["input"]}) + "\n")
    found: dict[int, list[dict[str, float]]] = {}
    for actors, cluster in ((1, "local"), (2, "ray")):
        config = build_config(
            {
                "run": str(tmp_path / f"run{actors}"),
                "model": {"path": str(smollm2_folder)},
                "corpus": {"audit": {"path": str(tmp_path / "golden.jsonl")}},
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
        assert run_audit(config, Reporter(Console(), quiet=True)).status.scored == len(rows)
        receipts = list(read_receipts(Store(config.run), "score"))
        assert len(receipts) > 2
        found[actors] = [r for receipt in receipts for r in pq.read_table(f"{config.run}/{receipt.data}").to_pylist()]
    assert found[1] == found[2], "the same bits, wherever they were computed"
    for row, scores in zip(rows, found[1], strict=True):
        for ours, theirs in COLUMNS.items():
            assert scores[ours] == pytest.approx(row[theirs], rel=1e-4), ours
