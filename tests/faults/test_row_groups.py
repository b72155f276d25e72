"""A shard from the midst of a large row group is read as fast as one of small row groups, and reads the same rows."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up import sentence

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, SourceConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError


def shards_of(path: Path, **resources: int) -> list[Shard]:
    corpus = CorpusConfig(audit=SourceConfig(path=str(path), id="id"))
    return plan_shards(corpus, find_inputs(corpus), ResourcesConfig(**resources))


def of_rows(path: Path, rows: int) -> list[Shard]:
    return shards_of(path, shard_bytes=1 << 30, shard_documents=rows)


def write(path: Path, rows: int, in_a_group: int) -> Path:
    texts = [sentence(i) for i in range(500)]
    columns = {"id": [f"d{i}" for i in range(rows)], "text": [f"{texts[i % 500]} {i}" for i in range(rows)]}
    pq.write_table(pa.table(columns), path, row_group_size=in_a_group)
    return path


def rows_of(shard: Shard) -> list[tuple[int, str, str]]:
    return [(document.row, document.doc_id, document.text) for document in read_shard(shard)]


def seconds(shards: Sequence[Shard]) -> float:
    began = time.process_time()
    for shard in shards:
        assert sum(1 for _ in read_shard(shard)) > 0
    return time.process_time() - began


@pytest.mark.slow
def test_one_row_group_of_300_000_rows_reads_as_fast_as_small_ones(tmp_path: Path) -> None:
    one = shards_of(write(tmp_path / "one.parquet", 300_000, 300_000))
    small = shards_of(write(tmp_path / "small.parquet", 300_000, 5_000))
    assert len(one) > 30
    times = [(seconds(one), seconds(small)) for _ in range(3)]
    assert min(of_one for of_one, _ in times) <= 1.2 * min(of_small for _, of_small in times)


@pytest.mark.parametrize("in_a_group", [9_000, 2_500, 700])
def test_shards_read_their_rows_in_whatever_order_and_however_far_they_are_read(
    tmp_path: Path, in_a_group: int
) -> None:
    path = write(tmp_path / "a.parquet", 9_000, in_a_group)
    shards = of_rows(path, 1_111)
    (whole_file,) = of_rows(path, 9_000)
    whole = rows_of(whole_file)
    assert [row for row, _, _ in whole] == list(range(9_000))
    drawn = random.Random(in_a_group)
    for _ in range(3):
        for shard in drawn.sample(shards, len(shards)):
            assert shard.stop is not None
            part = read_shard(shard)
            first = [next(part).row for _ in range(drawn.randrange(100))] if drawn.random() < 0.5 else []
            assert first == list(range(shard.start, shard.start + len(first)))
            if drawn.random() < 0.5:
                part.close()
            assert rows_of(shard) == whole[shard.start : shard.stop]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 4_000, 4_000)
    shards = of_rows(path, 1_000)
    assert rows_of(shards[0])[0][1] == "d0"
    other = pa.table({"id": [f"e{i}" for i in range(4_000)], "text": [sentence(i % 500) for i in range(4_000)]})
    pq.write_table(other, path)
    assert [identity for _, identity, _ in rows_of(shards[1])] == [f"e{i}" for i in range(1_000, 2_000)]


def test_a_file_that_breaks_off_is_named_each_time_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 4_000, 4_000)
    shards = of_rows(path, 1_000)
    data = bytearray(path.read_bytes())
    data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(UserError, match=r"a\.parquet is damaged"):
            rows_of(shards[3])
