"""A cluster of two nodes, one of which is four times slower: the whole run beside the ideal.

`python -m benchmarks.stragglers` prints one JSON line. A detector waits a stated time for every document, another one
on the slow node, so that both nodes of this machine are as fast as they are meant to be. `vs_ideal` is the median over
the rounds of the time from the first receipt to the last, divided by the time in which both nodes together do as much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.small_model import save_small_model
from pipeline.plan.description import build_config
from pipeline.run.manifest import versions
from pipeline.run.plan import make_plan
from pipeline.run.reconcile import reconcile
from pipeline.stages.events import Failure
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import map_shards

SLOWER = 4
VARIABLE = "SECONDS_A_DOCUMENT"
DETECTOR = f'''
"""A detector that takes as long as its node is meant to."""

import os
import time

import torch
from seenset import FORWARD, detector


@detector(needs={{FORWARD: ["log_prob"]}})
def patient(evidence):
    time.sleep(len(evidence.texts) * float(os.environ["{VARIABLE}"]))
    return torch.zeros(len(evidence.texts), dtype=torch.float64)
'''


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--together", type=int, default=10, help="documents of a shard")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a document on the fast node")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_small_model(root / "model")
        (root / "patient.py").write_text(DETECTOR)
        line = '{{"text": "the words of document number {number:06d}"}}\n'
        with (root / "audit.jsonl").open("w") as file:
            file.writelines(line.format(number=number) for number in range(arguments.documents))
        shard_bytes = arguments.together * len(line.format(number=0))
        for number in range(arguments.rounds):
            ratios.append(_vs_ideal(root, f"run-{number}", shard_bytes, arguments.seconds))
    print(
        json.dumps(
            {
                "vs_ideal": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "slower": SLOWER,
                "documents": arguments.documents,
                "together": arguments.together,
                "versions": versions(),
            }
        )
    )


def _vs_ideal(root: Path, run: str, shard_bytes: int, seconds: float) -> float:
    import ray
    from ray.cluster_utils import Cluster

    config = build_config(
        {
            "run": str(root / run),
            "model": {"path": str(root / "model")},
            "import": [str(root / "patient.py")],
            "corpus": {"audit": {"path": str(root / "audit.jsonl")}},
            "detectors": ["patient"],
            "resources": {"cluster": "ray", "actors": 2, "shard_bytes": shard_bytes},
        }
    )
    head = {"num_cpus": 1, "include_dashboard": False, "env_vars": {VARIABLE: str(seconds)}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, env_vars={VARIABLE: str(seconds * SLOWER)})
    try:
        os.environ["RAY_ADDRESS"] = cluster.address
        store = Store(config.run)
        (stage,) = plan_stages(config)
        shards = reconcile(make_plan(config), {stage.name: stage.fingerprint}, store).shards
        began = documents = 0.0
        for event in map_shards(stage, config.resources, shards, store, "benchmark"):
            assert not isinstance(event, Failure), event
            if isinstance(event, Receipt):
                began = began or time.perf_counter()
                documents += event.n_in
                last = event.n_in
        return (time.perf_counter() - began) / ((documents - last) * seconds / (1 + 1 / SLOWER))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
