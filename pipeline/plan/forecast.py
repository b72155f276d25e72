"""The forecast of `seenset plan`: documents, shards, passes, time, and the smallest possible selections."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from statistics import fmean, median
from typing import Any

import torch

from pipeline.checks.blind import sample_documents, windows_of_texts
from pipeline.checks.dependence_plan import read_blocks
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, ModelConfig, display_name
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.scripts import units as words_of
from pipeline.detectors.registry import needed_continuations, needed_prefixes, parse_detectors
from pipeline.endpoint.client import Usage
from pipeline.errors import UserError
from pipeline.models.chat_prompts import AnswerPrompt, rendered_prompts, sent_prompt
from pipeline.models.tokens import open_tokenizer, plain_ids
from pipeline.passes.budget import CPU_BUDGET
from pipeline.plan.outlooks import adapters_and_calibration, outlooks
from pipeline.plan.starter_text import MATRIX_PRODUCT
from pipeline.run.manifest import read_manifest, refused_parameters
from pipeline.run.plan import BYTES_PER_TOKEN, Plan
from pipeline.stages.base import DocumentSize
from pipeline.stages.chat_scoring import chat_settings, read_chats
from pipeline.stages.prefixes import prefix_cost, room_for
from pipeline.stages.registry import forward_passes, request_sizes
from pipeline.store.files import Store

SAMPLED = 100  # documents with versions or of token ids that are read for the forecast
DIFFERENT = 0.01  # p-value of the numbers of windows of two roles up to which a plan warns
LEARNT = "; adapters are trained on the scored tokens alone"
TRAINING_COST = 3  # cost of a document and epoch, in forward passes


def forecast(plan: Plan, model: Mapping[str, Any], checks: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Forecast a run: documents, shards, passes, time, price, and the smallest possible selections.

    The time is an estimate for one worker like this machine, from 2 operations per parameter and token, at the
    measured speed of a matrix product on this machine.

    Args:
        plan: plan of the audit.
        model: description of the model.
        checks: result of `plan_checks`, if the documents were read.
    """
    config, detectors = plan.config, parse_detectors(plan.config.detectors)
    roles: dict[str, Any] = {}
    for role, _ in config.corpus.roles():
        count, exact = plan.documents(role)
        shards = sum(1 for shard in plan.shards if shard.role == role)
        roles[role] = {"documents": count, "exact": exact, "shards": shards}
    adapters, calibration = adapters_and_calibration(config, roles)
    total = sum(entry["documents"] for entry in roles.values())
    everything = sum(measure_extent(entry).rows for entry in plan.inputs)
    average = plan.text_bytes() / BYTES_PER_TOKEN / max(1, everything)
    window = config.corpus.audit.window if config.corpus.audit is not None else 0
    first = _first_documents(plan) if config.corpus.has_chats else None
    chats = read_chats(config, first) if first is not None and isinstance(config.model, ModelConfig) else None
    continued = ask_chats(config, first) if first is not None and needed_continuations(detectors) else None
    most = min(average, config.max_tokens * config.windows) if chats is None else chats.read
    texts, length = _scored_texts(plan) or (1.0, most)
    tokens = round(total * texts * length)
    batch = CPU_BUDGET.forward if config.resources.batch_tokens == "auto" else config.resources.batch_tokens
    room = room_for(config.max_tokens, model.get("max_tokens"))
    prefixes = needed_prefixes(detectors)
    read = {str(one): prefix_cost(one, average, length, batch, room) for one in prefixes}
    passes = [{**entry, **read.get(entry.get("prefix", ""), {})} for entry in plan.passes()]
    if continued is not None:
        passes = [{**entry, **continued.shares(length)} if entry["kind"] == "generate" else entry for entry in passes]
    seconds = None
    if isinstance(config.model, ModelConfig) and model.get("parameters"):
        reads = total * texts * sum(forward_passes(entry) for entry in passes)
        reads += TRAINING_COST * sum(entry["documents"] * entry["epochs"] for entry in adapters)
        speed = measured_flops(model["dtype"]) / 2  # half, to allow for all other operations
        seconds = 2 * model["parameters"] / speed * length * reads
    return {
        "run": config.run,
        "model": {"path": display_name(config.model), **model},
        "roles": roles,
        "limit": plan.limit,
        "shards": len(plan.shards),
        "passes": passes,
        "adapters": adapters,
        "detectors": [detector.column for detector in detectors],
        "estimated_tokens": tokens,
        "endpoint": estimate_price(config, total, plan.text_bytes() / max(1, everything), continued),
        "estimated_seconds_one_worker": None if seconds is None else float(f"{seconds:.3g}"),
        "estimated_from": None if seconds is None else MATRIX_PRODUCT,
        "selections": outlooks(config, roles, (adapters, calibration), *read_blocks(checks or {})),
        **({"window": rows_that_fit(window, average, config.max_tokens)} if window else {}),
        **({"windows": compare_windows(plan)} if config.windows > 1 else {}),
        **({} if chats is None else {"chats": {**asdict(chats), "sentence": chats.sentence + LEARNT * bool(adapters)}}),
        **({} if continued is None else {"continued": {**asdict(continued), "sentence": continued.sentence}}),
    }


