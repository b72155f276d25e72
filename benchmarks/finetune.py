"""The cost of Ray Train beside the plain loop, and of FSD in scoring. Prints one JSON line.

`python -m benchmarks.finetune [--model smollm2]`. Both sides train the same texts with one thread (or one GPU), in
alternating rounds of one run, each round with a seed of its own so that nothing is taken from an earlier one. Tokens
a second are counted from the end of the first step on: start-up is left out on both sides. `ray_vs_loop` is the
median of the rounds' ratios. Then the same texts are scored by `min_k` alone and by `min_k` with `fsd` of it, over
one loaded model; `fsd_vs_plain` is the median ratio of the seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.plain_loop import process
from benchmarks.small_model import WORDS, fast_type, save_small_model, smollm2_file
from pipeline.config.models import ModelConfig
from pipeline.corpus.shard import Shard
from pipeline.models.devices import CPU, Device, gpus_in_sight
from pipeline.models.load import open_model
from pipeline.plan.description import build_config
from pipeline.run.manifest import versions
from pipeline.run.plan import make_plan
from pipeline.stages.base import Placement
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.training.train import FinetuneConfig, TrainingOptions, TrainingStep, train
from ray_jobs.finetune import AdapterJob, train_adapters


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or the path of a model")
    parser.add_argument("--texts", type=int, default=0, help="by default 400 for tiny, 24 for others")
    parser.add_argument("--epochs", type=int, default=0, help="by default 10 for tiny, 1 for others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: what dtype auto takes")
    arguments = parser.parse_args()
    tiny = arguments.model == "tiny"
    texts = _texts(arguments.texts or (400 if tiny else 24), 40 if tiny else 100)
    gpus = int(torch.cuda.is_available())
    torch.set_num_threads(1)
    ratios, rays, loops = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        dtype = arguments.dtype or fast_type("cuda" if gpus else "cpu")
        model = _model(arguments.model, root, dtype)
        for seed in range(arguments.rounds):
            epochs = arguments.epochs or (10 if tiny else 1)
            batch_size = 8 if tiny else 2
            config = FinetuneConfig(epochs=epochs, batch_size=batch_size, dtype=dtype, seed=seed)
            loops.append(_loop(model, texts, config, root / f"loop-{seed}", gpus))
            rays.append(_job(model, texts, config, Store(str(root / "run")), gpus))
            ratios.append(rays[-1] / loops[-1])
        scored = _scoring(model, texts, root, gpus, arguments.rounds)
    result = {
        "ray_vs_loop": round(statistics.median(ratios), 3),
        "ray_tokens_per_s": round(statistics.median(rays), 1),
        "loop_tokens_per_s": round(statistics.median(loops), 1),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "fsd_vs_plain": round(statistics.median(scored), 3),
        "fsd_ratios": [round(ratio, 3) for ratio in scored],
        "model": arguments.model,
        "dtype": dtype,
        "texts": len(texts),
        "rounds": arguments.rounds,
        "versions": versions(),
    }
    print(json.dumps(result))


def _texts(count: int, words: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(words // 2, words))) for _ in range(count)]


def _model(name: str, root: Path, dtype: str) -> ModelConfig:
    if name == "tiny":
        save_small_model(root / "model")
        return ModelConfig(path=str(root / "model"), dtype=dtype)
    if name == "smollm2":
        return ModelConfig(path=str(smollm2_file()), dtype=dtype)
    return ModelConfig(path=name, dtype=dtype)


def _loop(model: ModelConfig, texts: list[str], config: FinetuneConfig, folder: Path, gpus: int) -> float:
    """Tokens a second of the plain loop in this process."""
    opened = open_model(model, gpus=gpus)
    seen: list[TrainingStep] = []
    train(opened.model, opened.tokenizer, texts, config, folder, TrainingOptions(seen.append))
    return (seen[-1].tokens - seen[0].tokens) / (seen[-1].seconds - seen[0].seconds)


def _job(model: ModelConfig, texts: list[str], config: FinetuneConfig, store: Store, gpus: int) -> float:
    """Tokens a second of the job, from the last line on its progress."""
    seen: list[str] = []
    job = AdapterJob("benchmark", f"job-{config.seed}", model, texts, config, {}, gpu=gpus > 0)
    (adapter,) = train_adapters([job], store, seen.append)
    last = re.search(r"  step (\d+)/.*  ([\d,]+) tokens/s$", seen[-1])
    assert last is not None
    assert int(last[1]) > adapter.steps // 3, "too short to measure: give more --texts"
    return float(last[2].replace(",", ""))


def _scoring(model: ModelConfig, texts: list[str], root: Path, gpus: int, rounds: int) -> list[float]:
    """Seconds of scoring with FSD over seconds without it, one ratio a round; each side has its own store."""
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = {role: {"path": str(root / "texts.jsonl")} for role in ("audit", "unseen")}
    description = {"model": model.model_dump(), "corpus": corpus}
    device = Device(gpus, *gpus_in_sight()) if gpus else CPU
    stages = {}
    shards: list[Shard] = []
    for name, detectors in (("plain", ["min_k"]), ("fsd", ["min_k", {"fsd": {"base": "min_k"}}])):
        config = build_config({"run": str(root / "scored"), "detectors": detectors, **description})
        shards = [shard for shard in make_plan(config).shards if shard.role == "audit"]
        stages[name] = plan_stages(config, {"default": "loop-0"} if name == "fsd" else None, device=device)[-1]
    scorers = {name: stage.make(stage, Placement(gpus)) for name, stage in stages.items()}
    ratios = []
    for number in range(rounds + 1):
        seconds = {}
        for name, scorer in scorers.items():
            store = Store(str(root / f"{name}-{number}"))
            Path(store.root).mkdir()
            Path(store.path("adapters")).symlink_to(root)
            began = time.perf_counter()
            for shard in shards:
                process(stages[name], scorer, shard, store)
            seconds[name] = time.perf_counter() - began
        ratios.append(seconds["fsd"] / seconds["plain"])
    return ratios[1:]  # the first is for warming up


if __name__ == "__main__":
    main()
