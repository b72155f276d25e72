"""The adapters of the `fsd` detectors, each trained only once: in this process, or by Ray Train, several at once."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch

from pipeline.audit.machine import ActorShape, Node, actor_shape, places, places_beside
from pipeline.audit.work import Work
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, weights_of
from pipeline.config.training import FinetuneConfig
from pipeline.errors import IncompleteError, UserError
from pipeline.models.adapters import RECORD
from pipeline.store.files import Store
from pipeline.store.space import is_full
from pipeline.training.zero import read_zero_settings, zero_stage
from ray_jobs.cluster import cluster_nodes, connect
from ray_jobs.training import (
    MAX_FAILURES,
    PROGRESS,
    PROGRESS_SECONDS,
    TEXT,
    AdapterJob,
    AdapterProgress,
    AdapterTraining,
    OnProgress,
    Trainer,
    train_one,
)

SCRATCH = ".scratch-"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A finished training: a folder with weights and `training.json`."""

    name: str
    folder: str
    steps: int
    losses: tuple[float, ...]  # one a step, nats a token
    tokens: int
    seconds: float

    def line(self) -> str:
        """One line for the terminal."""
        first, last = self.losses[0], self.losses[-1]
        return f"adapter {self.name}  {self.steps} steps in {self.seconds:,.0f} s  loss {first:.3f} to {last:.3f}"


def adapter_jobs(config: AuditConfig, work: Work, keys: Collection[str], gpus: float | None = None) -> list[AdapterJob]:
    """The trainings of a run, which all take the same resources; adapters of equal keys are one training.

    Args:
        config: of the audit.
        work: of the audit.
        keys: of the adapters that are missing.
        gpus: a worker; None: as the cluster has them, to which this process is connected then.

    Raises:
        UserError: an actor is larger than any node, or DeepSpeed settings that cannot be read, or that exclude the
            model or another setting.
    """
    resources, model = config.resources, weights_of(config.model)
    if gpus is None:
        connect()
        gpus = actor_shape(resources, cluster_nodes()).gpus
    jobs: dict[str, AdapterJob] = {}
    for name, part in work.parts.adapters.items():
        key = work.keys[name]
        if key in keys and key not in jobs:
            jobs[key] = AdapterJob(
                name,
                key,
                model,
                part.texts,
                part.training,
                {kind: work.base[kind] for kind in ("model", "tokenizer", "quantization")},
                workers=resources.finetune_workers,
                gpu=gpus > 0,  # a whole one: what a pass keeps is not meant for a part of it
                cpus=resources.cpus_per_actor,
                zero=zero_for(resources.deepspeed, name, model, part.training),
            )
    return list(jobs.values())


