"""`seenset evaluate`: scored like any run, resumed like any run, and compared instead of selected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import here
from finished import rows
from made_up import sentence, write_jsonl


def write_config(folder: Path, model: Path, corpus: dict[str, Any], **settings: Any) -> str:
    config = {
        "run": str(folder / "run"),
        "model": {"path": str(model)},
        "corpus": corpus,
        "detectors": ["loss", "zlib"],
        "resources": {"cluster": "local", "shard_bytes": 1500, "actors": 1},
        **settings,
    }
    path = folder / "evaluate.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_labelled_documents_are_scored_once_and_compared(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["member", "nonmember"]
    lines = [{"text": sentence(i), "in_it": labels[i % 2], "kind": "ab"[i // 2 % 2]} for i in range(80)]
    source = tmp_path / "labelled.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = {"labelled": {"path": str(source), "label": "in_it", "group": "kind"}}
    path, folder = write_config(tmp_path, tiny_model_folder, corpus), tmp_path / "run"
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
    for question in ("retry", "select", "verdict"):
        _, refusal = here(capsys, question, str(folder), code=2)
        assert f"{folder} compares documents of known membership" in refusal
    assert figures["page"] == str(folder / "evaluation/evaluation.html")
    assert json.loads(here(capsys, "status", str(folder), "--json")[0])["state"] == "complete"

    source.write_text(source.read_text().replace('"member"', '"maybe"', 1))
    for command in ("evaluate", "run", "plan"):
        _, error = here(capsys, command, path, code=2)
        assert error.count("\n") == 1
        named = "holds 3 values: maybe, nonmember, member" if command == "evaluate" else "add corpus.audit: {path: ...}"
        assert named in error


def test_an_evaluation_and_a_run_share_a_run_directory(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"audit": 40, "unseen": 30, "seen": 30}
    corpus = {
        role: {"path": write_jsonl(tmp_path / f"{role}.jsonl", [sentence(1000 * i + j) for j in range(n)]), "id": "id"}
        for i, (role, n) in enumerate(counts.items())
    }
    selections = [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}]
    path = write_config(tmp_path, tiny_model_folder, corpus, selections=selections)
    figures = json.loads(here(capsys, "evaluate", path, "--json")[0])
    assert [entry["n_compared"] for entry in figures["documents"]] == [30, 30]
    assert not (tmp_path / "run/selection").exists()
    outcome = json.loads(here(capsys, "run", path, "--json")[0])
    assert outcome["documents_per_s"] == 0, "all was scored already"
    assert outcome["selections"][0]["n_audit"] == 40
    assert json.loads(here(capsys, "evaluate", path, "--json")[0])["rows"] == figures["rows"]
    assert (tmp_path / "run/selection/members/summary.json").exists()
