"""The .tar files of WebDataset hold texts too: in files by their endings, or in fields of .json files."""

import io
import json
import subprocess
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.corpus import CorpusConfig, LimitsConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.webdataset import WEBDATASET
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.export.request import RowMarks
from pipeline.plan.preflight import plan_checks
from pipeline.plan.starter import audit_starter
from pipeline.run.plan import make_plan

TEXTS = [f"Document {number} tells of the number {number * number} at some length." for number in range(100)]
FILES = {f"{number:03}.txt": text.encode() for number, text in enumerate(TEXTS)}


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def fields(number: int, text: str) -> bytes:
    return json.dumps({"body": text, "url": f"u{number}", "topic": ["a", "b"][number % 2]}).encode()


def shards_of(path: Path, limits: LimitsConfig | None = None, **source: Any) -> list[Shard]:
    limits = limits or LimitsConfig()
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path), **source}})
    return plan_shards(corpus, find_inputs(corpus, limits), ResourcesConfig(), limits=limits)


def read_answer_tables(path: Path, limits: LimitsConfig | None = None, **source: Any) -> list[Document]:
    return [document for shard in shards_of(path, limits, **source) for document in read_shard(shard)]


def reasons(documents: list[Document]) -> list[str | None]:
    return [document.problem and document.problem[0] for document in documents]


def test_texts_are_files_by_their_endings_or_fields_of_json_files_with_id_and_group(tmp_path: Path) -> None:
    documents = read_answer_tables(write_tar(tmp_path / "files.tar", FILES), text="txt")
    assert [document.text for document in documents] == TEXTS
    assert documents[7].doc_id == "007"
    path = write_tar(
        tmp_path / "a.tar", {f"{number:03}.json": fields(number, text) for number, text in enumerate(TEXTS)}
    )
    documents = read_answer_tables(path, text="body", id="url", group="topic")
    assert [(document.doc_id, document.text) for document in documents] == [
        (f"u{number}", text) for number, text in enumerate(TEXTS)
    ]
    assert {document.group for document in documents} == {"a", "b"}
    (entry,) = find_inputs(CorpusConfig.model_validate({"audit": {"path": str(path), "text": "body"}}))
    extent = measure_extent(entry)
    assert not extent.exact
    assert 90 <= extent.rows <= 110


def test_a_bad_sample_is_one_quarantined_document(tmp_path: Path) -> None:
    files = {
        "0.json": b'{"body": ',
        "1.json": b"[1]",
        "2.json": fields(2, TEXTS[2]),
        "3.cls": b"5",
        "4.json": fields(4, "x" * 5000),
        "5.json": b'{"body": 7}',
        "6.json": b'{"body": "\\ud800"}',
    }
    path = write_tar(tmp_path / "a.tar", files)
    expected = ["undecodable", "not_text", None, "not_text", "too_large", "not_text", "undecodable"]
    assert reasons(read_answer_tables(path, LimitsConfig(document_bytes=4096), text="body")) == expected
    path = write_tar(tmp_path / "b.tar", {"0.txt": TEXTS[0].encode(), "1.txt": b"caf\xe9", "2.png": b"\x89PNG"})
    assert reasons(read_answer_tables(path, text="txt")) == [None, "undecodable", "not_text"]
    path = write_tar(tmp_path / "c.tar", {"0.png": b"\x89PNG", "0.txt": b"some words of it", "1.png": b"\x89PNG"})
    documents = read_answer_tables(path, text="png")
    assert [document.problem for document in documents] == [("not_text", "bytes, not text")] * 2
    assert documents[0].picture is None


def test_truncated_files_missing_columns_and_too_many_samples_are_errors_in_one_line(
    tmp_path: Path,
) -> None:
    path = write_tar(tmp_path / "a.tar", FILES)
    with pytest.raises(UserError, match=r"more documents than limits\.shard_documents, which is 99"):
        read_answer_tables(path, LimitsConfig(shard_documents=99), text="txt")
    with pytest.raises(UserError, match=r"no column 'text' in .*a\.tar; .*txt"):
        shards_of(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 100])
    with pytest.raises(UserError, match=r"a\.tar is damaged"):
        read_answer_tables(path, text="txt")


def test_an_export_has_the_files_of_the_kept_samples_or_rows_of_a_table(tmp_path: Path) -> None:
    files = {
        f"{n}.{end}": fields(n, TEXTS[n]) if end == "json" else b"c %d" % n for n in range(6) for end in ("json", "cls")
    }
    path = write_tar(tmp_path / "a.tar", files)
    source = ExportSource(tuple(shards_of(path, text="body")), "a.tar")
    sink = io.BytesIO()
    WEBDATASET.export.copy(source, RowMarks([np.array([0, 4])], False), lambda _: nullcontext(sink))
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as archive:
        written = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert written == {name: data for name, data in files.items() if name[0] not in "04"}
    records = list(WEBDATASET.export.records(source))
    assert records[1:2] == [(1, {"__key__": "1", "body": TEXTS[1], "url": "u1", "topic": "b", "cls": "c 1"})]


