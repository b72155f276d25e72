"""JSON as people write it: an array, a notice in the first line, optional fields, several byte order marks, objects."""

import gzip
import io
import json
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from bounded_memory import run_within
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import format_named, measure_extent
from pipeline.corpus.formats.base import ExportSource, RowEdits, TextEdit, field_value, with_field
from pipeline.corpus.formats.json_array import JSON_ARRAY, _Scanner
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.shard import Shard
from pipeline.export.request import RowMarks
from pipeline.mark.mark import MarkRequest, mark_documents
from pipeline.plan.preflight import plan_checks
from pipeline.plan.starter import audit_starter
from pipeline.run.plan import make_plan
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence
from tests.helpers.marked_runs import write_texts

ROWS = [{"id": f"d{number}", "text": sentence(number)} for number in range(60)]
BOM = "\ufeff"


def config_of(path: Path, **settings: Any) -> AuditConfig:
    unseen = path.parent / "unseen.jsonl"
    unseen.write_text("".join(json.dumps({"text": sentence(1000 + number)}) + "\n" for number in range(60)))
    corpus = {"audit": {"path": str(path), **settings}, "unseen": {"path": str(unseen)}}
    return build(AuditConfig, {"run": "run", "model": {"path": "none"}, "corpus": corpus})


def shards_of(path: Path, **settings: Any) -> list[Shard]:
    return number_rows([shard for shard in make_plan(config_of(path, **settings)).shards if shard.role == "audit"])


def read(path: Path, **settings: Any) -> list[Document]:
    return [document for shard in shards_of(path, **settings) for document in read_shard(shard)]


def checked(path: Path, **settings: Any) -> list[str]:
    return list(plan_checks(make_plan(config_of(path, **settings)))["lines"])


def written(folder: Path, content: str | bytes, name: str = "a.json") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# --- arrays


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("mark", ["", BOM, "\n\n  "])
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz", ".json.zst"])
def test_an_array_of_objects_is_read(tmp_path: Path, indent: int | None, mark: str, suffix: str) -> None:
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix[5:], bytes)
    path = written(tmp_path, pack(f"{mark}{json.dumps(ROWS, indent=indent)}\n".encode()), f"a{suffix}")
    documents = read(path, id="id")
    assert [(document.row, document.doc_id, document.text) for document in documents] == [
        (number, row["id"], row["text"]) for number, row in enumerate(ROWS)
    ]
    (entry, _) = make_plan(config_of(path)).inputs
    assert (entry.format, measure_extent(entry).rows, measure_extent(entry).exact) == ("json", 60, True)
    assert Shard.from_dict(shards_of(path)[0].to_dict()) == shards_of(path)[0]


def test_an_element_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    elements = [
        *map(json.dumps, ROWS[:20]),
        '{"id": "d20", "text": 5}',
        '{"id": "d21", "text": "a", "text": "b"}',
        '{"id": "d22", "text": "brackets ] } [ { , and \\"quotes\\" \\\\"}',
        '{"id": "d23", text: "no quotes"}',
        "[1, [2, {}]]",
        "null",
        '{"id": "d26", "text": "lone \\ud800"}',
        '{"id": "d27"}',
        "{}",
    ]
    path = written(tmp_path, "[\n" + ",\n".join(elements) + ",\n]")  # a comma behind the last one
    documents = read(path)
    reasons = [document.problem[0] if document.problem else "" for document in documents]
    bad, other = "undecodable", "not_text"
    assert reasons == [""] * 20 + [other, bad, "", bad, other, other, bad, other, other]
    assert documents[22].text == 'brackets ] } [ { , and "quotes" \\'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps(ROWS)[:-1], "it ends before its array does"),
        (json.dumps(ROWS)[:-300], "it ends before its array does"),
        (json.dumps(ROWS) + json.dumps(ROWS), "more follows the end of its array: give every array as a file"),
        (json.dumps(ROWS) + "\n\n{}", "more follows the end of its array"),
        ("[1, 2, 3]", "its array holds no object with named fields (a JSON int, not an object)"),
        ("[]", "holds no documents"),
        ("[ \n ]", "holds no documents"),
        ('["a", "b"]', "its array holds no object with named fields"),
    ],
)
def test_what_is_no_whole_array_of_objects_is_one_line(tmp_path: Path, content: str, problem: str) -> None:
    assert problem in user_error(read, written(tmp_path, content))


