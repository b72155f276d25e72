"""A trial without training, carried out in this process: what it writes, its page among it."""

import base64
from pathlib import Path

from pipeline.trial.config import build_trial
from tests.helpers.finished import run_trial
from tests.helpers.made_up import write_rows
from tests.helpers.trials import trial


def test_a_trial_writes_a_page_that_needs_nothing_else(tmp_path: Path, tiny_model_folder: Path) -> None:
    lines = [{"text": f"Passage {i} of a collection that nobody has read {'again ' * (i % 5)}"} for i in range(90)]
    source = write_rows(tmp_path / "documents.jsonl", lines)
    described = trial(run=str(tmp_path / "trial"), model={"path": str(tiny_model_folder)}, documents={"path": source})
    local = {"contaminate": {"share": 0}, "repeats": 5, "resources": {"cluster": "local"}}
    config, points = build_trial({**described, **local})
    outcome = run_trial(config, points)
    assert outcome.page == str(tmp_path / "trial/trial.html")
    page = Path(outcome.page).read_text()
    names = ["fdr.svg", "power.svg", "roc-small.svg", "roc.svg"]
    assert sorted(path.name for path in (tmp_path / "trial/figures").iterdir()) == names
    for name in names:
        assert base64.b64encode((tmp_path / "trial/figures" / name).read_bytes()).decode() in page
    assert "What was verified, and what was not" in page
    assert "The selection is consistent with its target." in page
    assert "Passage 3 of" not in page, "no text of a document"
    assert outcome.reports[0] in page
    again = run_trial(config, points)
    assert Path(again.page).read_text() == page
