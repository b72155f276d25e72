"""The forecast of `seenset plan`: documents, shards, passes, time, and the shortest possible list of each selection."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from itertools import chain, islice
from statistics import fmean, median
from typing import Any

from pipeline.audit.allocation import OWN_CORPUS, adapter_corpus_shards, too_few, too_few_shots
from pipeline.audit.plan import BYTES_PER_TOKEN, Plan
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, ModelConfig, display_name
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import extent_of
from pipeline.detectors.registry import adapters_of, parse_detectors, prefixes_of
from pipeline.endpoint.client import Usage
from pipeline.passes.budget import CPU_BUDGET
from pipeline.report.wording import numbers as wording
from pipeline.report.wording.starter import MATRIX_PRODUCT
from pipeline.report.wording.verdict import rows_that_fit
from pipeline.selection.bounds import fewest_in_list
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.passes import PLAIN, Basis
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.record import Rule, applied_to
from pipeline.selection.ranked import factor_at, fewest_at_best, fewest_selectable, known_needed
from pipeline.selection.versions import EXPECTED
from pipeline.stages.prefixes import reading_of, room_for
from pipeline.stages.registry import forward_passes, questions_of

SAMPLED = 100  # documents with versions or of token ids that are read for the forecast
TRAINING_COST = 3  # of a document in an epoch, in forward passes

HALF = Fraction(1, 2)
Allocated = tuple[list[dict[str, Any]], dict[str, int]]  # adapters, and known documents that calibrate by role


def forecast(plan: Plan, model: Mapping[str, Any]) -> dict[str, Any]:
    """Forecast a run: documents, shards, passes, time, price, and the smallest possible selections.

    The time is a guess for one worker like this machine, from 2 operations a parameter and token, at the
    speed of a matrix product that is measured here and now.
    """
    config = plan.config
    roles: dict[str, Any] = {}
    for role, _ in config.corpus.roles():
        count, exact = plan.documents(role)
        shards = sum(1 for shard in plan.shards if shard.role == role)
        roles[role] = {"documents": count, "exact": exact, "shards": shards}
    adapters, calibration = adapters_and_calibration(config, roles)
    total = sum(entry["documents"] for entry in roles.values())
    everything = sum(extent_of(entry).rows for entry in plan.inputs)
    average = plan.text_bytes() / BYTES_PER_TOKEN / max(1, everything)
    window = config.corpus.audit.window if config.corpus.audit is not None else 0
    texts, length = _scored_texts(plan) or (1.0, min(average, config.max_tokens))
    tokens = round(total * texts * length)
    batch = CPU_BUDGET.forward if config.resources.batch_tokens == "auto" else config.resources.batch_tokens
    room = room_for(config.max_tokens, model.get("max_tokens"))
    prefixes = prefixes_of(parse_detectors(config.detectors))
    read = {str(one): reading_of(one, average, length, batch, room) for one in prefixes}
    passes = [{**entry, **read.get(entry.get("prefix", ""), {})} for entry in plan.passes()]
    seconds = None
    if isinstance(config.model, ModelConfig) and model.get("parameters"):
        reads = total * texts * sum(forward_passes(entry) for entry in passes)
        reads += TRAINING_COST * sum(entry["documents"] * entry["epochs"] for entry in adapters)
        speed = measured_flops(model["dtype"]) / 2  # half, for all that is not a matrix product
        seconds = 2 * model["parameters"] / speed * length * reads
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
        "estimated_from": None if seconds is None else MATRIX_PRODUCT,
        "selections": outlooks(config, roles, (adapters, calibration)),
        **({"window": rows_that_fit(window, average, config.max_tokens)} if window else {}),
    }


def _scored_texts(plan: Plan) -> tuple[float, float] | None:
    """Texts that are scored of a document, and tokens of a text, on average over the first documents.

    None where they are neither versions nor token ids, or none of the first ones can be scored.
    """
    corpus = plan.config.corpus
    if corpus.versions is None and not corpus.has_ids:
        return None
    first = islice(chain.from_iterable(map(read_shard, plan.shards)), SAMPLED)
    scored = [document.texts for document in first if document.problem is None]
    if not scored:
        return None
    counts = [
        text.count(" ") + 1 if corpus.has_ids else len(text.encode()) / BYTES_PER_TOKEN for text in chain(*scored)
    ]
    return len(counts) / len(scored), fmean(min(count, plan.config.max_tokens) for count in counts)


def measured_flops(dtype: str) -> float:
    """Floating-point operations a second of one matrix product on this machine, the median of a few."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 768
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype, torch.float32), device=device)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / median(times)


