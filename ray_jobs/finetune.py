"""Train the adapters of the `fsd` detectors, each once: in this process, or with Ray Train, several at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import torch

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, as_model_config
from pipeline.config.training import FinetuneConfig
from pipeline.errors import ExitCode, IncompleteError, UserError, is_full
from pipeline.models.devices import out_of_memory
from pipeline.models.load import RECORD, open_model
from pipeline.models.unchanged import check_same_files
from pipeline.plan.stage_plan import BuiltStages
from pipeline.run.machine import ActorShape, Node, places, places_beside
from pipeline.store.files import Store
from pipeline.training.steps import ProcessGroup, read_zero_settings, zero_stage
from pipeline.training.train import TrainingOptions, TrainingResult, TrainingStep, train
from pipeline.training.training_documents import TrainingDocument, from_table, to_table
from ray_jobs.cluster import connect
from ray_jobs.nodes import Room, cluster_shape, sized_by_cluster

SCRATCH = ".scratch-"
PROGRESS_SECONDS = 1.0
MAX_FAILURES = 3
"""Maximum number of losses of an adapter's workers before the job fails."""

TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # so that relative paths of models have the same meaning as in other jobs
}
"""Settings of Ray Train."""


@dataclass(frozen=True, slots=True)
class AdapterJob:
    """One training. The number of workers and DeepSpeed affect its execution, not its result."""

    name: str  # name for messages
    key: str  # digest of all values that determine the weights
    model: ModelConfig
    documents: Sequence[TrainingDocument]
    config: FinetuneConfig  # configuration with an adapter's method
    base: Mapping[str, str]  # fingerprint_model(model)
    workers: int = 1
    gpu: bool = False  # whether each worker takes a whole GPU
    cpus: int = 1  # per worker
    zero: Mapping[str, Any] | None = None  # DeepSpeed settings
    checkpoint_seconds: float | None = None  # as in `train`


OnProgress = Callable[[str], None]
"""Receives a line on the progress of an adapter's training."""


