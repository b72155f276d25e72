"""A review removes confirmed documents from calibration, and no answer then claims more than an approximation."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bundle_runs import ALIKE, asked
from commands import ended, refusal, user_error
from finished import refile, run, with_column
from finished import rows as scored
from made_up import sentence, write_audit, write_corpus, write_rows
from signed import file_blind_test

from pipeline.audit.description import load_config
from pipeline.audit.review import COLUMNS, Reviewed, read_review
from pipeline.bundle.verify import verify_bundle
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

N_UNSEEN, SEEN_AFTER_ALL, COUNT = 60, (3, 17, 40, 41), 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A folder with a finished run, four of whose unseen documents score as members do, and its audit.yaml."""
    folder = tmp_path_factory.mktemp("review")
    numbers = enumerate((("audit", 80), ("unseen", N_UNSEEN), ("seen", 40)))
    texts = {role: [sentence(1000 * first + i) for i in range(number)] for first, (role, number) in numbers}
    corpus = write_corpus(folder, texts)
    corpus["unseen"]["review_count"] = COUNT
    selections = asked("members", "storey", "learnt", "clean")
    run(write_audit(folder, tiny_model_folder, corpus=corpus, selections=selections, detectors=["loss", "min_k"]))
    rng = np.random.default_rng(0)

    def changed(table: pa.Table, receipt: Receipt) -> pa.Table:
        rows = table["row"].to_numpy()
        by_role = {"audit": rows % 2 == 0, "unseen": np.isin(rows, SEEN_AFTER_ALL), "seen": rows >= 0}
        for name in ("loss", "min_k"):
            table = with_column(table, name, pa.array(rng.normal(size=len(table)) + 6.0 * by_role[receipt.role]))
        return table

    refile(folder / "run", changed)
    file_blind_test(Store(str(folder / "run")), ALIKE)
    assert ended("select", folder / "run", "--no-text") == 0
    return folder


