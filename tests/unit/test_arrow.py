"""Arrow IPC files of both formats are read by record batches, and exported as files."""

import copy
import io
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest
import yaml

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.formats.arrow import ARROW
from pipeline.corpus.formats.base import ExportSource, kept_rows
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.export.request import RowMarks
from pipeline.plan.starter import audit_starter
from tests.helpers.commands import user_error

TEXTS = [f"Document {number} tells of the number {number * number} at some length." for number in range(60)]
KINDS = [(kind, codec) for kind in ("stream", "file") for codec in (None, "lz4", "zstd")]


def draw_table(texts: Sequence[str | None]) -> pa.Table:
    ids = pa.array([f"d{number}" for number in range(len(texts))])
    topics = pa.array([["a", "b"][number % 2] for number in range(len(texts))]).dictionary_encode()
    return pa.table({"id": ids, "text": pa.array(texts, pa.string()), "topic": topics}).replace_schema_metadata(
        {"a": "b"}
    )


def packed(table: pa.Table, kind: str = "stream", codec: str | None = None, rows: int = 7) -> bytes:
    sink, begin = io.BytesIO(), pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with begin(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def shards_of(path: str, documents: int = 10, **source: Any) -> list[Shard]:
    corpus = CorpusConfig.model_validate({"audit": {"path": path, "id": "id", **source}})
    return plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_documents=documents))


def read_answer_tables(shards: Sequence[Shard]) -> list[Document]:
    return [document for shard in shards for document in read_shard(shard)]


@pytest.mark.parametrize(("kind", "codec"), KINDS)
@pytest.mark.parametrize("group", [None, "topic"])
def test_every_row_is_in_one_shard_wherever_batches_begin(
    tmp_path: Path, kind: str, codec: str | None, group: str | None
) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(packed(draw_table(TEXTS) if group else draw_table(TEXTS).drop_columns("topic"), kind, codec))
    shards = shards_of(str(path), group=group)
    assert [(shard.start, shard.stop) for shard in shards] == [(start, start + 10) for start in range(0, 60, 10)]
    documents = read_answer_tables(list(reversed(shards)))
    assert sorted((document.row, document.doc_id, document.text) for document in documents) == [
        (number, f"d{number}", text) for number, text in enumerate(TEXTS)
    ]
    assert {document.group for document in documents} == ({"a", "b"} if group else {None})


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_texts_have_any_type_of_arrow(tmp_path: Path, kind: str) -> None:
    texts = pa.array(TEXTS)
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(pa.type_for_alias(kind))
    (tmp_path / "a.arrow").write_bytes(packed(pa.table({"id": draw_table(TEXTS)["id"], "text": column})))
    assert [document.text for document in read_answer_tables(shards_of(str(tmp_path / "a.arrow")))] == TEXTS


def test_a_bad_row_is_one_quarantined_document(tmp_path: Path) -> None:
    data = packed(draw_table([None, "  ", "first of two", "second of two"]))
    (tmp_path / "a.arrow").write_bytes(data.replace(b"first", b"fi\xffst"))
    problems = [document.problem for document in read_answer_tables(shards_of(str(tmp_path / "a.arrow")))]
    assert [problem[0] if problem else None for problem in problems] == ["not_text", "empty", "undecodable", None]


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_a_truncated_file_is_an_error_in_one_line_and_never_a_shorter_file(
    tmp_path: Path, kind: str, codec: str | None
) -> None:
    data, path = packed(draw_table(TEXTS), kind, codec), tmp_path / "a.arrow"
    for size in {*range(1, len(data), 97), *range(len(data) - 24, len(data))}:
        path.write_bytes(data[:size])
        assert "a.arrow" in user_error(shards_of, str(path))


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_damaged_bytes_never_end_the_process(tmp_path: Path, kind: str, codec: str | None) -> None:
    data, path, rng = packed(draw_table(TEXTS), kind, codec), tmp_path / "a.arrow", random.Random(0)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        with suppress(UserError):
            read_answer_tables(shards_of(str(path), group="topic"))


def test_a_batch_that_unpacks_to_all_of_memory_is_refused_unread(tmp_path: Path) -> None:
    data = bytearray(packed(draw_table(["x" * 100_000]), codec="zstd"))
    place = data.rindex(b"\x28\xb5\x2f\xfd", 0, data.index(b"\xff\xff\xff\xff\0\0\0\0", 400)) - 8
    data[place : place + 8] = (1 << 45).to_bytes(8, "little")
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.arrow: a record batch takes 35,184,37\d,\d{3},\d{3} bytes"):
        shards_of(str(tmp_path / "a.arrow"))


def test_rows_of_a_dictionary_of_long_texts_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int8()), pa.array(["y" * (4 << 20)]))
    (tmp_path / "a.arrow").write_bytes(packed(pa.table({"text": column}), rows=3000))
    corpus = CorpusConfig.model_validate({"audit": {"path": str(tmp_path / "a.arrow")}})
    (shard,) = plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_bytes=1 << 30))
    before = pa.total_allocated_bytes()
    documents = read_shard(shard)
    assert len(next(documents).text) == 4 << 20
    assert pa.total_allocated_bytes() - before < 200 << 20
    documents.close()


