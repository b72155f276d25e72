"""Files whose names are not UTF-8, or hold characters that a page or a list must escape, are read like others."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.commands import here
from tests.helpers.made_up import sentence

NAMES = {
    "latin-1": b"caf\xe9",
    "half a character": b"caf\xc3",
    "a line break": b"two\nlines",
    "a tab and a quote": b"a\t\"b'",
    "direction": "\u202ea\u2066b".encode(),
    "markup": b"<b>&amp;",
    "a percent sign": b"50%41 {x}",
    "a hash": b"a#1",
}


def folder_of(place: Path, name: bytes) -> Path:
    folder = os.path.join(os.fsencode(place), b"data-" + name)
    os.makedirs(folder)
    return Path(os.fsdecode(folder))


def write_documents(folder: Path, name: bytes, kind: str) -> None:
    """Write 40 documents in a folder or, of `txt`, a file for each."""
    rows = [{"text": sentence(number)} for number in range(40)]
    path = os.path.join(os.fsencode(folder), name)
    if kind == "txt":
        for number, row in enumerate(rows):
            with open(path + str(number).encode() + b".txt", "wb") as file:
                file.write(row["text"].encode())
        return
    if kind == "jsonl":
        with open(path + b".jsonl", "wb") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    elif kind == "jsonl.gz":
        with open(path + b".jsonl.gz", "wb") as file:
            file.write(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "array.json":
        with open(path + b".json", "wb") as file:
            file.write(json.dumps(rows).encode())
    elif kind == "tar":
        with tarfile.open(os.fsdecode(path + b".tar"), "w") as archive:
            for number, row in enumerate(rows):
                member = tarfile.TarInfo(os.fsdecode(name) + f"{number}.text")
                member.size = len(row["text"])
                archive.addfile(member, io.BytesIO(row["text"].encode()))
    elif kind == "csv":
        with open(path + b".csv", "wb") as file:
            file.write(("text\n" + "".join(f"{row['text']}\n" for row in rows)).encode())
    else:
        with open(path + b".parquet", "wb") as file:
            pq.write_table(pa.Table.from_pylist(rows), file)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("txt", name) for name in NAMES),
        *(("jsonl", name) for name in ("half a character", "a line break")),
        *((kind, "latin-1") for kind in ("csv", "parquet", "jsonl.gz", "array.json", "tar")),
    ],
)
def test_a_run_reads_reports_and_exports_files_of_any_name(
    tmp_path: Path, make_audit: Callable[..., Path], capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    folder = tmp_path / "corpus"
    write_documents(folder_of(folder, NAMES[name]), NAMES[name], kind)
    (tmp_path / "unseen.jsonl").write_text("".join(json.dumps({"text": sentence(n)}) + "\n" for n in range(1000, 1040)))
    corpus = {"audit": {"path": folder.name}, "unseen": {"path": "unseen.jsonl"}}
    path = make_audit(corpus=corpus, selections=[{"name": "members", "detectors": ["loss"], "alpha": 0.5}])
    here(capsys, "plan", path)
    here(capsys, "plan", path, "--json")
    here(capsys, "run", path)
    here(capsys, "run", path)
    here(capsys, "status", tmp_path / "run", "--json")
    here(capsys, "select", tmp_path / "run")
    here(capsys, "verdict", tmp_path / "run")
    for number, form in enumerate(([], ["--list"], ["--keep", "selected", "--list"], ["--huggingface"])):
        here(capsys, "export", tmp_path / "run", tmp_path / f"out{number}", *form, "--unsupported-too")
    here(capsys, "pack", tmp_path / "run", tmp_path / "a.bundle")
    here(capsys, "verify", tmp_path / "a.bundle")
    listed = [json.loads(line) for line in (tmp_path / "out1/list.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in listed}) == len(listed)
    if kind == "txt":
        copies = [
            one for _, _, names in os.walk(os.fsencode(tmp_path / "out0")) for one in names if one[-4:] == b".txt"
        ]
        assert copies
        assert all(one.startswith(NAMES[name]) for one in copies)
    page = (tmp_path / "run/report/report.html").read_bytes()
    page.decode("utf-8")
    assert b"<b>&amp;1" not in page
