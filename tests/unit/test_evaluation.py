"""Documents of known membership: the figures are those of the scores, beside what the words alone tell."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score
from test_report import Page

from pipeline.answers import evaluation as numbers
from pipeline.answers.detection import Estimate
from pipeline.answers.evaluation import BLIND, Evaluated, Evaluation
from pipeline.answers.evaluation_text import about_words, worded
from pipeline.checks.blind import sample_documents
from pipeline.config.audit import AuditConfig
from pipeline.errors import UserError
from pipeline.plan.description import build_evaluation
from pipeline.report.evaluation_page import write_evaluation
from pipeline.report.tables import evaluation_table, page_table
from pipeline.run.records import read_record
from pipeline.run.scored import Scored, read_scored
from tests.helpers.finished import score_run
from tests.helpers.made_up import sentence, write_rows

SCRIPT = "<script>alert('group')</script>"
MARKUP = "[/bold] [red]"
Score = Callable[..., tuple[AuditConfig, Scored]]


def rows_of(n: int, words: Sequence[str] = ("Text", "Text"), groups: Sequence[str] = ("news", "notes")) -> list[dict]:
    """Half members; the words at the beginning are of the members and of the others."""
    texts = [sentence(i, 8).replace("Text", words[i % 2], 1) for i in range(n)]
    return [{"text": texts[i], "member": i % 2 == 0, "kind": groups[i // 2 % len(groups)]} for i in range(n)]


@pytest.fixture
def score(tmp_path: Path, tiny_model_folder: Path) -> Score:
    """Scores labelled rows in this process, as the drivers do: (rows, limit, **settings) -> audit, scores."""

    def finish(rows: Sequence[Any], limit: int | None = None, **settings: Any) -> tuple[AuditConfig, Scored]:
        path = write_rows(tmp_path / "labelled.jsonl", rows)
        described = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(tiny_model_folder)},
            "corpus": {"labelled": {"path": path, "label": "member", "group": "kind"}},
            "detectors": ["loss", "zlib"],
            "resources": {"shard_bytes": 2000},
        }
        config = build_evaluation({**described, **settings})
        plan, store = score_run(config, limit)
        return config, read_scored(store, plan.shards)

    return finish


def evaluate_scores(config: AuditConfig, scored: Scored, limit: int | None) -> Evaluated:
    """As the driver evaluates them: with the notices."""
    return worded(numbers.evaluate_scores(config, scored, limit))


def figures(evaluated: Evaluated) -> dict[tuple[str | None, str], Any]:
    return {(row.group, row.detector): row for row in evaluated.evaluation.rows}


def test_the_figures_are_those_of_the_scores_over_all_documents_and_in_each_group(score: Score) -> None:
    config, scored = score(rows_of(120))
    evaluated = evaluate_scores(config, scored, None)
    rows = figures(evaluated)
    assert list(rows) == [(g, d) for g in (None, "news", "notes") for d in (BLIND, "loss", "zlib")]
    table = pa.concat_tables(scored.table(receipt, ["role", "group", "loss", "zlib"]) for receipt in scored.receipts)
    for (group, detector), row in rows.items():
        if detector == BLIND:
            continue
        part = table if group is None else table.filter(pa.array([g == group for g in table["group"].to_pylist()]))
        member = [role == "seen" for role in part["role"].to_pylist()]
        assert row.auc.value == pytest.approx(roc_auc_score(member, part[detector].to_numpy()))
        assert row.auc.low < row.auc.value < row.auc.high
        assert (row.n_seen, row.n_unseen) == (sum(member), len(member) - sum(member))
        assert list(row.tpr) == ["0.01", "0.05", "0.1"]
        assert row.tpr["0.01"].value <= row.tpr["0.05"].value <= row.tpr["0.1"].value
    row, few = rows[None, "loss"], "Too few unseen documents (60) for an interval at a false positive rate of"
    assert (row.tpr["0.01"].low is None, row.tpr["0.1"].low is None) == (True, False)
    found = [notice for notice in evaluated.evaluation.notices if notice.startswith("Too few")]
    assert found == [f"{few} 1%.", f"{few} 5%."]
    cells = {cell for row in page_table(evaluation_table(evaluated.evaluation)).rows for cell in row}
    assert any(cell.endswith("(no interval)") for cell in cells)
    assert list(evaluated.curves) == [BLIND, "loss", "zlib"]
    for fpr, tpr in evaluated.curves.values():
        assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
        assert np.all(np.diff(fpr) >= 0)


def test_words_that_tell_the_kinds_apart_stand_in_the_first_row_and_in_a_notice(score: Score) -> None:
    rows = rows_of(160, ("An old sentence", "Something of today"))
    evaluation = evaluate_scores(*score(rows), None).evaluation
    first = evaluation.rows[0]
    assert (first.detector, first.group, first.n_seen, first.n_unseen) == (BLIND, None, 80, 80)
    assert first.auc.low > 0.9
    assert "they differ in more than membership" in " ".join(evaluation.notices)


def test_words_that_are_alike_leave_it_open_or_are_not_called_proof(
    score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, scored = score(rows_of(160))
    evaluation = evaluate_scores(config, scored, None).evaluation
    first = evaluation.rows[0]
    assert first.auc.value == pytest.approx(0.5, abs=0.2)
    assert first.auc.low < 0.5 < first.auc.high
    assert "the test is inconclusive" in " ".join(evaluation.notices)
    assert all((rate.low, rate.high) == (None, None) for rate in first.tpr.values())
    assert any(f'The TPR of the row "{BLIND}" has no interval' in notice for notice in evaluation.notices)
    counted = f'The row "{BLIND}" counts all of the 80 seen and 80 unseen documents that are compared.'
    assert counted in evaluation.notices
    sentence = about_words(first.model_copy(update={"auc": Estimate(0.5, 0.46, 0.54)}))
    assert "hardly tells seen from unseen documents by their words" in sentence
    assert "it does not prove that the documents differ in membership alone" in sentence
    monkeypatch.setattr(numbers, "sample_documents", lambda shards: sample_documents(shards, 30))
    some = evaluate_scores(config, scored, None).evaluation
    n_seen, n_unseen = some.rows[0].n_seen, some.rows[0].n_unseen
    assert 30 <= n_seen < 80
    counted = f"{n_seen} of the 80 seen and {n_unseen} of the 80 unseen documents that are compared"
    assert any(notice.startswith(f'The row "{BLIND}" counts {counted}') for notice in some.notices)
    for auc, words in {
        Estimate(0.42, 0.3, 0.54): "cannot be determined from so few documents",
        Estimate(0.4, 0.35, 0.45): "further below 0.5 than chance explains (AUC 0.400, 95% interval 0.350 to 0.450;",
    }.items():
        sentence = about_words(first.model_copy(update={"auc": auc}))
        assert words in sentence, "an AUC below 0.5 is taken as 0.5"


def test_too_few_documents_for_the_words_leave_their_row_out_and_say_so(score: Score) -> None:
    evaluation = evaluate_scores(*score(rows_of(30)), None).evaluation
    assert [row.detector for row in evaluation.rows if row.group is None] == ["loss", "zlib"]
    notices = " ".join(evaluation.notices)
    assert "whether a classifier tells them apart was not tested" in notices
    assert "With 15 unseen documents a false positive rate of 1% or 5% allows no false positive" in notices
    assert "the figures are too uncertain to rely on" in notices


def test_every_document_that_is_read_is_compared_or_counted_as_quarantined(score: Score) -> None:
    rows = rows_of(60)
    rows[3]["text"], rows[4]["text"], rows[5]["member"] = "", None, None
    rows[8]["text"] = rows[9]["text"]  # a member and none with one text
    evaluation = evaluate_scores(*score(rows, error_budget=0.5), None).evaluation
    seen, unseen = evaluation.documents
    assert (seen.role, seen.n_in, seen.n_compared, seen.reasons) == ("seen", 30, 29, {"not_text": 1})
    assert (unseen.n_in, unseen.n_compared, unseen.reasons) == (30, 28, {"empty": 1, "no_label": 1})
    assert seen.n_in + unseen.n_in == len(rows)
    assert evaluation.n_shared == 1
    assert any("1 seen documents have the same text" in notice for notice in evaluation.notices)


def test_a_group_of_one_role_is_undefined_and_documents_of_one_role_are_not_compared(
    score: Score, tmp_path: Path
) -> None:
    rows = [{**row, "kind": "old" if row["member"] else "new"} for row in rows_of(60)]
    by_place = figures(evaluate_scores(*score(rows), None))
    assert by_place[("old", "loss")].auc.value is None
    assert (by_place[("old", "loss")].n_seen, by_place[("old", "loss")].n_unseen) == (30, 0)
    table = page_table(evaluation_table(evaluate_scores(*score(rows), None).evaluation))
    assert "not defined" in {cell for row in table.rows for cell in row}
    rows = [{**row, "text": "" if row["member"] else row["text"]} for row in rows_of(20)]
    with pytest.raises(UserError, match="no seen document has a score"):
        evaluate_scores(*score(rows, error_budget=1, run=str(tmp_path / "none")), None)


def test_a_limit_reads_the_first_of_each_kind_and_says_that_it_is_a_sample(score: Score) -> None:
    evaluation = evaluate_scores(*score(rows_of(100), 30), 30).evaluation
    assert [entry.n_in for entry in evaluation.documents] == [30, 30]
    assert evaluation.notices[0].startswith("This is a sample: only the first 30 documents of each role")


def test_the_page_shows_figures_loads_and_runs_nothing_and_is_the_same_bytes_again(
    score: Score, capsys: pytest.CaptureFixture[str]
) -> None:
    config, scored = score(rows_of(120, groups=(SCRIPT, MARKUP)))
    evaluated = evaluate_scores(config, scored, None)
    page_of = write_evaluation(scored.store, evaluated)
    assert page_of == f"{scored.store.url}/evaluation/evaluation.html"
    names = ("evaluation.json", "evaluation.html", "roc.svg", "roc-small.svg")
    first = [scored.store.read(f"evaluation/{name}") for name in names]
    write_evaluation(scored.store, evaluate_scores(config, scored, None))
    assert [scored.store.read(f"evaluation/{name}") for name in names] == first
    assert read_record(scored.store, "evaluation/evaluation.json", Evaluation, "") == evaluated.evaluation
    assert all(base64.b64encode(svg) in first[1] for svg in first[2:])
    source = scored.store.read("evaluation/evaluation.html").decode()
    page = Page(source)
    assert SCRIPT in page.text
    assert MARKUP in page.text
    assert BLIND in page.text
    row = next(row for row in evaluated.evaluation.rows if row.detector == "loss" and row.group is None)
    assert f"{row.auc.value:.3f} [{row.auc.low:.3f}, {row.auc.high:.3f}]" in page.text
    assert all(" ".join(notice.split()) in page.text for notice in evaluated.evaluation.notices)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "link", "form", "base"}
    assert all(attrs["src"].startswith("data:image/svg+xml;base64,") for tag, attrs in page.tags if tag == "img")
    for tag, attrs in page.tags:
        assert str(attrs.get("href", "#")).startswith("#"), tag
    assert "default-src 'none'" in source
    assert sentence(3, 8) not in source, "no text of a document"
    Console(width=200).print(evaluation_table(evaluated.evaluation))  # markup in a group is printed as it stands
    assert MARKUP in capsys.readouterr().out


def test_groups_of_one_role_are_the_units_of_intervals_and_groups_of_both_are_given(
    score: Score, tmp_path: Path
) -> None:
    """Chapters of books share a role; topics do not."""
    rows = rows_of(120)
    books = [{**row, "kind": f"book {i % 2}{i // 20}"} for i, row in enumerate(rows)]
    by_document = evaluate_scores(*score(rows), None).evaluation
    assert any("their documents count one by one" in notice for notice in by_document.notices)
    grouped = evaluate_scores(*score(books, run=str(tmp_path / "books")), None).evaluation
    assert any("over 6 seen and 6 unseen blocks" in notice for notice in grouped.notices)
    one, other = (next(row for row in e.rows if row.detector == "loss") for e in (by_document, grouped))
    assert one.auc.value == pytest.approx(other.auc.value)
    assert other.auc.high - other.auc.low > 1.5 * (one.auc.high - one.auc.low)
    assert one.tpr["0.1"].low is not None
    assert other.tpr["0.1"].low is None
    assert "Too few unseen blocks (6) for an interval at a false positive rate of 10%." in grouped.notices


def test_near_duplicates_count_as_one_document_of_an_interval(score: Score, tmp_path: Path) -> None:
    rows = rows_of(100)
    copies = [{**row, "text": f"{row['text']} again"} for row in rows[:2] for _ in range(40)]
    single = evaluate_scores(*score(rows), None).evaluation
    copied = evaluate_scores(*score([*rows, *copies], run=str(tmp_path / "copies")), None).evaluation
    one, other = (next(row for row in e.rows if row.detector == "loss") for e in (single, copied))
    assert (other.n_seen, other.n_unseen) == (90, 90)
    assert other.auc.high - other.auc.low > one.auc.high - one.auc.low
    assert any("families of near-duplicates" in notice for notice in copied.notices)
