"""Audits that run in this process, and what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from pipeline.audit.description import load_config
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from ray_jobs.audit import Outcome, run_audit
from ray_jobs.progress import Reporter


def run(path: Path, *overrides: str, **arguments: Any) -> Outcome:
    """Run the audit of a YAML file."""
    return run_audit(load_config(str(path), overrides), Reporter(Console(), quiet=True), **arguments)


def rows(folder: Path, stage: str = "score") -> dict[str, dict[str, Any]]:
    """What the finished shards of a stage wrote, by document, none of which may stand there twice."""
    found: dict[str, dict[str, Any]] = {}
    for receipt in read_receipts(Store(str(folder)), stage):
        for row in pq.read_table(folder / receipt.data).to_pylist():
            assert row["doc_id"] not in found
            found[row["doc_id"]] = row
    return found
