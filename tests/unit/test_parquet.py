"""Readers of Parquet files hold the memory of those that wait, however many files were read."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.corpus.formats import parquet

FILES = 40
TEXT_BYTES = 200_000  # a file


def test_a_file_that_was_read_in_part_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_ROWS", 10)
    texts = [random.Random(row).randbytes(500).hex() for row in range(TEXT_BYTES // 1000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "0.parquet", compression="none")
    for number in range(1, FILES):
        (tmp_path / f"{number}.parquet").write_bytes((tmp_path / "0.parquet").read_bytes())
    held = []
    for number in range(FILES):
        batches = parquet.parquet_batches(str(tmp_path / f"{number}.parquet"), ["text"], 0, len(texts), ["text"])
        row, _ = next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert row == 0
        held.append(pa.total_allocated_bytes())
    assert held[-1] <= held[2 * parquet.IDLE] + TEXT_BYTES, "only the readers that wait hold memory"
