"""What arguments alone refuse is refused before a corpus is listed, a document is read or a model is opened."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import benchmark_run, copied

import seenset
from pipeline.store.files import Store
from pipeline.store.ledger import append_entry
from tests.helpers.commands import refusal, user_error

AUDIT = """
run: out
model: {path: nowhere}
corpus:
  audit: {path: none.jsonl}
  unseen: {path: none.jsonl}
selections: [{name: members, detectors: [loss]}]
"""
TRIAL = AUDIT[: AUDIT.index("corpus")] + "documents: {path: none.jsonl}" + AUDIT[AUDIT.index("\nselections") :]
CLEAN = ("--set", "selections.0.direction=clean")
COMMANDS = {
    "run: a reason": (["run", "audit.yaml", "--retry", "lost"], "--retry must be one of model_error"),
    "run: a limit": (["run", "audit.yaml", "--limit", "0"], "--limit must be at least 1, got 0"),
    "trial: a limit": (["trial", "trial.yaml", "--limit", "0"], "--limit must be at least 1, got 0"),
    "trial: no clean selection": (
        ["trial", "trial.yaml", "--ranking", "a.parquet"],
        "needs a selection with direction",
    ),
    "trial: no results": (["trial", "trial.yaml", "--ranking", "a.parquet", *CLEAN], "cannot read results a.parquet"),
    "plan: a file for a folder": (["plan", "audit.yaml", "--matched", "audit.yaml"], "--matched: audit.yaml is a file"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_an_argument_is_refused_before_a_corpus_is_listed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The corpus and the model do not exist, which would be refused next."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.yaml").write_text(AUDIT)
    (tmp_path / "trial.yaml").write_text(TRIAL)
    arguments, line = COMMANDS[case]
    assert line in refusal(capsys, *arguments)


def test_files_of_another_version_are_refused_before_a_corpus_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.yaml").write_text(AUDIT)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/manifest.json").write_text('{"schema": 1, "seenset": "0.9.0"}')
    append_entry(Store("ledger"), lambda entries: {"kind": "opening", "schema": 1, "rule": "prds"})
    form, rule = "was written by seenset", "this schedule has rule prds: finish it with version 0.10"
    for command in ("plan", "run"):
        for setting, line in (("run=old", form), ("against=old", form), ("series.ledger=ledger", rule)):
            assert line in refusal(capsys, command, "audit.yaml", "--set", setting)
    (tmp_path / "trial.yaml").write_text(TRIAL)
    shutil.copytree("old", "out/audits/0123456789ab/run")
    line = "name another folder as run of the trial, or use that version"
    assert line in refusal(capsys, "trial", "trial.yaml")
    (tmp_path / "audit.yaml").write_text(AUDIT.replace("run: out", "run: old"))
    assert form in user_error(seenset.audit, "audit.yaml")


@pytest.fixture(scope="module")
def unread(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two finished runs whose documents cannot be read."""
    folder = tmp_path_factory.mktemp("unread")
    source = benchmark_run(tmp_path_factory.getbasetemp(), tiny_model_folder)
    runs = [copied(source, folder / name, np.arange(60) < 30, seed, name) for seed, name in enumerate("ab")]
    for path in (path for run in runs for path in run.rglob("*.parquet") if path.parent.name != "clean"):
        path.write_bytes(b"")  # of `clean` the lists stay, whose digests every reader compares first
    return runs


def test_options_of_several_runs_are_refused_before_their_documents_are_read(
    unread: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "alpha must be in (0, 1), got 2"
    assert line in refusal(capsys, "joint", *unread, "--alpha", "2", "--output", tmp_path / "out")
    ranked = ["rank", tmp_path / "none", "--output", tmp_path / "out", "--run", unread[0]]
    assert line in refusal(capsys, *ranked, "--run", unread[1], "--alpha", "2")
    assert "one run's selection has another alpha" in refusal(capsys, *ranked, "--alpha", "0.1")
    assert f"no results {tmp_path / 'none'}" in refusal(capsys, *ranked)


def test_a_setting_that_needs_scoring_is_refused_before_the_scores_are_read(
    unread: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "seed needs seenset run" in refusal(capsys, "select", unread[0], "--set", "seed=2")


def test_arguments_in_python_are_refused_before_a_model_is_opened(tmp_path: Path) -> None:
    model = str(tmp_path / "nowhere")
    assert user_error(seenset.score, model, ["A text."], batch_tokens=0) == "batch_tokens must be at least 1, got 0"
    versions = seenset.Versions(("one", "two"), (("It is a colour.", "It is a color."), ("A b.", "B a.")), (1, 0))
    audited: list[tuple[dict[str, Any], str]] = [
        ({"alpha": 1.5}, "alpha must be in (0, 1), got 1.5"),
        ({"reference": 5}, "model must be a path, a ModelConfig or an opened model, got int"),
        ({"max_tokens": 1}, "max_tokens must be at least 2, got 1"),
    ]
    for arguments, line in audited:
        assert user_error(seenset.audit_versions, model, versions, **arguments) == line