def test_columns_of_an_array_are_those_of_its_first_objects(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([{"notice": "do not train"}, *ROWS[:30], {**ROWS[30], "section": "x"}]))
    documents = read(path, group="section")
    assert [document.group for document in documents] == [None] * 31 + ["x"]
    assert documents[0].problem == ("not_text", "no field 'text'")
    assert "no column 'body' in" in user_error(read, path, text="body")


def test_a_long_array_is_read_in_bounded_memory_and_a_long_element_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.json.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as writer:
        writer.write(b'[{"text": "one"}, {"text": "')
        for _ in range(300):
            writer.write(b"x, " * 350_000)
        writer.write(b'"}, {"text": "two"}]')
    imports = "from test_json_files import Path, config_of, make_plan, read_shard"
    code = f"""
    (shard, *_) = make_plan(config_of(Path({str(path)!r}))).shards
    for document in read_shard(shard):
        print(document.row, document.problem or document.text)
    """
    first, second, third = run_within(700, imports, code).splitlines()
    assert (first, third) == ("0 one", "2 two")
    assert second.startswith("1 (<Reason.TOO_LARGE: 'too_large'>, '315,000,012 bytes, more than")


def exported(path: Path, kept: list[int]) -> bytes:
    (shard,) = shards_of(path)
    sink = io.BytesIO()
    marks = RowMarks([np.array(kept, dtype=np.int64)], True)
    JSON_ARRAY.export.copy(ExportSource((shard,), path.name), marks, lambda _: nullcontext(sink))
    return sink.getvalue()


def test_a_copy_of_an_array_is_an_array_of_the_kept_elements(tmp_path: Path) -> None:
    elements = [f'{{"text":  "{sentence(number)}", "n": {number}.0 }}' for number in range(9)]
    path = written(tmp_path, f"[{','.join(elements)}]")
    assert exported(path, [0, 4, 8]).decode() == "[\n" + ",\n".join(elements[place] for place in (0, 4, 8)) + "\n]\n"
    assert json.loads(exported(path, [])) == []
    records = dict(JSON_ARRAY.export.records(ExportSource(tuple(shards_of(path)), "a")))
    assert [record and record["n"] for record in records.values()] == list(range(9))


def test_an_array_is_marked_element_by_element(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_texts(tmp_path / "texts.jsonl", 12)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    path = written(tmp_path / "in", json.dumps(rows, indent=1))
    marked = mark_documents(MarkRequest(str(path), str(tmp_path / "out"), id="id", versions=4))
    assert marked.marked > 6
    public = json.loads((tmp_path / "out/public/a.json").read_text())
    versions = pq.read_table(tmp_path / "out/private/versions.parquet").to_pylist()
    of_id = {row["id"]: row["versions"][row["index"]] for row in versions}
    assert [row["text"] for row in public] == [of_id.get(row["id"], row["text"]) for row in rows]


LEAVES = st.none() | st.booleans() | st.integers() | st.text('a"\\[]{},é \n', max_size=6)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\', max_size=3), inner, max_size=3),
)


@given(VALUES, st.integers(1, 9), st.integers(0, 2))
def test_elements_are_found_wherever_the_bytes_are_cut(value: Any, cut: int, indent: int) -> None:
    values = [value, {"text": "x"}, value]
    data = json.dumps(values, indent=indent, ensure_ascii=False).encode()
    scanner, found = _Scanner(), dict[int, bytes]()
    for start in range(0, len(data), cut):
        for number, piece in scanner.feed(data[start : start + cut]):
            found[number] = found.get(number, b"") + piece
    assert scanner.ended
    assert [json.loads(element) for element in found.values()] == values


# --- lines


def test_the_first_line_may_be_a_notice(tmp_path: Path) -> None:
    for notice in ('{"canary": "do not train on this file"}\n', "BENCHMARK DATA: do not train\n", '"a notice"\n'):
        path = written(tmp_path, notice + lines(ROWS), "a.jsonl")
        documents = read(path, id="id")
        assert len(documents) == 61
        assert [document.row for document in documents if document.problem] == [0]
        assert documents[1].doc_id == "d0"
        assert any("1 of 61 sampled documents" in line for line in checked(path))