@dataclass(frozen=True, slots=True)
class ContinuedChats:
    """What a model is asked to continue of some conversations, and what is compared."""

    documents: int  # conversations that a model continues
    before: float  # mean number of units before the last answer
    answer: float  # mean number of units of the last answer that are compared
    refused: Mapping[str, int]  # other conversations, by the reason
    before_bytes: float  # means
    answer_bytes: float
    unit: str  # tokens; words of an endpoint, whose tokenizer is unknown

    @property
    def share(self) -> float:
        """The share of the conversations that a model continues."""
        return self.documents / max(1, self.documents + sum(self.refused.values()))

    def shares(self, length: float) -> dict[str, tuple[float, float]]:
        """What is read before an answer and written in a draw, as shares of a document of `length` tokens."""
        return {"shares": (self.before / max(1.0, length), self.answer / max(1.0, length))}

    @property
    def sentence(self) -> str:
        """The numbers in words, for `plan`."""
        line = (
            f"of the first {self.documents:,} chats a model continues {self.before:,.0f} {self.unit} on average, and "
            f"{self.answer:,.0f} of the last answer are compared"
        )
        if not self.refused:
            return line
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.refused.items()))
        return f"{line}; {sum(self.refused.values()):,} more cannot be asked ({reasons})"


def ask_chats(config: AuditConfig, documents: Sequence[Document]) -> ContinuedChats:
    """What the audited model would be asked about some conversations.

    Raises:
        UserError: as `chat_settings`.
    """
    chats = [document.chat for document in documents if document.chat is not None]
    units: Callable[[str], Sequence[Any]]
    if isinstance(config.model, ModelConfig):
        tokenizer = open_tokenizer(config.model)
        template = chat_settings(config, ()).open("target", tokenizer)
        made = rendered_prompts(template, chats, config.max_tokens)
        template.close()
        unit, units = "tokens", partial(plain_ids, tokenizer)
    else:
        made = [sent_prompt(chat, config.max_tokens) for chat in chats]
        unit, units = "words", words_of
    prompts = [one for one in made if isinstance(one, AnswerPrompt)]
    refused = Counter(str(one.reason) for one in made if isinstance(one, Unreadable))
    return ContinuedChats(
        len(prompts),
        fmean([len(one.ids or units(one.before)) for one in prompts] or [0]),
        fmean([len(units(one.answer)) for one in prompts] or [0]),
        dict(refused),
        fmean([len(one.before.encode()) for one in prompts] or [0]),
        fmean([len(one.answer.encode()) for one in prompts] or [0]),
        unit,
    )


