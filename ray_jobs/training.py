"""One training on the cluster: Ray Train's trainer, its workers, and the steps that they tell of."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.training.steps import Ranks
from pipeline.training.train import TrainingStep, train

PROGRESS_SECONDS = 1.0
MAX_FAILURES = 3
"""Times that the workers of one adapter may be lost before the job gives up."""


def progress_file(folder: str) -> Path:
    """Where the training of a folder says how far it is."""
    return Path(folder).with_name(f".{Path(folder).name}.progress")


def fit(said: dict[str, Any], workers: int, cpus: int, storage: str) -> tuple[str, str] | None:
    """Run one training with Ray Train; what is wrong with it, "user" or "lost" and a line, or None."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # so that relative paths of models mean what they mean in other jobs
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    resources = {"CPU": float(cpus)}
    if said["gpus"]:
        resources["GPU"] = float(said["gpus"])
    trainer = TorchTrainer(
        cast(Any, _loop),
        train_loop_config=said,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=bool(said["gpus"]), resources_per_worker=resources),
        run_config=RunConfig(
            name="train", storage_path=storage, failure_config=FailureConfig(max_failures=MAX_FAILURES)
        ),
    )
    try:
        problem: str | None = cast(Any, trainer.fit()).return_value
    except TrainingFailedError as error:
        causes = list(getattr(error, "worker_failures", {}).values())
        lines = [line.strip() for line in str(causes[0] if causes else error).splitlines() if line.strip()]
        return "lost", f"its workers failed more than {MAX_FAILURES} times, at last: {lines[-1] if lines else error!r}"
    return None if problem is None else ("user", problem)


def _loop(said: dict[str, Any]) -> str | None:
    """One worker: the plain training loop. Returns what the user can mend, on which a new attempt would be lost."""
    if Path(said["folder"]).exists():
        return None  # the attempt before this one was lost after its last step
    os.environ["DS_ACCELERATOR"] = "cuda" if said["gpus"] else "cpu"
    ranks = Ranks.joined()
    config = FinetuneConfig(**said["config"])
    model = ModelConfig(**said["model"])
    problem = None
    # Where transformers finds these settings, it takes the weights apart while it reads them.
    partitioned = _partition_at_load(said["zero"])
    try:
        opened = open_model(model, gpus=0 if partitioned is not None else said["gpus"])
        texts = pq.read_table(said["texts"], columns=["text"])["text"].to_pylist()
    except UserError as error:
        problem = str(error)
    problem = ranks.first(problem)
    if problem is not None:
        return problem
    if opened.max_tokens is not None:  # what scoring will not read either
        config = config.model_copy(update={"max_tokens": min(config.max_tokens, opened.max_tokens)})
    try:
        train(
            opened.model,
            opened.tokenizer,
            texts,
            config,
            said["folder"],
            _Progress(said["folder"]) if ranks.rank == 0 else None,
            ranks=ranks,
            zero=said["zero"],
            base=said["base"],
            checkpoint_seconds=said["checkpoint_seconds"],
        )
    except UserError as error:
        return str(error)
    return None


def _partition_at_load(zero: dict[str, Any] | None) -> object | None:
    if zero is None or zero["zero_optimization"]["stage"] != 3:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig({**zero, "train_micro_batch_size_per_gpu": 1})


class _Progress:
    """Writes about once a second how far the training is, where the driver reads it."""

    def __init__(self, folder: str) -> None:
        self.path = progress_file(folder)
        self.last = 0.0
        self.first: TrainingStep | None = None

    def __call__(self, step: TrainingStep) -> None:
        """Called after every step."""
        now = time.monotonic()
        self.first = self.first or step
        if now - self.last < PROGRESS_SECONDS:
            return
        self.last = now
        part = self.path.with_name(f"{self.path.name}.part")
        rate = (step.tokens - self.first.tokens) / max(step.seconds - self.first.seconds, 1e-9)
        part.write_text(json.dumps({"step": asdict(step), "tokens_per_s": rate}), encoding="utf-8")
        part.replace(self.path)
