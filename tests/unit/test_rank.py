"""Claims about seenset rank: lm-eval's files as they are become accuracies on all and on clean items, honestly."""

import hashlib
import html
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from compared_runs import ITEMS, amend, benchmark_run, copied

from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.shares import difference_to_all, paired_difference
from tests.helpers.commands import ended, here, refusal
from tests.helpers.made_up import sentence

DATE = "2025-11-02T03-04-05.678901"
SEEN = np.arange(ITEMS) < 30
Ranked = Callable[..., dict[str, Any]]
Runs = list[Path]
RIGHT = {"org__cheat": SEEN | (np.arange(ITEMS) % 3 == 0), "org__honest": np.arange(ITEMS) % 2 == 0}


@pytest.fixture(scope="module")
def runs(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs over one benchmark; the second model has seen other items too."""
    folder = tmp_path_factory.mktemp("ranked")
    source = benchmark_run(tmp_path_factory.getbasetemp(), tiny_model_folder)
    return [
        copied(source, folder / "a", SEEN, 1, "model a"),
        copied(source, folder / "b", np.arange(ITEMS) < 35, 2, "b"),
    ]


def sample(row: int, right: float, **changes: Any) -> dict[str, Any]:
    """A line of a sample file, with the keys that lm-eval 0.4.13 writes."""
    doc = {"question": f"{sentence(row)}", "choices": ["a", "b"], "qid": f"bench.jsonl#{row}", "answer": 1}
    return {
        "doc_id": row,
        "doc": doc,
        "target": "1",
        "arguments": {"gen_args_0": {"arg_0": "Question:", "arg_1": " b"}},
        "resps": [[["-1.0", "False"]]],
        "filtered_resps": [["-1.0", "False"]],
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "doc_hash": hashlib.sha256(json.dumps(doc, indent=2).encode()).hexdigest(),
        "prompt_hash": "0",
        "target_hash": "1",
        "acc": right,
        "acc_norm": 1.0,
        **changes,
    }


def write_samples(folder: Path, model: str, lines: Sequence[Any], task: str = "bench", date: str = DATE) -> Path:
    """A sample file where lm-eval puts it."""
    path = folder / model / f"samples_{task}_{date}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ranked:
    """The command's JSON: arguments -> its content."""
    return lambda *arguments: json.loads(here(capsys, "rank", *arguments, "--output", tmp_path / "x", "--json")[0])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The folder of lm-eval's output of both models."""
    for model, right in RIGHT.items():
        write_samples(tmp_path / "lm", model, [sample(row, float(right[row])) for row in range(ITEMS)])
    return tmp_path / "lm"


def test_files_of_lm_eval_become_accuracies_on_all_and_clean_items_and_ranks(
    runs: Runs, results: Path, tmp_path: Path, ranked: Ranked, capsys: pytest.CaptureFixture[str]
) -> None:
    (task,) = ranked(results, "--run", runs[0])["tasks"]
    clean = np.isin(np.arange(ITEMS), pq.read_table(runs[0] / "selection/clean/selected.parquet")["row"].to_numpy())
    assert (task["task"], task["metric"], task["n_items"], task["n_clean"]) == ("bench", "acc", ITEMS, clean.sum())
    for one in task["models"]:
        right = RIGHT[one["model"]].astype(float)
        assert one["accuracy_all"] == pytest.approx(right.mean())
        assert one["accuracy_clean"] == pytest.approx(right[clean].mean())
        limits = (one["difference"], one["difference_low"], one["difference_high"])
        assert limits == pytest.approx(difference_to_all(right[clean], right[~clean]))
    assert [(one["model"], one["rank_all"], one["rank_clean"]) for one in task["models"]] == [
        ("org__cheat", 1, 2),
        ("org__honest", 2, 1),
    ]
    table = pq.read_table(tmp_path / "x/items.parquet").to_pylist()
    assert len(table) == 2 * ITEMS
    assert {row["item"] for row in table if row["clean"]} == {f"bench.jsonl#{row}" for row in np.flatnonzero(clean)}
    (change,) = task["changes"]
    ahead = RIGHT["org__cheat"] & ~RIGHT["org__honest"]
    assert (change["first"], change["second"]) == ("org__cheat", "org__honest")
    assert change["n_for"] == (ahead & ~clean).sum()
    assert set(change["items"]) <= {f"bench.jsonl#{row}" for row in np.flatnonzero(ahead & ~clean)}
    limits = paired_difference(RIGHT["org__honest"][clean], RIGHT["org__cheat"][clean])
    assert (change["difference_clean"], change["low"], change["high"]) == pytest.approx(limits)
    assert change["shown"] == (limits[1] > 0)
    out = " ".join(here(capsys, "rank", results, "--run", runs[0], "--output", tmp_path / "x")[0].split())
    assert "org__cheat is ahead of org__honest by" in out
    assert ("which may be chance" in out) == (not change["shown"])
    assert "an item that was not selected as clean is not shown to be contaminated" in out
    assert "not shown is whether another model was trained on an item" in out


def test_items_are_clean_where_all_runs_say_so(runs: Runs, results: Path, tmp_path: Path, ranked: Ranked) -> None:
    facts = ranked(results, "--run", runs[0], "--run", runs[1])
    assert ended("joint", *runs, "--output", tmp_path / "joint") == 0
    joint = set(pq.read_table(tmp_path / "joint/selected.parquet")["doc_id"].to_pylist())
    table = pq.read_table(tmp_path / "x/items.parquet").to_pylist()
    assert {row["item"] for row in table if row["clean"]} == joint
    assert facts["clean"]["n_clean"] == len(joint) > 0


def test_pages_state_the_ranking_and_the_joint_answer_with_their_origin(
    runs: Runs, results: Path, tmp_path: Path, ranked: Ranked, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = ranked(results, "--run", runs[0], "--page", tmp_path / "page")
    assert facts["page"] == f"{tmp_path}/page/ranking.html"
    page = (tmp_path / "page/ranking.html").read_text()
    text = " ".join(re.sub("<[^>]+>", " ", page).split())
    task = facts["tasks"][0]
    for one in task["models"]:
        assert (
            f"{one['accuracy_clean']:.3f} [{one['accuracy_clean_low']:.3f}, {one['accuracy_clean_high']:.3f}]" in text
        )
        file = next((results / one["model"]).iterdir())
        assert hashlib.sha256(file.read_bytes()).hexdigest() in text
    assert f"{task['n_items'] - task['n_clean']} of {task['n_items']} items are left out of the clean ones" in text
    assert "Next. Report accuracies on the clean items with their intervals" in text
    assert facts["clean"]["runs"][0]["fingerprint"] in text
    assert task["changes"]
    assert "org__cheat is ahead of org__honest by" in text
    ranked(results, "--run", runs[0], "--page", tmp_path / "page")
    assert (tmp_path / "page/ranking.html").read_text() == page
    assert json.loads((tmp_path / "page/ranking.json").read_text())["tasks"] == facts["tasks"]
    lists = tmp_path / "lists"
    assert ended("joint", *runs, "--output", lists, "--page", tmp_path / "joint.html") == 0
    joint = json.loads((lists / "joint.json").read_text())
    text = " ".join(re.sub("<[^>]+>", " ", (tmp_path / "joint.html").read_text()).split())
    assert f"{joint['proved']['n_selected']} of {joint['n_audit']} documents, 2 models" in text
    assert joint["proved"]["promise"] in html.unescape(text)
    assert "Next. Evaluate these models on the selected items" in text
    line = refusal(capsys, "joint", *runs, "--output", lists, "--page", tmp_path)
    assert "holds other files" in line
    assert "give --page another folder" in line


def test_items_are_matched_by_id_and_by_table(runs: Runs, results: Path, tmp_path: Path, ranked: Ranked) -> None:
    (by_row,) = ranked(results, "--run", runs[0])["tasks"]
    rows = []
    for model, right in RIGHT.items():
        lines = [{**sample(row, float(right[row])), "doc_id": ITEMS - 1 - row} for row in range(ITEMS)]
        write_samples(tmp_path / "turned", model, lines)
        rows += [{"model": model, "item": f"bench.jsonl#{row}", "correct": bool(right[row])} for row in range(ITEMS)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "bench.parquet")
    pa.csv.write_csv(table, tmp_path / "bench.csv")
    for arguments in ((tmp_path / "turned", "--id", "qid"), (tmp_path / "bench.parquet",), (tmp_path / "bench.csv",)):
        assert ranked(*arguments, "--run", runs[0])["tasks"][0]["models"] == by_row["models"]


def test_the_last_file_of_a_folder_counts_and_files_have_names(runs: Runs, results: Path, ranked: Ranked) -> None:
    old = write_samples(results, "org__cheat", [sample(row, 0.0) for row in range(ITEMS)], date="2024-01-01T00-00-00")
    (task,) = ranked(results, "--run", runs[0])["tasks"]
    assert task["models"][0]["accuracy_all"] > 0.5
    (task,) = ranked(f"new={results}/org__cheat", f"old={old}", "--run", runs[0])["tasks"]
    assert [one["model"] for one in task["models"]] == ["new", "old"]
    assert task["models"][1]["accuracy_all"] == 0


def test_bad_results_are_named(runs: Runs, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("--run", runs[0], "--output", tmp_path / "x")
    good = [sample(row, 1.0) for row in range(ITEMS)]

    def bad(lines: Sequence[Any], *more: str, task: str = "bench") -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        return refusal(capsys, "rank", write_samples(tmp_path / "bad", "m", lines, task), *run, *more)

    assert "Missing option '--run'" in refusal(capsys, "rank", results)
    assert "is of task 'other', and no input is named so" in bad(good, task="other")
    assert "has results of 59 items, and the run audited 60 rows of bench.jsonl" in bad(good[:-1])
    assert "has results of 61 items, 1 of them beyond its rows" in bad([*good, sample(ITEMS, 1.0)])
    turned = [{**one, "doc": sample(900 + one["doc_id"], 1.0)["doc"]} for one in good]
    assert "of its first 50 items none has a field that occurs in the audited text" in bad(turned)
    assert "a second result for item 0" in bad([*good, good[0]])
    assert "acc must be a number in [0, 1], got 3.5" in bad([sample(0, 3.5)])
    assert "no metric 'acc_nrm'; did you mean 'acc_norm'?" in bad(good, "--metric", "acc_nrm")
    assert "choose with --metric one of f1, rouge" in bad([{**one, "metrics": ["f1", "rouge"]} for one in good])
    two = [sample(row, 1.0, filter=name) for name in ("strict", "loose", "first") for row in range(ITEMS)]
    assert "choose with --filter one of strict, loose, first" in bad(two)
    assert "no filter 'strikt'" in bad(two, "--filter", "strikt")
    assert "no field 'uid' in its doc; did you mean 'qid'?" in bad(good, "--id", "uid")
    assert "--task must be TASK=INPUT, got 'bench'" in bad(good, "--task", "bench")
    assert "no such input; did you mean 'bench.jsonl'?" in bad(good, "--task", "bench=bench.json")
    assert "line 1 is not a sample of lm-eval" in bad([{"item": 1}])
    renamed = write_samples(tmp_path / "named", "m", good, task="arc")
    here(capsys, "rank", renamed, *run, "--task", "arc=bench.jsonl")
    assert "no such file or folder" in refusal(capsys, "rank", tmp_path / "none", *run)
    formats = ("samples_TASK_DATE.jsonl", "inspect_ai (.eval)", "details_TASK_DATE.parquet")
    line = refusal(capsys, "rank", runs[0] / "report", *run)
    assert "holds no files of results that are read: " in line
    assert all(name in line for name in formats)
    (tmp_path / "x.jsonl").write_text("{}\n")
    line = refusal(capsys, "rank", tmp_path / "x.jsonl", *run)
    assert "x.jsonl is no file of results that is read: " in line
    assert all(name in line for name in (*formats, "Parquet or CSV with the columns model, item, correct"))
    other = write_samples(tmp_path / "versions", "n", [sample(row, 1.0, doc_hash="x") for row in range(ITEMS)])
    line = refusal(capsys, "rank", results, other, *run)
    assert "the models were given different versions of the task" in line
    assert "has two files of task 'bench'" in refusal(capsys, "rank", results, f"org__cheat={other}", *run)
    more = write_samples(results, "org__cheat", good, task="more")
    assert "'org__honest' has no results of task 'more'" in refusal(capsys, "rank", results, *run)
    more.unlink()
    assert "one run's selection has another alpha" in refusal(capsys, "rank", results, *run, "--alpha", "0.1")
    members = tmp_path / "members"
    shutil.copytree(runs[0], members)
    amend(members, "selection/clean/summary.json", {"direction": "members"})
    line = refusal(capsys, "rank", results, "--run", members, "--output", tmp_path / "x")
    assert "only direction clean selects items that are clean" in line


def test_where_nothing_is_clean_or_a_check_contradicts_it_that_is_told(
    runs: Runs, results: Path, tmp_path: Path, ranked: Ranked, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ("--run", runs[0], "--run", runs[1], "--alpha", "0.001")
    (task,) = ranked(results, *nothing)["tasks"]
    assert task["changes"] == []
    assert {one["accuracy_clean"] for one in task["models"]} == {None}
    out, _ = here(capsys, "rank", results, *nothing, "--output", tmp_path / "x")
    assert "there is no accuracy on clean items. Nothing can be selected at alpha 0.001" in " ".join(out.split())
    void = tmp_path / "void"
    shutil.copytree(runs[0], void)
    contradicted = {
        "conclusion": ConclusionValue.CONTRADICTED,
        "reasons": ["The words tell them apart."],
        "next": "Calibrate on others.",
    }
    amend(void, "selection/clean/summary.json", contradicted)
    out, _ = here(capsys, "rank", results, "--run", void, "--output", tmp_path / "x")
    assert out.startswith("CONTRADICTED, do not act on it: The words tell them apart.")
    assert "void: next: Calibrate on others." in " ".join(out.split())
