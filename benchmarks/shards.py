"""Many shards: the driver's time and memory to plan, to dispatch and to resume them.

`python -m benchmarks.shards` prints one JSON line. Every step runs in a process of its own, once with few shards and
once with many; `growth_mb` is the difference of the two drivers' peaks of memory. A shard is one line of a file. The
actors of the dispatch do no work and file nothing, so it costs what the driver and Ray Data cost. The receipts that a
resumed run reads are prepared beforehand and name one file of rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.plain_loop import process
from benchmarks.small_model import save_small_model
from pipeline.corpus.shard import Shard
from pipeline.plan.description import build_config
from pipeline.run.manifest import versions
from pipeline.run.plan import Plan, make_plan, pending
from pipeline.run.reconcile import reconcile
from pipeline.run.repair import withdraw_damaged
from pipeline.stages.base import Placement
from pipeline.stages.events import Failure
from pipeline.stages.process import read_rows
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import FileRecord, Receipt, write_receipt
from ray_jobs import actors
from ray_jobs.cluster import connect
from ray_jobs.select import shard_mapper

LINE = '{{"text": "words of document {number:09d}"}}\n'
STEPS = ("plan", "dispatch", "resume")


class IdleActor(actors.ShardActor):
    """Reports a receipt of every shard at once."""

    def _finish(self, shards: Sequence[Shard], speculative: bool = False) -> Iterator[Receipt | Failure]:
        for shard in shards:
            yield Receipt(shard.id, shard.role, 0, 0, 0, "none", None, {}, {}, {"none": FileRecord(0, 0, "")}, "")

    def _finish_missing(self, tail: int, tails: int) -> Iterator[Receipt | Failure]:
        return iter(())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=200_000)
    parser.add_argument("--few", type=int, default=200)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step is not None:
        print(json.dumps(_measured(arguments.step, arguments.folder)))
        return
    result: dict[str, object] = {"shards": arguments.shards, "few": arguments.few}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_small_model(root / "model")
        for count in (arguments.few, arguments.shards):
            _prepare(root, count)
        for step in STEPS:
            few, many = (_separate(step, root / str(count)) for count in (arguments.few, arguments.shards))
            result[step] = {
                "seconds": round(many["seconds"], 1),
                "few_seconds": round(few["seconds"], 1),
                "growth_mb": round(many["peak_mb"] - few["peak_mb"]),
            }
    print(json.dumps({**result, "versions": versions()}))


def _prepare(root: Path, count: int) -> None:
    """A corpus of so many shards, and a run directory with a receipt of each."""
    (root / str(count)).mkdir()
    with (root / str(count) / "audit.jsonl").open("w") as file:
        file.writelines(LINE.format(number=number) for number in range(count))
    plan = _plan(root / str(count))
    store = Store(plan.config.run)
    (stage,) = plan_stages(plan.config)
    plan = reconcile(plan, {stage.name: stage.fingerprint}, store)
    first = process(stage, stage.make(stage, Placement()), plan.shards[0], store)
    assert len(read_rows(stage, plan.shards[0], store)) == 1
    for shard in plan.shards[1:]:
        write_receipt(store, stage.name, replace(first, shard=shard.id, fingerprint=stage.fingerprint_for(shard)))


def _plan(folder: Path) -> Plan:
    config = {
        "run": str(folder / "run"),
        "model": {"path": str(folder.parent / "model")},
        "corpus": {"audit": {"path": str(folder / "audit.jsonl")}},
        "detectors": ["loss"],
        "resources": {"actors": 2, "shard_bytes": len(LINE.format(number=0))},
    }
    return make_plan(build_config(config))


def _separate(step: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.shards", "--step", step, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _measured(step: str, folder: Path) -> dict[str, float]:
    """Seconds of a step, and the peak of this process's memory in MB."""
    began = time.perf_counter()
    plan = _plan(folder)
    (stage,) = plan_stages(plan.config)
    if step == "dispatch":
        actors.ShardActor = IdleActor  # type: ignore[misc]
        began = time.perf_counter()
        store = Store(str(folder / "idle"))
        events = actors.map_shards(stage, plan.config.resources, plan.shards, store, "benchmark")
        assert sum(isinstance(event, Receipt) for event in events) == len(plan.shards)
    if step == "resume":
        store = Store(plan.config.run)
        connect()  # as a run on a cluster has, whatever the number of its shards
        began = time.perf_counter()
        fold = shard_mapper(store, True)
        plan = reconcile(plan, {stage.name: stage.fingerprint}, store, each=fold)
        assert not list(withdraw_damaged([stage], plan.shards, store, fold))
        assert not pending(plan, stage.name, store)
    seconds = time.perf_counter() - began
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()  # unlike ru_maxrss not of its parent
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return {"seconds": seconds, "peak_mb": peak / 2**10}


if __name__ == "__main__":
    main()
