"""An export never touches an input, is never taken for whole before it is, and says what it refuses in one line."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.answers.select import Answering, select_all
from pipeline.errors import IncompleteError, UserError
from pipeline.export import export_folder
from pipeline.export.export_folder import MARKER_FILE, UNFINISHED_FILE
from pipeline.export.request import choose_form
from pipeline.plan.description import build_config
from pipeline.results.history import read_history
from pipeline.run.manifest import read_manifest, read_run, write_manifest
from pipeline.run.scored import read_scored
from pipeline.selection.guarantees import ConclusionValue
from pipeline.store.files import Store
from tests.helpers.commands import here
from tests.helpers.commands import refusal as one_line
from tests.helpers.export_runs import export, finished_run, refusal
from tests.helpers.finished import refile, with_column
from tests.helpers.made_up import sentence, write_rows
from tests.helpers.report_run import amend
from tests.helpers.signed import sign


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/a.jsonl, data/b.parquet and w/run; a test that changes something changes a copy."""
    folder = tmp_path_factory.mktemp("finished")
    make(folder)
    return folder


def make(folder: Path, **settings: Any) -> str:
    (folder / "data").mkdir(exist_ok=True)
    write_rows(folder / "data/a.jsonl", ({"text": sentence(i)} for i in range(12)))
    pq.write_table(pa.table({"text": [sentence(i) for i in range(20, 32)]}), folder / "data/b.parquet")
    return finished_run(folder / "w", {"path": str(folder / "data/*.*")}, **settings)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("data/a.jsonl", "is an input of the run, corpus.audit's .*a.jsonl: an export never changes its input"),
        ("w/../data/./a.jsonl", "is an input of the run"),
        ("link/a.jsonl", "is an input of the run"),
        ("data", "holds an input of the run, corpus.audit's .*a.jsonl: name a folder of its own"),
        ("link", "holds an input of the run"),
        (".", "overlap: name another"),
        ("w/run", "overlap: name another folder"),
        ("w/run/exports", "overlap: name another"),
        ("w/known.jsonl", "is an input of the run, corpus.(un)?seen's"),
    ],
)
def test_an_export_onto_an_input_or_a_run_is_refused(finished: Path, out: str, message: str) -> None:
    if not (finished / "link").exists():
        (finished / "link").symlink_to(finished / "data")
    before = content(finished)
    assert re.search(message, refusal(str(finished / "w/run"), finished / out))
    assert content(finished) == before


