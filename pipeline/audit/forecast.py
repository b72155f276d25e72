"""The forecast of `seenset plan`: documents, shards, passes, time, and the smallest possible selections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from pipeline.audit.allocation import OWN_CORPUS, adapter_corpus_shards, too_few
from pipeline.audit.pace import measure_pace
from pipeline.audit.plan import BYTES_PER_TOKEN, Plan
from pipeline.audit.price import estimate_price
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, display_name
from pipeline.config.selection import ESTIMATING, NULL_ROLE, SelectionConfig
from pipeline.corpus.inputs import extent_of
from pipeline.detectors.registry import adapters_of, parse_detectors
from pipeline.selection.conditional import simes_grid
from pipeline.selection.evalues import dependence_factor
from pipeline.selection.grid import Grid
from pipeline.selection.knockoff import fewest
from pipeline.selection.step_up import calibration_needed, harmonic_bound, minimum_selectable

PASS_COST = {"forward": 1, "gradient": 3}  # of a pass, in forward passes


def forecast(plan: Plan, model: Mapping[str, Any]) -> dict[str, Any]:
    """Forecast a run: documents, shards, passes, time, price, and the smallest possible selections.

    The time is a guess for one worker like this machine, from a forward pass measured here and now (`measure_pace`).
    """
    config = plan.config
    roles: dict[str, Any] = {}
    for role, _ in config.corpus.roles():
        count, exact = plan.documents(role)
        shards = sum(1 for shard in plan.shards if shard.role == role)
        roles[role] = {"documents": count, "exact": exact, "shards": shards}
    adapters, calibration = _adapters(config, roles)
    total = sum(entry["documents"] for entry in roles.values())
    everything = sum(extent_of(entry).rows for entry in plan.inputs)
    average = plan.text_bytes() / BYTES_PER_TOKEN / max(1, everything)
    tokens = round(total * min(average, config.max_tokens))
    passes = plan.passes()
    seconds = source = None
    if isinstance(config.model, ModelConfig) and model.get("parameters"):
        reads = total * sum(_forward_passes(entry) for entry in passes)
        reads += PASS_COST["gradient"] * sum(entry["documents"] * entry["epochs"] for entry in adapters)
        length = tokens / max(1, total)
        statistics = frozenset(name for entry in passes if entry["kind"] == "forward" for name in entry["statistics"])
        pace = measure_pace(config.model, model["dtype"], model["parameters"], length, statistics)
        seconds, source = pace.seconds * length * reads, pace.source
    return {
        "run": config.run,
        "model": {"path": display_name(config.model), **model},
        "roles": roles,
        "limit": plan.limit,
        "shards": len(plan.shards),
        "passes": passes,
        "adapters": adapters,
        "detectors": [detector.column for detector in parse_detectors(config.detectors)],
        "estimated_tokens": tokens,
        "endpoint": estimate_price(config, total, plan.text_bytes() / max(1, everything)),
        "estimated_seconds_one_worker": None if seconds is None else float(f"{seconds:.3g}"),
        "estimated_from": source,
        "selections": _outlooks(config, roles, adapters, calibration),
    }


def outlooks(config: AuditConfig, roles: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The smallest possible selection of each question.

    Args:
        config: of the audit.
        roles: role -> "documents", their number, and "exact", whether it is no estimate.

    Raises:
        UserError: an adapter is to be trained on more known documents than there are.
    """
    return _outlooks(config, roles, *_adapters(config, roles))


def _outlooks(
    config: AuditConfig, roles: Mapping[str, Any], adapters: Sequence[Mapping[str, Any]], calibration: Mapping[str, int]
) -> list[dict[str, Any]]:
    at_most = any(config.fsd.adapter(entry["name"]).group is not None for entry in adapters)
    if not config.selections:
        return []
    m = roles["audit"]["documents"]
    return [_outlook(selection, m, calibration, at_most) for selection in config.selections]


