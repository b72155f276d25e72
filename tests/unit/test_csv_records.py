"""No document of a CSV file is lost or cut without a word: a record that does not fit is named with its line."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.audit import AuditConfig
from pipeline.config.dialect import Dialect
from pipeline.config.yaml import build
from pipeline.corpus.csv_records import (
    BadRecord,
    count_records,
    csv_record,
    csv_records,
    csv_rows,
)
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.formats.base import ExportSource, RowEdits, TextEdit
from pipeline.corpus.formats.csv_file import CSV
from pipeline.corpus.input_files import Overlong
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.export.request import RowMarks
from pipeline.plan.preflight import plan_checks
from pipeline.run.plan import make_plan
from tests.helpers.commands import here, refusal, user_error

ROWS = [f"d{number},a text of plain words number {number}" for number in range(60)]


def config_of(path: Path, **settings: Any) -> AuditConfig:
    (path.parent / "unseen.csv").write_text("text\n" + "".join(f"other words number {n}\n" for n in range(60)))
    corpus = {"audit": {"path": str(path), **settings}, "unseen": {"path": str(path.parent / "unseen.csv")}}
    return build(AuditConfig, {"run": "run", "model": {"path": "none"}, "corpus": corpus})


def written(folder: Path, content: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def shards_of(path: Path, **settings: Any) -> list[Shard]:
    return [shard for shard in make_plan(config_of(path, **settings)).shards if shard.role == "audit"]


def read(path: Path, **settings: Any) -> list[Document]:
    return [document for shard in shards_of(path, **settings) for document in read_shard(shard)]


def problems(path: Path, **settings: Any) -> dict[int, str]:
    return {one.row: f"{one.problem[0]}: {one.problem[1]}" for one in read(path, **settings) if one.problem}


def lines_of(path: Path, **settings: Any) -> list[str]:
    return list(plan_checks(make_plan(config_of(path, **settings)))["lines"])


def file_path(rows: list[str], header: str = "id,text", end: str = "\n") -> str:
    return "".join(f"{row}{end}" for row in [header, *rows])


def test_a_record_with_more_fields_than_the_header_is_named_with_its_line(tmp_path: Path) -> None:
    rows = [f"{row}, and more" if number % 20 == 7 else row for number, row in enumerate(ROWS)]
    path = written(tmp_path, file_path(rows))
    wrong = {n: f"undecodable: line {n + 2} has 3 fields, and the header has 2" for n in (7, 27, 47)}
    assert problems(path) == wrong
    assert len(read(path)) == 60
    (line,) = [line for line in lines_of(path) if "cannot be read" in line]
    assert line.startswith("warning: 3 of 60 sampled documents of ")
    assert line.endswith("cannot be read: 3 undecodable (first: line 9 has 3 fields, and the header has 2)")


def test_row_names_without_a_header_stop_the_plan(tmp_path: Path) -> None:
    path = written(tmp_path, file_path([f'"{number}",{row}' for number, row in enumerate(ROWS)]))
    refused = user_error(lines_of, path)
    assert "60 of 60 sampled documents of " in refused
    assert "line 2 has 3 fields, and the header has 2" in refused


def test_surplus_fields_that_are_empty_are_dropped(tmp_path: Path) -> None:
    """A spreadsheet writes a delimiter for every column that any row once had."""
    path = written(tmp_path, file_path([f"{row},," if number % 2 else row for number, row in enumerate(ROWS)]))
    assert problems(path) == {}
    assert read(path)[1].text == "a text of plain words number 1"
    (line,) = [line for line in lines_of(path) if "more fields" in line]
    assert line.startswith(f"note: 30 records have more fields than the header of {path} (first: line 3), the last of")
    path = written(tmp_path, file_path([f"{row}," for row in ROWS], header="id,text,"))
    assert problems(path, id="id") == {}
    assert not [line for line in lines_of(path) if "more fields" in line]


def test_missing_last_fields_are_empty_and_counted_unless_a_setting_names_them(tmp_path: Path) -> None:
    rows = [f"a text number {number}" + ("" if number % 3 else ",1,x") for number in range(60)]
    path = written(tmp_path, file_path(rows, "text,year,section"))
    assert problems(path) == {}
    (line,) = [line for line in lines_of(path) if "last fields" in line]
    assert line == (
        f"note: 40 records lack last fields in {path} (first: line 3): they are empty, and no setting names them"
    )
    wrong = "undecodable: line 3 has 1 field, and the header has 3"
    for setting in ("id", "group"):
        (found, *others) = problems(path, **{setting: "section"}).values()
        assert (found, len(others)) == (wrong, 39)
    path = written(tmp_path, file_path([*ROWS[:5], "d5", *ROWS[6:]]))
    assert problems(path) == {5: "undecodable: line 7 has 1 field, and the header has 2"}


def test_a_missing_label_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    rows = [f"a text number {number}" + (",1" if number % 2 else ",0") for number in range(60)]
    path = written(tmp_path, file_path([*rows, "the last one"], "text,label"))
    config = {"labelled": {"path": str(path), "label": "label"}}
    plan = make_plan(build(AuditConfig, {"run": "run", "model": {"path": "none"}, "corpus": config}))
    found = [document for shard in plan.shards for document in read_shard(shard) if document.problem]
    assert [one.problem for one in found] == [("undecodable", "line 62 has 1 field, and the header has 2")]


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    content = "\n\r\n" + "\n\n".join(["id,text", *ROWS]) + "\n\n\n"
    path = written(tmp_path, content)
    assert len(read(path)) == 60
    assert problems(path) == {}
    path = written(tmp_path, content.replace("d3,", "d3,more,"))
    assert problems(path) == {3: "undecodable: line 11 has 3 fields, and the header has 2"}


@pytest.mark.parametrize("place", [0, 4, 59])
def test_a_quote_that_is_never_closed_stops_with_its_line(tmp_path: Path, place: int) -> None:
    rows = [row.replace(",", ',"') if number == place else row for number, row in enumerate(ROWS)]
    path = written(tmp_path, file_path(rows))
    refused = user_error(lines_of, path)
    assert (
        f"is damaged after row {max(0, place - 1)}: the quote that opens a field on line {place + 2} is not" in refused
    )
    assert user_error(read, path) == refused
    assert "opens a field on line" in user_error(measure_extent, make_plan(config_of(path)).inputs[0])
    documents = read(path, quoting="none")
    assert [document.text.startswith('"') for document in documents] == [number == place for number in range(60)]


def test_a_quote_that_opens_in_the_header_stops_too(tmp_path: Path) -> None:
    refused = user_error(read, written(tmp_path, file_path(ROWS, 'id,"text')))
    assert "is not a readable CSV file: the quote that opens a field on line 1 is not closed" in refused


def test_a_quote_that_stays_open_beyond_the_longest_record_stops_with_its_line(tmp_path: Path) -> None:
    rows = [row.replace(",", ',"') if number == 3 else row for number, row in enumerate(ROWS)]
    found: list[Any] = []
    with pytest.raises(csv.Error, match="opens a field on line 5 is not closed"):
        found += csv_records(io.BytesIO(file_path(rows).encode()), 200)
    rows[20] = rows[20] + '"'
    found = list(csv_records(io.BytesIO(file_path(rows).encode()), 200))
    assert [type(one) for one in found[2:5]] == [dict, Overlong, dict]
    assert len(found) == 60 - 17


def test_a_stray_quote_in_a_long_unquoted_record_hides_no_other(tmp_path: Path) -> None:
    rows = [*ROWS[:3], f'd3,a 5" pipe {"x" * 500}', *ROWS[4:]]
    found = list(csv_records(io.BytesIO(file_path(rows).encode()), 200))
    assert [type(one) for one in found] == [dict] * 3 + [Overlong] + [dict] * 56


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ('"He said ""stop"" twice"', 'He said "stop" twice'),
        ('a 5" pipe', 'a 5" pipe'),
        ('"two\nlines, and a comma"', "two\nlines, and a comma"),
        ('"blanks behind" \t', "blanks behind \t"),
        ('""', None),
        ("a \0 inside", "a \0 inside"),
        ("'single, quotes'", "line"),
        ('"He said \\"stop\\", and left"', "text follows the closing quote"),
        ('"He said \\"stop\\" and left"', "text follows the closing quote"),
        ('"He said "stop" and left"', "text follows the closing quote"),
        ('"one" "two"', "text follows the closing quote"),
        (' "a blank, and a comma"', "has 3 fields"),
    ],
)
def test_the_quotes_of_a_field(tmp_path: Path, field: str, text: str | None) -> None:
    path = written(tmp_path, file_path([ROWS[0], f"d1,{field}", ROWS[2]]))
    documents = read(path)
    assert [document.problem is None for document in documents[::2]] == [True, True]
    if documents[1].problem is None:
        assert documents[1].text == text
    elif text is None:
        assert documents[1].problem[0] == "empty"
    else:
        assert documents[1].problem[0] == "undecodable"
        assert documents[1].problem[1].startswith("line 3")
        assert text in documents[1].problem[1]


def test_rows_inside_a_field_are_a_warning(tmp_path: Path) -> None:
    """A quote that is not closed swallows records up to the next quote, and the field looks whole."""
    opened = [row.replace(",", ',"') if number == 9 else row for number, row in enumerate(ROWS)]
    closed = [f'{row}"' if number == 14 else row for number, row in enumerate(opened)]
    later = [row.replace(",", ',"') + '"' if number == 14 else row for number, row in enumerate(opened)]
    for rows, count, bad in ((closed, 55, 0), (later, 55, 1)):
        path = written(tmp_path, file_path(rows))
        assert (len(read(path)), len(problems(path))) == (count, bad)
        (line,) = [line for line in lines_of(path) if "records themselves" in line]
        assert line.startswith(f"warning: 1 field holds lines that are records themselves in {path} (first: line 11)")
    again = [*ROWS[:5], '"d5","first, line', "id,text", 'last"', *ROWS[6:]]
    assert [line for line in lines_of(written(tmp_path, file_path(again))) if "records themselves" in line]


def test_a_bad_quote_is_named_with_both_numbers_where_they_differ(tmp_path: Path) -> None:
    rows = ['d0,"He said \\"stop\\", and left"', 'd1,"He said \\"stop\\" and left"', *ROWS[2:]]
    found = problems(written(tmp_path, file_path(rows)))
    tail = "text follows the closing quote of a field (quotes in a quoted field are doubled; quoting: none reads all "
    tail += "quotes as text)"
    assert found == {
        0: f"undecodable: line 2: {tail}, which makes 3 fields, and the header has 2",
        1: f"undecodable: line 3: {tail}",
    }


@pytest.mark.parametrize("before", ["", "one line\nanother\n" * 12], ids=["at once", "behind a long text"])
@pytest.mark.parametrize("between", ["", "\n"], ids=["", "blank lines"])
def test_few_records_in_a_long_field_are_a_warning(tmp_path: Path, before: str, between: str) -> None:
    """As where the closing quote of a text of many lines is missing, and the next quote is near."""
    rows = [f"{row}{between}" for row in ROWS]
    rows[9] = f'd9,"{before}{ROWS[9]}{between}'
    rows[12] = f'd12,"a text in quotes"{between}'
    path = written(tmp_path, file_path(rows))
    assert [line for line in lines_of(path) if "records themselves" in line]
    rows[12] = f'd12,a text that ends with a quote"{between}'
    assert len(read(path := written(tmp_path, file_path(rows)))) == 57
    assert problems(path) == {}
    assert [line for line in lines_of(path) if "records themselves" in line]


@pytest.mark.parametrize(
    "text",
    [
        "O rose, thou art sick\nthe invisible worm,\nthat flies in the night, oh\nin the howling storm,\nhas found out",
        "def f(a, b):\n    g(a,b)\n    h(a,b)\n    return k(a,b)\nprint(f(1, 2))\nprint(f(3, 4))\nprint(f(5, 6))",
        "Dear all,\nthanks, again\nBest,\nAnn",
    ],
)
def test_verse_code_and_letters_are_no_warning(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, file_path([*ROWS[:9], f'd9,"{text}"', *ROWS[10:]]))
    assert not [line for line in lines_of(path) if "records themselves" in line]


def test_lines_of_prose_are_no_warning(tmp_path: Path) -> None:
    verses = '"The first line, which has a comma\nthe second has none\nthe third, too, has two\nso ends the text"'
    path = written(tmp_path, file_path([f"d{number},{verses}" for number in range(5)] + ROWS[5:]))
    assert not [line for line in lines_of(path) if "records themselves" in line or "header" in line]
    path = written(tmp_path, file_path(["one", '"two\nthree\nfour\nfive"'] * 20, "text"))
    assert not [line for line in lines_of(path) if "records themselves" in line]


def test_a_header_in_the_middle_is_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, file_path(ROWS[:30]) + file_path(ROWS[30:]))
    (line,) = [line for line in lines_of(path) if "header" in line]
    assert line.startswith(f"warning: 1 record repeats the header of {path} (first: line 32)")
    assert len(read(path)) == 61


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", " "])
def test_without_quoting_every_quote_is_text(tmp_path: Path, delimiter: str) -> None:
    texts = ['"opens', 'closes"', 'a "pair"', '"whole"', 'a 5" pipe', '""']
    rows = [delimiter.join((f"d{number}", text.replace(" ", "_"))) for number, text in enumerate(texts)]
    path = written(tmp_path, file_path(rows, delimiter.join(("id", "text"))))
    found = read(path, quoting="none", delimiter=delimiter)
    assert [document.text for document in found] == [text.replace(" ", "_") for text in texts]
    shard = shards_of(path, quoting="none", delimiter=delimiter)[0]
    assert measure_extent(make_plan(config_of(path, quoting="none", delimiter=delimiter)).inputs[0]).rows == 6
    assert shard_fingerprint({}, shard)["quoting"] == "none"
    assert Shard.from_dict(shard.to_dict()) == shard


def test_quoting_is_a_setting_of_csv_files(tmp_path: Path) -> None:
    path = written(tmp_path, file_path(ROWS))
    assert shards_of(path, quoting="double") == shards_of(path)
    assert "quoting" not in shard_fingerprint({}, shards_of(path)[0])
    assert "quoting" not in config_of(path).model_dump(mode="json")["corpus"]["audit"]
    assert "input should be 'double' or 'none', got 'minimal'" in user_error(config_of, path, quoting="minimal")
    written(tmp_path, '{"text": "a text of words"}\n', "a.jsonl")
    refused = user_error(read, tmp_path / "a.jsonl", quoting="none")
    assert refused == "corpus.audit: quoting applies to CSV files, and these are jsonl; leave it out"


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "A.TSV"])
def test_a_tsv_file_has_tabs(tmp_path: Path, name: str) -> None:
    content = file_path([row.replace(",", "\t") + ", or more" for row in ROWS], "id\ttext").encode()
    path = written(tmp_path, gzip.compress(content) if name.endswith(".gz") else content, name)
    documents = read(path, id="id")
    assert [document.text for document in documents] == [f"{row.split(',')[1]}, or more" for row in ROWS]
    assert shard_fingerprint({}, shards_of(path)[0])["delimiter"] == "\t"
    path = written(tmp_path, file_path(ROWS), "b.tsv")
    assert read(path, id="id")[3].doc_id == "d3", "its name is wrong, and its header is not"
    path = written(tmp_path, file_path(["one, and two", "three, and four"], "text"), "c.tsv")
    assert [document.text for document in read(path)] == ["one, and two", "three, and four"]


@pytest.mark.parametrize("mark", ["sep=;\r\n", "\ufeffsep=;\r\n", '"sep=;"\n'])
def test_a_first_line_that_names_the_delimiter_is_followed(tmp_path: Path, mark: str) -> None:
    path = written(tmp_path, mark + file_path([row.replace(",", ";") + ", or more" for row in ROWS], "id;text"))
    for settings in ({}, {"delimiter": ";"}):
        documents = read(path, id="id", **settings)
        assert [document.doc_id for document in documents] == [f"d{number}" for number in range(60)]
        assert documents[7].text == "a text of plain words number 7, or more"
    assert measure_extent(make_plan(config_of(path)).inputs[0]).rows == 60
    lines = path.read_bytes().decode().splitlines(keepends=True)
    assert copied(path, [3, 59], id="id") == "".join(lines[place] for place in (0, 1, 5, 61))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_line_ends_and_encodings(tmp_path: Path, end: str, encoding: str) -> None:
    rows = [f"{row} é" for row in ROWS]
    rows[4] = f'd4,"two{end}lines"'
    rows[9] += ", surplus"
    path = written(tmp_path, file_path(rows, end=end).encode(encoding))
    documents = read(path, id="id", encoding=encoding)
    assert [document.doc_id for document in documents if not document.problem] == [f"d{n}" for n in range(60) if n != 9]
    assert documents[4].text == f"two{end}lines"
    assert documents[9].problem == ("undecodable", "line 12 has 3 fields, and the header has 2")


def test_a_file_without_records_holds_no_documents(tmp_path: Path) -> None:
    for content in ("id,text", "id,text\n", "id,text\n\n\n"):
        assert "holds no documents" in user_error(lines_of, written(tmp_path, content))


def test_a_repeated_or_blank_name_is_a_problem_only_where_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, file_path([f"{n},{row},x,y" for n, row in enumerate(ROWS)], ",id,text,x,x"))
    assert [document.text for document in read(path, id="id")] == [row.split(",")[1] for row in ROWS]
    assert "column 'x' occurs 2 times" in user_error(read, path, group="x")


def copied(path: Path, kept: list[int], **settings: Any) -> str:
    (shard,) = shards_of(path, **settings)
    rows = sum(1 for _ in read_shard(shard))
    marks = RowMarks([np.array([row for row in range(rows) if row in kept])], True)
    sink = io.BytesIO()
    CSV.export.copy(ExportSource((shard,), path.name), marks, lambda _: nullcontext(sink))
    return sink.getvalue().decode()


def records_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def test_a_copy_has_the_records_of_the_reader(tmp_path: Path) -> None:
    """Also around records that are bad, too long, or span lines."""
    rows = [*ROWS[:6], 'd6,"two\nlines"', "d7,one,more", 'd8,"said \\"stop\\"\nhere"', *ROWS[9:]]
    path = written(tmp_path, file_path(rows))
    lines = path.read_text().splitlines(keepends=True)
    assert [document.problem is None for document in read(path)][5:10] == [True, True, False, False, False]
    assert copied(path, [6, 7]) == "".join([lines[0], *lines[7:10]])
    assert records_of(copied(path, list(range(61)))) == records_of(path.read_text())
    records = dict(CSV.export.records(ExportSource(tuple(shards_of(path)), "a")))
    assert [row for row, record in records.items() if record is None] == [7, 8, 9]


def edited(path: Path, edit: TextEdit, **settings: Any) -> bytes:
    (shard,) = shards_of(path, **settings)
    sink = io.BytesIO()
    assert CSV.edit is not None
    CSV.edit(shard, ["a.csv"], RowEdits(iter([edit])), lambda _: nullcontext(sink))
    return sink.getvalue()


def test_an_edited_record_stays_one_without_quoting(tmp_path: Path) -> None:
    path = written(tmp_path, 'id\ttext\r\n1\ta "word"\r\n2\tothers\r\n', "a.tsv")
    edit = TextEdit(0, 'a "word"', 'an "item"')
    assert edited(path, edit, quoting="none") == b'id\ttext\r\n1\tan "item"\r\n2\tothers\r\n'
    assert edited(path, edit) == b'id\ttext\r\n1\t"an ""item"""\r\n2\tothers\r\n'
    refused = user_error(edited, path, TextEdit(0, 'a "word"', "two\tfields"), quoting="none")
    assert "quoting: none" in refused


