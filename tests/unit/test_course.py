"""The course of a schedule: what is promised of all its scans, what is not, and what is new on the latest list."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from commands import ended, user_error
from made_up_scans import calibrations, scan_config, scan_scores, scan_summary
from report_run import build_run
from signed import sign

from pipeline.audit.digests import scores_digest
from pipeline.audit.select import write_answer
from pipeline.audit.summary import Summary, read_summary, series_place
from pipeline.corpus.documents import text_key
from pipeline.errors import UserError
from pipeline.selection.bounds import Bound
from pipeline.series import claims
from pipeline.series.claims import claim_slots, file_result
from pipeline.series.page import check_page_place, write_course
from pipeline.series.scans import Claim, read_schedule
from pipeline.series.summary import Course, SelectionCourse, read_course
from pipeline.store.files import Store
from pipeline.store.ledger import entry_file

Scan = Callable[..., Path]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A whole answer of a selection."""
    summary = read_summary(build_run(tmp_path_factory.mktemp("made") / "run"), "members")
    assert summary is not None
    return summary.model_copy(update={"supported": True, "reasons": [], "guarantee": "finite-sample"})


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def scan(tmp_path: Path, ledger: Path, answer: Summary) -> Scan:
    """Takes the next place; (ids of the selected, or None for a scan without a result; of its answer) -> its run."""
    runs: list[Path] = []

    def take(ids: Sequence[str] | None, names: tuple[str, ...] = ("members",), **changes: Any) -> Path:
        runs.append(tmp_path / f"run{len(runs) + 1}")
        terms, file = {"rule": changes.pop("rule", "spend"), "horizon": 12}, changes.pop("file", "a.jsonl")
        config = scan_config(str(ledger), str(runs[-1]), names, **terms)
        scored = scan_scores(config, runs[-1].name)
        slots = claim_slots(config, scored, calibrations(config), None, print)
        summaries = []
        for name in names if ids is not None else ():
            assert ids is not None
            assert config.series is not None
            place = series_place(slots[name], config.series)
            level = {"alpha": float(slots[name].level), "n_audit": 100, "n_selected": len(ids), "series": place}
            one = answer.model_copy(update={"name": name, "procedure": "bh", **level, **changes})
            selected = f"selection/{name}/selected.parquet"
            files = {selected: scored.store.write_table(selected, listed(ids, file))}
            write_answer(scored.store, one, files, scores_digest(scored.of("audit")))
            summaries.append(one)
        if summaries:
            file_result(config, scored, None, summaries, print)
        return runs[-1]

    return take


def listed(texts: Sequence[str], file: str) -> pa.Table:
    """Selected documents of these texts; of another file than a.jsonl their ids differ too."""
    ids = [text if file == "a.jsonl" else f"{file}#{text}" for text in texts]
    columns = {"doc_id": pa.array(ids, pa.string()), "source": pa.array([file] * len(ids), pa.string())}
    return pa.table({**columns, "text_key": pa.array(map(text_key, texts), pa.int64())})


def members(ledger: Path) -> SelectionCourse:
    (course,) = read_course(str(ledger)).selections
    return course


def bound(wrong: int, right: int, confidence: float = 0.99) -> Bound:
    return Bound(confidence, wrong, right, right, wrong)


# --- what is promised