def test_init_takes_tar_files_of_texts(tmp_path: Path) -> None:
    for name in ("audit-0.tar", "audit-1.tar"):
        write_tar(tmp_path / name, {f"{number}.json": fields(number, text) for number, text in enumerate(TEXTS)})
    write_tar(tmp_path / "unseen.tar", FILES)
    corpus = yaml.safe_load(audit_starter(str(tmp_path)).text)["corpus"]
    assert corpus["audit"] == {"path": "audit-*.tar", "text": "body", "id": "url"}
    assert corpus["unseen"] == {"path": "unseen.tar", "text": "txt", "id": None}


def lines_of(path: Path, **source: Any) -> list[str]:
    unseen = path.parent / "unseen.jsonl"
    unseen.write_text("".join(json.dumps({"text": f"other words of number {n}"}) + "\n" for n in range(60)))
    corpus = {"audit": {"path": str(path), **source}, "unseen": {"path": str(unseen)}}
    plan = make_plan(build(AuditConfig, {"run": "run", "model": {"path": "none"}, "corpus": corpus}))
    return list(plan_checks(plan)["lines"])


def test_hidden_members_as_a_mac_adds_them_are_left_out_and_counted(tmp_path: Path) -> None:
    files: dict[str, bytes] = {"./.DS_Store": b"\0\0\0\1Bud1"}
    for name, data in list(FILES.items())[:20]:
        files |= {f"./docs/._{name}": b"\0\5\x16\7AppleDouble", f"./docs/{name}": data}
        files |= {f"__MACOSX/docs/._{name}": b"\0\5\x16\7", f"__MACOSX/{name}": b"of its own"}
    path = write_tar(tmp_path / "a.tar", files)
    documents = read_answer_tables(path, text="txt")
    assert [document.text for document in documents] == TEXTS[:20]
    assert [document.doc_id for document in documents[:2]] == ["./docs/000", "./docs/001"]
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path), "text": "txt"}})
    assert measure_extent(find_inputs(corpus)[0]).rows == 20
    (line,) = [line for line in lines_of(path, text="txt") if "hidden" in line]
    assert line == f"note: 61 hidden members are left out of {path}, such as the ._ files that macOS adds"
    sink = io.BytesIO()
    source = ExportSource(tuple(shards_of(path, text="txt")), "a.tar")
    WEBDATASET.export.copy(source, RowMarks([np.array([0, 19])], True), lambda _: nullcontext(sink))
    sink.seek(0)
    with tarfile.open(fileobj=sink) as copy:
        assert copy.getnames() == ["./docs/000.txt", "./docs/019.txt"]


def header(name: str, size: int, **fields: Any) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    for field, value in fields.items():
        setattr(member, field, value)
    return member.tobuf(fields.pop("format", tarfile.GNU_FORMAT))


@pytest.mark.parametrize("size", [1 << 60, 1 << 33, 5000, 513])
@pytest.mark.parametrize("kind", ["file", "pax", "long name", "first"])
def test_a_member_that_goes_on_behind_the_file_is_refused_at_once(tmp_path: Path, size: int, kind: str) -> None:
    whole = write_tar(tmp_path / "whole.tar", dict(list(FILES.items())[:30])).read_bytes()
    types = {"pax": tarfile.XHDTYPE, "long name": tarfile.GNUTYPE_LONGNAME}
    begin = b"" if kind == "first" else whole[: 30 * 1024]
    path = tmp_path / "a.tar"
    path.write_bytes(begin + header("beyond.txt", size, type=types.get(kind, tarfile.REGTYPE)) + bytes(512))
    with pytest.raises(UserError, match=r"not a whole \.tar file"):
        read_answer_tables(path, text="txt")
    if kind != "first":
        (line, *_) = lines_of(path, text="txt")
        assert line.startswith("warning: ")
        assert "not a whole .tar file" in line


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_chain_of_headers_about_the_next_header_is_refused(tmp_path: Path, kind: bytes) -> None:
    """Each is read by a function that calls itself for the next one."""
    path = write_tar(tmp_path / "a.tar", FILES)
    whole = path.read_bytes()
    path.write_bytes(3000 * (header("next", 10, type=kind) + b"10 path=b\n".ljust(512, b"\0")) + whole)
    with pytest.raises(UserError, match=r"not a whole \.tar file"):
        read_answer_tables(path, text="txt")


