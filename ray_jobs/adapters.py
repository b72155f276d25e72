"""The adapter stage of a run: train the adapters of the `fsd` detectors before scoring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pipeline.audit.allocation import Parts
from pipeline.audit.machine import actor_shape, places_beside
from pipeline.config.audit import AuditConfig
from pipeline.config.models import weights_of
from pipeline.store.files import Store
from ray_jobs.cluster import cluster_nodes, connect
from ray_jobs.finetune import Adapter, AdapterJob, AdapterProgress, capacity_of_cluster, resources_of, train_adapters
from ray_jobs.supervisor import cluster_named

FINETUNE_STAGE = "finetune"


def adapter_jobs(
    config: AuditConfig, parts: Parts, base: Mapping[str, str], gpus: float | None = None
) -> list[AdapterJob]:
    """The trainings of a run.

    Args:
        config: of the audit.
        parts: what is trained on.
        base: fingerprint of the model.
        gpus: a worker; None: as the cluster has them, to which this process is connected then.

    Raises:
        UserError: an actor is larger than any node.
    """
    resources = config.resources
    if gpus is None:
        connect()
        gpus = actor_shape(resources, cluster_nodes()).gpus
    return [
        AdapterJob(
            name,
            weights_of(config.model),
            part.texts,
            part.training,
            workers=resources.finetune_workers,
            gpus=float(gpus > 0),  # a whole one: what a pass keeps is not meant for a part of it
            deepspeed=resources.deepspeed,
            cpus=resources.cpus_per_actor,
            base=base,
        )
        for name, part in parts.adapters.items()
    ]


class Finetuning:
    """The trainings of one run, alone on the cluster or beside another stage."""

    def __init__(
        self,
        jobs: Sequence[AdapterJob],
        store: Store,
        on_adapter: Callable[[Adapter], None],
        on_progress: Callable[[AdapterProgress], None],
        check: Callable[[], None],
        here: bool = False,
    ) -> None:
        """Prepare the trainings; `run` or `beside` starts them.

        Args:
            jobs: from `adapter_jobs`.
            store: the run directory.
            on_adapter: called with each finished adapter.
            on_progress: called about once a second for each adapter that is training.
            check: called about once a second; what it raises stops the trainings.
            here: in this process, one after the other.
        """
        self.jobs = jobs
        self.store = store
        self.on_adapter = on_adapter
        self.on_progress = on_progress
        self.check = check
        self.here = here

    def run(self, capacity: Mapping[str, float] | None = None) -> None:
        """Train the missing adapters, as many at once as the capacity holds, by default that of the cluster.

        Raises:
            UserError: as `train_adapters`.
            IncompleteError: the workers of one adapter were lost too often.
        """
        trainings = train_adapters(
            self.jobs, self.store, self.on_progress, capacity=capacity, check=self.check, here=self.here
        )
        with cluster_named():
            for adapter in trainings:
                self.on_adapter(adapter)

    @contextmanager
    def beside(self, capacity: Mapping[str, float]) -> Iterator[None]:
        """Train while the block runs, and wait for the end after it; if the block raises, the trainings stop.

        Raises:
            UserError: as `run`, at the end of the block.
            IncompleteError: as `run`, at the end of the block.
        """
        stop = threading.Event()
        raised: list[BaseException] = []
        driver_check = self.check

        def check() -> None:
            if stop.is_set():
                raise _Stopped
            driver_check()

        def work() -> None:
            try:
                self.run(capacity)
            except BaseException as error:
                raised.append(error)

        self.check = check
        thread = threading.Thread(target=work, name="seenset-finetune", daemon=True)
        thread.start()
        try:
            yield
            while thread.is_alive():
                thread.join(1.0)
        finally:
            stop.set()
            thread.join()
            self.check = driver_check
        if raised:
            raise raised[0]


class _Stopped(Exception):
    """Stops the trainings when the block that they run beside is over."""


def divide_capacity(
    capacity: Mapping[str, float], jobs: Sequence[Mapping[str, float]], actor: Mapping[str, float]
) -> tuple[dict[str, float], int] | None:
    """Divide the capacity of a cluster between trainings and the actors of another stage.

    Args:
        capacity: CPUs and GPUs of the cluster.
        jobs: CPUs and GPUs of each training.
        actor: of one actor.

    Returns:
        The capacity for the trainings (enough for the first one, then up to half of the cluster) and the number of
        actors that fit into the rest; None if not even one fits.
    """
    taken: dict[str, float] = dict.fromkeys(capacity, 0.0)
    for index, job in enumerate(jobs):
        more = {kind: taken[kind] + job.get(kind, 0.0) for kind in taken}
        if index and any(more[kind] > capacity[kind] / 2 for kind in more):
            break
        taken = more
    rest = [(capacity[kind] - taken[kind]) / need for kind, need in actor.items() if need]
    actors = int(min(rest) + 1e-9)
    return (taken, actors) if actors >= 1 else None


def capacity_beside(config: AuditConfig, jobs: Sequence[AdapterJob]) -> tuple[dict[str, float], int] | None:
    """`divide_capacity`, for the trainings and the actors of a run on the connected cluster, counted by its nodes."""
    nodes = cluster_nodes()
    shape = actor_shape(config.resources, nodes)
    actor = {"CPU": float(shape.cpus), "GPU": shape.gpus}
    room = divide_capacity(capacity_of_cluster(), [resources_of(job) for job in jobs], actor)
    if room is None:
        return None
    taken, most = room
    fitting = min(most, places_beside(nodes, shape, round(taken["CPU"] / shape.cpus)))
    return (taken, fitting) if fitting >= 1 else None