def test_scans_whose_promises_stand_are_promised_together(scan: Scan, ledger: Path) -> None:
    scan(["a", "b"])
    scan(["c"])
    course = read_course(str(ledger))
    assert (course.spent, course.places_left, course.latest) == (pytest.approx(0.1 * 2 / 12), 10, 2)
    one = members(ledger)
    assert (one.n_scans, one.n_audit, one.n_selected, one.n_promised, one.promised) == (2, 200, 3, 3, True)
    assert "Of all that the scans select together, at most 10% is wrong, on average over repetitions" in one.promise


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"supported": False}, "a check contradicts"),
        ({"guarantee": "asymptotic"}, "only as numbers grow"),
        ({"guarantee": "heuristic"}, "no error rate is proved"),
        ({"alpha": 0.1}, "above the level of its place"),
    ],
)
def test_one_list_without_a_promise_leaves_none_for_all_scans(
    scan: Scan, ledger: Path, changes: dict[str, Any], why: str
) -> None:
    scan(["a", "b"])
    scan(["c"], **changes)
    one = members(ledger)
    assert (one.promised, one.n_selected, one.n_promised) == (False, 3, 2)
    assert one.promise.startswith("No error rate is promised over all of these scans. Of what scan 1 selected")
    assert "scan 2: not promised, because" in one.not_promised[0]
    assert why in one.not_promised[0]


def test_nothing_is_promised_where_no_list_has_a_promise(scan: Scan, ledger: Path) -> None:
    scan(["a"], supported=False)
    assert members(ledger).promise == "No error rate is promised over these scans."


def test_an_untested_promise_is_said_to_be_one(scan: Scan, ledger: Path) -> None:
    scan(["a"], supported=None)
    one = members(ledger)
    assert one.promised is None
    assert "provided both groups of scan 1 are alike; the test could not confirm this" in one.promise
    assert "no check contradicts" not in one.promise


def test_a_scan_without_a_result_has_spent_its_level(scan: Scan, ledger: Path) -> None:
    scan(["a"])
    scan(None)
    course = read_course(str(ledger))
    assert (course.unfiled, course.latest, course.spent) == ([2], 1, pytest.approx(0.1 * 2 / 12))
    assert "its level is spent" in course.notes[0]
    assert "the scans with a result select" in course.selections[0].promise


def test_a_rule_that_counted_a_list_without_a_promise_promises_nothing(scan: Scan, ledger: Path) -> None:
    scan(["a", "b"], rule="prds", guarantee="heuristic")
    scan(["c"], rule="prds")
    one = members(ledger)
    assert (one.promised, one.n_promised, one.promise) == (False, 0, "No error rate is promised over these scans.")
    assert any("scan 2 counts 2 documents that were selected before" in line for line in one.not_promised)


def test_a_contradicted_list_is_not_counted_and_leaves_the_others_their_promise(scan: Scan, ledger: Path) -> None:
    scan(["a", "b"], rule="prds", supported=False)
    scan(["c"], rule="prds")
    assert members(ledger).n_promised == 1


def test_selections_have_promises_of_their_own(scan: Scan, ledger: Path) -> None:
    scan(["a"], ("first", "second"))
    course = read_course(str(ledger))
    assert [(one.name, one.n_selected) for one in course.selections] == [("first", 1), ("second", 1)]
    assert "none is of them all together" in course.notes[0]


# --- bounds


def test_bounds_that_hold_at_once_may_fail_by_what_each_may(scan: Scan, ledger: Path) -> None:
    scan(["a", "b", "c"], bound=bound(1, 2, 0.99))
    scan(["d", "e"], bound=bound(0, 2, 0.985))
    both = members(ledger).bound
    assert both is not None
    assert (both.wrong_at_most, both.right_at_least, both.n_without) == (1, 4, 0)
    assert Fraction(repr(both.confidence)) == Fraction("0.975")
    assert both.sentence.startswith(
        "For all 2 lists together, with 97.5% confidence: at most 1 of the 5 selected is wrong"
    )


def test_a_sentence_states_no_more_confidence_than_the_bounds_have(scan: Scan, ledger: Path) -> None:
    for number, confidence in enumerate((0.9958, 0.9959, 0.9585)):
        scan([f"{number}"], bound=bound(0, 1, confidence))
    every = members(ledger).bound
    assert every is not None
    assert every.confidence == pytest.approx(0.9502)
    assert every.sentence == "For all 3 lists together, with 95% confidence: none of the 3 selected is wrong."


