"""Token attributions of selected documents: the same bytes wherever, kept while it holds, and never worth a failure."""

import json
import math
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.answers.select import Answering, select_all
from pipeline.answers.top_documents import TokenAttributions, attributions_file, read_attributions
from pipeline.config.audit import ResourcesConfig
from pipeline.errors import IncompleteError
from pipeline.plan.description import build_config
from pipeline.run.machine import LocalMachine
from pipeline.run.manifest import read_run
from pipeline.run.scored import each_in_turn, read_scored
from pipeline.stages import tokens
from pipeline.stages.base import Stage
from pipeline.stages.events import Event
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts, withdraw_receipt
from ray_jobs.actors import map_shards
from ray_jobs.select import select_again
from ray_jobs.token_attributions import token_reader
from tests.helpers.finished import run
from tests.helpers.made_up import sentence, write_audit
from tests.helpers.signed import sign

AUDIT = [sentence(i, 60 if i % 3 == 0 else 12) for i in range(60)]
AUDIT[0] = f"Été, 数据 {AUDIT[0]}"
AUDIT[6] = f"{AUDIT[3]} and more"
UNSEEN = [sentence(1000 + i) for i in range(40)]
DETECTORS = ["loss", "zlib", "min_k_plus_plus", "m_entropy"]
SELECTIONS: list[dict[str, Any]] = [
    {"name": "members", "detectors": ["zlib"], "alpha": 0.2},
    {
        "name": "fused",
        "detectors": ["min_k_plus_plus", "zlib"],
        "procedure": "adadetect",
        "learn": "split",
        "alpha": 0.3,
    },
    {"name": "empty", "detectors": ["min_k_plus_plus"], "procedure": "by", "alpha": 0.001},
]
EVIDENCE = [attributions_file(name) for name in ("members", "fused")]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("selection/*/evidence*"))}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The folder of an audit that has run: tests that go on with it take a copy."""
    folder = tmp_path_factory.mktemp("attributions")
    settings = {"detectors": DETECTORS, "selections": SELECTIONS, "resources": {"shard_bytes": 6000}}
    run(write_audit(folder, tiny_model_folder, AUDIT, UNSEEN, **settings))
    return folder


@pytest.fixture
def copied(once: Path, tmp_path: Path) -> Path:
    """A copy of the run directory."""
    return Path(shutil.copytree(once / "run", tmp_path / "run"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that are opened for token attributions while the test runs."""
    paths: list[str] = []
    before = tokens.open_model
    monkeypatch.setattr(
        tokens, "open_model", lambda config, **rest: paths.append(config.path) or before(config, **rest)
    )
    return paths


def answer(folder: Path, *overrides: str, asks: bool = True, texts: bool = True) -> list[str]:
    """Answer the selections of a run anew, as `seenset run` does or, without asking a model, `select`; what is said."""
    store, lines = Store(str(folder)), []
    manifest, shards = read_run(store)
    config = build_config(manifest.config.model_dump(mode="json", by_alias=True), overrides)
    reader = token_reader(store, config.resources, LocalMachine(1, 0.0, 1), None, lines.append, lambda: None)
    scored = read_scored(store, shards)
    select_all(config, scored, None, each_in_turn, Answering("run", texts, reader if asks else None, lines.append))
    return lines


def attributions(folder: Path, selection: str = "members") -> dict[str, TokenAttributions]:
    return read_attributions(Store(str(folder)), selection)


def finite_scores(folder: Path, role: str) -> dict[str, dict[str, float]]:
    store = Store(str(folder))
    scored = read_scored(store, read_run(store)[1])
    rows = [row for r in scored.of(role) for row in scored.table(r, ["doc_id", *DETECTORS]).to_pylist()]
    return {row["doc_id"]: row for row in rows}


def test_every_selected_document_has_what_made_its_score(once: Path) -> None:
    folder = once / "run"
    scores = finite_scores(folder, "audit")
    selected = pq.read_table(folder / "selection/members/selected.parquet")["doc_id"].to_pylist()
    shown = attributions(folder)
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
    assert shown["audit-3"].near_copies == ["audit-6"]
    assert shown["audit-6"].near_copies == ["audit-3"]
    assert shown["audit-0"].near_copies == []


def test_a_fused_selection_shows_its_strongest_detector_and_the_fused_score(once: Path) -> None:
    scores = finite_scores(once / "run", "audit")
    shown = attributions(once / "run", "fused")
    assert shown
    for doc_id, one in shown.items():
        assert (one.kind, one.detector) == ("standardised log-probability", "min_k_plus_plus")
        assert one.ranked_by == "adadetect"
        lowest = sorted(value for value in one.values if value is not None)
        lowest = lowest[: max(1, int(len(lowest) * 0.2))]
        assert math.fsum(lowest) / len(lowest) == pytest.approx(scores[doc_id]["min_k_plus_plus"], abs=1e-5)
        assert one.score is not None
        assert one.score not in scores[doc_id].values()
    assert not (once / "run" / attributions_file("empty")).exists(), "an empty selection has no attributions"


def test_a_finished_run_opens_no_model(once: Path, opened: list[str]) -> None:
    assert run(once / "audit.yaml").exit_code == 0
    assert opened == []


def test_a_run_makes_lost_or_damaged_attributions_again_to_the_same_bytes(once: Path, copied: Path) -> None:
    before = files(copied)
    assert list(before) == sorted(EVIDENCE)
    (copied / EVIDENCE[0]).unlink()
    (copied / EVIDENCE[1]).write_bytes(b"not Parquet")
    run(once / "audit.yaml", f"run={copied}")
    assert files(copied) == before


