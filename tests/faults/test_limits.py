"""Lines, records, files and shards beyond all measure cost a document or a shard, in one line, and bounded memory."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from bounded_memory import run_within
from datasets import Dataset

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import LIMITS
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from pipeline.run.manifest import reconciled_shards, write_shards
from pipeline.run.plan import make_plan
from pipeline.store.files import Store
from tests.helpers.made_up import write_columns


def planned(path: Path, **limits: Any) -> list[Shard]:
    described = {"run": "run", "model": {"path": "none"}, "corpus": {"audit": {"path": str(path)}}, "limits": limits}
    return list(make_plan(build_config(described)).shards)


def read(path: Path, **limits: Any) -> list[Document]:
    return [document for shard in planned(path, **limits) for document in read_shard(shard)]


def write_packed(path: Path, parts: list[tuple[bytes, int]]) -> None:
    """Write (bytes, times) one after the other, compressed; memory holds a part."""
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as writer:
        for part, times in parts:
            for _ in range(times):
                writer.write(part)


MEBIBYTE = b"x" * 2**20


IMPORTS = """
from test_limits import UserError, planned, read_shard
"""


def test_a_line_of_400_mebibytes_costs_its_document_and_no_memory(tmp_path: Path) -> None:
    """The plan reads past it to the first row, and so does whoever reads the shard."""
    path = tmp_path / "first.jsonl.zst"
    write_packed(path, [(b'{"text": "', 1), (MEBIBYTE, 400), (b'"}\n{"text": "one"}\n{"text": "two"}\n', 1)])
    assert path.stat().st_size < 100_000
    code = f"""
    (shard,) = planned({str(path)!r})
    for document in read_shard(shard):
        print(document.row, document.problem or document.text)
    """
    lines = run_within(700, IMPORTS, code).splitlines()
    assert lines[1:] == ["1 one", "2 two"]
    assert lines[0] == (
        "0 (<Reason.TOO_LARGE: 'too_large'>, '419,430,413 bytes, more than limits.document_bytes, which is 67,108,864')"
    )


def test_files_that_are_one_line_are_refused_with_the_figure(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_bytes(b'{"text": "' + MEBIBYTE)
    (tmp_path / "one.csv.gz").write_bytes(gzip.compress(MEBIBYTE, 1))
    with pytest.raises(UserError, match=r"its first line has more bytes than limits.document_bytes, which is 1,000"):
        planned(tmp_path / "one.jsonl", document_bytes=1000)
    with pytest.raises(UserError, match=r"its first record has more than 1,000 characters \(limits.document_bytes\)"):
        planned(tmp_path / "one.csv.gz", document_bytes=1000)


def test_more_documents_than_a_shard_may_have_fail_it_with_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl.zst"
    write_packed(path, [(b'{"text":""}\n' * 1000, 1)])
    with pytest.raises(UserError, match=r"holds more documents than limits\.shard_documents, which is 999: raise it"):
        read(path, shard_documents=999)
    assert len(read(path, shard_documents=1000)) == 1000


@pytest.mark.slow
def test_millions_of_empty_documents_take_a_bounded_part_of_the_memory(tmp_path: Path) -> None:
    """21 million of them in 22 kB, through the stage that scores: its shard fails at a million of them."""
    path = tmp_path / "many.jsonl.zst"
    write_packed(path, [(b'{"text":""}\n' * 10_000, 2100)])
    assert path.stat().st_size < 40_000
    imports = f"""
    {IMPORTS.strip()}
    from tests.helpers.recorder import Output, stage_of
    from pipeline.stages.process import readable_documents
    """
    code = f"""
    (shard,) = planned({str(path)!r})
    output = Output()
    try:
        list(readable_documents(stage_of(), shard, output))
    except UserError as error:
        print(len(output.refused), str(error).split(" holds ")[1].removesuffix(" files"))
    """
    expected = "1000000 more documents than limits.shard_documents, which is 1,000,000: raise it, or write several"
    assert run_within(1000, imports, code, 300) == expected


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_file_that_unpacks_to_more_than_it_may_fails_with_the_figure(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"packed.jsonl{suffix}"
    content = b'{"text": "a document of some words"}\n' * 1000
    path.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.compress(content))
    assert len(read(path, unpacked_bytes=len(content))) == 1000
    with pytest.raises(UserError, match=r"unpacks to more than limits.unpacked_bytes, which is 36,999$"):
        read(path, unpacked_bytes=len(content) - 1)


def write(path: Path, texts: list[str]) -> Path:
    """Write texts as files in a folder, as a saved data set, or as the kind of file that the name says."""
    if path.suffix == ".folder":
        path.mkdir()
        for number, text in enumerate(texts):
            (path / f"{number}.txt").write_text(text, newline="")
    elif path.suffix == ".saved":
        Dataset.from_dict({"text": texts}).save_to_disk(path)
    else:
        write_columns(path, {"text": texts})
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder", "saved"])
def test_a_document_that_is_too_long_is_quarantined_and_its_neighbours_are_read(tmp_path: Path, kind: str) -> None:
    long = 'a "quoted" line, and\nanother one\n' * 100
    texts = ['one, "two"\nthree', long, "four", "é" * 501, long + '"', "five"]
    documents = read(write(tmp_path / f"a.{kind}", texts), document_bytes=1000)
    assert [document.text for document in documents] == [texts[0], "", "four", "", "", "five"]
    assert [document.problem and document.problem[0] for document in documents] == [
        None, "too_large", None, "too_large", "too_large", None,
    ]  # fmt: skip


def test_a_document_as_long_as_it_may_be_is_read(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 987})
    assert len(line) == 999
    for end in ("\n", "\r\n", ""):
        (tmp_path / "a.jsonl").write_text(line + end, newline="")
        assert [document.text for document in read(tmp_path / "a.jsonl", document_bytes=999)] == ["x" * 987]
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line} \n" * 2)
    problems = [document.problem is None for document in read(tmp_path / "a.jsonl", document_bytes=999)]
    assert problems == [True, False, True, False]


def test_byte_ranges_that_begin_inside_a_long_line_lose_no_document(tmp_path: Path) -> None:
    texts = ["x" * (5000 if number % 7 == 3 else 50) for number in range(100)]
    path = write(tmp_path / "a.jsonl", texts)
    whole = replace(planned(path, document_bytes=1000)[0], stop=None)
    cuts = range(0, path.stat().st_size, 777)
    parts = [replace(whole, start=cut, stop=min(cut + 777, path.stat().st_size)) for cut in cuts]
    texts_read = [document.text for part in parts for document in read_shard(part)]
    assert texts_read == [text if len(text) < 1000 else "" for text in texts]


def bytes_read() -> int:
    """Bytes that this process has read so far, of files or of their cached pages."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_long_line_is_read_once_however_many_shards_it_spans(tmp_path: Path) -> None:
    path, size = tmp_path / "a.jsonl", 1 << 24
    with path.open("wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        file.write(b"x" * size)
        file.write(b'"}\n{"text": "behind"}\n')
    shards = planned(path, document_bytes=1000)
    assert len(shards) > 16
    start = bytes_read()
    numbered = number_rows(shards)
    counted = bytes_read()
    documents = [document for shard in numbered for document in read_shard(shard)]
    read_over = bytes_read()
    assert [(document.row, document.text) for document in documents] == [(0, "before"), (1, ""), (2, "behind")]
    reason, message = documents[1].problem or ("", "")
    assert reason == "too_large"
    assert re.fullmatch(r"at least [\d,]+ bytes, more than limits\.document_bytes, which is 1,000", message)
    assert counted - start < 1.1 * size
    assert read_over - counted < 0.2 * size
    assert len(numbered) <= 3, "byte ranges inside the line are no shards"
    store = Store(str(tmp_path))
    write_shards(store, numbered)
    assert reconciled_shards(store, shards) == tuple(numbered)
    for others in (shards[:-1], [*shards, shards[-1]], [*shards, replace(shards[-1], id="audit-9")], shards[1:]):
        assert reconciled_shards(store, others) is None
    assert reconciled_shards(store, [*shards[:-1], replace(shards[-1], stop=9)]) is None


@pytest.mark.parametrize("line", ["\n", "word\n", 'a quotation "" mark\n', "\r\n", '""'])
def test_a_long_quoted_record_costs_itself_whatever_its_lines(tmp_path: Path, line: str) -> None:
    content = 'id,text\n1,before\n2,"' + line * 100_000 + '"\n3,behind\n'
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(content.encode(), 1))
    (shard,) = planned(path, document_bytes=20_000)
    documents = list(read_shard(shard))
    assert [document.text for document in documents] == ["before", "", "behind"]
    assert [document.problem and document.problem[0] for document in documents] == [None, "too_large", None]