def test_several_lines_without_the_column_from_the_first_on_are_refused(tmp_path: Path) -> None:
    rows = [*[{"notice": "x"}] * 2, *ROWS]
    refused = user_error(read, written(tmp_path, lines(rows), "a.jsonl"))
    assert "no column 'text' in 2 of the first 62 rows of " in refused
    assert refused.endswith("the first of all among them; columns: notice, id, text")


def test_a_file_of_other_lines_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    refused = user_error(read, written(tmp_path, "no JSON\n" * 50, "a.jsonl"))
    assert refused.endswith("is not a readable JSONL file: Expecting value: line 1 column 1 (char 0)")
    assert "its first line is no object" in user_error(read, written(tmp_path, "5\n" * 50, "a.jsonl"))
    broken = "".join(json.dumps(row) + ",\n" for row in ROWS[:-1]) + json.dumps(ROWS[-1])
    refused = user_error(checked, written(tmp_path, broken, "a.jsonl"))
    assert "59 of 60 sampled documents of " in refused
    assert "Extra data" in refused


def test_a_group_that_only_some_lines_have_is_none_in_the_others(tmp_path: Path) -> None:
    rows = [{**row, "section": "x"} if number == 99 else row for number, row in enumerate(ROWS + ROWS)]
    path = written(tmp_path, lines(rows), "a.jsonl")
    assert [document.group for document in read(path, group="section")] == [None] * 99 + ["x"] + [None] * 20
    path = written(tmp_path, lines([*ROWS, *ROWS, {**ROWS[0], "section": "x"}]), "b.jsonl")
    assert "no column 'section' in" in user_error(read, path, group="section"), "not among the first 100 lines"


@pytest.mark.parametrize("places", [[0, 30], [0, 1, 2], [59]])
def test_a_byte_order_mark_in_any_line_is_skipped(tmp_path: Path, places: list[int]) -> None:
    content = "".join(
        (BOM if number in places else "") + line for number, line in enumerate(lines(ROWS).splitlines(True))
    )
    path = written(tmp_path, content, "a.jsonl")
    assert [document.text for document in read(path)] == [row["text"] for row in ROWS]
    csv = "".join((BOM if n in places else "") + f"{row['id']},{row['text']}\n" for n, row in enumerate(ROWS))
    path = written(tmp_path, f"id,text\n{csv}", "a.csv")
    assert [document.doc_id for document in read(path, id="id")] == [row["id"] for row in ROWS]
    joined = f'{BOM}"id","text"\n"a","first, file"\n{BOM}"id","text"\n"b","second, file"\n'
    documents = read(written(tmp_path, joined, "b.csv"), id="id")
    assert [document.text for document in documents] == ["first, file", "text", "second, file"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a text"}\r', None),
        ('{"text": NaN}', "not_text"),
        ('{"text": "a", }', "undecodable"),
        ('{"text": "a"}{"text": "b"}', "undecodable"),
        ('{"text": "a"} {"text": "b"}', "undecodable"),
        ('{"text": "\\ud83d"}', "undecodable"),
        ('{"text": "\\ud83d\\ude00 smiles"}', None),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "undecodable"),
        ('{"text": null}', "not_text"),
        ('{"text": 12}', "not_text"),
        ('{"text": ["a"]}', "not_text"),
        ("[1]", "not_text"),
        ("{'text': 'a'}", "undecodable"),
        ("// a comment", "undecodable"),
        ('{"text": "a\tb"}', "undecodable"),
    ],
)
def test_a_line_of_another_kind_costs_itself(tmp_path: Path, line: str, reason: str | None) -> None:
    path = written(tmp_path, lines(ROWS[:30]) + line + "\n" + lines(ROWS[30:]), "a.jsonl")
    documents = read(path)
    assert len(documents) == 61
    assert documents[30].problem is None if reason is None else documents[30].problem[0] == reason
    assert [document.row for document in documents if document.problem] == ([] if reason is None else [30])


# --- columns that hold other values, and fields of objects

