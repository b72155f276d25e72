"""Log-probabilities of the tokens of documents from an endpoint that returns them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.models import AnyModel, EndpointConfig
from pipeline.corpus.documents import Document, text_digest
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Pass
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Fault, Refusal, Usage, prompt_tokens
from pipeline.endpoint.log_probs import (
    PROBES,
    WAYS,
    AnswerForm,
    FormError,
    PromptAnswer,
    Way,
    answer_in,
    form_of_answers,
    read_log_probs,
)
from pipeline.endpoint.parameters import (
    PROBE_TEXT,
    Adjustments,
    SampleRequest,
    check_still_taken,
    find_adjustments,
)
from pipeline.errors import ExitCode, StopError
from pipeline.models.tokens import count_words
from pipeline.passes.statistics import text_read
from pipeline.stages.base import (
    BatchSize,
    DocumentSize,
    Entry,
    Output,
    Placement,
    Questions,
    SharedEndpoint,
    Stage,
    StageKind,
    StagePlan,
    rows_schema,
)
from pipeline.stages.sample import ENDPOINT_WINDOW
from pipeline.store.files import Store

CHECKS = 4
"""Version of the checks of answers; answers that passed those of another version are not used."""

STOPS = (" ", "e", ".", "\n")
"""Ends of an unwanted continuation: llama-cpp-python takes a limit of 0 tokens for none, and fills its context."""

SCHEMA = rows_schema(("log_probs", pa.list_(pa.float64())))
"""Natural log-probabilities, <= 0; the first token has none."""


@dataclass(frozen=True, slots=True)
class LogProbSettings:
    """Everything that log-probabilities depend on."""

    model: EndpointConfig
    forward: Pass
    max_tokens: int
    checks: int = CHECKS
    parameters: Adjustments | None = None  # of requests; None: the endpoint takes all of them

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

    async def _known_form(self, shared: SharedEndpoint, answers: Answers) -> tuple[AnswerForm, int]:
        """The form of the endpoint's answers and the tokens to generate, determined once for all workers."""
        async with shared.choosing:
            if shared.form is None:
                question = answers.ask()
                try:
                    shared.form = await find_form(self.stage, shared.client, question.spent, question.book)
                finally:
                    question.finish()
            return cast("tuple[AnswerForm, int]", shared.form)

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
        form, generated = await self._known_form(shared, answers)
        question, values = answers.ask(), list[float]()
        try:
            request = PromptRequest(text, form.way, generated, self.settings.parameters)
            values = await ask_prompt(
                shared.client, request, lambda answer: read_log_probs(answer, text, form), question.spent, question.book
            )
            self._keep(document, values, output)
        except (Fault, Refusal) as error:
            if isinstance(error, Refusal):
                parameters, bill = self.settings.parameters or Adjustments(), (question.spent, question.book)
                await check_still_taken(shared.client, _sample_request(self.stage), parameters, error, bill)
            output.refuse(document, getattr(error, "reason", Reason.MODEL_ERROR), f"endpoint: {error}")
        finally:
            answer = {"row": document.row, "text": text_digest(document.text), "log_probs": values}
            question.finish(**(answer if values else {}))

    def _keep(self, document: Document, values: list[float], output: Output) -> None:
        output.keep(document, log_probs=values)
        output.tokens += len(values)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request for the log-probabilities of the tokens of a text."""

    text: str
    way: Way
    generated: int = 0  # tokens behind an echo; some servers generate at least one, or without 1 as many as fit
    parameters: Adjustments | None = None

    def body(self, model: EndpointConfig) -> dict[str, Any]:
        """The body of the request, as JSON values."""
        body: dict[str, Any] = {"model": model.name, "prompt": self.text, "temperature": 0}
        if self.way == "prompt_logprobs":
            body |= {"max_tokens": 1, "prompt_logprobs": 0}
        else:
            body |= {"max_tokens": self.generated, "echo": True, "logprobs": 1}
            body |= {} if self.generated else {"stop": STOPS}
        return body if self.parameters is None else self.parameters.adjust(body)


Parsed = TypeVar("Parsed")


async def ask_prompt(
    endpoint: Endpoint,
    request: PromptRequest,
    read: Callable[[PromptAnswer], Parsed],
    spent: Usage,
    book: Callable[[Usage], None] = lambda most: None,
) -> Parsed:
    """Request the log-probabilities of the tokens of a text.

    Args:
        endpoint: client of the endpoint.
        request: the text, and how it is requested.
        read: reads the answer; may raise `Refusal`.
        spent: each attempt adds its cost.
        book: called before each attempt with its maximum cost.

    Raises:
        Fault, Refusal, StopError: as `Endpoint.ask`.
    """
    text, way = request.text, request.way
    return await endpoint.ask(
        "/completions",
        request.body(endpoint.config),
        prompt_tokens(text) + 1,
        lambda value: read(answer_in(value, way, text)),
        spent,
        book,
    )


async def find_form(
    stage: Stage, endpoint: Endpoint, spent: Usage, book: Callable[[Usage], None] = lambda most: None
) -> tuple[AnswerForm, int]:
    """The form of an endpoint's answers with log-probabilities of a prompt, and the tokens to generate behind an echo.

    Each way is tried with two texts, as configured or one after the other.

    Raises:
        StopError: the endpoint does not return log-probabilities that pass the checks, or does not answer.
    """
    model: EndpointConfig = stage.settings.model
    parameters = stage.settings.parameters
    problems, answered = [], False
    usable: tuple[AnswerForm, int] | None = None
    for way, generated in _requests(model):
        try:
            answers = [
                await ask_prompt(
                    endpoint, PromptRequest(text, way, generated, parameters), lambda one: one, spent, book
                )
                for text in PROBES
            ]
            usable = form_of_answers(way, answers), generated
            if usable[0].behind <= 1:
                return usable  # else the server may generate fewer tokens where the number is limited
        except (Fault, Refusal, FormError) as error:  # some servers fail on unknown parameters
            problem, answered = f"{way}: {error}", answered or not isinstance(error, Fault)
            problems += [] if problem in problems else [problem]
        endpoint.refused = 0  # a refused parameter is no refused document
    if usable is not None:
        return usable
    if not answered:
        raise StopError(f"endpoint {model.endpoint} does not answer: {'; '.join(problems)}", ExitCode.INCOMPLETE)
    raise StopError(
        f"detectors {', '.join(stage.wanted_by)} need prompt log-probabilities, which endpoint {model.endpoint} does "
        f"not return ({'; '.join(problems)}); without them there are samia and samia_zlib"
    )


def _requests(model: EndpointConfig) -> Iterator[tuple[Way, int]]:
    """The ways of a request for log-probabilities, with the tokens to generate behind an echo."""
    for way in WAYS:
        if model.log_probs in ("auto", way):
            yield way, 0
            if way == "echo":
                yield way, 1


def _check(config: AuditConfig) -> list[str]:
    """Check with requests of two lengths that endpoints return the log-probabilities that detectors read.

    Returns:
        A line for each endpoint.

    Raises:
        StopError: an endpoint does not return them.
    """

    async def check(stage: Stage) -> str:
        async with Endpoint(stage.settings.model) as endpoint:
            changes = await find_adjustments(endpoint, _sample_request(stage), Usage())
            adjusted = _stages(StagePlan(config, parameters={stage.folder: changes}), ())
            (stage,) = (one for one in adjusted if one.folder == stage.folder)
            form, _ = await find_form(stage, endpoint, Usage())
        return _sentence(stage.settings.model, form)

    stages = {stage.settings.model: stage for stage in _stages(StagePlan(config), ())}
    return [asyncio.run(check(stage)) for stage in stages.values()]


def _sentence(model: EndpointConfig, form: AnswerForm) -> str:
    """What the probes of an endpoint have shown."""
    compared = ["tokens that give the text"] if form.texts else []
    compared += [] if form.unlisted is None else ["as many as the endpoint counts"]
    head = f"endpoint {model.endpoint} returns log-probabilities of a prompt ({form.way})"
    if form.texts:
        return f"{head}: {', '.join(compared)}"
    rest = "only their number was compared" if compared else "neither they nor their number could be compared"
    return f"note: {head} whose tokens have no texts to compare with the prompt: {rest}"


def _sample_request(stage: Stage) -> SampleRequest:
    """A request with the parameters of all requests of a stage, except those that ask for log-probabilities."""
    body = {"model": stage.settings.model.name, "prompt": PROBE_TEXT, "temperature": 0, "max_tokens": 1}
    return SampleRequest("/completions", body)


def _needed_model(needed: Pass, config: AuditConfig) -> AnyModel | None:
    return config.model if needed.model == "target" else config.reference_model


def _serves(needed: Pass, config: AuditConfig) -> bool:
    return needed.kind == "forward" and isinstance(_needed_model(needed, config), EndpointConfig)


def _stages(wanted: StagePlan, earlier: Sequence[Stage]) -> list[Stage]:
    return [_stage(wanted, needed) for needed in wanted.passes if _serves(needed, wanted.config)]


def _stage(wanted: StagePlan, needed: Pass) -> Stage:
    model = _needed_model(needed, wanted.config)
    assert isinstance(model, EndpointConfig)
    settings = LogProbSettings(model, needed, wanted.config.max_tokens)
    settings = replace(settings, parameters=wanted.adjustments(settings.folder))
    columns = [
        detector.column
        for detector in wanted.detectors
        if any(p.kind == "forward" and _needed_model(p, wanted.config) == model for p in detector.needs)
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


def _questions(config: AuditConfig, size: DocumentSize) -> list[Questions]:
    """One request for each pass; the endpoint generates one token."""
    return [Questions(stage.settings.model, 1, size.text, 1) for stage in _stages(StagePlan(config), ())]


KIND = StageKind("log_probs", "log_probs", _stages, _check, _questions, _sample_request)