SCRAPS = st.lists(
    st.sampled_from(
        ['"', '""', ",", "\n", "\r\n", "\r", "a", " ", "é", "\0", "\\", '","', '"\n', "b,c\n", "\t", "sep=,"]
    ),
    max_size=30,
)


@given(SCRAPS, st.sampled_from(["double", "none"]), st.sampled_from([5, 40]))
def test_reading_counting_and_copying_agree_on_any_text(scraps: list[str], quoting: Any, most: int) -> None:
    data, dialect = "".join(["x,y\n", *scraps]).encode(), Dialect(quoting=quoting)

    def outcome(work: Any) -> Any:
        try:
            return work()
        except csv.Error as error:
            return str(error)

    records = outcome(lambda: list(csv_records(io.BytesIO(data), most, dialect, (), Notes())))
    rows = outcome(lambda: list(csv_rows(io.BytesIO(data), most, dialect)))
    if isinstance(records, str):
        assert rows == records
        return
    assert [row for row, _ in rows] == sorted(row for row, _ in rows)
    assert {row for row, _ in rows} == {*range(-1, len(records))}
    for row, record in enumerate(records):
        (first, *rest) = [one for number, one in rows if number == row]
        if isinstance(record, dict):
            assert not rest
            assert list(record.values()) == [*first, "", ""][:2]
            assert not any(first[2:])
        elif isinstance(first, str):
            assert "".join([first, *rest]) in data.decode()
        else:
            assert isinstance(record, BadRecord)
            assert not rest
    if not any(isinstance(record, Overlong) for record in records):
        copy = "".join(one if isinstance(one, str) else csv_record(one, dialect) + "\n" for _, one in rows)
        again = list(csv_records(io.BytesIO(copy.encode()), 10_000, dialect))
        assert [one if isinstance(one, dict) else type(one) for one in again] == [
            one if isinstance(one, dict) else type(one) for one in records
        ]
    if not any(isinstance(record, Overlong) for record in records):
        assert count_records(data, dialect) == len(records)