KINDS: dict[str, tuple[Any, str]] = {
    "lists": (["a", "b"], "holds lists, not text; text names a column of texts; columns: "),
    "lists of messages": ([{"role": "user", "content": "hello"}], "holds lists of messages, not text"),
    "lists of turns": ([{"from": "human", "value": "hello"}], "holds lists of messages, not text"),
    "lists of lists": ([["a"], ["b"]], "holds lists, not text"),
    "objects": ({"url": "u", "text": "t"}, "name one of its fields, such as text: held.url (fields: url, text)"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "saved", "hub"])
def test_a_column_that_holds_no_texts_is_named_by_the_plan(tmp_path: Path, kind: str, name: str) -> None:
    value, expected = KINDS[kind]
    path = table_file(tmp_path, name, [{"id": str(number), "held": value} for number in range(60)])
    assert expected in user_error(read_table, path, text="held")


@pytest.mark.parametrize(("value", "held"), [(5, "numbers"), (1.5, "numbers"), (True, "true or false")])
def test_numbers_are_no_texts(tmp_path: Path, value: Any, held: str) -> None:
    path = written(tmp_path, lines([{**row, "held": value} for row in ROWS]), "a.jsonl")
    assert f"column 'held' in {path} holds {held}, not text" in user_error(read, path, text="held")


def table_file(folder: Path, name: str, rows: list[Any]) -> Path:
    table, path = pa.Table.from_pylist(rows), folder / name
    if name.endswith(".jsonl"):
        path.write_text(lines(rows))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=7)
    elif name.endswith(".arrow"):
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, 7)
    elif name == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        path.mkdir()
        pq.write_table(table, path / "train.parquet")
    return path


def read_table(path: Path, **settings: Any) -> list[Document]:
    if path.name != "hub":
        return read(path, **settings)
    corpus = {"audit": {"dataset": str(path), **settings}}
    plan = make_plan(build(AuditConfig, {"run": "r", "model": {"path": "none"}, "corpus": corpus}))
    return [document for shard in plan.shards for document in read_shard(shard)]


NESTED = [
    {"page": {"text": sentence(n), "meta": {"id": f"p{n}", "group": f"g{n % 3}"}} if n != 4 else None, "n": n}
    for n in range(60)
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "saved", "hub"])
def test_a_field_of_an_object_is_a_column(tmp_path: Path, name: str) -> None:
    path = table_file(tmp_path, name, NESTED)
    documents = read_table(path, text="page.text", id="page.meta.id", group="page.meta.group")
    assert [document.text for document in documents] == [sentence(n) if n != 4 else "" for n in range(60)]
    assert [document.row for document in documents if document.problem] == [4]
    assert documents[7].doc_id == "p7"
    assert documents[7].group == "g1"
    assert "did you mean 'page.text'?" in user_error(read_table, path, text="page.txt")


def test_a_column_whose_name_has_a_dot_comes_first(tmp_path: Path) -> None:
    rows = [{"page.text": sentence(n), "page": {"text": "of the object"}} for n in range(60)]
    for name in ("a.jsonl", "a.arrow", "saved"):
        documents = read_table(table_file(tmp_path, name, rows), text="page.text")
        assert [document.text for document in documents] == [sentence(n) for n in range(60)], name
    pq.write_table(pa.table({"page.text": [row["page.text"] for row in rows]}), tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet", text="page.text")[5].text == sentence(5)


DOTTED = [
    {"page": {"text.en": sentence(n), "meta": {"a.b": f"p{n}"}}, "x.y": {"z": f"g{n % 3}"}, "page.meta": {"a": n}}
    for n in range(60)
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "saved", "hub"])
def test_fields_and_columns_may_have_dots_in_their_own_names(tmp_path: Path, name: str) -> None:
    path = table_file(tmp_path, name, DOTTED)
    documents = read_table(path, text="page.text.en", id="page.meta.a.b", group="x.y.z")
    assert [document.text for document in documents] == [sentence(n) for n in range(60)]
    assert [document.doc_id for document in documents] == [f"p{n}" for n in range(60)]
    assert documents[7].group == "g1"
    assert "no column 'page.text.de'" in user_error(read_table, path, text="page.text.de")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"text": "one", "te\\u0078t": "two"}', "text"),
        ('{"te\\u0078t": "one", "\\u0074ext": "two \\" : \\/"}', "text"),
        ('{"page": {"text": "one"}, "pag\\u0065": {"text": "two"}}', "page"),
        ('{"page": {"text": {"en": "one"}, "text": {"en": "two"}}}', "text"),
        ('{"page": {"text.en": "one", "text.en": "two"}}', "text.en"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".tar"])
