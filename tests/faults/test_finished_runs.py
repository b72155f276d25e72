"""A run that is asked the same again: files with equal bytes stay untouched, and it needs no files of its models."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from rich.console import Console

from pipeline.answers.top_documents import attributions_file
from pipeline.models.devices import Device
from pipeline.plan.description import load_config
from pipeline.plan.stage_plan import build_stages
from pipeline.results.status import run_status
from pipeline.run.plan import make_plan
from pipeline.stages import tokens
from pipeline.store.files import Store
from ray_jobs.audit import RunResult, run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import give_verdict, write_bundle
from tests.helpers.commands import here, refusal, user_error
from tests.helpers.made_up import MakeAudit
from tests.helpers.object_store import BUCKET, object_store

GONE = "are not there: the fingerprint that the run recorded is used"


@pytest.fixture
def audit(make_audit: MakeAudit, tmp_path: Path, tiny_model_folder: Path) -> Callable[..., Path]:
    """Writes an audit with a reference model, each model in a folder of its own."""

    def make(**settings: Any) -> Path:
        for name in ("model", "reference"):
            shutil.copytree(tiny_model_folder, tmp_path / name, dirs_exist_ok=True)
        models = {"model": {"path": "model"}, "reference_model": {"path": str(tmp_path / "reference")}}
        selections = [
            {"name": name, "detectors": [detector], "procedure": "bh", "alpha": 0.9}
            for name, detector in (("members", "loss"), ("more", "min_k"))
        ]
        described = {**models, "detectors": ["loss", "min_k", "reference"], "selections": selections, **settings}
        return make_audit(60, 40, **described)

    return make


def remove_models(folder: Path) -> None:
    for name in ("model", "reference"):
        shutil.rmtree(folder / name)


def run(path: Path, *overrides: str, **flags: Any) -> RunResult:
    return run_audit(load_config(str(path), overrides), Reporter(Console(stderr=True, width=500)), **flags)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and bytes of every file of a run but its progress and its lock."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "lock"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files if path.name != "status.json"}


def objects_of(folder: str) -> dict[str, tuple[str, bytes]]:
    """As `state_of`, of a run in the object store."""
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    found = fs.find(folder, detail=True).items()
    marks = {name: str(info["LastModified"]) for name, info in found if "/lock/" not in name}
    return {name: (mark, fs.cat_file(name)) for name, mark in marks.items() if not name.endswith("/status.json")}


def test_a_repeated_run_changes_no_file_and_needs_no_model(
    audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = audit(), tmp_path / "run"
    first = run(path)
    give_verdict(str(folder))
    write_bundle(str(folder), str(tmp_path / "first.bundle"), texts=True)
    assert attributions_file("members") in {name.removeprefix(f"{folder}/") for name in state_of(folder)}
    before = state_of(folder)
    assert run(path).selections == first.selections
    assert state_of(folder) == before
    remove_models(tmp_path)
    said = " ".join(here(capsys, "run", path)[0].split())
    for name in ("model", str(tmp_path / "reference")):
        assert f"the files of model {name} {GONE}" in said
    assert state_of(folder) == before
    write_bundle(str(folder), str(tmp_path / "second.bundle"), texts=True)
    assert (tmp_path / "second.bundle").read_bytes() == (tmp_path / "first.bundle").read_bytes()


def test_a_repeated_run_on_an_object_store_changes_no_object_and_needs_no_model(
    audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with object_store() as server:
        path = audit(run=f"s3://{BUCKET}/run")
        first, before = run(path), objects_of(f"{BUCKET}/run")
        remove_models(tmp_path)
        server.forget()
        assert run(path).selections == first.selections
        written = {key for kind, key in server.requests if kind in ("PUT", "POST")}
        assert {key for key in written if not key.startswith("run/lock/")} <= {"run/status.json"}
        assert capsys.readouterr().err.count(GONE) == 2
        assert objects_of(f"{BUCKET}/run") == before


def test_a_repeated_scan_of_a_schedule_keeps_its_place_and_its_files(
    audit: Callable[..., Path], tmp_path: Path
) -> None:
    series = {"ledger": str(tmp_path / "ledger"), "alpha": 0.4, "horizon": 4}
    selections = [{"name": "members", "detectors": ["loss"], "procedure": "bh"}]
    path = audit(series=series, selections=selections)
    first, folders = run(path), (tmp_path / "run", tmp_path / "ledger")
    before = [state_of(folder) for folder in folders]
    remove_models(tmp_path)
    assert run(path).selections == first.selections
    assert [state_of(folder) for folder in folders] == before


CHANGES: list[tuple[str, Callable[[bytes], bytes] | None]] = [
    ("selection/members/documents/*.parquet", lambda data: data[:-99] + bytes([data[-99] ^ 1]) + data[-98:]),
    ("selection/members/selected.parquet", None),
    ("selection/members/digests.json", None),
    ("selection/more/digests.json", None),
    ("selection/more/summary.json", lambda data: b"{"),
    ("selection/more/stray.json", lambda data: b"{}"),
    ("report/report.html", lambda data: b"another"),
    ("manifest.json", lambda data: b"{"),
]


def spoil(folder: Path, name: str, change: Callable[[bytes], bytes] | None) -> None:
    file = next(folder.glob(name), folder / name)
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes() if file.exists() else b""))


def test_a_repeated_run_heals_what_was_changed_and_scores_again_what_was_lost(
    audit: Callable[..., Path], tmp_path: Path
) -> None:
    path, folder = audit(), tmp_path / "run"
    first = run(path)
    before = {name: data for name, (_, data) in state_of(folder).items()}
    lost = [("scores/*.parquet", lambda data: data[:-99] + bytes([data[-99] ^ 1]) + data[-98:])]
    for name, change in [*CHANGES, *lost, ("receipts/score/*.json", None)]:
        spoil(folder, name, change)
        assert run(path).selections == first.selections, name
        if (name, change) in CHANGES:
            assert {name: data for name, (_, data) in state_of(folder).items()} == before, name
    (tmp_path / "model/tokenizer_config.json").open("a").write(" ")
    assert "tokenizer" in user_error(run, path)


def test_answers_are_healed_without_the_files_of_the_model(audit: Callable[..., Path], tmp_path: Path) -> None:
    path, folder = audit(), tmp_path / "run"
    run(path)
    before = {name: data for name, (_, data) in state_of(folder).items()}
    remove_models(tmp_path)
    for name, change in CHANGES:
        if name == "manifest.json" or name.endswith("digests.json"):  # the fingerprint; what the tokens are of
            continue
        spoil(folder, name, change)
        run(path)
        assert {name: data for name, (_, data) in state_of(folder).items()} == before, name


def test_other_questions_and_flags_are_answered_anew_and_leave_no_file_of_the_former(
    audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = audit(), tmp_path / "run"
    first = run(path)
    give_verdict(str(folder))
    former = state_of(folder)
    remove_models(tmp_path)
    assert run(path, "selections.0.alpha=0.001").selections[0].n_selected == 0  # the other one is asked as before
    names = {name.removeprefix(f"{folder}/") for name in state_of(folder)}
    assert not {attributions_file("members"), "verdict.json"} & names
    history = (folder / "selection/history.jsonl").read_text().splitlines()
    assert len(history) == 2
    assert run(path, texts=False).selections == first.selections
    assert attributions_file("members") not in {name.removeprefix(f"{folder}/") for name in state_of(folder)}
    capsys.readouterr()
    run(path)
    said = capsys.readouterr().err
    assert "no model at" in said, "attributions cost no run"
    lost = ("verdict.json", attributions_file("members"), attributions_file("more"))
    assert former.keys() - state_of(folder).keys() == {str(folder / name) for name in lost}


def test_what_needs_the_model_is_refused_as_for_a_missing_model(
    audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = audit(), tmp_path / "run"
    run(path)
    remove_models(tmp_path)
    receipt = next((folder / "receipts/score").glob("audit*.json"))
    kept = receipt.read_bytes()
    before = state_of(folder)
    receipt.unlink()
    assert "no model at model" in refusal(capsys, "run", path)
    assert "no model at model" in user_error(run, path)
    receipt.write_bytes(kept)
    assert {name: data for name, (_, data) in state_of(folder).items()} == {n: data for n, (_, data) in before.items()}
    for setting in ("model.dtype=bfloat16", "model.trust_remote_code=true", f"model.path={tmp_path}/other"):
        assert re.search("no model at|no such folder", user_error(run, path, setting))
    assert "detectors" in user_error(run, path, "detectors=[loss, min_k]")
    assert run(path).exit_code == 0
    file = next((folder / "scores").glob("audit*.parquet"))
    file.write_bytes(file.read_bytes()[:-1])
    assert "no model at model" in user_error(run, path)
    assert run_status(str(folder)).state == "failed"


def test_no_document_is_tried_again_without_the_files_of_the_model(
    audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = audit(), tmp_path / "run"
    run(path)
    remove_models(tmp_path)
    before = state_of(folder)
    assert "nothing to try again" in " ".join(here(capsys, "run", path, "--retry", "all")[0].split())
    assert state_of(folder) == before


def test_the_batches_of_a_gpu_follow_from_the_recorded_dimensions(audit: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(str(audit()), ["model.dtype=float32", "reference_model.dtype=float32"])
    shards, device = make_plan(config).shards, Device(1.0, memory=80 << 30)
    first = build_stages(config, shards, device)
    assert first.models["model"].shape is not None
    assert first.stages[-1].settings.batch_tokens > 0
    remove_models(tmp_path)
    assert "no model at" in user_error(build_stages, config, shards, device)
    again = build_stages(config, shards, device, recorded=first.models)
    assert again.models == first.models
    assert [stage.fingerprint for stage in again.stages] == [stage.fingerprint for stage in first.stages]


def test_a_finished_run_opens_no_model_for_its_tokens(
    audit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = audit()
    run(path)
    monkeypatch.setattr(tokens, "open_model", lambda *_, **__: pytest.fail("a model was opened"))
    assert run(path).exit_code == 0


def test_a_store_that_keeps_files_removes_the_marks_before_the_first_change_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name in ("mark", "kept", "other"):
        store.write(name, name.encode())
    before = state_of(tmp_path)
    keeping = store.keeping("mark")
    keeping.write("kept", b"kept")
    keeping.remove("absent")
    keeping.remove_folder("absent")
    with keeping.replaced("other") as file:
        file.write(b"other")
    assert state_of(tmp_path) == before
    keeping.keeping().write("kept", b"changed")
    assert not (tmp_path / "mark").exists()
    keeping.write("mark", b"mark")
    keeping.write("other", b"changed")
    assert (tmp_path / "mark").exists()
    assert (tmp_path / "other").read_bytes() == b"changed"
