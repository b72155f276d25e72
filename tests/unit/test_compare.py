"""Claims about finished runs side by side: what all models select, what was gained and lost, what differs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import printed, refusal
from compared_runs import ITEMS, amend, benchmark_run, copied, first_run
from made_up import sentence

SEEN_BY_A = np.arange(ITEMS) < 25
SEEN_BY_B = (np.arange(ITEMS) >= 15) & (np.arange(ITEMS) < 35)


@pytest.fixture(scope="module")
def runs(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three runs over one corpus: `a` and `b` have seen other items; `c` audited fewer, one of them with another text.

    An item is empty, so that it is in quarantine.
    """
    folder = tmp_path_factory.mktemp("compared")
    source = benchmark_run(tmp_path_factory.getbasetemp(), tiny_model_folder)
    others = [*(sentence(i) for i in range(39)), "Something else was written here."]
    other = first_run(folder / "other", tiny_model_folder, others)
    return {
        "a": copied(source, folder / "a", SEEN_BY_A, 1, "model a"),
        "b": copied(source, folder / "b", SEEN_BY_B, 2, "model b"),
        "c": copied(other, folder / "c", SEEN_BY_A, 3, "model c"),
    }


# --- joint


def test_the_joint_list_holds_what_both_models_speak_for(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = printed(capsys, "joint", runs["a"], runs["b"], "--output", tmp_path / "joint", "--json")
    report = json.loads(out)
    assert code == 0
    clean = {f"bench.jsonl#{row}" for row in range(35, ITEMS - 1)}
    selected = pq.read_table(tmp_path / "joint/selected.parquet")
    assert len(set(selected["doc_id"].to_pylist()) & clean) > 15
    assert len(set(selected["doc_id"].to_pylist()) - clean) <= 3
    assert report["proved"]["n_selected"] == len(selected) >= report["fewest"]
    assert report["proved"]["guarantee"] == "finite-sample"
    assert report["n_audit"] == ITEMS
    assert [model["n_quarantined"] for model in report["models"]] == [1, 1]
    wider = pq.read_table(tmp_path / "joint/largest_p.parquet")
    assert set(selected["doc_id"].to_pylist()) <= set(wider["doc_id"].to_pylist())
    assert report["largest_p"]["guarantee"] == "heuristic"
    assert report["largest_p"]["n_selected"] == len(wider)
    largest = np.maximum(selected["p_value_1"].to_numpy(), selected["p_value_2"].to_numpy())
    assert selected["largest_p"].to_pylist() == largest.tolist() == sorted(largest)
    assert [line.split(": ")[1].split(".")[0].split(":")[0] for line in report["warnings"]] == ["Inconclusive"] * 2


def test_the_same_runs_give_the_same_bytes_in_text_too(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("x", "y", "y"):
        code, out, _ = printed(capsys, "joint", runs["a"], runs["b"], "--output", tmp_path / folder)
        assert code == 0
    for name in ("joint.json", "selected.parquet", "largest_p.parquet"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()
    assert "are selected as clean under every one of 2 models at alpha 0.2 (finite-sample)" in out
    assert "not promised to stay at or below alpha" in out


def test_runs_of_different_documents_share_so_many_and_answer_for_those_if_told(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "joint", runs["a"], runs["c"], "--output", tmp_path / "joint")
    assert "audited 60 and 40 documents and share 39; 1 more have the same id and another text: --shared" in line
    assert not (tmp_path / "joint").exists()
    arguments = ("joint", runs["a"], runs["c"], "--output", tmp_path / "joint", "--shared", "--json")
    report = json.loads(printed(capsys, *arguments)[1])
    assert report["n_audit"] == 39
    assert report["documents"]["n_other_text"] == 1
    assert any("share 39" in line for line in report["warnings"])


def test_where_nothing_can_be_selected_the_answer_says_what_it_would_take(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("joint", runs["a"], runs["b"], "--alpha", "0.005", "--output", tmp_path / "joint")
    code, out, _ = printed(capsys, *arguments)
    assert code == 0
    assert "Nothing can be selected at alpha 0.005, whatever the scores: that takes alpha of at least 0.01" in out
    assert pq.read_table(tmp_path / "joint/selected.parquet").num_rows == 0


def test_the_same_model_twice_is_told(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(runs["a"], twin)
    _, out, _ = printed(capsys, "joint", runs["a"], twin, "--output", tmp_path / "joint", "--json")
    assert re.match("same model twice: .*/a and .*/twin have the fingerprint", json.loads(out)["warnings"][0])


def test_a_run_that_a_check_contradicts_makes_the_joint_answer_void(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    void = tmp_path / "void"
    shutil.copytree(runs["b"], void)
    amend(void, "selection/clean/summary.json", {"supported": False, "reasons": ["The words tell them apart."]})
    _, out, _ = printed(capsys, "joint", runs["a"], void, "--output", tmp_path / "joint")
    assert f"CONTRADICTED, do not act on it: {void}: The words tell them apart." in " ".join(out.split())


def test_what_cannot_be_joined_is_one_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, output = runs["a"], runs["b"], tmp_path / "joint"
    assert "a joint selection needs at least 2 runs, got 1" in refusal(capsys, "joint", a, "--output", output)
    assert "a run is given twice" in refusal(capsys, "joint", a, a, "--output", output)
    line = refusal(capsys, "joint", a, b, "--selection", "cleen", "--output", output)
    assert "no selection 'cleen'" in line
    assert "did you mean 'clean'?" in line
    assert "alpha must be in (0, 1), got 2" in refusal(capsys, "joint", a, b, "--alpha", "2", "--output", output)
    assert "is not a run directory" in refusal(capsys, "joint", a, tmp_path / "none", "--output", output)
    assert "holds other files" in refusal(capsys, "joint", a, b, "--output", b)
    for name, changes, part in (
        ("manifest.json", {"schema": 0}, "in form 0, and this version reads form 1"),
        ("status.json", {"state": "incomplete"}, "is unfinished (incomplete): the same seenset run goes on with it"),
        ("selection/clean/summary.json", {"calibration": "weighted"}, "a joint selection takes pooled or by_group"),
        ("selection/clean/summary.json", {"direction": "members"}, "has direction members, and that of"),
        ("selection/clean/summary.json", {"n_calibration": 50}, "p-values that 50 calibration documents cannot give"),
        ("selection/clean/summary.json", {"n_audit": 61}, "holds 60 documents, and the summary says 61"),
        ("selection/clean/summary.json", {"alpha": 0.1}, "have alpha 0.1 and 0.2: say --alpha"),
        ("selection/clean/summary.json", {"procedure": "td4eval", "guarantee": "heuristic"}, "set reconformal: true"),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(b, broken)
        amend(broken, name, changes)
        assert part in refusal(capsys, "joint", a, broken, "--output", output)
        shutil.rmtree(broken)
    shutil.copytree(b, broken)
    (broken / "selection/clean/summary.json").unlink()
    assert "selection/clean/summary.json is missing; seenset select" in (
        refusal(capsys, "joint", a, broken, "--output", output)
    )
    shutil.rmtree(broken / "selection/clean")
    assert "is unfinished: selection clean has no answer" in refusal(capsys, "joint", a, broken, "--output", output)
    assert not output.exists()


# --- compare


def test_a_comparison_counts_what_was_gained_and_lost_and_says_what_that_is_not(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = printed(capsys, "compare", runs["a"], runs["b"], "--output", tmp_path / "x", "--json")
    assert code == 0
    comparison = json.loads(out)
    (change,) = comparison["selections"]
    chosen = [
        set(pq.read_table(runs[name] / "selection/clean/selected.parquet")["row"].to_pylist()) for name in ("a", "b")
    ]
    assert change["n_kept"] == len(chosen[0] & chosen[1])
    assert change["n_gained"] == len(chosen[1] - chosen[0]) == len(change["gained"]) > 5
    assert change["n_lost"] == len(chosen[0] - chosen[1]) == len(change["lost"]) > 5
    assert change["n_neither"] == ITEMS - len(chosen[0] | chosen[1])
    assert change["a"]["n_selected"] == len(chosen[0]) == change["a"]["n_selected_shared"]
    table = pq.read_table(tmp_path / "x/changes.parquet").to_pylist()
    assert {row["doc_id"] for row in table if row["change"] == "gained"} == {
        f"bench.jsonl#{row}" for row in chosen[1] - chosen[0]
    }
    assert comparison["differences"] == [{"part": "fingerprint", "key": "model", "a": "model a", "b": "model b"}]
    assert change["scores"][0]["n_documents"] == ITEMS - 1
    assert -1 <= change["scores"][0]["spearman"] <= 1
    assert "no tested claim of change" in comparison["caution"]
    page = (tmp_path / "x/comparison.html").read_text()
    assert comparison["caution"] in page
    for side in ("A", "B"):
        run = comparison[side.lower()]
        line = f"<dt>{side}</dt><dd>{run['model']}, run <bdi>{runs[side.lower()].name}</bdi></dd>"
        assert line in page[: page.index("1. The selections")]
    assert str(runs["a"].parent) not in page[: page.index("1. The selections")]
    assert any("clean (A), clean (B): " in notice and "decide it" in notice for notice in comparison["notices"])
    assert "first run" not in page
    assert "second run" not in page
    _, out, _ = printed(capsys, "compare", runs["a"], runs["b"], "--output", tmp_path / "y")
    assert f"A: {runs['a']}, model {comparison['a']['model']}" in out
    assert f"B: {runs['b']}, model {comparison['b']['model']}" in out


def test_the_page_of_a_comparison_needs_nothing_else_and_shows_ids_as_text(
    tiny_model_folder: Path, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = tmp_path / "b<script>alert(1)</script>"
    shutil.copytree(runs["b"], twin)
    printed(capsys, "compare", runs["a"], twin, "--output", tmp_path / "x")
    page = (tmp_path / "x/comparison.html").read_text()
    assert "Content-Security-Policy" in page
    assert not re.search(r"<script|<link|<iframe|<object|src=(?!.data:image/svg)|href=|url\(", page)
    assert "&lt;script&gt;" in page
    alt = re.search(r'<img src="data:image/svg\+xml;base64,[^"]+" alt="([^"]+)">', page)
    assert alt is not None
    assert alt[1].startswith("loss in A against loss in B, 59 documents; rank correlation")


def test_settings_data_and_selections_that_differ_are_listed_and_no_others(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copied(runs["a"], tmp_path / "d", SEEN_BY_A, 9, "model a", ["selections.0.alpha=0.3"])
    amend(other, "manifest.json", {"versions": {"torch": "1.0"}})
    _, out, _ = printed(capsys, "compare", runs["a"], other, "--output", tmp_path / "x", "--json")
    comparison = json.loads(out)
    found = {(one["part"], one["key"]): (one["a"], one["b"]) for one in comparison["differences"]}
    assert found.pop(("version", "torch"))[1] == "1.0"
    assert found == {("selection", "clean.alpha"): (0.2, 0.3)}
    assert "same model twice" in comparison["notices"][0]
    _, out, _ = printed(capsys, "compare", runs["a"], runs["c"], "--output", tmp_path / "x", "--json")
    comparison = json.loads(out)
    keys = {(one["part"], one["key"]) for one in comparison["differences"]}
    assert ("input", "audit: bench.jsonl.content") in keys
    assert ("input", "seen: seen.jsonl.content") not in keys
    assert "share 39" in comparison["notices"][0]
    (change,) = comparison["selections"]
    assert sum(change[f"n_{kind}"] for kind in ("kept", "gained", "lost", "neither")) == 39


def test_scores_of_two_detectors_are_held_against_each_other(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copied(runs["a"], tmp_path / "d", SEEN_BY_A, 9, "model a", ["selections.0.detectors=[zlib]"])
    _, out, _ = printed(capsys, "compare", runs["a"], other, "--output", tmp_path / "x", "--json")
    (pair,) = json.loads(out)["selections"][0]["scores"]
    assert (pair["detector_a"], pair["detector_b"]) == ("loss", "zlib")


def test_documents_of_another_selection_are_refused_by_the_name_of_their_file(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command that reads them: 0.9.0 ended in a traceback of a KeyError."""
    a, b = runs["a"], tmp_path / "b"
    shutil.copytree(runs["b"], b)
    other = copied(runs["b"], tmp_path / "zlib", SEEN_BY_B, 9, "model b", ["selections.0.detectors=[zlib]"])
    files = b / "selection/clean/documents"
    shutil.rmtree(files)
    shutil.copytree(other / "selection/clean/documents", files)
    for question in ("compare", "joint"):
        error = refusal(capsys, question, a, b, "--output", tmp_path / "x")
        assert f"{files}/" in error
        assert "seenset select" in error


def test_what_cannot_be_compared_is_one_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, output = runs["a"], runs["b"], tmp_path / "x"
    assert "is compared with itself" in refusal(capsys, "compare", a, a, "--output", output)
    assert "did you mean 'clean'?" in refusal(capsys, "compare", a, b, "--selection", "clear", "--output", output)
    broken = tmp_path / "broken"
    shutil.copytree(b, broken)
    amend(broken, "selection/clean/summary.json", {"direction": "members"})
    assert "they answer different questions" in refusal(capsys, "compare", a, broken, "--output", output)
    first = sorted((broken / "selection/clean/documents").glob("*.parquet"))[0]
    amend(broken, "selection/clean/summary.json", {"direction": "clean"})
    first.unlink()
    assert f"{first.name} is missing; seenset select" in refusal(capsys, "compare", a, broken, "--output", output)
    assert "is not a run directory" in refusal(capsys, "compare", a, tmp_path, "--output", output)
