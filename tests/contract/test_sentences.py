"""Sentences that a user reads. This file alone of the contract may change when wording does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from command import done, here

Audit = Callable[..., Path]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("corpus.audit.path=none.jsonl", "corpus.audit: no file none.jsonl"),
        ("corpus.audit.text=txt", "no column 'txt'"),
        ("selections.0.alpha=1.5", "must be in (0, 1), got 1.5"),
        ("detectors=[los]", "did you mean 'loss'"),
        ("modle.path=x", "did you mean 'model'"),
        ("model.path=/no/such/model", "/no/such/model"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(audit: Audit, setting: str, line: str) -> None:
    said = done(here("plan", audit(), "--set", setting), 2).line
    assert line in said


@pytest.mark.recorded
def test_lines_of_a_finished_run(copied: Path) -> None:
    shown = done(here("select", copied)).out
    assert "inconclusive" in shown
    assert re.search(r"With 95% confidence at most 24 of these 82 are wrong, and at least 58 of the 153", shown)
    assert "seenset: " not in shown
    assert "complete" in done(here("status", copied)).out


def test_an_answer_says_what_it_guarantees(reference: Path) -> None:
    summary = json.loads((reference / "selection/storey/summary.json").read_text())
    assert summary["promise"].startswith("The expected share of wrong documents")
    assert summary["assumption"].startswith("The audited documents for which the null holds")
    page = (reference / "report/report.html").read_text()
    assert "<script>alert" not in page
    assert "82" in page
    assert "Inconclusive" in page


def test_what_is_no_run_directory_is_told(tmp_path: Path) -> None:
    for command in ("status", "select", "report", "verdict", "export"):
        assert "is not a run directory" in done(here(command, tmp_path / "nothing"), 2).line


def test_the_verdict_is_stated_with_its_error_rate_first(copied: Path) -> None:
    sentences = done(here("verdict", copied, "--json")).json["sentences"]
    assert re.match(
        r"It is shown, with p = [0-9.]+, that model was trained on documents of this collection", sentences[0]
    )
    assert "Of collections that it was not trained on, at most one in 20 gives p <= 0.05 by chance" in sentences[0]
    assert sentences[1].startswith("With 95% confidence at least")
