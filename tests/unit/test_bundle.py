"""Bundles: the same bytes, every flipped bit is noticed, and a forged number does not follow from the scores."""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from bundle_runs import ASKED, asked, forged, in_first, scored_run
from commands import ended, refusal, user_error
from finished import with_column

from pipeline.bundle.container import INDEX, RefutedError, pack_members, unpack
from pipeline.bundle.verify import verify_bundle
from pipeline.selection.procedures import PROCEDURES
from pipeline.store.files import Store
from pipeline.store.receipts import sealed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Store:
    """A finished run with four answers and a verdict."""
    return scored_run(
        tmp_path_factory.mktemp("bundle"), tiny_model_folder, asked("members", "storey", "learnt", "clean")
    )


@pytest.fixture(scope="module")
def bundle(run: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its bundle."""
    path = tmp_path_factory.mktemp("packed") / "run.bundle"
    assert ended("pack", run.url, path) == 0
    return path


def test_a_bundle_holds_and_says_what_is_only_stated(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("verify", bundle) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == {"holds", "stated"}
    assert any("members, check blind: by the run, not recomputed" in line for line in lines)
    assert any(line.startswith("holds    verdict: it follows from the scores: trained on") for line in lines)
    assert any("audited documents trained on with 0.95 confidence" in line for line in lines), "the bound"
    assert "nothing is refuted" in lines[-1]


def test_every_procedure_and_calibration_is_verified(tmp_path: Path, tiny_model_folder: Path) -> None:
    assert {one["procedure"] for one in ASKED.values()} == set(PROCEDURES) - {"versions"}
    detectors = ["loss", "min_k", "min_k_plus_plus"]
    store = scored_run(tmp_path, tiny_model_folder, asked(*ASKED), detectors=detectors)
    assert ended("pack", store.url, tmp_path / "a") == 0
    verification = verify_bundle((tmp_path / "a").read_bytes(), "a")
    assert verification.holds
    held = [finding.about for finding in verification.findings if finding.outcome == "holds"]
    assert all(held.count(f"selection {name}") == 3 for name in ASKED)
    assert "verdict" in held


def test_a_scan_of_a_schedule_is_verified(tmp_path: Path, tiny_model_folder: Path) -> None:
    series = {"ledger": str(tmp_path / "ledger"), "alpha": 0.5, "rule": "spend", "horizon": 4}
    question = {"name": "members", "detectors": ["loss"], "procedure": "bh"}
    store = scored_run(tmp_path, tiny_model_folder, [question], series=series)
    assert ended("pack", store.url, tmp_path / "a") == 0
    data = (tmp_path / "a").read_bytes()
    assert verify_bundle(data, "a").holds
    assert not verify_bundle(forged(data, {MEMBERS: with_key("alpha", value=0.5)}), "a").holds


def test_the_same_run_gives_the_same_bytes_and_nothing_is_overwritten(
    run: Store, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("pack", run.url, tmp_path / "again", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    data = (tmp_path / "again").read_bytes()
    assert data == bundle.read_bytes()
    assert facts["bytes"] == len(data)
    assert facts["sha256"] == verify_bundle(data, "again").sha256
    assert "is there already" in refusal(capsys, "pack", run.url, tmp_path / "again")
    assert [file.name for file in tmp_path.iterdir()] == ["again"]


def test_any_reader_of_zip_files_opens_a_bundle_which_holds_texts_where_they_are_asked_for(
    run: Store, bundle: Path, tmp_path: Path
) -> None:
    assert ended("pack", run.url, tmp_path / "texts", "--texts") == 0
    assert verify_bundle((tmp_path / "texts").read_bytes(), "a").holds
    tables = []
    for path in (bundle, tmp_path / "texts"):
        with zipfile.ZipFile(path) as file:
            assert file.testzip() is None
            assert file.namelist()[:3] == [INDEX, "manifest.json", "documents.parquet"]
            tables.append(pq.read_table(io.BytesIO(file.read("documents.parquet"))))
    without, table = tables
    assert "text" not in without.column_names
    assert without["role"].to_pylist().count("audit") == 81
    texts = dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
    assert texts["audit-3"].startswith("Text 3 ")
    assert texts["empty"] is None


def test_every_flipped_bit_is_noticed_and_the_damaged_member_is_named(bundle: Path) -> None:
    data = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as file:
        spans = {
            one.filename: range(at := one.header_offset + 30 + len(one.filename), at + one.file_size)
            for one in file.infolist()
        }
    rng, named = random.Random(0), set()
    places = [*range(41), *range(len(data) - 120, len(data)), *(rng.randrange(len(data)) for _ in range(500))]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        damaged = next((name for name, span in spans.items() if place in span), "the container")
        with pytest.raises(RefutedError, match=f"^b: {damaged} is damaged$"):
            verify_bundle(bytes(changed), "b")
        named.add(damaged)
    assert {"the container", INDEX, "documents.parquet"} <= named
    for other in (data[:-1], data[:3000], data + b"0"):
        with pytest.raises(RefutedError, match="is damaged"):
            verify_bundle(other, "b")


def with_key(*path: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Sets a key inside mappings."""

    def change(record: dict[str, Any]) -> dict[str, Any]:
        inner = record
        for key in path[:-1]:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        assert inner[path[-1]] != value
        inner[path[-1]] = value
        return record

    return change


def all_listed(table: pa.Table) -> pa.Table:
    return with_column(table, "selected", pc.less(table["p_value"], 0.5).combine_chunks())


MEMBERS, LISTED, VERDICT = "answers/members.json", "answers/members.parquet", "verdict.json"
HALF = [False] * 81 + [True] * 30 + [False] * 30 + [True] * 40
FORGERIES = {
    "count": {MEMBERS: with_key("n_selected", value=70)},
    "audited": {MEMBERS: with_key("n_audit", value=60)},
    "alpha": {MEMBERS: with_key("alpha", value=0.01)},
    "question": {INDEX: with_key("selections", "0", "alpha", value=0.01)},
    "procedure": {INDEX: with_key("selections", "0", "procedure", value="by")},
    "threshold": {MEMBERS: with_key("threshold", value=0.01)},
    "nulls": {"answers/storey.json": with_key("null_proportion", value=0.01)},
    "bound": {MEMBERS: with_key("bound", "members_at_least", value=79)},
    "confidence": {MEMBERS: with_key("bound", "confidence", value=0.999)},
    "no bound": {MEMBERS: with_key("bound", value=None)},
    "guarantee": {"answers/learnt.json": with_key("guarantee", value="asymptotic")},
    "promise": {MEMBERS: with_key("promise", value="All are members.")},
    "strict": {"answers/storey.json": with_key("strict", "n_selected", value=79)},
    "resolution": {MEMBERS: with_key("diagnostics", "resolution", "minimum_selectable", value=1000)},
    "extra key": {MEMBERS: lambda value: {**value, "verified": True}},
    "p-value": {LISTED: in_first("p_value", lambda _: 0.001)},
    "list": {LISTED: all_listed},
    "list and count": {LISTED: in_first("selected", lambda _: True), MEMBERS: with_key("n_selected", value=42)},
    "score": {"documents.parquet": in_first("score:loss", lambda _: 99.0)},
    "calibration": {"documents.parquet": lambda t: with_column(t, "calibrates", pa.array(HALF))},
    "collection p": {VERDICT: with_key("test", "p_value", value=0.0002)},
    "collection": {VERDICT: with_key("answer", value="not shown")},
    "collection count": {VERDICT: with_key("counts", "0", "at_least", value=80)},
    "seed": {"manifest.json": with_key("config", "seed", value=99)},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_number_is_refuted_under_correct_digests(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "forged").write_bytes(forged(bundle.read_bytes(), FORGERIES[name]))
    assert ended("verify", tmp_path / "forged") == 5
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("refuted  ")]
    assert lines[-1].endswith("REFUTED")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"documents.parquet": in_first("score:loss", lambda _: float("nan"))}, "column score:loss holds a value"),
        ({"documents.parquet": in_first("id", lambda _: "other")}, "is not of the audited documents"),
        ({"documents.parquet": lambda table: table.drop_columns("calibrates")}, "has the columns"),
        ({"manifest.json": lambda value: {}}, "missing"),
        ({INDEX: with_key("selections", "0", "procedure", value="magic")}, "unknown procedure 'magic'"),
        ({INDEX: with_key("selections", "0", "name", value="others")}, "does not list the members"),
        ({VERDICT: with_key("blind", value=3)}, "verify"),
    ],
)
def test_members_that_are_not_what_they_must_be_are_refused_in_one_line(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], match: str
) -> None:
    (tmp_path / "verify").write_bytes(forged(bundle.read_bytes(), changes))
    assert match in refusal(capsys, "verify", tmp_path / "verify", code=5)


