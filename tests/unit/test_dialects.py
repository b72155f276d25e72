"""Text files of other encodings and delimiters are read once these are set, and until then the setting is named."""

import csv
import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.csv_file import CSV
from pipeline.corpus.input_files import detected
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.export.request import RowMarks
from pipeline.plan.preflight import PLAN, check_documents, plan_checks
from pipeline.plan.starter import audit_starter
from pipeline.run.plan import make_plan
from tests.helpers.commands import user_error

TEXTS = [f"{number} cafés à l\u2019hôtel d'été, en forêt; ¡voilà!" for number in range(60)]
SETTINGS = {"utf-16": "utf-16", "utf-16-be": "utf-16-be", "cp1252": "windows-1252", "iso8859-1": "latin1"}


def config_of(path: Path, **settings: Any) -> AuditConfig:
    corpus = {"audit": {"path": str(path), **settings}, "unseen": {"path": str(path.parent / "unseen.csv")}}
    return build(AuditConfig, {"run": "run", "model": {"path": "none"}, "corpus": corpus})


def write_csv(path: Path, encoding: str, delimiter: str = ",", texts: list[str] = TEXTS) -> Path:
    sink = io.StringIO(newline="")
    csv.writer(sink, delimiter=delimiter).writerows([("id", "text"), *enumerate(texts)])
    path.write_bytes(sink.getvalue().encode(encoding, "replace"))
    if not (path.parent / "unseen.csv").exists():
        (path.parent / "unseen.csv").write_text("text\n" + "".join(f"plain words number {n}\n" for n in range(60)))
    return path


def read(path: Path, **settings: Any) -> list[Document]:
    plan = make_plan(config_of(path, **settings))
    return [document for shard in plan.shards if shard.role == "audit" for document in read_shard(shard)]


def refusal(path: Path, **settings: Any) -> str:
    return user_error(lambda: plan_checks(make_plan(config_of(path, **settings))))


def test_plan_names_the_encoding_of_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "cp1252.csv", "cp1252")
    assert refusal(path).endswith("cp1252.csv are not UTF-8; set encoding: cp1252")
    assert refusal(path).startswith("60 of 60 sampled lines of ")
    checks = plan_checks(make_plan(config_of(path, encoding="cp1252")))
    assert checks["documents"] == {"audit": 60, "unseen": 60}
    assert not [line for line in checks["lines"] if "sampled" in line]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("texts", [TEXTS, [f"plain words number {number}" for number in range(60)]])
def test_a_wide_encoding_without_a_byte_order_mark_is_named(tmp_path: Path, encoding: str, texts: list[str]) -> None:
    path = write_csv(tmp_path / "wide.csv", encoding, texts=texts)
    assert refusal(path).endswith(f"; set encoding: {encoding}")
    assert [document.text for document in read(path, encoding=encoding)] == texts
    assert refusal(write_csv(tmp_path / "plain.csv", "utf-8"), encoding=encoding).endswith(" set encoding: utf-8")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts[:5]):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text.encode(encoding))
    assert refusal(tmp_path / "texts").startswith("5 of 5 sampled files of ")
    assert refusal(tmp_path / "texts").endswith(f" are not UTF-8; set encoding: {encoding}")


