"""The forecast of `seenset plan`: documents, shards, passes, time, and the smallest possible selections."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import fmean, median
from typing import Any

import torch

from pipeline.audit.plan import BYTES_PER_TOKEN, Plan
from pipeline.audit.resolution import adapters_and_calibration, outlooks
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, ModelConfig, display_name
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import extent_of
from pipeline.detectors.registry import parse_detectors, prefixes_of
from pipeline.endpoint.client import Usage
from pipeline.models.load import LanguageModel, open_made_up
from pipeline.passes.budget import CPU_BUDGET
from pipeline.passes.forward import forward
from pipeline.report.wording.starter import MATRIX_PRODUCT, some_layers
from pipeline.report.wording.versions import rows_that_fit
from pipeline.stages.prefixes import reading_of, room_for
from pipeline.stages.registry import forward_passes, questions_of

SAMPLED = 100  # documents with versions or of token ids that are read for the forecast
TRAINING_COST = 3  # of a document in an epoch, in forward passes


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
    seconds = source = None
    if isinstance(config.model, ModelConfig) and model.get("parameters"):
        reads = total * texts * sum(forward_passes(entry) for entry in passes)
        reads += TRAINING_COST * sum(entry["documents"] * entry["epochs"] for entry in adapters)
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


PASS_SECONDS = 0.15  # of one measured pass, about
REPEATS = 3  # after one that warms up
SLOW_SECONDS = 0.6  # of passes, after which no more are measured
SOME = 3  # layers that are built
LONGEST, FEWEST = 512, 32  # tokens of a document, tokens of a batch
BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
MOST_BYTES = 3 << 30  # of made-up weights


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a token in a forward pass."""

    seconds: float  # > 0
    source: str  # what was measured, to be read after "from"


def measure_pace(config: ModelConfig, dtype: str, parameters: int, length: float, statistics: frozenset[str]) -> Pace:
    """Measure a forward pass of a model with made-up weights and 1 and 3 of its layers, and extend it to all of them.

    On a CPU it is measured on one thread, which other work on the machine disturbs least, and taken to be as much
    faster on all of them as a matrix product is. Where that takes too much memory or time, or the shape cannot be
    built, as of a quantised model: 2 floating-point operations a parameter and token, at the speed of a matrix product,
    halved for all that is not a matrix product.

    Args:
        config: of the model.
        dtype: of its weights, such as float32.
        parameters: of the model.
        length: tokens of a document, on average.
        statistics: that the pass measures, of `passes.statistics.STATISTICS`.
    """
    threads = torch.get_num_threads()
    speed = measured_flops(dtype)
    try:
        torch.set_num_threads(1)
        single = speed if torch.cuda.is_available() else measured_flops(dtype)
        rough = Pace(2 * parameters / (max(single, speed) / 2), MATRIX_PRODUCT)
        if config.quantization is not None:
            return rough
        pace = _of_layers(config, dtype, parameters, single / 2, length, statistics)
        return rough if pace is None else replace(pace, seconds=pace.seconds / max(1.0, speed / single))
    except Exception:  # a model's code may need what made-up weights do not give; its real faults show at load
        return rough
    finally:
        torch.set_num_threads(threads)


def _of_layers(
    config: ModelConfig, dtype: str, parameters: int, speed: float, length: float, statistics: frozenset[str]
) -> Pace | None:
    """The pace by layers; None where 3 of them are too many to measure here."""
    made_up = open_made_up(config, dtype, SOME, MOST_BYTES)
    if made_up is None:
        return None
    lm, some, total = made_up
    share = sum(parameter.numel() for parameter in lm.model.parameters()) / parameters
    each = 2 * share * parameters / speed
    tokens = max(FEWEST, min(BATCH_TOKENS[lm.device.type], int(PASS_SECONDS / each)))
    if tokens * each > SLOW_SECONDS:
        return None
    size = max(2, min(LONGEST, round(length), tokens))
    ids = [[1] * size for _ in range(max(1, tokens // size))]
    seconds = _seconds(lm, ids, statistics)
    source = some_layers(some, total)
    by_size = seconds / share
    if some > 1 and (single := open_made_up(config, dtype, 1, MOST_BYTES)) is not None:
        layer = (seconds - _seconds(single[0], ids, statistics)) / (some - 1)
        return Pace(
            max(seconds + (total - some) * layer, by_size / 2) / (size * len(ids)), source
        )  # layer may be noise
    return Pace(by_size / (size * len(ids)), source)


def _seconds(lm: LanguageModel, ids: list[list[int]], statistics: frozenset[str]) -> float:
    """The time of a pass, the best of a few after one that warms up."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= REPEATS and sum(times) < SLOW_SECONDS):
        began = time.perf_counter()
        forward(lm, ids, statistics).log_prob.sum().item()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measured_flops(dtype: str) -> float:
    """Floating-point operations a second of one matrix product on this machine, the median of a few."""
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
