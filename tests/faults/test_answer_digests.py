"""No file that states a part of an answer is believed once it was changed: readers refuse it, select makes it again."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import seenset
from pipeline.answers.evaluation import evaluate_scores
from pipeline.compare.finished_runs import open_finished, read_answer_tables
from pipeline.compare.items import clean_items
from pipeline.errors import UserError
from pipeline.export.export import write_export
from pipeline.export.request import ExportRequest
from pipeline.plan.description import load_config
from pipeline.report.contents import Folders
from pipeline.report.facts import read_facts
from pipeline.report.page import read_listings, write_report
from pipeline.results.history import read_history, several_questions
from pipeline.results.status import Counts, StatusFile, run_status
from pipeline.run.manifest import read_run
from pipeline.run.plan import make_plan
from pipeline.run.scored import KEYS_SCHEMA, read_scored
from pipeline.series.summary import read_series
from pipeline.store.files import Store
from ray_jobs.audit import run_evaluation
from ray_jobs.progress import Reporter
from ray_jobs.select import give_verdict, select_again
from tests.helpers.commands import printed
from tests.helpers.export_runs import finished_run
from tests.helpers.made_up import sentence, write_audit, write_corpus, write_jsonl
from tests.helpers.signed import sign

FLIPS = 600
ASKED: dict[str, Any] = {"name": "first", "detectors": ["loss"], "procedure": "bh", "alpha": 0.25}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two selections of documents with groups, its report and its verdict."""
    root = tmp_path_factory.mktemp("answered")
    texts = {
        role: [{"text": sentence(first + i), "author": f"author {first + i % 30}"} for i in range(40)]
        for role, first in (("audit", 0), ("unseen", 1000), ("seen", 2000))
    }
    sources = write_corpus(root, texts, group="author")
    selections = [{"name": "first"}, {"name": "second", "alpha": 0.4}, {"name": "clean", "direction": "clean"}]
    selections = [{**ASKED, **selection} for selection in selections]
    folder = Path(finished_run(root / "here", sources["audit"], selections=selections, corpus=sources))
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


def said_by_status(run: Path) -> str:
    return repr((run_status(str(run)).plain(), several_questions(read_history(Store(str(run))))))


def said_by_report(run: Path) -> str:
    """All that the page and report.json are made of."""
    store = Store(str(run))
    facts = read_facts(store)
    return repr((facts, read_listings(store, facts.selections, Folders.find(facts.manifest.inputs), True, 1_000_000)))


def said_by_export(run: Path) -> str:
    out = run.parent / "exported"
    try:
        write_export(ExportRequest(str(run), str(out), "first", form="list", unsupported_too=True))
        return "".join(path.read_text() for path in sorted(out.iterdir()))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def said_by_compare(run: Path) -> str:
    """All that a comparison says of one of its runs."""
    opened = open_finished(str(run))
    rows = read_answer_tables(opened, opened.summary("first"), ["loss"])
    return repr((opened.model, opened.fingerprint, opened.settings("first"), [table.to_pylist() for table in rows]))


def said_by_rank(run: Path) -> str:
    """Which items are clean, and what that guarantees: all that a ranking takes from a run."""
    return repr(clean_items([open_finished(str(run))], "clean", None))


def said_by_verdict(run: Path) -> str:
    return repr(give_verdict(str(run)))


def said_by_evaluate(run: Path) -> str:
    """The figures of what is scored, as `seenset evaluate` takes them."""
    store = Store(str(run))
    manifest, shards = read_run(store)
    return repr(evaluate_scores(manifest.config, read_scored(store, shards), manifest.limit).evaluation)


def said_by_series(run: Path) -> str:
    return repr(read_series(str(run.parent / "ledger")))


