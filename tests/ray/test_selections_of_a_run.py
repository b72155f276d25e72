"""Every procedure answers a finished run's scores; what cannot be answered is refused in one line."""

import hashlib
import json
import random
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_model import WORDS
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.corpus import keys
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.plan.description import build_config
from pipeline.results.summary import Summary
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts, withdraw_receipt, write_receipt
from ray_jobs import select as job
from ray_jobs.select import select_again
from tests.helpers.commands import user_error
from tests.helpers.finished import refile, score_run, with_column
from tests.helpers.made_up import write_corpus
from tests.helpers.signed import file_blind_test, sign

BOTH = ["loss", "zlib"]
ONE = ["zlib"]


def text(seed: int, words: int) -> str:
    """A text whose words do not show its length, as a full stop or a number would."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A scored run of three roles in two groups; long audited texts, which zlib takes for members, are marked."""
    root = tmp_path_factory.mktemp("finished")
    roles = {
        "audit": [text(i, 60 if i % 3 == 0 else 12) for i in range(120)],
        "unseen": [text(1000 + i, 12) for i in range(80)],
        "seen": [text(2000 + i, 60) for i in range(80)],
    }
    rows = {role: [{"text": t, "group": "ab"[i % 2]} for i, t in enumerate(texts)] for role, texts in roles.items()}
    config = build_config(
        {
            "run": str(root / "run"),
            "model": {"path": str(tiny_model_folder)},
            "corpus": write_corpus(root, rows, group="group"),
            "detectors": ["loss", "zlib", "min_k", "min_k_plus_plus"],
            "resources": {"cluster": "local", "shard_bytes": 4000},
        }
    )
    score_run(config)
    both = [{"name": d, "detectors": ONE, "direction": d} for d in ("members", "clean")]
    select_again(config.run, [f"selections={json.dumps(both)}"], texts=False)
    return root


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def select(run: Path, *selections: dict[str, Any], texts: bool = False) -> list[Summary]:
    named = [{"name": f"s{i}", "detectors": ONE, **selection} for i, selection in enumerate(selections)]
    return select_again(str(run), [f"selections={json.dumps(named)}"], texts=texts)


def selected(run: Path, index: int = 0) -> set[str]:
    return set(pq.read_table(run / f"selection/s{index}/selected.parquet")["doc_id"].to_pylist())


LONG = {f"audit-{i}" for i in range(0, 120, 3)}


@pytest.mark.parametrize(
    "asked",
    [
        {"procedure": "kernel"},
        {"procedure": "bh", "calibration": "by_group"},
        {"procedure": "bh", "calibration": "conditional", "delta": 0.2},
        *({"procedure": "td4eval", "detectors": BOTH, "weights": w} for w in ("rejections", "equal", "random", "max")),
        {"procedure": "td4eval", "detectors": BOTH, "reconformal": True},
        {"procedure": "adadetect", "detectors": BOTH, "step_up": "storey", "lambda": 0.6},
    ],
    ids=lambda asked: "-".join(str(v) for v in asked.values()),
)
def test_every_procedure_finds_what_stands_out(run: Path, asked: dict[str, Any]) -> None:
    summary = select(run, {"alpha": 0.2, **asked})[0]
    found = selected(run)
    assert len(found & LONG) >= 0.9 * len(LONG), "the long documents stand out by far"
    assert summary.n_selected == len(found)
    assert summary.strict.guarantee == "finite-sample"
    assert summary.promise
    names = ["blind", "resolution", "overlap", "near_copies", "groups", "duplicates", "truncated", "tail"]
    assert list(summary.diagnostics.by_name()) == names
    dependent = asked["procedure"] == "kernel"  # has no remedy for two groups of 60 documents
    assert (summary.conclusion, len(summary.reasons)) == (("contradicted", 1) if dependent else ("inconclusive", 0)), (
        summary.reasons
    )
    assert not dependent or "They form 2 blocks" in summary.reasons[0]
    verdicts = [r for p in sorted((run / "selection/s0/documents").iterdir()) for r in pq.read_table(p).to_pylist()]
    assert len(verdicts) == summary.n_audit == 120
    assert {v["doc_id"] for v in verdicts if v["selected"]} == found
    chosen = [v["p_value"] for v in verdicts if v["selected"]]
    assert max(chosen) <= min([v["p_value"] for v in verdicts if not v["selected"]], default=1.0)
    assert "selected" in (run / "report/report.html").read_text()


