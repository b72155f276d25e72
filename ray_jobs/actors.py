"""Ray Data maps actors over shard descriptions, for every stage; receipts come back, texts never move."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from pipeline.audit.places import ActorShape, Node, actor_shape, places
from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, LostDeviceError, UserError
from pipeline.models.devices import ENVIRONMENT
from pipeline.models.memory import cap_memory
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Advance, Event, Failure, Ready, Tick, failure_of
from pipeline.stages.process import process
from pipeline.stages.turns import SHARDS_AT_A_TIME, Turns
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs import interrupts
from ray_jobs.board import start_board
from ray_jobs.bundles import QUEUED, bundles, packed, shards_in
from ray_jobs.head import watch_head
from ray_jobs.metrics import Metrics, ShardMetrics
from ray_jobs.neighbours import start_private_cluster
from ray_jobs.node_versions import check_versions
from ray_jobs.nodes import cluster_nodes
from ray_jobs.versions import versions_here

NO_PROGRESS_SECONDS = 6 * 3600
TICK_SECONDS = 1.0
CONNECT_SECONDS = 10
STARTS = 3
REASON_CHARACTERS = 200


class ShardActor:
    """One actor: bundles of shards in, a receipt (or a failure) out for each shard as it ends.

    It is called for the next bundle while it works on one; shards of both take turns.
    """

    def __init__(
        self,
        stage: Stage,
        placement: Placement,
        store_url: str,
        driver: str,
        board: Any,
        versions: Mapping[str, str] | None = None,  # of the driver's programs
    ) -> None:
        self.stage = stage
        self.store = Store(store_url)
        self.driver = driver
        self.board = board
        self.reported = 0.0
        self.turns = Turns()
        self.metrics = Metrics(store_url, stage.name)
        try:
            if versions is not None:
                check_versions(versions)
            cap_memory(placement.gpus)
            self.worker = stage.make(stage, placement)
        except UserError as error:  # a node lacks a model or a plugin: one line, not the trace of a dead actor
            self.worker = error
        board.ready.remote()

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, str]]:
        """Finish the shards of one row, one after the other.

        An actor that takes over from one that died reads the receipts of the shards that this one had finished.
        """
        return map(self.finish, shards_in(row["bundle"]))

    def finish(self, shard: Shard) -> dict[str, str]:
        """Finish a shard. Rows hold JSON: Arrow would merge the columns of unlike receipts."""

        def on_batch(documents: int, tokens: int) -> None:
            metrics.advance(documents, tokens)
            if time.monotonic() - self.reported >= TICK_SECONDS:
                self.reported = time.monotonic()
                self.board.advance.remote(shard.id, documents, tokens)

        try:
            if isinstance(self.worker, UserError):
                raise self.worker
            with self.turns.take() as turn:
                metrics = ShardMetrics(self.metrics, turn)
                receipt = process(self.stage, self.worker, shard, self.store, self.driver, on_batch, turn)
            metrics.finish(receipt)
            return {"failure": "", "receipt": json.dumps(receipt.to_dict())}
        except LostDeviceError:  # an exit that Ray was not told of: it starts another actor, and gives it this work
            os._exit(1)
        except Exception as error:  # an error here would end the whole job: report the shard, go on with the rest
            return {"receipt": "", "failure": json.dumps(asdict(failure_of(shard, error)))}


def cluster_is_named() -> bool:
    """Whether RAY_ADDRESS names a cluster, or this process is connected to one."""
    # Whoever has not imported Ray to its end, as a thread may be doing now, is not connected.
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return bool(os.environ.get("RAY_ADDRESS")) or (is_initialized is not None and is_initialized())


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine.

    Raises:
        UserError: no cluster answers at RAY_ADDRESS.
        IncompleteError: Ray did not start, several times.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a thread that lost the cluster would start another
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        watch_head()
        return
    check_cluster()
    address = os.environ.get("RAY_ADDRESS", "")
    private = address in ("", "local")
    for attempt in range(1, STARTS + 1):
        try:
            with _quiet():
                if private:
                    start_private_cluster()
                else:
                    ray.init(log_to_driver=False, logging_level=logging.ERROR)
            interrupts.renew()
            watch_head()
            return
        except UserError:
            raise
        except Exception as error:  # of many kinds: a port, a time limit, a process that died
            ray.shutdown()
            reason = " ".join(str(error).split()) or type(error).__name__
        if not private:
            raise UserError(
                f"no Ray cluster answers at RAY_ADDRESS {address} ({reason[:REASON_CHARACTERS]}); start it, or unset "
                "RAY_ADDRESS to use this machine alone"
            )
        if attempt < STARTS:
            time.sleep(attempt)
    raise IncompleteError(
        f"Ray did not start on this machine in {STARTS} attempts ({reason[:REASON_CHARACTERS]}); free memory and space "
        "in /tmp and run again, or set resources.cluster: local"
    )


def check_cluster() -> None:
    """Check that somebody listens where RAY_ADDRESS says: Ray itself would wait for minutes.

    Raises:
        UserError: nobody does.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", "local" or none
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS {address} ({error}); start it, or unset RAY_ADDRESS to use this "
            "machine alone"
        ) from None


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


