"""Which documents with versions are used: one of each family, items with the same options, and marks in place."""

import random
from collections.abc import Callable
from itertools import permutations
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundle_runs import forged, in_every, in_first

import seenset
from pipeline.bundle.container import RefutedError
from pipeline.bundle.verify import verify_bundle
from pipeline.checks.shuffle import VersionDraws
from pipeline.store.files import Store
from seenset.versions import Versions
from tests.helpers.commands import ended
from tests.helpers.made_up_items import (
    TEMPLATE,
    Row,
    draws_of_items,
    draws_of_versions,
    make_items,
    make_versions,
    name,
    write_rows,
)
from tests.helpers.marked_runs import run_here, versions_audit, write_texts


def used(draws: VersionDraws, rows: list[Row]) -> list[str]:
    return [row["id"] for row in rows if row["id"] not in draws.left_out]


def with_options(count: int, orders: list[list[str]], seed: int = 0) -> list[Row]:
    """Items with questions of their own and the given published options, in turn."""
    rows = make_items(count, seed)
    return [{**row, "choices": orders[number % len(orders)]} for number, row in enumerate(rows)]


# --- equal items and near-duplicates


def test_items_that_are_equal_but_for_case_blanks_and_punctuation_are_used_once() -> None:
    (row,) = make_items(1)
    same = [
        row,
        {**row, "id": "a", "question": row["question"].upper()},
        {**row, "id": "b", "question": f"  {row['question'].replace(' ', '  ')} "},
        {**row, "id": "c", "question": row["question"].replace(",", ";"), "choices": row["choices"][::-1]},
        {**row, "id": "d", "choices": [f"{text.lower()}." for text in row["choices"]]},
    ]
    draws = draws_of_items(same)
    assert len(used(draws, same)) == 1
    assert draws.independent.repeated == 4
    assert used(draws_of_items(same[::-1]), same) == used(draws, same), "the one that is used is chosen by its id"


def passage(rng: random.Random, words: int = 80) -> str:
    return " ".join(name(rng) for _ in range(words))


def test_near_duplicates_are_used_once_and_questions_on_one_passage_each() -> None:
    """Two words that differ take ten of 250 runs away: 240 of 260 are common, five standard errors above 0.8."""
    rng = random.Random(1)
    text, row = passage(rng, 240), make_items(1)[0]
    near = [
        {
            **row,
            "id": f"n{i}",
            "question": f"{text} {name(rng)}",
            "choices": [f"{row['choices'][0]} {i}", *row["choices"][1:]],
        }
        for i in range(4)
    ]
    draws = draws_of_items(near)
    assert (len(used(draws, near)), draws.independent.repeated) == (1, 3)
    apart = [{**one, "question": f"{text} {one['question']}"} for one in make_items(6, seed=2)]
    assert used(draws_of_items(apart), apart) == [one["id"] for one in apart]


def test_documents_with_own_versions_are_used_once_for_each_published_family() -> None:
    rng, rows = random.Random(3), make_versions(4, lambda rng, texts: rng.randrange(6))
    text = passage(rng)
    family = [
        {"id": f"f{i}", "versions": [f"{text} {name(rng)}" if j == i else passage(rng) for j in range(6)], "index": i}
        for i in range(5)
    ]
    draws = draws_of_versions([*rows, *family])
    assert len([one for one in used(draws, family) if one.startswith("f")]) == 1
    assert used(draws, rows) == [row["id"] for row in rows]


def test_documents_that_share_all_versions_are_used_once_whatever_was_published() -> None:
    rng = random.Random(4)
    texts = [passage(rng) for _ in range(6)]
    rows = [{"id": f"d{i}", "versions": rng.sample(texts, 6), "index": i % 6} for i in range(8)]
    kept = {
        tuple(used(draws_of_versions([{**row, "index": (row["index"] + step) % 6} for row in rows]), rows))
        for step in range(6)
    }
    assert len(kept) == 1
    assert len(next(iter(kept))) == 1


