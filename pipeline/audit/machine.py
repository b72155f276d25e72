"""Whether an audit needs a cluster: where one machine does, starting Ray is most of a small run."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

from pipeline.audit.plan import Plan
from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError

LOCAL_TOKENS = {"cpu": 5e6, "cuda": 2e8}
"""Tokens over all passes that count as small: some hours of a small model on a CPU, of a larger one on a GPU."""

LOCAL_WORKERS = 8
"""Threads that share one interpreter; more of them gain little, so that large work goes to a cluster."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What a command can use of the machine that it runs on."""

    workers: int  # batches at a time
    gpus: float
    threads: int  # of the CPU, for a batch


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
    of_cpus = not gpus and resources.gpus_per_actor in ("auto", 0)
    return of_cpus and local_machine(resources, gpus).workers <= LOCAL_WORKERS


def _is_large(plan: Plan, gpus: int) -> bool:
    passes = sum(1 + entry.get("paraphrases", 0) + entry.get("draws", 0) for entry in plan.passes())
    return passes * sum(plan.estimated_tokens().values()) > LOCAL_TOKENS["cuda" if gpus else "cpu"]


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


def _gpu_files() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


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
