"""`import seenset`: the runs of the command, and their results as objects."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from finished import run
from made_up import sentence, write_jsonl

import seenset


def test_an_audit_takes_a_path_a_mapping_or_a_config_and_says_the_same(
    make_audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [sentence(i, 80) for i in range(60)]  # which zlib prefers
    path = make_audit(long, selections=[{"name": "members", "detectors": ["zlib"], "procedure": "bh", "alpha": 0.2}])
    by_command = run(path, f"run={tmp_path / 'command'}")
    by_path = seenset.audit(path)
    assert "documents" in capsys.readouterr().out
    mapping = yaml.safe_load(path.read_text())
    runs = [
        by_path,
        seenset.audit(str(path), quiet=True),
        seenset.audit(mapping, quiet=True),
        seenset.audit(seenset.AuditConfig.model_validate(mapping), quiet=True),
        seenset.open_run(tmp_path / "run"),
    ]
    expected = pq.read_table(tmp_path / "command" / "selection" / "members" / "selected.parquet")
    for one in runs:
        selection = one.selections["members"]
        assert one.state == "complete"
        assert one.report is not None
        assert Path(one.report).exists()
        assert selection.table().drop_columns(["source"]) == expected.drop_columns(["source"])
        assert selection.n_selected == len(expected) > 0
        documents = selection.documents()
        assert documents.num_rows == 60
        assert sum(documents["selected"].to_pylist()) == selection.n_selected
    assert by_command.exit_code == 0


def test_scores_in_memory_are_those_of_a_run(make_audit: Callable[..., Path], tmp_path: Path) -> None:
    path = make_audit(
        [sentence(i, 80) for i in range(60)],
        selections=[{"name": "members", "detectors": ["zlib"], "procedure": "storey", "alpha": 0.2}],
    )
    finished = seenset.audit(path, quiet=True)
    mapping = yaml.safe_load(path.read_text())
    tables, corpora = {}, {"audit": range(60), "unseen": range(1000, 1040)}
    for role, seeds in corpora.items():
        texts = [sentence(seed, 80 if role == "audit" else 12) for seed in seeds]
        ids = [f"{role}-{index}" for index in range(len(texts))]
        tables[role] = seenset.score(mapping["model"]["path"], texts, ["zlib"], ids=ids)
    answer = seenset.select(tables["audit"], tables["unseen"], procedure="storey", alpha=0.2)
    assert answer.selected.any()
    documents = {row["doc_id"]: row for row in finished.selections["members"].documents().to_pylist()}
    for index in range(60):
        row = documents[f"audit-{index}"]
        assert row["p_value"] == pytest.approx(answer.p_values[index])
        assert row["selected"] == answer.selected[index]


def test_the_examples_of_the_docstrings_run(make_audit: Callable[..., Path]) -> None:
    config = yaml.safe_load(make_audit().read_text())
    globs = {"seenset": seenset, "config": config}
    (example,) = doctest.DocTestFinder().find(seenset.audit, "audit", globs=globs)
    results = doctest.DocTestRunner().run(example)
    assert (results.attempted > 0, results.failed) == (True, 0)


def test_a_trial_runs_from_a_mapping(tiny_model_folder: Path, tmp_path: Path) -> None:
    outcome = seenset.trial(
        {
            "run": str(tmp_path / "trial"),
            "model": {"path": str(tiny_model_folder)},
            "documents": {"path": write_jsonl(tmp_path / "texts.jsonl", [sentence(i) for i in range(24)]), "id": "id"},
            "contaminate": {"share": 0.5, "epochs": 1},
            "repeats": 3,
            "resources": {"cluster": "local"},
            "detectors": ["loss"],
            "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.3}],
        },
        quiet=True,
    )
    assert Path(outcome.folder, "tables.txt").exists()
    assert outcome.facts


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_what_is_no_run_directory_is_one_line(path: str, tmp_path: Path) -> None:
    with pytest.raises(seenset.UserError, match="not a run directory"):
        seenset.open_run(tmp_path / path)
