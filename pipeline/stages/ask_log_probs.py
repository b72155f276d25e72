"""Log-probabilities of the tokens of documents from an endpoint that returns them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.models import AnyModel, EndpointConfig
from pipeline.corpus.documents import Document, text_digest
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Pass
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Fault, Refusal, Usage, prompt_tokens
from pipeline.errors import ExitCode, StopError
from pipeline.models.tokens import count_words
from pipeline.passes.statistics import text_read
from pipeline.stages.base import (
    BatchSize,
    Entry,
    Output,
    Placement,
    Questions,
    SharedEndpoint,
    Stage,
    StageKind,
    Wanted,
    rows_schema,
)
from pipeline.stages.sample import ENDPOINT_WINDOW
from pipeline.store.files import Store

PROBE = "The quick brown fox jumps over the lazy dog."
SCHEMA = rows_schema(("log_probs", pa.list_(pa.float64())))
"""Natural log-probabilities, <= 0; the first token has none."""
Way = Literal["prompt_logprobs", "echo"]
WAYS: tuple[Way, ...] = ("prompt_logprobs", "echo")


@dataclass(frozen=True, slots=True)
class LogProbSettings:
    """Everything that log-probabilities depend on."""

    model: EndpointConfig
    forward: Pass
    max_tokens: int

    @property
    def folder(self) -> str:
        """The folder of the files: log_probs/target-plain."""
        return f"log_probs/{self.forward.model}-{self.forward.text}"


class EndpointReader:
    """Requests the log-probabilities of the tokens of a shard's documents."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Prepare."""
        self.stage = stage
        self.settings: LogProbSettings = stage.settings
        self.endpoint = placement.endpoint
        self.window = ENDPOINT_WINDOW
        self.batch_size: BatchSize | None = None

    async def _chosen_way(self, shared: SharedEndpoint, answers: Answers) -> Way:
        """How the endpoint returns log-probabilities, determined once for all workers."""
        async with shared.choosing:
            if shared.way is None:
                question = answers.ask()
                try:
                    shared.way = await find_way(self.stage, shared.client, question.spent, question.book)
                finally:
                    question.finish()
            return cast(Way, shared.way)

    def open(self, shard: Shard, store: Store, output: Output) -> dict[tuple[int, str], list[float]]:
        """The answers of earlier attempts, by row number and digest of the text."""
        output.answers = self.stage.answers(shard, store)
        return {(line["row"], line["text"]): line["log_probs"] for line in output.answers.before()}

    def filed(self, row: Mapping[str, Any], text: str) -> Iterator[dict[str, Any]]:
        """The answer in a row of an earlier file, if it has one."""
        if row["log_probs"]:
            yield {"row": row["row"], "text": text, "log_probs": row["log_probs"]}

    def prepare(
        self, documents: list[Document], inputs: dict[tuple[int, str], list[float]], output: Output
    ) -> list[Entry]:
        """The documents with their answers, if any."""
        return [Entry(each, 0, inputs.get((each.row, text_digest(each.text)))) for each in documents]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Request the log-probabilities of documents."""
        assert self.endpoint is not None
        assert output.answers is not None
        for entry in batch:
            if entry.work is not None:
                self._keep(entry.document, entry.work, output)
        missing = [entry.document for entry in batch if entry.work is None]
        self.endpoint.each(missing, partial(self._ask, output=output, shared=self.endpoint, answers=output.answers))

    async def _ask(self, document: Document, output: Output, shared: SharedEndpoint, answers: Answers) -> None:
        text = document.text[: count_words([document.text], self.settings.max_tokens)[0].kept]
        text = text_read(text, self.settings.forward.text, self.stage.seed)
        way = await self._chosen_way(shared, answers)
        question, values = answers.ask(), list[float]()
        try:
            values = await ask_log_probs(shared.client, self.settings.model, way, text, question.spent, question.book)
            self._keep(document, values, output)
        except (Fault, Refusal) as error:
            output.refuse(document, "model_error", f"endpoint: {error}")
        finally:
            answer = {"row": document.row, "text": text_digest(document.text), "log_probs": values}
            question.finish(**(answer if values else {}))

    def _keep(self, document: Document, values: list[float], output: Output) -> None:
        output.keep(document, log_probs=values)
        output.tokens += len(values)


async def ask_log_probs(
    endpoint: Endpoint,
    model: EndpointConfig,
    way: Way,
    text: str,
    spent: Usage,
    book: Callable[[Usage], None] = lambda most: None,
) -> list[float]:
    """Natural log-probabilities of a text's tokens except the first, in order.

    Raises:
        Fault, Refusal, StopError: as `Endpoint.ask`.
    """
    body: dict[str, Any] = {"model": model.name, "prompt": text, "temperature": 0}
    if way == "prompt_logprobs":
        body |= {"max_tokens": 1, "prompt_logprobs": 0}
    else:
        body |= {"max_tokens": 0, "echo": True, "logprobs": 1}
    read = _of_prompt if way == "prompt_logprobs" else _of_echo
    most = prompt_tokens(text) + 1
    return await endpoint.ask("/completions", body, most, lambda value: read(value, text), spent, book)


def _of_prompt(value: dict[str, Any], text: str) -> list[float]:
    """vLLM: for each token of the prompt a mapping from token ids to their values, with the token's id first."""
    entries = _choice(value).get("prompt_logprobs") or value.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise Refusal("no prompt_logprobs in the answer")
    try:
        return _checked([None if not entry else next(iter(entry.values()))["logprob"] for entry in entries])
    except (AttributeError, KeyError, TypeError):
        raise Fault("prompt_logprobs are not what they should be") from None


