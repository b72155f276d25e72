"""`seenset mark`: the public copy, the private versions and the commitment."""

import csv
import gzip
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

from pipeline.errors import UserError
from pipeline.mark.mark import Marked, MarkRequest, check_private, check_scored, derived, mark_documents, shown_edits
from tests.helpers.commands import ended, here, user_error
from tests.helpers.marked_runs import write_audit

TEXT = (
    'The color of it was not known. Although they often ran, {n} people said "the color is red" and `color` on '
    "12 March 2024. In addition, 20% of the organizations near the center did not see that they favor it."
)
SHORT = "Too short to be marked."


def texts(count: int = 6) -> list[str]:
    return [SHORT if n == 2 else TEXT.format(n=100 + n) for n in range(count)]


def write_jsonl(path: Path, values: list[str]) -> Path:
    lines = [
        json.dumps({"id": f"d{n}", "text": text, "x": 1.50, "é": "é"}, ensure_ascii=n % 2 == 0)
        for n, text in enumerate(values)
    ]
    path.write_text("\n".join([*lines[:3], "", *lines[3:]]) + "\n", encoding="utf-8")
    return path


def write_csv(path: Path, values: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "x"])
        writer.writerows([f"d{n}", text, 'a "b", c'] for n, text in enumerate(values))
    return path


def write_parquet(path: Path, values: list[str], kind: pa.DataType | None = None) -> Path:
    column = pa.array(values)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind or pa.string())
    table = pa.table({"id": [f"d{n}" for n in range(len(values))], "text": column, "x": [[1.5]] * len(values)})
    pq.write_table(table.replace_schema_metadata({"about": "apples"}), path, compression="snappy", row_group_size=4)
    return path


def mark_file(path: Path, out: Path, **settings) -> Marked:
    return mark_documents(MarkRequest(str(path), str(out), **{"seed": 7, "versions": 8, "id": "id", **settings}))


def versions_in(out: Path) -> list[dict]:
    return pq.read_table(out / "private/versions.parquet").to_pylist()


def published(out: Path) -> dict[str, str]:
    """The published version of each document that is marked."""
    return {row["id"]: row["versions"][row["index"]] for row in versions_in(out)}


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_jsonl_keeps_every_byte_but_the_texts_and_private_files_hold_the_proof(tmp_path: Path) -> None:
    marked = mark_file(write_jsonl(tmp_path / "a.jsonl", texts()), tmp_path / "out", created="2026-01-31")
    assert (marked.documents, marked.marked, marked.unmarked) == (6, 5, {"fewer than 5 sites": 1})
    old = (tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")
    new = (tmp_path / "out/public/a.jsonl").read_text(encoding="utf-8").split("\n")
    private = published(tmp_path / "out")
    assert list(private) == ["d0", "d1", "d3", "d4", "d5"]
    for before, after in zip(old, new, strict=True):
        if not before:
            assert not after
            continue
        value = json.loads(before)
        both = value["text"], private.get(value["id"], value["text"])
        assert after == before.replace(*(json.dumps(one, ensure_ascii=before.isascii()) for one in both))
    for row in versions_in(tmp_path / "out"):
        assert len(set(row["versions"])) == 8
        assert 0 <= row["index"] < 8
        assert row["salt"] == derived(7, "salt", row["id"])
        assert row["sites"] == len(row["kinds"]) >= 5
        assert {len(forms) for forms in row["forms"]} == {row["sites"]}
        assert all('"the color is red" and `color`' in text for text in row["versions"])
    unmarked = pq.read_table(tmp_path / "out/private/unmarked.parquet").to_pylist()
    assert unmarked == [{"id": "d2", "reason": "fewer than 5 sites"}]
    assert json.loads((tmp_path / "out/private/seed.json").read_text())["seed"] == "7"
    commitment = json.loads((tmp_path / "out/commitment.json").read_text())
    assert (commitment["documents"], commitment["versions"], commitment["created"]) == (5, 8, "2026-01-31")
    for name, digest in {**commitment["private"], "public/a.jsonl": commitment["public"]["a.jsonl"]}.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    assert "7" not in commitment.values()
    assert (tmp_path / "out/private").stat().st_mode & 0o077 == 0


def test_csv_keeps_its_other_fields(tmp_path: Path) -> None:
    mark_file(write_csv(tmp_path / "a.csv", texts()), tmp_path / "out")
    private = published(tmp_path / "out")
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        expected = [{**row, "text": private.get(row["id"], row["text"])} for row in csv.DictReader(file)]
    with (tmp_path / "out/public/a.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == expected
    assert len(private) == 5
    assert (tmp_path / "out/public/a.csv").read_bytes().count(b"\r\n") == 7


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), "dictionary"], ids=str)
def test_parquet_keeps_schema_metadata_and_other_columns(tmp_path: Path, kind) -> None:
    mark_file(write_parquet(tmp_path / "a.parquet", texts(), kind), tmp_path / "out")
    private = published(tmp_path / "out")
    old, new = pq.read_table(tmp_path / "a.parquet"), pq.read_table(tmp_path / "out/public/a.parquet")
    assert new.schema.equals(old.schema, check_metadata=True)
    assert new.drop_columns("text").equals(old.drop_columns("text"))
    plain = [text.decode() if isinstance(text, bytes) else text for text in new["text"].to_pylist()]
    assert plain == [private.get(f"d{n}", text) for n, text in enumerate(texts())]
    assert pq.ParquetFile(tmp_path / "out/public/a.parquet").metadata.row_group(0).column(1).compression == "SNAPPY"