def test_all_of_a_list_without_a_bound_may_be_wrong(scan: Scan, ledger: Path) -> None:
    scan(["a", "b", "c"], bound=bound(1, 2))
    scan(["d", "e"], bound=bound(0, 2), supported=False)
    scan(["f"], bound=None)
    both = members(ledger).bound
    assert both is not None
    assert (both.wrong_at_most, both.right_at_least, both.n_without) == (1 + 2 + 1, 2, 3)


def test_a_sum_of_bounds_is_conditional_on_the_scans_whose_bounds_it_contains(scan: Scan, ledger: Path) -> None:
    """It was conditional on "both groups of every scan", one of which a check had contradicted."""
    scan(["a", "b", "c"], bound=bound(1, 2), supported=None)
    scan(["d"], bound=bound(0, 1))
    scan(["e", "f"], bound=None, supported=False)
    scan(["g"], bound=None, supported=None)
    every = members(ledger).bound
    assert every is not None
    assert "are right, provided both groups of scan 1 are alike; the test could not confirm this; 3 are on" in (
        every.sentence
    )


def test_a_sum_of_bounds_that_shows_nothing_is_stated_without_a_confidence(scan: Scan, ledger: Path) -> None:
    """It read "with 98% confidence: at most 3 of the 3 selected are wrong, and at least 0 are right"."""
    scan(["a", "b"], bound=bound(2, 0), supported=None)
    one = members(ledger).bound
    assert one is not None
    assert one.sentence == "For this list: all of the 2 selected may be wrong."
    scan(["c"], bound=bound(1, 0))
    both = members(ledger).bound
    assert both is not None
    assert (both.wrong_at_most, both.right_at_least) == (3, 0)
    assert both.sentence == "For all 2 lists together: all of the 3 selected may be wrong."


def test_of_one_selected_document_that_may_be_wrong_no_confidence_is_stated(scan: Scan, ledger: Path) -> None:
    scan(["a"], bound=bound(1, 0))
    one = members(ledger).bound
    assert one is not None
    assert one.sentence == "For this list: the one selected document may be wrong."


def test_nothing_selected_has_no_bound(scan: Scan, ledger: Path) -> None:
    scan([], bound=bound(0, 0))
    assert members(ledger).bound is None


# --- what is new


def test_new_is_what_no_earlier_scan_had_selected(scan: Scan, ledger: Path) -> None:
    scan(["a", "b"])
    scan(["z"], ("other",))
    scan(["z", "b", "c", "a"])
    scan(None)
    (latest,) = read_course(str(ledger)).new
    assert (latest.slot, latest.n_selected, latest.n_new, latest.notes) == (3, 4, 2, [])
    assert [(one.doc_id, one.source) for one in latest.documents] == [("z", "a.jsonl"), ("c", "a.jsonl")]
    assert ended("series", str(ledger), "--fail-if-new") == 4
    scan(["a", "z"])
    assert ended("series", str(ledger), "--fail-if-new") == 0
    scan([])
    assert ended("series", str(ledger), "--fail-if-new") == 0
    scan(["new"], supported=False)
    assert ended("series", str(ledger), "--fail-if-new") == 5
    assert ended("series", str(ledger)) == 0


def test_a_text_that_was_selected_before_is_not_new_in_another_file(scan: Scan, ledger: Path) -> None:
    """Of 22 documents 20 were selected by the first scan, under other ids and from another file."""
    texts = [f"text {number}" for number in range(22)]
    scan(texts[:20])
    scan(texts, file="b.jsonl")
    (latest,) = read_course(str(ledger)).new
    assert (latest.n_selected, latest.n_new, latest.notes) == (22, 2, [])
    assert [one.doc_id for one in latest.documents] == ["b.jsonl#text 20", "b.jsonl#text 21"]
    assert ended("series", str(ledger), "--fail-if-new") == 4
    scan(texts[5:9], file="c.jsonl")
    assert ended("series", str(ledger), "--fail-if-new") == 0


