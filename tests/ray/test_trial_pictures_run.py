"""`seenset trial` over pictures: captions are trained into a small vision-language model, and the audit finds them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.trials.pictures import make_model, make_pictures
from pipeline.trial.config import load_trial
from pipeline.trial.trial import TrialOutcome
from tests.helpers.finished import run_trial, written


def column(part: str, caption: str = "given") -> str:
    return f"renyi(order=0.5, k=1.0, part={part}, caption={caption})"


KEPT = ("models", "input", "receipts", "scores", "descriptions")
"""Folders of models and of the stages of audits."""

FINITE_SAMPLE = ("bh", "storey")
CONFIG: dict[str, Any] = {
    "model": {"path": "model"},
    "documents": {"path": "pictures.parquet", "id": "id", "image": "image", "caption": "caption"},
    "contaminate": {
        "share": 0.6,
        "method": "full",
        "epochs": 60,
        "batch_size": 6,
        "learning_rate": 3e-3,
        "dtype": "float32",
        "pass_tokens": 1024,
    },
    "split": {"unseen": 20},
    "detectors": [
        {"renyi": {"order": 0.5, "k": 1, "part": ["image", "description"], "caption": "given"}},
        {"renyi": {"order": 0.5, "k": 1, "part": "description", "caption": "generated"}},
    ],
    "selections": [
        {"name": name, "detectors": [column("description")], "procedure": name, "alpha": 0.2} for name in FINITE_SAMPLE
    ],
    "repeats": 50,
    "resources": {"cluster": "local"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trial")
    make_pictures(made / "pictures.parquet", 60)
    make_model(made / "model")
    return made


def carried_out(folder: Path, name: str, **settings: Any) -> TrialOutcome:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run": name, "work": "work", **settings}))
    config, points = load_trial(str(path))
    return run_trial(config, points)


@pytest.mark.slow
def test_captions_that_were_trained_in_are_found_and_the_guarantee_is_kept(folder: Path) -> None:
    outcome = carried_out(folder, "first")
    areas = {row["detector"]: row["auc"] for row in outcome.facts["detectors"]}
    assert areas[column("description")] > 0.95
    assert 0.25 < areas[column("image")] < 0.75
    for row in outcome.facts["selections"]:
        assert row["guarantee"] == "finite-sample"
        assert row["fdr_low"] <= row["target"], row["selection"]
        assert row["contradicted"] is False
        assert row["power"] > 0.5
    assert outcome.facts["documents"] == 60
    (audit, _) = outcome.facts["audits"]
    assert (audit["audited"], audit["trained"]) == (40, 24)
    assert Path(outcome.reports[0]).exists()
    before = written(folder / "work", *KEPT)
    assert any("descriptions" in name for name in before)
    shares = carried_out(folder, "second", sweep={"split.member_share": [0.3, 0.6], "split.unseen": [10, 20]})
    assert len(shares.facts["selections"]) == 4 * len(FINITE_SAMPLE)
    assert not any(row["contradicted"] for row in shares.facts["selections"])
    assert written(folder / "work", *KEPT) == before, "a sweep over the split neither trains nor scores again"
