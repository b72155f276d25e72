"""A file that is not what its name says, or what its settings say, is refused or left out with what to do."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence

LINES = "".join(json.dumps({"text": sentence(number)}) + "\n" for number in range(20)).encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
TEXT = sentence(3).encode()


def read(path: Path, **settings: Any) -> list[Document]:
    corpus = build(CorpusConfig, {"audit": {"path": str(path), **settings}})
    shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig())
    return [document for shard in shards for document in read_shard(shard)]


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def archive_of(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "remedy"),
    [
        ("a.jsonl", gzip.compress(LINES), "it is a gzip file: rename it to a.jsonl.gz"),
        ("a.jsonl", LFS, "it is a pointer of Git LFS and not the file itself: run git lfs pull where it was cloned"),
        ("a.parquet", LFS, "it is a pointer of Git LFS and not the file itself: run git lfs pull where it was cloned"),
        (
            "a.csv",
            b"\xef\xbb\xbf\n<!DOCTYPE HTML><body>404</body>",
            "it is an HTML page, as servers send in place of a",
        ),
        ("a.parquet", b"<html>Not found", "it is an HTML page, as servers send in place of a file: download"),
        ("a.jsonl", bytes(9000), "it holds null bytes alone, as an interrupted copy does: copy it again"),
        ("a.csv", gzip.compress(LINES), "it is a gzip file: rename it to a.csv.gz"),
        ("a.json", zstandard.compress(LINES), "it is a zstd file: rename it to a.json.zst"),
        ("a.jsonl.gz", zstandard.compress(LINES), "it is a zstd file: rename it to a.jsonl.zst"),
        ("a.jsonl.zst", gzip.compress(LINES), "it is a gzip file: rename it to a.jsonl.gz"),
        ("a.jsonl", bz2.compress(LINES), "rename it to a.jsonl.bz2, then unpack it: bunzip2 -k a.jsonl.bz2"),
        ("a.jsonl.gz", lzma.compress(LINES), "rename it to a.jsonl.xz, then unpack it: xz -dk a.jsonl.xz"),
        ("a.jsonl", b"PK\x03\x04" + bytes(100), "rename it to a.zip, then unpack it: unzip a.zip"),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "rename it to a.doc, then save as .txt"),
        ("a.jsonl", archive_of({"a.txt": TEXT}), "it is a .tar archive: rename it to a.tar"),
        (
            "a.tar",
            gzip.compress(archive_of({"a.txt": TEXT})),
            "rename it to a.tar.gz, then unpack it: gunzip -k a.tar.gz",
        ),
        ("a.jsonl.gz", gzip.compress(archive_of({"a.txt": TEXT})), "it holds a .tar archive: unpack it (gunzip -k a"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(LINES)), "it holds a gzip file: unpack it (gunzip -k a.jsonl.gz)"),
        ("a.jsonl.gz", LINES, "if it is not compressed, take the suffix .gz off its name"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path: Path, name: str, data: bytes, remedy: str) -> None:
    assert remedy in user_error(read, written(tmp_path, name, data))


def test_a_parquet_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["some words"]}), tmp_path / "a.csv")
    assert user_error(read, tmp_path / "a.csv").endswith("it is a Parquet file: rename it to a.parquet")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.txt.gz", "; unpack it: gunzip -k a.txt.gz"),
        ("a.parquet.zst", "; unpack it: zstd -d a.parquet.zst"),
        ("a.jsonl.gz.gz", "; unpack it: gunzip -k a.jsonl.gz.gz"),
        ("a.txz", "; unpack it: tar -xJf a.txz"),
        ("a.TBZ2", "; unpack it: tar -xjf a.TBZ2"),
        ("a.jsonl.Z", "; unpack it: gunzip -k a.jsonl.Z"),
        ("a.jsonl.zstd", "; rename to .zst"),
        ("a.jsonlines", "; rename to .jsonl"),
        ("a.tab", "; rename to .tsv"),
        ("a.docx", "; save as .txt"),
        ("a.xlsx", "; save as .csv"),
        ("a.avro", "; export as .jsonl or .csv"),
        ("a.bin", "also with .gz or .zst)"),
    ],
)
def test_a_suffix_that_is_not_read_is_named_with_what_to_do(tmp_path: Path, name: str, remedy: str) -> None:
    refused = user_error(read, written(tmp_path, name, b"some"))
    assert refused.endswith(remedy)
    assert ".tar, .eval (.jsonl, .ndjson, .json, .csv, .tsv also with .gz or .zst)" in refused


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (gzip.compress(TEXT), ("not_text", "by its first bytes it is a gzip file")),
        (b"%PDF-1.4\n" + TEXT, ("not_text", "by its first bytes it is a PDF")),
        (archive_of({"a.txt": TEXT}), ("not_text", "by its first bytes it is a .tar archive")),
        (TEXT.decode().encode("utf-16-le"), ("undecodable", "it is utf-16-le, not UTF-8")),
        (TEXT.decode().encode("utf-32-be"), ("undecodable", "it is utf-32-be, not UTF-8")),
        (bytes(4000), ("empty", "nothing but null characters")),
        (TEXT + b"\0", None),
    ],
)
def test_a_text_file_that_is_no_text_costs_itself(tmp_path: Path, data: bytes, problem: tuple[str, str] | None) -> None:
    written(tmp_path, "a.txt", TEXT)
    written(tmp_path, "b.txt", data)
    whole, other = read(tmp_path)
    assert whole.text == TEXT.decode()
    assert other.problem == problem


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    marked = f"\ufeff{TEXT.decode()}"
    archive = written(tmp_path, "a.tar", archive_of({"a.txt": marked.encode(), "b.txt": TEXT}))
    assert [document.text for document in read(archive, text="txt")] == [TEXT.decode()] * 2
    path = written(tmp_path, "a.txt", marked.encode("utf-16-le"))
    assert [document.text for document in read(path, encoding="utf-16-le")] == [TEXT.decode()]


def test_a_list_of_parts_of_a_sparse_member_that_breaks_off_is_one_line(tmp_path: Path) -> None:
    member = tarfile.TarInfo("s.txt")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 10
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1  # more parts follow in the next block
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path = written(
        tmp_path, "a.tar", archive_of({"a.txt": TEXT})[:1024] + bytes(header) + bytes(504) + b"\1" + bytes(7)
    )
    assert "is not a readable .tar file: not a whole .tar file" in user_error(read, path, text="txt")


def test_a_split_of_files_is_refused_and_that_of_a_saved_dataset_is_its_folder(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", LINES)
    refused = (
        "split applies to saved datasets and those of the hub, and these are jsonl; leave it out, and name the files"
    )
    assert refused in user_error(read, path, split="train[:5]")
    assert refused in user_error(read, tmp_path, split="train")
    assert "subset goes with dataset" in user_error(read, path, subset="en")
    rows = datasets.Dataset.from_dict({"text": [sentence(number) for number in range(20)]})
    datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(tmp_path / "saved")
    assert len(read(tmp_path / "saved", split=" train [ :7 ] + test ")) == 12
    assert len(read(tmp_path / "saved/test", split="test[:3]")) == 3
    assert user_error(read, tmp_path / "saved/train", split="test").endswith("; splits: train")
    assert "examples: train[:1000], train[10%:20%]" in user_error(read, tmp_path / "saved", split="train[:1,000]")


def test_a_table_of_tabs_with_quotes_in_its_texts_names_the_setting(tmp_path: Path) -> None:
    rows = [f'{n}\t"Quoted" words begin text {n}' for n in range(9)]
    path = written(tmp_path, "a.tsv", "\n".join(["id\ttext", *rows]).encode())
    problems = [document.problem[1] for document in read(path) if document.problem]
    assert len(problems) == 9
    assert all(problem.endswith("; quoting: none reads all quotes as text)") for problem in problems)
    assert [document.text for document in read(path, quoting="none")] == [row.partition("\t")[2] for row in rows]
    wide = written(tmp_path, "b.csv", "id,text\n1,some words of a text\n".encode("utf-16-le"))
    assert user_error(read, wide, encoding="utf-16").endswith("it is not UTF-16: set encoding: utf-16-le")
