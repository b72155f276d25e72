"""Audits that run in this process, and what they leave."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from benchmarks.plain_loop import process
from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.plan.description import load_config
from pipeline.run.plan import Plan, make_plan
from pipeline.run.reconcile import reconcile
from pipeline.stages.base import Placement
from pipeline.stages.process import filed_rows
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts, withdraw_receipt, write_filed, write_receipt
from pipeline.trial.config import Point, TrialConfig
from pipeline.trial.trial import TrialOutcome, carry_out
from ray_jobs.audit import RunResult, run_audit, run_plan
from ray_jobs.progress import Reporter


def run(path: Path, *overrides: str, limit: int | None = None, **arguments: Any) -> RunResult:
    """Run the audit of a YAML file."""
    return run_plan(make_plan(load_config(str(path), overrides), limit), Reporter(Console(), quiet=True), **arguments)


def score_all(plan: Plan, store: Store, on_batch: Callable[[Shard, int, int], None] = lambda *_: None) -> None:
    """Finish all shards of all stages in this process, as a run does."""
    for stage in plan_stages(plan.config):
        worker = stage.make(stage, Placement())
        for shard in plan.shards:
            process(stage, worker, shard, store, on_batch=on_batch)


def score_run(config: AuditConfig, limit: int | None = None) -> tuple[Plan, Store]:
    """Score the documents of an audit in this process, with its manifest."""
    store = Store(config.run)
    fingerprints = {stage.name: stage.fingerprint for stage in plan_stages(config)}
    plan = reconcile(make_plan(config, limit), fingerprints, store)
    score_all(plan, store)
    return plan, store


def run_trial(
    config: TrialConfig, points: Sequence[Point], console: Console | None = None, **arguments: Any
) -> TrialOutcome:
    """Do what is not done yet of a trial."""
    reporter = Reporter(console or Console(), quiet=console is None)
    return carry_out(config, points, lambda audit: run_audit(audit, reporter), reporter.say, **arguments)


def rows(folder: Path, stage: str = "score") -> dict[str, dict[str, Any]]:
    """What the finished shards of a stage wrote, by document, none of which may stand there twice."""
    found: dict[str, dict[str, Any]] = {}
    for receipt in read_receipts(Store(str(folder)), stage):
        for row in filed_rows(Store(str(folder)), receipt).values():
            assert row["doc_id"] not in found
            found[row["doc_id"]] = row
    return found


def refile(folder: Path, change: Callable[[pa.Table, Receipt], pa.Table], role: str = "") -> None:
    """File other scores in the place of those of a finished run, of one role or of all, as scoring would."""
    store = Store(str(folder))
    for receipt in list(read_receipts(store, "score")):
        if role in ("", receipt.role):
            table = change(store.read_table(receipt.data), receipt)
            files = {**receipt.files, receipt.data: write_filed(store, receipt.data, table)}
            withdraw_receipt(store, "score", receipt.shard)
            write_receipt(store, "score", replace(receipt, files=files))


def files_in(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def written(folder: Path, *parts: str) -> dict[str, int]:
    """When each file was written, of all or of those below folders of these names."""
    files = [path for path in folder.rglob("*") if path.is_file() and (not parts or {*parts} & {*path.parts})]
    return {str(path): path.stat().st_mtime_ns for path in files}


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in a column."""
    return table.set_column(table.column_names.index(name), name, values)


def selection_digest(run: Path) -> dict[str, str]:
    """The digests of all files of the answers of a run; the history beside them has times."""
    files = sorted(p for p in (run / "selection").glob("*/**/*") if p.is_file() and p.name != "digests.json")
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
