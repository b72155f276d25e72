"""The shortest possible list of each selection, from the numbers of documents alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.checks.dependence_plan import BlockCounts, share_of_blocks
from pipeline.checks.resolution import planned_by_versions, planned_resolution
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.detectors.registry import needed_adapters, needed_prefixes, parse_detectors
from pipeline.plan.allocation import OWN_CORPUS, adapter_corpus_shards, too_few, too_few_shots

Allocated = tuple[list[dict[str, Any]], dict[str, int]]  # adapters, and numbers of calibration documents by role


def outlooks(
    config: AuditConfig,
    roles: Mapping[str, Any],
    allocated: Allocated | None = None,
    blocks: Mapping[Role, Mapping[str, BlockCounts]] | None = None,
    whole: bool = False,
) -> list[dict[str, Any]]:
    """The smallest possible selection for each question.

    Args:
        config: the audit's configuration.
        roles: role -> "documents", their number, and "exact", whether the number is exact.
        allocated: result of `adapters_and_calibration`, if available.
        blocks: blocks of dependent documents that were read, by known role, from `count_blocks`.
        whole: whether all documents were read, so that there are no fewer blocks.

    Raises:
        UserError: an adapter requires more known documents than there are.
    """
    adapters, calibration = allocated or adapters_and_calibration(config, roles)
    at_most = any(config.fsd.adapter(entry["name"]).group is not None for entry in adapters)
    if not config.selections:
        return []
    m = roles["audit"]["documents"]
    if config.corpus.has_versions:
        return [planned_by_versions(selection, m) for selection in config.selections]
    made = []
    for selection in config.selections:
        fewer = at_most or (selection.calibrate != "all" and not whole)
        known = _calibrating(selection, calibration, blocks or {})
        made.append(planned_resolution(selection, m, known, fewer, config.series is not None))
    return made


def _calibrating(
    selection: SelectionConfig, calibration: Mapping[str, int], blocks: Mapping[Role, Mapping[str, BlockCounts]]
) -> dict[str, int]:
    """The number of documents of each role that calibrate a selection: of its own at most one of each block."""
    role = NULL_ROLE[selection.direction]
    share = share_of_blocks(selection, blocks.get(role, {}))
    return {**calibration, role: math.floor(calibration[role] * share)} if share < 1 else dict(calibration)


def adapters_and_calibration(config: AuditConfig, roles: Mapping[str, Any]) -> Allocated:
    """The adapters to train, and the number of calibration documents of each known role."""
    entries = []
    taken = Counter[str]()
    for name in needed_adapters(parse_detectors(config.detectors)):
        settings = config.fsd.adapter(name)
        counts = {role: settings.count(roles[role]["documents"], place) for place, role in enumerate(settings.roles)}
        if settings.corpus is not None:
            adapter_corpus_shards(config, settings, name)
        for role, count in counts.items():
            available = roles[role]["documents"]
            if roles[role]["exact"] and count >= available:
                raise too_few(name, f"corpus.{role}", available, count, 1)
            taken[role] = max(taken[role], count)  # smaller parts are subsets of larger ones, except for groups
        facts = {"name": name, "method": settings.method, "epochs": settings.epochs}
        documents = sum(counts.values()) if counts else settings.documents or 0
        entries.append({**facts, "documents": documents, "train_on": [*map(str, counts)] or [OWN_CORPUS]})
    for prefix in needed_prefixes(parse_detectors(config.detectors)):
        entry = roles[prefix.role]
        if entry["exact"] and prefix.shots >= entry["documents"]:
            raise too_few_shots(prefix, entry["documents"])
        taken[prefix.role] = max(taken[prefix.role], prefix.shots)
    return entries, {role: max(0, entry["documents"] - taken[role]) for role, entry in roles.items()}
