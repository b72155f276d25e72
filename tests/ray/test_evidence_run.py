"""The evidence of a run's selected documents: the same bytes wherever, kept while it holds, and never worth a failure."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished import run
from made_up import sentence, write_audit
from openai_server import openai_server
from rich.console import Console

from pipeline.audit.description import load_config
from pipeline.audit.evidence import DocumentEvidence, evidence_file, read_evidence
from pipeline.audit.manifest import read_run
from pipeline.audit.scored import read_scored
from pipeline.stages import tokens
from pipeline.store.files import Store
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import select_again

AUDIT = [sentence(i, 60 if i % 3 == 0 else 12) for i in range(60)]
AUDIT[0] = f"Été, 数据 {AUDIT[0]}"
AUDIT[6] = f"{AUDIT[3]} and more"
UNSEEN = [sentence(1000 + i) for i in range(40)]
DETECTORS = ["loss", "zlib", "min_k_plus_plus", "m_entropy"]
SELECTIONS: list[dict[str, Any]] = [
    {"name": "members", "detectors": ["zlib"], "alpha": 0.2},
    {"name": "fused", "detectors": ["min_k_plus_plus", "zlib"], "procedure": "adadetect", "alpha": 0.3},
    {"name": "nobody", "detectors": ["min_k_plus_plus"], "procedure": "by", "alpha": 0.001},
]
EVIDENCE = [evidence_file(name) for name in ("members", "fused")]

Rerun = Callable[..., Any]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("selection/*/evidence*"))}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The folder of an audit that has run: tests that go on with it take a copy."""
    folder = tmp_path_factory.mktemp("evidence")
    settings = {"detectors": DETECTORS, "selections": SELECTIONS}
    run(write_audit(folder, tiny_model_folder, AUDIT, UNSEEN, **settings))
    return folder