def test_an_id_that_stands_for_another_text_is_new(scan: Scan, ledger: Path) -> None:
    run = scan(["a"])
    other = listed(["b"], "a.jsonl").set_column(0, "doc_id", pa.array(["a"]))
    Store(str(run)).write_table("selection/members/selected.parquet", other)
    sign(Store(str(run)))
    scan(["a"])
    (latest,) = read_course(str(ledger)).new
    assert latest.n_new == 1


def test_a_list_without_keys_is_not_read_and_the_note_names_the_command(scan: Scan, ledger: Path) -> None:
    """Version 0.9.0 wrote no keys of texts into its lists."""
    run = scan(["a"])
    table = listed(["a"], "a.jsonl").drop_columns("text_key")
    Store(str(run)).write_table("selection/members/selected.parquet", table)
    sign(Store(str(run)))
    scan(["a"])
    (latest,) = read_course(str(ledger)).new
    assert latest.n_new == 1
    assert f"has no keys of texts: seenset select {run} writes it again" in latest.notes[0]


def test_the_latest_scan_is_the_one_that_was_filed_last(scan: Scan, ledger: Path) -> None:
    """A scan may take its place before another one, and end after it."""
    first = scan(None)
    scan(["a"])
    filed = scan_config(str(ledger), str(first), rule="spend", horizon=12)
    late = scan_summary(filed, "members", 1)
    file_result(filed, scan_scores(filed, first.name), None, [late], print)
    course = read_course(str(ledger))
    assert course.latest == 1
    assert [(one.slot, one.n_selected, one.n_new) for one in course.new] == [(1, 1, None)]
    assert ended("series", str(ledger), "--fail-if-new") == 4


def test_a_list_that_cannot_be_read_counts_as_new(scan: Scan, ledger: Path) -> None:
    earlier = scan(["a"])
    latest = scan(["a"])
    assert ended("series", str(ledger), "--fail-if-new") == 0
    earlier.rename(earlier.with_name("moved"))
    (one,) = read_course(str(ledger)).new
    assert one.n_new == 1
    assert one.notes[0].endswith("so documents that only scan 1 had selected count as new if scan 2 selected them")
    latest.rename(latest.with_name("moved_too"))
    (one,) = read_course(str(ledger)).new
    assert (one.n_new, one.documents) == (None, [])
    assert one.sentence() == "scan 2 selected 1; how many of them are new is not known, so all count as new"
    assert "cannot be reached" in one.notes[0]
    assert one.notes[0].endswith(", so all documents that scan 2 selected count as new")
    assert ended("series", str(ledger), "--fail-if-new") == 4


