"""The page of a run of a million documents is written in bounded time, memory and size."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.answers.selected import ScoreHistogram
from pipeline.store.external_sort import write_pieces
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts, write_receipt
from tests.helpers.clusters import output_of
from tests.helpers.report_run import amend, build_run

AUDITED, SELECTED, CALIBRATION, SHARDS = 1_000_000, 300_000, 100_000, 500
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("p_value", pa.float64()),
        *((f"score_{index}", pa.float64()) for index in range(4)),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("excerpt", pa.string()),
    ]
)
WRITING = """
import json, resource, sys, time
from pipeline.report.page import write_report
from pipeline.store.files import Store
write_report(Store(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": time.process_time(), "megabytes": peak}))
"""


def pieces(selected: int, piece: int = 20_000) -> Iterator[pa.Table]:
    """Selected documents in order, some thousand at a time."""
    generator = np.random.default_rng(0)
    words = np.array(["membership", "of", "the", "training", "data", "is", "what", "a", "model", "was", "shown"])
    for first in range(0, selected, piece):
        rows = np.arange(first, min(first + piece, selected))
        texts = words[generator.integers(0, len(words), (len(rows), 34))]
        columns = {
            "doc_id": [generator.bytes(16).hex() for _ in rows],
            "p_value": (1 + rows // 30) / (CALIBRATION + 1),
            **{f"score_{index}": generator.normal(size=len(rows)) for index in range(4)},
            "source": [f"/data/corpus/part-{row % 50}.parquet" for row in rows],
            "row": rows,
            "excerpt": [" ".join(text)[:200] for text in texts],
        }
        yield pa.table(columns, schema=SCHEMA)


def measured(folder: Path, audited: int, selected: int, calibration: int, shards: int) -> tuple[Any, Store]:
    """Processor seconds and peak memory of a process that writes the page of a run of any size; the run."""
    store = build_run(folder)
    receipt = next(receipt for receipt in read_receipts(store, "score") if receipt.role == "audit")
    for index in range(1, shards):
        write_receipt(store, "score", replace(receipt, shard=f"audit-{index:06d}"))
    write_pieces(store, "selection/members/selected.parquet", SCHEMA, pieces(selected))
    rank = np.arange(1, calibration + 2)
    count = np.random.default_rng(1).multinomial(audited, np.full(len(rank), 1 / len(rank)))
    store.write_table("selection/members/ranks.parquet", pa.table({"rank": rank, "count": count}))
    edges = np.linspace(-8, 8, 4097).tolist()
    roles = {"audit": [audited // 4096] * 4096, "unseen": [calibration // 4096 + 1] * 4096}
    store.write_json("selection/members/scores.json", ScoreHistogram(column="a", edges=edges, roles=roles).plain())
    amend(store, "members", n_audit=audited, n_selected=selected, n_calibration=calibration)
    return json.loads(output_of(WRITING, store.url, seconds=300)), store


@pytest.mark.slow
def test_the_page_of_a_million_documents_takes_a_minute_and_300_megabytes_more(
    tmp_path: Path,
) -> None:
    small, _ = measured(tmp_path / "small", 1_000, 300, 100, 2)
    large, store = measured(tmp_path / "large", AUDITED, SELECTED, CALIBRATION, SHARDS)
    assert large["seconds"] < 60, large
    assert large["megabytes"] - small["megabytes"] < 300, (small, large)
    page = store.read("report/report.html")
    assert len(page) < 5_000_000
    assert b"The top 20,000 of 300,000" in page