@pytest.mark.parametrize("size", ["5", "99999", "999999999999999999"])
def test_a_size_for_all_members_is_refused(tmp_path: Path, size: str) -> None:
    path = write_tar(tmp_path / "a.tar", FILES)
    whole = path.read_bytes()
    record = f"{8 + len(size)} size={size}\n".encode()
    path.write_bytes(header("all", len(record), type=tarfile.XGLTYPE) + record.ljust(512, b"\0") + whole)
    with pytest.raises(UserError, match=r"not a whole \.tar file: a header for all members states the size of each"):
        read_answer_tables(path, text="txt")


def test_the_members_beyond_a_file_of_the_examples_are_refused(shared_folder: Path) -> None:
    for name in ("member_beyond_file_base256.tar", "member_beyond_file_pax.tar"):
        with pytest.raises(UserError, match=r"not a whole \.tar file: member '.*' goes on behind its end"):
            read_answer_tables(shared_folder / "cases" / name, text="txt")


def test_a_mac_archive_of_the_examples_is_read(shared_folder: Path) -> None:
    assert reasons(read_answer_tables(shared_folder / "cases/macos.tar", text="txt")) == [None] * 60


def test_members_of_other_kinds(tmp_path: Path) -> None:
    """Devices, folders and FIFOs hold no documents; links are not followed; long names and sparse files are read."""
    path = tmp_path / "a.tar"
    name = "a" * 300
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for member, data in (
            ("/absolute/path/one.txt", b"an absolute path"),
            ("../outside/two.txt", b"a path to elsewhere"),
            (f"{name}/{name}.txt", b"a long name"),
            ("empty.txt", b""),
            ("twice.txt", b"the first"),
            ("twice.txt", b"the second"),
            ("caf\u00e9.txt", b"a name beyond ASCII"),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for member, kind in (("device", tarfile.CHRTYPE), ("pipe", tarfile.FIFOTYPE), ("folder", tarfile.DIRTYPE)):
            info = tarfile.TarInfo(f"{member}.txt")
            info.type = kind
            archive.addfile(info)
        for member, kind in (("symbolic", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(f"{member}.txt")
            info.type, info.linkname = kind, "/proc/self/environ"
            archive.addfile(info)
    documents = read_answer_tables(path, text="txt")
    assert [document.text for document in documents] == [
        "an absolute path", "a path to elsewhere", "a long name", "", "the first", "the second", "a name beyond ASCII",
        "", "",
    ]  # fmt: skip
    assert documents[4].doc_id == documents[5].doc_id == "twice", "the second is in quarantine by its id"
    assert reasons(documents)[-2:] == ["not_text", "not_text"]
    assert "links are not followed" in (documents[-1].problem or ("", ""))[1]


def test_a_sparse_member_is_read_and_is_not_taken_for_one_beyond_the_file(tmp_path: Path) -> None:
    content = tmp_path / "sparse.txt"
    with content.open("wb") as file:
        file.write(b"words at the start ")
        file.seek(1 << 20)
        file.write(b" words at the end")
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", "sparse.txt"], cwd=tmp_path, check=True)
    assert (tmp_path / "a.tar").stat().st_size < 1 << 17
    (document,) = read_answer_tables(tmp_path / "a.tar", text="txt")
    assert document.text.startswith("words at the start")
    assert document.text.endswith("words at the end")


@pytest.mark.parametrize("lost", [512, 1024, 1536, 10_000, 700])
def test_an_archive_that_breaks_off_is_not_whole(tmp_path: Path, lost: int) -> None:
    whole = write_tar(tmp_path / "whole.tar", FILES).read_bytes().rstrip(b"\0")
    whole += bytes(-len(whole) % 512)
    for end in (b"", bytes(100)):
        (tmp_path / "a.tar").write_bytes(whole[:-lost] + end)
        with pytest.raises(UserError, match=r"not a whole \.tar file"):
            read_answer_tables(tmp_path / "a.tar", text="txt")


def test_a_column_of_lists_or_objects_is_named_and_a_field_of_an_object_is_read(tmp_path: Path) -> None:
    rows = [{"page": {"body": text, "url": f"u{n}"}, "tags": ["a"]} for n, text in enumerate(TEXTS)]
    path = write_tar(tmp_path / "a.tar", {f"{n:03}.json": json.dumps(row).encode() for n, row in enumerate(rows)})
    documents = read_answer_tables(path, text="page.body", id="page.url")
    assert [document.text for document in documents] == TEXTS
    assert documents[3].doc_id == "u3"
    with pytest.raises(UserError, match=r"column 'tags' in .* holds lists, not text"):
        read_answer_tables(path, text="tags")
    with pytest.raises(UserError, match=r"column 'page' in .* holds objects, not text; name one of its fields"):
        read_answer_tables(path, text="page")
