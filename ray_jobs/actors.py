"""Ray Data runs actors that take shards from a line, for every stage; receipts come back, texts never move."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

from pipeline.audit.arithmetic import read_arithmetic
from pipeline.audit.places import ActorShape, Node, actor_shape, places
from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, LostDeviceError, UserError, instead_of_exit
from pipeline.models.arithmetic import flags_differ
from pipeline.models.devices import ENVIRONMENT
from pipeline.models.libraries import collect_rarely, give_back, keep_memory
from pipeline.models.memory import cap_memory
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Advance, Event, Failure, Ready, Remark, Tick, failure_of
from pipeline.stages.line import SILENT_SECONDS
from pipeline.stages.process import process
from pipeline.stages.turns import SHARDS_AT_A_TIME, Turn, Turns
from pipeline.store.attempts import forget_attempts
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt
from ray_jobs.board import Portion, losses_told, start_board
from ray_jobs.bundles import IN_BUNDLE, bundles, shards_in
from ray_jobs.connection import connect, is_private
from ray_jobs.metrics import Metrics, ShardMetrics
from ray_jobs.node_versions import check_versions
from ray_jobs.nodes import cluster_nodes
from ray_jobs.versions import versions_here

NO_PROGRESS_SECONDS = 6 * 3600
TICK_SECONDS = 1.0
NEWS_SECONDS = 0.2
LIFE_SECONDS = SILENT_SECONDS / 4
END_SECONDS = 3.0
"""Waited for actors to end by themselves when all shards have ended."""

GIVING_BACK = 8
"""Shards after which an actor gives back memory: otherwise the C library keeps 150 MB that nobody uses."""

GROWTH = 2
"""Times the actors that a run began with: how many `auto` may grow to, in all its stages."""


_first_nodes: dict[str, list[Node]] = {}  # by driver


class ShardActor:
    """One actor: it takes shards from the board's line until none is left, two at a time: one is read ahead.

    A call is a caller of the line. The call of an actor that died goes to another, and on with the shard that it had.
    """

    def __init__(
        self,
        stage: Stage,
        placement: Placement,
        store_url: str,
        driver: str,
        board: Any,
        versions: Mapping[str, str] | None = None,  # of the driver's programs
        flags: Sequence[str] | None = None,  # of the CPU that decided the types of the run
    ) -> None:
        collect_rarely()
        keep_memory()
        self.stage = stage
        self.store = Store(store_url)
        self.driver = driver
        self.board = board
        self.name = uuid.uuid4().hex  # of this process: what a dead one was at does not wait for the next
        self.reported = 0.0
        self.finished = 0  # shards
        self.turns = Turns()
        self.metrics = Metrics(store_url, stage.name)
        self.worker: Any = None
        threading.Thread(target=self._tell_of_life, name="seenset-life", daemon=True).start()
        try:
            if versions is not None:
                check_versions(versions)
            cap_memory(placement.gpus)
            self.worker = stage.make(stage, placement)
        except (
            UserError,
            SystemExit,
        ) as error:  # a node lacks a model or a plugin: one line, not the trace of an actor
            board.broken.remote(f"{_node_here()}: {instead_of_exit(error)}")
        else:
            board.ready.remote()
            if flags is not None and not placement.gpus and (line := flags_differ(flags)):
                board.remark.remote(f"warning: {_node_here()}: {line}")

    def _tell_of_life(self) -> None:
        """Tell the board again and again that this process lives, whatever it works on."""
        while True:
            self.board.hear.remote(self.name)
            time.sleep(LIFE_SECONDS)

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, str]]:
        """Finish shards; the first row comes at once, so that the driver holds what runs this."""
        caller = str(row["caller"])
        yield {"caller": caller}
        while self.worker is not None:
            with self.turns.take() as turn:
                portion = self.ask(self.board.take, caller, self.name, uuid.uuid4().hex)
                if isinstance(portion, Portion):
                    self.finish(portion, turn)
            if portion is None:
                return
            if isinstance(portion, float):
                time.sleep(portion)

    def ask(self, method: Any, *arguments: Any) -> Any:
        """What the board answers; while it cannot be reached it is asked again.

        Raises:
            RayActorError: it is lost.
        """
        import ray
        from ray.exceptions import ActorUnavailableError

        while True:
            try:
                return ray.get(method.remote(*arguments))
            except ActorUnavailableError:  # it may have been heard: each of its methods can be called again
                time.sleep(TICK_SECONDS)

    def finish(self, portion: Portion, turn: Turn) -> None:
        """Finish a shard, unless another actor is quicker."""
        shard = shards_in(portion.bundle)[portion.index]
        metrics = ShardMetrics(self.metrics, turn)

        def on_batch(documents: int, tokens: int) -> None:
            metrics.advance(documents, tokens)
            if time.monotonic() - self.reported >= TICK_SECONDS:
                self.reported = time.monotonic()
                if self.ask(self.board.advance, portion.attempt, shard.id, documents, tokens):
                    raise _Beaten

        try:
            receipt = process(
                self.stage, self.worker, shard, self.store, self.driver, on_batch, turn, second=portion.second
            )
            metrics.finish(receipt)
            self.finished += 1
            if self.finished % GIVING_BACK == 0:
                give_back()
        except _Beaten:
            if not portion.second:
                with contextlib.suppress(Exception):  # nobody reads it any more
                    if read_receipt(self.store, self.stage.name, shard.id):
                        forget_attempts(self.store, self.stage.name, shard.id)
            self.ask(self.board.give_up, portion.attempt)
        except LostDeviceError:  # an exit that Ray was not told of: it starts another actor, and gives it this work
            os._exit(1)
        except (Exception, SystemExit) as error:  # it would end the whole job: report the shard, go on with the rest
            self.ask(self.board.end, portion.attempt, "failure", json.dumps(asdict(failure_of(shard, error))))
        else:
            self.ask(self.board.end, portion.attempt, "receipt", json.dumps(receipt.to_dict()))


class _Beaten(BaseException):
    """Ends an attempt at a shard that another worker has finished."""


def _node_here() -> str:
    import ray

    return f"node {ray.util.get_node_ip_address()}"


def actors(
    resources: ResourcesConfig, nodes: Sequence[Node], shards: int, first: Sequence[Node] = ()
) -> tuple[int, int, ActorShape]:
    """How many actors a run begins with, at most one a shard, how many it may grow to, and what each takes.

    It begins with what the cluster holds. With `auto` it grows with the cluster, to `GROWTH` times of that, if that is
    not this process's own; with a number, to that number.

    Args:
        resources: of the audit.
        nodes: of the cluster.
        shards: to be finished.
        first: nodes of the cluster when the run began; none: it begins now.

    Raises:
        UserError: an actor is larger than any node.
    """
    shape = actor_shape(resources, nodes)
    capacity = places(nodes, shape)
    grown = capacity if is_private() else max(capacity, GROWTH * places(first or nodes, shape))
    least, most = resources.actors_between(capacity, grown)
    return max(1, min(least, shards)), max(1, min(most, shards)), shape


def map_shards(
    stage: Stage,
    resources: ResourcesConfig,
    shards: Sequence[Shard],
    store: Store,
    driver: str,
    sizes: Mapping[str, float] | None = None,
) -> Iterator[Event]:
    """Let a pool of actors finish shards; receipts and failures come in the order in which shards end.

    Args:
        stage: whose models are at hand.
        resources: of the audit.
        shards: without a receipt of the stage.
        store: the run directory.
        driver: who asks, for the count of attempts.
        sizes: about how much work each shard is, by id; None: all alike. The largest are begun first.

    Raises:
        UserError: the cluster cannot hold one actor.
        IncompleteError: a node cannot load what the stage needs, or the cluster is lost.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    connect()
    nodes = cluster_nodes()
    # What the cluster has grown to since the run's first stage is not doubled again.
    first = _first_nodes.setdefault(driver, nodes)
    least, most, shape = actors(resources, nodes, len(shards), first)
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # each row is a block of its own, which is seen as soon as it is there
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    context.execution_no_progress_timeout_s = -1  # what is no progress is decided here
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    weights = [max(1.0, (sizes or {}).get(shard.id, 1.0)) for shard in shards]
    types = read_arithmetic(store)
    flags = None if types is None else tuple(types.flags)
    board = start_board(list(bundles(shards)), IN_BUNDLE, weights)
    callers = [{"caller": number} for number in range(SHARDS_AT_A_TIME * most)]
    with DataContext.current(context):
        dataset = ray.data.from_items(callers, override_num_blocks=len(callers)).flat_map(
            cast(Any, ShardActor),
            fn_constructor_args=(
                stage,
                Placement(shape.gpus, shape.cpus),
                store.url,
                driver,
                board,
                versions_here(),
                flags,
            ),
            compute=ActorPoolStrategy(
                min_size=least,
                max_size=most,
                initial_size=most,  # those that find no place wait for one, and begin where a node is added
                max_tasks_in_flight_per_actor=SHARDS_AT_A_TIME,
                max_concurrent_calls_per_actor=SHARDS_AT_A_TIME,
                enable_true_multi_threading=True,
            ),
            num_cpus=shape.cpus,
            num_gpus=shape.gpus,
            **task_environment(resources, shape.gpus),
        )
    with losses_told(board), running(dataset) as ended:
        yield from _events(stage, board, len(shards), ended)
    for name in store.names(f"attempts/{stage.name}", ".json"):  # of actors that ended in a second attempt
        shard = name.removesuffix(".json")
        if read_receipt(store, stage.name, shard):
            forget_attempts(store, stage.name, shard)