def _forward_passes(entry: Mapping[str, Any]) -> float:
    """The cost of a pass, in forward passes over the whole text."""
    if entry["kind"] == "generate":
        return float(entry["prefix_ratio"] + entry["draws"] * (1 - entry["prefix_ratio"]))
    return float(PASS_COST[entry["kind"]] * (1 + entry["paraphrases"]))


def _adapters(config: AuditConfig, roles: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The adapters that would be trained, and the number of known documents of each role that would calibrate."""
    entries = []
    taken = Counter[str]()
    for name in adapters_of(parse_detectors(config.detectors)):
        settings = config.fsd.adapter(name)
        counts = {role: settings.count(roles[role]["documents"], place) for place, role in enumerate(settings.roles)}
        if settings.corpus is not None:
            adapter_corpus_shards(config, settings, name)
        for role, count in counts.items():
            available = roles[role]["documents"]
            if roles[role]["exact"] and count >= available:
                raise too_few(name, f"corpus.{role}", available, count, 1)
            taken[role] = max(taken[role], count)  # smaller parts lie in larger ones, but for groups
        facts = {"name": name, "method": settings.method, "epochs": settings.epochs}
        documents = sum(counts.values()) if counts else settings.documents or 0
        entries.append({**facts, "documents": documents, "train_on": [*map(str, counts)] or [OWN_CORPUS]})
    return entries, {role: max(0, entry["documents"] - taken[role]) for role, entry in roles.items()}


def _outlook(selection: SelectionConfig, m: int, calibration: Mapping[str, int], at_most: bool) -> dict[str, Any]:
    """The smallest possible selection of m documents, for a share of nulls of 1."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    alpha, hundredth = selection.exact_alpha, max(1, m // 100)
    if selection.procedure == "ktd":
        least, sentence = fewest(alpha, m)
        return {**facts, "minimum_selectable": least, "ok": least <= m, "sentence": sentence}
    role = NULL_ROLE[selection.direction]
    n = calibration[role]
    if selection.procedure == "adadetect":
        n -= n // 2  # the other half trains the classifier
    grid = Grid.uniform(n)
    if selection.calibration == "conditional":
        grid = simes_grid(n, Fraction(repr(selection.delta)))
    factors = {"by": lambda: harmonic_bound(m), "ebh": lambda: dependence_factor(grid, m, alpha)}
    factor = factors.get(selection.procedure, lambda: Fraction(1))()
    needed = minimum_selectable(grid, m, alpha, factor)
    figures = resolution(n, m, needed, calibration_needed(m, alpha, hundredth, factor), role)
    if selection.procedure in ESTIMATING:
        figures["sentence"] += (
            " That is for a share of nulls of 1: the procedure estimates it, and of a smaller one fewer suffice."
        )
    if at_most:  # which documents of a group there are is not known before they are read
        figures["sentence"] = figures["sentence"].replace("With ", "With at most ", 1)
    return {**facts, **figures}


def resolution(n: int, m: int, needed: int, enough: int, role: str) -> dict[str, Any]:
    """Whether n calibration documents let anything be selected out of m (docs/methods.md, section 3.11).

    `ok` is False where nothing can be selected, True where as few as 1% can, and None between the two, where most
    audits are: a number to know, and nothing that is wrong.
    """
    fewest = max(1, m // 100)
    ok = False if needed > m else True if needed <= fewest else None
    given = f"With {n:,} {role} documents to calibrate on and {m:,} to judge"
    sentence = f"{given}, nothing can be selected unless at least {needed:,} stand out."
    if ok is False:
        sentence = f"{given}, nothing can be selected: at least {needed:,} would have to stand out."
    if not ok:
        sentence += f" To select as few as 1% of the audited documents takes {enough:,} {role} documents."
    return {"minimum_selectable": needed, "calibration_for_1_percent": enough, "ok": ok, "sentence": sentence}