Reader = Callable[[Path], str]
READERS: tuple[Reader, ...] = (
    said_by_verdict,  # first: it names the folder of the run in a file that others read
    said_by_python,
    said_by_status,
    said_by_report,
    said_by_export,
    said_by_compare,
    said_by_rank,
    said_by_evaluate,
)


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


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is the only scan of a schedule, beside its ledger."""
    root = tmp_path_factory.mktemp("scanned")
    selection = {key: ASKED[key] for key in ASKED if key != "alpha"}
    series = {"ledger": str(root / "ledger"), "alpha": 0.25, "horizon": 1}
    source = {"path": write_jsonl(root / "a.jsonl", [sentence(i) for i in range(20)])}
    run = finished_run(root, source, selections=[selection], series=series)
    StatusFile(Store(run), Counts(1)).write("complete", 0)
    select_again(run, [])
    return Path(run)


opening: list[set[str]] = []
"""While a reader is watched: the files that it opens."""


def note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opening and isinstance(arguments[0], str):
        opening[-1].add(arguments[0])


sys.addaudithook(note_opening)


def watched(read: Reader, run: Path) -> tuple[str, set[Path]]:
    """What a reader says, and which files of a run it opens for that."""
    opening.append(set())
    try:
        said = read(run)
    finally:
        opened = opening.pop()
    return said, {path for path in map(Path, opened) if path.is_relative_to(run) and path.is_file()}


def find_model_files(run: Path) -> list[Path]:
    """All files but the lock, of which every command that writes makes a new one."""
    return sorted(path for path in run.rglob("*") if path.is_file() and path.parent.name != "lock")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_reader_believes_a_flipped_bit_of_any_file_of_a_run(run: Path, scanned: Path) -> None:
    """Each flip is read by every reader that opens its file; for the others it is a file that they do not know.

    What a reader itself writes again, which takes seconds, is flipped once for it.
    """
    readers = [(read, run) for read in READERS] + [(said_by_series, scanned)]
    said, opened, written = {}, {}, {}
    for read, folder in readers:
        before = {path: path.stat().st_ino for path in find_model_files(folder)}
        said[read], opened[read] = watched(read, folder)
        written[read] = {path for path in find_model_files(folder) if path.stat().st_ino != before.get(path)}
    everything = [*find_model_files(run), *find_model_files(scanned)]
    generator, refusals = random.Random(33), 0
    for number in range(FLIPS):
        path = everything[number % len(everything)]
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, generator.randrange(8 * len(whole))))
        for read, folder in readers:
            if path in opened[read] and (path not in written[read] or number < len(everything)):
                found, line = answered(read, folder)
                assert line or found == said[read], (read.__name__, path)
                assert not line or (path.name in line and "seenset " in line), line
                refusals += bool(line)
        path.write_bytes(whole)
    assert refusals > FLIPS
    for read, folder in readers:  # what a reader does not open has no effect, whatever it holds
        others = {path: path.read_bytes() for path in {*find_model_files(folder)} - opened[read]}
        for path, whole in others.items():
            path.write_bytes(generator.randbytes(len(whole)))
        assert read(folder) == said[read], read.__name__
        for path, whole in others.items():
            path.write_bytes(whole)


def test_evaluate_states_the_same_figures_whatever_bit_of_its_run_is_flipped(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """It goes on with a run: what is damaged is made again, or refused in one line."""
    documents = write_jsonl(tmp_path / "seen.jsonl", [sentence(i) for i in range(2000, 2020)])
    path = write_audit(tmp_path, tiny_model_folder, resources={"shard_bytes": 10**6})
    overrides = [f"corpus.seen.path={documents}", "corpus.audit=null", "detectors=[loss]"]
    config = load_config(str(path), overrides, labelled=True)

    def figures(_: Path) -> str:
        return repr(run_evaluation(make_plan(config), Reporter(Console(), quiet=True))[0])

    said, generator, run = figures(tmp_path), random.Random(33), tmp_path / "run"
    for path in find_model_files(run):
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, generator.randrange(8 * len(whole))))
        found, line = answered(figures, tmp_path)
        assert line or found == said, path
        assert not line or path.name in line, line
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["summary.json", "digests.json", "selected.parquet", "documents"])
def test_a_series_stops_at_a_scan_whose_answer_lacks_a_file(
    name: str, scanned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scanned / "selection/first"
    shutil.copytree(folder, scanned.parent / "kept")
    place = folder / name
    shutil.rmtree(folder) if name == "documents" else place.unlink()  # the whole answer, or a file
    code, output, errors = printed(capsys, "series", scanned.parent / "ledger")
    shutil.rmtree(folder, ignore_errors=True)
    (scanned.parent / "kept").rename(folder)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert f"{scanned}/selection/first/" in errors
    assert f"seenset select {scanned}" in errors


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("selection/first/clean_ids.json", "selection/clean/clean_ids.json"),
        ("quarantine/duplicate_id.parquet", "selection/clean/selected.parquet"),
    ],
)
def test_a_foreign_file_is_refused_where_it_would_be_taken_for_part_of_an_answer(name: str, of: str, run: Path) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(run / of, run / name)
    for read in (said_by_python, said_by_report, said_by_verdict):
        line = answered(read, run)[1]
        assert f"{name} is not part of the answer; seenset select {run}" in line
    select_again(str(run), [])
    assert not (run / name).exists()


def test_select_refuses_other_keys_of_what_adapters_were_trained_on(run: Path) -> None:
    """Without them documents that an adapter has learnt would calibrate."""
    keys = run / "adapters/documents.parquet"
    Store(str(run)).write_table("adapters/documents.parquet", KEYS_SCHEMA.empty_table())
    sign(Store(str(run)))
    before = bytes_of(run)
    for damage in (keys.unlink, lambda: shutil.copyfile(run / "selection/first/selected.parquet", keys)):
        damage()
        for read in (said_by_python, lambda run: str(select_again(str(run), []))):
            line = answered(read, run)[1]
            assert "adapters/documents.parquet is" in line
            assert "seenset run with the configuration of the run writes it again" in line
    assert bytes_of(run) == before


@pytest.mark.parametrize("content", [b"{", b'{"text": false}'])
def test_a_verdict_does_not_guess_whether_a_report_shows_texts(content: bytes, run: Path) -> None:
    (run / "report/report.json").write_bytes(content)
    line = answered(said_by_verdict, run)[1]
    assert f"report/report.json is damaged: {'not JSON' if content == b'{' else 'it does not state'}" in line
    assert line.endswith(f"seenset report {run} writes it again")


def edit(run: Path, name: str, old: str, new: str) -> None:
    """Change a text of a file."""
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new, 1))


def test_a_blind_test_that_was_edited_is_made_again(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "diagnostics/blind-unseen.json"
    path.unlink()
    select_again(str(run), [])  # which makes the test
    before, blind = path.read_bytes(), run_status(str(run)).selections[0].diagnostics.blind
    value = json.loads(before)
    path.write_text(
        json.dumps({**value, "outcome": "passed" if value["outcome"] == "failed" else "failed", "sentence": "edited"})
    )
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
    source = {"path": write_jsonl(tmp_path / "b.jsonl", [sentence(i) for i in range(500, 540)])}
    other = Path(finished_run(tmp_path / "there", source, selections=[ASKED]))
    shutil.rmtree(run / "selection/first")
    shutil.copytree(other / "selection/first", run / "selection/first")
    assert "manifest.json is damaged, or not the one of this answer" in answered(said_by_python, run)[1]


@pytest.mark.parametrize("name", ["", "summary.json", "digests.json", "selected.parquet", "groups.json"])
def test_a_missing_file_or_folder_of_an_answer_drops_no_row_in_silence(name: str, run: Path) -> None:
    place = run / "selection/second" / name
    place.unlink() if name else shutil.rmtree(place)
    for read in (said_by_python, said_by_report, said_by_verdict):
        line = answered(read, run)[1]
        assert f"selection/second/{name or 'digests.json'} is missing" in line
        assert f"seenset select {run}" in line


def test_a_missing_receipt_of_a_complete_run_drops_no_document_in_silence(run: Path) -> None:
    (run / "receipts/score/unseen-000001.json").unlink()
    for read in (said_by_python, said_by_status, said_by_report):
        line = answered(read, run)[1]
        assert "receipts/score/unseen-000001.json is missing" in line
        assert "seenset run" in line


def bytes_of(run: Path) -> dict[str, bytes]:
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


def test_a_select_that_dies_before_the_digests_leaves_no_answer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes_of(run)
    (run / "selection/second/selected.parquet").unlink()

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
    edit(run, "selection/history.jsonl", '"n_selected": 14', '"n_selected": 24')
    select_again(str(run), ["selections.0.alpha=0.3"])
    assert "history.jsonl, line 1, is damaged" in caplog.text
    assert "the run may have had more requests" in caplog.text
    assert [entry.questions[0].settings["alpha"] for entry in read_history(Store(str(run)))] == [0.3]


def test_a_verdict_of_other_answers_is_refused(run: Path) -> None:
    verdict = (run / "verdict.json").read_bytes()
    select_again(str(run), ["selections.0.alpha=0.3"])
    (run / "verdict.json").write_bytes(verdict)
    line = answered(lambda run: write_report(Store(str(run))), run)[1]
    assert f"verdict.json is not of the answers of this run; run seenset verdict {run} again" in line


def test_digests_protect_against_damage_and_not_against_who_writes_them_again(run: Path) -> None:
    edit(run, "selection/first/summary.json", '"alpha": 0.25', '"alpha": 0.5')
    sign(Store(str(run)))
    assert run_status(str(run)).selections[0].alpha == 0.5