def estimate_price(config: AuditConfig, documents: int, average_bytes: float) -> dict[str, Any] | None:
    """Estimate requests, tokens and price of an audit; None without an endpoint.

    Args:
        config: of the audit.
        documents: in all.
        average_bytes: of a document.

    Returns:
        "requests", "prompt_tokens" (about), "answer_tokens" (at most), "price" (about; 0 without configured prices)
        and "over": the limits of the budget that would be exceeded. Repeated requests are not included.
    """
    text_bytes = min(average_bytes, 6.0 * config.max_tokens)  # a word and its blank
    totals: dict[str, list[int]] = {}
    models: dict[str, EndpointConfig] = {}
    for questions in questions_of(config, text_bytes):
        key = questions.model.endpoint + questions.model.name
        models[key] = questions.model
        total = totals.setdefault(key, [0, 0, 0])
        prompts = round(questions.prompt_bytes / BYTES_PER_TOKEN)
        for place, amount in enumerate((questions.requests, prompts, questions.answer_tokens)):
            total[place] += documents * amount
    if not totals:
        return None
    price, over = 0.0, []
    for key, (requests, prompts, answers) in totals.items():
        model = models[key]
        price += (prompts * model.price.prompt + answers * model.price.answer) / 1e6
        usage = Usage(requests, prompts + answers)
        for unit in ("requests", "tokens"):
            limit = getattr(model.budget, unit)
            if limit is not None and getattr(usage, unit) > limit:
                over.append(f"model.budget.{unit} is {limit:,}")
    sums = [sum(column) for column in zip(*totals.values(), strict=True)]
    names = ("requests", "prompt_tokens", "answer_tokens")
    return {**dict(zip(names, sums, strict=True)), "price": round(price, 2), "over": over}


def outlooks(config: AuditConfig, roles: Mapping[str, Any], allocated: Allocated | None = None) -> list[dict[str, Any]]:
    """The smallest possible selection of each question.

    Args:
        config: of the audit.
        roles: role -> "documents", their number, and "exact", whether it is no estimate.
        allocated: from `_adapters`, where the caller has it.

    Raises:
        UserError: an adapter is to be trained on more known documents than there are.
    """
    adapters, calibration = allocated or adapters_and_calibration(config, roles)
    at_most = any(config.fsd.adapter(entry["name"]).group is not None for entry in adapters)
    if not config.selections:
        return []
    m = roles["audit"]["documents"]
    if config.corpus.versions is not None:
        return [_outlook_by_versions(selection, m) for selection in config.selections]
    return [_outlook(selection, m, calibration, at_most) for selection in config.selections]


def _outlook_by_versions(selection: SelectionConfig, m: int) -> dict[str, Any]:
    """The smallest possible selection of m documents with versions, and what one may expect of it."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    by = procedure_of(selection.procedure).versions
    assert by is not None
    least, sentence = by.fewest(selection.exact_alpha, m, None)
    expected = [asdict(one) for one in EXPECTED]
    return {**facts, "minimum_selectable": least, "ok": least <= m, "sentence": sentence, "expected": expected}


def adapters_and_calibration(config: AuditConfig, roles: Mapping[str, Any]) -> Allocated:
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
    for prefix in prefixes_of(parse_detectors(config.detectors)):
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
        return {**facts, "minimum_selectable": least, "ok": least <= m, "sentence": sentence}
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
        basis = Basis(rule.halved, grouped=calibrated.grouped)
        figures = resolution(n, m, needed, enough, role, basis)
        if rule.procedure.estimates:
            figures |= _by_share(rule, known, m, figures, role, basis)
        elif not chosen.built_in:
            given = wording.ResolutionFacts(n, m, role, PLAIN)
            sentence = wording.shortest_list_of_plugin(given, needed, selection.procedure)
            figures |= {"sentence": sentence, "ok": None}
    sentence = wording.before_reading(figures["sentence"], calibrated.weighted, at_most)
    ok = figures["ok"] or None if calibrated.weighted else figures["ok"]
    return {**facts, **figures, "sentence": sentence, "ok": ok}


def _by_share(rule: Rule, known: int, m: int, figures: Mapping[str, Any], role: str, basis: Basis) -> dict[str, Any]:
    """What is different where the procedure estimates the share of nulls: the figures hold at a share of 1."""
    needed, best = figures["minimum_selectable"], fewest_at_best(rule, known, m)
    half = max(best, fewest_selectable(rule, known, m, factor_at(rule, m, HALF)))
    sentence = wording.shortest_list_by_share(
        wording.ResolutionFacts(rule.calibrating(known), m, role, basis),
        (needed, half, best),
        figures["ok"],
        figures["calibration_for_1_percent"],
    )
    ok = False if best > m else figures["ok"] or None
    return {"sentence": sentence, "ok": ok, "minimum_at_best": best}


def resolution(n: int, m: int, needed: int, enough: int | None, role: str, basis: Basis) -> dict[str, Any]:
    """Whether n calibration documents let anything be selected out of m (docs/methods.md, section 3.11).

    `ok` is False where nothing can be selected, True where as few as 1% can, and None between the two, where most
    audits are: a number to know, and nothing that is wrong.

    Args:
        n: documents that calibrate.
        m: audited documents.
        needed: the fewest that can be selected.
        enough: documents of the role that it takes to select 1%; None where their number does not matter.
        role: of the documents that calibrate.
        basis: what the numbers refer to.
    """
    fewest = max(1, m // 100)
    ok = False if needed > m else True if needed <= fewest else None
    sentence = basis.sentence
    if sentence is None:
        sentence = wording.shortest_list(wording.ResolutionFacts(n, m, role, basis), needed, ok, enough)
    return {"minimum_selectable": needed, "calibration_for_1_percent": enough, "ok": ok, "sentence": sentence}