def test_selecting_again_keeps_what_was_read_and_asks_no_model(copied: Path, opened: list[str]) -> None:
    before = files(copied)
    shown = attributions(copied, "fused") | attributions(copied)
    other = {"name": "other", "detectors": ["min_k_plus_plus"], "alpha": 0.9, "procedure": "bh"}
    select_again(str(copied), [f"selections={json.dumps([*SELECTIONS[:1], other])}"])
    assert files(copied)[EVIDENCE[0]] == before[EVIDENCE[0]]
    selected = pq.read_table(copied / "selection/other/selected.parquet")["doc_id"].to_pylist()
    seen = attributions(copied, "other")
    assert list(seen) == [doc_id for doc_id in selected[:50] if doc_id in shown]  # the most that evidence is kept of
    assert 0 < len(seen) < len(selected)
    assert {one.kind for one in seen.values()} == {"standardised log-probability"}
    assert all(one.pieces == shown[doc_id].pieces for doc_id, one in seen.items())
    assert opened == []
    lines = answer(copied)
    count = len(attributions(copied, "fused") | attributions(copied))
    assert lines[-1] == f"token attributions: {count} of {count} documents have them"
    assert files(copied) == before, "a run makes it as it was"


def test_a_text_that_stands_in_other_places_keeps_its_tokens_and_no_model_is_opened(
    copied: Path, opened: list[str]
) -> None:
    """As in a run whose corpus was put in another order, or that selects the copy of a document."""
    before, path = attributions(copied), copied / EVIDENCE[0]
    table = pq.read_table(path)
    moved = table.set_column(
        table.schema.get_field_index("row"), "row", pa.array([9_000 + i for i in range(len(table))])
    )
    pq.write_table(moved, path)
    sign(Store(str(copied)))
    (copied / EVIDENCE[1]).unlink()
    answer(copied, asks=False)
    assert attributions(copied) == before
    assert pq.read_table(path)["row"].to_pylist() == table["row"].to_pylist()
    assert opened == []


def test_the_number_of_documents_is_a_setting_and_no_text_leaves_none(copied: Path) -> None:
    every = attributions(copied)
    answer(copied, "evidence=3")
    assert attributions(copied) == dict(list(every.items())[:3])
    assert answer(copied, texts=False) == []
    assert files(copied) == {}
    assert answer(copied, "evidence=0") == []
    assert files(copied) == {}


def test_an_older_run_has_none_and_a_damaged_file_counts_as_none(copied: Path) -> None:
    path = copied / EVIDENCE[0]
    for spoil in (
        lambda: path.write_bytes(path.read_bytes()[:-9]),
        lambda: pq.write_table(pa.table({"doc_id": ["audit-0"]}), path),
        path.unlink,
    ):
        spoil()
        assert attributions(copied) == {}
    assert attributions(copied / "nowhere") == {}


def test_tokens_of_another_model_are_not_kept(copied: Path) -> None:
    path = copied / EVIDENCE[0]
    table = pq.read_table(path)
    (copied / EVIDENCE[1]).unlink()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"seenset_made_by": b"another"}), path)
    answer(copied, asks=False)
    assert files(copied) == {}


def test_texts_that_are_gone_have_none_and_the_answers_stand(once: Path, copied: Path) -> None:
    count = len(attributions(copied, "fused") | attributions(copied))
    for name in EVIDENCE:
        (copied / name).unlink()
    shutil.move(once / "audit.jsonl", once / "away.jsonl")
    try:
        lines = answer(copied)
    finally:
        shutil.move(once / "away.jsonl", once / "audit.jsonl")
    assert f"token attributions: reading {count} selected documents once more" in lines
    assert lines[-1] == f"token attributions: 0 of {count} documents have them"
    assert "could not be read; the first: " in lines[-2]
    assert "audit.jsonl" in lines[-2]
    assert files(copied) == {}
    assert (copied / "selection/members/summary.json").exists()


def test_a_model_behind_an_endpoint_gives_none(copied: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["config"]["model"] = {"endpoint": "http://127.0.0.1:1/v1", "name": "stub"}
    manifest["config"] |= {"detectors": DETECTORS[:2], "selections": SELECTIONS[:1]}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    sign(Store(str(copied)))
    answer(copied)
    assert files(copied) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_does_not_read_them_costs_the_attributions_alone(
    once: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_jobs.token_attributions.MOST_SECONDS", 0.0)
    for name in EVIDENCE:
        (copied / name).unlink()
    assert run(once / "audit.yaml", f"run={copied}", "resources.cluster=ray").exit_code == 0
    assert files(copied) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("tries", [2, 4])
def test_a_cluster_that_loses_its_actor_is_asked_three_times(
    once: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    asked: list[int] = []

    def lose_actors(stage: Stage, resources: ResourcesConfig, *rest: Any) -> Generator[Event]:
        asked.append(resources.actors)
        if len(asked) < tries:
            raise IncompleteError("Ray has lost actors for good")
        yield from map_shards(stage, resources, *rest)

    monkeypatch.setattr("ray_jobs.token_attributions.map_shards", lose_actors)
    before = files(copied)
    for name in EVIDENCE:
        (copied / name).unlink()
    assert run(once / "audit.yaml", f"run={copied}", "resources.cluster=ray").exit_code == 0
    assert asked == [1] * min(tries, 3)
    assert files(copied) == (before if tries <= 3 else {})


@pytest.mark.slow
def test_documents_that_are_tried_again_keep_the_attributions_of_the_others(once: Path, copied: Path) -> None:
    """What `--retry` does: a shard is scored again, and every selection answered anew."""
    before = files(copied)
    for receipt in list(read_receipts(Store(str(copied)), "score"))[:1]:
        withdraw_receipt(Store(str(copied)), "score", receipt.shard)
    run(once / "audit.yaml", f"run={copied}", retried=["model_error"])
    assert files(copied) == before
