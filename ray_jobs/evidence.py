"""Selected documents through the model once more: in this process with the model that scored, or on a cluster.

Whatever goes wrong here is one line, and the run goes on without the evidence.
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
from ray_jobs.maps import map_on_cluster

WORK = "evidence/tokens"
"""Name of the attempt log."""

MOST_SECONDS = 1800.0
"""For which a task on a cluster is waited for: its resources may be taken by other jobs."""


def token_reader(
    store: Store,
    resources: ResourcesConfig,
    machine: LocalMachine | None,
    models: SharedModels | None,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Reread:
    """Reads documents in this process, or by one task with the resources of a scoring actor.

    Args:
        store: the run directory, held.
        resources: of the audit.
        machine: what this process may use; None: the cluster does the work.
        models: that may be open already.
        say: prints a line.
        check: raises where the run must stop.

    Returns:
        What reads the documents of a request; None comes of it where that failed for another reason than that the run
        must stop.
    """

    def read(request: TokenRequest) -> TokenReading | None:
        say(f"evidence: reading {len(request):,} selected documents once more")
        try:
            if machine is None:
                reading = _read_on_cluster(request, resources, check)
            else:
                reading = _read_here(request, store, machine, models, check)
        except Exception as error:
            check()
            say(f"no evidence of these: {' '.join(str(error).split()) or type(error).__name__}")
            return None
        if reading.problems:
            say(f"evidence: {len(reading.problems):,} could not be read; the first: {reading.problems[0]}")
        return reading

    return read


def _read_here(
    request: TokenRequest,
    store: Store,
    machine: LocalMachine,
    models: SharedModels | None,
    check: Callable[[], None],
) -> TokenReading:
    log = AttemptLog(store, WORK, "the selected documents", LOCAL_DRIVER)
    done = False
    try:
        placement = Placement(machine.gpus, machine.threads, models or SharedModels(alone=machine.workers == 1))
        reading = read_tokens(request, placement, machine.workers, log, check)
        done = not is_deadly(log)  # what is deadly stays known
    finally:
        if done:
            log.close()
        else:
            log.abandon()
    return reading


def _read_on_cluster(request: TokenRequest, resources: ResourcesConfig, check: Callable[[], None]) -> TokenReading:
    connect()
    _, _, shape = actors(resources, cluster_nodes(), 1)
    end = time.monotonic() + MOST_SECONDS

    def check_time() -> None:
        check()
        if time.monotonic() > end:
            raise TimeoutError(f"the cluster did not read them in {MOST_SECONDS:.0f} s")

    options = {"num_cpus": shape.cpus, "num_gpus": shape.gpus, "max_retries": 2}
    function = partial(_read_apart, placement=Placement(shape.gpus, shape.cpus))
    (reading,) = map_on_cluster([request], function, check_time, **options, **task_environment(resources, shape.gpus))
    return reading


def _read_apart(request: TokenRequest, placement: Placement) -> TokenReading:
    """As `read_tokens`, in a process of its own."""
    cap_memory(placement.gpus)
    return read_tokens(request, placement)