def test_the_knockoff_filter_reads_any_signed_column(run: Path) -> None:
    def wide(table: pa.Table, receipt: Receipt) -> pa.Table:
        values = np.where(np.array(table["zlib"]) > -0.05, 1.0, -1.0) * (1 + np.arange(len(table)) / 1000)
        return with_column(table, "min_k_plus_plus", pa.array(values))

    refile(run, wide)
    summary = select(run, {"procedure": "ktd", "detectors": ["min_k_plus_plus"], "alpha": 0.1})[0]
    assert summary.diagnostics.sign_symmetry is not None
    assert summary.guarantee == "heuristic"
    assert summary.minimum_selectable == 10
    everything = pa.concat_tables([pq.read_table(p) for p in (run / "scores").glob("audit-*.parquet")])
    w = np.array(everything["min_k_plus_plus"])
    steps = sorted(abs(w[w != 0]))
    good = [t for t in steps if (1 + (w <= -t).sum()) / max(1, (w >= t).sum()) <= 0.1]
    assert summary.n_selected == (int((w >= min(good)).sum()) if good else 0)


def test_clean_items_come_in_the_form_that_an_evaluation_harness_takes(run: Path) -> None:
    summary = select(run, {"direction": "clean", "procedure": "storey", "alpha": 0.2})[0]
    found = selected(run)
    assert summary.n_calibration == 80
    assert found >= {f"audit-{i}" for i in range(120)} - LONG
    ids = json.loads((run / "selection/s0/clean_ids.json").read_text())
    assert ids == {"audit": sorted(int(name.split("-")[1]) for name in found)}
    assert set(pq.read_table(run / "selection/s0/clean.parquet")["doc_id"].to_pylist()) == found


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_and_a_loop_give_the_same_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    asked = ({"procedure": "ptdi"}, {"procedure": "td4eval", "detectors": BOTH}, {"direction": "clean"})

    def digest() -> dict[str, str]:
        files = sorted(p for p in (run / "selection").rglob("*") if p.is_file())
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    select(run, *asked, texts=True)
    here = digest()
    monkeypatch.setattr(job, "MANY_SHARDS", 2)
    select(run, *asked, texts=True)
    assert ray.is_initialized()
    assert digest() == here


