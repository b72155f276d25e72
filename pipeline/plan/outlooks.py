"""The shortest possible list of each selection, from the numbers of documents alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from pipeline.checks.dependence_plan import BlockCounts, share_of_blocks
from pipeline.checks.resolution import (
    ResolutionFacts,
    _reaches,
    before_pass,
    resolution,
    shortest_list_by_share,
    shortest_list_of_plugin,
)
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.detectors.registry import needed_adapters, needed_prefixes, parse_detectors
from pipeline.plan.allocation import OWN_CORPUS, adapter_corpus_shards, too_few, too_few_shots
from pipeline.selection.bounds import fewest_in_list
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.folds import PLAIN, Basis
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures.record import Rule, applied_to, procedure_of
from pipeline.selection.ranked import factor_at, fewest_at_best, fewest_selectable, known_needed
from pipeline.selection.version_scores import EXPECTED

HALF = Fraction(1, 2)
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
    if config.corpus.versions is not None:
        return [_outlook_by_versions(selection, m) for selection in config.selections]
    made = []
    for selection in config.selections:
        fewer = at_most or (selection.calibrate != "all" and not whole)
        made.append(_outlook(selection, m, _calibrating(selection, calibration, blocks or {}), fewer))
    return made


def _calibrating(
    selection: SelectionConfig, calibration: Mapping[str, int], blocks: Mapping[Role, Mapping[str, BlockCounts]]
) -> dict[str, int]:
    """The number of documents of each role that calibrate a selection: of its own at most one of each block."""
    role = NULL_ROLE[selection.direction]
    share = share_of_blocks(selection, blocks.get(role, {}))
    return {**calibration, role: math.floor(calibration[role] * share)} if share < 1 else dict(calibration)


def _outlook_by_versions(selection: SelectionConfig, m: int) -> dict[str, Any]:
    """The smallest possible selection of m documents with versions, and its expected size."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    by = procedure_of(selection.procedure).versions
    assert by is not None
    least, sentence = by.fewest(selection.exact_alpha, m, None)
    expected = [asdict(one) for one in EXPECTED]
    return {
        **facts,
        "minimum_selectable": least,
        "outcome": _reaches(least, m),
        "sentence": sentence,
        "expected": expected,
    }


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


def _outlook(selection: SelectionConfig, m: int, calibration: Mapping[str, int], at_most: bool) -> dict[str, Any]:
    """The smallest possible selection of m documents, for a share of nulls of 1."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    alpha, hundredth = selection.exact_alpha, max(1, m // 100)
    chosen, calibrated = procedure_of(selection.procedure), calibration_of(selection.calibration)
    if chosen.fewest is not None:
        least, sentence = chosen.fewest(selection.detectors, alpha, m)
        return {**facts, "minimum_selectable": least, "outcome": _reaches(least, m), "sentence": sentence}
    role = NULL_ROLE[selection.direction]
    sought = SOUGHT_ROLE[selection.direction]
    procedure, halved = applied_to(selection, known_members=calibration.get(sought, 0) > 0)
    rule = Rule(procedure, alpha, calibrated.delta(selection), halved, selection.exact_lambda)
    known = calibration[role]
    if chosen.per_list:
        figures = resolution(known, m, fewest_in_list(known, m, alpha, selection.exact_confidence), None, role, PLAIN)
    else:
        n, needed = rule.calibrating(known), fewest_selectable(rule, known, m)
        enough = known_needed(rule, m, hundredth)
        basis = Basis(rule.halved, grouped=calibrated.grouped, one_of_each=selection.calibrate != "all")
        figures = resolution(n, m, needed, enough, role, basis)
        if rule.procedure.estimates:
            figures |= _by_share(rule, known, m, figures, role, basis)
        elif not chosen.built_in:
            given = ResolutionFacts(n, m, role, PLAIN)
            sentence = shortest_list_of_plugin(given, needed, selection.procedure)
            figures |= {"sentence": sentence, "outcome": Outcome.INCONCLUSIVE}
    return {**facts, **figures, "sentence": before_pass(figures["sentence"], at_most)}


def _by_share(rule: Rule, known: int, m: int, figures: Mapping[str, Any], role: str, basis: Basis) -> dict[str, Any]:
    """The changes where the procedure estimates the share of nulls: the figures hold at a share of 1."""
    needed, best = figures["minimum_selectable"], fewest_at_best(rule, known, m)
    half = max(best, fewest_selectable(rule, known, m, factor_at(rule, m, HALF)))
    sentence = shortest_list_by_share(
        ResolutionFacts(rule.calibrating(known), m, role, basis),
        (needed, half, best),
        figures["outcome"],
        figures["calibration_for_1_percent"],
    )
    outcome = Outcome.PASSED if figures["outcome"] == Outcome.PASSED else Outcome.INCONCLUSIVE
    return {"sentence": sentence, "outcome": Outcome.FAILED if best > m else outcome, "minimum_at_best": best}