def test_one_damaged_line_stops_no_run_and_another_encoding_is_a_warning(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", "utf-8")
    path.write_bytes(path.read_bytes() + "61,café\n".encode("cp1252"))
    assert check_documents(make_plan(config_of(path)), PLAN).undecodable == []
    assert [document.problem is None for document in read(path)] == [True] * 60 + [False]
    texts = [text if number < 6 else f"{number} words of ASCII" for number, text in enumerate(TEXTS)]
    write_csv(path, "cp1252", texts=texts)
    (line,) = [line for line in plan_checks(make_plan(config_of(path)))["lines"] if "sampled" in line]
    assert line.startswith("warning: 6 of 60 sampled lines of ")
    assert line.endswith("a.csv are not UTF-8; set encoding: cp1252")


@pytest.mark.parametrize("encoding", SETTINGS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csv_file_of_any_encoding_and_delimiter_is_read(tmp_path: Path, encoding: str, delimiter: str) -> None:
    path = write_csv(tmp_path / "a.csv", encoding, delimiter)
    expected = [text.encode(encoding, "replace").decode(encoding) for text in TEXTS]
    documents = read(path, encoding=SETTINGS[encoding], delimiter=delimiter, id="id")
    assert [document.text for document in documents] == expected
    assert [document.doc_id for document in documents] == [str(number) for number in range(60)]
    (entry, _) = make_plan(config_of(path, encoding=SETTINGS[encoding], delimiter=delimiter)).inputs
    assert measure_extent(entry).rows == 60


def test_json_lines_and_text_files_have_an_encoding_too(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "utf-8")
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_bytes(lines.encode("cp1252"))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:02}.txt").write_bytes(text.encode("utf-16"))
    assert [document.text for document in read(tmp_path / "a.jsonl", encoding="cp1252")] == TEXTS
    assert [document.text for document in read(tmp_path / "texts", encoding="utf-16")] == TEXTS
    assert refusal(tmp_path / "a.jsonl").endswith("a.jsonl are not UTF-8; set encoding: cp1252")
    assert refusal(tmp_path / "texts").endswith("texts are not UTF-8; set encoding: utf-16")
    path = write_csv(tmp_path / "b.csv", "utf-16")
    assert refusal(path).endswith("b.csv, which is not UTF-8; set encoding: utf-16"), "before its columns"


@pytest.mark.parametrize(("delimiter", "setting"), [(";", '";"'), ("\t", '"\\t"'), ("|", '"|"')])
def test_the_delimiter_of_a_single_column_is_named(tmp_path: Path, delimiter: str, setting: str) -> None:
    path = write_csv(tmp_path / "a.csv", "utf-8", delimiter, ["plain words"] * 5)
    name = f"id{delimiter}text"
    assert refusal(path).endswith(f"a.csv, whose single column is {name!r}; set delimiter: {setting}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoding": "cp1522"}, "corpus.audit.encoding: unknown encoding, got 'cp1522'; did you mean 'cp1252'?"),
        ({"encoding": "ansi"}, "corpus.audit.encoding: unknown encoding, got 'ansi'; did you mean 'cp1252'?"),
        ({"encoding": "utf-7"}, "encoding: must be an extension of ASCII, or UTF-16 or UTF-32, got 'utf-7'"),
        ({"encoding": "base64"}, "encoding: must be an extension of ASCII, or UTF-16 or UTF-32, got 'base64'"),
        ({"delimiter": "tab"}, "must be one character, and no quotation mark or line end, got 'tab'; did you mean"),
        ({"delimiter": '"'}, "must be one character"),
    ],
)
def test_a_setting_that_is_none_names_the_nearest(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    refused = refusal(write_csv(tmp_path / "a.csv", "utf-8"), **settings)
    assert message in refused
    assert refused.count(repr(next(iter(settings.values())))) == 1, "the value is stated once"


def test_a_setting_that_applies_to_no_file_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "plain words"}\n')
    found = refusal(tmp_path / "a.jsonl", delimiter=";")
    assert found == "corpus.audit: delimiter applies to CSV files, and these are jsonl; leave it out"
    found = refusal(tmp_path / "a.jsonl", encoding="utf-16")
    assert "encoding utf-16 applies to CSV and .txt files; convert" in found
    (tmp_path / "a.jsonl").write_text('{"text": "plain words"}\n', encoding="utf-16")
    assert refusal(tmp_path / "a.jsonl").endswith("it is not UTF-8: convert it to UTF-8")
    pq.write_table(pa.table({"text": ["plain words"]}), tmp_path / "a.parquet")
    found = refusal(tmp_path / "a.parquet", encoding="cp1252")
    assert found == "corpus.audit: encoding applies to CSV, JSONL and .txt files, and these are parquet; leave it out"


