"""Copying holds pieces of a file and never all of it."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_runs import whole_shard

from pipeline.config.corpus import LimitsConfig
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.export.verdicts import RowMarks

MIB = 1 << 20


def copy(path: Path, form: str, rows: np.ndarray) -> int:
    """Copy a file without some rows; the bytes that were written."""
    shard = whole_shard(path, form)
    source = ExportSource((replace(shard, limits=LimitsConfig(document_bytes=MIB)),), "a")
    written: list[int] = []
    sink = SimpleNamespace(write=lambda data: written.append(len(data)), flush=lambda: None, closed=False)
    format_named(form).export.copy(source, RowMarks([rows], False), lambda _: nullcontext(sink))
    return sum(written)


def test_a_line_is_copied_in_pieces(tmp_path: Path) -> None:
    """Python's own memory."""
    record = b'"' + (b"x" * 65_533 + b'""\n') * 384 + b'"'
    for form, head, line in (("jsonl", b"", b"x" * (24 * MIB)), ("csv", b"text\n", record)):
        path = tmp_path / f"a.{form}"
        path.write_bytes(head + line + b"\nlast\n")
        tracemalloc.start()
        written = copy(path, form, np.array([1]))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert written == len(head + line) + 1, form
        assert peak < 12 * MIB, form


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_a_table_is_copied_in_pieces(tmp_path: Path, form: str) -> None:
    """Arrow's memory, of a file of 256 MiB."""
    pieces, rows = 32, 128
    texts = [np.random.default_rng(0).bytes(MIB // 32).hex() for _ in range(rows)]
    table, path = pa.table({"text": texts}), tmp_path / "a"
    if form == "parquet":
        with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
            for _ in range(pieces):
                writer.write_table(table)
    else:
        path.mkdir()
        files = [{"filename": "data-00000-of-00001.arrow"}]
        (path / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "a"}))
        (path / "dataset_info.json").write_text("{}")
        with pa.OSFile(str(path / files[0]["filename"]), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            for _ in range(pieces):
                out.write_table(table)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        written = copy(path, form, np.arange(1, pieces * rows, 2))
    finally:
        pa.set_memory_pool(before)
    assert written > 100 * MIB
    assert 0 < pool.max_memory() < 48 * MIB