# --- items with the same options


def shuffled_orders(options: list[str], count: int, seed: int) -> list[list[str]]:
    """Orders of the options for so many items, each as often; one honest shuffle in ten would be taken for none."""
    orders = [list(order) for order in permutations(options)] * (count // factorial(len(options)))
    return random.Random(seed).sample(orders, count)


def test_a_thousand_shuffled_items_with_yes_and_no_are_all_used() -> None:
    orders = shuffled_orders(["Yes", "No"], 1000, 5)
    rows = [{**row, "choices": order} for row, order in zip(make_items(1000), orders, strict=True)]
    draws = draws_of_items(rows)
    assert len(used(draws, rows)) == 1000
    (found,) = draws.independent.sets
    assert (found.items, found.all_used) == (1000, True)
    assert draws.diagnostic is not None
    assert draws.diagnostic.outcome == "passed"


@pytest.mark.parametrize(
    ("count", "first"),
    [(895, 895), (20, 20), (100, 70), (19, 10), (2, 1)],
    ids=["895", "20 of 20", "70 to 30", "19", "2"],
)
def test_a_set_in_one_order_or_a_small_one_is_used_once(count: int, first: int) -> None:
    rows = [
        {**row, "choices": ["True", "False"] if number < first else ["False", "True"]}
        for number, row in enumerate(make_items(count))
    ]
    draws = draws_of_items(rows)
    assert len(used(draws, rows)) == 1
    (found,) = draws.independent.sets
    assert (found.items, found.all_used) == (count, False)
    assert draws.diagnostic is not None
    assert f"others have the same options ({count} with those of {found.used})" in draws.diagnostic.sentence


def test_the_largest_order_of_a_set_of_several_options_counts() -> None:
    words = ["entailment", "neutral", "contradiction"]
    shuffled = [
        {**row, "choices": order} for row, order in zip(make_items(60), shuffled_orders(words, 60, 6), strict=True)
    ]
    fixed = [{**row, "choices": words} for row in make_items(60)]
    assert len(used(draws_of_items(shuffled), shuffled)) == 60
    assert len(used(draws_of_items(fixed), fixed)) == 1


# --- one function for runs and Python


def test_ten_ids_of_one_text_are_one_document_in_python_too() -> None:
    texts = tuple(f"{passage(random.Random(1))} version {number}" for number in range(10))
    versions = Versions(tuple(f"d{i}" for i in range(10)), (texts,) * 10, (3,) * 10)
    scores = np.tile(np.arange(10) == 3, 10).astype(float)
    answer = seenset.select_versions(versions, scores, alpha=0.1)
    assert not answer.selected.any()
    assert answer.p_collection >= 0.05
    assert len(answer.left_out) == 9
    assert answer.documents["rank"].null_count == 9
    assert all("equal to document" in reason for reason in answer.left_out.values())
    assert "9 documents are left out as equal to another one" in answer.shuffle


def test_index_0_of_all_documents_is_contradicted_in_python_and_drawn_first_lifts_it() -> None:
    rows = make_versions(200, lambda rng, texts: 0)
    versions = Versions(
        tuple(row["id"] for row in rows),
        tuple(tuple(row["versions"]) for row in rows),
        tuple(row["index"] for row in rows),
    )
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(200, 6)) + 1.5 * (np.arange(6) == 0)
    with pytest.warns(seenset.UnsupportedWarning, match="CONTRADICTED, do not act on it"):
        answer = seenset.select_versions(versions, scores.ravel(), alpha=0.1)
    assert answer.conclusion == "contradicted"
    assert answer.selected.any()
    assert repr(answer).startswith(
        "VersionsAnswer(CONTRADICTED, do not act on it: The published versions were not drawn"
    )
    assert "guarantee contradicted" in answer.sentence
    assert seenset.select_versions(versions, scores.ravel(), alpha=0.1, drawn_first=True).conclusion == "supported"