@dataclass(frozen=True, slots=True)
class AdapterTraining:
    """A job and its folders."""

    job: AdapterJob
    folder: str  # folder of the adapter, on storage that all nodes see
    scratch: str  # temporary folder of this call, which a delayed earlier driver cannot remove

    @property
    def documents_file(self) -> str:
        """Path of a Parquet file of the documents (`documents.to_table`)."""
        return f"{self.scratch}/documents.parquet"

    @property
    def _progress_file(self) -> Path:
        return Path(self.scratch, "progress")

    def note(self, progress: str) -> None:
        """Record the progress of the training in a worker, for the driver."""
        new = self._progress_file.with_suffix(f".{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):  # no space, or the driver has ended: progress must not cause a failure
            new.write_text(progress, encoding="utf-8")
            new.replace(self._progress_file)

    def new_progress(self) -> str | None:
        """The progress of the training, if a worker has recorded any since the last call."""
        with contextlib.suppress(OSError):
            noted = self._progress_file.read_text(encoding="utf-8")
            self._progress_file.unlink()
            return noted
        return None


@dataclass(frozen=True, slots=True)
class Adapter(TrainingResult):
    """A finished training: a folder with weights and `training.json`."""

    name: str
    folder: str

    def line(self) -> str:
        """One line for the terminal."""
        first, last = self.losses[0], self.losses[-1]
        return f"adapter {self.name}  {self.steps} steps in {self.seconds:,.0f} s  loss {first:.3f} to {last:.3f}"


def adapter_jobs(
    config: AuditConfig, work: BuiltStages, keys: Collection[str], gpus: float | None = None
) -> list[AdapterJob]:
    """The trainings of a run, which all have the same resources; adapters with equal keys are one training.

    Args:
        config: the audit's configuration.
        work: work of the audit.
        keys: keys of the missing adapters.
        gpus: GPUs per worker; None: as available in the cluster, to which this process is then connected.

    Raises:
        UserError: an actor is larger than any node; DeepSpeed settings cannot be read, or do not fit the
            model or another setting.
    """
    resources, model = config.resources, as_model_config(config.model)
    if gpus is None:
        connect()
        gpus = cluster_shape(resources).gpus
    jobs: dict[str, AdapterJob] = {}
    for name, part in work.parts.adapters.items():
        key = work.keys[name]
        if key in keys and key not in jobs:
            jobs[key] = AdapterJob(
                name,
                key,
                model,
                part.documents,
                part.training,
                {kind: work.base[kind] for kind in ("model", "tokenizer", "quantization")},
                workers=resources.finetune_workers,
                gpu=gpus > 0,  # a whole one: the limits of a pass do not apply to a part of it
                cpus=resources.cpus_per_actor,
                zero=zero_for(resources.deepspeed, name, model, part.training),
            )
    return list(jobs.values())


def zero_for(settings: str | None, name: str, model: ModelConfig, training: FinetuneConfig) -> dict[str, Any] | None:
    """DeepSpeed settings by name or path, checked for the training of an adapter.

    Raises:
        UserError: they cannot be read, or do not fit the model or another setting.
    """
    zero = None if settings is None else read_zero_settings(settings)
    if zero is not None and zero_stage(zero) == 3:
        if model.gguf_file is not None or model.path.endswith(".gguf") or model.quantization is not None:
            raise UserError(
                f"adapter {name}: ZeRO 3 takes a model in safetensors apart, no GGUF file and no 8-bit or 4-bit loading"
            )
        if training.recompute:
            raise UserError(
                f"adapter {name}: recompute needs whole layers, which ZeRO 3 takes apart: use zero2, or leave it out"
            )
    return zero


def trainings_beside(jobs: Sequence[AdapterJob], shape: ActorShape, nodes: Sequence[Node]) -> tuple[int, int] | None:
    """Divide a cluster between trainings and the actors of another stage.

    Args:
        jobs: jobs from `adapter_jobs`.
        shape: resources of an actor.
        nodes: nodes of the cluster.

    Returns:
        Trainings at a time (one, then up to half of the cluster) and the actors that fit into the rest; None if
        no actor fits.

    Raises:
        UserError: a job is larger than the cluster.
    """
    trainings = max(1, min(len(jobs), _trainings_held(jobs[0], nodes) // 2))
    actors = places_beside(nodes, shape, trainings * jobs[0].workers)
    return (trainings, actors) if actors else None


def train_adapters(
    jobs: Sequence[AdapterJob],
    store: Store,
    on_progress: OnProgress = lambda progress: None,
    check: Callable[[], None] = lambda: None,
    at_once: int | None = None,
    here: bool = False,
) -> Iterator[Adapter]:
    """Train adapters, on a cluster as many at once as fit, and yield each when it has ended.

    Each is stored in `adapters/<key>/` of the run directory. A training whose workers are lost resumes from its last
    checkpoint.

    Args:
        jobs: jobs, at least one; names and keys must differ.
        store: the run directory, on storage that all nodes see as a local path.
        on_progress: called about once a second for each adapter that is training.
        check: called about once a second; an error that it raises stops the trainings.
        at_once: maximum number of trainings at a time; by default as many as the cluster holds.
        here: whether to train in this process, one after the other, without a cluster.

    Raises:
        UserError: a job that is larger than the cluster, or a loss that is not finite; the other trainings also stop,
            and the same call resumes them.
        IncompleteError: the workers of one adapter were lost too often, or nodes that a job needs.
    """
    if not store.local:
        raise UserError(f"adapters are trained into local folders that all nodes see, got {store.url}")
    place, call = store.path("adapters"), uuid.uuid4().hex[:8]
    trainings = [AdapterTraining(job, f"{place}/{job.key}", f"{place}/.{job.key}{SCRATCH}{call}") for job in jobs]
    if not here:
        connect()
        held = sized_by_cluster(lambda nodes: min(_trainings_held(training.job, nodes) for training in trainings))
        at_once = held if at_once is None else min(held, at_once)
    try:
        for training in trainings:
            _begin(training, store)
        run = _run_here(trainings, on_progress, check) if here else _run(trainings, at_once or 1, on_progress, check)
        for training in run:
            result = json.loads(Path(training.folder, RECORD).read_text(encoding="utf-8"))["result"]
            result |= {"losses": tuple(result["losses"]), "name": training.job.name, "folder": training.folder}
            yield Adapter(**result)
    finally:
        for training in trainings:  # a checkpoint stays until its training is finished or has failed
            shutil.rmtree(training.scratch, ignore_errors=True)


def _trainings_held(job: AdapterJob, nodes: Sequence[Node]) -> int:
    """The number of trainings like this one that a cluster holds at a time, counted node by node.

    Raises:
        UserError: the cluster holds none.
    """
    workers = places(nodes, ActorShape(float(job.gpu), job.cpus))
    if workers < job.workers:
        raise UserError(
            f"adapter {job.name}: {job.workers} workers, each with {job.cpus} CPUs and {job.gpu:d} GPUs of a node, do "
            f"not fit: the cluster holds {workers}"
        )
    return workers // job.workers


def _begin(training: AdapterTraining, store: Store) -> None:
    """Write the documents into the temporary folder of a training; folders of lost drivers are removed."""
    scratch = Path(training.scratch)
    for left in scratch.parent.glob(f".{training.job.key}{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    store.write_table(f"adapters/{scratch.name}/documents.parquet", to_table(training.job.documents))


def _run_here(
    trainings: Sequence[AdapterTraining], on_progress: OnProgress, check: Callable[[], None]
) -> Iterator[AdapterTraining]:
    """Train in this process, and yield each training when it has ended."""
    threads = torch.get_num_threads()

    def checked(progress: str) -> None:
        check()
        on_progress(progress)

    for training in trainings:
        try:
            torch.set_num_threads(training.job.cpus)  # as in a worker on a cluster: the number affects the last bits
            problem = train_one(training, checked)
        finally:
            torch.set_num_threads(threads)
        if problem is not None:
            raise UserError(f"adapter {training.job.name}: {problem}")
        yield training


def _run(
    trainings: Sequence[AdapterTraining], at_once: int, on_progress: OnProgress, check: Callable[[], None]
) -> Iterator[AdapterTraining]:
    """Train on the cluster, and yield each training when it has ended.

    Ray repeats a task whose process or node is lost; the training resumes from its checkpoint.
    """
    import ray

    task: Any = ray.remote(num_cpus=0, max_retries=MAX_FAILURES)(_fit)
    waiting, running = list(trainings), dict[Any, AdapterTraining]()
    job = trainings[0].job
    room = Room(ActorShape(float(job.gpu), job.cpus), job.workers)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                training = waiting.pop(0)
                sent = replace(training, job=replace(training.job, documents=()))  # workers read the file
                running[task.remote(sent)] = training
            ended, _ = ray.wait(list(running), timeout=PROGRESS_SECONDS)
            check()
            room.check()
            for training in running.values():
                if (progress := training.new_progress()) is not None:
                    room.check(ready=True)
                    on_progress(progress)
            for reference in ended:
                training = running.pop(reference)
                try:
                    problem = ray.get(reference)
                except ray.exceptions.RayError as error:
                    raise IncompleteError(f"adapter {training.job.name}: {_lost(error)}") from None
                if problem is not None:
                    raise UserError(f"adapter {training.job.name}: {problem}")
                yield training
    finally:
        for reference in running:
            ray.cancel(reference, force=True)  # and with it the workers


def _lost(error: Exception) -> str:
    """In one line, why a training ended that Ray does not repeat any more."""
    if is_full(error):
        return "no space left: free some space and rerun the command"
    cause = getattr(error, "cause", None) or error
    failures = list(getattr(cause, "worker_failures", {}).values())
    lines = [line.strip() for line in str(failures[0] if failures else cause).splitlines() if line.strip()]
    who = "its workers" if failures else "the process that leads it"
    return f"{who} failed more than {MAX_FAILURES} times, at last: {lines[-1] if lines else type(cause).__name__}"


def _fit(training: AdapterTraining) -> str | None:
    """Run one training with Ray Train, which waits for the resources of its workers.

    Returns:
        An error that the user can fix; None after success.

    Raises:
        ray.train.TrainingFailedError: its workers were lost too often.
    """
    os.environ.update(TRAIN_ENVIRONMENT)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    job = training.job
    trainer = TorchTrainer(
        cast(Any, lambda config: train_one(config["training"], config["training"].note)),
        train_loop_config={"training": training},
        scaling_config=ScalingConfig(
            num_workers=job.workers,
            use_gpu=job.gpu,  # one whole GPU per worker
            resources_per_worker={"CPU": job.cpus},
        ),
        run_config=RunConfig(
            name=f"train-{uuid.uuid4().hex[:8]}",  # a new name for each repetition by Ray
            storage_path=f"{training.scratch}/ray",
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    problem: str | None = cast(Any, trainer.fit()).return_value
    return problem


def train_one(training: AdapterTraining, on_progress: OnProgress) -> str | None:
    """The training loop of one worker.

    Args:
        training: the training.
        on_progress: called about once a second by the first worker.

    Returns:
        An error that the user can fix and that a new attempt would repeat.
    """
    if Path(training.folder).exists():
        return None  # the previous attempt was lost after its last step
    job, gpus = training.job, int(training.job.gpu)
    os.environ["DS_ACCELERATOR"] = "cuda" if job.gpu else "cpu"
    processes = ProcessGroup.joined()
    problem = None
    # With these settings transformers partitions the weights while it reads them.
    partitioned = _partition_at_load(job.zero)
    try:
        model = job.model.model_copy(update={"dtype": job.config.dtype})
        opened = open_model(model, gpus=0 if partitioned is not None else gpus)
        if processes.rank == 0:
            check_same_files(job.model, {}, job.base)
        documents = from_table(pq.read_table(training.documents_file))
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
    if opened.max_tokens is not None:  # scoring has the same limit
        config = config.model_copy(update={"max_tokens": min(config.max_tokens, opened.max_tokens)})
    try:
        train(
            opened.model,
            opened.tokenizer,
            documents,
            config,
            training.folder,
            TrainingOptions(
                _paced(job.name, on_progress) if processes.rank == 0 else None,
                processes,
                job.zero,
                job.base,
                job.checkpoint_seconds,
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
    """A callback for every step that reports the progress about once a second."""
    last, first = 0.0, None

    def count(step: TrainingStep) -> None:
        nonlocal last, first
        first = first or step
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            rate = (step.tokens - first.tokens) / max(step.seconds - first.seconds, 1e-9)
            where = f"adapter {name}  step {step.step}/{step.steps}"
            on_progress(f"{where}  loss {step.loss:.3f}  {rate:,.0f} tokens/s")

    return count