def actors(resources: ResourcesConfig, nodes: Sequence[Node], shards: int) -> tuple[int, ActorShape]:
    """How many actors the cluster holds, at most one a shard, and what each takes.

    Args:
        resources: of the audit.
        nodes: of the cluster.
        shards: to be finished.

    Raises:
        UserError: an actor is larger than any node.
    """
    shape = actor_shape(resources, nodes)
    capacity = places(nodes, shape)
    wanted = resources.actors
    return max(1, min(capacity if wanted == "auto" else wanted, capacity, shards)), shape


def map_shards(
    stage: Stage, resources: ResourcesConfig, shards: Sequence[Shard], store: Store, driver: str
) -> Iterator[Event]:
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
    size, shape = actors(resources, cluster_nodes(), len(shards))
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # each receipt is a block of its own, which is seen as soon as it is there
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    context.execution_no_progress_timeout_s = NO_PROGRESS_SECONDS
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    board = start_board()
    rows = [{"bundle": packed(bundle)} for bundle in bundles(shards, size)]
    with DataContext.current(context):
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).flat_map(
            cast(Any, ShardActor),
            fn_constructor_args=(stage, Placement(shape.gpus, shape.cpus), store.url, driver, board, versions_here()),
            compute=ActorPoolStrategy(
                size=size,
                max_tasks_in_flight_per_actor=QUEUED,
                max_concurrent_calls_per_actor=SHARDS_AT_A_TIME,
                enable_true_multi_threading=True,
            ),
            num_cpus=shape.cpus,
            num_gpus=shape.gpus,
            **task_environment(resources, shape.gpus),
        )
    for row in _with_ticks(dataset.iter_rows()):
        if row is None:
            yield from _news(board)
        elif row["receipt"]:
            yield Receipt.from_dict(json.loads(row["receipt"]), f"receipt of stage {stage.name}")
        else:
            yield Failure(**json.loads(row["failure"]))


def task_environment(resources: ResourcesConfig, gpus: float) -> dict[str, Any]:
    """What the process of an actor or a task must have before it begins with CUDA, as an option of Ray."""
    if not (gpus and resources.deterministic):
        return {}
    return {"runtime_env": {"env_vars": ENVIRONMENT}}


def _news(board: Any) -> Iterator[Event]:
    """What actors have written on the board; it is not waited for."""
    import ray

    try:
        news = ray.get(board.take.remote(), timeout=TICK_SECONDS)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):  # progress is worth no failure
        news = {}
    yield Tick()
    for shard, advance in news.items():
        yield Ready() if advance is None else Advance(shard, *advance)


def _with_ticks(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any] | None]:
    """Rows as they come, and None about every second while there is none."""
    results: queue.SimpleQueue[tuple[dict[str, Any] | None, BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def read() -> None:
        try:
            for row in rows:
                if stop.is_set():
                    return
                results.put((row, None))
            results.put((None, None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=read, name="seenset-results", daemon=True).start()
    try:
        while True:
            try:
                row, error = results.get(timeout=TICK_SECONDS)
            except queue.Empty:
                yield None
                continue
            if error is not None:
                raise error
            if row is None:
                return
            yield row
    finally:
        stop.set()