def _scored_texts(plan: Plan) -> tuple[float, float] | None:
    """Mean number of scored texts per document and of tokens per text, over the first documents.

    None where documents have neither versions nor token ids, or none of the first ones can be scored.
    """
    corpus = plan.config.corpus
    if not corpus.has_versions and not corpus.has_ids:
        return None
    scored = [document.texts for document in _first_documents(plan)]
    if not scored:
        return None
    counts = [
        text.count(" ") + 1 if corpus.has_ids else len(text.encode()) / BYTES_PER_TOKEN for text in chain(*scored)
    ]
    return len(counts) / len(scored), fmean(min(count, plan.config.max_tokens) for count in counts)


def _first_documents(plan: Plan) -> list[Document]:
    """The readable ones of the first documents."""
    first = islice(chain.from_iterable(map(read_shard, plan.shards)), SAMPLED)
    return [document for document in first if document.problem is None]


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


def estimate_price(
    config: AuditConfig, documents: int, average_bytes: float, chats: ContinuedChats | None = None
) -> dict[str, Any] | None:
    """Estimate requests, tokens and price of an audit; None without an endpoint.

    Args:
        config: the audit's configuration.
        documents: total number of documents.
        average_bytes: mean size of a document.
        chats: what is asked about the first ones, if they are chats; those that cannot be asked cost nothing.

    Returns:
        "requests", "prompt_tokens" (about), "answer_tokens" (at most), "price" (about; 0 without configured prices),
        "over": the limits of the budget that would be exceeded, and "parameters": lines on the parameters that the
        endpoint refuses. Repeated requests are not included.
    """
    size = DocumentSize(min(average_bytes, 6.0 * config.max_tokens))  # a word and its blank
    if chats is not None:
        size = DocumentSize(size.text, chats.before_bytes, chats.answer_bytes)
        documents = round(documents * chats.share)
    totals: dict[str, list[int]] = {}
    models: dict[str, EndpointConfig] = {}
    for questions in request_sizes(config, size):
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
    parameters = _refused_parameters(config.run)
    return {**dict(zip(names, sums, strict=True)), "price": round(price, 2), "over": over, "parameters": parameters}


def _refused_parameters(run: str) -> list[str]:
    """The parameters that an endpoint refuses as the run has recorded them, or when they become known."""
    try:
        manifest = read_manifest(Store(run))
    except (UserError, OSError):  # the run reports it
        manifest = None
    if manifest is None or not any(model.parameters for model in manifest.models.values()):
        return ["which parameters of requests the endpoint takes is asked at the start of the run"]
    return refused_parameters(manifest.models) or ["the endpoint takes all parameters of requests"]


def rows_that_fit(window: int, average: float, most: int) -> str:
    """States whether a run of consecutive rows fits into `max_tokens`.

    Args:
        window: rows per document.
        average: approximate number of tokens per row.
        most: `max_tokens`.
    """
    line = f"a document is {window:,} rows of about {average:,.0f} tokens each; max_tokens is {most:,}"
    if window * average <= most:
        return line
    fit = int(most / average)
    return f"warning: {line}, " + (f"so that window: {fit} fits" if fit > 1 else "so that no two rows fit")


def compare_windows(plan: Plan) -> str:
    """States the mean number of windows in each role, over some of its documents, and whether they differ."""
    from scipy.stats import mannwhitneyu

    counts: dict[str, list[int]] = {}
    for role, _ in plan.config.corpus.roles():
        drawn = sample_documents([shard for shard in plan.shards if shard.role == role], SAMPLED)
        counts[role] = windows_of_texts(plan.config, [document.text for _, document in drawn])
    means = ", ".join(f"{role} {fmean(some):.1f}" for role, some in counts.items() if some)
    known = [some for role, some in counts.items() if role != "audit" and some]
    audited = counts.get("audit") or []
    line = f"windows: of at most {plan.config.windows} a document has on average: {means}"
    if not audited or all(mannwhitneyu(audited, some).pvalue > DIFFERENT for some in known):
        return line
    return (
        f"warning: {line}; the roles differ, and so may their scores without any membership: take known documents of "
        "the length of the audited ones"
    )
