"""The Ray executor: Ray Data dispatches bundles of shards to a pool of actors; they return receipts, never texts."""

from __future__ import annotations

import contextlib
import faulthandler
import gzip
import io
import itertools
import json
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, LostDeviceError, UserError, error_line, instead_of_exit, one_line
from pipeline.models.devices import ENVIRONMENT, cap_memory, collect_rarely, give_back, keep_memory
from pipeline.models.weight_dtypes import flags_differ
from pipeline.run.dtypes import read_arithmetic
from pipeline.run.machine import ActorShape, Node, places
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Event, Failure, Ready, Remark, Tick, failure_event
from pipeline.stages.worker import OvertakenError, ShardStream
from pipeline.store.attempts import shows_death
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt, receipt_name
from ray_jobs.cluster import NODES_BACK, check_versions, connect, is_private, versions_here
from ray_jobs.nodes import Room, cluster_nodes, cluster_shape

NO_PROGRESS_SECONDS = 6 * 3600
TICK_SECONDS = 1.0
END_SECONDS = 10.0
"""Time limit for actors to end after all shards have ended."""

WATCHDOG_SECONDS = 1800.0
"""Time after which an actor in one batch ends itself; Ray then starts another one and repeats the bundle."""

IN_FLIGHT = 1
"""Rows at an actor. Of two, Ray may call the second first; a tail row before the bundle would prefetch no shard."""

MOST_ROWS = 4_000
"""Maximum number of bundles dispatched together; Ray Data takes 1.2 ms and 8 KB of the driver for each row."""

BUNDLE_TOKENS = {"cpu": 3e4, "cuda": 1.2e6}
"""Tokens of about a minute of work, at 500 tokens per second on a CPU and 20,000 on a GPU."""

RESULTS = 60
"""Parts of a bundle, with equally many shards, whose results are delivered together: Ray takes 20 ms for each."""

BUNDLES_AN_ACTOR = 4
"""Minimum number of bundles per actor, so that actors of different speed end together."""

LISTING_SECONDS = 10.0
"""Interval between listings of the receipts by an actor that searches for missing shards."""

OVERTAKEN_SECONDS = 2.0
STALE_SECONDS = 20.0
"""Time without a change after which an attempt log that shows a death is abandoned."""

GIVING_BACK = 8
"""Shards after which an actor returns memory; otherwise the C library keeps 150 MB of unused memory."""

GROWTH = 2
"""Factor by which `auto` may increase the initial number of actors of a run, over all its stages."""


_first_nodes: dict[str, list[Node]] = {}  # by driver

LABELS = ("run", "stage")
COUNTERS = {
    "seenset_documents": "Documents that actors have finished.",
    "seenset_tokens": "Tokens of these documents.",
    "seenset_quarantined": "Documents of finished shards that are in quarantine.",
    "seenset_working_seconds": "Seconds in which an actor worked on documents.",
    "seenset_waiting_seconds": "Seconds in which it waited for documents to be read.",
}
"""Counters; Ray exports them as ray_NAME_total."""

ADVANCED = ("seenset_documents", "seenset_tokens", "seenset_working_seconds", "seenset_waiting_seconds")

WORKERS = "seenset_workers"
WORKERS_SENTENCE = "1 for every actor at work; absent about 20 seconds after its last batch."


