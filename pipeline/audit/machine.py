"""Whether an audit needs a cluster: where one machine does, starting Ray is most of a small run."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.audit.plan import Plan, pending
from pipeline.audit.status import SCORING
from pipeline.config.audit import ResourcesConfig
from pipeline.config.models import ModelConfig, expand_user
from pipeline.detectors.registry import adapters_of, parse_detectors
from pipeline.errors import UserError
from pipeline.models.arithmetic import free_memory
from pipeline.models.checkpoints import Checkpoint, weight_files
from pipeline.stages.child import begin_ahead
from pipeline.store.files import Store

LOCAL_TOKENS = {"cpu": 5e6, "cuda": 2e8}
"""Tokens over all passes that count as small: some hours of a small model on a CPU, of a larger one on a GPU."""

MEMORY_A_WEIGHT = 4
"""Bytes of this machine's free memory that a byte of weights on disk takes in each process, at most: in 32 bits twice
as many as in 16, and as many again for what is computed."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What a command can use of the machine that it runs on."""

    workers: int  # batches at a time
    gpus: float
    threads: int  # of the CPU, for a batch
    apart: bool = False  # whether each worker is a process of its own, with its own weights; else they are threads


def runs_locally(plan: Plan, ray_address: bool, gpus: int) -> bool:
    """Whether the command does the work on its own machine, without Ray (docs/cluster.md).

    Args:
        plan: of the run.
        ray_address: whether a cluster is named, or one is connected already.
        gpus: of this machine.

    Raises:
        UserError: `cluster: local` with settings that only a cluster can follow.
    """
    resources = plan.config.resources
    several = resources.finetune_workers > 1 or resources.deepspeed is not None
    if resources.cluster == "local" and several:
        key = "finetune_workers" if resources.finetune_workers > 1 else "deepspeed"
        raise UserError(f"resources.{key} is {getattr(resources, key)}, which needs resources.cluster: ray")
    if resources.cluster != "auto":
        return resources.cluster == "local"
    if ray_address or several or gpus > 1:
        return False
    if not _is_large(plan, gpus):
        return True
    return not gpus and _may_do_without(resources) and _fits_apart(plan, local_machine(resources, gpus))


def _may_do_without(resources: ResourcesConfig) -> bool:
    """Whether a worker needs no GPU."""
    return resources.gpus_per_actor in ("auto", 0)


def _is_large(plan: Plan, gpus: int) -> bool:
    passes = sum(1 + entry.get("paraphrases", 0) + entry.get("draws", 0) for entry in plan.passes())
    return passes * sum(plan.estimated_tokens().values()) > LOCAL_TOKENS["cuda" if gpus else "cpu"]


_fitting: tuple[Plan, bool] | None = None


def _fits_apart(plan: Plan, machine: LocalMachine) -> bool:
    """Whether each worker can be a process with weights of its own, and nothing but scoring asks a model for long.

    Once said of a plan it stays so, whatever this command takes of the free memory meanwhile.
    """
    global _fitting
    if _fitting is None or _fitting[0] is not plan:
        _fitting = plan, _fits_now(plan, machine)
    return _fitting[1]


def _fits_now(plan: Plan, machine: LocalMachine) -> bool:
    config = plan.config
    if config.paraphraser is not None or adapters_of(parse_detectors(config.detectors)):
        return False
    sizes = [_weight_bytes(model) for model in config.models]
    return None not in sizes and MEMORY_A_WEIGHT * machine.workers * sum(map(int, filter(None, sizes))) <= free_memory()


def _weight_bytes(model: object) -> int | None:
    """Bytes of the weights of a model; None where they are not in a folder of this machine."""
    if not isinstance(model, ModelConfig) or model.gguf_file is not None:
        return None
    folder = Path(expand_user(model.path))
    names = weight_files(model, Checkpoint(folder, None)) if folder.is_dir() else []
    return sum((folder / name).stat().st_size for name in names) or None


def may_need_cluster(resources: ResourcesConfig, plan: Plan | None = None) -> bool:
    """Whether a cluster may do the work, before anything that counts GPUs is imported; True where that is not known.

    Args:
        resources: of the audit, or of a trial.
        plan: of the audit, if it has been made.

    Raises:
        UserError: as `runs_locally`.
    """
    if plan is None:
        return resources.cluster != "local"
    named = bool(os.environ.get("RAY_ADDRESS"))  # a GPU that is there may be of no use
    return not all(runs_locally(plan, named, gpus) for gpus in {0, min(2, len(_gpu_files()))})


def begin_scoring_ahead(plan: Plan) -> None:
    """Begin the processes that will score, if that is known before libraries are imported that count GPUs.

    Args:
        plan: of the run.

    Raises:
        UserError: as `runs_locally` and `local_machine`.
    """
    if _gpu_files() or not _may_do_without(plan.config.resources):
        return
    if not runs_locally(plan, bool(os.environ.get("RAY_ADDRESS")), 0):
        return
    machine, store = machine_for(plan, 0), Store(plan.config.run)
    if machine.apart and store.local and pending(plan, SCORING, store):
        begin_ahead(machine.workers, machine.threads)


def _gpu_files() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


def machine_for(plan: Plan, gpus: int) -> LocalMachine:
    """What the work of a plan may use of this machine; much work on several cores is done in processes.

    Args:
        plan: of the run, which `runs_locally`.
        gpus: of this machine.

    Raises:
        UserError: as `local_machine`.
    """
    machine = local_machine(plan.config.resources, gpus)
    apart = not gpus and machine.workers > 1 and _is_large(plan, gpus) and _fits_apart(plan, machine)
    return replace(machine, apart=apart)


def local_machine(resources: ResourcesConfig, gpus: int) -> LocalMachine:
    """What the stages may use of this machine: one worker with a GPU, otherwise one for every cpus_per_actor cores.

    Args:
        resources: of the audit.
        gpus: of this machine.

    Raises:
        UserError: more GPUs or CPUs an actor than this machine has.
    """
    wanted = resources.gpus_per_actor
    if wanted != "auto" and wanted > gpus:
        raise UserError(f"resources.gpus_per_actor is {wanted:g}, this machine has {gpus}")
    of_worker = float(min(1, gpus)) if wanted == "auto" else float(wanted)
    cores = usable_cores()
    if resources.cpus_per_actor > cores:
        raise UserError(f"resources.cpus_per_actor is {resources.cpus_per_actor}, this machine has {cores} CPUs")
    places = 1 if of_worker else cores // resources.cpus_per_actor
    workers = min(places, resources.actors_between(places, places)[1])
    return LocalMachine(workers, of_worker, resources.cpus_per_actor)


def usable_cores() -> int:
    """The CPUs that this process may run on, by its affinity and the limits of its container."""
    from joblib import cpu_count

    return int(cpu_count())
