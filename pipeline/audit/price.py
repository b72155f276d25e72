"""Estimate the requests, tokens and price of an audit's endpoints."""

from __future__ import annotations

from typing import Any

from pipeline.audit.plan import BYTES_PER_TOKEN
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Usage
from pipeline.stages.registry import questions_of


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
