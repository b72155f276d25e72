"""A run directory of version 0.9.0 is read, or refused in one line that names the version and what to run."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from command import done, here

FILED = Path(__file__).with_name("expected") / "run-0.9.0.tar.gz"
REMADE = "(version 0.9.0 wrote no digests): seenset select {run} makes the answer again from the scores"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 40 audited and 60 unseen documents, beside its configuration and corpus; the model is not there."""
    with tarfile.open(FILED) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_answers_are_stated_once_they_are_made_again(run: Path, tmp_path: Path) -> None:
    filed = json.loads((run / "selection/members/summary.json").read_text())
    shutil.copytree(run, tmp_path / "other")
    readers = [
        ("status", run),
        ("report", run),
        ("verdict", run),
        ("export", run, "--list"),
        ("compare", run, tmp_path / "other"),
    ]
    for command in readers:
        ended = here(*command)
        assert (ended.code, ended.line.endswith(REMADE.format(run=run))) == (2, True), command
    done(here("select", run))
    done(here("select", tmp_path / "other"))
    for command in readers:
        done(here(*command))
    made = json.loads((run / "selection/members/summary.json").read_text())
    for name in ("n_audit", "n_selected", "alpha", "procedure", "threshold"):
        assert made[name] == filed[name]


def test_another_question_needs_no_model(run: Path) -> None:
    done(here("select", run, "--set", "selections.*.alpha=0.9"))
    assert json.loads((run / "selection/members/summary.json").read_text())["alpha"] == 0.9


def test_scores_of_two_versions_do_not_mix(run: Path, world: Path) -> None:
    ended = here("run", "audit.yaml")
    assert (ended.code, "no model at model" in ended.line) == (2, True)
    shutil.copytree(world / "model", "model")
    for command in (("run", "audit.yaml"), ("run", "audit.yaml", "--set", "seed=7")):
        ended = here(*command)
        assert ended.code == 2
        assert "holds the work of seenset 0.9.0" in ended.line
        assert ended.line.endswith("use another run directory")
    assert json.loads((run / "status.json").read_text())["state"] in ("complete", "failed")


def test_documents_are_not_tried_again_where_none_is_in_quarantine(run: Path) -> None:
    assert "nothing to try again" in done(here("retry", run)).out