def _events(stage: Stage, board: Any, waiting: int, ended: Callable[[], BaseException | None]) -> Iterator[Event]:
    """What the board says, until all shards have ended."""
    import ray
    from ray.exceptions import ActorUnavailableError

    last = time.monotonic()
    request = 1
    remarked: set[str] = set()
    while waiting:
        end = ended()  # before the news, which then has all that the actors said
        answer = board.news.remote(request)
        while not ray.wait([answer], timeout=TICK_SECONDS)[0]:
            yield Tick()
        try:
            news = ray.get(answer)
        except ActorUnavailableError:  # it may have been heard: the same request has the same answer
            yield Tick()
            time.sleep(NEWS_SECONDS)
            continue
        request += 1
        if news.broken:
            raise IncompleteError(
                f"{news.broken}; what is finished is kept: every node needs the same packages, and each model as a hub "
                "id or under a path that all nodes share"
            )
        if news.ready:
            yield Ready()
        for line in news.remarks:
            if line not in remarked:  # several actors of a node
                remarked.add(line)
                yield Remark(line)
        for shard, advance in news.advances.items():
            yield Advance(shard, *advance)
        for kind, text in news.ended:
            waiting -= 1
            if kind == "receipt":
                yield Receipt.from_dict(json.loads(text), f"receipt of stage {stage.name}")
            else:
                yield Failure(**json.loads(text))
        if news.ended or news.advances or news.ready:
            last = time.monotonic()
        elif time.monotonic() - last > NO_PROGRESS_SECONDS:
            raise IncompleteError(f"no worker of stage {stage.name} got on for {NO_PROGRESS_SECONDS / 3600:g} hours")
        if waiting:
            if end is not None:
                raise end
            yield Tick()
            time.sleep(NEWS_SECONDS)


