"""Ray Data maps actors over shard descriptions, for every stage; receipts come back, texts never move."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.stages.base import Placement, Stage
from pipeline.stages.process import process
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

NO_PROGRESS_SECONDS = 6 * 3600


@dataclass(frozen=True, slots=True)
class Failure:
    """A shard that could not be finished, and why in one line."""

    shard: str
    message: str


class ShardActor:
    """One actor: a shard in, a receipt (or a failure) out."""

    def __init__(self, stage: Stage, placement: Placement, store_url: str, driver: str) -> None:
        self.stage = stage
        self.store = Store(store_url)
        self.driver = driver
        try:
            self.worker = stage.make(stage, placement)
        except UserError as error:  # a node lacks a model or a plugin: one line, not the trace of a dead actor
            self.worker = error

    def __call__(self, row: dict[str, Any]) -> dict[str, str]:
        """Finish the shard of one row. Rows hold JSON: Arrow would merge the columns of unlike receipts."""
        shard = Shard.from_dict(json.loads(row["shard"]))
        try:
            if isinstance(self.worker, UserError):
                raise self.worker
            receipt = process(self.stage, self.worker, shard, self.store, self.driver)
            return {"failure": "", "receipt": json.dumps(asdict(receipt))}
        except Exception as error:  # an error here would end the whole job: report the shard, go on with the rest
            return {"receipt": "", "failure": json.dumps(asdict(failure_of(shard, error)))}


def failure_of(shard: Shard, error: Exception) -> Failure:
    """Why a shard could not be finished."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return Failure(shard.id, f"{kind}{' '.join(str(error).split())}")


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if not ray.is_initialized():
        with _quiet():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Ray's C++ side writes to standard error while it starts, and show it only if it fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            messages.seek(0)
            sys.stderr.write(messages.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def gpus_per_actor(resources: ResourcesConfig) -> float:
    """GPUs that an actor takes: as configured, or one where the cluster has any.

    Raises:
        UserError: more than the cluster has.
    """
    import ray

    wanted = resources.gpus_per_actor
    have = ray.cluster_resources().get("GPU", 0.0)
    if wanted == "auto":
        return 1.0 if have else 0.0
    if wanted > 1 and wanted != int(wanted):
        raise UserError(f"resources.gpus_per_actor must be a fraction below 1 or a whole number, got {wanted}")
    if wanted > have:
        raise UserError(f"resources.gpus_per_actor is {wanted:g}, the cluster has {have:g}")
    return float(wanted)


def actors(resources: ResourcesConfig, gpus: float, shards: int) -> int:
    """How many actors the cluster holds, at most one a shard."""
    import ray

    have = ray.cluster_resources()
    capacity = int(have.get("CPU", 1) // resources.cpus_per_actor)
    if gpus:
        capacity = min(capacity, math.floor(have.get("GPU", 0.0) / gpus + 1e-9))
    if capacity < 1:
        raise UserError(
            f"resources.cpus_per_actor is {resources.cpus_per_actor}, the cluster has {have.get('CPU', 0):g} CPUs"
        )
    wanted = resources.actors
    return max(1, min(capacity if wanted == "auto" else wanted, capacity, shards))


def map_shards(
    stage: Stage, resources: ResourcesConfig, shards: Sequence[Shard], store: Store, driver: str
) -> Iterator[Receipt | Failure]:
    """Let a pool of actors finish shards; receipts and failures come in the order in which shards end.

    Args:
        stage: whose models are at hand.
        resources: of the audit.
        shards: without a receipt of the stage.
        store: the run directory.
        driver: who asks, for the count of attempts.

    Raises:
        UserError: the cluster cannot hold one actor.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    connect()
    gpus = gpus_per_actor(resources)
    size = actors(resources, gpus, len(shards))
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    context.execution_no_progress_timeout_s = NO_PROGRESS_SECONDS
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"shard": json.dumps(shard.to_dict())} for shard in shards]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        cast(Any, ShardActor),
        fn_constructor_args=(stage, Placement(gpus, resources.cpus_per_actor), store.url, driver),
        compute=ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=2),
        num_cpus=resources.cpus_per_actor,
        num_gpus=gpus,
    )
    for row in dataset.iter_rows():
        if row["receipt"]:
            yield Receipt(**json.loads(row["receipt"]))
        else:
            yield Failure(**json.loads(row["failure"]))
