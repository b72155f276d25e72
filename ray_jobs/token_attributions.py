"""Read selected documents with the model again: in threads of this process, or with one actor of a cluster.

An error here costs the token attributions, not the run, and is reported in one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import pyarrow as pa

from pipeline.answers.top_documents import Reread
from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import error_line
from pipeline.models.sharing import SharedModels
from pipeline.run.machine import LocalMachine
from pipeline.stages.base import Placement, Stage
from pipeline.stages.events import Event, Failure, TokenSettings
from pipeline.stages.local import finish_shards
from pipeline.stages.tokens import read_token_rows, token_stage
from pipeline.stages.worker import KILLED
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipt
from ray_jobs.actors import map_shards

FOLDER = "attempts/evidence"
"""Folder in a run directory with a folder for each unfinished request: its files, receipts and attempt logs."""

DOCUMENTS_A_THREAD = 8
"""Minimum per thread, because each thread has its own layers and verifies the logits of its model."""

MOST_SECONDS = 1800.0
"""Time limit of a request on a cluster, whose resources other jobs may use."""


TRIES = 3
"""Requests of a cluster, whose actors and nodes may be lost with one of them, until the rest has no attributions."""

AGAIN = "; trying again"


def token_reader(
    store: Store,
    resources: ResourcesConfig,
    machine: LocalMachine | None,
    models: SharedModels | None,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Reread:
    """A function that reads documents in this process, or with one actor of the cluster.

    Args:
        store: the run directory, locked.
        resources: resources of the audit.
        machine: resources for this process; None: the cluster does the work.
        models: models that may be open already.
        say: prints a line.
        check: raises an error if the run must stop.

    Returns:
        The function that reads the documents of a request; None after a failure, unless the run must stop.
    """

    def attribution_events(stage: Stage, shards: Sequence[Shard], place: Store) -> Generator[Event]:
        if machine is None:
            one = resources.model_copy(update={"actors": 1})
            return map_shards(stage, one, shards, place, uuid.uuid4().hex)
        workers = max(1, min(machine.workers, len(stage.settings.texts) // DOCUMENTS_A_THREAD))
        return finish_shards(stage, shards, place, workers, Placement(machine.gpus, machine.threads, models))

    def read_once(stage: Stage, shards: Sequence[Shard], place: Store) -> tuple[pa.Table, list[str]]:
        todo = [shard for shard in shards if read_receipt(place, stage.name, shard.id) is None]
        most_seconds = MOST_SECONDS if machine is None else math.inf
        failures = _failures(attribution_events(stage, todo, place), check, most_seconds) if todo else {}
        return read_token_rows(stage, shards, place, failures)

    def read(shards: Sequence[Shard], settings: TokenSettings) -> pa.Table | None:
        say(f"token attributions: reading {len(settings.texts):,} selected documents once more")
        folder = _folder(stage := token_stage(settings, shards), shards)
        place = Store(f"{store.url}/{folder}").with_check(store.check)
        table, problems = None, list[str]()
        for left in range(TRIES - 1 if machine is None else 0, -1, -1):
            try:
                table, problems = read_once(stage, shards, place)
            except Exception as error:
                check()
                say(f"no token attributions of these: {error_line(error) or type(error).__name__}{AGAIN * bool(left)}")
                if isinstance(error, TimeoutError):
                    break
            else:
                if len(table) or not problems or KILLED in problems:
                    break
            if left:  # what was read may be why nothing could be used
                store.remove_folder(folder)
        if problems:
            say(f"token attributions: {len(problems):,} could not be read; the first: {problems[0]}")
        if KILLED not in problems:  # a poison document stays recorded
            store.remove_folder(folder)
        return table

    return read


def _folder(stage: Stage, shards: Sequence[Shard]) -> str:
    """The folder of a request below the run directory, by its settings and documents."""
    inputs = json.dumps([stage.fingerprint, [shard.content for shard in shards]], sort_keys=True)
    return f"{FOLDER}/{hashlib.sha256(inputs.encode()).hexdigest()[:16]}"


def _failures(events: Generator[Event], check: Callable[[], None], most_seconds: float) -> dict[str, str]:
    """Wait until all shards have ended; returns the reasons of those that could not be read, by id.

    Raises:
        TimeoutError: the cluster did not read them in time.
    """
    failures: dict[str, str] = {}
    end = time.monotonic() + most_seconds
    with closing(events):
        for event in events:
            check()
            if isinstance(event, Failure):
                failures[event.shard] = event.message
            if time.monotonic() > end:
                raise TimeoutError(f"the cluster did not read them in {most_seconds:.0f} s")
    return failures
