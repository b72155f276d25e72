"""A shard from the midst of a large row group is read as fast as one of small row groups, and reads the same rows."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bounded_memory import run_within

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, SourceConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from tests.helpers.made_up import sentence


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


def test_a_file_of_3000_row_groups_is_read_in_any_order_in_little_memory(tmp_path: Path) -> None:
    """Its footer is parsed once, and not once for each reader: 3,000 readers took 17 GB and four minutes."""
    path = write(tmp_path / "a.parquet", 3_000, 1)
    imports = """
    import random
    from pipeline.config.audit import ResourcesConfig
    from pipeline.config.corpus import CorpusConfig
    from pipeline.corpus.documents import read_shard
    from pipeline.corpus.inputs import find_inputs, plan_shards
    """
    code = f"""
    corpus = CorpusConfig(audit={{"path": {str(path)!r}, "id": "id"}})
    shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_documents=1))
    random.Random(0).shuffle(shards)
    print(len(shards), len({{document.doc_id for shard in shards for document in read_shard(shard)}}))
    """
    assert run_within(300, imports, code, seconds=120) == "3000 3000"


@pytest.mark.parametrize("page", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_a_page_that_is_not_as_its_checksum_says_is_damaged(tmp_path: Path, page: str, dictionary: bool) -> None:
    texts = [sentence(number) for number in range(400)]
    table = pa.table({"id": [str(number) for number in range(400)], "text": texts})
    settings = {"compression": "none", "use_dictionary": dictionary, "data_page_version": page}
    for checksums in (True, False):
        path = tmp_path / f"{checksums}.parquet"
        pq.write_table(table, path, write_page_checksum=checksums, row_group_size=100, **settings)
        (_, shard, *_) = of_rows(path, 100)
        assert [text for _, _, text in rows_of(shard)] == texts[100:200]
        data = path.read_bytes()
        assert data.count(b"Text 150 ") == 1
        path.write_bytes(data.replace(b"Text 150 ", b"Text 151 "))
        others = [one for one in of_rows(path, 100) if one.start != 100]
        assert [text for one in others for _, _, text in rows_of(one)] == texts[:100] + texts[200:]
        if checksums:
            with pytest.raises(
                UserError,
                match=r"True\.parquet is damaged after row 100: could not verify page integrity, CRC checksum",
            ):
                rows_of(shard)
        else:
            assert rows_of(shard)[50][2].startswith("Text 151 "), "nothing in the file says otherwise"
