"""Estimate the requests, tokens and price of an audit's endpoints."""

from __future__ import annotations

import math
from typing import Any

from pipeline.audit.plan import BYTES_PER_TOKEN
from pipeline.audit.stages import endpoint_passes, model_of, sample_settings
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Usage
from pipeline.stages.continuations import token_limit


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
    for model, amounts in _amounts_per_document(config, text_bytes):
        models[model.endpoint + model.name] = model
        total = totals.setdefault(model.endpoint + model.name, [0, 0, 0])
        for place, amount in enumerate(amounts):
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


def _amounts_per_document(config: AuditConfig, text_bytes: float) -> list[tuple[EndpointConfig, tuple[int, int, int]]]:
    """For each endpoint and purpose the requests, prompt tokens and answer tokens of an average document."""
    costs: list[tuple[EndpointConfig, tuple[int, int, int]]] = []
    if isinstance(config.model, EndpointConfig):
        for samples in sample_settings(config):
            requests = math.ceil(samples.draws / config.model.choices)
            instruction = len(config.model.instruction) if config.model.api == "chat" else 0
            prompt = (instruction + samples.continued.prefix_ratio * text_bytes) / BYTES_PER_TOKEN
            limit = token_limit(round((1 - samples.continued.prefix_ratio) * text_bytes), samples.continued)
            costs.append((config.model, (requests, round(requests * prompt), samples.draws * limit)))
    for needed in endpoint_passes(config):
        model = model_of(config, needed)
        assert isinstance(model, EndpointConfig)
        costs.append((model, (1, round(text_bytes / BYTES_PER_TOKEN), 1)))
    return costs