def test_a_folder_of_all_formats_keeps_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    values = texts(2)
    write_parquet(folder / "sub/a.parquet", values)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps({"text": t}) for t in values).encode()))
    (folder / "sub/c.txt").write_text("\ufeff" + values[0] + "\r\n", encoding="utf-8", newline="")
    (folder / "d.txt").write_bytes(SHORT.encode())
    marked = mark_file(folder, tmp_path / "out", id=None)
    assert marked.files == ["b.jsonl.gz", "d.txt", "sub/a.parquet", "sub/c.txt"]
    private = published(tmp_path / "out")
    assert set(private) == {"b.jsonl.gz#0", "b.jsonl.gz#1", "sub/a.parquet#0", "sub/a.parquet#1", "sub/c.txt#0"}
    public = tmp_path / "out/public"
    assert (public / "sub/c.txt").read_bytes() == b"\xef\xbb\xbf" + private["sub/c.txt#0"].encode()
    assert private["sub/c.txt#0"].endswith("\r\n")
    assert (public / "d.txt").read_bytes() == SHORT.encode()
    lines = gzip.decompress((public / "b.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["text"] for line in lines] == [private["b.jsonl.gz#0"], private["b.jsonl.gz#1"]]


def test_the_same_seed_gives_the_same_bytes_from_anywhere_and_none_others_every_time(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts())
    mark_file(folder, tmp_path / "one", id=None)
    monkeypatch.chdir(tmp_path)
    mark_file(Path("in"), tmp_path / "two", id=None)
    mark_file(folder, tmp_path / "three", id=None, seed=8)
    one, two, three = (all_bytes(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one["private/versions.parquet"] != three["private/versions.parquet"]
    for name in ("four", "five"):
        assert ended("mark", "in/a.jsonl", "--out", name, "--json") == 0
    seeds = {json.loads((tmp_path / name / "private/seed.json").read_text())["seed"] for name in ("four", "five")}
    assert len(seeds) == 2
    assert all(int(seed) > 1 << 200 for seed in seeds)


def test_rows_without_a_text_are_copied_and_a_text_that_stands_twice_changes_once(tmp_path: Path) -> None:
    twice = {"title": texts()[0], "text": texts()[0]}
    lines = [b'{"text": 5}', b'{"id": 1}', b"no json", b'{"text": "\xff"}', json.dumps(twice).encode()]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    marked = mark_file(tmp_path / "a.jsonl", tmp_path / "out", id=None)
    assert marked.unmarked == {"not_text": 2, "undecodable": 2}
    *copied, public = (tmp_path / "out/public/a.jsonl").read_bytes().splitlines()
    assert copied == lines[:4]
    assert json.loads(public) == {"title": texts()[0], "text": published(tmp_path / "out")["a.jsonl#4"]}


def test_a_damaged_file_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    for name, n, write in (
        ("a.jsonl.gz", 3000, write_jsonl),
        ("a.parquet", 600, write_parquet),
        ("a.csv.gz", 3000, write_csv),
        ("a.csv.gz", 300, write_csv),  # read when a public file is open, which is then not to blame
    ):
        rng, path = random.Random(0), tmp_path / name
        write(path, texts(n) if name == "a.parquet" else [f"{text} {rng.randbytes(99).hex()}" for text in texts(n)])
        data = gzip.compress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        cut = len(data) // 3 if n > 300 else len(data) // 2
        path.write_bytes(data[:cut] + (b"" if name.endswith(".gz") else b"x" * 40 + data[cut + 40 :]))
        with pytest.raises(UserError, match=f"{name} is (damaged|not a readable)"):
            mark_file(path, tmp_path / "out")
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def first_changed(column: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    def changed(table: pa.Table) -> pa.Table:
        first, *others = table[column].to_pylist()
        place = table.schema.get_field_index(column)
        field = table.schema.field(place)
        return table.set_column(place, field, pa.array([change(first), *others], field.type))

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (first_changed("index", lambda index: (index + 1) % 8), r"document 'd0' has index \d, and private/seed.json g"),
        (first_changed("versions", lambda v: [f"{v[0]} More.", *v[1:]]), "document 'd0' has versions that private"),
        (first_changed("versions", lambda v: [*v[:7], f"{v[7]} More."]), "document 'd0' has versions that private"),
        (first_changed("salt", lambda salt: salt[::-1]), "document 'd0' has a salt that private/seed.json does not"),
        (lambda table: table.slice(1), "it holds 4 documents, and 5 were committed to"),
        (lambda table: table.drop_columns(["salt"]), "it has no column salt"),
        ("no seed", "private/seed.json is missing, so the document cannot be identified"),
        (None, "private/ is of another collection"),
    ],
)
def test_a_run_over_private_files_that_do_not_match_names_what_differs(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    """The private file of a run with a changed value; None: the private folder of another collection."""
    mark_file(write_jsonl(tmp_path / "a.jsonl", texts()), tmp_path / "marked")
    path = tmp_path / "marked/private/versions.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")
    check_scored(str(path))  # other bytes of the same versions
    if change is None:
        indeed = write_jsonl(tmp_path / "a.jsonl", [f"{text} Indeed." for text in texts()])
        mark_file(indeed, tmp_path / "other", seed=8)
        shutil.rmtree(tmp_path / "marked/private")
        shutil.copytree(tmp_path / "other/private", tmp_path / "marked/private")
    elif change == "no seed":
        pq.write_table(first_changed("salt", lambda salt: salt[::-1])(pq.read_table(path)), path)
        (path.parent / "seed.json").unlink()
    else:
        pq.write_table(change(pq.read_table(path)), path)
    error = here(capsys, "run", write_audit(tmp_path, "run", tiny_model_folder), code=2)[1]
    assert re.search(rf"versions\.parquet does not match commitment\.json: .*{words}", error.replace("\n", " "))
    assert not (tmp_path / "runs/run").exists()
    path.unlink()
    assert "holds no private/versions.parquet" in user_error(check_private, str(tmp_path / "marked"))


def test_bad_settings_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    for settings, message in (
        ({"versions": 1}, "--versions must be between 2 and 1,000, got 1"),
        ({"versions": 1001}, "--versions must be between 2 and 1,000, got 1001"),
        ({"seed": -1}, "--seed must be between 0 and 2"),
        ({"language": "de"}, "--language 'de' has no marking rules"),
        ({"text": "txt"}, "no column 'txt' in .*; did you mean 'text'"),
        ({"id": "x"}, "id '1.5' occurs twice in a.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            mark_file(write_jsonl(tmp_path / "a.jsonl", texts()), tmp_path / "out", **settings)
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


GERMAN = (
    "Die Farbe des Himmels war lange nicht bekannt. Obwohl sie oft liefen, sagten {n} Leute, dass die Farbe schön sei. "
    "Außerdem sahen zwanzig von hundert Vereinen in der Nähe des Zentrums nicht, dass sie ihnen gefällt."
)


CODE = "def f(x):\n    return x + {n}"


@pytest.mark.parametrize(
    "text", [GERMAN, "天空的颜色很久以来都不为人知。{n} 个人说颜色是红色的。", SHORT + " {n}", CODE]
)
def test_a_collection_of_which_nothing_is_marked_is_refused_and_commits_to_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """200 texts in another language were published as they were, with exit code 0 and a commitment."""
    path = write_jsonl(tmp_path / "a.jsonl", [text.format(n=n) for n in range(20)])
    out, error = here(capsys, "mark", path, "--out", tmp_path / "out", "--id", "id", code=2)
    assert "none of the 20 documents can be marked (20: fewer than 5 sites); the rules are of English" in error
    assert "--with" in error
    assert out == ""
    assert not any((tmp_path / "out").rglob("*.*"))


ENCODED = 'The colour of "Café Müller" was not known; although they often ran, {n} people said the color is red. '
ENCODED += "In addition, 20% of the organizations near the center did not see that they favor it."


DIALECTS = [("cp1252", ";"), ("utf-16", "\t"), ("utf-16-le", ","), ("utf-8-sig", "|"), ("latin-1", ";")]


@pytest.mark.parametrize(("encoding", "delimiter"), DIALECTS)
def test_a_table_in_another_dialect_keeps_it(tmp_path: Path, encoding: str, delimiter: str) -> None:
    values = [ENCODED.format(n=n) for n in range(10, 16)]
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "text", "ü"])
        writer.writerows([f"d{n}", text, "é, ;"] for n, text in enumerate(values))
    arguments = ["--out", tmp_path / "out", "--id", "id", "--seed", 7, "--encoding", encoding, "--delimiter", delimiter]
    assert ended("mark", path, *arguments) == 0
    chosen = published(tmp_path / "out")
    assert len(chosen) == 6
    before, after = path.read_bytes(), (tmp_path / "out/public/a.csv").read_bytes()
    assert after[:2] == before[:2], "a byte order mark stays"
    rows = list(csv.reader(after.decode(encoding).splitlines(), delimiter=delimiter))
    assert rows[0] == ["id", "text", "ü"]
    assert rows[1:] == [[f"d{n}", chosen[f"d{n}"], "é, ;"] for n in range(6)]
    source = {"path": str(tmp_path / "out/private/versions.parquet")}
    assert check_scored(source["path"]) is None


@pytest.mark.parametrize("ascii_only", [True, False])
def test_lines_of_json_in_another_encoding_keep_it(tmp_path: Path, ascii_only: bool) -> None:
    rows = [{"id": f"d{n}", "text": ENCODED.format(n=n), "ü": "é"} for n in range(10, 16)]
    lines = "".join(f"{json.dumps(row, ensure_ascii=ascii_only)}\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="cp1252")
    marking = ("--out", tmp_path / "out", "--id", "id", "--seed", 7, "--encoding", "cp1252")
    assert ended("mark", tmp_path / "a.jsonl", *marking) == 0
    chosen = published(tmp_path / "out")
    written = (tmp_path / "out/public/a.jsonl").read_text(encoding="cp1252").splitlines()
    assert [json.loads(line) for line in written] == [{**row, "text": chosen[row["id"]]} for row in rows]
    assert all(line.isascii() == ascii_only for line in written)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-be", "utf-8-sig"])
def test_texts_in_another_encoding_keep_it(tmp_path: Path, encoding: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.txt").write_text(ENCODED.format(n=10 + n), encoding=encoding)
    marking = ("--out", tmp_path / "out", "--seed", 7, "--encoding", encoding)
    assert ended("mark", folder, *marking) == 0
    for name, text in published(tmp_path / "out").items():
        file = tmp_path / "out/public" / name.removesuffix("#0")
        assert file.read_bytes() == text.encode(encoding)


def test_a_dialect_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="cp1252") as file:
        csv.writer(file, delimiter=";").writerows([("id", "text"), *((n, ENCODED.format(n=n)) for n in range(9))])
    lines, out = write_jsonl(tmp_path / "b.jsonl", texts()), ("--out", tmp_path / "out", "--id", "id")
    for given, message in (
        ((path, *out, "--encoding", "cp1252"), 'single column is .*give --delimiter ";"'),
        ((path, *out, "--delimiter", ";"), r"none of the 9 documents can be marked \(9: undecodable\); .*--encoding"),
        ((path, *out, "--encoding", "foo"), "--encoding: unknown encoding, got 'foo'"),
        ((path, *out, "--delimiter", "tab"), r'--delimiter: must be one character.*did you mean "\\t"'),
        ((lines, *out, "--encoding", "utf-16"), "encoding utf-16 applies to CSV and .txt files"),
        ((lines, *out, "--delimiter", ";"), "INPUT: delimiter applies to CSV files, and these are jsonl"),
    ):
        error = here(capsys, "mark", *given, code=2)[1]
        assert re.search(message, error), error
        assert not any((tmp_path / "out").rglob("*.*"))


def test_nothing_is_overwritten_and_no_input_holds_its_output(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts())
    mark_file(folder, tmp_path / "out")
    before = all_bytes(tmp_path / "out")
    with pytest.raises(UserError, match=r"out holds commitment\.json, private, public: mark overwrites nothing"):
        mark_file(folder, tmp_path / "out", seed=9)
    assert all_bytes(tmp_path / "out") == before
    assert "whose files are marked" in user_error(mark_file, folder, folder / "out")
    assert "INPUT: no file" in user_error(mark_file, tmp_path / "other", tmp_path / "new")
    assert not os.path.exists(tmp_path / "new")


def test_the_command_prints_what_a_person_checks_and_refuses_a_wrong_option(tmp_path: Path, capsys) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    printed = here(capsys, "mark", path, "--out", tmp_path / "out", "--id", "id", "--seed", "3")[0]
    assert "19 of 20 documents are marked, each published in one of 20 versions" in printed
    assert "1 are published as they were: fewer than 5 sites." in printed
    assert printed.count("as it is published") == 10
    assert "a collection of 500 to 1,500" in printed
    assert "keep secret" in printed
    before = "one two three four five color six seven eight nine ten"
    (edit,) = shown_edits(before, before.replace("color", "colour"))
    assert edit == ("two three four five color six seven eight nine", "two three four five colour six seven eight nine")
    assert shown_edits(before, before) == []
    (tmp_path / "p.yaml").write_text("pth: x\n")
    arguments = ["mark", path, "--out", tmp_path / "dated", "--json"]
    assert "'31.1.2026' does not match the format" in here(capsys, *arguments, "--date", "31.1.2026", code=2)[1]
    assert "unknown key 'pth'" in here(capsys, *arguments, "--with", tmp_path / "p.yaml", code=2)[1]
    assert not (tmp_path / "dated").exists()
    here(capsys, *arguments, "--date", "2026-01-31")
    assert json.loads((tmp_path / "dated/commitment.json").read_text())["created"] == "2026-01-31"


def test_an_input_that_cannot_be_marked_is_refused_before_the_paraphraser_is_opened(
    paraphraser: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(4))
    (tmp_path / "p.yaml").write_text(f"path: {paraphraser['path']}\n")
    opened: list[Any] = []
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", lambda *given, **more: opened.append(given))
    arguments = ["mark", path, "--out", tmp_path / "out", "--text", "txt", "--with", tmp_path / "p.yaml"]
    assert "no column 'txt'" in here(capsys, *arguments, code=2)[1]
    assert opened == []


def test_a_paraphraser_of_a_configuration_writes_the_versions(paraphraser: dict[str, str], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(4))
    (tmp_path / "p.yaml").write_text(f"path: {paraphraser['path']}\n")
    for name in ("one", "two"):
        arguments = ["mark", path, "--out", tmp_path / name, "--id", "id", "--seed", "3", "--versions", "2"]
        assert ended(*arguments, "--with", tmp_path / "p.yaml") == 0
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    rows = versions_in(tmp_path / "one")
    unmarked = pq.read_table(tmp_path / "one/private/unmarked.parquet").to_pylist()
    assert rows
    assert sorted(row["id"] for row in rows + unmarked) == ["d0", "d1", "d2", "d3"]
    assert all(len(set(row["versions"])) == 2 and row["sites"] == 0 for row in rows)
    check_private(str(tmp_path / "one"))
    assert json.loads((tmp_path / "one/commitment.json").read_text())["model"] == paraphraser["path"]
    lines = (tmp_path / "one/public/a.jsonl").read_text(encoding="utf-8").splitlines()
    public = {value["id"]: value["text"] for value in map(json.loads, filter(None, lines))}
    assert {row["id"]: public[row["id"]] for row in rows} == published(tmp_path / "one")