def task_environment(resources: ResourcesConfig, gpus: float) -> dict[str, Any]:
    """What the process of an actor or a task must have before it begins with CUDA, as an option of Ray."""
    if not (gpus and resources.deterministic):
        return {}
    return {"runtime_env": {"env_vars": ENVIRONMENT}}


@contextmanager
def running(dataset: Any) -> Iterator[Callable[[], BaseException | None]]:
    """Run the calls of actors in the background while the block runs, and end the actors with it.

    Returns:
        What ended the calls: an error, or that none is left; None while they run.
    """
    raised: list[BaseException] = []

    def read() -> None:
        try:
            for _ in dataset.iter_rows():
                pass
        except BaseException as error:
            raised.append(error)

    def ended() -> BaseException | None:
        if thread.is_alive():
            return None
        over = IncompleteError("all actors ended before all shards did: run the same command again")
        return raised[0] if raised else over

    thread = threading.Thread(target=read, name="seenset-actors", daemon=True)
    thread.start()
    try:
        yield ended
        thread.join(END_SECONDS)
    finally:
        end = time.monotonic() + END_SECONDS
        while dataset._current_executor is None and thread.is_alive() and time.monotonic() < end:
            time.sleep(NEWS_SECONDS)  # it is there with the first row
        executor = dataset._current_executor  # an actor may be held up by what is done elsewhere
        if executor is not None and thread.is_alive():
            executor.shutdown(force=True)
