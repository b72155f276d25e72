"""Registry of stages: the records of all modules of this package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import stages as package
from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.endpoint.answers import spent_before
from pipeline.endpoint.client import check_endpoint
from pipeline.endpoint.parameters import Adjustments, SampleRequest, find_adjustments
from pipeline.stages import is_scoring
from pipeline.stages.base import DocumentSize, Questions, SharedEndpoint, Stage, StageKind, StagePlan
from pipeline.store.files import Store
from pipeline.store.receipts import intact_receipts, receipt_name


def _stage_kinds() -> Iterator[StageKind]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name != __name__ and (kind := getattr(importlib.import_module(module.name), "KIND", None)):
            yield kind


STAGES: tuple[StageKind, ...] = tuple(sorted(_stage_kinds(), key=lambda kind: (is_scoring(kind.name), kind.name)))
"""In the order in which they run; scoring is last and reads the rows of the others."""

ANSWER_FOLDERS = {kind.name: kind.folder for kind in STAGES if kind.request is not None}
"""Kind of stage that uses endpoints -> folder of its answers."""


def plan_stages(wanted: StagePlan | AuditConfig) -> tuple[Stage, ...]:
    """The stages of an audit; the last one scores and reads the rows of the others.

    Args:
        wanted: requirements of the run, or only its configuration.

    Raises:
        UserError: a model's file is missing, the paraphraser is the audited model, or a model leaves no memory for a
            batch on the device.
    """
    wanted = wanted if isinstance(wanted, StagePlan) else StagePlan(wanted)
    made: list[Stage] = []
    for kind in STAGES:
        made += kind.stages(wanted, tuple(made))
    return tuple(made)


def open_endpoint(stage: Stage, store: Store) -> SharedEndpoint:
    """A client of the endpoint of a stage, with the usage of earlier calls of the run.

    Args:
        stage: stage with an endpoint.
        store: run directory.
    """
    assert stage.endpoint is not None
    return SharedEndpoint(stage.endpoint, spent_before(store, stage.name, ANSWER_FOLDERS))


def find_parameters(
    stages: Sequence[Stage],
    shards: Sequence[Shard],
    store: Store,
    recorded: Mapping[str, Adjustments],
) -> dict[str, Adjustments]:
    """The changes of requests because endpoints refuse parameters; an endpoint without a record is asked now.

    Args:
        stages: stages of the run; the parameters of its requests are not changed yet.
        shards: shards of the run.
        store: the run directory, locked. The cost of requests is recorded with the answers for the first shard.
        recorded: changes that the run has recorded, by folder of the stage.

    Returns:
        Folder of a stage -> its changes, for every stage with an endpoint whose changes are known.

    Raises:
        UserError: an endpoint does not answer, does not accept the key or does not have the model.
        StopError: an error of `find_adjustments`.
    """
    known = {stage.folder: recorded[stage.folder] for stage in stages if stage.folder in recorded}
    for stage in stages:
        if stage.endpoint is None or stage.folder in known:
            continue
        receipt = next(intact_receipts(store, stage.name), None)
        first = next((shard for shard in shards if not store.exists(receipt_name(stage.name, shard.id))), None)
        if receipt is not None:
            known[stage.folder] = Adjustments.of(receipt.fingerprint.get("parameters", {}))
        elif first is not None:
            check_endpoint(stage.endpoint)
            known[stage.folder] = _ask_parameters(stage, first, store)
    return known


def _ask_parameters(stage: Stage, shard: Shard, store: Store) -> Adjustments:
    """Find the parameters that the endpoint of a stage refuses, with the cost in the answers for a shard."""
    request = next(kind.request for kind in STAGES if kind.request is not None and kind.contains(stage))
    question, changes = stage.answers(shard, store).ask(), list[Adjustments]()
    shared = open_endpoint(stage, store)

    async def ask(sample: SampleRequest) -> None:
        changes.append(await find_adjustments(shared.client, sample, question.spent, question.book))

    try:
        shared.each([request(stage)], ask)
    finally:
        shared.close()
        question.finish()
    return changes[0]


def check_stages(config: AuditConfig) -> list[str]:
    """Check the stages of an audit without reading weights; an endpoint receives test requests.

    Returns:
        Lines for the user.

    Raises:
        UserError: one line that states what is missing or refused.
        StopError: an endpoint does not return what the detectors need.
    """
    return [line for kind in STAGES for line in kind.check(config)]


def request_sizes(config: AuditConfig, size: DocumentSize) -> list[Questions]:
    """Size of the requests to endpoints for an average document.

    Args:
        config: configuration of the audit.
        size: bytes of the document.
    """
    return [question for kind in STAGES for question in kind.questions(config, size)]


def forward_passes(entry: Mapping[str, Any]) -> float:
    """The cost of an entry of `Plan.passes`, in forward passes over the whole text."""
    costs: Sequence[float] = [kind.costs[entry["kind"]](entry) for kind in STAGES if entry["kind"] in kind.costs]
    return sum(costs)