@pytest.fixture
def audit(base: Path, tmp_path: Path) -> Path:
    """A copy of the run with the list of its review beside it."""
    shutil.copytree(base / "run", tmp_path / "run")
    assert ended("review", tmp_path / "run", tmp_path / "review.csv") == 0
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def confirmed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The truth of all rows but two: one is unsure, and one was not reviewed."""
    seen = {f"unseen-{i}" for i in SEEN_AFTER_ALL[:3]}
    answers = {row["doc_id"]: "Yes" if row["doc_id"] in seen else "no" for row in rows}
    answers[f"unseen-{SEEN_AFTER_ALL[3]}"] = "unsure"
    left = next(name for name, answer in answers.items() if answer == "no")
    return [{**row, "trained_on": "" if row["doc_id"] == left else answers[row["doc_id"]]} for row in rows]


def answer(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "run" / "selection" / name / "summary.json").read_text())


def select(folder: Path) -> int:
    return ended("select", folder / "run", "--set", f"corpus.unseen.review={folder / 'review.csv'}")


def reviewed(audit: Path) -> None:
    """Fill the list in, and answer again."""
    write(audit / "review.csv", confirmed(rows_of(audit / "review.csv")))
    assert select(audit) == 0


def test_the_list_holds_the_highest_scores_and_shows_none(audit: Path) -> None:
    rows = rows_of(audit / "review.csv")
    scores = {name: row["loss"] for name, row in scored(audit / "run").items()}
    unseen = sorted((name for name in scores if name.startswith("unseen")), key=lambda name: -scores[name])
    assert {row["doc_id"] for row in rows} == set(unseen[:COUNT])
    assert [int(row["row"]) for row in rows] == sorted(int(row["row"]) for row in rows)
    assert tuple(rows[0]) == COLUMNS
    assert all(row["trained_on"] == "" and row["excerpt"].startswith("“") for row in rows)
    again = audit / "again.csv"
    assert ended("review", audit / "run", again) == 0
    assert again.read_bytes() == (audit / "review.csv").read_bytes()


def test_confirmed_documents_make_answers_approximate(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: answer(audit, name) for name in ("members", "storey", "learnt")}
    clean = answer(audit, "clean")
    assert before["members"]["guarantee"] == clean["guarantee"] == "finite-sample"
    assert before["members"]["bound"] is not None
    assert "review" not in before["members"]
    capsys.readouterr()
    reviewed(audit)
    shown = " ".join(capsys.readouterr().out.split())
    sentence = "Of the 6 calibration documents with the highest scores (loss), 5 were reviewed and 3 removed"
    assert sentence in shown
    page = " ".join((audit / "run" / "report" / "report.html").read_text(encoding="utf-8").split())
    assert sentence in page
    for name, earlier in before.items():
        now = answer(audit, name)
        assert now["n_calibration"] < earlier["n_calibration"]
        assert now["guarantee"] == now["strict"]["guarantee"] == "heuristic"
        assert "alpha / (1 - e)" in now["promise"]
        assert now["bound"] is None
        assert (now["review"]["n_listed"], now["review"]["n_reviewed"], now["review"]["n_removed"]) == (6, 5, 3)
        assert now["review"]["guarantee"] == earlier["guarantee"]
    assert answer(audit, "members")["n_calibration"] == N_UNSEEN - 3
    assert answer(audit, "members")["n_selected"] > before["members"]["n_selected"]
    assert answer(audit, "members")["promise"] in page
    assert answer(audit, "clean") == clean, "seen documents calibrate it"
    assert ended("select", audit / "run") == 0
    assert answer(audit, "members") == before["members"], "without the file all documents count again"


def test_a_review_that_confirms_nothing_takes_nothing_from_the_guarantee(audit: Path) -> None:
    before = answer(audit, "members")
    assert select(audit) == 0
    now = answer(audit, "members")
    assert now.pop("review")["n_removed"] == 0
    assert now == before


def test_a_reviewed_run_is_packed_gets_no_verdict_or_joint_answer_and_is_evaluated_whole(
    base: Path, audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reviewed(audit)
    assert len(json.loads((audit / "run" / "reviewed.json").read_text())["documents"]) == 3
    assert ended("pack", audit / "run", audit / "run.bundle") == 0
    verified = verify_bundle((audit / "run.bundle").read_bytes(), "run.bundle")
    assert verified.holds
    assert any(one.about == "selection members, review" and "3 removed" in one.sentence for one in verified.findings)
    assert "no stated level" in refusal(capsys, "verdict", audit / "run")
    shutil.copytree(audit / "run", audit / "other")
    line = refusal(capsys, "joint", audit / "run", audit / "other", "--selection", "members", "--output", audit / "j")
    assert "removed calibration documents after a review" in line
    assert ended("evaluate", base / "audit.yaml", "--set", f"run={audit / 'run'}") == 0
    rows = json.loads((audit / "run" / "evaluation" / "evaluation.json").read_text())["rows"]
    assert {row["n_unseen"] for row in rows if row["detector"] == "loss"} == {N_UNSEEN}, "with their labels"


def saved(rows: list[dict[str, str]], delimiter: str = ",", columns: Sequence[str] = COLUMNS, **how: Any) -> str:
    """Rows as a spreadsheet program saves them."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, delimiter=delimiter, **how)
    writer.writeheader()
    writer.writerows([{name: row.get(name, "") for name in columns} for row in rows])
    return text.getvalue()


def read(base: Path, audit: Path) -> Callable[[], Reviewed | None]:
    """What reads the list as every selection does."""
    config = load_config(str(base / "audit.yaml"), [f"corpus.unseen.review={audit / 'review.csv'}"])
    return lambda: read_review(Store(str(audit / "run")), config)