def _of_echo(value: dict[str, Any], text: str) -> list[float]:
    """OpenAI's echo: the prompt's tokens, followed by generated tokens."""
    choice = _choice(value)
    log_probs = choice.get("logprobs")
    values = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
    if not isinstance(values, list) or not str(choice.get("text", "")).startswith(text[:16]):
        raise Refusal("no log-probabilities of the prompt in the answer")
    usage = value.get("usage")
    prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return _checked(values[:prompt] if isinstance(prompt, int) and prompt > 0 else values)


def _choice(value: dict[str, Any]) -> dict[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault("answer has no choices")
    return choices[0]


def _checked(values: list[Any]) -> list[float]:
    rest = values[1:] if values[:1] == [None] else values
    if any(isinstance(entry, bool) or not isinstance(entry, (int, float)) for entry in rest):
        raise Fault("a token has no log-probability")
    return [float(entry) for entry in rest]


async def find_way(
    stage: Stage, endpoint: Endpoint, spent: Usage, book: Callable[[Usage], None] = lambda most: None
) -> Way:
    """How the endpoint of a stage returns log-probabilities of a prompt: as configured, or determined by requests.

    Raises:
        StopError: the endpoint does not return them, or does not answer.
    """
    model: EndpointConfig = stage.settings.model
    problems, answered = [], False
    for way in WAYS if model.log_probs == "auto" else (model.log_probs,):
        assert way in WAYS
        try:
            if len(await ask_log_probs(endpoint, model, way, PROBE, spent, book)) >= 2:
                return way
            problem, answered = "too few values", True
        except (Fault, Refusal) as error:  # some servers fail on unknown parameters
            problem, answered = str(error), answered or isinstance(error, Refusal)
        problems.append(f"{way}: {problem}")
    if not answered:
        raise StopError(f"endpoint {model.endpoint} does not answer: {'; '.join(problems)}", ExitCode.INCOMPLETE)
    raise StopError(
        f"detectors {', '.join(stage.wanted_by)} need prompt log-probabilities, which endpoint {model.endpoint} does "
        f"not tell ({'; '.join(problems)}); without them there are samia and samia_zlib"
    )


def _check(config: AuditConfig) -> None:
    """Check with one or two requests that endpoints return the log-probabilities that detectors read.

    Raises:
        StopError: an endpoint does not return them.
    """

    async def check(stage: Stage) -> None:
        async with Endpoint(stage.settings.model) as endpoint:
            await find_way(stage, endpoint, Usage())

    for stage in {stage.settings.model: stage for stage in _stages(Wanted(config), ())}.values():
        asyncio.run(check(stage))


def _model_of(needed: Pass, config: AuditConfig) -> AnyModel | None:
    return config.model if needed.model == "target" else config.reference_model


def _serves(needed: Pass, config: AuditConfig) -> bool:
    return needed.kind == "forward" and isinstance(_model_of(needed, config), EndpointConfig)


def _stages(wanted: Wanted, earlier: Sequence[Stage]) -> list[Stage]:
    return [_stage(wanted, needed) for needed in wanted.passes if _serves(needed, wanted.config)]


def _stage(wanted: Wanted, needed: Pass) -> Stage:
    model = _model_of(needed, wanted.config)
    assert isinstance(model, EndpointConfig)
    settings = LogProbSettings(model, needed, wanted.config.max_tokens)
    columns = [
        detector.column
        for detector in wanted.detectors
        if any(p.kind == "forward" and _model_of(p, wanted.config) == model for p in detector.needs)
    ]
    return wanted.stage(
        settings.folder,
        folder=settings.folder,
        schema=SCHEMA,
        settings=settings,
        make=EndpointReader,
        endpoint=model,
        wanted_by=tuple(columns),
    )


def _questions(config: AuditConfig, text_bytes: float) -> list[Questions]:
    """One request for each pass; the endpoint generates one token."""
    return [Questions(stage.settings.model, 1, text_bytes, 1) for stage in _stages(Wanted(config), ())]


KIND = StageKind("log_probs", "log_probs", _serves, _stages, _check, _questions, asks=True)