def test_what_is_no_bundle_is_refused_in_one_line(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no bundle")
    assert "text is not a bundle" in refusal(capsys, "verify", tmp_path / "text")
    assert "is no file" in refusal(capsys, "verify", tmp_path / "nothing")
    data, (index, members) = bundle.read_bytes(), unpack(bundle.read_bytes(), "b")
    later = sealed({**{k: v for k, v in json.loads(members[INDEX]).items() if k != "digest"}, "schema": 2})
    text = (json.dumps(later, indent=2, ensure_ascii=False) + "\n").encode()
    assert len(text) == len(members[INDEX])
    (tmp_path / "later").write_bytes(data[:41] + text + data[41 + len(text) :])
    assert "is a bundle of version 2, written by seenset" in refusal(capsys, "verify", tmp_path / "later")
    keys = index.model_dump(mode="json", by_alias=True, exclude={"members"})
    assert "format" in user_error(pack_members, {**keys, "format": "other"}, {})


def test_a_run_that_is_not_finished_or_damaged_is_not_packed(
    run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a run directory" in refusal(capsys, "pack", tmp_path / "nothing")
    copy = tmp_path / "run"
    for folder, code, words in (("receipts/score", 3, "are not scored"), ("scores", 2, "scores/")):
        shutil.copytree(run.root, copy)
        next((copy / folder).iterdir()).unlink()
        assert words in refusal(capsys, "pack", copy, tmp_path / "b", code=code)
        shutil.rmtree(copy)
    shutil.copytree(run.root, copy)
    summary = copy / "selection/members/summary.json"
    summary.write_text(summary.read_text().replace('"alpha": 0.3', '"alpha": 0.2'))
    assert "summary.json is damaged" in refusal(capsys, "pack", copy, tmp_path / "b")
    assert not (tmp_path / "b").exists()
