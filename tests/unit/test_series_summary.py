"""The summary of a schedule: what is guaranteed for all its scans, what is not, and what is new on the latest list."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.answers.select import write_answers
from pipeline.answers.summarise import series_place
from pipeline.compare.output_places import page_place
from pipeline.corpus.documents import text_key
from pipeline.results.summary import Summary, read_summary
from pipeline.run.digests import scores_digest
from pipeline.selection.bounds import Bound
from pipeline.selection.guarantees import ConclusionValue
from pipeline.series import claims
from pipeline.series.claims import claim_slots, file_result
from pipeline.series.scans import Claim, read_schedule
from pipeline.series.series_page import SERIES_FILE, SERIES_PAGE, write_series_page
from pipeline.series.summary import SelectionSums, SeriesSummary, read_series
from pipeline.store.files import Store
from pipeline.store.ledger import entry_file
from tests.helpers.commands import ended, user_error
from tests.helpers.made_up_scans import scan_config, scan_scores, scan_summary
from tests.helpers.report_run import build_run
from tests.helpers.signed import sign

Scan = Callable[..., Path]
SUPPORTED, INCONCLUSIVE, CONTRADICTED = ConclusionValue


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    summary = read_summary(build_run(tmp_path_factory.mktemp("made") / "run"), "members")
    return summary.model_copy(update={"conclusion": SUPPORTED, "reasons": [], "guarantee": "finite-sample"})


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def scan(tmp_path: Path, ledger: Path, answer: Summary) -> Scan:
    """Takes the next place; (ids of the selected, or None for a scan without a result; of its answer) -> its run."""
    runs: list[Path] = []

    def take(ids: Sequence[str] | None, names: tuple[str, ...] = ("members",), **changes: Any) -> Path:
        runs.append(tmp_path / f"run{len(runs) + 1}")
        file = changes.pop("file", "a.jsonl")
        config = scan_config(str(ledger), str(runs[-1]), names, horizon=12)
        scored = scan_scores(config, runs[-1].name)
        slots = claim_slots(config, scored, None, print)
        summaries = []
        for name in names if ids is not None else ():
            place = series_place(slots[name], config.series)
            level = {"alpha": float(slots[name].level), "n_audit": 100, "n_selected": len(ids), "series": place}
            one = answer.model_copy(update={"name": name, "procedure": "bh", **level, **changes})
            selected = f"selection/{name}/selected.parquet"
            files = {selected: scored.store.write_table(selected, listed(ids, file))}
            write_answers(scored.store, [one], {one.name: files}, scores_digest(scored.of("audit")))
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


def members(ledger: Path) -> SelectionSums:
    (series,) = read_series(str(ledger)).selections
    return series


def bound(wrong: int, right: int, confidence: float = 0.99) -> Bound:
    return Bound(confidence, wrong, right, right, wrong)


def test_scans_whose_guarantees_stand_are_guaranteed_together(scan: Scan, ledger: Path) -> None:
    scan(["a", "b"])
    scan(["c"])
    series = read_series(str(ledger))
    assert (series.spent, series.places_left, series.latest) == (pytest.approx(0.1 * 2 / 12), 10, 2)
    one = members(ledger)
    assert (one.n_scans, one.n_audit, one.n_selected, one.n_promised, one.promised) == (2, 200, 3, 3, True)
    assert "Of all that the scans select together, at most 10% is wrong, on average over repetitions" in one.promise


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"conclusion": CONTRADICTED}, "a check contradicts"),
        ({"guarantee": "asymptotic"}, "only as numbers grow"),
        ({"guarantee": "heuristic"}, "no error rate is proved"),
        ({"alpha": 0.1}, "above the level of its place"),
    ],
)
def test_one_list_without_a_guarantee_leaves_none_for_all_scans(
    scan: Scan, ledger: Path, changes: dict[str, Any], why: str
) -> None:
    scan(["c"], **changes)
    assert members(ledger).promise == "No error rate is guaranteed over these scans."
    scan(["a", "b"])
    one = members(ledger)
    assert (one.promised, one.n_selected, one.n_promised) == (False, 3, 2)
    assert one.promise.startswith("No error rate is guaranteed over all of these scans. Of what scan 2 selected")
    assert "scan 1: not guaranteed, because" in one.not_promised[0]
    assert why in one.not_promised[0]


def test_an_untested_guarantee_and_a_scan_without_a_result_are_said_to_be_such(scan: Scan, ledger: Path) -> None:
    scan(["a"], conclusion=INCONCLUSIVE)
    one = members(ledger)
    assert one.promised is None
    assert "provided both groups of scan 1 are alike; the test could not confirm this" in one.promise
    assert "no check contradicts" not in one.promise
    scan(None)
    series = read_series(str(ledger))
    assert (series.unfiled, series.latest, series.spent) == ([2], 1, pytest.approx(0.1 * 2 / 12))
    assert "its level is spent" in series.notes[0]
    assert "the scans with a result select" in series.selections[0].promise


def test_selections_have_guarantees_of_their_own(scan: Scan, ledger: Path) -> None:
    scan(["a"], ("first", "second"))
    series = read_series(str(ledger))
    assert [(one.name, one.n_selected) for one in series.selections] == [("first", 1), ("second", 1)]
    assert "none covers all of them together" in series.notes[0]


@pytest.mark.parametrize(
    ("lists", "counts", "confidence", "sentence"),
    [
        (
            [(3, (1, 2, 0.99), SUPPORTED), (2, (0, 2, 0.985), SUPPORTED)],
            (1, 4, 0),
            "0.975",
            "with 97.5% confidence: at most 1 of",
        ),
        (
            [(1, (0, 1, c), SUPPORTED) for c in (0.9958, 0.9959, 0.9585)],
            (0, 3, 0),
            "0.9502",
            "with 95% confidence: none of",
        ),
        (
            [(3, (1, 2), SUPPORTED), (2, (0, 2), CONTRADICTED), (1, None, SUPPORTED)],
            (4, 2, 3),
            None,
            "at most 4 of the 6 selected",
        ),
        (
            [(3, (1, 2), INCONCLUSIVE), (1, (0, 1), SUPPORTED), (2, None, CONTRADICTED), (1, None, INCONCLUSIVE)],
            (4, 3, 3),
            None,
            "are right, provided both groups of scan 1 are alike; the test could not confirm this; 3 are on",
        ),
        ([(2, (2, 0), INCONCLUSIVE)], (2, 0, 0), "0.99", "For this list: all of the 2 selected may be wrong."),
        (
            [(2, (2, 0), INCONCLUSIVE), (1, (1, 0), SUPPORTED)],
            (3, 0, 0),
            "0.98",
            "together: all of the 3 selected may be wrong.",
        ),
        ([(1, (1, 0), SUPPORTED)], (1, 0, 0), "0.99", "For this list: the one selected document may be wrong."),
    ],
)
def test_bounds_of_all_lists_add_up_under_their_common_conditions_and_confidence(
    scan: Scan, ledger: Path, lists: list[tuple[int, Any, ConclusionValue]], counts: Any, confidence: Any, sentence: str
) -> None:
    for number, (n_selected, limits, conclusion) in enumerate(lists):
        texts = [f"{number}-{text}" for text in range(n_selected)]
        scan(texts, bound=None if limits is None else bound(*limits), conclusion=conclusion)
    every = members(ledger).bound
    assert (every.wrong_at_most, every.right_at_least, every.n_without) == counts
    assert confidence in (None, repr(every.confidence))
    assert sentence in every.sentence


def test_new_is_a_text_that_no_earlier_scan_had_selected(scan: Scan, ledger: Path) -> None:
    scan(["a", "b"])
    scan(["z"], ("other",))
    scan(["z", "b", "c", "a"])
    scan(None)
    (latest,) = read_series(str(ledger)).new
    assert (latest.slot, latest.n_selected, latest.n_new, latest.notes) == (3, 4, 2, [])
    assert [(one.doc_id, one.source) for one in latest.documents] == [("z", "a.jsonl"), ("c", "a.jsonl")]
    assert ended("series", str(ledger), "--fail-if-new") == 4
    scan(["a", "z"])
    assert ended("series", str(ledger), "--fail-if-new") == 0
    scan([])
    assert ended("series", str(ledger), "--fail-if-new") == 0
    scan(["new"], conclusion=CONTRADICTED)
    assert ended("series", str(ledger), "--fail-if-new") == 5
    assert ended("series", str(ledger)) == 0
    scan(["a", "b", "one", "two"], file="b.jsonl")  # under other ids and from another file
    (latest,) = read_series(str(ledger)).new
    assert (latest.n_selected, latest.n_new, latest.notes) == (4, 2, [])
    assert [one.doc_id for one in latest.documents] == ["b.jsonl#one", "b.jsonl#two"]
    scan(["z", "c"], file="c.jsonl")
    assert ended("series", str(ledger), "--fail-if-new") == 0


@pytest.mark.parametrize(
    ("change", "n_new", "note"),
    [
        (lambda table: table.set_column(2, "text_key", pa.array([text_key("b")])), 1, None),  # an id of another text
        (lambda table: pa.concat_tables([table] * 2), 1, "holds 2 documents, and 1 are filed"),
    ],
)
def test_a_list_that_is_not_the_one_that_was_filed_makes_nothing_known(
    scan: Scan, ledger: Path, change: Callable[[pa.Table], pa.Table], n_new: int, note: str | None
) -> None:
    run = scan(["a"])
    Store(str(run)).write_table("selection/members/selected.parquet", change(listed(["a"], "a.jsonl")))
    sign(Store(str(run)))
    scan(["a"])
    (latest,) = read_series(str(ledger)).new
    assert latest.n_new == n_new
    assert latest.notes == [] if note is None else note.format(run=run) in latest.notes[0]


def test_the_latest_scan_is_the_one_that_was_filed_last(scan: Scan, ledger: Path) -> None:
    first = scan(None)
    scan(["a"])
    filed = scan_config(str(ledger), str(first), horizon=12)
    late = scan_summary(filed, "members", 1)
    file_result(filed, scan_scores(filed, first.name), None, [late], print)
    series = read_series(str(ledger))
    assert series.latest == 1
    assert [(one.slot, one.n_selected, one.n_new) for one in series.new] == [(1, 1, None)]
    assert ended("series", str(ledger), "--fail-if-new") == 4


def test_a_list_that_cannot_be_read_counts_as_new(scan: Scan, ledger: Path) -> None:
    earlier = scan(["a"])
    latest = scan(["a"])
    assert ended("series", str(ledger), "--fail-if-new") == 0
    earlier.rename(earlier.with_name("moved"))
    (one,) = read_series(str(ledger)).new
    assert one.n_new == 1
    assert one.notes[0].endswith("so documents that only scan 1 had selected count as new if scan 2 selected them")
    latest.rename(latest.with_name("moved_too"))
    (one,) = read_series(str(ledger)).new
    assert (one.n_new, one.documents) == (None, [])
    assert one.sentence() == "scan 2 selected 1; how many of them are new is not known, so all count as new"
    assert "cannot be reached" in one.notes[0]
    assert one.notes[0].endswith(", so all documents that scan 2 selected count as new")
    assert ended("series", str(ledger), "--fail-if-new") == 4


def test_a_ledger_and_runs_by_any_way_of_writing_their_paths_are_the_same(
    scan: Scan, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan(["a", "b"])
    scan(["b", "c"])
    (tmp_path / "w" / "v").mkdir(parents=True)
    (tmp_path / "link").symlink_to(ledger)
    monkeypatch.chdir(tmp_path / "w")
    for written in ("../ledger", f"{tmp_path}/w/../ledger", f"{tmp_path}/w/./v/../../ledger", "../link"):
        series = read_series(written)
        assert (series.ledger, [(one.n_new, one.notes) for one in series.new]) == (str(ledger), [(1, [])])
    assert Store("../run1").url == str(tmp_path / "run1")
    claim = read_schedule(Store(str(ledger))).scans[0].claim  # type: ignore[union-attr]
    earlier = Claim.model_validate({**claim.plain(), "run": f"{tmp_path}/w/../run1"})
    assert earlier.run == claim.run, "entries of earlier versions"


def test_a_run_that_holds_the_answer_of_another_claim_is_not_read(scan: Scan, ledger: Path) -> None:
    first, second = scan(["a"]), scan(["a"])
    for name in ("summary.json", "selected.parquet", "digests.json"):
        (first / "selection/members" / name).write_bytes((second / "selection/members" / name).read_bytes())
    (one,) = read_series(str(ledger)).new
    assert one.n_new == 1
    assert "no longer the one of this scan" in one.notes[0]


def test_the_command_and_the_page_state_what_the_summary_states(
    scan: Scan, ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_now", lambda: "2026-11-02T06:00:00+00:00")
    scan(["<script>", "b"], bound=bound(1, 1))
    monkeypatch.setattr(claims, "_now", lambda: "2026-11-01T06:00:00+00:00")
    scan(None)
    assert ended("series", str(ledger), "--page", str(tmp_path / "one.html")) == 0
    printed, first = capsys.readouterr().out, (tmp_path / "one.html").read_text()
    assert all(part in printed for part in ("2 of 12 scans", "no result", "a clock was wrong", "one.html"))
    assert all(part in printed for part in ("at most 10% is wrong", "2 of them new"))
    scan(["<script>", "c"], conclusion=CONTRADICTED)
    series = read_series(str(ledger))
    place = page_place(str(tmp_path / "page"), SERIES_PAGE, SERIES_FILE, str(ledger))
    page, again = (Path(write_series_page(place, series)).read_text() for _ in range(2))
    assert page == again
    for text in (series.selections[0].promise, "no result", "CONTRADICTED", "2 by scan 1, 2 by scan 3 (contradicted)"):
        assert text in page
    assert all("<script>" not in shown and "default-src 'none'" in shown for shown in (first, page))
    assert SeriesSummary.model_validate_json((tmp_path / "page/series.json").read_bytes()) == series


def test_a_ledger_of_no_result_guarantees_nothing_and_no_list_has_no_bound(
    scan: Scan, ledger: Path, tmp_path: Path
) -> None:
    scan(None)
    assert ended("series", str(ledger), "--fail-if-new", "--page", str(tmp_path / "page")) == 0
    assert "nothing is guaranteed" in (tmp_path / "page/series.html").read_text()
    scan([], bound=bound(0, 0))
    assert members(ledger).bound is None, "nothing is selected"


def test_what_is_no_ledger_is_one_line(scan: Scan, ledger: Path, tmp_path: Path) -> None:
    def refusal(place: Path) -> str:
        return user_error(read_series, str(place))

    assert "holds no ledger" in refusal(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    assert "no ledger at" in refusal(tmp_path / "file")
    scan(["a"])
    scan(["b"])
    assert "in the ledger" in user_error(page_place, str(ledger / "page"), SERIES_PAGE, SERIES_FILE, str(ledger))
    assert "give --page another folder" in user_error(page_place, str(tmp_path), SERIES_PAGE, SERIES_FILE, str(ledger))
    (ledger / entry_file(2)).unlink()
    assert "entry 2 is missing" in refusal(ledger)
    assert ended("series", str(ledger)) == 2