@pytest.mark.slow
def test_a_dictionary_of_one_long_text_is_not_written_out_for_all_rows(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * 8_000_000]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 100_000
    code = f"""
    shards = planned({str(path)!r}, document_bytes=1000)
    documents = (document for shard in shards for document in read_shard(shard))
    print(sum(document.problem[0] == "too_large" for document, _ in zip(documents, range(64))))
    """
    assert run_within(1500, IMPORTS, code) == "64"


def test_a_limit_is_in_the_fingerprint_where_it_changes_which_documents_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    (default,), (smaller,) = planned(path), planned(path, document_bytes=1000)
    (others,) = planned(path, shard_documents=9, unpacked_bytes=9)
    (written_out,) = planned(path, **LIMITS.model_dump())
    plain = shard_fingerprint({}, default)
    assert "document_bytes" not in plain
    assert shard_fingerprint({}, others) == shard_fingerprint({}, written_out) == plain
    assert shard_fingerprint({}, smaller) == {**plain, "document_bytes": 1000}
    assert "limits" not in default.to_dict()
    for shard in (default, smaller, others):
        assert Shard.from_dict(json.loads(json.dumps(shard.to_dict()))) == shard


@pytest.mark.parametrize("size", ["64MiB", "64 MiB", 67108864])
def test_sizes_are_numbers_or_have_a_unit(tmp_path: Path, size: Any) -> None:
    (shard,) = planned(write(tmp_path / "a.jsonl", ["one"]), document_bytes=size)
    assert shard.limits.document_bytes == 64 * 2**20
    assert ResourcesConfig(shard_bytes=size).shard_bytes == 64 * 2**20


@pytest.mark.parametrize("value", [0, -1, "many", "1 parsec", "1,000", "1.5.2 MB", "64 MiB, about"])
def test_a_limit_that_is_none_is_one_line(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match=r"^limits.document_bytes: "):
        planned(write(tmp_path / "a.jsonl", ["one"]), document_bytes=value)