def test_a_setting_is_in_the_fingerprint_and_a_default_is_not(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", "cp1252", ";")

    def described(**settings: str) -> tuple[Shard, dict[str, Any]]:
        shard = make_plan(config_of(path, text="text", delimiter=";", **settings)).shards[0]
        return shard, shard_fingerprint({}, shard)

    plain, plain_fingerprint = described()
    other, fingerprint = described(encoding="windows-1252")
    assert fingerprint == {**plain_fingerprint, "encoding": "cp1252"}
    assert other.to_dict() == {**plain.to_dict(), "encoding": "cp1252"}
    assert plain.to_dict()["delimiter"] == ";"
    assert Shard.from_dict(json.loads(json.dumps(other.to_dict()))) == other
    for setting in ("utf8", "UTF-8", "utf-8-sig"):
        assert described(encoding=setting) == (plain, plain_fingerprint)
    default = make_plan(config_of(tmp_path / "unseen.csv")).shards[0]
    assert not {"encoding", "delimiter"} & {*default.to_dict(), *shard_fingerprint({}, default)}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "shift_jis", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_cleaned_files_keep_their_encoding_and_delimiter(tmp_path: Path, encoding: str, delimiter: str) -> None:
    texts = [f'{number} "quoted"\r\nlines{delimiter} and 表 cafés' for number in range(20)]
    path = write_csv(tmp_path / "a.csv", encoding, delimiter, texts)
    shard = make_plan(config_of(path, encoding=encoding, delimiter=delimiter)).shards[0]
    sink = io.BytesIO()
    marks = RowMarks([np.arange(0, 20, 2)], True)
    CSV.export.copy(ExportSource((shard,), "a.csv"), marks, lambda _: nullcontext(sink))
    whole = io.StringIO(path.read_bytes().decode(encoding), newline="")
    kept = io.StringIO(sink.getvalue().decode(encoding), newline="")
    rows = list(csv.DictReader(whole, delimiter=delimiter))
    assert list(csv.DictReader(kept, delimiter=delimiter)) == rows[::2]
    assert all(line in path.read_bytes() for line in sink.getvalue().splitlines())


def test_init_writes_encoding_and_delimiter_and_warns_of_what_may_be_several_columns(tmp_path: Path) -> None:
    write_csv(tmp_path / "audit.csv", "cp1252", ";")
    starter = audit_starter(str(tmp_path))
    assert '; text: text, id: id, encoding: "cp1252", delimiter: ";"' in starter.guesses[0]
    corpus = yaml.safe_load(starter.text)["corpus"]["audit"]
    assert [document.text for document in read(tmp_path / corpus.pop("path"), **corpus)] == TEXTS
    (tmp_path / "audit.csv").write_text("Id;Text\none of the lines without another field\n5;a line; with three\n")
    starter = audit_starter(str(tmp_path))
    warning = "It has a single column named 'Id;Text': set delimiter if these are several columns."
    assert starter.guesses[0].endswith(f"warning: {warning}")
    assert f"# Warning: {warning}" in starter.text


def test_letters_at_the_end_of_lines_tell_an_encoding_from_truncated_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, codec, encoding in (
        ("a,José\nb,café\nc,plain\n", "cp1252", "cp1252"),
        ("a,José.\r\nb,café.\r\n", "cp1252", "cp1252"),
        ("a,José\nb,café\n", "utf-8", "utf-8"),
        ("a\nb,café", "utf-8", "utf-8"),
    ):
        path.write_bytes(text.encode(codec))
        assert detected(str(path), {"encoding"}).encoding == encoding
    path.write_bytes("a\nb,café".encode()[:-1])
    assert detected(str(path), {"encoding"}).encoding == "utf-8", "the start of a file ends within a character"
