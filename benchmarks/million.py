"""A whole audit of a million short documents in 200 files beside plain loops of the same scorer on the same cores.

`python -m benchmarks.million` prints one JSON line; `--documents` makes it smaller. 30% of the audited documents repeat
each word, which a small random model finds likelier, so that three selections select hundreds of thousands of them.
`seenset run` is a process of its own and is watched from outside:

`wall_vs_loops`: its seconds, from its start to its end with all that is read, checked, selected and written, over the
seconds that one plain loop a core would take for as many documents (timed on some of them before and after, its
start-up left out; its process has the settings that Python and the C library begin with). `first_receipt_s`: from its
start to the first finished shard. `driver_growth_mb`: peak resident size of the driver over its peak on a run of
`--small` documents with the same settings. `actor_growth_mb`: the largest worker process at the end over its size when
a tenth of the shards were finished; null where threads did the work. `files_a_shard`: of the run directory.
`bytes_each`: of its score files a document, of a selection's verdicts a document, and of `selected.parquet` a selected
one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.plain_loop import process
from benchmarks.small_model import WORDS, save_small_model
from pipeline.corpus.inputs import number_rows
from pipeline.plan.description import load_config
from pipeline.results.status import run_status
from pipeline.results.summary import Summary
from pipeline.run.machine import usable_cores
from pipeline.run.manifest import versions
from pipeline.run.plan import make_plan
from pipeline.stages.base import Placement
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store

FILES = 200
KNOWN = 5_000
MEMBERS = 0.3
LOOP_SHARDS = 4
WATCH_SECONDS = 0.2
NOTED = 10
"""Looks at the run until its worker processes are looked at again, which takes milliseconds."""
WORKERS = ("ShardActor", "MapWorker")
"""In the command lines of Ray's actors, which score."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="audited documents of the large run")
    parser.add_argument("--small", type=int, default=10_000, help="audited documents of the run it is compared with")
    parser.add_argument("--cluster", choices=["auto", "local", "ray"], default="auto", help="resources.cluster")
    parser.add_argument("--loops", action=argparse.BooleanOptionalAction, default=True, help="time plain loops too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_measure(Path(folder), arguments)))


def _measure(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    save_small_model(root / "model")
    large = _write_audit(root / "large", arguments.documents, arguments.cluster)
    loops = [_loops(large, root / "loops-before")] if arguments.loops else []
    run = _watched(large)
    loops += [_loops(large, root / "loops-after")] if arguments.loops else []
    # `auto` takes threads for few documents: the models that they hold make that driver larger, and its growth less
    small = _watched(_write_audit(root / "small", arguments.small, arguments.cluster))
    rate = sum(loops) / len(loops) if loops else None
    return {
        "documents": arguments.documents,
        "cluster": "ray" if run.ray else "local",
        "cores": usable_cores(),
        "seconds": round(run.seconds, 1),
        "wall_vs_loops": None if rate is None else round(run.seconds * rate / run.documents, 3),
        "loop_documents_per_s": None if rate is None else round(rate, 1),
        "first_receipt_s": round(run.first_receipt, 1),
        "select_and_report_s": round(run.seconds - run.last_receipt, 1),
        "driver_peak_mb": round(run.driver_mb, 1),
        "driver_growth_mb": round(run.driver_mb - small.driver_mb, 1),
        "small": {"documents": arguments.small, "seconds": round(small.seconds, 1), "peak_mb": round(small.driver_mb)},
        "actor_growth_mb": None if run.actor_growth is None else round(run.actor_growth, 1),
        "files_a_shard": round(run.files / run.shards, 2),
        "bytes_each": {name: round(size, 1) for name, size in run.bytes_each.items()},
        "shards": run.shards,
        "selected": run.selected,
        "versions": versions(),
    }


def _write_audit(folder: Path, documents: int, cluster: str) -> Path:
    """Write a corpus of so many audited documents, and its audit.yaml."""
    rng = random.Random(documents)
    size = -(-documents // FILES)
    for number in range(FILES):
        count = min(size, documents - number * size)
        if count > 0:
            doubled = [rng.random() < MEMBERS for _ in range(count)]
            _write_file(folder / "audit" / f"{number:03d}.parquet", f"audit-{number}", doubled, rng)
    _write_file(folder / "unseen.parquet", "unseen", [False] * KNOWN, rng)
    _write_file(folder / "seen.parquet", "seen", [True] * KNOWN, rng)
    config = {
        "run": str(folder / "run"),
        "model": {"path": str(folder.parent / "model")},
        "corpus": {
            "audit": {"path": str(folder / "audit" / "*.parquet"), "id": "id"},
            "unseen": {"path": str(folder / "unseen.parquet"), "id": "id"},
            "seen": {"path": str(folder / "seen.parquet"), "id": "id"},
        },
        "detectors": ["loss", "zlib", "min_k", "min_k_plus_plus"],
        "selections": [
            {"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.1},
            {"name": "likely", "detectors": ["min_k"], "procedure": "storey", "alpha": 0.1},
            {"name": "clean", "detectors": ["loss"], "direction": "clean", "procedure": "bh", "alpha": 0.1},
        ],
        "resources": {"cluster": cluster},
    }
    path = folder / "audit.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _write_file(path: Path, name: str, doubled: Sequence[bool], rng: random.Random) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = []
    for twice in doubled:
        words = rng.choices(WORDS, k=rng.randint(8, 14) * (1 if twice else 2))
        texts.append(" ".join(word for word in words for _ in range(2)) if twice else " ".join(words))
    pq.write_table(pa.table({"id": [f"{name}-{row}" for row in range(len(texts))], "text": texts}), path)


@dataclass(slots=True)
class _Run:
    """What was seen of a run from outside."""

    seconds: float = 0.0
    first_receipt: float = 0.0
    last_receipt: float = 0.0
    driver_mb: float = 0.0
    actors: dict[int, float] = field(default_factory=dict)  # process -> MB, the last time
    at_tenth: float | None = None  # MB of the largest actor when a tenth of the shards were finished
    ray: bool = False  # whether a cluster was started
    files: int = 0
    shards: int = 0
    documents: int = 0
    selected: dict[str, int] = field(default_factory=dict)
    bytes_each: dict[str, float] = field(default_factory=dict)

    @property
    def actor_growth(self) -> float | None:
        """MB of the largest actor, from a tenth of the shards to the last time that it was seen."""
        return None if self.at_tenth is None else max(self.actors.values()) - self.at_tenth


def _watched(config: Path) -> _Run:
    """Run the command and watch it."""
    planned = make_plan(load_config(str(config)))
    receipts = Path(planned.config.run, "receipts", "score")
    run = _Run(shards=len(planned.shards))
    began = time.perf_counter()
    command = [sys.executable, "-m", "ray_jobs.cli", "run", str(config), "--json"]
    driver = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for look in itertools.count():
        if driver.poll() is not None:
            break
        run.driver_mb = max(run.driver_mb, *map(_peak_mb, _drivers(driver)))
        done = len(os.listdir(receipts)) if receipts.exists() else 0
        if done and not run.first_receipt:
            run.first_receipt = time.perf_counter() - began
        if done < run.shards:
            run.last_receipt = time.perf_counter() - began
        if done and look % NOTED == 0:
            _note_actors(run, driver)
        if done >= run.shards / 10 and run.at_tenth is None and run.actors:
            run.at_tenth = max(run.actors.values())
        time.sleep(WATCH_SECONDS)
    run.seconds = time.perf_counter() - began
    if driver.returncode:
        raise SystemExit(f"seenset run ended with {driver.returncode}: {driver.stderr.read()}")
    status = run_status(planned.config.run)
    answers: list[Summary] = status.selections
    run.selected = {summary.name: summary.n_selected for summary in answers}
    run.documents = status.documents
    run.files = sum(len(files) for _, _, files in os.walk(planned.config.run))
    folder = Path(planned.config.run)
    run.bytes_each = {
        "scores": _bytes(folder, "scores/*") / run.documents,
        "verdicts": _bytes(folder, "selection/*/documents/*") / (run.documents * len(answers)),
        "selected": _bytes(folder, "selection/*/selected.parquet") / max(1, sum(run.selected.values())),
    }
    return run


def _bytes(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))


def _drivers(command: psutil.Popen) -> list[int]:
    """The process of a command, and its child that does the work where a cluster may be used."""
    with contextlib.suppress(psutil.Error):
        words = command.cmdline()
        return [command.pid, *(child.pid for child in command.children() if child.cmdline() == words)]
    return [command.pid]


def _peak_mb(process: int) -> float:
    """The peak of a process's resident size so far; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def _note_actors(run: _Run, driver: psutil.Popen) -> None:
    for child in driver.children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            run.ray |= "raylet" in line
            if any(name in line for name in WORKERS):
                run.actors[child.pid] = child.memory_info().rss / 2**20
        except psutil.Error:  # it has just ended
            continue


def _loops(config: Path, folder: Path) -> float:
    """Documents a second of plain loops over some shards, one loop a core, all at once."""
    cores = usable_cores()
    context = multiprocessing.get_context("spawn")
    with context.Pool(cores) as pool:
        starts = range(0, cores * (LOOP_SHARDS + 1), LOOP_SHARDS + 1)
        return sum(pool.starmap(_loop, [(config, folder, start) for start in starts], chunksize=1))


def _loop(config: Path, folder: Path, first: int) -> float:
    """Documents a second of the scorer in this process, from the first shard's end on."""
    import torch

    torch.set_num_threads(1)
    planned = make_plan(load_config(str(config)))
    (stage,) = plan_stages(planned.config)
    audited = [shard for shard in planned.shards if shard.role == "audit"]
    before, *shards = number_rows([audited[(first + i) % len(audited)] for i in range(LOOP_SHARDS + 1)])
    scorer, store = stage.make(stage, Placement()), Store(str(folder))
    process(stage, scorer, before, store)
    began = time.perf_counter()
    documents = sum(process(stage, scorer, shard, store).n_in for shard in shards)
    return documents / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
