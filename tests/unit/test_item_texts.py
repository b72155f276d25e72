"""The text of an item made of several columns: the same document in every format, and what is refused."""

import csv
import datetime
import io
import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config.corpus import LIMITS, CorpusConfig, SourceConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.options import item_text
from pipeline.corpus.shard import Shard, shard_fingerprint, whole_shard
from pipeline.results.summary import read_summary
from pipeline.store.files import Store
from tests.helpers.commands import ended, refusal, user_error
from tests.helpers.made_up import sentence
from tests.helpers.made_up_items import make_items

TEMPLATE = "Question: {question}\n(a) {A}\n(b) {B}\n{{{year}}}"
ROWS: list[dict[str, Any]] = [
    {"id": "one", "question": "Which is red?", "A": "a rose, mostly", "B": "coal", "year": 1999},
    {"id": "two", "question": 'Who said "no"?', "A": "the goat\nof the hill", "B": "nobody", "year": 2001},
]
TEXTS = [
    "Question: Which is red?\n(a) a rose, mostly\n(b) coal\n{1999}",
    'Question: Who said "no"?\n(a) the goat\nof the hill\n(b) nobody\n{2001}',
]


def write_table(path: Path, table: pa.Table) -> Path:
    """A table as an Arrow file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the format of a suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        write_table(path, pa.Table.from_pylist(rows))
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def documents(path: Path, template: str = TEMPLATE, **source: Any) -> list[Document]:
    given = {"audit": {"path": str(path), "template": template, "id": "id", **source}}
    corpus = build(CorpusConfig, given)
    (entry,) = find_inputs(corpus, LIMITS)
    assert corpus.audit is not None
    return list(read_shard(whole_shard(entry, corpus.audit)))


def of_rows(path: Path, rows: list[dict[str, Any]], template: str) -> list[Any]:
    return [one.problem or one.text for one in documents(write(path, rows), template)]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.json", "rows.parquet", "rows.arrow", "saved"])
def test_every_format_gives_the_same_text(tmp_path: Path, name: str) -> None:
    read = documents(write(tmp_path / name, ROWS))
    assert [one.text for one in read] == TEXTS
    assert [one.doc_id for one in read] == ["one", "two"]


def test_numbers_are_as_they_are_written(tmp_path: Path) -> None:
    line = b'{"id": 7, "a": 1.50, "b": 1e3, "c": 12345678901234567890, "d": true}\n'
    (tmp_path / "rows.jsonl").write_bytes(line)
    (tmp_path / "rows.json").write_bytes(b"[" + line + b"]")
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        member = tarfile.TarInfo("0.json")
        member.size = len(line)
        archive.addfile(member, io.BytesIO(line))
    for name in ("rows.jsonl", "rows.json", "rows.tar"):
        (one,) = documents(tmp_path / name, "{a} {b} {c} {d}")
        assert (one.text, one.doc_id) == ("1.50 1e3 12345678901234567890 true", "7")
    table = pa.table(
        {
            "id": ["x"],
            "a": pa.array([0.1], pa.float32()),
            "b": pa.array([Decimal("1.50")]),
            "c": pa.array([datetime.date(2024, 2, 29)]),
            "d": pa.array([b"caf\xc3\xa9"]),
            "e": pa.array(["x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert documents(tmp_path / "rows.parquet", "{a} {b} {c} {d} {e}")[0].text == "0.1 1.50 2024-02-29 café x"


def test_a_list_of_options_is_the_text_that_permuted_options_have(tmp_path: Path) -> None:
    rows = [{"id": str(n), **row} for n, row in enumerate(make_items(4))]
    rows[1]["choices"] = [f"({letter}) {one}" for letter, one in zip("ABCD", rows[1]["choices"], strict=True)]
    path = write(tmp_path / "items.jsonl", rows)
    permuted = {"permute": "choices", "template": "{question}\n{choices}"}
    corpus = build(CorpusConfig, {"audit": {"path": str(path), "versions": permuted}})
    (entry,) = find_inputs(corpus, LIMITS)
    assert corpus.audit is not None
    published = [one.text for one in read_shard(whole_shard(entry, corpus.audit))]
    assert [one.text for one in documents(path, "{question}\n{choices}")] == published
    assert published[0].count("\n") == 4
    assert all(published)


BAD: list[tuple[Any, str, str]] = [
    (None, "not_text", "no value in column 'B'"),
    (" \t", "empty", "column 'B': nothing but white space"),
    ({"x": 1}, "not_text", "column 'B' holds a dict, not a text, a number or a list of texts"),
    ([], "not_text", "column 'B' holds an empty list"),
    (["a", None], "not_text", "column 'B' holds a list in which option 2 of 2 is null"),
    ([{"x": 1}, "a"], "not_text", "column 'B' holds a list in which option 1 of 2 is a dict, not a text"),
    ("\ud800", "undecodable", "column 'B': character 0 is '\\ud800': not valid Unicode text"),
]


@pytest.mark.parametrize(("value", "reason", "message"), BAD)
def test_a_value_that_is_no_text_puts_its_item_alone_in_quarantine(
    tmp_path: Path, value: Any, reason: str, message: str
) -> None:
    rows = [{"id": str(n), "A": "an option", "B": "another"} for n in range(3)]
    rows[1]["B"] = value
    read = of_rows(tmp_path / "rows.jsonl", rows, "{A} or {B}")
    assert read == ["an option or another", (reason, message), "an option or another"]


def test_a_long_list_of_options_is_whole_or_in_quarantine() -> None:
    many = [f"option number {number}" for number in range(30)]
    text = item_text("{choices}", {"choices": many}, lambda value: None)
    assert isinstance(text, str)
    assert text.splitlines()[25:28] == ["Z. option number 25", "AA. option number 26", "AB. option number 27"]
    assert len(text.splitlines()) == 30
    refused = item_text("{choices}", {"choices": many * 30}, lambda value: None)
    assert isinstance(refused, Unreadable)
    assert refused.message == "column 'choices' holds 900 texts, more than 702 options"


def test_empty_and_missing_fields_of_other_formats_are_in_quarantine_too(tmp_path: Path) -> None:
    rows = [{"id": "1", "A": "an option", "B": ""}, {"id": "2", "A": "an option", "B": "another"}]
    assert of_rows(tmp_path / "rows.csv", rows, "{A} or {B}")[0] == ("empty", BAD[1][2])
    rows[0]["B"] = None
    assert of_rows(tmp_path / "rows.parquet", rows, "{A} or {B}")[0] == BAD[0][1:]
    pq.write_table(
        pa.table({"id": ["1", "2"], "B": pa.array([b"\xff", None]), "C": pa.array([1.0, float("nan")])}),
        tmp_path / "bytes.parquet",
    )
    assert [one.problem for one in documents(tmp_path / "bytes.parquet", "{C} {B}")] == [
        ("undecodable", "column 'B': byte 0 is not UTF-8"),
        ("not_text", "no value in column 'C'"),
    ]
    (tmp_path / "less.jsonl").write_text('{"id": 1, "A": "x", "B": "y"}\n{"id": 2, "A": "x"}\n{"id": 3, "B": "x"}\n')
    assert [one.problem for one in documents(tmp_path / "less.jsonl", "{A} or {B}")] == [
        None,
        BAD[0][1:],
        ("not_text", "no field 'A'"),
    ]


def test_a_column_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        path = write(tmp_path / f"rows.{suffix}", ROWS)
        line = user_error(documents, path, "{question}\n{a} {B}")
        assert line.startswith(f"no column 'a' in {path}; did you mean 'A'?"), line
    pq.write_table(pa.table({"id": ["1"], "A": ["x"], "B": [{"x": 1}]}), tmp_path / "nested.parquet")
    line = user_error(documents, tmp_path / "nested.parquet", "{A} {B}")
    assert (
        "holds struct<x: int64>, and template takes texts, numbers, dates and lists of texts; columns: id, A, B" in line
    )
    assert documents(tmp_path / "nested.parquet", "{A} {B.x}")[0].text == "x 1"
    for column in (
        pa.array([datetime.time(9, 30)]),
        pa.array([1], pa.time32("s")),
        pa.array([datetime.timedelta(hours=1)]),
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
    ):
        path = write_table(tmp_path / "times.arrow", pa.table({"id": ["1"], "A": column}))
        line = user_error(documents, path, "{A}")
        assert f"column 'A' in {path} holds {column.type}, and template takes texts, numbers, dates and" in line
    moment = pa.array([datetime.datetime(2024, 2, 29, 9, 30)])
    path = write_table(tmp_path / "moments.arrow", pa.table({"id": ["1"], "A": moment}))
    assert documents(path, "{A}")[0].text == "2024-02-29 09:30:00"
    (tmp_path / "one.txt").write_text("a text")
    line = user_error(documents, tmp_path / "one.txt", "{A} {B}", id=None)
    assert "corpus.audit.template names columns, and txt files have none" in line


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"text": "question"}, "template and text: leave one of them out"),
        ({"messages": "m"}, "template and messages: leave one of them out"),
        ({"tokens": "m"}, "template and tokens: leave one of them out"),
        ({"image": "m"}, "template and image: leave one of them out"),
        ({"prompt": "p", "completion": "c"}, "template and completion: leave one of them out"),
        ({"scores": ["loss"]}, "template and scores: leave one of them out"),
        ({"versions": {}}, "template and versions: leave one of them out; that of permuted options stands under"),
        ({"template": "no braces"}, "template names no column: write {COLUMN} in 'no braces'"),
        ({"template": "{A!r}"}, "template: {A} names no column; write {COLUMN}, and {{ for a brace"),
        ({"template": "{A} }"}, "template: a brace stands alone; write {COLUMN}, and {{ or }} for a brace"),
    ],
)
def test_what_a_template_does_not_go_with_is_one_line(keys: dict[str, Any], line: str) -> None:
    given = {"path": "rows.csv", "template": "{A} {B}", **keys}
    said = user_error(build, CorpusConfig, {"audit": given})
    assert line in said
    assert "\n" not in said


def test_the_settings_of_a_template_are_read_again_and_are_in_the_fingerprint(tmp_path: Path) -> None:
    source = SourceConfig(path=str(write(tmp_path / "rows.csv", ROWS)), template=TEMPLATE, id="id")
    held = source.model_dump()
    assert held["template"] == TEMPLATE
    assert "text" not in held
    assert SourceConfig(**held) == source
    (one,) = find_inputs(build(CorpusConfig, {"audit": held}), LIMITS)
    shard = whole_shard(one, source)
    assert Shard.from_dict(json.loads(json.dumps(shard.to_dict()))) == shard
    other = whole_shard(one, SourceConfig(**{**held, "template": TEMPLATE + "."}))
    assert shard_fingerprint({}, shard)["columns"] != shard_fingerprint({}, other)["columns"]


def test_an_audit_of_a_csv_scores_question_and_options_together(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: dict[str, list[str]] = {}
    for seed, role in enumerate(("audit", "unseen")):
        rows = [
            {"id": f"{role}{n}", "question": sentence(1000 * seed + n), "A": sentence(5000 + n, 3), "B": f"{n}.0"}
            for n in range(40)
        ]
        write(tmp_path / f"{role}.csv", rows)
        texts[role] = [f"{row['question']}\n{row['A']} {row['B']}" for row in rows]
        (tmp_path / f"{role}.jsonl").write_text(
            "".join(
                json.dumps({"id": row["id"], "text": text}) + "\n" for row, text in zip(rows, texts[role], strict=True)
            )
        )
    thresholds = {}
    for name, key in (("csv", {"template": "{question}\n{A} {B}"}), ("jsonl", {"text": "text"})):
        corpus = {role: {"path": str(tmp_path / f"{role}.{name}"), "id": "id", **key} for role in texts}
        given = {
            "run": str(tmp_path / name),
            "model": {"path": str(tiny_model_folder), "dtype": "float32"},
            "corpus": corpus,
            "detectors": ["loss"],
            "selections": [{"name": "bh", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}],
            "resources": {"cluster": "local", "shard_bytes": 1 << 20},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(given))
        assert ended("run", tmp_path / f"{name}.yaml") == 0
        thresholds[name] = read_summary(Store(str(tmp_path / name)), "bh")
    assert thresholds["csv"].n_selected == thresholds["jsonl"].n_selected
    assert thresholds["csv"].threshold == thresholds["jsonl"].threshold
    assert ended("export", tmp_path / "csv", tmp_path / "clean", "--selection", "bh") == 0
    kept = sum(path.read_text().count("\n") - 1 for path in (tmp_path / "clean").rglob("*.csv"))
    assert kept == 40 - thresholds["csv"].n_selected
    line = refusal(capsys, "plan", tmp_path / "csv.yaml", "--set", "corpus.audit.template='{question} {C}'")
    assert "no column 'C'" in line


def test_items_and_plain_texts_of_roles_are_of_one_kind() -> None:
    corpus = {"audit": {"path": "a.csv", "template": "{A} {B}"}, "unseen": {"path": "b.jsonl", "text": "whole"}}
    assert build(CorpusConfig, corpus).kind.name == "texts"
    line = user_error(build, CorpusConfig, {**corpus, "unseen": {"path": "b.jsonl", "messages": "m"}})
    assert "all documents must be of one kind, got texts in corpus.audit and chats" in line