def test_a_run_and_python_leave_out_the_same_documents(tmp_path: Path, tiny_model_folder: Path) -> None:
    rng = random.Random(7)
    text, rows = passage(rng, 40), make_versions(12, lambda rng, texts: rng.randrange(6))
    for i in range(4):
        texts = [f"{text} {name(rng, 6)}" for _ in range(6)]  # no two of 16^6 are equal
        rows.append({"id": f"f{i}", "versions": texts, "index": rng.randrange(6)})
    rows.sort(key=lambda row: row["id"])
    source = {"path": str(write_rows(tmp_path / "own.jsonl", rows)), "id": "id", "versions": {}}
    assert run_here(tmp_path, versions_audit(tmp_path, tiny_model_folder, source)) == 0
    summary = Store(str(tmp_path / "run")).read_json("selection/list/summary.json")
    table = pa.table({key: [row[key] for row in rows] for key in ("id", "versions", "index")})
    pq.write_table(table, tmp_path / "own.parquet")
    versions = seenset.read_versions(tmp_path / "own.parquet")
    assert not versions.marked
    answer = seenset.audit_versions(str(tiny_model_folder), versions, "loss", alpha=0.2)
    assert summary["diagnostics"]["shuffle"]["left_out"] == len(answer.left_out) == 3
    assert summary["diagnostics"]["shuffle"]["sentence"] == answer.shuffle
    verdicts = pq.read_table(tmp_path / "run/selection/list/documents").to_pylist()
    assert {row["doc_id"] for row in verdicts if row["p_value"] == 1} >= {*answer.left_out}
    assert ended("verdict", tmp_path / "run") == 0
    verdict = Store(str(tmp_path / "run")).read_json("verdict.json")
    assert verdict["versions"]["documents"] == 13
    assert verdict["versions"]["p_value"] == answer.p_collection


