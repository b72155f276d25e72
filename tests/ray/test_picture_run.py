"""A run over pictures by the command: to its answer, killed in mid-run and resumed, and refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from clusters import until
from commands import here
from finished import selection_digest
from picture_models import encoded, random_pictures, save_llava

GIVEN = "loss(part=description, caption=given)"


def write_pictures(path: Path, count: int, seed: int) -> dict[str, str]:
    """Write random pictures with random captions; the source of a corpus."""
    rng = np.random.default_rng(seed)
    words = ["a", "red", "blue", "house", "the", "quiet", "green", "river", "of", "one", "tree"]
    table = {
        "id": [f"{path.stem}-{row}" for row in range(count)],
        "image": [{"bytes": encoded(picture), "path": None} for picture in random_pictures([(32, 32)] * count, seed)],
        "caption": [" ".join(rng.choice(words, 6)) for _ in range(count)],
    }
    pq.write_table(pa.table(table), path, row_group_size=10)
    return {"path": str(path), "id": "id", "image": "image", "caption": "caption"}


@pytest.fixture
def audit(tmp_path: Path) -> str:
    """The audit.yaml of a tiny model and a few pictures."""
    save_llava(tmp_path / "model")
    config: dict[str, Any] = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "corpus": {
            "audit": write_pictures(tmp_path / "audit.parquet", 60, 1),
            "unseen": write_pictures(tmp_path / "unseen.parquet", 60, 2),
            "seen": write_pictures(tmp_path / "seen.parquet", 30, 3),
        },
        "detectors": [
            {"renyi": {"order": 0.5, "k": 1.0, "part": ["image", "description"]}},
            {"loss": {"part": "description", "caption": "given"}},
        ],
        "selections": [
            {"name": "members", "detectors": [GIVEN], "procedure": "bh", "alpha": 0.2},
            {"name": "known", "detectors": ["renyi(order=0.5, k=1.0, part=image)"], "procedure": "ptdi_known_members"},
        ],
        "resources": {"cluster": "local", "shard_bytes": 30_000, "actors": 1},
    }
    path = tmp_path / "audit.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_pictures_are_planned_compared_and_asked_again_and_a_killed_run_resumes_to_the_same_bytes(
    audit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "run", tmp_path / "cut"
    planned = json.loads(here(capsys, "plan", audit, "--json")[0])
    assert planned["roles"]["audit"]["shards"] > 1
    assert planned["estimated_seconds_one_worker"] > 0
    figures = json.loads(here(capsys, "evaluate", audit, "--json")[0])
    assert {row["detector"] for row in figures["rows"]} >= {"blind (pictures alone)", GIVEN}
    here(capsys, "run", audit)
    assert (whole / "report/report.html").exists()

    command = [sys.executable, "-m", "ray_jobs.cli", "run", audit, "--set", f"run={cut}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(list((cut / "receipts/describe").glob("*.json"))) >= 3, pause=0.005)
    process.kill()
    process.wait()
    done = {p.name: p.stat().st_mtime_ns for p in (cut / "receipts/describe").glob("[a-z]*.json")}
    assert len(done) >= 3
    assert not (cut / "finished.json").exists(), "the driver should have died in mid-run"
    assert json.loads(here(capsys, "status", str(cut), "--json", code=3)[0])["state"] == "incomplete"
    here(capsys, "run", audit, "--set", f"run={cut}")
    assert selection_digest(cut) == selection_digest(whole)
    assert {name: (cut / "receipts/describe" / name).stat().st_mtime_ns for name in done} == done

    chosen = json.loads(here(capsys, "select", str(whole), "--set", "selections.0.alpha=0.3", "--json")[0])
    assert chosen["selections"][0]["alpha"] == 0.3
    here(capsys, "verdict", str(whole))
