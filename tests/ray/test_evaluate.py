"""`seenset evaluate`: scored like any run, resumed like any run, and compared instead of selected."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import here
from tests.helpers.finished import rows
from tests.helpers.made_up import MakeAudit, sentence, write_corpus, write_rows


def test_labelled_documents_are_scored_once_and_compared(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["member", "nonmember"]
    lines = [{"text": sentence(i), "in_it": labels[i % 2], "kind": "ab"[i // 2 % 2]} for i in range(80)]
    source, folder = tmp_path / "labelled.jsonl", tmp_path / "run"
    corpus = {"labelled": {"path": write_rows(source, lines), "label": "in_it", "group": "kind"}}
    path = make_audit(corpus=corpus, detectors=["loss", "zlib"], selections=[])
    printed, _ = here(capsys, "evaluate", path)
    assert "Seen against unseen documents, 95% intervals" in printed
    assert "blind (words alone)" in printed
    assert Path(printed.split("page: ")[1].strip()) == folder / "evaluation/evaluation.html"
    scored = rows(folder)
    assert len(scored) == 80
    assert {row["role"] for name, row in scored.items() if int(name.split("#")[1]) % 2} == {"unseen"}

    before = {p.name: p.stat().st_mtime_ns for p in (folder / "receipts/score").iterdir()}
    figures = json.loads(here(capsys, "evaluate", path, "--json")[0])
    assert {p.name: p.stat().st_mtime_ns for p in (folder / "receipts/score").iterdir()} == before
    assert [row["n_seen"] for row in figures["rows"]] == [40] * 3 + [20] * 6
    for question in ("select", "verdict"):
        _, refusal = here(capsys, question, str(folder), code=2)
        assert f"{folder} compares documents of known membership" in refusal
    assert figures["page"] == str(folder / "evaluation/evaluation.html")
    assert json.loads(here(capsys, "status", str(folder), "--json")[0])["state"] == "complete"


def test_an_evaluation_and_a_run_share_a_run_directory(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    firsts = {"audit": 0, "unseen": 1000, "seen": 2000}
    texts = {role: [sentence(first + i) for i in range(30)] for role, first in firsts.items()}
    path = make_audit(corpus=write_corpus(tmp_path, texts))
    figures = json.loads(here(capsys, "evaluate", path, "--json")[0])
    assert [entry["n_compared"] for entry in figures["documents"]] == [30, 30]
    assert not (tmp_path / "run/selection").exists()
    outcome = json.loads(here(capsys, "run", path, "--json")[0])
    assert outcome["documents_per_s"] == 0, "all was scored already"
    assert outcome["selections"][0]["n_audit"] == 30
    assert json.loads(here(capsys, "evaluate", path, "--json")[0])["rows"] == figures["rows"]
    assert (tmp_path / "run/selection/members/summary.json").exists()