def plainly(quoting: str) -> dict[str, Any]:
    return {"quoting": csv.QUOTE_NONE, "quotechar": None} if quoting == "none" else {}


@pytest.fixture
def audited(make_audit: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes an audit of a CSV file with these rows, and returns its configuration."""

    def make(rows: list[str], **settings: Any) -> Path:
        unseen = file_path([f"u{number},other plain words of number {number}" for number in range(40)])
        corpus = {
            "audit": {"path": str(written(tmp_path, file_path(rows))), "id": "id", **settings},
            "unseen": {"path": str(written(tmp_path, unseen, "unseen.csv")), "id": "id"},
        }
        return make_audit(corpus=corpus, error_budget=0.2)

    return make


def test_the_page_warns_of_rows_inside_a_field(
    audited: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row.replace(",", ',"') if number == 9 else row for number, row in enumerate(ROWS)]
    rows[14] += '"'
    path = audited([*rows, "id,text", "d99,one,more"])
    output, _ = here(capsys, "plan", path)
    assert "warning: 1 field holds lines that are records themselves" in " ".join(output.split())
    here(capsys, "run", path)
    run = path.parent / "run"
    page = " ".join((run / "report/report.html").read_text().split())
    for sentence in (
        "1 field holds lines that are records themselves in a.csv (first: line 11)",
        "1 record repeats the header of a.csv (first: line 62)",
    ):
        assert f'<p class="notice" role="note"><strong>Note.</strong> {sentence}' in page
    receipts = [json.loads(file.read_text()) for file in sorted((run / "receipts/score").glob("*.json"))]
    assert [one.get("notes") for one in receipts] == [{"rows_in_field": [1, 11], "header_again": [1, 62]}, None]
    assert receipts[0]["reasons"] == {"undecodable": 1}


def test_the_command_stops_at_a_quote_that_is_never_closed(
    audited: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = audited([row.replace(",", ',"') if number == 4 else row for number, row in enumerate(ROWS)])
    for command in ("plan", "run"):
        assert "the quote that opens a field on line 6 is not closed" in refusal(capsys, command, path)
    assert not (path.parent / "run" / "receipts").exists()
    path = audited(ROWS[:4] + [row.replace(",", ',"') for row in ROWS[4:]], quoting="none")
    here(capsys, "run", path)


@given(st.lists(st.text(st.sampled_from("a,;\"\n\r\t ='"), max_size=5), min_size=2, max_size=3))
def test_a_record_that_is_written_is_read_back(fields: list[str]) -> None:
    for delimiter in ",;\t":
        dialect = Dialect(delimiter=delimiter)
        data = f"{csv_record(['x'] * len(fields), dialect)}\n{csv_record(fields, dialect)}\n".encode()
        (record,) = [one for one in _read_rows(data, dialect) if one != ["x"] * len(fields)] or [["x"] * len(fields)]
        assert record == fields


def _read_rows(data: bytes, dialect: Dialect) -> list[list[str]]:
    text = io.StringIO(data.decode(), newline="")
    return list(csv.reader(text, delimiter=dialect.delimiter, strict=True))
