"""Copying holds pieces of a file and never all of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.config.corpus import LimitsConfig
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.shard import Shard
from pipeline.export.request import RowMarks

SIZE = 160
"""MB of each file."""

PROGRAM = """
import io, json, os, resource, sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.shard import Shard
from pipeline.export.request import RowMarks

form, path, size, making = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "make"
rows, length = size * 10, 100_000
rng = np.random.default_rng(0)
texts = [rng.bytes(length // 2).hex() for _ in range(8)]  # so that no packing makes it small
path = path / {"parquet": "a.parquet", "saved": "saved"}.get(form, "a.jsonl")
if not making:
    pass
elif form in ("jsonl", "one line"):
    with path.open("w") as file:
        for i in range(rows):
            file.write(texts[i % 8] + ("\\n" if form == "jsonl" or i == rows - 1 else ""))
elif form == "parquet":
    schema = pa.schema([("text", pa.string()), ("blob", pa.binary())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for _ in range(4):
            half = [text[: length // 2] for text in (texts * (rows // 32 + 1))[: rows // 4]]
            writer.write_table(pa.table([half, [text.encode() for text in half]], schema=schema))
else:
    path.mkdir()
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, rows, 100):
            writer.write_table(pa.table([[texts[i % 8] for i in range(start, start + 100)]], schema=schema))
    (path / "state.json").write_text(json.dumps(
        {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "a"}
    ))
    (path / "dataset_info.json").write_text("{}")
if making:
    sys.exit()
values = {"start": 0, "stop": None, "first_row": 0, "max_rows": None, "content": "", "text": "text"}
kind = {"one line": "jsonl", "saved": "dataset"}.get(form, form)
shard = Shard(id="a", role="audit", name="a", path=str(path), format=kind, id_column=None, group_column=None, **values)
marks = RowMarks([np.arange(1, rows, 2)], False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = ExportSource((shard,), "a")
format_named(kind).export.copy(source, marks, lambda name: open(os.devnull, "wb"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_line_is_copied_in_pieces(tmp_path: Path) -> None:
    """Python's own memory; that of libraries is measured in a process by itself."""
    record = b'"' + (b"x" * 65_533 + b'""\n') * 384 + b'"'
    for form, head, line in (("jsonl", b"", b"x" * (24 << 20)), ("csv", b"text\n", record)):
        path = tmp_path / f"a.{form}"
        path.write_bytes(head + line + b"\nlast\n")
        values = {"start": 0, "stop": None, "first_row": 0, "max_rows": None, "content": "", "text": "text"}
        shard = Shard(
            id="a", role="audit", name="a", path=str(path), format=form, id_column=None, group_column=None, **values
        )
        shard = replace(shard, limits=LimitsConfig(document_bytes=1 << 20))
        written: list[int] = []
        sink = SimpleNamespace(write=lambda data, written=written: written.append(len(data)))
        tracemalloc.start()
        marks = RowMarks([np.array([1])], False)
        format_named(form).export.copy(ExportSource((shard,), "a"), marks, lambda _, sink=sink: nullcontext(sink))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(written) == len(head + line) + 1, form
        assert peak < 12 << 20, form


@pytest.mark.slow
@pytest.mark.parametrize(("form", "most"), [("jsonl", 16), ("one line", 16), ("parquet", 250), ("saved", 250)])
@pytest.mark.parametrize("size", [SIZE, 6 * SIZE])
def test_memory_does_not_grow_with_a_file(tmp_path: Path, form: str, most: int, size: int) -> None:
    command = [sys.executable, "-c", PROGRAM, form, str(tmp_path), str(size)]
    subprocess.run([*command, "make"], check=True)
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}  # as the command has it
    done = subprocess.run([*command, "copy"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < most
