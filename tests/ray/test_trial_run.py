"""`seenset trial`: a tiny model is contaminated, audited by `seenset run` and compared with the truth."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from pipeline.training import train as train_module
from pipeline.trial.config import load_trial
from pipeline.trial.trial import TrialOutcome
from ray_jobs import progress
from tests.helpers.commands import ended
from tests.helpers.finished import run_trial, written
from tests.helpers.made_up import sentence, write_jsonl

pytestmark = pytest.mark.floating_point

FINITE_SAMPLE: list[dict[str, Any]] = [
    {"name": "bh", "procedure": "bh"},
    {"name": "by", "procedure": "by", "alpha": 0.5},
    {"name": "ebh", "procedure": "ebh", "alpha": 0.5},
    {"name": "storey", "procedure": "storey"},
    {"name": "conditional", "procedure": "bh", "calibration": "conditional"},
    {"name": "random_ties", "procedure": "bh", "ties": "random"},
    {"name": "learnt", "procedure": "adadetect", "detectors": ["loss", "min_k"]},
    {"name": "fused", "procedure": "td4eval", "reconformal": True, "detectors": ["loss", "min_k"]},
]
KEPT = ("models", "input", "receipts", "scores", "repeats")
"""Folders of what no sweep makes again: all but tables, which are drawn anew, and an audit's answers."""

SELECTIONS = [{"detectors": ["loss"], "alpha": 0.2, **selection} for selection in FINITE_SAMPLE]