def test_a_list_that_a_spreadsheet_program_saved_removes_the_same_documents(base: Path, audit: Path) -> None:
    path, read_again = audit / "review.csv", read(base, audit)
    rows = confirmed([{**row, "excerpt": f'{row["excerpt"]}; a, b\n"c"'} for row in rows_of(path)])
    semicolons = saved(rows, ";", lineterminator="\r\n")
    spaced = [{**r, "trained_on": f" {r['trained_on'].upper()}\xa0", "review": f" {r['review']} "} for r in rows]
    for content in (
        semicolons.encode("utf-8-sig"),
        saved(rows, "\t", lineterminator="\r\n").encode("utf-16"),
        saved(rows, quoting=csv.QUOTE_ALL, lineterminator="\r").encode(),
        f"sep=;\r\n{semicolons}".encode("utf-8-sig"),
        saved(rows, ";", [*reversed(COLUMNS), "notes"]).encode(),
        saved([*rows, {}, {}], columns=[*COLUMNS, "", " "]).encode(),
        saved(spaced).encode(),
        saved(rows, ";").replace("trained_on", " Trained_On ").encode(),
    ):
        path.write_bytes(content)
        found = read_again()
        review = found.review
        assert (review.n_listed, review.n_reviewed, review.n_removed) == (6, 5, 3), content
        assert set(found.documents) == {f"unseen-{row}" for row in SEEN_AFTER_ALL[:3]}


