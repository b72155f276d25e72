"""An input that changed since it was read, or whose metadata lie, is named; it never gives an answer without a word."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.plain_loop import process
from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs, make_stamp, plan_shards
from pipeline.errors import UserError
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from pipeline.stages import worker
from pipeline.stages.base import Placement
from pipeline.stages.process import file_rows
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts
from tests.helpers.finished import run
from tests.helpers.made_up import sentence, write_audit

SAMPLED = ["loss", {"samia": {"draws": 2}}]


def edit(path: Path, number: int) -> bytes:
    """Change one word of a row at equal size; what it was before."""
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    row = json.loads(lines[number])
    row["text"] = row["text"][:-3] + row["text"][-3:].upper()
    lines[number] = json.dumps(row).encode()
    changed = b"\n".join(lines)
    assert len(changed) == len(whole) != 0
    assert changed != whole
    path.write_bytes(changed)
    return whole


def long_audit(folder: Path, model: Path, **settings: Any) -> Path:
    """An audit of one large file, so that an edit in its middle shows at neither end."""
    texts = [sentence(i, 2000) for i in range(20)]
    return write_audit(folder, model, texts, max_tokens=16, resources={"shard_bytes": 60_000}, **settings)


def test_a_deleted_manifest_hides_no_change_of_an_input(
    tmp_path: Path, tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = long_audit(tmp_path, tiny_model_folder)
    run(path)
    (tmp_path / "run/manifest.json").unlink()
    edit(tmp_path / "audit.jsonl", 10)
    with pytest.raises(UserError, match=r"audit\.jsonl"):
        run(path)
    assert "manifest.json is missing: it is written again from the configuration" in caplog.text


def test_an_input_that_was_edited_in_its_middle_at_equal_size_is_seen_on_resume(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    path = long_audit(tmp_path, tiny_model_folder)
    run(path)
    source, receipts = tmp_path / "audit.jsonl", tmp_path / "run/receipts/score"
    assert source.stat().st_size > 3 * (1 << 16)
    before = {p.name: p.read_bytes() for p in receipts.iterdir()}
    (receipts / "audit-000000.json").unlink()
    whole = edit(source, 10)
    for _ in range(2):  # refused once, it is refused again
        with pytest.raises(UserError, match=r"audit\.jsonl changed since stage score read it \(shard audit-00000"):
            run(path)
    source.write_bytes(whole)
    run(path)
    assert {name for name in before if before[name] != (receipts / name).read_bytes()} == {"audit-000000.json"}


def test_an_input_that_was_edited_between_two_stages_is_seen(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = load_config(str(write_audit(tmp_path, tiny_model_folder, detectors=SAMPLED)), [])
    shard, *_ = make_plan(config).shards
    sampling, scoring = plan_stages(config)
    store = Store(config.run)
    process(sampling, sampling.make(sampling, Placement()), shard, store)
    edit(tmp_path / "audit.jsonl", 1)
    with pytest.raises(UserError, match=r"audit\.jsonl changed since stage sample/.* read it"):
        process(scoring, scoring.make(scoring, Placement()), shard, store)
    assert not list(read_receipts(store, "score"))


@pytest.mark.slow
def test_an_input_that_is_edited_while_a_run_reads_it_gives_no_answer(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = long_audit(tmp_path, tiny_model_folder)
    finished: list[str] = []

    def edited(stage: Any, shard: Any, *arguments: Any) -> Receipt:
        receipt = file_rows(stage, shard, *arguments)
        finished.append(shard.id)
        if len(finished) == 1:
            edit(tmp_path / "audit.jsonl", 1)
        return receipt

    monkeypatch.setattr(worker, "file_rows", edited)
    with pytest.raises(UserError, match=r"audit\.jsonl changed since stage score read it \(shard audit-000000\)"):
        run(path)
    assert not (tmp_path / "run/selection").exists()


def footer_counts(path: Path) -> list[int]:
    """Places in a file of one row group of 5,000 rows where its footer says 5,000, as Thrift writes an i64."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [match.start() for match in re.finditer(re.escape(b"\x16" + zigzag(5000)), data)]
    return [place + 1 for place in places if place >= start]


def zigzag(count: int) -> bytes:
    return bytes([2 * count & 0x7F | 0x80, 2 * count >> 7])  # of 64 to 8,191


FILE, COLUMN, GROUP = range(3)
"""The places, in their order."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A Parquet file of 5,000 rows and one column."""
    path = tmp_path / "audit.parquet"
    pq.write_table(pa.table({"text": [f"number {i} of many" for i in range(5000)]}), path, write_statistics=False)
    assert len(footer_counts(path)) == 3
    return path


def say(path: Path, rows: int, places: tuple[int, ...]) -> None:
    data = bytearray(path.read_bytes())
    for place in [footer_counts(path)[number] for number in places]:
        data[place : place + 2] = zigzag(rows)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("count", "places"), [(2500, (FILE,)), (2500, (GROUP,)), (2500, (FILE, GROUP)), (8000, (FILE,)), (8000, (GROUP,))]
)
def test_a_footer_that_contradicts_itself_is_refused_by_name(table: Path, count: int, places: tuple[int, ...]) -> None:
    say(table, count, places)
    with pytest.raises(UserError, match=r"audit\.parquet is damaged: its footer says \d+ rows") as refused:
        shards_of(table)
    assert str(count) in str(refused.value)


def shards_of(path: Path) -> list[Any]:
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path)}})
    return plan_shards(corpus, find_inputs(corpus), ResourcesConfig())


@pytest.mark.parametrize("places", [(GROUP,), (FILE, GROUP), (FILE, COLUMN, GROUP)])
def test_a_shard_that_gives_fewer_rows_than_were_planned_fails_by_name(table: Path, places: tuple[int, ...]) -> None:
    *_, last = shards_of(table)
    say(table, 2500, places)
    with pytest.raises(UserError, match=r"audit\.parquet is damaged"):
        list(read_shard(last))


@pytest.mark.parametrize("places", [(FILE, GROUP), (FILE, COLUMN, GROUP)])
def test_rows_that_a_footer_has_too_many_of_fail_by_name(table: Path, places: tuple[int, ...]) -> None:
    say(table, 8000, places)
    shards = shards_of(table)
    assert shards[-1].stop == 8000
    read = 0
    for shard in shards:
        if shard.stop <= 5000:
            read += len(list(read_shard(shard)))
            continue
        with pytest.raises(UserError, match=r"audit\.parquet is damaged"):
            list(read_shard(shard))
    assert read > 0


def test_a_file_that_became_shorter_than_it_was_planned_fails_by_name(tmp_path: Path, tiny_model_folder: Path) -> None:
    *_, last = make_plan(load_config(str(write_audit(tmp_path, tiny_model_folder)), [])).shards
    path = Path(last.path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"unseen\.jsonl is damaged after row \d+: it ends at byte \d+"):
        list(read_shard(last))


def test_the_stamp_of_a_link_is_that_of_the_file_which_is_read(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text('{"text": "a"}\n')
    link.symlink_to(real)
    corpus = CorpusConfig.model_validate({"audit": {"path": str(link)}})
    (before,) = find_inputs(corpus)
    real.write_text('{"text": "b"}\n')
    assert make_stamp(before) != before.stamp