def test_documents_that_mark_drew_are_all_used_and_not_checked(tmp_path: Path, tiny_model_folder: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", 6)
    lines = (tmp_path / "texts.jsonl").read_text()
    (tmp_path / "texts.jsonl").write_text(lines + lines.replace('"id": "d', '"id": "e'))
    assert ended("mark", tmp_path / "texts.jsonl", "--out", tmp_path / "marked", "--versions", 6, "--id", "id") == 0
    private = tmp_path / "marked/private/versions.parquet"
    versions = seenset.read_versions(private)
    assert versions.marked
    answer = seenset.select_versions(versions, np.random.default_rng(0).normal(size=72), alpha=0.2)
    assert (answer.left_out, answer.shuffle) == ({}, "")
    source = {"path": str(private), "id": "id", "versions": {"kinds": "kinds", "forms": "forms"}}
    assert run_here(tmp_path, versions_audit(tmp_path, tiny_model_folder, source)) == 0
    summary = Store(str(tmp_path / "run")).read_json("selection/list/summary.json")
    assert "shuffle" not in summary["diagnostics"]
    assert ended("verdict", tmp_path / "run") == 0
    assert Store(str(tmp_path / "run")).read_json("verdict.json")["versions"]["documents"] == 12
    table = pq.read_table(private).drop_columns(["salt"])
    pq.write_table(table, tmp_path / "own.parquet")
    assert not seenset.read_versions(tmp_path / "own.parquet").marked


# --- a contradicted run


@pytest.mark.parametrize("kind", ["options", "versions"])
def test_a_contradicted_draw_contradicts_list_and_verdict_with_their_exit_codes(
    tmp_path: Path, tiny_model_folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "options":
        rows = [{**row, "choices": sorted(row["choices"])} for row in make_items(30)]
        source = {"versions": {"permute": "choices", "template": TEMPLATE}}
    else:
        rows, source = make_versions(30, lambda rng, texts: 0), {"versions": {}}
    source |= {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "id": "id"}
    audit = versions_audit(tmp_path, tiny_model_folder, source)
    audit["selections"][0] |= {"alpha": 0.9}
    assert run_here(tmp_path, audit) == 0
    out = capsys.readouterr().out
    assert "warning: The published" in out, "before scoring"
    summary = Store(str(tmp_path / "run")).read_json("selection/list/summary.json")
    assert summary["conclusion"] == "contradicted"
    assert summary["reasons"] == [summary["diagnostics"]["shuffle"]["sentence"]]
    selected = summary["n_selected"] > 0
    assert ended("run", tmp_path / "audit.yaml", "--fail-if-selected") == (5 if selected else 0)
    code = ended("verdict", tmp_path / "run", "--fail-if-trained")
    verdict = Store(str(tmp_path / "run")).read_json("verdict.json")
    assert (verdict["conclusion"], verdict["reasons"]) == ("contradicted", summary["reasons"])
    assert verdict["answer"] == ("not supported" if verdict["versions"]["p_value"] <= 0.05 else "not shown")
    assert code == (5 if verdict["answer"] == "not supported" else 0)
    assert ended("pack", tmp_path / "run", tmp_path / "bundle") == 0
    assert ended("verify", tmp_path / "bundle") == 0


# --- the evidence


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> bytes:
    """The evidence of a run over shuffled items, two of which are equal."""
    folder = tmp_path_factory.mktemp("bundle")
    rows = make_items(20)
    rows.append({**rows[0], "id": "twice"})
    path = write_rows(folder / "items.jsonl", rows)
    source = {"path": str(path), "id": "id", "versions": {"permute": "choices", "template": TEMPLATE}}
    assert run_here(folder, versions_audit(folder, tiny_model_folder, source)) == 0
    assert ended("verdict", folder / "run") == 0
    assert ended("pack", folder / "run", folder / "bundle") == 0
    return (folder / "bundle").read_bytes()


def findings(data: bytes, outcome: str) -> list[str]:
    return [str(finding) for finding in verify_bundle(data, "b").findings if finding.outcome == outcome]


def test_verify_recomputes_the_check_and_the_documents_that_are_left_out(bundle: bytes) -> None:
    assert findings(bundle, "refuted") == []
    assert not any("check shuffle" in line or "draws:" in line for line in findings(bundle, "stated"))

    def sorted_codes(features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "orders": [0] * len(features["orders"])}

    forgery = forged(bundle, {"documents.parquet": in_every("features", sorted_codes)})
    refuted = findings(forgery, "refuted")
    assert any(
        "diagnostics.shuffle.outcome is stated as 'passed', and the scores give 'failed'" in line for line in refuted
    )
    assert any(line.startswith("verdict: conclusion is stated as 'supported'") for line in refuted)
    number = iter(range(100))
    other = forged(bundle, {"documents.parquet": in_every("features", lambda one: {**one, "equal": next(number)})})
    assert findings(other, "refuted") == [], "near-duplicates are known by their sketches too"


@pytest.mark.parametrize(
    "change",
    [
        lambda one: {**one, "orders": one["orders"][1:]},
        lambda one: {**one, "places": [*one["places"], 1]},
        lambda one: {**one, "places": [-7] * len(one["places"])},
        lambda one: {**one, "number": 1},
        lambda one: {**one, "number": 2**31 - 1},
        lambda one: {**one, "sketches": one["sketches"][1:]},
        lambda one: {**one, "columns": [*one["columns"], "answer"]},
        lambda one: {**one, "order": -9},
        lambda one: None,
    ],
)
def test_features_that_no_item_has_are_refused_in_one_line(
    bundle: bytes, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    with pytest.raises(RefutedError, match="features"):
        verify_bundle(forged(bundle, {"documents.parquet": in_first("features", change)}), "b")


def test_a_bundle_without_features_of_its_draws_is_refuted(bundle: bytes) -> None:
    """Whoever removes them hides that published versions were not drawn at random."""
    without = forged(bundle, {"documents.parquet": lambda table: table.drop_columns(["features"])})
    with pytest.raises(RefutedError, match=r"documents\.parquet"):
        verify_bundle(without, "b")