def test_a_folder_that_the_configuration_reads_whole_is_no_place(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data/a.jsonl", ({"text": sentence(i)} for i in range(12)))
    run = finished_run(tmp_path / "w", {"path": str(tmp_path / "data")})
    monkeypatch.chdir(tmp_path)
    assert "is in the folder of corpus.audit," in refusal(run, "data/clean")
    assert not (tmp_path / "data/clean").exists()
    other = finished_run(tmp_path / "v", {"path": str(tmp_path / "data/**/*.jsonl")})
    assert "a later run would read the export as documents" in refusal(other, "data/deep/clean")


def test_a_folder_with_something_else_in_it_is_left_alone(finished: Path, tmp_path: Path) -> None:
    run = str(finished / "w/run")
    (tmp_path / "out").mkdir()
    export(run, tmp_path / "out")
    (tmp_path / "out/mine.txt").write_text("mine")
    before = content(tmp_path)
    assert "out holds files that no export wrote, mine.txt" in refusal(run, tmp_path / "out")
    assert content(tmp_path) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    assert "full is not empty and not an export: it holds mine.txt" in refusal(run, tmp_path / "full")
    assert "is a file, not a folder" in refusal(run, tmp_path / "full/mine.txt")
    other = make(tmp_path)
    (tmp_path / "out/mine.txt").unlink()
    assert "holds the export of another run" in refusal(other, tmp_path / "out")


def test_the_same_export_is_the_same_bytes_and_another_takes_its_place(finished: Path, tmp_path: Path) -> None:
    run, store = str(finished / "w/run"), Store("memory://bucket/out")
    for _ in range(2):
        export(run, tmp_path / "out")
        export(run, "memory://bucket/out")
        before = content(tmp_path / "out")
        assert sorted(before) == [MARKER_FILE, "README.md", "a.jsonl", "b.parquet"]
        assert {name: store.read(name) for name in before} == before
    assert not store.exists(UNFINISHED_FILE)
    assert "holds the export of another run" in refusal(make(tmp_path), "memory://bucket/out")
    export(run, tmp_path / "out", form="list")
    assert sorted(content(tmp_path / "out")) == [MARKER_FILE, "README.md", "list.jsonl"]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_killed_export_is_not_taken_for_a_whole_one_and_goes_on(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    run, done = str(finished / "w/run"), []
    whole = export_folder.ExportFolder.file

    def file_until(folder: export_folder.ExportFolder, name: str) -> Any:
        done.append(name)
        if len(done) == calls:
            (tmp_path / f"out/.{name}.0123abcd").write_bytes(b"half")  # as a kill leaves it
            raise KeyboardInterrupt
        return whole(folder, name)

    monkeypatch.setattr(export_folder.ExportFolder, "file", file_until)
    with pytest.raises(KeyboardInterrupt):
        export(run, tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / "out" / UNFINISHED_FILE).exists()
    assert not (tmp_path / "out/README.md").exists()
    assert json.loads((tmp_path / "out" / MARKER_FILE).read_text())["state"] == "writing"
    export(run, tmp_path / "whole")
    export(run, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_export_that_was_killed_while_it_wrote_its_first_file_goes_on(finished: Path, tmp_path: Path) -> None:
    run = str(finished / "w/run")
    for folder, name, content_of in (("out", MARKER_FILE, b'{"schema": 1, "sta'), ("mine", "mine.txt", b"")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f".{name}.0123abcd").write_bytes(content_of)
    for folder in ("out", "whole"):
        export(run, tmp_path / folder)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert "mine is not empty and not an export" in refusal(run, tmp_path / "mine")


def test_options_that_do_not_go_together_and_unknown_selections_are_refused(finished: Path, tmp_path: Path) -> None:
    run = str(finished / "w/run")
    assert "--samples needs the name of the task: --task NAME" in refusal(run, tmp_path / "o", form="samples")
    assert "--task names the task of --samples" in refusal(run, tmp_path / "o", task="mine")
    assert "--without-quarantined goes with --keep rest" in (
        refusal(run, tmp_path / "o", keep="selected", quarantined=False)
    )
    with pytest.raises(UserError, match="--list and --samples exclude one another"):
        choose_form({"list": True, "samples": True, "huggingface": False})
    assert not (tmp_path / "o").exists()
    run = make(tmp_path, selections=[{"name": name, "detectors": ["loss"]} for name in ("members", "strict")])
    assert "has several selections, choose one: --selection members, strict" in refusal(run, tmp_path / "out")
    message = refusal(run, tmp_path / "out", selection="member")
    assert "no selection 'member' in " in message
    assert message.endswith("did you mean 'members'? selections: members, strict")
    assert export(run, tmp_path / "out", selection="strict").plan.summary.name == "strict"


def test_an_unsupported_selection_is_exported_only_where_that_is_asked_for(tmp_path: Path) -> None:
    run = make(tmp_path)
    amend(Store(run), "chosen", conclusion=ConclusionValue.CONTRADICTED, reasons=["Their words tell them apart."])
    message = refusal(run, tmp_path / "out")
    assert message.startswith("selection chosen is CONTRADICTED, do not act on it: Their words tell them apart.")
    assert not (tmp_path / "out").exists()
    exported = export(run, tmp_path / "out", unsupported_too=True)
    assert exported.sentences()[0].startswith("chosen: CONTRADICTED, do not act on it: Their words")
    card = (tmp_path / "out/README.md").read_text()
    after = card.split("---\n", 2)[2].split("\n\n")
    assert after[0] == "# Documents: chosen"
    assert after[1].startswith("> **CONTRADICTED: do not act on this list.**")
    assert "expected share" not in card
    assert "finite-sample" not in card


def test_a_sample_says_nothing_of_the_rest(tmp_path: Path) -> None:
    run = make(tmp_path, limit=11)
    assert "the run audited only the first 11 documents (--limit)" in refusal(run, tmp_path / "out")
    export(run, tmp_path / "out", keep="selected")
    assert len((tmp_path / "out/a.jsonl").read_text().splitlines()) == 4
    assert "(a sample: the first 11, not the whole corpus)" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("names", "content_of", "message"),
    [
        (["a.jsonl"], None, "a.jsonl is missing since the run: put it back, or export --list"),
        (["a.jsonl", "b.parquet"], None, "the documents of this run cannot be read any more .*no file"),
        (["a.jsonl"], {"text": "one less"}, "a.jsonl was changed since the run"),
        (["a.jsonl"], {"text": ["a list"]}, "cannot be read any more .*no column 'text' of texts in"),
        (["b.parquet"], {"text": [sentence(i) for i in range(40, 52)]}, "b.parquet was changed since the run"),
    ],
)
def test_an_input_that_changed_since_the_run_is_refused_by_name(
    tmp_path: Path, names: list[str], content_of: dict[str, Any] | None, message: str
) -> None:
    run = make(tmp_path)
    before = export(run, tmp_path / "list", form="list")
    for path in (tmp_path / "data" / name for name in names):
        path.unlink()
        if content_of is not None:
            pq.write_table(pa.table(content_of), path) if "parquet" in path.name else write_rows(path, [content_of])
    assert re.search(message, refusal(run, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert export(run, tmp_path / "again", form="list").counts == before.counts


def test_a_change_in_the_middle_of_a_large_file_is_seen_by_its_documents(tmp_path: Path) -> None:
    """Size and both ends are as they were."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/a.jsonl"
    write_rows(path, ({"text": sentence(i, 600)} for i in range(100)))
    assert path.stat().st_size > 3 << 16
    settings = {"resources": {"shard_bytes": 100_000}}
    run = finished_run(tmp_path / "w", {"path": str(path)}, **settings)
    anyhow = {"unsupported_too": True}  # the texts are longer than those that calibrate
    export(run, tmp_path / "before", **anyhow)
    data = path.read_text()
    at = data.index("Text 50 ")
    path.write_text(data[:at] + "Text 05 " + data[at + 8 :])
    assert "a.jsonl was changed since the run: its documents are not those that were scored" in (
        refusal(run, tmp_path / "out", **anyhow)
    )


def test_an_answer_that_is_of_other_scores_or_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path)
    store = Store(run)
    name = "selection/chosen/documents/audit-000000.parquet"
    documents = store.read_table(name)
    flipped = documents.set_column(2, "selected", pa.array([True] * len(documents)))
    store.write_table(name, flipped)
    sign(store)
    assert "makes it again" in refusal(run, tmp_path / "out")
    store.write_table(name, documents)
    sign(store)
    refile(Path(run), lambda table, receipt: with_column(table, "loss", pc.add(table["loss"], 1.0)))
    assert refusal(run, tmp_path / "out") == (
        f"selection chosen of {run} was made from other scores than the run holds: seenset select {run} makes the "
        "answer again from the scores"
    )
    sign(store)
    amend(store, "chosen", n_selected=3)
    assert "selection chosen counts 3 of 24" in refusal(run, tmp_path / "out")
    store.remove_folder("selection/chosen")
    with pytest.raises(IncompleteError, match="is not made yet"):
        export(run, tmp_path / "out")
    assert read_history(store)
    manifest = read_manifest(store)
    corpus = manifest.config.corpus.model_copy(update={"audit": None})
    write_manifest(store, manifest.model_copy(update={"config": manifest.config.model_copy(update={"corpus": corpus})}))
    assert "compares documents of known membership" in refusal(run, tmp_path / "out")
    assert "is not a run directory" in refusal(str(tmp_path / "data"), tmp_path / "out")


def test_the_card_has_the_settings_of_the_answer_and_not_those_of_the_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    manifest, shards = read_run(Store(run))
    described = manifest.config.model_dump(mode="json", by_alias=True)
    config = build_config(described, ["selections.0.alpha=0.3", "selections.0.confidence=0.9"])
    select_all(config, read_scored(Store(run), shards), None, lambda receipts, f: map(f, receipts), Answering("select"))
    export(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "| alpha | 0.3 |" in card
    assert "| confidence | 0.9 |" in card
    assert "This run was asked 2 different questions, and not all at once" in card


def test_the_command_says_what_it_wrote(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(finished / "w/run")
    output, _ = here(capsys, "export", run)
    assert "Of 24 audited documents, 8 were selected as part of the training data of org/model and removed." in output
    assert output.splitlines()[-1] == "export: run-chosen (2 files, and README.md)"
    assert "Not checked" in output
    assert "did you mean 'chosen'?" in one_line(capsys, "export", run, "out2", "--selection", "choosen")
    assert "'selected', 'rest'" in here(capsys, "export", run, "out2", "--keep", "all", code=2)[1]
    assert not os.path.exists("out2")


def test_the_card_names_no_folder_and_no_markup_of_a_name(tmp_path: Path) -> None:
    place = tmp_path / "da_ta"
    place.mkdir()
    path = place / "<script>*a*|`x`.jsonl"
    write_rows(path, ({"text": sentence(i)} for i in range(12)))
    run = finished_run(tmp_path / "w", {"path": str(path)}, model={"path": str(tmp_path / "mo<b>del")})
    export(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert str(tmp_path) not in card
    assert "<" not in card.split("---\n", 2)[2].replace("<K", "")
    assert "| &lt;script&gt;\\*a\\*\\|\\`x\\`.jsonl | 12 | 8 |" in card
    assert str(tmp_path) not in (tmp_path / "out" / MARKER_FILE).read_text()
    listed = export(run, tmp_path / "list", form="list", keep="rest")
    lines = [json.loads(line) for line in (tmp_path / "list/list.jsonl").open()]
    assert lines[0] == {"id": f"{path.name}#1", "source": path.name, "row": 1}
    assert len(lines) == listed.counts.kept == 8
