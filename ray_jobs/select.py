"""Results of a finished run's scores without a model: repeated selections, a verdict, a bundle of evidence."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

from pipeline.answers.collection_test import judge_collection, judge_versions
from pipeline.answers.select import Answering, check_training_keys, select_all
from pipeline.answers.verdict import BlockKind, CollectionVerdict, write_verdict
from pipeline.bundle.pack import pack_run
from pipeline.config.audit import AuditConfig
from pipeline.endpoint.api_keys import keys_withdrawn
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from pipeline.report.page import rewrite_report, write_report
from pipeline.results.history import answer_names
from pipeline.results.status import made_answer
from pipeline.results.summary import Summary
from pipeline.run.manifest import check_changed, read_run
from pipeline.run.scored import Scored, ShardMap, check_budget, each_in_turn, read_scored
from pipeline.series.claims import file_result, prepare_claim
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from pipeline.store.receipts import Receipt
from ray_jobs.cluster import connect

_log = logging.getLogger(__name__)

MANY_SHARDS = 512
SIDE_BY_SIDE = 8
ITEMS_A_TASK = 64
TASKS_A_CPU = 4
"""Maximum number of tasks at a time, so that results do not accumulate in the object store."""

TICK_SECONDS = 0.5


def select_again(
    run: str, overrides: Sequence[str], texts: bool = True, say: Callable[[str], None] = lambda line: None
) -> list[Summary]:
    """Answer a finished run's selections again, with overrides; never uses a model.

    Each call starts from the configuration of the run, regardless of earlier calls. `say` prints a line.

    Raises:
        UserError: not a run directory, an unfinished run, or settings that require scoring.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    config = build_config(manifest.config.model_dump(mode="json", by_alias=True), overrides)
    check_changed(manifest.config, config)
    with keys_withdrawn(config.models), RunLock(store) as lock:
        store = lock.held
        store.begin()
        check_training_keys(store)
        scored = read_scored(store, shards, config.near_copies)
        check_budget(config, scored)
        claim = prepare_claim(config, scored, manifest.limit, say)
        each = shard_mapper(store, True)
        how = Answering("select", texts, say=say, claim=claim)
        summaries = select_all(config, scored, manifest.limit, each, how)
        write_report(store, texts=texts)
        if claim is not None and summaries:
            file_result(config, scored, manifest.limit, summaries, say)
    return summaries


def give_verdict(run: str, blocks: BlockKind | None = None) -> CollectionVerdict:
    """Judge whether the collection of a finished run was trained on; writes verdict.json, and updates a report.

    Args:
        run: the run directory, a local path or an fsspec URL.
        blocks: units that are permuted; by default groups where documents have one, else families of near-duplicates.

    Raises:
        UserError: not a run directory, an unfinished run (exit 3), a damaged answer, no unseen documents, or too few of
            them.
    """
    if blocks is not None and read_run(Store(run))[0].config.corpus.has_versions:
        raise UserError("--blocks is of documents that are compared with unseen ones, and these have versions")
    with _answered(run) as (config, scored, limit):
        check_budget(config, scored)
        each = shard_mapper(scored.store, True)
        if not config.corpus.has_versions:
            verdict = judge_collection(config, scored, limit, each, blocks)
        else:
            verdict = judge_versions(config, scored, limit, each)
        verdict = write_verdict(scored.store, verdict)
        rewrite_report(scored.store)
    return verdict


def write_bundle(run: str, out: str | None, texts: bool) -> dict[str, Any]:
    """Write one file with the evidence for the answers of a finished run; an existing file is not overwritten.

    Args:
        run: the run directory, a local path or an fsspec URL.
        out: the file; by default the name of the run with `.bundle`.
        texts: whether it includes the texts of the scored documents.

    Returns:
        bundle, sha256 and bytes of the file.

    Raises:
        UserError: the errors of `give_verdict` for the run, an existing file, or an answer that no bundle can hold.
    """
    with _new_bundle(run, out) as (name, write), _answered(run) as (config, scored, _):
        data = pack_run(config, scored, shard_mapper(scored.store, True), texts)
        write(data)
    return {"bundle": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


@contextmanager
def _new_bundle(run: str, out: str | None) -> Iterator[tuple[str, Callable[[bytes], None]]]:
    """The name of a new file, and a function that writes it."""
    name = out or f"{os.path.basename(Store(run).root) or 'run'}.bundle"
    folder, base = os.path.split(name)
    if not base:
        raise UserError(f"{name} is a folder: name the file of the bundle")
    place = Store(folder or ".")
    taken = f"{name} exists already, and a bundle overwrites nothing: name another file"
    if place.exists(base):
        raise UserError(taken)

    def write(data: bytes) -> None:
        if not place.create(base, data, last_may_win=False):
            raise UserError(taken)

    yield name, write


@contextmanager
def _answered(run: str) -> Iterator[tuple[AuditConfig, Scored, int | None]]:
    """The configuration, scores and limit of a finished run whose answers are intact, locked."""
    store = Store(run)
    manifest, shards = read_run(store)
    config = build_config(manifest.config.model_dump(mode="json", by_alias=True))
    with keys_withdrawn(config.models), RunLock(store) as lock:
        for name in answer_names(store, manifest.config):  # before anything is computed or written
            made_answer(store, name, held=True)
        yield config, read_scored(lock.held, shards, config.near_copies), manifest.limit


def map_in_threads(items: Sequence[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    """Apply a function to every item, in order, in threads of this process that wait for an object store."""
    following = iter(items)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        under_way = deque(pool.submit(function, item) for item in islice(following, SIDE_BY_SIDE))
        while under_way:
            result = under_way.popleft().result()
            under_way.extend(pool.submit(function, item) for item in islice(following, 1))
            yield result


def map_on_cluster(items: Sequence[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    """Apply a function to every item, in any order, in tasks of the cluster at RAY_ADDRESS or of a new one.

    Args:
        items: items, few enough for memory.
        function: sent once, because it may hold an index of all calibration documents.

    Raises:
        UserError: the errors of the function, or no cluster answers.
    """
    import ray

    connect()
    task: Any = ray.remote(lambda function, items: [function(item) for item in items])
    held = ray.put(function)
    parts = iter([items[start : start + ITEMS_A_TASK] for start in range(0, len(items), ITEMS_A_TASK)])
    most = max(1, TASKS_A_CPU * int(ray.cluster_resources().get("CPU", 1)))
    running = [task.remote(held, part) for part in islice(parts, most)]
    try:
        while running:
            ended, running = ray.wait(running, timeout=TICK_SECONDS)
            running += [task.remote(held, part) for part in islice(parts, len(ended))]
            for results in ended:
                yield from ray.get(results)
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)


def shard_mapper(store: Store, cluster: bool) -> ShardMap:
    """The reader of the score shards of a run, in any order: many shards are read on the cluster, if `cluster`."""
    few = each_in_turn if store.local else map_in_threads

    def each(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
        return (map_on_cluster if cluster and len(receipts) >= MANY_SHARDS else few)(receipts, function)

    return each
