"""Selected documents through the model once more: in this process with the model that scored, or on a cluster.

Whatever goes wrong here is said in one line, and the run goes on without the evidence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pipeline.audit.machine import LocalMachine
from pipeline.audit.strongest import Reread
from pipeline.config.audit import ResourcesConfig
from pipeline.models.memory import cap_memory
from pipeline.models.sharing import SharedModels
from pipeline.stages.base import Placement
from pipeline.stages.tokens import TokenReading, TokenRequest, is_deadly, read_tokens
from pipeline.stages.worker import LOCAL_DRIVER
from pipeline.store.attempts import AttemptLog
from pipeline.store.files import Store
from ray_jobs.actors import actors, task_environment
from ray_jobs.cluster import cluster_nodes, connect

WORK = "evidence/tokens"
"""Name of the attempt log."""

MOST_SECONDS = 1800.0
"""For which a task on a cluster is waited for: its resources may be taken by other jobs."""

TICK_SECONDS = 0.5


def reader_here(
    store: Store,
    machine: LocalMachine,
    models: SharedModels | None,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Reread:
    """Reads documents in this process.

    Args:
        store: the run directory, held.
        machine: what this process may use.
        models: that may be open already.
        say: prints a line.
        check: raises where the run must stop.
    """

    def read(request: TokenRequest) -> TokenReading:
        log = AttemptLog(store, WORK, "the selected documents", LOCAL_DRIVER)
        shared = models or SharedModels(alone=machine.workers == 1)
        try:
            placement = Placement(machine.gpus, machine.threads, shared)
            reading = read_tokens(request, placement, machine.workers, log, check)
        except BaseException:
            log.abandon()
            raise
        if is_deadly(log):  # it stays known
            log.abandon()
        else:
            log.close()
        return reading

    return partial(_forgiving, read, say, check)


def reader_on_cluster(resources: ResourcesConfig, say: Callable[[str], None], check: Callable[[], None]) -> Reread:
    """Reads documents by one task with the resources of a scoring actor.

    Args:
        resources: of the audit.
        say: prints a line.
        check: raises where the run must stop.
    """

    def read(request: TokenRequest) -> TokenReading:
        import ray

        connect()
        _, _, shape = actors(resources, cluster_nodes(), 1)
        options = task_environment(resources, shape.gpus)
        task = ray.remote(num_cpus=shape.cpus, num_gpus=shape.gpus, max_retries=2, **options)(_read_apart)
        result = task.remote(request, Placement(shape.gpus, shape.cpus))
        end = time.monotonic() + MOST_SECONDS
        try:
            while not ray.wait([result], timeout=TICK_SECONDS)[0]:
                check()
                if time.monotonic() > end:
                    raise TimeoutError(f"the cluster did not read them in {MOST_SECONDS:.0f} s")
            reading: TokenReading = ray.get(result)
        except BaseException:
            ray.cancel(result, force=True)
            raise
        return reading

    return partial(_forgiving, read, say, check)


def _read_apart(request: TokenRequest, placement: Placement) -> TokenReading:
    """As `read_tokens`, in a process of its own."""
    cap_memory(placement.gpus)
    return read_tokens(request, placement)


def _forgiving(
    read: Callable[[TokenRequest], TokenReading],
    say: Callable[[str], None],
    check: Callable[[], None],
    request: TokenRequest,
) -> TokenReading | None:
    """What came of a request; None where it failed for another reason than that the run must stop."""
    say(f"evidence: reading {len(request):,} selected documents once more")
    try:
        reading = read(request)
    except Exception as error:
        check()
        say(f"no evidence of these: {' '.join(str(error).split()) or type(error).__name__}")
        return None
    if reading.problems:
        say(f"evidence: {len(reading.problems):,} could not be read; the first: {reading.problems[0]}")
    return reading
