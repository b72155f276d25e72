"""Bundles: the same bytes, every flipped bit is noticed, and a forged number does not follow from the scores."""

import io
import json
import random
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from bundle_runs import ASKED, asked, forged, in_first, scored_run

from pipeline.bundle.container import INDEX, RefutedError, pack_members, unpack
from pipeline.bundle.verify import verify_bundle
from pipeline.selection.procedures import PROCEDURES
from pipeline.store.files import Store
from pipeline.store.receipts import DIGEST, sealed
from tests.helpers.commands import ended, refusal, user_error
from tests.helpers.finished import with_column
from tests.helpers.made_up import sentence
from tests.helpers.marked_runs import write_audit, write_texts
from tests.helpers.signed import sign


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Store:
    """A finished run with four answers and a verdict."""
    return scored_run(
        tmp_path_factory.mktemp("bundle"), tiny_model_folder, asked("members", "storey", "learnt", "clean")
    )


@pytest.fixture(scope="module")
def bundle(run: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def with_key(*path: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        inner = record
        for key in path[:-1]:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        assert inner[path[-1]] != value
        inner[path[-1]] = value
        return record

    return change


def author(role: str, i: int) -> dict[str, Any]:
    """Groups of one role, three of both, and a family of 12 audited editions of one text."""
    name = f"both {i}" if i < 3 else f"{role} {i // (5 if role == 'audit' else 3)}"
    edition = {"text": f"{sentence(9_999, 40)} edition {i}"} if role == "audit" and 50 <= i < 62 else {}
    return {"kind": None if i % 7 == 6 else name, **edition}


DEPENDENT: dict[str, dict[str, Any]] = {
    "storey": {"procedure": "storey"},
    "each": {"procedure": "storey", "calibrate": "one_per_block"},
    "ptdi": {"procedure": "ptdi"},
    "bounded": {"procedure": "bound"},
    "plain": {"procedure": "bh", "calibrate": "one_per_block"},
    "learnt": {"procedure": "adadetect", "detectors": ["loss", "min_k"], "step_up": "storey", "learn": "split"},
    "pooled": {"procedure": "adadetect", "detectors": ["loss", "min_k"], "step_up": "storey", "learn": "pool"},
    "fused": {"procedure": "td4eval", "detectors": ["loss", "min_k"], "reconformal": True, "step_up": "storey"},
    "clean": {"direction": "clean", "procedure": "storey", "alpha": 0.5},
}


@pytest.fixture(scope="module")
def dependent(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The bundle of a run whose documents have groups and near-duplicates."""
    folder = tmp_path_factory.mktemp("dependent")
    questions = [{"name": name, "detectors": ["loss"], "alpha": 0.3, **one} for name, one in DEPENDENT.items()]
    store = scored_run(folder, tiny_model_folder, questions, each=author)
    assert ended("pack", store.url, folder / "bundle") == 0
    return folder


def test_answers_that_rest_on_groups_and_near_duplicates_follow_from_the_bundle(dependent: Path) -> None:
    verification = verify_bundle((dependent / "bundle").read_bytes(), "a")
    assert verification.holds
    with zipfile.ZipFile(dependent / "bundle") as file:
        documents = pq.read_table(io.BytesIO(file.read("documents.parquet"))).to_pylist()
        summaries = {name: json.loads(file.read(f"answers/{name}.json")) for name in DEPENDENT}
    families = Counter((row["role"], row["family"]) for row in documents if row["family"] is not None)
    assert list(families.values()) == [12]
    assert sum(row["group"] is None for row in documents if row["role"] == "audit") == 80 // 7 + 1
    checks = {name: summary["diagnostics"] for name, summary in summaries.items()}
    assert checks["storey"]["groups"]["outcome"] == "failed", "unseen documents in threes"
    assert checks["each"]["groups"]["outcome"] == "inconclusive"
    assert summaries["each"]["n_calibration"] < summaries["storey"]["n_calibration"] == 60
    assert summaries["plain"]["details"] == {}
    for name in ("storey", "each", "learnt", "pooled", "fused", "clean"):
        assert summaries[name]["details"]["kept"] < 80, name
        assert (
            "of each block (a group, a family of near-duplicates, or what both join)"
            in checks[name]["groups"]["sentence"]
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"documents.parquet": lambda t: with_column(t, "family", pa.nulls(len(t), pa.int64()))},
        {"documents.parquet": lambda t: with_column(t, "group", pa.nulls(len(t), pa.string()))},
        {"answers/storey.json": with_key("diagnostics", "groups", "outcome", value="inconclusive")},
        {"answers/storey.json": with_key("diagnostics", "groups", value=None)},
        {"answers/each.json": with_key("details", "kept_of_a_block", value=1.0)},
        {"answers/ptdi.json": with_key("diagnostics", "groups", "n_selected_by_storey", value=79)},
        {INDEX: with_key("selections", "1", "calibrate", value="all")},
    ],
)
def test_a_bundle_that_states_other_blocks_is_refuted(dependent: Path, changes: dict[str, Any]) -> None:
    data = forged((dependent / "bundle").read_bytes(), changes)
    assert not verify_bundle(data, "a").holds


def test_a_scan_of_a_schedule_is_verified(tmp_path: Path, tiny_model_folder: Path) -> None:
    series = {"ledger": str(tmp_path / "ledger"), "alpha": 0.5, "horizon": 4}
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
    assert "exists already" in refusal(capsys, "pack", run.url, tmp_path / "again")
    assert [file.name for file in tmp_path.iterdir()] == ["again"]


def test_any_reader_of_zip_files_opens_a_bundle_with_texts_where_asked_for(
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


MEMBERS, LISTED, VERDICT = "answers/members.json", "answers/members.parquet", "verdict.json"
HALF = [False] * 81 + [True] * 30 + [False] * 30 + [True] * 40
OTHER = {"n_selected": 70, "n_audit": 60, "alpha": 0.01, "threshold": 0.01, "bound": None, "promise": "All of them."}
FORGERIES = {
    **{name: {MEMBERS: with_key(name, value=value)} for name, value in OTHER.items()},
    "question": {INDEX: with_key("selections", "0", "alpha", value=0.01)},
    "procedure": {INDEX: with_key("selections", "0", "procedure", value="by")},
    "nulls": {"answers/storey.json": with_key("null_proportion", value=0.01)},
    "bound": {MEMBERS: with_key("bound", "members_at_least", value=79)},
    "confidence": {MEMBERS: with_key("bound", "confidence", value=0.999)},
    "guarantee": {"answers/learnt.json": with_key("guarantee", value="asymptotic")},
    "strict": {"answers/storey.json": with_key("strict", "n_selected", value=79)},
    "resolution": {MEMBERS: with_key("diagnostics", "resolution", "minimum_selectable", value=1000)},
    "extra key": {MEMBERS: lambda value: {**value, "verified": True}},
    "p-value": {LISTED: in_first("p_value", lambda _: 0.001)},
    "list": {LISTED: lambda t: with_column(t, "selected", pc.less(t["p_value"], 0.5).combine_chunks())},
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


def is_refuted(data: bytes) -> bool:
    """Whether a bundle is refuted, also because its members do not fit one another."""
    try:
        return not verify_bundle(data, "a").holds
    except RefutedError:
        return True


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> bytes:
    """The bundle of a run with smoothed ranks, weights of detectors and weights of groups."""
    folder = tmp_path_factory.mktemp("chosen")
    drawn, *others = asked("smoothed", "pooled", "weighted")
    questions = [{**drawn, "procedure": "bh", "alpha": 0.02}, *others]  # a list that other draws change
    store = scored_run(folder, tiny_model_folder, questions, seen=0)  # so that pooled learns from the pool
    assert ended("pack", store.url, folder / "bundle") == 0
    return (folder / "bundle").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"answers/weighted.json": with_key("groups", "0", "weight", value=1.5)},
        {"answers/weighted.json": with_key("groups", "1", "n_high", value=0)},
        {"answers/weighted.json": with_key("groups", value=None)},
        {"answers/pooled.json": with_key("weights", value=[0.5, 0.5])},
        {"answers/pooled.json": with_key("learn", value=None)},
        {"answers/smoothed.json": with_key("smoothed", "n_whole", value=1)},
        {"answers/smoothed.json": with_key("smoothed", "others", "entered", value=[50] * 20)},
        {"answers/smoothed.json": with_key("smoothed", value=None)},
        {"answers/smoothed.json": with_key("threshold", value=0.5)},
        {INDEX: with_key("selections", "0", "ranks", value="whole")},
        {INDEX: with_key("selections", "1", "learn", value="split")},
        {INDEX: with_key("selections", "2", "boost", value=None)},
        {"manifest.json": with_key("fingerprint", "model", value="0" * 64)},  # other draws
        {"documents.parquet": in_first("id", lambda _: "another")},
    ],
)
def test_another_draw_or_weight_is_refuted(chosen: bytes, changes: dict[str, Any]) -> None:
    assert verify_bundle(chosen, "a").holds
    assert is_refuted(forged(chosen, changes))


def test_records_of_a_run_without_the_key_learn_are_of_a_split(tmp_path: Path, tiny_model_folder: Path) -> None:
    (question,) = asked("learnt")
    store = scored_run(tmp_path, tiny_model_folder, [{**question, "learn": "split"}], seen=0)
    root = Path(store.root)
    for name in ("manifest.json", "selection/history.jsonl"):
        lines = [(root / name).read_text()] if name.endswith(".json") else (root / name).read_text().splitlines()
        assert '"learn": "split"' in lines[0]
        (root / name).write_text("".join(f"{json.dumps(without_learn(json.loads(line)))}\n" for line in lines))
    (root / "verdict.json").unlink()
    sign(store)
    summary = root / "selection/learnt/summary.json"
    stated = json.loads(summary.read_text())
    assert (stated["n_calibration"], "learn" in stated) == (30, False), "half of 60"
    assert ended("pack", root, tmp_path / "bundle") == 0
    assert verify_bundle((tmp_path / "bundle").read_bytes(), "bundle").holds
    assert ended("report", root) == 0
    (page,) = json.loads((root / "report/report.json").read_text())["selections"]
    assert (page["summary"]["n_calibration"], "learn" in page["summary"]) == (30, False)
    assert ended("export", root, tmp_path / "out", "--selection", "learnt", "--unsupported-too") == 0
    assert ended("select", root) == 0
    again = json.loads(summary.read_text())
    assert {key: again[key] for key in ("n_selected", "n_calibration")} == {
        key: stated[key] for key in ("n_selected", "n_calibration")
    }


def without_learn(value: Any) -> Any:
    """A record of plain values without the key, under a digest that fits it."""
    if isinstance(value, list):
        return [without_learn(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_learn(one) for key, one in value.items() if key not in ("learn", DIGEST)}
    return sealed(kept) if DIGEST in value else kept


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"documents.parquet": in_first("score:loss", lambda _: float("nan"))},
            "column score:loss has an invalid value",
        ),
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
    assert "is not a file" in refusal(capsys, "verify", tmp_path / "nothing")
    data, (index, members) = bundle.read_bytes(), unpack(bundle.read_bytes(), "b")
    for form in (3, 5):
        other = sealed({**{k: v for k, v in json.loads(members[INDEX]).items() if k != "digest"}, "schema": form})
        text = (json.dumps(other, indent=2, ensure_ascii=False) + "\n").encode()
        assert len(text) == len(members[INDEX])
        (tmp_path / "other").write_bytes(data[:41] + text + data[41 + len(text) :])
        assert f"is a bundle of version {form}, written by seenset" in refusal(capsys, "verify", tmp_path / "other")
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


SELECTIONS = [
    {"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": 0.5},
    {"name": "both", "detectors": ["loss", "min_k"], "procedure": "versions", "alpha": 0.5},
    {"name": "ranks", "detectors": ["min_k"], "procedure": "bh", "alpha": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A folder with 24 marked documents, a run over 20 of them with its verdict, and its bundle."""
    folder = tmp_path_factory.mktemp("marked")
    write_texts(folder / "texts.jsonl", 24)
    assert ended("mark", folder / "texts.jsonl", "--out", folder / "marked", "--versions", 6, "--seed", 3) == 0
    audit = write_audit(folder, "run", tiny_model_folder, detectors=["loss", "min_k"], selections=SELECTIONS)
    assert ended("run", audit, "--limit", 20) == 0
    assert ended("verdict", folder / "runs/run") == 0
    assert ended("pack", folder / "runs/run", folder / "bundle") == 0
    return folder


def test_a_bundle_holds_and_its_indices_lead_to_its_commitment_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commitment = folder / "marked/commitment.json"
    root = json.loads(commitment.read_text())["root"]
    assert ended("verify", folder / "bundle", "--commitment", commitment) == 0
    lines = capsys.readouterr().out.splitlines()
    led = f"commitment: 20 documents with their indices lead to root {root}"
    assert f"holds    {led} of 24 committed documents" in lines
    assert sum(line.startswith("holds    selection ") for line in lines) == 9
    assert any(line.startswith("holds    verdict: it follows from the scores") for line in lines)
    assert ended("verify", folder / "bundle") == 0
    assert f"stated   {led}; verify --commitment" in capsys.readouterr().out
    (tmp_path / "other.json").write_text(commitment.read_text().replace(root, "0" * 64))
    assert ended("verify", folder / "bundle", "--commitment", tmp_path / "other.json") == 5
    assert "refuted  commitment: " in capsys.readouterr().out
    assert ended("verify", folder / "bundle", "--commitment", folder / "run.yaml") == 2
    assert "is not a commitment.json of seenset mark" in capsys.readouterr().err


def flipped(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


def of_versions(**values: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda verdict: {**verdict, "versions": {**verdict["versions"], **values}}


DOCUMENTS = "documents.parquet"
ONE = "commitment: 1 documents with their indices lead to root"
OF_MARKED: dict[str, tuple[dict[str, Any], str]] = {
    "score": ({DOCUMENTS: in_first("versions", lambda v: {**v, "scores": [9.0] * 12})}, "verdict: versions."),
    "index": ({DOCUMENTS: in_first("versions", lambda v: {**v, "published": (v["published"] + 1) % 6})}, ONE),
    "version": ({DOCUMENTS: in_first("commitments", flipped)}, ONE),
    "proof": ({DOCUMENTS: in_first("proof", lambda v: [flipped(v[0]), *v[1:]])}, ONE),
    "node": ({DOCUMENTS: in_first("proof", lambda v: [v[0][:-1] + b"0", *v[1:]])}, ONE),
    "no salt": ({DOCUMENTS: in_first("commitments", lambda _: None)}, "commitment: 1 of 20 documents have no salt"),
    "rank": ({"answers/list.parquet": in_first("p_value", lambda _: 0.01)}, "selection list: p_value of document"),
    "list": ({"answers/ranks.parquet": in_first("selected", lambda v: not v)}, "selection ranks: selected of document"),
    "collection p": ({VERDICT: of_versions(p_value=0.00011)}, "verdict: versions.p_value is stated as 0.00011"),
    "e-value": ({VERDICT: of_versions(e_value=1e9)}, "verdict: versions.e_value"),
}


@pytest.mark.parametrize("name", OF_MARKED)
def test_a_forged_value_is_refuted_and_named_under_correct_digests(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, words = OF_MARKED[name]
    (tmp_path / "forged").write_bytes(forged((folder / "bundle").read_bytes(), changes))
    assert ended("verify", tmp_path / "forged", "--commitment", folder / "marked/commitment.json") == 5
    assert f"refuted  {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("versions", lambda v: {**v, "scores": v["scores"][1:]}, "scores of a document are not those of its versions"),
        ("versions", lambda v: {**v, "forms": [v["forms"][0][1:], *v["forms"][1:]]}, "sites of a document are not"),
        ("versions", lambda v: {**v, "published": 6}, "index outside its versions"),
        ("commitments", lambda v: v[:-1], "commitments of a document are not those"),
        ("versions", lambda _: None, "column versions has an invalid value"),
    ],
)
def test_values_of_another_shape_are_refused_in_one_line(
    folder: Path, column: str, change: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(RefutedError, match=words):
        verify_bundle(forged((folder / "bundle").read_bytes(), {DOCUMENTS: in_first(column, change)}), "b")


def test_texts_that_are_packed_have_the_digests_of_the_commitment(folder: Path, tmp_path: Path) -> None:
    assert ended("pack", folder / "runs/run", tmp_path / "b", "--texts") == 0
    data = (tmp_path / "b").read_bytes()
    held = [one.about for one in verify_bundle(data, "b").findings if one.outcome == "holds"]
    assert "texts" in held
    other = forged(data, {DOCUMENTS: in_first("texts", lambda texts: ["Another text.", *texts[1:]])})
    (refuted,) = [one for one in verify_bundle(other, "b").findings if one.outcome == "refuted"]
    assert (refuted.about, "(1 do)" in refuted.sentence) == ("texts", True)


def test_a_file_without_salts_is_verified_without_a_commitment(
    folder: Path, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(folder / "marked/private/versions.parquet").drop_columns(["salt"])
    (tmp_path / "marked/private").mkdir(parents=True)
    pq.write_table(table, tmp_path / "marked/private/versions.parquet")
    assert ended("run", write_audit(tmp_path, "run", tiny_model_folder)) == 0
    assert ended("pack", tmp_path / "runs/run", tmp_path / "b") == 0
    capsys.readouterr()
    assert ended("verify", tmp_path / "b") == 0
    assert "stated   commitment: 24 of 24 documents have no salt" in capsys.readouterr().out
    assert ended("verify", tmp_path / "b", "--commitment", folder / "marked/commitment.json") == 5


def test_a_private_file_that_is_not_the_one_that_was_scored_is_not_packed(
    folder: Path, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "marked", tmp_path / "marked")
    assert ended("run", write_audit(tmp_path, "run", tiny_model_folder)) == 0
    path = tmp_path / "marked/private/versions.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take(pa.array([1, 0, *range(2, 24)])), path)
    capsys.readouterr()
    assert ended("pack", tmp_path / "runs/run", tmp_path / "b") == 2
    assert "does not hold the versions that were scored: put the file back" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
