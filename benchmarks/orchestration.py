"""The cost of Ray: the scoring job beside the same scorer in a plain loop, and the driver's memory.

`python -m benchmarks.orchestration [--model smollm2]` prints one JSON line. Both sides use one thread on the same
shards of short made-up documents, in alternating rounds of one run; start-up is left out on both sides. `ray_vs_loop`
is the median ratio of documents a second. Memory is the driver's growth in resident size from a job over a tenth of the
documents to one over all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.plain_loop import process
from benchmarks.small_model import WORDS, save_small_model, smollm2_file
from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.plan.description import build_config
from pipeline.run.manifest import versions
from pipeline.run.plan import make_plan
from pipeline.run.reconcile import reconcile
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Failure
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import map_shards


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["random", "smollm2"], default="random", help="small and random, or SmolLM2")
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if arguments.model == "smollm2":
            (root / "model.gguf").symlink_to(smollm2_file())
        else:
            save_small_model(root / "model")
        _write_documents(root / "few.jsonl", arguments.documents // 10)
        _write_documents(root / "many.jsonl", arguments.documents)
        _job(root, "few", "warm-up")
        process = psutil.Process()
        _job(root, "few", "few")
        before = process.memory_info().rss
        ratios, rays, loops = [], [], []
        growth = 0.0
        for number in range(arguments.rounds):
            loops.append(_loop(root, f"loop-{number}"))
            start = process.memory_info().rss
            rays.append(_job(root, "many", f"ray-{number}"))
            if number == 0:
                growth = (process.memory_info().rss - min(start, before)) / 2**20
            ratios.append(rays[-1] / loops[-1])
    result = {
        "ray_vs_loop": round(statistics.median(ratios), 3),
        "ray_documents_per_s": round(statistics.median(rays), 1),
        "loop_documents_per_s": round(statistics.median(loops), 1),
        "driver_growth_mb": round(growth, 1),
        "documents": arguments.documents,
        "rounds": arguments.rounds,
        "versions": versions(),
    }
    print(json.dumps(result))


def _write_documents(path: Path, count: int) -> None:
    rng = random.Random(count)
    with open(path, "w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(5, 30)))}) + "\n")


def _config(root: Path, corpus: str, run: str) -> AuditConfig:
    (model,) = root.glob("model*")
    return build_config(
        {
            "run": str(root / run),
            "model": {"path": str(model)},
            "corpus": {"audit": {"path": str(root / f"{corpus}.jsonl")}},
            "detectors": ["loss", "zlib", "min_k", "min_k_plus_plus"],
            "resources": {"actors": 1, "shard_bytes": 1 << (17 if model.is_dir() else 12)},
        }
    )


def _planned(config: AuditConfig, store: Store) -> tuple[Stage, tuple[Shard, ...]]:
    (stage,) = plan_stages(config)
    return stage, reconcile(make_plan(config), {stage.name: stage.fingerprint}, store).shards


def _job(root: Path, corpus: str, run: str) -> float:
    """Documents a second of the Ray job, from the first receipt on."""
    config = _config(root, corpus, run)
    store = Store(config.run)
    stage, shards = _planned(config, store)
    began = None
    documents = 0
    for result in map_shards(stage, config.resources, shards, store, "benchmark"):
        assert not isinstance(result, Failure), result
        if not isinstance(result, Receipt):  # of workers that begin and get on
            continue
        if began is None:
            began = time.perf_counter()
        else:
            documents += result.n_in
    assert began is not None
    return documents / (time.perf_counter() - began)


def _loop(root: Path, run: str) -> float:
    """Documents a second of the same scorer in this process, from the first shard's end on."""
    config = _config(root, "many", run)
    store = Store(config.run)
    stage, shards = _planned(config, store)
    scorer = stage.make(stage, Placement())
    process(stage, scorer, shards[0], store)
    began = time.perf_counter()
    documents = sum(process(stage, scorer, shard, store).n_in for shard in shards[1:])
    return documents / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
