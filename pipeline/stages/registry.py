"""The stages that a configuration can need: every module of this package that has a record of one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import stages as package
from pipeline.config.audit import AuditConfig
from pipeline.detectors.base import Pass
from pipeline.endpoint.answers import spent_before
from pipeline.stages import is_scoring
from pipeline.stages.base import Questions, SharedEndpoint, Stage, StageKind, Wanted
from pipeline.store.files import Store


def _stage_kinds() -> Iterator[StageKind]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name != __name__ and (kind := getattr(importlib.import_module(module.name), "KIND", None)):
            yield kind


STAGES: tuple[StageKind, ...] = tuple(sorted(_stage_kinds(), key=lambda kind: (is_scoring(kind.name), kind.name)))
"""In the order in which they run; scoring last, which reads the rows of the others."""

ANSWER_FOLDERS = {kind.name: kind.folder for kind in STAGES if kind.asks}
"""Kinds of stages that ask endpoints, and where their answers lie."""


def stages_of(wanted: Wanted | AuditConfig) -> tuple[Stage, ...]:
    """The stages of an audit; the last one scores and reads the rows of the others.

    Args:
        wanted: of the stages; a configuration where no more is known yet.

    Raises:
        UserError: a model's file is missing, the paraphraser is the audited model, or a model leaves no room for a
            batch on the device.
    """
    wanted = wanted if isinstance(wanted, Wanted) else Wanted(wanted)
    made: list[Stage] = []
    for kind in STAGES:
        made += kind.stages(wanted, tuple(made))
    return tuple(made)


def endpoint_of(stage: Stage, store: Store) -> SharedEndpoint:
    """A client of the endpoint of a stage, which counts what earlier calls of the run have spent of its budget.

    Args:
        stage: with an endpoint.
        store: the run directory.
    """
    assert stage.endpoint is not None
    return SharedEndpoint(stage.endpoint, spent_before(store, stage.name, ANSWER_FOLDERS))


def check_stages(config: AuditConfig) -> None:
    """Check what can be checked of the stages of an audit without reading weights; an endpoint is asked a question.

    Raises:
        UserError: in one line, what is missing or refused.
        StopError: an endpoint does not give what the detectors need.
    """
    for kind in STAGES:
        kind.check(config)


def served_before_scoring(needed: Pass, config: AuditConfig) -> bool:
    """Whether an earlier stage makes a pass, or what a pass reads."""
    return any(kind.serves(needed, config) for kind in STAGES[:-1])


def questions_of(config: AuditConfig, text_bytes: float) -> list[Questions]:
    """What endpoints are asked about an average document.

    Args:
        config: of the audit.
        text_bytes: of the document.
    """
    return [question for kind in STAGES for question in kind.questions(config, text_bytes)]


def forward_passes(entry: Mapping[str, Any]) -> float:
    """The cost of a pass of `Plan.passes`, in forward passes over the whole text."""
    costs: Sequence[float] = [kind.costs[entry["kind"]](entry) for kind in STAGES if entry["kind"] in kind.costs]
    return sum(costs)