def test_several_selections_share_the_passes_over_the_scores(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = Store.read

    def counted(store: Store, name: str) -> bytes:
        reads.append(name)
        return read(store, name)

    monkeypatch.setattr(Store, "read", counted)

    def audit_reads(*asked: dict[str, Any]) -> int:
        reads.clear()
        select(run, *asked)
        return sum(name.startswith("scores/audit") for name in reads)

    one = audit_reads({"procedure": "bh"})
    assert audit_reads(*({"procedure": p} for p in ("bh", "storey", "ptdi", "kernel", "ebh"))) == one


def selected_rows(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(run / "selection/s0/selected.parquet").to_pylist()


def test_every_verdict_stands_beside_the_scores_that_it_rests_on(run: Path) -> None:
    select(run, {"procedure": "td4eval", "detectors": BOTH})
    scores = {row["doc_id"]: row for path in (run / "scores").iterdir() for row in pq.read_table(path).to_pylist()}
    verdicts = pq.read_table(run / "selection/s0/documents")
    assert verdicts.column_names == ["doc_id", "p_value", "selected", *BOTH, "source", "row"]
    assert len(verdicts) == 120
    for row in verdicts.to_pylist():
        assert [row[column] for column in BOTH] == [scores[row["doc_id"]][column] for column in BOTH]


def test_the_selected_are_shown_by_how_they_begin_unless_texts_are_left_out(finished: Path, run: Path) -> None:
    select(run, {"alpha": 0.2}, texts=True)
    texts = {row["id"]: row["text"] for row in map(json.loads, (finished / "audit.jsonl").read_text().splitlines())}
    shown = selected_rows(run)
    assert len(shown) >= 36
    for row in shown:
        text_of = texts[row["doc_id"]]
        assert len(row["excerpt"]) <= 201
        assert row["excerpt"].endswith("…") == (len(text_of) > 201)
        assert text_of.startswith(row["excerpt"].removesuffix("…"))
    report = json.loads((run / "report/report.json").read_text())
    assert list(report["selections"][0]["selected"][0]["scores"]) == ONE
    select(run, {"alpha": 0.2}, texts=False)
    assert "excerpt" not in selected_rows(run)[0]
    assert [row["doc_id"] for row in selected_rows(run)] == [row["doc_id"] for row in shown]


def test_the_texts_of_a_shard_are_read_once_for_all_selections(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read_shard = keys.read_shard

    def counted(shard: Shard, **options: Any) -> Generator[Document]:
        opened.append(shard.id)
        return read_shard(shard, **options)

    monkeypatch.setattr(keys, "read_shard", counted)
    summaries = select(run, {"alpha": 0.2}, {"alpha": 0.3}, {"procedure": "by", "alpha": 0.01}, texts=True)
    assert all(summary.n_selected for summary in summaries[:2])
    assert len(opened) == len(set(opened)) > 1


@pytest.mark.parametrize("change", ["gone", "of others", "another column", "shorter"])
def test_texts_that_are_not_those_that_were_scored_are_not_shown(
    finished: Path, run: Path, tmp_path: Path, change: str
) -> None:
    rows = [json.loads(line) for line in (finished / "audit.jsonl").read_text().splitlines()]
    changed = {
        "of others": [{**row, "text": f"x{row['text']}"} for row in rows],
        "another column": [{"body": row["text"]} for row in rows],
        "shorter": rows[:1],
    }
    moved = tmp_path / "moved.jsonl"
    if change != "gone":
        moved.write_text("".join(json.dumps(row) + "\n" for row in changed[change]))
    table = json.loads((run / "shards.json").read_text())
    (run / "shards.json").write_text(json.dumps([{**shard, "path": str(moved)} for shard in table]))
    sign(Store(str(run)))
    (summary,) = select(run, {"alpha": 0.2}, texts=True)
    assert summary.n_selected == len(selected_rows(run)) >= 36
    assert [row["doc_id"] for row in selected_rows(run) if row["excerpt"] is not None] in ([], ["audit-0"])


def test_documents_that_their_words_give_away_are_not_supported(run: Path) -> None:
    shutil.rmtree(run / "diagnostics", ignore_errors=True)
    summary = select(run, {"procedure": "bh", "alpha": 0.2})[0]
    assert summary.diagnostics.blind.n_audit == 120
    apart = BlindDiagnostic(outcome=Outcome.FAILED, sentence="Their words differ.", auc=0.9, low=0.85, high=0.95)
    file_blind_test(Store(str(run)), apart)
    summary = select(run, {"procedure": "bh", "alpha": 0.2})[0]
    assert (summary.conclusion, summary.reasons) == ("contradicted", ["Their words differ."])
    facts = json.loads((run / "report/report.json").read_text())
    assert facts["selections"][0]["answer"]["headline"].startswith("Contradicted: their words alone")
    assert "Contradicted" in (run / "report/report.html").read_text()


def test_texts_that_are_gone_leave_the_blind_test_undone_and_say_so(run: Path) -> None:
    shutil.rmtree(run / "diagnostics")
    table = json.loads((run / "shards.json").read_text())
    for shard in table:
        shard["path"] = "/no/such/place.jsonl"
    (run / "shards.json").write_text(json.dumps(table))
    sign(Store(str(run)))
    summary = select(run, {})[0]
    assert summary.diagnostics.blind.outcome == "inconclusive"
    assert "was not tested" in summary.diagnostics.blind.sentence
    assert (summary.conclusion, summary.reasons) == ("inconclusive", [])


def refusal(run: Path, *selections: dict[str, Any]) -> str:
    return user_error(select, run, *selections)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"delta": 1.5}, "must be in (0, 1), got 1.5"),
        ({"procedure": "td4eval", "detectors": BOTH, "calibration": "by_group"}, "takes calibration pooled"),
        ({"procedure": "ktd", "direction": "clean"}, "takes direction members"),
        ({"procedure": "td5eval"}, "procedure"),
        ({"weights": "heavy"}, "weights"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(run: Path, asked: dict[str, Any], part: str) -> None:
    assert part in refusal(run, asked)


def test_scores_that_are_no_numbers_or_of_two_runs_are_refused(run: Path) -> None:
    store = Store(str(run))
    _, receipt, *_ = (r for r in read_receipts(store, "score") if r.role == "audit")
    withdraw_receipt(store, "score", receipt.shard)
    write_receipt(store, "score", replace(receipt, fingerprint={**receipt.fingerprint, "dtype": "bfloat16"}))
    assert "score shards differ in dtype" in refusal(run, {})
    withdraw_receipt(store, "score", receipt.shard)
    write_receipt(store, "score", receipt)

    def spoiled(table: pa.Table, other: Receipt) -> pa.Table:
        values = pa.array([float("nan"), *table["zlib"].to_pylist()[1:]])
        return with_column(table, "zlib", values) if other.shard == receipt.shard else table

    refile(run, spoiled)
    assert "1 scores that are not finite" in refusal(run, {})
    refile(run, lambda table, _: table.drop_columns(["zlib"]))
    assert "zlib" in refusal(run, {})


def test_a_group_without_calibration_documents_is_named(run: Path) -> None:
    refile(run, lambda table, _: with_column(table, "group", pa.array(["a"] * len(table), pa.string())), "unseen")
    assert "group 'b' has audit documents and no calibration documents" in refusal(run, {"calibration": "by_group"})


def test_equal_scores_select_nothing(run: Path) -> None:
    refile(run, lambda table, _: with_column(table, "zlib", pa.array([0.5] * len(table))))
    for summary in select(run, {"procedure": "bh"}, {"procedure": "ptdi"}, {"procedure": "td4eval", "detectors": ONE}):
        assert summary.n_selected == 0
