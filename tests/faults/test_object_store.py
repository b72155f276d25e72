"""A run on an object store: few requests, side by side, and the same answers through delays, failures, two drivers."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from empty_receipts import receipt_of

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, SourceConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from pipeline.store.files import Store, to_json
from pipeline.store.receipts import COMPACTED, compact_receipts, read_receipts, receipt_name
from tests.helpers.export_runs import export, finished_run, refusal
from tests.helpers.finished import run
from tests.helpers.made_up import MakeAudit, sentence
from tests.helpers.object_store import BUCKET, ObjectStore, object_store
from tests.helpers.two_nodes import on_two_nodes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


def test_a_repeated_run_reads_score_files_once_and_receipts_from_their_compaction(
    make_audit: MakeAudit, store: ObjectStore
) -> None:
    path = corpus_in_the_store(make_audit(), "/*.jsonl")
    first = run(path)
    shards = first.status.shards
    assert shards >= 12
    store.forget()
    assert run(path).selections == first.selections
    read = [
        key
        for kind, key in store.requests
        if kind in ("GET", "HEAD") and key.startswith(("run/scores", "run/receipts"))
    ]
    assert len(read) == len(set(read)) == shards  # each score file once; the receipts come from their compaction
    assert store.at_once > 1


@pytest.mark.slow
def test_1_100_receipts_are_read_from_3_compactions_and_single_ones_side_by_side(store: ObjectStore) -> None:
    folder = Store(f"s3://{BUCKET}/run")
    receipts = [receipt_of(f"audit-{number:06d}") for number in range(1_100)]
    fsspec.filesystem("s3").pipe(
        {f"{BUCKET}/run/{receipt_name('score', r.shard)}": to_json(r.to_dict()) for r in receipts}
    )
    store.forget()
    assert list(read_receipts(folder, "score")) == receipts
    assert store.kinds()["GET"] == 1_100
    assert store.at_once > 4
    compact_receipts(folder, "score")
    folder.begin()
    store.forget()
    assert list(read_receipts(folder, "score")) == receipts
    assert store.kinds() == {"LIST": 3, "GET": -(-1_100 // COMPACTED)}


def selected_of(folder: str) -> list[dict[str, object]]:
    fs, path = fsspec.core.url_to_fs(folder)
    with fs.open(f"{path}/selection/members/selected.parquet", "rb") as file:
        return pq.read_table(file).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_drivers_on_a_slow_failing_store_give_the_answer_of_one_on_a_disk(
    make_audit: MakeAudit, tmp_path: Path, store: ObjectStore
) -> None:
    selections = [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.9}]
    path = make_audit(24, selections=selections)
    here = run(path)
    remote = tmp_path / "remote.yaml"
    remote.write_text(path.read_text().replace(str(tmp_path / "run"), f"s3://{BUCKET}/run"))
    store.delay, store.failures = 0.15, 0.1
    command = [sys.executable, "-m", "ray_jobs.cli", "run", str(remote)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    drivers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(driver.communicate(timeout=500)[1], driver.returncode) for driver in drivers]
    codes = sorted(code for _, code in ends)
    assert codes in ([0, 0], [0, 75]), ends
    there = run(remote)
    assert there.status.documents == here.status.documents
    assert [summary.plain() for summary in there.selections] == [summary.plain() for summary in here.selections]
    assert selected_of(f"s3://{BUCKET}/run") == selected_of(str(tmp_path / "run"))
    assert any(kind == "LIST" for kind, _ in store.requests)


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_an_export_of_objects_is_objects(tmp_path: Path) -> None:
    lines = [json.dumps({"text": sentence(i), "n": i}).encode() + b"\n" for i in range(30)]
    fsspec.filesystem("s3").pipe_file("bucket/data/x/a.jsonl.gz", gzip.compress(b"".join(lines)))
    with fsspec.open("s3://bucket/data/y/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": [sentence(i) for i in range(40, 60)], "n": list(range(20))}), file)
    source = {"path": ["s3://bucket/data/x/*", "s3://bucket/data/y/a.parquet"]}
    finished = finished_run(tmp_path, source, run="s3://bucket/runs/one")
    assert export(finished, "s3://bucket/out").files == ["x/a.jsonl.gz", "y/a.parquet"]
    out = Store("s3://bucket/out")
    assert gzip.decompress(out.read("x/a.jsonl.gz")) == b"".join(line for i, line in enumerate(lines) if i % 3)
    assert out.read_table("y/a.parquet")["n"].to_pylist() == [i for i in range(20) if i % 3]
    for place in ("s3a://bucket//data/y/", "s3://bucket/runs/one/out", "s3://bucket/data/x/../y/a.parquet"):
        assert re.search("input of the run|overlap: name", refusal(finished, place))
    export(finished, "s3://bucket/out", form="list")
    names = sorted(path.rsplit("/", 1)[-1] for path in out.fs.find(out.root, refresh=True))
    assert names == [".seenset-export.json", "README.md", "list.jsonl"]


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_in_an_object_store_is_read_as_a_glob_of_its_files_is(store: ObjectStore, end: str) -> None:
    rows = [{"id": f"d{i}", "text": sentence(i)} for i in range(50)]
    table, lines = io.BytesIO(), "".join(json.dumps(row) + "\n" for row in rows).encode()
    pq.write_table(pa.Table.from_pylist(rows), table)
    files = {
        "a.parquet": table.getvalue(),
        "b.jsonl": lines,
        "deeper/c.jsonl": lines,
        ".d.jsonl": lines,
        "README": b"x",
    }
    fsspec.filesystem("s3").pipe({f"{BUCKET}/data/{name}": data for name, data in files.items()})
    store.forget()
    folder = inputs_of(f"s3://{BUCKET}/data{end}")
    assert [entry.name for entry in folder] == [
        f"s3://{BUCKET}/data/{n}" for n in ("a.parquet", "b.jsonl", "deeper/c.jsonl")
    ]
    assert store.kinds()["GET"] + store.kinds()["HEAD"] <= 4 * len(folder) + 2
    assert folder[:2] == inputs_of(f"s3://{BUCKET}/data/*.parquet", f"s3://{BUCKET}/data/[a-z]*.jsonl")
    assert [len(list(read_shard(shard))) for shard in shards_of(folder)] == [50, 50, 50]


def test_a_folder_of_text_files_in_an_object_store_is_one_input(store: ObjectStore) -> None:
    texts = {f"{BUCKET}/texts/{name}.txt": sentence(i).encode() for i, name in enumerate(("a", "b", "deeper/c"))}
    fsspec.filesystem("s3").pipe(texts)
    (entry,) = inputs_of(f"s3://{BUCKET}/texts")
    assert entry.files == ("a.txt", "b.txt", "deeper/c.txt")
    assert [document.text for shard in shards_of([entry]) for document in read_shard(shard)] == [
        data.decode() for data in texts.values()
    ]


def inputs_of(*paths: str) -> list[InputFile]:
    return find_inputs(CorpusConfig(audit=SourceConfig(path=list(paths), id=None)))


def shards_of(inputs: list[InputFile]) -> list[Shard]:
    corpus = CorpusConfig(audit=SourceConfig(path=[entry.path for entry in inputs]))
    return plan_shards(corpus, inputs, ResourcesConfig(shard_bytes=1 << 20))


def corpus_in_the_store(path: Path, files: str = "") -> Path:
    """The audit of another one's documents, cut into 12 files a role, and its run, all of it in the store."""
    config = yaml.safe_load(path.read_text())
    config["run"] = f"s3://{BUCKET}/run"
    for role in ("audit", "unseen"):
        lines = Path(config["corpus"][role]["path"]).read_text().splitlines(keepends=True)
        parts = {f"{BUCKET}/{role}/{n:02d}.jsonl": "".join(lines[n::12]).encode() for n in range(12)}
        fsspec.filesystem("s3").pipe(parts)
        config["corpus"][role]["path"] = f"s3://{BUCKET}/{role}{files}" if files else [f"s3://{name}" for name in parts]
    remote = path.with_name("remote.yaml")
    remote.write_text(yaml.safe_dump(config))
    return remote


