"""An export from an object store into one: the rows, what is refused, and one in the place of another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_runs import finished_run
from made_up import sentence
from object_store import object_store

from pipeline.errors import UserError
from pipeline.export.export import write_export
from pipeline.export.request import ExportRequest
from pipeline.store.files import Store

pytestmark = pytest.mark.slow


def test_an_export_of_objects_is_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        lines = [json.dumps({"text": sentence(i), "n": i}).encode() + b"\n" for i in range(30)]
        with fsspec.open("s3://bucket/data/x/a.jsonl.gz", "wb") as file:
            file.write(gzip.compress(b"".join(lines)))
        with fsspec.open("s3://bucket/data/y/a.parquet", "wb") as file:
            pq.write_table(pa.table({"text": [sentence(i) for i in range(40, 60)], "n": list(range(20))}), file)
        source = {"path": ["s3://bucket/data/x/*", "s3://bucket/data/y/a.parquet"]}
        run = finished_run(tmp_path, source, run="s3://bucket/runs/one")
        assert write_export(ExportRequest(run, "s3://bucket/out")).files == ["x/a.jsonl.gz", "y/a.parquet"]
        store = Store("s3://bucket/out")
        assert gzip.decompress(store.read("x/a.jsonl.gz")) == b"".join(line for i, line in enumerate(lines) if i % 3)
        assert store.read_table("y/a.parquet")["n"].to_pylist() == [i for i in range(20) if i % 3]
        for out in ("s3a://bucket//data/y/", "s3://bucket/runs/one/out", "s3://bucket/data/x/../y/a.parquet"):
            with pytest.raises(UserError, match=r"input of the run|lie in one another"):
                write_export(ExportRequest(run, out))
        write_export(ExportRequest(run, "s3://bucket/out", form="list"))
        names = sorted(path.rsplit("/", 1)[-1] for path in store.fs.find(store.root, refresh=True))
        assert names == [".seenset-export.json", "README.md", "list.jsonl"]