@pytest.fixture
def again(once: Path, tmp_path: Path) -> Rerun:
    """Runs the finished audit again in a copy of its run directory: (*overrides, **arguments) -> outcome."""
    shutil.copytree(once / "run", tmp_path / "run")
    return partial(run, once / "audit.yaml", f"run={tmp_path / 'run'}")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that are opened for evidence while the test runs."""
    opened: list[str] = []
    before = tokens.open_model
    monkeypatch.setattr(
        tokens, "open_model", lambda config, **rest: opened.append(config.path) or before(config, **rest)
    )
    return opened


def evidence(folder: Path, selection: str = "members") -> dict[str, DocumentEvidence]:
    return read_evidence(Store(str(folder)), selection)


def scores_of(folder: Path, role: str) -> dict[str, dict[str, float]]:
    store = Store(str(folder))
    scored = read_scored(store, read_run(store)[1])
    rows = [row for r in scored.of(role) for row in scored.table(r, ["doc_id", *DETECTORS]).to_pylist()]
    return {row["doc_id"]: row for row in rows}


def test_every_selected_document_has_what_made_its_score(once: Path) -> None:
    folder = once / "run"
    scores, known = scores_of(folder, "audit"), scores_of(folder, "unseen")
    selected = pq.read_table(folder / "selection/members/selected.parquet")["doc_id"].to_pylist()
    shown = evidence(folder)
    assert list(shown) == selected
    assert {"audit-0", "audit-3"} <= set(selected)
    for doc_id, one in shown.items():
        assert one.text == AUDIT[int(doc_id.split("-")[1])] == "".join(one.pieces)
        assert (one.kind, one.detector, one.ranked_by) == ("log-probability", "zlib", "zlib")
        assert one.values[0] is None
        assert len(one.values) == len(one.pieces)
        values = [value for value in one.values if value is not None]
        assert math.fsum(values) / len(values) == pytest.approx(scores[doc_id]["loss"], abs=1e-4)
        assert one.score == scores[doc_id]["zlib"]
        assert one.neighbours == nearest(one.score, {name: row["zlib"] for name, row in known.items()})
    assert shown["audit-3"].near_copies == ["audit-6"]
    assert shown["audit-6"].near_copies == ["audit-3"]
    assert shown["audit-0"].near_copies == []


def nearest(score: float, known: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(known.items(), key=lambda item: abs(item[1] - score))[:5]


def test_a_fused_selection_shows_its_strongest_detector_and_the_fused_scores_of_its_neighbours(once: Path) -> None:
    scores = scores_of(once / "run", "audit")
    shown = evidence(once / "run", "fused")
    assert shown
    for doc_id, one in shown.items():
        assert (one.kind, one.detector) == ("standardised log-probability", "min_k_plus_plus")
        assert one.ranked_by == "adadetect"
        lowest = sorted(value for value in one.values if value is not None)
        lowest = lowest[: max(1, int(len(lowest) * 0.2))]
        assert math.fsum(lowest) / len(lowest) == pytest.approx(scores[doc_id]["min_k_plus_plus"], abs=1e-4)
        assert len({name for name, _ in one.neighbours}) == 5
        assert one.score is not None
        distances = [abs(score - one.score) for _, score in one.neighbours]
        assert distances == sorted(distances)
    calibrating = {name for one in shown.values() for name, _ in one.neighbours}
    assert calibrating <= scores_of(once / "run", "unseen").keys()


def test_where_nothing_is_selected_there_is_none(once: Path) -> None:
    assert evidence(once / "run", "nobody") == {}
    assert not (once / "run" / evidence_file("nobody")).exists()


def test_a_finished_run_opens_no_model_and_a_lost_file_comes_back_to_the_same_bytes(
    again: Rerun, tmp_path: Path, unread: list[str]
) -> None:
    before = files(tmp_path / "run")
    assert list(before) == sorted(EVIDENCE)
    again()  # which notes that the run directory has moved
    assert again().exit_code == 0
    assert unread == []
    (tmp_path / "run" / EVIDENCE[0]).unlink()
    again()
    assert files(tmp_path / "run") == before
    (tmp_path / "run" / EVIDENCE[1]).write_bytes(b"not Parquet")
    again()
    assert files(tmp_path / "run") == before


def test_selecting_again_keeps_what_was_read_and_reads_nothing(again: Rerun, tmp_path: Path, unread: list[str]) -> None:
    before, shown = files(tmp_path / "run"), evidence(tmp_path / "run")
    other = {"name": "other", "detectors": ["min_k_plus_plus"], "alpha": 0.9, "procedure": "bh"}
    run_folder = str(tmp_path / "run")
    select_again(run_folder, [f"selections={json.dumps([*SELECTIONS[:1], other])}"])
    assert files(tmp_path / "run")[EVIDENCE[0]] == before[EVIDENCE[0]]
    seen = evidence(tmp_path / "run", "other")
    selected = pq.read_table(tmp_path / "run/selection/other/selected.parquet")["doc_id"].to_pylist()
    assert 0 < len(seen) < len(selected)
    assert {one.kind for one in seen.values()} == {"standardised log-probability"}
    both = next(name for name in seen if name in shown)
    assert seen[both].pieces == shown[both].pieces
    assert unread == []
    again()
    assert files(tmp_path / "run") == before, "the run makes it as it was"


def test_no_text_leaves_none(again: Rerun, tmp_path: Path) -> None:
    again(texts=False)
    assert files(tmp_path / "run") == {}
    again()
    select_again(str(tmp_path / "run"), [], texts=False)
    assert files(tmp_path / "run") == {}


def test_the_number_of_documents_is_a_setting_that_changes_no_score(again: Rerun, tmp_path: Path) -> None:
    receipts = {path: path.read_bytes() for path in (tmp_path / "run/receipts").rglob("*.json")}
    every = evidence(tmp_path / "run")
    again("evidence=3")
    assert evidence(tmp_path / "run") == dict(list(every.items())[:3])
    again("evidence=0")
    assert files(tmp_path / "run") == {}
    assert {path: path.read_bytes() for path in receipts} == receipts


def test_an_older_run_has_none_and_a_damaged_file_counts_as_none(again: Rerun, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    path = tmp_path / "run" / EVIDENCE[0]
    for spoil in (
        lambda: path.write_bytes(path.read_bytes()[:-9]),
        lambda: pq.write_table(pa.table({"doc_id": ["audit-0"]}), path),
        path.unlink,
    ):
        spoil()
        assert read_evidence(store, "members") == {}
    assert read_evidence(Store(str(tmp_path / "nowhere")), "members") == {}


def test_tokens_of_another_model_are_not_kept(again: Rerun, tmp_path: Path) -> None:
    path = tmp_path / "run" / EVIDENCE[0]
    table = pq.read_table(path)
    shutil.rmtree(tmp_path / "run/selection/fused")
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"seenset_made_by": b"another"}), path)
    select_again(str(tmp_path / "run"), [])
    assert files(tmp_path / "run") == {}


def test_a_text_that_is_gone_has_none_and_the_run_ends_well(once: Path, tmp_path: Path, again: Rerun) -> None:
    for name in EVIDENCE:
        (tmp_path / "run" / name).unlink()
    path = once / "audit.jsonl"
    shutil.move(path, once / "away.jsonl")
    try:
        select_again(str(tmp_path / "run"), [])
    finally:
        shutil.move(once / "away.jsonl", path)
    assert files(tmp_path / "run") == {}


def test_the_log_says_how_many_have_it(once: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        reporter = Reporter(Console(file=log, width=200))
        run_audit(load_config(str(once / "audit.yaml"), [f"run={tmp_path / 'run'}"]), reporter)
    union = {*evidence(once / "run"), *evidence(once / "run", "fused")}
    lines = (tmp_path / "log").read_text().splitlines()
    assert f"evidence: {len(union)} of {len(union)} documents have it" in lines
    assert files(tmp_path / "run") == files(once / "run")


@pytest.mark.usefixtures("cluster")
def test_a_cluster_and_threads_come_to_the_same_bytes(once: Path, tmp_path: Path) -> None:
    wanted = files(once / "run")
    for name, *place in (("threads", "resources.actors=3"), ("cluster", "resources.cluster=ray", "resources.actors=2")):
        run(once / "audit.yaml", f"run={tmp_path / name}", *place)
        assert files(tmp_path / name) == wanted, name


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_cannot_read_them_costs_the_evidence_alone(
    again: Rerun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_jobs.evidence.MOST_SECONDS", 0.0)
    for name in EVIDENCE:
        (tmp_path / "run" / name).unlink()
    assert again("resources.cluster=ray").exit_code == 0
    assert files(tmp_path / "run") == {}


def test_a_model_behind_an_endpoint_gives_none(tmp_path: Path, tiny_model_folder: Path) -> None:
    with openai_server(models=["stub"]) as server:
        path = write_audit(
            tmp_path,
            tiny_model_folder,
            AUDIT[:20],
            UNSEEN[:14],
            model={"endpoint": server.url, "name": "stub"},
            detectors=[{"samia": {"draws": 2}}],
            selections=[{"name": "members", "detectors": ["samia(draws=2)"], "alpha": 0.9}],
        )
        assert run(path).exit_code == 0
    assert files(tmp_path / "run") == {}
