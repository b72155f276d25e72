"""`import seenset`: the runs of the command, and their results as objects."""

from pathlib import Path

import pytest
import yaml

import seenset
from tests.helpers.made_up import MakeAudit, sentence, write_jsonl


def test_an_audit_takes_a_path_a_mapping_or_a_config_and_says_the_same(
    make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [sentence(i, 80) for i in range(60)]  # which zlib prefers
    path = make_audit(long, selections=[{"name": "members", "detectors": ["zlib"], "procedure": "bh", "alpha": 0.2}])
    expected = seenset.audit(path).selections["members"].table()
    assert "documents" in capsys.readouterr().out
    assert len(expected) > 0
    mapping = yaml.safe_load(path.read_text())
    for described in (str(path), mapping, seenset.AuditConfig.model_validate(mapping)):
        assert seenset.audit(described, quiet=True).selections["members"].table() == expected


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
