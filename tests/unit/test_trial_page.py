"""A trial without training, carried out in this process: what it writes, its page among it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from finished import score_run

from pipeline.audit.scored import read_scored
from pipeline.audit.select import select_all
from pipeline.audit.summary import Summary
from pipeline.config.audit import AuditConfig
from pipeline.report.page import write_report
from pipeline.trial.config import build_trial
from pipeline.trial.trial import carry_out


@dataclass(frozen=True, slots=True)
class Ended:
    """How an audit ended."""

    selections: list[Summary]
    report: str


def audit_here(config: AuditConfig) -> Ended:
    """Score and select in this process."""
    plan, store = score_run(config)
    summaries = select_all(config, read_scored(store, plan.shards), None, lambda receipts, f: map(f, receipts))
    return Ended(summaries, write_report(store))


def test_a_trial_writes_a_page_that_needs_nothing_else(tmp_path: Path, tiny_model_folder: Path) -> None:
    source = tmp_path / "documents.jsonl"
    lines = [{"text": f"Passage {i} of a collection that nobody has read {'again ' * (i % 5)}"} for i in range(90)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config, points = build_trial(
        {
            "run": str(tmp_path / "trial"),
            "model": {"path": str(tiny_model_folder)},
            "documents": {"path": str(source)},
            "contaminate": {"share": 0},
            "detectors": ["loss"],
            "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}],
            "repeats": 5,
        }
    )
    outcome = carry_out(config, points, audit_here, lambda line: None)
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
    again = carry_out(config, points, audit_here, lambda line: None)
    assert Path(again.page).read_text() == page
