"""The .tar files of WebDataset hold texts too: in files by their endings, or in fields of .json files."""

import io
import json
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.audit.starter import audit_starter
from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, LimitsConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import extent_of
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.webdataset import WEBDATASET
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.export.request import RowMarks

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


def documents_of(path: Path, limits: LimitsConfig | None = None, **source: Any) -> list[Document]:
    return [document for shard in shards_of(path, limits, **source) for document in read_shard(shard)]


def reasons(documents: list[Document]) -> list[str | None]:
    return [document.problem and document.problem[0] for document in documents]


def test_texts_are_files_by_their_endings_or_fields_of_json_files_with_id_and_group(tmp_path: Path) -> None:
    documents = documents_of(write_tar(tmp_path / "files.tar", FILES), text="txt")
    assert [document.text for document in documents] == TEXTS
    assert documents[7].doc_id == "007"
    path = write_tar(
        tmp_path / "a.tar", {f"{number:03}.json": fields(number, text) for number, text in enumerate(TEXTS)}
    )
    documents = documents_of(path, text="body", id="url", group="topic")
    assert [(document.doc_id, document.text) for document in documents] == [
        (f"u{number}", text) for number, text in enumerate(TEXTS)
    ]
    assert {document.group for document in documents} == {"a", "b"}
    (entry,) = find_inputs(CorpusConfig.model_validate({"audit": {"path": str(path), "text": "body"}}))
    extent = extent_of(entry)
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
    assert reasons(documents_of(path, LimitsConfig(document_bytes=4096), text="body")) == expected
    path = write_tar(tmp_path / "b.tar", {"0.txt": TEXTS[0].encode(), "1.txt": b"caf\xe9", "2.png": b"\x89PNG"})
    assert reasons(documents_of(path, text="txt")) == [None, "undecodable", "not_text"]
    path = write_tar(tmp_path / "c.tar", {"0.png": b"\x89PNG", "0.txt": b"some words of it", "1.png": b"\x89PNG"})
    documents = documents_of(path, text="png")
    assert [document.problem for document in documents] == [("not_text", "bytes, not text")] * 2
    assert documents[0].picture is None


def test_a_truncated_file_one_without_the_column_and_one_of_too_many_samples_are_errors_in_one_line(
    tmp_path: Path,
) -> None:
    path = write_tar(tmp_path / "a.tar", FILES)
    with pytest.raises(UserError, match=r"more documents than limits\.shard_documents, which is 99"):
        documents_of(path, LimitsConfig(shard_documents=99), text="txt")
    with pytest.raises(UserError, match=r"no column 'text' in .*a\.tar; .*txt"):
        shards_of(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 100])
    with pytest.raises(UserError, match=r"a\.tar is damaged"):
        documents_of(path, text="txt")


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
