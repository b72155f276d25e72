"""The same configuration, inputs and seed give the same bytes; where scores are exact, the recorded ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from answers import answer, check_recorded, check_same, decisions, quarantine, receipts, rows, scores
from command import done, here, seenset
from world import ASKED, FEW, HIGH, ODD, TIED, questions, score_of, texts_from, write_config

import seenset as interface

Audit = Callable[..., Path]


@pytest.mark.recorded
@pytest.mark.parametrize("name", ASKED)
def test_an_answer_from_exact_scores_is_the_recorded_one(reference: Path, name: str) -> None:
    check_recorded(f"answers/{name}", answer(reference, name))


@pytest.mark.recorded
def test_answers_by_group_are_the_recorded_ones(world: Path, audit: Audit, tmp_path: Path) -> None:
    corpus = yaml.safe_load(write_config(world, "grouped").read_text())["corpus"]
    for source in corpus.values():
        source["group"] = "kind"
    grouped = {**questions("storey")[0], "name": "grouped", "calibration": "by_group"}
    done(here("run", audit(corpus=corpus, selections=[grouped, *questions("bh", "storey")])))
    for name in ("grouped", "bh", "storey"):
        check_recorded(f"answers/of-groups-{name}", answer(tmp_path / "run", name))


def test_exact_scores_are_those_of_the_texts(world: Path, reference: Path) -> None:
    scored = rows(reference)
    for number, text in enumerate(texts_from(20_000, 99)):
        row = scored[f"unseen-{number:03d}"]
        assert (row[HIGH], row[TIED]) == (score_of(text), score_of(text, 12))
    assert len(scored) == 60 + 84 + 2 + 99 + 49


def test_odd_documents_are_quarantined_for_their_reason_and_none_vanishes(reference: Path) -> None:
    first = 36  # of the file with the odd texts
    expected = {(f"lines-{first + i:03d}", first + i): why for i, (_, why) in enumerate(ODD) if why}
    expected["lines-003", first + len(ODD)] = "duplicate_id"
    everyone = pq.read_table(reference / "selection/storey/documents").to_pylist()
    assert len(everyone) == 60 + 84 + len(ODD) + 1
    out = [row for row in everyone if row[HIGH] is None]
    assert len(out) == len(expected)
    assert {(row["p_value"], row["selected"]) for row in out} == {(1.0, False)}
    filed = quarantine(reference)
    assert {key: expected[key] for key in expected if expected[key] != "duplicate_id"}.items() <= filed.items()
    assert json.loads((reference / "status.json").read_text())["quarantined"] == len(expected) - 1, "in its shard"


def test_equal_p_values_are_listed_by_score_then_by_source_and_row(reference: Path) -> None:
    files = ["lines.jsonl", "packed.jsonl.gz", "table.parquet", "comma.csv"]
    for name, column, sign in (("storey", HIGH, -1), ("tied", TIED, -1), ("clean", HIGH, 1)):
        read = pq.read_table(reference / "selection" / name / "selected.parquet").to_pylist()
        keys = [(row["p_value"], sign * row[column], files.index(Path(row["source"]).name), row["row"]) for row in read]
        by_name = [(*key[:2], Path(row["source"]).name, key[3]) for key, row in zip(keys, read, strict=True)]
        assert len(keys) > 20
        assert len({key[0] for key in keys}) < len(keys), "there are ties"
        assert keys == sorted(keys) or by_name == sorted(by_name)


def test_roles_in_other_encodings_and_delimiters_are_scored_and_judged_together(
    world: Path, audit: Audit, tmp_path: Path
) -> None:
    texts = [f"{text} Größe {i}" for i, text in enumerate(texts_from(40_000, 30))]
    lines = ["id;text", *(f"old-{i:03d};{text}" for i, text in enumerate(texts))]
    (world / "old.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
    old = {"path": "old.csv", "id": "id", "encoding": "cp1252", "delimiter": ";"}
    corpus = {"audit": old, "unseen": {"path": "unseen.jsonl", "id": "id"}}
    path, run = audit(corpus=corpus, selections=questions("bh")), tmp_path / "run"
    done(here("run", path))
    assert {key: row[HIGH] for key, row in rows(run).items() if key.startswith("old")} == {
        f"old-{i:03d}": score_of(text) for i, text in enumerate(texts)
    }
    before = decisions(run)
    done(here("select", run))
    done(here("run", path))
    assert decisions(run).keys() == before.keys()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_of_this_machine_changes_no_byte(
    audit: Audit, reference: Path, tmp_path: Path, workers: int
) -> None:
    done(here("run", audit(resources={"actors": workers})))
    check_same(tmp_path / "run", reference, *FEW)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_cluster_changes_no_byte(
    audit: Audit, reference: Path, tmp_path: Path, workers: int, ray_address: str
) -> None:
    path = audit(resources={"cluster": "auto", "actors": workers})
    ended = done(seenset("run", path, RAY_ADDRESS=ray_address))
    assert "token attributions of these" not in ended.err, ended.err
    assert "could not be read" not in ended.err, ended.err
    check_same(tmp_path / "run", reference, *FEW)


def test_the_python_interface_gives_the_bytes_of_the_command(audit: Audit, reference: Path, tmp_path: Path) -> None:
    run = interface.audit(audit(), quiet=True)
    check_same(tmp_path / "run", reference, *FEW)
    opened = interface.open_run(tmp_path / "run")
    for one in (run, opened):
        assert one.state == "complete"
        assert set(one.selections) == set(FEW)
        assert Path(str(one.report)) == tmp_path / "run/report/report.html"
    selected = pq.read_table(reference / "selection/storey/selected.parquet")
    assert opened.selections["storey"].table().equals(selected)
    assert opened.selections["storey"].n_selected == len(selected) > 0
    documents = pq.read_table(reference / "selection/storey/documents")
    assert opened.selections["storey"].documents().to_pylist() == documents.to_pylist()


def test_scores_and_answers_in_memory_are_those_of_a_run(world: Path, reference: Path) -> None:
    scored = rows(reference)
    texts = texts_from(20_000, 99)
    ids = [f"unseen-{number:03d}" for number in range(99)]
    table = interface.score(str(world / "model"), texts, ["loss", "min_k"], ids=ids)
    for row in table.to_pylist():
        for column in ("loss", "min_k"):
            assert row[column] == pytest.approx(scored[row["doc_id"]][column], rel=1e-5)
    summary = answer(reference, "storey")["numbers"]
    everyone = pq.read_table(reference / "selection/storey/documents").to_pylist()
    judged = [row for row in everyone if row[HIGH] is not None]
    unseen = [scored[name][HIGH] for name in ids]
    chosen = interface.select([row[HIGH] for row in judged], unseen, procedure="bh", alpha=0.25)
    command = pq.read_table(reference / "selection/bh/documents").to_pylist()
    assert list(chosen.p_values) == [row["p_value"] for row in command if row[HIGH] is not None]
    assert summary["n_calibration"] == 99


def test_a_resumed_run_scores_nothing_again_and_comes_to_the_same_bytes(
    finished: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shards = sorted((run / "receipts/score").glob("*.json"))
    for file in shards[::2]:
        file.unlink()
    shutil.rmtree(run / "selection")
    kept = {file: file.stat().st_mtime_ns for file in shards[1::2]}
    tables = {one["data"] for name, one in receipts(run).items()}
    before = {name: (run / name).stat().st_mtime_ns for name in tables}
    done(here("run", finished, "--set", "resources.actors=2"))
    check_same(run, reference, *FEW)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert {name: (run / name).stat().st_mtime_ns for name in tables} == before


def test_a_finished_run_answers_again_without_a_change_of_a_file(audit: Audit, tmp_path: Path) -> None:
    path, run = audit(), tmp_path / "run"
    done(here("run", path))
    before = {**scores(run), **decisions(run)}
    times = {file: file.stat().st_mtime_ns for file in (run / "selection").rglob("*") if file.is_file()}
    done(here("run", path))
    assert {**scores(run), **decisions(run)} == before
    assert {file: file.stat().st_mtime_ns for file in times} == times


def test_another_question_touches_no_score_and_the_first_one_is_answered_as_before(
    finished: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before = scores(run)
    other = done(here("select", run, "--set", "selections.0.alpha=0.9", "--json")).json
    assert other["selections"][0]["alpha"] == 0.9
    assert decisions(run, "storey") != decisions(reference, "storey")
    done(here("select", run))
    assert scores(run) == before
    check_same(run, reference, *FEW)
    history = [json.loads(line) for line in (run / "selection/history.jsonl").read_text().splitlines()]
    assert len(history) == 3


@pytest.mark.parametrize(
    "change",
    ["max_tokens=8", "detectors=[loss, min_k, {exact: {step: 1}}]", "resources.shard_bytes=999", "seed=7"],
)
def test_what_would_change_a_score_is_refused_on_resume(finished: Path, tmp_path: Path, change: str) -> None:
    before = scores(tmp_path / "run")
    ended = here("run", finished, "--set", change)
    assert ended.code == 2
    assert change.split("=")[0] in ended.line
    assert scores(tmp_path / "run") == before
