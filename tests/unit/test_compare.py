"""Claims about finished runs side by side: what all models select, what was gained and lost, what differs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from compared_runs import ITEMS, amend, benchmark_run, copied, first_run

from pipeline.selection.guarantees import ConclusionValue
from tests.helpers.commands import here, refusal
from tests.helpers.made_up import sentence

SEEN_BY_A = np.arange(ITEMS) < 25
SEEN_BY_B = (np.arange(ITEMS) >= 15) & (np.arange(ITEMS) < 35)


@pytest.fixture(scope="module")
def runs(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs over one corpus: `a` and `b` have seen other items; `c` audited fewer, one of them with another text."""
    folder = tmp_path_factory.mktemp("compared")
    source = benchmark_run(tmp_path_factory.getbasetemp(), tiny_model_folder)
    others = [*(sentence(i) for i in range(39)), "Something else was written here."]
    other = first_run(folder / "other", tiny_model_folder, others)
    return {
        "a": copied(source, folder / "a", SEEN_BY_A, 1, "model a"),
        "b": copied(source, folder / "b", SEEN_BY_B, 2, "model b"),
        "c": copied(other, folder / "c", SEEN_BY_A, 3, "model c"),
    }


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, Any]]:
    """(command, runs, options) -> what the command prints into its folder of that name, and its record."""

    def asked(command: str, *arguments: str | Path, folder: str = "out") -> tuple[str, Any]:
        out, _ = here(capsys, command, *arguments, "--output", tmp_path / folder)
        record = {"joint": "joint.json", "compare": "comparison.json"}[command]
        return " ".join(out.split()), json.loads((tmp_path / folder / record).read_text())

    return asked


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """(command, runs, options) -> the one line of the refusal, which leaves nothing."""

    def asked(command: str, *arguments: str | Path) -> str:
        line = refusal(capsys, command, *arguments, "--output", tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
        return line

    return asked


Runs = dict[str, Path]
Fold = Callable[..., tuple[str, Any]]
Refused = Callable[..., str]


def selected_in(file: Path, column: str = "doc_id") -> set[Any]:
    return set(pq.read_table(file)[column].to_pylist())


def test_the_joint_list_holds_what_both_models_speak_for(runs: Runs, ask: Fold, tmp_path: Path) -> None:
    text, report = ask("joint", runs["a"], runs["b"])
    assert "are selected as clean under every one of 2 models at alpha 0.2 (finite-sample)" in text
    assert "not guaranteed to stay at or below alpha" in text
    clean = {f"bench.jsonl#{row}" for row in range(35, ITEMS - 1)}
    table = pq.read_table(tmp_path / "out/selected.parquet")
    selected = selected_in(tmp_path / "out/selected.parquet")
    assert len(selected & clean) > 15
    assert len(selected - clean) <= 3
    assert report["proved"]["n_selected"] == len(table) >= report["fewest"]
    assert report["proved"]["guarantee"] == "finite-sample"
    assert report["n_audit"] == ITEMS
    assert [model["n_quarantined"] for model in report["models"]] == [1, 1]
    wider = selected_in(tmp_path / "out/largest_p.parquet")
    assert selected <= wider
    assert (report["largest_p"]["guarantee"], report["largest_p"]["n_selected"]) == ("heuristic", len(wider))
    largest = np.maximum(table["p_value_1"].to_numpy(), table["p_value_2"].to_numpy())
    assert table["largest_p"].to_pylist() == largest.tolist() == sorted(largest)
    assert [line.split(": ")[1].split(".")[0].split(":")[0] for line in report["warnings"]] == [
        "Inconclusive",
        "next",
    ] * 2
    text, _ = ask("joint", runs["a"], runs["b"], "--alpha", "0.005")
    assert "Nothing can be selected at alpha 0.005, whatever the scores: that takes alpha of at least 0.01" in text
    assert not selected_in(tmp_path / "out/selected.parquet")
    for folder in ("out", "again"):
        ask("joint", runs["a"], runs["b"], folder=folder)
    for name in ("joint.json", "selected.parquet", "largest_p.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_joint_list_takes_whole_ranks_also_of_smoothed_selections(
    runs: Runs, ask: Fold, tmp_path: Path, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = benchmark_run(tmp_path_factory.getbasetemp(), tiny_model_folder)
    smoothed = ["selections.0.ranks=smoothed"]
    pair = [
        copied(source, tmp_path / name, seen, seed, f"model {name}", smoothed)
        for name, seen, seed in (("a", SEEN_BY_A, 1), ("b", SEEN_BY_B, 2))
    ]
    ask("joint", *pair, folder="smoothed")
    ask("joint", runs["a"], runs["b"], folder="whole")
    for name in ("selected.parquet", "largest_p.parquet"):
        one, other = (pq.read_table(tmp_path / folder / name).to_pylist() for folder in ("smoothed", "whole"))
        assert one == other
    assert one, "else nothing is compared"


def test_runs_of_different_documents_share_so_many_and_answer_for_those_if_told(
    runs: Runs, ask: Fold, refused: Refused
) -> None:
    line = refused("joint", runs["a"], runs["c"])
    assert "audited 60 and 40 documents and share 39; 1 more have the same id and another text: --shared" in line
    _, report = ask("joint", runs["a"], runs["c"], "--shared")
    assert (report["n_audit"], report["documents"]["n_other_text"]) == (39, 1)
    assert any("share 39" in line for line in report["warnings"])


def test_the_same_model_twice_and_a_run_that_a_check_contradicts_are_told(
    runs: Runs, ask: Fold, tmp_path: Path
) -> None:
    shutil.copytree(runs["a"], tmp_path / "twin")
    _, report = ask("joint", runs["a"], tmp_path / "twin")
    assert re.match("same model twice: .*/a and .*/twin have the fingerprint", report["warnings"][0])
    void = tmp_path / "void"
    shutil.copytree(runs["b"], void)
    amend(
        void,
        "selection/clean/summary.json",
        {"conclusion": ConclusionValue.CONTRADICTED, "reasons": ["The words tell them apart."]},
    )
    text, _ = ask("joint", runs["a"], void)
    assert f"CONTRADICTED, do not act on it: {void}: The words tell them apart." in text


def test_what_cannot_be_joined_is_one_line(runs: Runs, refused: Refused, tmp_path: Path, capsys: Any) -> None:
    a, b = runs["a"], runs["b"]
    assert "a joint selection needs at least 2 runs, got 1" in refused("joint", a)
    assert "a run is given twice" in refused("joint", a, a)
    assert "no selection 'cleen'" in (line := refused("joint", a, b, "--selection", "cleen"))
    assert "did you mean 'clean'?" in line
    assert "alpha must be in (0, 1), got 2" in refused("joint", a, b, "--alpha", "2")
    assert "is not a run directory" in refused("joint", a, tmp_path / "none")
    assert "holds other files" in refusal(capsys, "joint", a, b, "--output", b)
    for name, changes, part in (
        ("manifest.json", {"schema": 0}, "in form 0, and this version reads form 3"),
        ("status.json", {"state": "incomplete"}, "is unfinished (incomplete): the same seenset run finishes it"),
        ("selection/clean/summary.json", {"calibration": "conditional"}, "a joint selection takes pooled or by_group"),
        ("selection/clean/summary.json", {"direction": "members"}, "has direction members, and that of"),
        ("selection/clean/summary.json", {"n_calibration": 50}, "p-values that 50 calibration documents cannot give"),
        ("selection/clean/summary.json", {"n_audit": 61}, "holds 60 documents, and the summary says 61"),
        ("selection/clean/summary.json", {"alpha": 0.1}, "have alpha 0.1 and 0.2: set --alpha"),
        ("selection/clean/summary.json", {"procedure": "td4eval", "guarantee": "heuristic"}, "set reconformal: true"),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(b, broken)
        amend(broken, name, changes)
        assert part in refused("joint", a, broken)
        shutil.rmtree(broken)
    shutil.copytree(b, broken)
    (broken / "selection/clean/summary.json").unlink()
    assert "selection/clean/summary.json is missing; seenset select" in refused("joint", a, broken)
    shutil.rmtree(broken / "selection/clean")
    assert "is unfinished: selection clean has no answer" in refused("joint", a, broken)


def test_a_comparison_counts_what_was_gained_and_lost_and_says_what_that_is_not(
    runs: Runs, ask: Fold, tmp_path: Path
) -> None:
    text, comparison = ask("compare", runs["a"], runs["b"])
    (change,) = comparison["selections"]
    chosen = [selected_in(runs[name] / "selection/clean/selected.parquet", "row") for name in ("a", "b")]
    assert change["n_kept"] == len(chosen[0] & chosen[1])
    assert change["n_gained"] == len(chosen[1] - chosen[0]) == len(change["gained"]) > 5
    assert change["n_lost"] == len(chosen[0] - chosen[1]) == len(change["lost"]) > 5
    assert change["n_neither"] == ITEMS - len(chosen[0] | chosen[1])
    assert change["a"]["n_selected"] == len(chosen[0]) == change["a"]["n_selected_shared"]
    table = pq.read_table(tmp_path / "out/changes.parquet").to_pylist()
    gained = {row["doc_id"] for row in table if row["change"] == "gained"}
    assert gained == {f"bench.jsonl#{row}" for row in chosen[1] - chosen[0]}
    assert comparison["differences"] == [{"part": "fingerprint", "key": "model", "a": "model a", "b": "model b"}]
    assert change["scores"][0]["n_documents"] == ITEMS - 1
    assert -1 <= change["scores"][0]["spearman"] <= 1
    assert "not a tested claim of change" in comparison["caution"]
    page = (tmp_path / "out/comparison.html").read_text()
    assert comparison["caution"] in page
    head = page[: page.index("1. The selections")]
    for side, name in (("A", "a"), ("B", "b")):
        model = comparison[name]["model"]
        assert f"<dt>{side}</dt><dd>{model}, run <bdi>{runs[name].name}</bdi></dd>" in head
        assert f"{side}: {runs[name]}, model {model}" in text
    assert str(runs["a"].parent) not in head
    inconclusive, step = (each for each in comparison["notices"] if each.startswith("clean (A), clean (B): "))
    assert "Inconclusive: " in inconclusive
    assert "next: With " in step
    assert "stays inconclusive, which is normal" in step
    assert not re.search("first run|second run", page)


def test_the_page_of_a_comparison_needs_nothing_else_and_shows_ids_as_text(
    runs: Runs, ask: Fold, tmp_path: Path
) -> None:
    twin = tmp_path / "b<script>alert(1)</script>"
    shutil.copytree(runs["b"], twin)
    ask("compare", runs["a"], twin)
    page = (tmp_path / "out/comparison.html").read_text()
    assert "Content-Security-Policy" in page
    assert not re.search(r"<script|<link|<iframe|<object|src=(?!.data:image/svg)|href=|url\(", page)
    assert "&lt;script&gt;" in page
    alt = re.search(r'<img src="data:image/svg\+xml;base64,[^"]+" alt="([^"]+)">', page)
    assert alt[1].startswith("loss in A against loss in B, 59 documents; rank correlation")


def test_settings_data_and_selections_that_differ_are_listed_and_no_others(
    runs: Runs, ask: Fold, tmp_path: Path
) -> None:
    other = copied(runs["a"], tmp_path / "d", SEEN_BY_A, 9, "model a", ["selections.0.alpha=0.3"])
    amend(other, "manifest.json", {"versions": {"torch": "1.0"}})
    _, comparison = ask("compare", runs["a"], other)
    found = {(one["part"], one["key"]): (one["a"], one["b"]) for one in comparison["differences"]}
    assert found.pop(("version", "torch"))[1] == "1.0"
    assert found == {("selection", "clean.alpha"): (0.2, 0.3)}
    assert "same model twice" in comparison["notices"][0]
    _, comparison = ask("compare", runs["a"], runs["c"])
    keys = {(one["part"], one["key"]) for one in comparison["differences"]}
    assert ("input", "audit: bench.jsonl.content") in keys
    assert ("input", "seen: seen.jsonl.content") not in keys
    assert "share 39" in comparison["notices"][0]
    (change,) = comparison["selections"]
    assert sum(change[f"n_{kind}"] for kind in ("kept", "gained", "lost", "neither")) == 39


def test_scores_of_two_detectors_are_compared(runs: Runs, ask: Fold, tmp_path: Path) -> None:
    other = copied(runs["b"], tmp_path / "zlib", SEEN_BY_B, 9, "model b", ["selections.0.detectors=[zlib]"])
    _, comparison = ask("compare", runs["a"], other)
    (pair,) = comparison["selections"][0]["scores"]
    assert (pair["detector_a"], pair["detector_b"]) == ("loss", "zlib")


def test_what_cannot_be_compared_is_one_line(runs: Runs, refused: Refused, tmp_path: Path) -> None:
    a, b, broken = runs["a"], runs["b"], tmp_path / "broken"
    assert "is compared with itself" in refused("compare", a, a)
    assert "did you mean 'clean'?" in refused("compare", a, b, "--selection", "clear")
    assert "is not a run directory" in refused("compare", a, tmp_path)
    shutil.copytree(b, broken)
    amend(broken, "selection/clean/summary.json", {"direction": "members"})
    assert "they answer different questions" in refused("compare", a, broken)
    first = sorted((broken / "selection/clean/documents").glob("*.parquet"))[0]
    amend(broken, "selection/clean/summary.json", {"direction": "clean"})
    first.unlink()
    assert f"{first.name} is missing; seenset select" in refused("compare", a, broken)