def test_a_field_stands_twice_however_its_name_is_written(tmp_path: Path, line: str, field: str, suffix: str) -> None:
    text = "text" if "page" not in line else "page.text.en" if "en" in line else "page.text"
    whole = '{"text": "some words", "page": {"text": {"en": "some words"}}}'
    whole = '{"page": {"text": "some words"}}' if text == "page.text" else whole
    path = tmp_path / f"a{suffix}"
    if suffix == ".tar":
        with tarfile.open(path, "w") as archive:
            for number, content in enumerate((whole, line)):
                member = tarfile.TarInfo(f"{number}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
    else:
        path.write_text(f"[{whole}, {line}]" if suffix == ".json" else f"{whole}\n{line}\n")
    good, bad = read(path, text=text)
    assert good.text == "some words"
    assert bad.problem is not None
    assert bad.problem[0] == "undecodable"
    assert bad.problem[1].startswith(f"field {field!r} stands twice in it")


def test_escapes_in_texts_and_in_other_names_are_no_repeated_fields(tmp_path: Path) -> None:
    rows = [{"text": 'caf\u00e9 "text": "text" \\u0074', "n\u00e4me": n, "te": {"text": "other"}} for n in range(3)]
    documents = read(written(tmp_path, lines(rows), "a.jsonl"))
    assert [document.text for document in documents] == [rows[0]["text"]] * 3


ROW = {"text": sentence(1)}
FORMS = {
    "pretty": (
        json.dumps(ROW, indent=2) + "\n" + json.dumps(ROW, indent=2),
        "; write each object on a line of its own: jq",
    ),
    "one line": (json.dumps(ROW) * 3, "; write each object on a line of its own: jq -c . 'it''s.json' > lines.jsonl"),
    "commas": ((json.dumps(ROW) + ",\n") * 3, "; remove the comma behind each object"),
    "wrapped": (json.dumps({"version": 1, "data": [ROW]}), "it is one object, whose data is a list of objects: jq"),
    "wrapped over lines": (
        json.dumps({"data": [ROW]}, indent=1),
        "over several lines, whose data is a list of objects",
    ),
    "columns": (json.dumps({"text": {"0": "a b c", "1": "d e f"}}), "which holds columns and not rows"),
    "lists": (json.dumps({"text": ["a b c", "d e f"], "id": [0, 1]}), "which holds columns and not rows"),
    "by id": (json.dumps({"x": ROW, "y": ROW}), "whose fields are objects: jq -c '.[]' "),
    "texts": (json.dumps([sentence(n) for n in range(5)]), "; write objects: jq -c '.[] | {text: .}' "),
    "a text a line": (lines([sentence(n) for n in range(5)]), "; write objects: jq -c '{text: .}' "),
    "digits": ('{"text": "a", "n": ' + "9" * 5000 + "}\n", "value has 5000 digits"),
    "wide": (json.dumps([ROW]).encode("utf-16-le"), "it is not UTF-8: convert it to UTF-8"),
}


@pytest.mark.parametrize("form", FORMS)
def test_json_in_another_form_is_refused_with_what_to_do(tmp_path: Path, form: str) -> None:
    content, remedy = FORMS[form]
    refused = user_error(read, written(tmp_path, content, "it's.json"))
    assert remedy.replace("'it''s.json'", "'it'\"'\"'s.json'") in refused
    assert "set_int_max_str_digits" not in refused


def test_a_field_that_stands_twice_in_an_object_is_undecodable(tmp_path: Path) -> None:
    line = '{"page": {"text": "one", "text": "two"}}\n'
    path = written(tmp_path, lines(NESTED[:4]) + line, "a.jsonl")
    assert read(path, text="page.text")[4].problem == ("undecodable", "field 'text' stands twice in it")


def test_fields_of_objects_are_read_and_changed() -> None:
    row = {"a": {"b": {"c": 1}, "d": 2}, "a.d": 3, "e": None}
    assert [field_value(row, name) for name in ("a.b.c", "a.d", "e", "e.f", "a.x", "a.b.c.d")] == [
        1,
        3,
        None,
        *[None] * 3,
    ]
    assert with_field(row, "a.b.c", 9) == {**row, "a": {"b": {"c": 9}, "d": 2}}
    assert with_field(row, "a.d", 9) == {**row, "a.d": 9}
    dotted = {"a": {"b.c": {"d": 1}}, "a.b": {"x": 2}}
    assert [field_value(dotted, name) for name in ("a.b.c.d", "a.b.x", "a.b.c", "a.b.c.x")] == [1, 2, {"d": 1}, None]
    assert with_field(dotted, "a.b.c.d", 9) == {**dotted, "a": {"b.c": {"d": 9}}}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_an_edit_changes_the_field_of_an_object_alone(tmp_path: Path, name: str) -> None:
    path = table_file(tmp_path, name, NESTED)
    shards = shards_of(path, text="page.text")
    whole = read_shard(Shard.from_dict({**shards[0].to_dict(), "stop": None if "json" in name else 60}))
    before = [document.text for document in whole][5]
    edit = format_named(shards[0].format).edit
    sink = io.BytesIO()
    assert edit is not None
    edits = RowEdits(iter([TextEdit(5, before, "another text")]))
    edit(Shard.from_dict({**shards[0].to_dict(), "stop": None}), [name], edits, lambda _: nullcontext(sink))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_bytes(sink.getvalue())
    documents = read(tmp_path / "new" / name, text="page.text", id="page.meta.id")
    assert [document.text for document in documents] == [
        "another text" if n == 5 else sentence(n) if n != 4 else "" for n in range(60)
    ]
    assert documents[5].doc_id == "p5"


# --- splits


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("train[:10]", range(10)),
        ("train[10:20]", range(10, 20)),
        ("train[-5:]", range(35, 40)),
        ("train[:50%]", range(20)),
        ("test", range(40, 60)),
        ("train+test", range(60)),
        ("train[:3] + test[:2]", [0, 1, 2, 40, 41]),
        ("test+train[:1]", [*range(40, 60), 0]),
    ],
)
@pytest.mark.parametrize("kind", ["saved", "hub"])
def test_a_split_may_be_an_expression(tmp_path: Path, split: str, numbers: Any, kind: str) -> None:
    parts = {"train": range(40), "test": range(40, 60)}
    if kind == "saved":
        datasets.DatasetDict(
            {name: datasets.Dataset.from_list([ROWS[n] for n in rows]) for name, rows in parts.items()}
        ).save_to_disk(tmp_path / kind)
    else:
        (tmp_path / kind).mkdir()
        for name, rows in parts.items():
            pq.write_table(pa.Table.from_pylist([ROWS[n] for n in rows]), tmp_path / kind / f"{name}.parquet")
    documents = read_table(tmp_path / kind, split=split, id="id")
    assert [document.doc_id for document in documents] == [f"d{n}" for n in numbers]
    assert [document.row for document in documents] == list(range(len(numbers)))
    for wrong, message in (
        ("trian[:5]", "did you mean 'train'?"),
        ("train+tset", "did you mean 'test'?"),
        ("train[:x]", ""),
    ):
        assert message in user_error(read_table, tmp_path / kind, split=wrong)


def test_the_split_of_a_single_saved_dataset_may_be_a_part(tmp_path: Path) -> None:
    path = table_file(tmp_path, "saved", ROWS)
    assert len(read(path, split="train[:7]")) == 7
    assert len(read(path, split="train")) == 60
    datasets.load_dataset("json", data_files={"test": str(written(tmp_path, lines(ROWS), "a.jsonl"))}, split="test",
                          cache_dir=str(tmp_path / "cache")).save_to_disk(tmp_path / "named")  # fmt: skip
    assert len(read(tmp_path / "named", split="test[:7]")) == 7
    assert "no split 'train' in" in user_error(read, tmp_path / "named", split="train")


def test_init_reads_an_array(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(ROWS), "audit.json")
    starter = audit_starter(str(tmp_path))
    assert "audit.json" in starter.guesses[0]
    assert "text: text, id: id" in starter.guesses[0]