@pytest.fixture(scope="module")
def make_trial(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes documents and their trial.yaml: (**settings) -> path of the YAML. All share models and audits."""
    folder = tmp_path_factory.mktemp("trial")
    documents = write_jsonl(folder / "documents.jsonl", [sentence(i, 20) for i in range(300)] + ["", "one"])

    def make(name: str = "trial", **settings: Any) -> Path:
        config = {
            "run": str(folder / name),
            "work": str(folder / "work"),
            "model": {"path": str(tiny_model_folder)},
            "documents": {"path": documents, "id": "id"},
            "contaminate": {"method": "full", "epochs": 45, "batch_size": 8, "learning_rate": 0.01, "dtype": "float32"},
            "detectors": ["loss", "min_k"],
            "selections": SELECTIONS[:1],
            "repeats": 10,
            "resources": {"cluster": "local"},
            **settings,
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return make


def run(path: Path, console: Console | None = None, **arguments: Any) -> TrialOutcome:
    config, points = load_trial(str(path))
    return run_trial(config, points, console, **arguments)


@pytest.mark.slow
def test_every_finite_sample_procedure_keeps_its_guarantee_over_200_repeats(make_trial: Callable[..., Path]) -> None:
    path = make_trial("validity", selections=SELECTIONS, repeats=200)
    outcome = run(path)
    rows = {row["selection"]: row for row in outcome.facts["selections"]}
    assert rows.keys() == {selection["name"] for selection in SELECTIONS}
    for name, row in rows.items():
        assert row["guarantee"] == "finite-sample", name
        assert row["repeats"] == 200
        assert row["fdr_low"] <= row["target"], name
        assert row["contradicted"] is False, name
        assert row["power"] > 0.2, name
        assert row["null_share"] == pytest.approx(0.5)
    (detector, _) = outcome.facts["detectors"]
    assert 0.85 < detector["auc_low"] <= detector["auc"] <= detector["auc_high"] <= 1
    assert outcome.facts["left_out"] == {"empty": 1, "too_short": 1}
    assert outcome.facts["documents"] == 300
    # the audit itself is a `seenset run` with a report, and its answer is judged too
    audit = next(row for row in outcome.facts["audits"] if row["selection"] == "storey")
    assert (audit["audited"], audit["trained"]) == (200, 100)
    assert audit["power"] > 0.3
    assert Path(outcome.reports[0]).exists()
    (model,) = outcome.facts["models"]
    assert (Path(model["path"]) / "model.safetensors").exists()
    assert len(pq.read_table(Path(outcome.folder) / "selections.parquet")) == len(SELECTIONS)


@pytest.mark.slow
def test_the_first_repeat_says_what_the_audit_says(make_trial: Callable[..., Path]) -> None:
    outcome = run(make_trial("same", selections=SELECTIONS, repeats=1))
    assert outcome.facts["left_out"] == {"empty": 1, "too_short": 1}
    audits = {row["selection"]: row for row in outcome.facts["audits"]}
    for row in outcome.facts["selections"]:
        audit = audits[row["selection"]]
        assert row["selected"] == audit["selected"], row["selection"]
        assert row["power"] == pytest.approx(audit["power"])
        assert row["fdr"] == pytest.approx(audit["share_false"] or 0), "an empty selection counts as 0 in an average"


def test_no_label_reaches_scoring_or_selection(make_trial: Callable[..., Path]) -> None:
    outcome = run(make_trial("labels"))
    work = Path(outcome.facts["config"]["work"])
    for file in work.glob("audits/*/input/*.parquet"):
        assert pq.read_schema(file).names == ["id", "text", "group"]
        ids = pq.read_table(file)["id"].to_pylist()
        assert ids == sorted(ids, key=lambda name: int(name.split("-")[1]))  # nor does the order tell
    for manifest in work.glob("audits/*/run/manifest.json"):
        assert "truth" not in manifest.read_text()
        assert json.loads(manifest.read_text())["config"]["evidence"] == 0, "no document is read once more"
    assert not list(work.rglob("truth*"))


def test_sweeps_that_need_no_new_scores_never_train_or_score_again(make_trial: Callable[..., Path]) -> None:
    before = run(make_trial("first"))
    work = Path(before.facts["config"]["work"])
    files = written(work, *KEPT)
    sweep = {
        "selections.0.alpha": [0.1, 0.3],
        "split.unseen": [40, 80],
        "split.label_noise": [0.0, 0.1],
        "split.member_share": [0.2, 0.4],
    }
    settings = {"unseen": 100, "audited": 60}
    outcome = run(make_trial("swept", sweep=sweep, split=settings))
    assert written(work, *KEPT) == files
    assert len(outcome.facts["selections"]) == 16
    assert len(outcome.facts["detectors"]) == 2  # one row a detector: the sweep leaves the scores as they are
    by_alpha = {
        alpha: sum(row["selected"] for row in outcome.facts["selections"] if row["selections.0.alpha"] == alpha)
        for alpha in (0.1, 0.3)
    }
    assert by_alpha[0.1] < by_alpha[0.3]


def test_a_sweep_over_the_contamination_trains_each_once(make_trial: Callable[..., Path]) -> None:
    path = make_trial("copies", sweep={"contaminate.epochs": [1, 45]}, models=1)
    outcome = run(path)
    areas = [row["auc"] for row in outcome.facts["detectors"] if row["detector"] == "loss"]
    assert areas[0] < areas[1]
    files = written(Path(outcome.facts["config"]["work"]), *KEPT)
    assert run(path).facts["selections"] == outcome.facts["selections"]
    assert written(Path(outcome.facts["config"]["work"]), *KEPT) == files


class Interrupting(Console):
    """A console at which somebody presses Ctrl-C as a certain line comes."""

    def __init__(self, at: str) -> None:
        super().__init__(quiet=True)
        self.at = at
        self.lines: list[str] = []

    def print(self, *objects: Any, **arguments: Any) -> None:
        self.lines.append(str(objects[0]) if objects else "")
        if self.at and self.lines[-1].startswith(self.at):
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_trial_stopped_anywhere_goes_on_and_repeats_no_finished_work(
    make_trial: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "CHECKPOINT_SECONDS", 0.0)
    for name in ("LINE_SECONDS", "FIRST_LINE_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0)
    settings = {
        "sweep": {"selections.0.alpha": [0.1, 0.2, 0.3]},
        "resources": {"shard_documents": 20, "cluster": "local"},
        "contaminate": {"epochs": 2, "batch_size": 10, "dtype": "float32"},
    }
    whole = run(make_trial("whole", **settings, work=str(tmp_path / "whole")))
    path = make_trial("cut", **settings, work=str(tmp_path / "cut"))
    folder = Path(yaml.safe_load(path.read_text())["run"])
    for at in ("  step 10/20", "score: shards 3/", "repeats: point 2 of 3"):
        with pytest.raises(KeyboardInterrupt):
            run(path, Interrupting(at))
    files = {**written(tmp_path / "cut", *KEPT), **written(folder, *KEPT)}
    assert any("receipts" in name for name in files)
    assert len(list(folder.glob("repeats/*.parquet"))) == 1
    last = Interrupting("")
    outcome = run(path, last)
    after = {**written(tmp_path / "cut", *KEPT), **written(folder, *KEPT)}
    assert {name: after[name] for name in files} == files
    assert not any("step" in line or "training" in line for line in last.lines)
    assert outcome.facts["selections"] == whole.facts["selections"]
    assert outcome.facts["detectors"] == whole.facts["detectors"]
    assert not list((tmp_path / "cut/models").glob(".*"))  # the checkpoint is gone


def test_the_command_prints_tables_or_json(make_trial: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_trial("command"))
    assert ended("trial", path) == 0
    printed = capsys.readouterr().out
    assert "Selections compared with the truth" in printed
    assert "report: " in printed
    assert Path(printed.split("page: ")[1].strip()).read_text().startswith("<!DOCTYPE html>")
    ended("trial", path, "--json", "--set", "repeats=3")
    assert json.loads(capsys.readouterr().out)["selections"][0]["repeats"] == 3