class ShardActor:
    """One actor. A call finishes a bundle of shards, or without one (a tail row) shards that have no receipt yet.

    Ray repeats the row of a lost actor, and drops as many results of the repetition as the lost actor had
    delivered. So every call for a bundle yields the same sequence: that it is ready, then the results of each
    part of the bundle in order, including shards that have a receipt already.
    """

    def __init__(
        self,
        stage: Stage,
        placement: Placement,
        store: Store,
        driver: str,
        versions: Mapping[str, str],  # versions of the driver's programs
        flags: Sequence[str] | None,  # CPU flags on which the types of the run were decided
    ) -> None:
        collect_rarely()
        keep_memory()
        self.stage = stage
        self.store = store
        self.driver = driver
        self.finished = 0  # number of shards
        self.metrics = Metrics(store.url, stage.name)
        self.beginning: list[Ready | Remark | IncompleteError] = [Ready()]
        try:
            check_versions(versions)
            cap_memory(placement.gpus)
            self.worker = stage.make(stage, placement)
            stage.check_models(hub=True)
        except (UserError, SystemExit) as error:  # reported in one line, without a traceback of an actor
            reason = f"{_node_here()}: {instead_of_exit(error)}; completed shards are kept"
            self.beginning = [
                IncompleteError(
                    f"{reason}: every node needs the same packages, and each model as a hub id or under a path that "
                    "all nodes share"
                )
            ]
        else:
            if flags is not None and not placement.gpus and (line := flags_differ(flags)):
                self.beginning.append(Remark(f"warning: {_node_here()}: {line}"))

    def __call__(self, batch: Mapping[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        """Finish shards; returns pickled lists of events."""
        (bundle,), (tail,), (tails,) = batch["bundle"], batch["tail"], batch["tails"]
        yield _block(self.beginning)
        if isinstance(self.beginning[0], IncompleteError):
            return
        _watch()
        try:
            if tails:
                yield from (_block([event]) for event in self._finish_missing(int(tail), int(tails)))
            else:
                shards = shards_in(bundle)
                results, part = self._finish(shards), -(-len(shards) // RESULTS)
                for _ in range(0, len(shards), part):
                    yield _block(list(itertools.islice(results, part)))
        except LostDeviceError:  # an unexpected exit: Ray starts another actor and repeats the row
            os._exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _finish(self, shards: Sequence[Shard], speculative: bool = False) -> Iterator[Receipt | Failure]:
        """Finish shards; if `speculative`, another actor may also finish them, and only receipts count."""
        looked = time.monotonic()

        def on_batch(shard: Shard, documents: int, tokens: int) -> None:
            nonlocal looked
            _watch()
            if not speculative:
                self.metrics.advance(shard.id, documents, tokens, stream)
            elif time.monotonic() - looked > OVERTAKEN_SECONDS:
                looked = time.monotonic()
                if self.store.exists(receipt_name(self.stage.name, shard.id)):
                    raise OvertakenError

        driver = None if speculative else self.driver
        stream = ShardStream(self.stage, self.worker, self.store, driver, on_batch)
        todo = iter(shards)
        for shard, result in stream.finish(lambda prefetch: next(todo, None)):
            _watch()
            if isinstance(result, Receipt):
                if stream.filed:
                    self.metrics.finish(result, stream)
                yield result
            elif not speculative:
                yield failure_event(shard, result)
            self.finished += 1
            if self.finished % GIVING_BACK == 0:
                give_back()

    def _finish_missing(self, tail: int, tails: int) -> Iterator[Receipt | Failure]:
        """Finish shards that other actors have not finished, until none is missing, each at most once.

        They are taken from the end of the dispatch order, which other actors reach last.
        """
        shards = shards_in(self.store.read(_todo_file(self.stage)))[::-1]
        tried: set[str] = set()
        seen: dict[str, tuple[Any, float]] = {}  # attempt logs that show a death, and the time of their last change
        while True:
            filed = {name.removesuffix(".json") for name in self.store.names(f"receipts/{self.stage.name}", ".json")}
            shards = [shard for shard in shards if shard.id not in filed]
            if not shards:
                return
            first = tail * len(shards) // tails
            for shard in [*shards[first:], *shards[:first]]:
                if shard.id in tried or read_receipt(self.store, self.stage.name, shard.id):
                    continue
                state = self._attempt_deaths(shard)
                if state is not None and (shard.id not in seen or seen[shard.id][0] != state):
                    seen[shard.id] = state, time.monotonic()
                if state is None:
                    tried.add(shard.id)
                    yield from self._finish_beside(shard)
                elif time.monotonic() - seen[shard.id][1] > STALE_SECONDS:  # its actor has no resources to restart
                    yield from self._finish([shard])
            _watch()
            time.sleep(LISTING_SECONDS)

    def _finish_beside(self, shard: Shard) -> Iterator[Receipt | Failure]:
        """Finish a shard that another actor may be working on, with a mark in case its documents end actors."""
        mark = self._shard_mark(shard)
        self.store.write(mark, b"")
        yield from self._finish([shard], speculative=True)
        self.store.remove(mark)

    def _attempt_deaths(self, shard: Shard) -> Any:
        """The attempt log of a shard, if it shows that the shard may have ended an actor; else None."""
        if (record := shows_death(self.store, self.stage.name, shard.id)) is not None:
            return record
        return "mark" if self.store.exists(self._shard_mark(shard)) else None

    def _shard_mark(self, shard: Shard) -> str:
        return f"attempts/{self.stage.name}/{shard.id}.beside"


def _todo_file(stage: Stage) -> str:
    """Path of the list of shards of a wave for tail rows, which may run on any node."""
    return f"attempts/{stage.name}/shards"


def _block(events: Sequence[Event | IncompleteError]) -> dict[str, list[bytes]]:
    return {"events": [pickle.dumps(events)]}


def _watch() -> None:
    """End this process after a long time without a sign of progress, even if it holds the interpreter lock."""
    with contextlib.suppress(Exception):  # standard error may have no file
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)


def _node_here() -> str:
    import ray

    return f"node {ray.util.get_node_ip_address()}"


def packed(shards: Iterable[Shard]) -> bytes:
    """Shards in a compact form: shards of one input differ in a few numbers only."""
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", compresslevel=1, mtime=0) as file:
        for shard in shards:
            file.write(json.dumps(shard.to_dict()).encode() + b"\n")
    return data.getvalue()


def shards_in(data: bytes) -> list[Shard]:
    """The inverse of `packed`."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return [Shard.from_dict(json.loads(line)) for line in file]


def bundles(shards: Sequence[Shard], sizes: Mapping[str, float], most: float) -> list[list[Shard]]:
    """Group shards in order into bundles of at most a given size, with at least one shard each.

    Args:
        shards: shards, the longest first.
        sizes: sizes by id.
        most: maximum size of a bundle of several shards.
    """
    made: list[list[Shard]] = []
    size = most
    for shard in shards:
        if size + sizes[shard.id] > most:
            made.append([])
            size = 0.0
        made[-1].append(shard)
        size += sizes[shard.id]
    return made


def actors(
    resources: ResourcesConfig, nodes: Sequence[Node], shards: int, first: Sequence[Node] = ()
) -> tuple[int, int, ActorShape]:
    """The initial number of actors (at most one per shard), the maximum number, and the resources of each.

    The initial number is what the cluster holds. With `auto` it grows with the cluster, up to `GROWTH` times, unless
    this process owns the cluster; with a number, up to that number.

    Args:
        resources: resources of the audit.
        nodes: nodes of the cluster.
        shards: number of unfinished shards.
        first: nodes of the cluster at the start of the run; empty: the run starts now.

    Raises:
        UserError: an actor is larger than any node.
    """
    shape = cluster_shape(resources, nodes)
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
) -> Generator[Event]:
    """Finish shards with a pool of actors; receipts and failures come in the order in which shards end.

    Args:
        stage: the stage to run.
        resources: resources of the audit.
        shards: shards without a receipt of the stage.
        store: the run directory.
        driver: id of the driver, for the attempt logs.
        sizes: approximate tokens of each shard, by id; None: all equal. The largest shards start first.

    Raises:
        UserError: the cluster cannot hold one actor.
        IncompleteError: a node cannot load what the stage needs, or the cluster is lost.
    """
    connect()
    import ray.data  # noqa: F401  # it sets the level of its logger

    nodes = cluster_nodes()
    # Growth of the cluster since the run's first stage is not doubled again.
    first = _first_nodes.setdefault(driver, nodes)
    least, most, shape = actors(resources, nodes, len(shards), first)
    sizes = {shard.id: max(1.0, (sizes or {}).get(shard.id, 1.0)) for shard in shards}
    ordered = sorted(shards, key=lambda shard: -sizes[shard.id])
    tokens = BUNDLE_TOKENS["cuda" if shape.gpus else "cpu"]
    made = bundles(ordered, sizes, min(tokens, sum(sizes.values()) / (BUNDLES_AN_ACTOR * most)))
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    for start in range(0, len(made), MOST_ROWS):
        wave = made[start : start + MOST_ROWS]
        yield from _Wave(stage, store, resources, shape, least, most).run(wave, driver)
    store.remove(_todo_file(stage))
    for name in store.names(f"attempts/{stage.name}"):  # logs of actors that ended next to another one
        shard = name.rpartition(".")[0]
        if read_receipt(store, stage.name, shard):
            store.remove(f"attempts/{stage.name}/{name}")


def _as_loss(error: BaseException) -> BaseException:
    """An IncompleteError for actors and nodes that Ray has lost for good; any other error, such as of code, itself."""
    from ray import exceptions

    lost = (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.WorkerCrashedError)
    unplaced = (exceptions.ActorUnschedulableError, exceptions.TaskUnschedulableError, exceptions.ObjectLostError)
    if isinstance(error, (*lost, *unplaced)) and "creation task" not in str(error):
        return IncompleteError(f"Ray has lost actors for good ({error_line(error, 200)}): {NODES_BACK}")
    return error


@dataclass(slots=True)
class _Wave:
    """One dataset: bundles of shards and tail rows for a pool of actors."""

    stage: Stage
    store: Store
    resources: ResourcesConfig
    shape: ActorShape
    least: int  # actors
    most: int
    results: queue.SimpleQueue[Event | BaseException | None] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, made: Sequence[Sequence[Shard]], driver: str) -> Iterator[Event]:
        """The events of the shards of bundles, until all have ended."""
        missing = {shard.id for bundle in made for shard in bundle}
        remarked: set[str] = set()
        last = time.monotonic()
        room = Room(self.shape)
        with self._running(self._dataset(made, driver), set(missing)):
            while missing:
                try:
                    event = self.results.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    if time.monotonic() - last > NO_PROGRESS_SECONDS:
                        raise IncompleteError(
                            f"no shard of stage {self.stage.name} was finished for {NO_PROGRESS_SECONDS / 3600:g} hours"
                        ) from None
                    event = Tick()
                if isinstance(event, BaseException):
                    raise _as_loss(event)
                if event is None:
                    yield from self._filed(missing)
                    return
                room.check(isinstance(event, Ready))
                if isinstance(event, Remark):
                    if event.text in remarked:  # from several actors of a node
                        continue
                    remarked.add(event.text)
                elif isinstance(event, (Receipt, Failure)):
                    if event.shard not in missing:
                        continue
                    missing.remove(event.shard)
                    last = time.monotonic()
                yield event

    def _filed(self, missing: set[str]) -> Iterator[Event]:
        """The receipts whose results were lost with an actor.

        Raises:
            IncompleteError: shards have no receipt.
        """
        for shard in sorted(missing):
            if receipt := read_receipt(self.store, self.stage.name, shard):
                missing.remove(shard)
                yield receipt
        if missing:
            raise IncompleteError("all actors ended before all shards did: run the same command again")

    def _dataset(self, made: Sequence[Sequence[Shard]], driver: str) -> Any:
        """The dataset of the calls of actors."""
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        context = DataContext.get_current().copy()
        context.target_max_block_size = 1  # each result is a separate block, which is visible immediately
        context.enable_progress_bars = False
        context.execution_options.preserve_order = False
        context.execution_no_progress_timeout_s = -1  # this module decides what counts as no progress
        types = read_arithmetic(self.store)
        tails = IN_FLIGHT * self.most
        rows = [{"bundle": packed(bundle), "tail": 0, "tails": 0} for bundle in made]
        rows += [{"bundle": b"", "tail": number, "tails": tails} for number in range(tails)]
        self.store.write(_todo_file(self.stage), packed(itertools.chain.from_iterable(made)))
        with DataContext.current(context):
            return ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                cast(Any, ShardActor),
                batch_size=1,
                batch_format="numpy",
                fn_constructor_args=(
                    self.stage,
                    Placement(self.shape.gpus, self.shape.cpus),
                    self.store,
                    driver,
                    versions_here(),
                    None if types is None else tuple(types.flags),
                ),
                compute=ActorPoolStrategy(
                    min_size=self.least,
                    max_size=self.most,
                    initial_size=self.most,  # actors without resources wait, and start when a node is added
                    max_tasks_in_flight_per_actor=IN_FLIGHT,
                ),
                num_cpus=self.shape.cpus,
                num_gpus=self.shape.gpus,
                **task_environment(self.resources, self.shape.gpus),
            )

    @contextmanager
    def _running(self, dataset: Any, missing: set[str]) -> Iterator[None]:
        """Run the calls of actors in a thread while the block runs, and end the actors with it."""

        def read() -> None:
            try:
                results = iter(dataset.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy"))
                with closing(results):  # ends hung actors too
                    for batch in results:
                        for event in itertools.chain.from_iterable(map(pickle.loads, batch["events"])):
                            self.results.put(event)
                            missing.discard(getattr(event, "shard", ""))
                        if not missing or self.stop.is_set():
                            return
            except BaseException as error:
                self.results.put(error)
            else:
                self.results.put(None)

        thread = threading.Thread(target=read, name="seenset-actors", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stop.set()
            thread.join(END_SECONDS if not missing else 0)
            end_execution(dataset, thread)


def end_execution(dataset: Any, thread: threading.Thread) -> None:
    """End the actors of a dataset whose results a thread is waiting for: another thread cannot close it."""
    end = time.monotonic() + END_SECONDS
    while dataset._current_executor is None and thread.is_alive() and time.monotonic() < end:
        time.sleep(0.2)  # it exists with the first row
    if dataset._current_executor is not None and thread.is_alive():
        dataset._current_executor.shutdown(force=True)


def task_environment(resources: ResourcesConfig, gpus: float) -> dict[str, Any]:
    """Settings that the process of an actor or a task needs before its first use of CUDA, as an option of Ray."""
    if not (gpus and resources.deterministic):
        return {}
    return {"runtime_env": {"env_vars": ENVIRONMENT}}


def run_label(url: str) -> str:
    """The label of a run in metrics: the last two parts of its directory's path, in ASCII as Ray requires."""
    parts = [part for part in url.split("/") if part]
    return one_line("/".join(parts[-2:])).encode("ascii", "backslashreplace").decode("ascii")


class Metrics:
    """The metrics of one actor."""

    def __init__(self, url: str, stage: str) -> None:
        """Create the metrics.

        Args:
            url: address of the run directory.
            stage: name of the actor's stage.
        """
        from ray.util.metrics import Counter, Gauge

        labels = dict(zip(LABELS, (run_label(url), stage), strict=True))
        self._workers = Gauge(WORKERS, WORKERS_SENTENCE, LABELS).set_default_tags(labels)
        self._counters = {
            name: Counter(name, sentence, LABELS).set_default_tags(labels) for name, sentence in COUNTERS.items()
        }
        self._counted: dict[str, tuple[object, float]] = {}  # by counter: the shard or stream, and its count

    def advance(self, shard: str, documents: int, tokens: int, stream: ShardStream) -> None:
        """Update the counters to the progress of a shard, and mark this actor as working.

        Args:
            shard: its id.
            documents: number of its finished documents.
            tokens: tokens of these documents.
            stream: stream of the shards of this call of the actor.
        """
        self._workers.set(1)  # Ray forgets it unless it is set again
        totals = [(shard, documents), (shard, tokens), (stream, stream.worked), (stream, stream.waited)]
        for name, (of, total) in zip(ADVANCED, totals, strict=True):
            counted_of, counted = self._counted.get(name, (of, 0.0))
            counted = counted if counted_of == of else 0.0
            if total > counted:
                self._counters[name].inc(total - counted)
            self._counted[name] = of, max(total, counted)

    def finish(self, receipt: Receipt, stream: ShardStream) -> None:
        """Update the counters to the receipt of a shard."""
        self.advance(receipt.shard, receipt.n_new, receipt.tokens, stream)
        if receipt.n_quarantined:
            self._counters["seenset_quarantined"].inc(receipt.n_quarantined)
