"""One training of an adapter: its workers, and the actor that runs trainings with Ray Train."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import ExitCode, UserError
from pipeline.models.device_errors import out_of_memory
from pipeline.models.load import open_model
from pipeline.training.steps import ProcessGroup
from pipeline.training.train import TrainingOptions, TrainingStep, train
from pipeline.training.zero import zero_stage

TEXT = "text"
"""The column of the file of texts."""

PROGRESS = "progress"
"""Concurrency group of the methods that a running training does not block."""

PROGRESS_SECONDS = 1.0
MAX_FAILURES = 3
"""Times that the workers of one adapter may be lost before the job gives up."""


@dataclass(frozen=True, slots=True)
class AdapterJob:
    """One training. The number of workers and DeepSpeed change how it runs, not what comes out."""

    name: str  # for messages
    key: str  # digest of all that decides the weights
    model: ModelConfig
    texts: Sequence[str]
    config: FinetuneConfig  # of an adapter's method
    base: Mapping[str, str]  # fingerprint_model(model)
    workers: int = 1
    gpu: bool = False  # whether each worker takes a whole GPU
    cpus: int = 1  # a worker
    zero: Mapping[str, Any] | None = None  # DeepSpeed settings


@dataclass(frozen=True, slots=True)
class AdapterProgress:
    """The progress of the training of one adapter."""

    name: str
    step: TrainingStep
    tokens_per_s: float  # of its steps so far, of this attempt

    def line(self) -> str:
        """One line for the terminal."""
        step = self.step
        return (
            f"adapter {self.name}  step {step.step}/{step.steps}  loss {step.loss:.3f}  "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )


OnProgress = Callable[[AdapterProgress], None]


@dataclass(frozen=True, slots=True)
class AdapterTraining:
    """A job and its places."""

    job: AdapterJob
    folder: str  # of the adapter, on storage that all nodes see
    scratch: str  # of this call alone: an earlier driver that only slept removes nothing of it
    checkpoint_seconds: float | None

    @property
    def texts_file(self) -> str:
        """Path of a Parquet file with a column `text`."""
        return f"{self.scratch}/texts.parquet"


class Trainer:
    """An actor that runs each training in a thread, and holds how far they are."""

    def __init__(self) -> None:
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
        os.environ["RAY_TRAIN_METRICS_ENABLED"] = "0"
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # so that relative paths of models mean what they mean in other jobs
        self._noted: dict[str, AdapterProgress] = {}

    def note(self, progress: AdapterProgress) -> None:
        """Note how far a training is."""
        self._noted[progress.name] = progress

    def progress(self) -> list[AdapterProgress]:
        """How far each training is of which that has been noted since the last call."""
        noted, self._noted = self._noted, {}
        return list(noted.values())

    def fit(self, training: AdapterTraining) -> str | None:
        """Run one training with Ray Train, which waits until the cluster has the resources of its workers.

        Returns:
            An error that the user can fix; None if the training ended well.

        Raises:
            ray.train.TrainingFailedError: its workers were lost too often.
        """
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        job = training.job
        note = partial(_note, ray.get_runtime_context().current_actor)
        trainer = TorchTrainer(
            cast(Any, _work),
            train_loop_config={"training": training, "on_progress": note},
            scaling_config=ScalingConfig(
                num_workers=job.workers,
                use_gpu=job.gpu,  # a whole one for each worker
                resources_per_worker={"CPU": job.cpus},
            ),
            run_config=RunConfig(
                name=f"train-{uuid.uuid4().hex[:8]}",  # a new one each time that Ray repeats this call
                storage_path=f"{training.scratch}/ray",
                failure_config=FailureConfig(max_failures=MAX_FAILURES),
            ),
        )
        problem: str | None = cast(Any, trainer.fit()).return_value
        return problem


def _note(trainer: Any, progress: AdapterProgress) -> None:
    trainer.note.options(concurrency_group=PROGRESS).remote(progress)


def _work(config: dict[str, Any]) -> str | None:
    return train_one(**config)


def train_one(training: AdapterTraining, on_progress: OnProgress) -> str | None:
    """One worker: the plain training loop.

    Args:
        training: what to train.
        on_progress: called about once a second by the first worker.

    Returns:
        An error that the user can fix, because a new attempt would not.
    """
    if Path(training.folder).exists():
        return None  # the attempt before this one was lost after its last step
    job, gpus = training.job, int(training.job.gpu)
    os.environ["DS_ACCELERATOR"] = "cuda" if job.gpu else "cpu"
    processes = ProcessGroup.joined()
    problem = None
    # Where transformers finds these settings, it takes the weights apart while it reads them.
    partitioned = _partition_at_load(job.zero)
    try:
        model = job.model.model_copy(update={"dtype": job.config.dtype})
        opened = open_model(model, gpus=0 if partitioned is not None else gpus)
        texts = pq.read_table(training.texts_file)[TEXT].to_pylist()
    except UserError as error:
        problem = str(error)
    except Exception as error:
        if not out_of_memory(error):
            raise
        problem = (
            f"no memory to load model {job.model.shown} for training: resources.deepspeed: zero3 spreads it over the "
            "GPUs of resources.finetune_workers"
        )
    problem = processes.first_problem(problem)
    if problem is not None:
        return problem
    config = job.config
    if opened.max_tokens is not None:  # what scoring will not read either
        config = config.model_copy(update={"max_tokens": min(config.max_tokens, opened.max_tokens)})
    try:
        train(
            opened.model,
            opened.tokenizer,
            texts,
            config,
            training.folder,
            TrainingOptions(
                _paced(job.name, on_progress) if processes.rank == 0 else None,
                processes,
                job.zero,
                job.base,
                training.checkpoint_seconds,
            ),
        )
    except UserError as error:
        if error.exit_code != ExitCode.USER_ERROR:  # a full disk, where a new attempt may find space; a lost lock
            raise
        return str(error)
    return None


def _partition_at_load(zero: Mapping[str, Any] | None) -> object | None:
    if zero is None or zero_stage(zero) != 3:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig({**zero, "train_micro_batch_size_per_gpu": 1})


def _paced(name: str, on_progress: OnProgress) -> Callable[[TrainingStep], None]:
    """What is called after every step and passes on the progress about once a second."""
    last, first = 0.0, None

    def count(step: TrainingStep) -> None:
        nonlocal last, first
        first = first or step
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            rate = (step.tokens - first.tokens) / max(step.seconds - first.seconds, 1e-9)
            on_progress(AdapterProgress(name, step, rate))

    return count