def test_a_ledger_and_runs_by_any_way_of_writing_their_paths_are_the_same(
    scan: Scan, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger given as `../ledger` in two folders was another one, so nothing of its lists could be read."""
    scan(["a", "b"])
    scan(["b", "c"])
    (tmp_path / "w" / "v").mkdir(parents=True)
    (tmp_path / "link").symlink_to(ledger)
    monkeypatch.chdir(tmp_path / "w")
    for written in ("../ledger", f"{tmp_path}/w/../ledger", f"{tmp_path}/w/./v/../../ledger", "../link"):
        course = read_course(written)
        assert course.ledger == str(ledger)
        assert [(one.n_new, one.notes) for one in course.new] == [(1, [])]
    assert Store("../run1").url == str(tmp_path / "run1")
    claim = read_schedule(Store(str(ledger))).scans[0].claim  # type: ignore[union-attr]
    earlier = Claim.model_validate({**claim.plain(), "run": f"{tmp_path}/w/../run1"})
    assert earlier.run == claim.run, "entries of earlier versions"


def test_a_run_that_holds_the_answer_of_another_claim_is_not_read(scan: Scan, ledger: Path) -> None:
    first, second = scan(["a"]), scan(["a"])
    for name in ("summary.json", "selected.parquet", "digests.json"):
        (first / "selection/members" / name).write_bytes((second / "selection/members" / name).read_bytes())
    (one,) = read_course(str(ledger)).new
    assert one.n_new == 1
    assert "no longer the one of this scan" in one.notes[0]


def test_a_list_of_another_length_than_was_filed_is_not_read(scan: Scan, ledger: Path) -> None:
    run = scan(["a", "b"])
    Store(str(run)).write_table("selection/members/selected.parquet", listed(["a"], "x"))
    sign(Store(str(run)))
    (one,) = read_course(str(ledger)).new
    assert one.n_new is None
    assert "holds 1 documents, and 2 are filed" in one.notes[0]


# --- the page and the command


def test_the_page_says_what_the_course_says(scan: Scan, ledger: Path, tmp_path: Path) -> None:
    scan(["<script>", "b"], bound=bound(1, 1))
    scan(None)
    scan(["<script>", "c"], supported=False)
    course = read_course(str(ledger))
    address = write_course(check_page_place(str(tmp_path / "page"), str(ledger)), course)
    page = Path(address).read_text(encoding="utf-8")
    for text in (
        course.selections[0].promise,
        "no result",
        "CONTRADICTED",
        "2 by scan 1, 2 by scan 3 (contradicted)",
    ):
        assert text in page
    assert "<script>" not in page
    assert "default-src 'none'" in page
    assert Course.model_validate_json((tmp_path / "page/series.json").read_bytes()) == course
    write_course(check_page_place(str(tmp_path / "page"), str(ledger)), course)
    assert Path(address).read_text(encoding="utf-8") == page


def test_the_command_prints_the_course(
    scan: Scan, ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_now", lambda: "2026-11-02T06:00:00+00:00")
    scan(["a", "b"], bound=bound(1, 1))
    monkeypatch.setattr(claims, "_now", lambda: "2026-11-01T06:00:00+00:00")
    scan(None)
    assert ended("series", str(ledger), "--page", str(tmp_path / "one.html")) == 0
    text = capsys.readouterr().out
    for part in (
        "2 of 12 scans",
        "no result",
        "a clock was wrong",
        "at most 10% is wrong",
        "2 of them new",
        "one.html",
    ):
        assert part in text
    assert (tmp_path / "one.html").exists()
    assert ended("series", str(ledger), "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value.pop("page") is None
    assert Course.model_validate(value).unfiled == [2]


def test_a_ledger_of_no_result_promises_nothing(scan: Scan, ledger: Path, tmp_path: Path) -> None:
    scan(None)
    assert ended("series", str(ledger), "--fail-if-new", "--page", str(tmp_path / "page")) == 0
    assert "nothing is promised" in (tmp_path / "page/series.html").read_text()


def test_what_is_no_ledger_is_one_line(scan: Scan, ledger: Path, tmp_path: Path) -> None:
    def refusal(place: Path) -> str:
        return user_error(read_course, str(place))

    assert "holds no ledger" in refusal(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    assert "no ledger at" in refusal(tmp_path / "file")
    scan(["a"])
    scan(["b"])
    with pytest.raises(UserError, match="in the ledger"):
        check_page_place(str(ledger / "page"), str(ledger))
    with pytest.raises(UserError, match="give --page another folder"):
        check_page_place(str(tmp_path), str(ledger))
    entry = ledger / entry_file(2)
    kept = entry.read_bytes()
    entry.unlink()
    assert "entry 2 is missing" in refusal(ledger)
    entry.write_bytes(kept.replace(b'"n_selected": 1', b'"n_selected": 0'))
    assert "entry 2 was edited" in refusal(ledger)
    entry.write_bytes(b"rubbish")
    assert "entry 2 is damaged" in refusal(ledger)
    assert ended("series", str(ledger)) == 2