def zero_for(settings: str | None, name: str, model: ModelConfig, training: FinetuneConfig) -> dict[str, Any] | None:
    """DeepSpeed settings by their name or path, checked for the training of an adapter.

    Raises:
        UserError: they cannot be read, or exclude the model or another setting.
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
        jobs: from `adapter_jobs`.
        shape: of an actor.
        nodes: of the cluster.

    Returns:
        Trainings at a time (one, then up to half of the cluster) and the actors that fit into the rest; None if not
        even one fits.
    """
    job, most = jobs[0], len(jobs)
    kinds = [
        (sum(node.cpus for node in nodes), job.workers * job.cpus, shape.cpus),
        (sum(node.gpus for node in nodes), job.workers * int(job.gpu), shape.gpus),
    ]
    trainings = max(1, min([most, *(int(whole / 2 // need) for whole, need, _ in kinds if need)]))
    by_rest = min(int((whole - trainings * need) / each + 1e-9) for whole, need, each in kinds if each)
    actors = min(by_rest, places_beside(nodes, shape, trainings * job.workers))
    return (trainings, actors) if actors >= 1 else None


def train_adapters(
    jobs: Sequence[AdapterJob],
    store: Store,
    on_progress: OnProgress = lambda progress: None,
    check: Callable[[], None] = lambda: None,
    at_once: int | None = None,
    here: bool = False,
    checkpoint_seconds: float | None = None,
) -> Iterator[Adapter]:
    """Train adapters, on a cluster as many at once as it holds, and yield each at its end.

    Each lies in `adapters/<key>/` of the run directory. A training whose workers are lost goes on from its last
    checkpoint.

    Args:
        jobs: what to train, at least one; names and keys must differ.
        store: the run directory, on storage that all nodes see as a local path.
        on_progress: called about once a second for each adapter that is training.
        check: called about once a second; what it raises stops the trainings.
        at_once: trainings at a time, at most; by default as many as the cluster holds.
        here: train in this process, one after the other, without a cluster.
        checkpoint_seconds: as `train`.

    Raises:
        UserError: a job that is larger than the cluster, or a loss that is no finite number; the other trainings stop
            too, and the same call again goes on with them.
        IncompleteError: the workers of one adapter were lost too often.
    """
    if not store.local:
        raise UserError(f"adapters are trained into local folders that all nodes see, got {store.url}")
    place, call = store.path("adapters"), uuid.uuid4().hex[:8]
    trainings = [
        AdapterTraining(job, f"{place}/{job.key}", f"{place}/.{job.key}{SCRATCH}{call}", checkpoint_seconds)
        for job in jobs
    ]
    if not here:
        connect()
        nodes = cluster_nodes()
        held = min(_trainings_held(training.job, nodes) for training in trainings)
        at_once = held if at_once is None else min(held, at_once)
    try:
        for training in trainings:
            _begin(training, store)
        run = _run_here(trainings, on_progress, check) if here else _run(trainings, at_once or 1, on_progress, check)
        for training in run:
            result = json.loads(Path(training.folder, RECORD).read_text(encoding="utf-8"))["result"]
            yield Adapter(training.job.name, training.folder, **{**result, "losses": tuple(result["losses"])})
    finally:
        for training in trainings:  # a checkpoint stays until its training is finished or has failed
            shutil.rmtree(training.scratch, ignore_errors=True)


def _trainings_held(job: AdapterJob, nodes: Sequence[Node]) -> int:
    """How many trainings like this one a cluster holds at a time, counted node by node.

    Raises:
        UserError: none.
    """
    workers = places(nodes, ActorShape(float(job.gpu), job.cpus))
    if workers < job.workers:
        raise UserError(
            f"adapter {job.name}: {job.workers} workers, each with {job.cpus} CPUs and {job.gpu:d} GPUs of a node, do "
            f"not fit: the cluster holds {workers}"
        )
    return workers // job.workers


def _begin(training: AdapterTraining, store: Store) -> None:
    """Write the texts into the temporary folder of a training; folders of dead drivers are removed."""
    scratch = Path(training.scratch)
    for left in scratch.parent.glob(f".{training.job.key}{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    store.write_table(f"adapters/{scratch.name}/texts.parquet", pa.table({TEXT: list(training.job.texts)}))


def _run_here(
    trainings: Sequence[AdapterTraining], on_progress: OnProgress, check: Callable[[], None]
) -> Iterator[AdapterTraining]:
    """Train in this process, and yield each training when it has ended."""
    threads = torch.get_num_threads()

    def checked(progress: AdapterProgress) -> None:
        check()
        on_progress(progress)

    for training in trainings:
        try:
            torch.set_num_threads(training.job.cpus)  # as a worker on a cluster: the number may change the last bits
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

    Ray restarts the actor that runs the trainings and repeats its calls, which go on from their checkpoints.
    """
    import ray

    options = {"num_cpus": 0, "max_restarts": MAX_FAILURES, "max_task_retries": MAX_FAILURES}
    threads = {"max_concurrency": at_once, "concurrency_groups": {PROGRESS: 1}}
    trainer = cast(Any, ray.remote)(**options, **threads)(Trainer).remote()
    try:
        running = {trainer.fit.remote(_sent(training)): training for training in trainings}
        while running:
            ended, _ = ray.wait(list(running), timeout=PROGRESS_SECONDS)
            check()
            for progress in _progress_of(trainer):
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
        ray.kill(trainer)  # and with it the workers


def _sent(training: AdapterTraining) -> AdapterTraining:
    """A training as the cluster receives it: its workers read the texts from the file."""
    return replace(training, job=replace(training.job, texts=()))


def _progress_of(trainer: Any) -> list[AdapterProgress]:
    """How far the trainings are; nothing while the actor starts, or starts again."""
    import ray

    try:
        progress = trainer.progress.options(concurrency_group=PROGRESS).remote()
        return list(ray.get(progress, timeout=PROGRESS_SECONDS))
    except ray.exceptions.RayError:
        return []


def _lost(error: Exception) -> str:
    """Why a training ended that Ray does not repeat any more, in one line."""
    if is_full(error):
        return "no space left: make room, and the same command goes on"
    cause = getattr(error, "cause", None) or error
    failures = list(getattr(cause, "worker_failures", {}).values())
    lines = [line.strip() for line in str(failures[0] if failures else cause).splitlines() if line.strip()]
    who = "its workers" if failures else "the process that leads it"
    return f"{who} failed more than {MAX_FAILURES} times, at last: {lines[-1] if lines else type(cause).__name__}"
