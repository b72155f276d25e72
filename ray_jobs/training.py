"""One training on the cluster: Ray Train's trainer, its workers, and the progress that they report."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import ExitCode, UserError
from pipeline.models.device_errors import out_of_memory
from pipeline.models.load import open_model
from pipeline.models.memory import cap_memory
from pipeline.store.space import remove_quietly
from pipeline.training.steps import ProcessGroup
from pipeline.training.train import TrainingStep, train
from pipeline.training.zero import zero_stage

PROGRESS_SECONDS = 1.0
MAX_FAILURES = 3
"""Times that the workers of one adapter may be lost before the job gives up."""


def fit(settings: dict[str, Any], workers: int, cpus: int, storage: str) -> tuple[str, str] | None:
    """Run one training with Ray Train.

    Args:
        settings: of the job, as `finetune._plan` writes them.
        workers: processes that train together.
        cpus: of each worker.
        storage: folder in which Ray Train keeps its own files, in a new folder each time that this is retried.

    Returns:
        None if the training ended well. Otherwise "user" (the user can mend it) or "lost" (its workers failed too
        often), and one line that says what is wrong.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # so that relative paths of models mean what they mean in other jobs
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    resources = {"CPU": float(cpus)}
    if settings["gpus"]:
        resources["GPU"] = float(settings["gpus"])
    trainer = TorchTrainer(
        cast(Any, train_one),
        train_loop_config=settings,
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=bool(settings["gpus"]), resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=f"train-{uuid.uuid4().hex[:8]}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    try:
        problem: str | None = cast(Any, trainer.fit()).return_value
    except TrainingFailedError as error:
        causes = list(getattr(error, "worker_failures", {}).values())
        lines = [line.strip() for line in str(causes[0] if causes else error).splitlines() if line.strip()]
        return "lost", f"its workers failed more than {MAX_FAILURES} times, at last: {lines[-1] if lines else error!r}"
    return None if problem is None else ("user", problem)


def train_one(settings: dict[str, Any], on_step: Callable[[TrainingStep, float], None] | None = None) -> str | None:
    """One worker: the plain training loop.

    Args:
        settings: as those of `fit`.
        on_step: called about once a second with the last step and tokens a second; by default these are written to
            the file that the settings name.

    Returns:
        An error that the user can mend, because a new attempt would not.
    """
    if Path(settings["folder"]).exists():
        return None  # the attempt before this one was lost after its last step
    os.environ["DS_ACCELERATOR"] = "cuda" if settings["gpus"] else "cpu"
    processes = ProcessGroup.joined()
    config = FinetuneConfig(**settings["config"])
    model = ModelConfig(**settings["model"])
    problem = None
    # Where transformers finds these settings, it takes the weights apart while it reads them.
    partitioned = _partition_at_load(settings["zero"])
    try:
        cap_memory(settings["gpus"] if on_step is None else 0)
        opened = open_model(model, gpus=0 if partitioned is not None else settings["gpus"])
        texts = pq.read_table(settings["texts"], columns=["text"])["text"].to_pylist()
    except UserError as error:
        problem = str(error)
    except Exception as error:
        if not out_of_memory(error):
            raise
        problem = (
            f"no memory to load model {model.shown} for training: resources.deepspeed: zero3 spreads it over the GPUs "
            "of resources.finetune_workers"
        )
    problem = processes.first_problem(problem)
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
            settings["folder"],
            _Progress(on_step or _ProgressFile(settings["progress"])) if processes.rank == 0 else None,
            processes=processes,
            zero=settings["zero"],
            base=settings["base"],
            checkpoint_seconds=settings["checkpoint_seconds"],
        )
    except UserError as error:
        if error.exit_code != ExitCode.USER_ERROR:  # a full disk, where a new attempt may find space; a lost lock
            raise
        return str(error)
    return None


def _partition_at_load(zero: dict[str, Any] | None) -> object | None:
    if zero is None or zero_stage(zero) != 3:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig({**zero, "train_micro_batch_size_per_gpu": 1})


class _Progress:
    """Passes on the progress of the training about once a second."""

    def __init__(self, on_step: Callable[[TrainingStep, float], None]) -> None:
        self.on_step = on_step
        self.last = 0.0
        self.first: TrainingStep | None = None

    def __call__(self, step: TrainingStep) -> None:
        """Called after every step."""
        now = time.monotonic()
        self.first = self.first or step
        if now - self.last < PROGRESS_SECONDS:
            return
        self.last = now
        rate = (step.tokens - self.first.tokens) / max(step.seconds - self.first.seconds, 1e-9)
        self.on_step(step, rate)


class _ProgressFile:
    """Writes the progress of a training to the file that the driver reads."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __call__(self, step: TrainingStep, tokens_per_s: float) -> None:
        """Replace what stands there."""
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            part.write_text(json.dumps({"step": asdict(step), "tokens_per_s": tokens_per_s}), encoding="utf-8")
            part.replace(self.path)
        except OSError:  # progress is worth no failure
            remove_quietly(str(part))