def test_a_command_and_two_nodes_reach_a_store_by_its_address(make_audit: MakeAudit, store: ObjectStore) -> None:
    path = corpus_in_the_store(make_audit(), "/*.jsonl")
    here = run(path)
    overrides = [f"run=s3://{BUCKET}/nodes", "resources.cluster=ray"]
    command = ["ray_jobs.cli", "run", str(path), *(word for one in overrides for word in ("--set", one))]
    nodes = {"num_cpus": 1}
    ((code, _, errors),) = on_two_nodes(nodes, nodes, command, RAY_AUTH_MODE="disabled", **store.environment)
    assert code == 0, errors
    assert here.status.shards >= 12
    digests = [
        [receipt.files[receipt.data].sha256 for receipt in read_receipts(Store(f"s3://{BUCKET}/{folder}"), "score")]
        for folder in ("run", "nodes")
    ]
    assert sorted(digests[0]) == sorted(digests[1])


@pytest.mark.parametrize("files", [pytest.param("", marks=pytest.mark.slow), "/"], ids=["files", "a folder"])
def test_an_input_in_the_store_that_was_changed_after_a_run_is_seen_by_its_listing(
    make_audit: MakeAudit, store: ObjectStore, files: str
) -> None:
    path = corpus_in_the_store(make_audit(), files)
    first = make_plan(load_config(str(path)))
    run(path)
    changed = f"{BUCKET}/audit/01.jsonl"
    rows = [json.loads(line) for line in fsspec.filesystem("s3").cat_file(changed).splitlines()]
    lines = "".join(json.dumps({**row, "text": row["text"].upper()}) + "\n" for row in rows)
    fsspec.filesystem("s3").pipe_file(changed, lines.encode())
    after = make_plan(load_config(str(path))).inputs
    assert [entry.name for entry, before in zip(after, first.inputs, strict=True) if entry != before] == [
        f"s3://{changed}"
    ]
    with pytest.raises(UserError, match=r"01\.jsonl"):
        run(path)
