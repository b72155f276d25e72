"""What must hold of any bytes that are read as documents or as a configuration."""

import contextlib
import gzip
import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.corpus import CorpusConfig, LimitsConfig, SourceConfig
from pipeline.config.yaml import build, read_mapping
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.inputs import find_inputs, number_rows, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError

LIMITS = LimitsConfig(document_bytes=300, shard_documents=200, unpacked_bytes=100_000)
REASONS = {"not_text", "empty", "undecodable", "too_large"}


def check_documents(documents: list[Document]) -> None:
    """Each has a text that can be scored or a reason, and an id that can be written."""
    for document in documents:
        document.doc_id.encode()
        if document.problem is None:
            assert document.text.strip()
            assert len(document.text.encode()) <= LIMITS.document_bytes
        else:
            assert document.text == ""
            assert document.problem[0] in REASONS
            document.problem[1].encode("utf-8", "surrogatepass")
        assert document.group is None or document.group.encode() is not None


def read_file(path: Path) -> tuple[list[Document], list[Shard]]:
    """All documents of a file, as a run plans and reads them.

    Raises:
        UserError: one line says why not.
    """
    source = SourceConfig(path=str(path), text="text", id="id" if b'"id"' in path.read_bytes()[:100] else None)
    corpus = CorpusConfig(audit=source)
    inputs = find_inputs(corpus, LIMITS)
    resources = ResourcesConfig(shard_bytes=64, shard_documents=7)
    shards = number_rows(plan_shards(corpus, inputs, resources, limits=LIMITS))
    with contextlib.suppress(UserError):
        for entry in inputs:
            measure_extent(entry)
    return [document for shard in shards for document in read_shard(shard)], shards


def one_line(work: Callable[[], object]) -> None:
    """Do it, or fail with an error that a user can read; whoever prints it escapes what is in names."""
    message = "none"
    try:
        work()
    except UserError as error:
        message = str(error)
    assert message


def read_kind(path: Path, data: bytes, check: Callable[[list[Document], list[Shard]], None] = lambda *_: None) -> None:
    """Documents for which all holds, and what is checked beside, or one line."""
    path.write_bytes(data)

    def read() -> None:
        documents, shards = read_file(path)
        check_documents(documents)
        check(documents, shards)

    one_line(read)


def read_jsonl(data: bytes, folder: Path) -> None:
    """However a file is cut, its documents are the same, and none is lost."""

    def check(documents: list[Document], shards: list[Shard]) -> None:
        assert documents == list(read_shard(replace(shards[0], start=0, stop=len(data))))
        assert len(documents) == len([line for line in data.split(b"\n") if line.strip()])

    read_kind(folder / "a.jsonl", data, check)


def read_csv(data: bytes, folder: Path) -> None:
    """Rows are numbered without a gap."""

    def check(documents: list[Document], _: list[Shard]) -> None:
        assert [document.row for document in documents] == list(range(len(documents)))

    read_kind(folder / "a.csv", data, check)


@cache
def parquet_file() -> bytes:
    """A file of two row groups, with and without a dictionary."""
    file = io.BytesIO()
    table = pa.table({"text": ["one", None, "two words", "one", "x" * 400, "é"], "other": range(6)})
    pq.write_table(table, file, row_group_size=3, compression="none", use_dictionary=["other"], write_statistics=False)
    return file.getvalue()


def read_parquet(data: bytes, folder: Path) -> None:
    """A file whose pages are damaged is one line."""
    whole = parquet_file()
    pages = len(whole) - 8 - len(parquet_footer())
    damage = data[: pages - 4]
    read_kind(folder / "a.parquet", whole[:4] + damage + whole[4 + len(damage) :])


def parquet_footer() -> bytes:
    """Of that file, without its length."""
    whole = parquet_file()
    return whole[-8 - int.from_bytes(whole[-8:-4], "little") : -8]


def read_footer(data: bytes, folder: Path) -> None:
    """A file whose footer is damaged is one line."""
    pages = parquet_file()[: -8 - len(parquet_footer())]
    read_kind(folder / "a.parquet", pages + data + len(data).to_bytes(4, "little") + b"PAR1")


def read_txt(data: bytes, folder: Path) -> None:
    """A file is a document."""

    def check(documents: list[Document], _: list[Shard]) -> None:
        assert len(documents) == 1

    read_kind(folder / "a.txt", data, check)


def read_packed(data: bytes, folder: Path) -> None:
    """As a compressed file, and compressed: the same documents as those of the plain file."""
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        path = folder / f"a.jsonl{suffix}"
        read_kind(path, data)
        path.write_bytes(pack(data))
        (folder / "a.jsonl").write_bytes(data)

        def compare(path: Path = path) -> None:
            documents, _ = read_file(path)
            plain, _ = read_file(folder / "a.jsonl")
            assert [(d.row, d.text, d.problem) for d in documents] == [(d.row, d.text, d.problem) for d in plain]

        one_line(compare)


def read_yaml(data: bytes, folder: Path) -> None:
    """A configuration, or one line."""
    (folder / "audit.yaml").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        one_line(lambda: build(AuditConfig, read_mapping(str(folder / "audit.yaml"), AuditConfig)))


def read_override(data: bytes, folder: Path) -> None:
    """A value of `--set`, or one line."""
    text = data.decode("utf-8", "replace")
    described = {"run": "run", "model": {"path": "m"}, "corpus": {"audit": {"path": "a"}}}
    one_line(lambda: build(AuditConfig, described, [text]))


READERS: dict[str, Callable[[bytes, Path], None]] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
    "footer": read_footer,
    "txt": read_txt,
    "packed": read_packed,
    "yaml": read_yaml,
    "override": read_override,
}
"""By kind: bytes and a folder of its own -> nothing; AssertionError or any error but UserError is a finding."""
