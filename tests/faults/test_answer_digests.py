"""No file that states a part of an answer is believed once it was changed: readers refuse it, select makes it again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_runs import finished_run
from made_up import sentence
from signed import sign

import seenset
from pipeline.audit.history import read_history
from pipeline.audit.status import Counts, StatusFile, run_status
from pipeline.compare.finished_runs import open_finished, sorted_documents
from pipeline.errors import UserError
from pipeline.export.export import write_export
from pipeline.export.request import ExportRequest
from pipeline.report import write_report
from pipeline.report.facts import read_facts
from pipeline.report.names import Folders
from pipeline.report.rows import read_listings
from pipeline.store.files import Store
from ray_jobs.cli import main
from ray_jobs.select import select_again
from ray_jobs.verdict import give_verdict

FLIPS = 1000
NAMES = ("first", "second")
EXCHANGED = (
    "summary.json",
    "selected.parquet",
    "groups.json",
    "scores.json",
    "alphas.json",
    "ranks.parquet",
    "digests.json",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two selections of documents with groups, its report and its verdict."""
    root = tmp_path_factory.mktemp("answered")
    for name, first in (("a", 0), ("b", 1000), ("c", 2000)):
        rows = [{"text": sentence(first + i), "author": f"author {first + i % 30}"} for i in range(40)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    selections = [
        {"name": name, "detectors": ["loss"], "procedure": "bh", "alpha": alpha}
        for name, alpha in zip(NAMES, (0.25, 0.4), strict=True)
    ]
    clean = {"name": "clean", "direction": "clean", "detectors": ["loss"], "procedure": "bh", "alpha": 0.25}
    sources = {
        role: {"path": str(root / name), "group": "author"}
        for role, name in (("audit", "a.jsonl"), ("unseen", "b.jsonl"), ("seen", "c.jsonl"))
    }
    folder = Path(finished_run(root / "here", sources["audit"], selections=[*selections, clean], corpus=sources))
    StatusFile(Store(str(folder)), Counts(2)).write("complete", 0)
    write_report(Store(str(folder)))
    give_verdict(str(folder))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def said_by_python(run: Path) -> str:
    opened = seenset.open_run(run)
    answers = [
        (one.summary, one.table().to_pylist(), one.documents().to_pylist()) for one in opened.selections.values()
    ]
    return repr((opened.state, answers))


def said_by_report(run: Path) -> str:
    """All that the page and report.json are made of."""
    store = Store(str(run))
    facts = read_facts(store)
    return repr((facts, read_listings(store, facts.selections, Folders.of(facts.manifest.inputs), True, 1_000_000)))


def said_by_export(run: Path) -> str:
    out = run.parent / "exported"
    try:
        write_export(ExportRequest(str(run), str(out), "first", form="list", unsupported_too=True))
        return "".join(path.read_text() for path in sorted(out.iterdir()))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def said_by_compare(run: Path) -> str:
    opened = open_finished(str(run))
    rows = sorted_documents(opened, opened.summary("first"), ["loss"])
    return repr((opened.model, opened.fingerprint, opened.settings("first"), [p.to_pylist() for p in rows.pieces()]))


READERS: tuple[Callable[[Path], str], ...] = (said_by_python, said_by_report, said_by_export, said_by_compare)


def answered(read: Callable[[Path], Any], run: Path) -> tuple[Any, str]:
    """What a reader says, or the line with which it refuses."""
    try:
        return read(run), ""
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    return None, line


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_flipped_bit_of_a_finished_run_is_believed(run: Path) -> None:
    said = {read: read(run) for read in READERS}
    files = sorted(path for path in run.rglob("*") if path.is_file())
    generator = random.Random(33)
    refusals = 0
    for number in range(FLIPS):
        path = files[number % len(files)]
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, generator.randrange(8 * len(whole))))
        read = READERS[number // len(files) % len(READERS)]
        found, line = answered(read, run)
        assert line or found == said[read], (read.__name__, path)
        refusals += bool(line)
        path.write_bytes(whole)
    assert refusals > FLIPS / 4


def edited(run: Path, name: str, old: str, new: str) -> str:
    """Change a text of a file; the name of the file."""
    path = run / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return name


def count(run: Path) -> str:
    return edited(run, "selection/first/summary.json", '"n_selected": 14', '"n_selected": 24')


def alpha(run: Path) -> str:
    return edited(run, "selection/first/summary.json", '"alpha": 0.25', '"alpha": 0.5')


def bound(run: Path) -> str:
    return edited(run, "selection/first/alphas.json", '"right_at_least": null', '"right_at_least": []')


def groups(run: Path) -> str:
    return edited(run, "selection/first/groups.json", '"author 0": ', '"author 0": 1')


def alpha_of_the_manifest(run: Path) -> str:
    return edited(run, "manifest.json", '"alpha": 0.25', '"alpha": 0.5')


def history(run: Path) -> str:
    return edited(run, "selection/history.jsonl", '"n_selected": 14', '"n_selected": 24')


def support(run: Path) -> str:
    return edited(run, "selection/first/summary.json", '"supported": ', '"supported":  ')


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("edit", [count, alpha, bound, groups, alpha_of_the_manifest, history, support])
def test_an_edited_file_is_named_with_the_command_that_makes_it_again(
    edit: Callable[[Path], str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = edit(run)
    for command in (["report", str(run)], ["status", str(run)], ["export", str(run), "--selection", "first"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert f"{name} is damaged" in captured.err or f"{name}, line" in captured.err
        assert "seenset run" in captured.err or f"seenset select {run}" in captured.err
        assert captured.out == ""
    with pytest.raises(UserError, match=name):
        give_verdict(str(run))


def test_a_blind_test_that_was_edited_is_made_again(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "diagnostics/blind-unseen.json"
    path.unlink()
    select_again(str(run), [])  # which makes the test
    before, blind = path.read_bytes(), run_status(str(run)).selections[0].diagnostics.blind
    value = json.loads(before)
    path.write_text(json.dumps({**value, "ok": not value["ok"], "sentence": "edited"}))
    (summary, *_) = select_again(str(run), [])
    assert summary.diagnostics.blind == blind
    assert path.read_bytes() == before
    assert "blind-unseen.json is damaged: its content is not what was written; the test is made again" in caplog.text
    shutil.copyfile(run / "diagnostics/blind-seen.json", path)
    assert select_again(str(run), [])[0].diagnostics.blind == blind


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    ["summary.json", "selected.parquet", "groups.json", "scores.json", "alphas.json", "ranks.parquet", "digests.json"],
)
def test_files_of_two_selections_that_were_exchanged_are_refused(name: str, run: Path) -> None:
    first, second = (run / "selection" / selection / name for selection in ("first", "clean"))
    one, other = first.read_bytes(), second.read_bytes()
    assert one != other
    first.write_bytes(other)
    second.write_bytes(one)
    for read in (said_by_python, said_by_report, said_by_export):
        assert f"{name} is damaged" in answered(read, run)[1]


def test_exchanged_folders_of_selections_are_refused(run: Path) -> None:
    (run / "selection/first").rename(run / "selection/third")
    (run / "selection/second").rename(run / "selection/first")
    (run / "selection/third").rename(run / "selection/second")
    for read in (said_by_python, said_by_report, said_by_export):
        assert "is of selection" in answered(read, run)[1]


def test_the_answer_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": sentence(i), "author": "x"}) + "\n" for i in range(500, 540))
    (tmp_path / "b.jsonl").write_text(rows)
    selection = {"name": "first", "detectors": ["loss"], "procedure": "bh", "alpha": 0.25}
    other = Path(finished_run(tmp_path / "there", {"path": str(tmp_path / "b.jsonl")}, selections=[selection]))
    shutil.rmtree(run / "selection/first")
    shutil.copytree(other / "selection/first", run / "selection/first")
    assert "is damaged: its content is not what was written" in answered(said_by_python, run)[1]


@pytest.mark.parametrize("name", ["summary.json", "digests.json", "selected.parquet", "groups.json"])
def test_a_missing_file_of_an_answer_drops_no_row_in_silence(name: str, run: Path) -> None:
    (run / "selection/second" / name).unlink()
    for read in (said_by_python, said_by_report):
        line = answered(read, run)[1]
        assert f"selection/second/{name} is missing" in line
        assert f"seenset select {run}" in line
    with pytest.raises(UserError, match=rf"selection/second/{name} is missing"):
        give_verdict(str(run))


def test_a_missing_folder_of_an_answer_drops_no_row_in_silence(run: Path) -> None:
    shutil.rmtree(run / "selection/second")
    for read in (said_by_python, said_by_report, lambda run: give_verdict(str(run))):
        assert "selection/second/digests.json is missing" in answered(read, run)[1]


def bytes_of(run: Path) -> dict[str, bytes]:
    """The files of the answers, without the times of the history and what follows from them."""
    return {str(path.relative_to(run)): path.read_bytes() for path in (run / "selection").rglob("*") if path.is_file()}


def test_select_makes_a_damaged_answer_again_and_says_so(run: Path) -> None:
    before = bytes_of(run)
    selected = run / "selection/first/selected.parquet"
    selected.write_bytes(flipped(selected.read_bytes(), 999))
    (run / "selection/second/summary.json").unlink()
    lines: list[str] = []
    select_again(str(run), [], say=lines.append)
    assert any("selection/first/selected.parquet is damaged" in line for line in lines)
    assert any("selection/second/summary.json is missing" in line for line in lines)
    assert all("the answer is made again from the scores" in line for line in lines)
    assert bytes_of(run) == before


def test_a_select_that_dies_before_the_digests_leaves_no_answer_and_the_next_one_the_same_bytes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bytes_of(run)

    def die(self: Store, name: str, data: bytes) -> None:
        if name.endswith("second/digests.json"):
            raise KeyboardInterrupt
        write(self, name, data)

    write = Store.write
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", die)
        with pytest.raises(KeyboardInterrupt):
            select_again(str(run), [])
    assert "selection/second/digests.json is missing" in answered(said_by_python, run)[1]
    select_again(str(run), [])
    assert bytes_of(run) == before


def test_a_line_of_the_history_that_was_changed_is_left_out_and_logged(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    select_again(str(run), ["selections.0.alpha=0.3"])
    edited(run, "selection/history.jsonl", '"n_selected": 14', '"n_selected": 24')
    select_again(str(run), ["selections.0.alpha=0.3"])
    assert "history.jsonl, line 1, is damaged" in caplog.text
    assert "the run may have been asked more" in caplog.text
    assert [entry.questions[0].settings["alpha"] for entry in read_history(Store(str(run)))] == [0.3]


def test_a_run_of_version_0_9_0_is_refused_with_the_command_and_select_answers_it(run: Path) -> None:
    for path in run.rglob("digests.json"):
        path.unlink()
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["digest"], manifest["shard_table"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "verdict.json").unlink()
    for read in (said_by_python, said_by_report, said_by_export, said_by_compare):
        line = answered(read, run)[1]
        assert "digests.json is missing, so the answer cannot be checked (version 0.9.0 wrote no digests)" in line
        assert f"seenset select {run}" in line
    select_again(str(run), [])
    assert [summary.name for summary in run_status(str(run)).selections] == ["first", "second", "clean"]


def test_a_verdict_of_other_answers_is_refused(run: Path) -> None:
    verdict = (run / "verdict.json").read_bytes()
    select_again(str(run), ["selections.0.alpha=0.3"])
    (run / "verdict.json").write_bytes(verdict)
    line = answered(lambda run: write_report(Store(str(run))), run)[1]
    assert f"verdict.json is not of the answers of this run; ask anew with seenset verdict {run}" in line


def test_digests_protect_against_damage_and_not_against_a_person_who_writes_them_again(run: Path) -> None:
    edited(run, "selection/first/summary.json", '"alpha": 0.25', '"alpha": 0.5')
    sign(Store(str(run)))
    assert run_status(str(run)).selections[0].alpha == 0.5
