"""The fine-tuning job: Ray Train runs the plain training loop for several adapters at once, each trained only once."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.config.models import ModelConfig
from pipeline.errors import IncompleteError, UserError
from pipeline.models.adapters import RECORD
from pipeline.models.load import fingerprint_model
from pipeline.store.files import Store
from pipeline.store.space import is_full
from pipeline.training.adapter import adapter_key
from pipeline.training.train import NOT_IN_FULL, FinetuneConfig, TrainingStep
from pipeline.training.zero import read_zero_settings, zero_stage
from ray_jobs.cluster import connect
from ray_jobs.training import MAX_FAILURES, PROGRESS_SECONDS, fit, train_one

TEXT = "text"
"""The column of a file of texts."""

SCRATCH = ".scratch-"


@dataclass(frozen=True, slots=True)
class AdapterJob:
    """One training. The number of workers and DeepSpeed change how it runs, not what comes out."""

    name: str  # for messages: a group, a domain, a point of a sweep
    model: ModelConfig
    texts: Sequence[str] | str  # or the path of a Parquet file with a column `text`, on storage that all nodes see
    config: FinetuneConfig
    workers: int = 1
    gpus: float = 0  # a worker, at most 1
    deepspeed: str | None = None  # zero2, zero3, or the path of a file of settings
    cpus: int = 1  # a worker
    base: Mapping[str, str] | None = None  # fingerprint_model(model), if it is known


@dataclass(frozen=True, slots=True)
class Adapter:
    """A finished training: a folder with weights and `training.json`."""

    name: str
    folder: str
    fresh: bool  # trained by this call
    steps: int
    losses: tuple[float, ...]  # one a step, nats a token
    tokens: int
    seconds: float

    def line(self) -> str:
        """One line for the terminal."""
        first, last = self.losses[0], self.losses[-1]
        return f"adapter {self.name}  {self.steps} steps in {self.seconds:,.0f} s  loss {first:.3f} to {last:.3f}"


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


@dataclass(frozen=True, slots=True)
class _Planned:
    """A job that has been checked, and the settings of its workers."""

    job: AdapterJob
    key: str  # digest of all that decides the weights
    folder: Path
    scratch: Path  # of this call alone: an earlier driver that only slept removes nothing of it
    settings: dict[str, Any]


def train_adapters(
    jobs: Sequence[AdapterJob],
    store: Store,
    on_progress: Callable[[AdapterProgress], None] | None = None,
    checkpoint_seconds: float | None = None,
    capacity: Mapping[str, float] | None = None,
    check: Callable[[], None] | None = None,
    here: bool = False,
) -> Iterator[Adapter]:
    """Train adapters on the cluster, as many at once as it holds, and yield each when it is finished.

    Each lies in `adapters/<key>/` of the run directory, where the key is a digest of base model, settings and texts:
    the same training runs once, and repeating the call trains only what is missing. A training whose workers are lost
    goes on from its last checkpoint.

    Args:
        jobs: what to train; names must differ.
        store: the run directory, on storage that all nodes see as a local path.
        on_progress: called about once a second for each adapter that is training.
        checkpoint_seconds: as `train`.
        capacity: CPUs and GPUs of the cluster that the trainings may take; by default all.
        check: called about once a second; what it raises stops the trainings.
        here: train in this process, one after the other, without a cluster.

    Raises:
        UserError: bad input, a job that is larger than the cluster, or a loss that is no finite number; the other
            trainings stop too, and the same call again goes on with them.
        IncompleteError: the workers of one adapter were lost too often.
    """
    if not store.local:
        raise UserError(f"adapters are trained into local folders that all nodes see, got {store.url}")
    planned = [_plan(job, store, checkpoint_seconds) for job in jobs]
    if not here:
        connect()
        capacity = dict(capacity_of_cluster() if capacity is None else capacity)
        for plan in planned:
            _check_capacity(plan.job, capacity)
    waiting: dict[str, _Planned] = {}
    for plan in planned:
        if plan.folder.exists():
            yield _finished(plan, fresh=False)
        else:
            waiting.setdefault(plan.key, plan)
    if here:
        trained = _run_here(waiting, store, on_progress, check)
    else:
        trained = _run(waiting, capacity or {}, store, on_progress, check)
    for done in trained:
        fresh = True
        for plan in planned:
            if plan.key == done:
                yield _finished(plan, fresh)
                fresh = False


# --- checking the jobs


def _plan(job: AdapterJob, store: Store, checkpoint_seconds: float | None) -> _Planned:
    prefix = f"adapter {job.name}"
    if job.workers < 1 or job.cpus < 1:
        raise UserError(f"{prefix}: workers and cpus must be at least 1, got {min(job.workers, job.cpus)}")
    if not 0 <= job.gpus <= 1 or (job.workers > 1 and job.gpus not in (0, 1)):
        raise UserError(
            f"{prefix}: gpus must be 0 or 1 a worker, got {job.gpus:g}; deepspeed spreads a base over several"
        )
    gguf = job.model.gguf_file is not None or job.model.path.endswith(".gguf")
    if job.config.method == "full" and (gguf or job.model.quantization is not None):
        raise UserError(f"{prefix}: {NOT_IN_FULL}")
    zero = None if job.deepspeed is None else read_zero_settings(job.deepspeed)
    if zero is not None and zero_stage(zero) == 3 and (gguf or job.model.quantization is not None):
        raise UserError(
            f"{prefix}: ZeRO 3 takes a model in safetensors apart, no GGUF file and no 8-bit or 4-bit loading"
        )
    if zero is not None and zero_stage(zero) == 3 and job.config.recompute:
        raise UserError(f"{prefix}: recompute needs whole layers, which ZeRO 3 takes apart: use zero2, or leave it out")
    base = job.base if job.base is not None else fingerprint_model(job.model)
    base = {key: base[key] for key in ("model", "tokenizer", "quantization")}
    key = adapter_key(base, job.config, _texts(job))
    scratch = Path(store.path(f"adapters/.{key}{SCRATCH}{uuid.uuid4().hex[:8]}"))
    dtype = "float32" if job.config.method == "full" else job.config.dtype
    settings: dict[str, Any] = {
        "model": job.model.model_copy(update={"dtype": dtype}).model_dump(mode="json"),
        "config": job.config.model_dump(mode="json"),
        "texts": os.path.abspath(job.texts) if isinstance(job.texts, str) else str(scratch / "texts.parquet"),
        "progress": str(scratch / "progress.json"),
        "folder": store.path(f"adapters/{key}"),
        "gpus": job.gpus,
        "zero": zero,
        "base": base,
        "checkpoint_seconds": checkpoint_seconds,
    }
    return _Planned(job, key, Path(settings["folder"]), scratch, settings)


def _texts(job: AdapterJob) -> Iterator[str]:
    """The texts of a job, a few at a time where they are in a file."""
    if not isinstance(job.texts, str):
        yield from job.texts
        return
    try:
        with pq.ParquetFile(job.texts) as file:
            if TEXT not in file.schema_arrow.names:
                columns = ", ".join(file.schema_arrow.names)
                raise UserError(f"adapter {job.name}: no column {TEXT!r} in {job.texts}; columns: {columns}")
            for batch in file.iter_batches(columns=[TEXT]):
                yield from batch.column(0).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        message = " ".join(str(error).split())
        raise UserError(f"adapter {job.name}: cannot read texts {job.texts}: {message}") from None


def capacity_of_cluster() -> dict[str, float]:
    """CPUs and GPUs of the cluster that this process is connected to."""
    import ray

    resources = ray.cluster_resources()
    return {"CPU": resources.get("CPU", 0.0), "GPU": resources.get("GPU", 0.0)}


def resources_of(job: AdapterJob) -> dict[str, float]:
    """CPUs and GPUs that a training needs."""
    return {"CPU": job.workers * job.cpus, "GPU": job.workers * job.gpus}


def _check_capacity(job: AdapterJob, capacity: Mapping[str, float]) -> None:
    for kind, needed in resources_of(job).items():
        if needed > capacity[kind]:
            raise UserError(
                f"adapter {job.name}: {job.workers} workers need {needed:g} {kind}s, the cluster has {capacity[kind]:g}"
            )


def _finished(plan: _Planned, fresh: bool) -> Adapter:
    try:
        result = json.loads((plan.folder / RECORD).read_text(encoding="utf-8"))["result"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"adapter {plan.folder} has no {RECORD} that can be read: remove the folder") from None
    result["losses"] = tuple(result["losses"])
    return Adapter(plan.job.name, str(plan.folder), fresh, **result)


# --- running the jobs


def _run_here(
    waiting: dict[str, _Planned],
    store: Store,
    on_progress: Callable[[AdapterProgress], None] | None,
    check: Callable[[], None] | None,
) -> Iterator[str]:
    """Train the waiting jobs in this process; yields the key of each when it ends."""
    threads = torch.get_num_threads()
    for plan in waiting.values():

        def on_step(step: TrainingStep, tokens_per_s: float, name: str = plan.job.name) -> None:
            if check is not None:
                check()
            if on_progress is not None:
                on_progress(AdapterProgress(name, step, tokens_per_s))

        try:
            _begin(plan, store)
            torch.set_num_threads(plan.job.cpus)  # as a worker on a cluster: the number may change the last bits
            problem = train_one(plan.settings, on_step)
        finally:
            torch.set_num_threads(threads)
            _tidy(plan)
        if problem is not None:
            raise UserError(f"adapter {plan.job.name}: {problem}")
        yield plan.key


def _begin(plan: _Planned, store: Store) -> None:
    """Make the temporary folder of a training, with its texts where they are in no file; those of dead drivers go."""
    for left in plan.scratch.parent.glob(f".{plan.key}{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    if isinstance(plan.job.texts, str):
        plan.scratch.mkdir(parents=True)
    else:
        store.write_table(f"adapters/{plan.scratch.name}/texts.parquet", pa.table({TEXT: list(plan.job.texts)}))


def _run(
    waiting: dict[str, _Planned],
    capacity: Mapping[str, float],
    store: Store,
    on_progress: Callable[[AdapterProgress], None] | None,
    check: Callable[[], None] | None,
) -> Iterator[str]:
    """Train the waiting jobs, as many at once as the capacity holds; yields the key of each when it ends."""
    import ray

    waiting = dict(waiting)
    free = dict(capacity)
    running: dict[Any, _Planned] = {}
    shown: dict[str, int] = {}
    driver = ray.remote(num_cpus=0, max_retries=MAX_FAILURES)(fit)  # a retry goes on from the checkpoint
    try:
        while waiting or running:
            for plan in list(waiting.values()):
                need = resources_of(plan.job)
                if all(need[kind] <= free[kind] for kind in need):
                    del waiting[plan.key]
                    free = {kind: free[kind] - need[kind] for kind in free}
                    _begin(plan, store)
                    storage = str(plan.scratch / "ray")
                    running[driver.remote(plan.settings, plan.job.workers, plan.job.cpus, storage)] = plan
            ended, _ = ray.wait(list(running), timeout=PROGRESS_SECONDS)
            if check is not None:
                check()
            for plan in running.values():
                _report_step(plan, shown, on_progress)
            for reference in ended:
                plan = running.pop(reference)
                free = {kind: free[kind] + need for kind, need in resources_of(plan.job).items()}
                try:
                    problem = ray.get(reference)
                except ray.exceptions.RayError as error:
                    problem = ("lost", _lost(error))
                finally:
                    _tidy(plan)
                if problem is not None:
                    kind, message = problem
                    raise (UserError if kind == "user" else IncompleteError)(f"adapter {plan.job.name}: {message}")
                yield plan.key
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        for plan in running.values():
            _tidy(plan)


def _lost(error: Exception) -> str:
    """Why the process that leads a training ended, in one line."""
    if is_full(error):
        return "no space left: make room, and the same command goes on"
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"the process that leads it was lost ({type(cause).__name__}: {lines[0] if lines else ''})"


def _tidy(plan: _Planned) -> None:
    """Remove the temporary files of a training; its checkpoint stays until it is finished or has failed."""
    shutil.rmtree(plan.scratch, ignore_errors=True)


def _report_step(plan: _Planned, shown: dict[str, int], on_progress: Callable[[AdapterProgress], None] | None) -> None:
    """Report the latest step of a training, unless it has been reported."""
    if on_progress is None:
        return
    try:
        record = json.loads(Path(plan.settings["progress"]).read_bytes())
    except (OSError, ValueError):
        return
    if shown.get(plan.key) != record["step"]["step"]:
        shown[plan.key] = record["step"]["step"]
        on_progress(AdapterProgress(plan.job.name, TrainingStep(**record["step"]), record["tokens_per_s"]))