def test_files_that_are_not_what_is_configured_or_was_planned_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(2 * packed(draw_table(TEXTS)))
    assert "more follows the end of the stream" in user_error(shards_of, str(path))
    path.write_bytes(packed(draw_table(TEXTS)))
    error = user_error(shards_of, str(path), text="txt")
    assert re.search(r"no column 'txt' in .*a\.arrow; did you mean 'text'", error)
    shards = shards_of(str(path))
    path.write_bytes(packed(draw_table(TEXTS[:55])))
    assert re.search(r"a\.arrow is damaged.*5 of them", user_error(read_answer_tables, shards))
    path.write_bytes(packed(pa.table({"id": ["a"], "text": [1]})))
    assert re.search(r"column 'text' in .*a\.arrow holds int64, not text", user_error(shards_of, str(path)))
    feather.write_feather(draw_table(TEXTS).drop_columns("topic"), str(tmp_path / "b.arrow"), version=1)
    assert "Feather of version 1" in user_error(shards_of, str(tmp_path / "b.arrow"))


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_a_file_of_an_object_store_is_one_shard_whose_rows_are_estimated(kind: str, codec: str | None) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/arrow/a.arrow", packed(draw_table(TEXTS * 10), kind, codec, rows=5))
    corpus = CorpusConfig.model_validate({"audit": {"path": "memory://arrow/a.arrow", "id": "id"}})
    (entry,) = find_inputs(corpus)
    extent = measure_extent(entry)
    assert not extent.exact
    assert 450 < extent.rows < 750
    shards = plan_shards(corpus, [entry], ResourcesConfig(shard_documents=10))
    assert [document.text for shard in shards for document in read_shard(shard)] == TEXTS * 10
    assert len(shards) == 1


def exported(path: Path, marks: RowMarks) -> pa.Table:
    """The copy of a file, which is the same at every export."""
    source, copies = ExportSource(tuple(shards_of(str(path))), "a.arrow"), []
    for _ in range(2):
        sink, some = io.BytesIO(), copy.deepcopy(marks)
        ARROW.export.copy(source, some, lambda _, sink=sink: nullcontext(sink))
        copies.append(sink.getvalue())
    assert copies[0] == copies[1]
    return pa.ipc.open_file(copies[0]).read_all()


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_an_export_has_the_kept_rows_in_the_file_format(tmp_path: Path, kind: str, codec: str | None) -> None:
    table, path = draw_table(TEXTS), tmp_path / "a.arrow"
    path.write_bytes(packed(table, kind, codec))
    read = exported(path, RowMarks([np.array([0, 1, 20, 59])], False))
    kept = [number for number in range(60) if number not in (0, 1, 20, 59)]
    assert read.schema.equals(table.schema, check_metadata=True)
    assert read.to_pylist() == table.take(kept).to_pylist()
    (shard, *_) = shards_of(str(path))
    assert ARROW.export.schema(shard).equals(table.schema)
    tables = kept_rows(ARROW.export.tables(shard), RowMarks([np.array(kept)], True))
    assert pa.concat_tables(tables).to_pylist() == read.to_pylist()


def test_dictionaries_that_a_stream_replaces_become_one_that_grows(tmp_path: Path) -> None:
    """A stream may replace a dictionary with every batch, which a file may not."""
    topics = [["b", "a", None], ["c"], ["a", "c", "d"]]
    nested = pa.struct([("kind", pa.dictionary(pa.int32(), pa.string()))])
    schema = pa.schema(
        [("id", pa.string()), ("text", pa.string()), ("t", pa.dictionary(pa.int8(), pa.string())), ("s", nested)]
    )
    sink, rows = io.BytesIO(), list[dict[str, Any]]()
    with pa.ipc.new_stream(sink, schema) as writer:
        for words in topics:
            some = [{"text": f"text of {word}", "t": word, "s": {"kind": word}} for word in words]
            some = [{"id": f"d{len(rows) + number}", **row} for number, row in enumerate(some)]
            writer.write_table(pa.Table.from_pylist(some, schema))
            rows += some
    path = tmp_path / "a.arrow"
    path.write_bytes(sink.getvalue())
    with mock.patch("pipeline.corpus.formats.columns.AT_ONCE", 1):  # a batch of the copy for every batch of the file
        read = exported(path, RowMarks([np.array([0])], False))
    assert read.to_pylist() == rows[1:]
    assert read.schema == schema
    assert read["t"].num_chunks == 3


def test_init_takes_arrow_files_by_their_names(tmp_path: Path) -> None:
    for name, kind in (("audit-0.arrow", "stream"), ("audit-1.arrow", "stream"), ("unseen.arrow", "file")):
        (tmp_path / name).write_bytes(packed(draw_table(TEXTS), kind))
    corpus = yaml.safe_load(audit_starter(str(tmp_path)).text)["corpus"]
    assert corpus["audit"] == {"path": "audit-*.arrow", "text": "text", "id": "id"}
    assert corpus["unseen"] == {"path": "unseen.arrow", "text": "text", "id": "id"}
