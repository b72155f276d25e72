"""A run over pictures by the command: to its answer, killed in mid-run and resumed, and refused in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.clusters import until
from tests.helpers.commands import here
from tests.helpers.finished import selection_digest
from tests.helpers.picture_models import picture_audit, write_pictures

GIVEN = "loss(part=description, caption=given)"


@pytest.fixture
def audit(tmp_path: Path, llava: Path) -> str:
    """The audit.yaml of a tiny model and a few pictures."""
    for seed, (role, count) in enumerate({"audit": 60, "unseen": 60, "seen": 30}.items()):
        write_pictures(tmp_path / f"{role}.parquet", count, seed)
    detectors = [
        {"renyi": {"order": 0.5, "k": 1.0, "part": ["image", "description"]}},
        {"loss": {"part": "description", "caption": "given"}},
    ]
    selections = [
        {"name": "members", "detectors": [GIVEN], "procedure": "bh", "alpha": 0.2},
        {"name": "known", "detectors": ["renyi(order=0.5, k=1.0, part=image)"], "procedure": "ptdi_known_members"},
    ]
    config = picture_audit(tmp_path, llava, detectors=detectors, selections=selections)
    config["corpus"]["seen"] = {**config["corpus"]["audit"], "path": str(tmp_path / "seen.parquet")}
    path = tmp_path / "audit.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.slow
def test_pictures_are_planned_compared_and_asked_again_and_resume_to_the_same_bytes(
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
    assert not (cut / "report").exists(), "the driver should have died in mid-run"
    assert json.loads(here(capsys, "status", str(cut), "--json", code=3)[0])["state"] == "incomplete"
    here(capsys, "run", audit, "--set", f"run={cut}")
    assert selection_digest(cut) == selection_digest(whole)
    assert {name: (cut / "receipts/describe" / name).stat().st_mtime_ns for name in done} == done

    chosen = json.loads(here(capsys, "select", str(whole), "--set", "selections.0.alpha=0.3", "--json")[0])
    assert chosen["selections"][0]["alpha"] == 0.3
    here(capsys, "verdict", str(whole))