def test_a_list_that_is_damaged_or_not_the_filled_in_one_is_refused_with_the_remedy_and_the_answers_stay(
    base: Path, audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before, read_again = audit / "review.csv", answer(audit, "members"), read(base, audit)
    rows = [{**row, "excerpt": "one, two"} for row in confirmed(rows_of(path))]
    first, *rest = rows

    def changed(**values: str) -> str:
        return saved([{**row, **values} for row in rows])

    def first_changed(**values: str) -> str:
        return saved([{**first, **values}, *rest])

    remedy = "save it as CSV in UTF-8"
    unquoted = saved(rows, ",", ["doc_id", "excerpt", "review", "trained_on"], quoting=csv.QUOTE_NONE, escapechar="\\")
    nameless = saved([{**row, "": "x"} for row in rows], columns=[*COLUMNS, ""])
    number = "a spreadsheet program changes what looks like a number or"
    for content, expected in (
        (b"PK\x03\x04" + b"\0" * 40, f"is a workbook, not a CSV file; {remedy}"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 40, f"is a workbook, not a CSV file; {remedy}"),
        (saved(rows, ";").encode().replace(b"unseen-", b"unseen\xe4"), f"is not a CSV file in UTF-8; {remedy}"),
        (saved(rows) + '"torn', f"is not a CSV file in UTF-8; {remedy}"),
        (changed(trained_on="TRUE"), "is 'true'; it takes: yes, no"),
        (first_changed(trained_on="yess"), "is 'yess'; did you mean 'yes'?"),
        (saved(rows, columns=[*COLUMNS, "trained_on"]), "has 2 columns trained_on"),
        (saved(rows, columns=COLUMNS[:-1]), "no column trained_on"),
        (unquoted.replace("\\,", ","), "has more values than columns"),
        (nameless, "has more values than columns"),
        (first_changed(doc_id="1E+05"), f"'1E+05' is not one of the 6 listed documents; {number}"),
        (changed(review="1.2E+15"), "read the columns as text"),
        (changed(review="0" * 16), "is of another run or another review_count"),
        (saved(rest), "has no row; leave trained_on empty"),
        (saved([]), "has no row"),
        (saved([*rows, {**first, "doc_id": "unseen-none"}]), "'unseen-none' is not one of the 6 listed documents"),
        (saved([*rows, first]), "has 2 rows"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert expected in user_error(read_again)
    assert "has 2 rows" in refusal(capsys, "select", audit / "run", "--set", f"corpus.unseen.review={path}")
    assert ended("status", audit / "run") == 0
    assert answer(audit, "members") == before


def test_the_number_is_fixed_before_scoring(base: Path, audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "run", base / "audit.yaml", "--set", "corpus.unseen.review_count=7")
    assert "was started with corpus.unseen.review_count 6, now 7" in line
    line = refusal(capsys, "select", audit / "run", "--set", "corpus.unseen.review_count=7")
    assert "corpus needs seenset run" in line
    missing = refusal(capsys, "select", audit / "run", "--set", f"corpus.unseen.review={audit / 'none.csv'}")
    assert "none.csv is not a file" in missing
    assert "overwrites nothing" in refusal(capsys, "review", audit / "run", audit / "review.csv")
    line = refusal(capsys, "select", base / "run", "--set", f"corpus.unseen.review={audit / 'review.csv'}")
    assert "has listed no documents" in line


def test_a_review_is_of_unseen_documents_with_a_number_outside_schedules_and_of_no_signs(base: Path) -> None:
    signs = "selections=[{name: signs, detectors: [min_k_plus_plus], procedure: ktd, alpha: 0.1}]"
    for expected, *overrides in (
        (
            "procedure ktd tests its signs on all unseen documents, and corpus.unseen.review",
            *("detectors=[loss, min_k_plus_plus]", signs, "corpus.unseen.review=x.csv"),
        ),
        ("review and review_count are of unseen documents", "corpus.audit.review_count=3"),
        ("review goes with review_count", "corpus.unseen.review_count=null", "corpus.unseen.review=x.csv"),
        ("holds for no reviewed scan", "series.ledger=ledger", "series.horizon=4"),
        ("greater than or equal to 1", "corpus.unseen.review_count=0"),
    ):
        assert expected in user_error(load_config, str(base / "audit.yaml"), overrides)


def test_a_file_that_was_changed_after_an_answer_makes_the_run_answer_anew(base: Path, audit: Path) -> None:
    shutil.copytree(base, audit / "whole")
    config = audit / "whole" / "audit.yaml"
    config.write_text(config.read_text().replace(str(base), str(audit / "whole")))
    path = audit / "whole" / "review.csv"
    assert ended("review", audit / "whole" / "run", path) == 0
    assert ended("run", config, "--set", f"corpus.unseen.review={path}") == 0
    assert answer(audit / "whole", "members")["review"]["n_removed"] == 0
    write(path, confirmed(rows_of(path)))
    assert ended("run", config, "--set", f"corpus.unseen.review={path}") == 0
    assert answer(audit / "whole", "members")["review"]["n_removed"] == 3


def test_ids_that_a_spreadsheet_would_run_are_escaped_and_read_back(tmp_path: Path, tiny_model_folder: Path) -> None:
    ids = ["=1+1", "+1", "-2+3", "@SUM(A1)", "\ttab", "\rreturn", "'quoted", "''twice", "plain", "a=b"]
    ids += [f"u{number}" for number in range(30)]
    corpus = write_corpus(tmp_path, {"audit": [sentence(number) for number in range(60)]})
    rows = [{"id": name, "text": sentence(1000 + number)} for number, name in enumerate(ids)]
    unseen = write_rows(tmp_path / "=unseen.jsonl", rows)
    corpus["unseen"] = {"path": unseen, "id": "id", "review_count": len(ids)}
    audit = write_audit(tmp_path, tiny_model_folder, corpus=corpus)
    assert ended("run", audit) == 0
    assert ended("review", tmp_path / "run", tmp_path / "review.csv") == 0
    with (tmp_path / "review.csv").open(encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file))
    escaped = {name: f"'{name}" if name[0] in "=+-@\t\r'" else name for name in ids}
    assert [row["doc_id"] for row in listed] == list(escaped.values())
    assert {row["source"] for row in listed} == {unseen}
    assert [row["row"] for row in listed] == [str(number) for number in range(len(ids))], "numbers stay numbers"
    write(tmp_path / "review.csv", confirmed_as(listed, {"'=1+1", "'''twice", "plain"}))
    setting = f"corpus.unseen.review={tmp_path}/review.csv"
    assert ended("select", tmp_path / "run", "--set", setting) == 0
    review = read_review(Store(str(tmp_path / "run")), load_config(str(audit), [setting]))
    assert review is not None
    assert review.documents == ["=1+1", "''twice", "plain"]


def confirmed_as(rows: list[dict[str, str]], ids: set[str]) -> list[dict[str, str]]:
    return [{**row, "trained_on": "yes" if row["doc_id"] in ids else "no"} for row in rows]
