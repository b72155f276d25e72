"""Continuations of documents: a document is split into a prefix and a reference, and a model continues the prefix.

A conversation is split before its last answer, and a text at a share of its words.

Local models and endpoints write the same file per shard: for each document the reference and the continuations, or why
there are none. Existing draws are neither computed nor stored again: a run with more draws computes the missing ones,
and its file contains only these.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.models import AnyModel, EndpointConfig, ModelConfig
from pipeline.corpus.chats import Conversation
from pipeline.corpus.documents import Document, id_key, text_digest
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.corpus.scripts import by_characters, count_units
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Continued
from pipeline.detectors.registry import needed_continuations
from pipeline.detectors.samia import prefix_and_reference
from pipeline.endpoint.answers import stored_answers
from pipeline.endpoint.client import Endpoint, Fault, Refusal, prompt_tokens
from pipeline.endpoint.parameters import PROBE_TEXT, PROBE_TOKENS, Adjustments, SampleRequest, check_still_taken
from pipeline.endpoint.replies import RULES, DrawnReplies, Reply, read_replies, unanswered
from pipeline.models.chat_prompts import AnswerPrompt, rendered_prompts, sent_prompt
from pipeline.models.chat_templates import ChatSettings, ChatTemplate
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.opened import embedding_rows, unknown_id
from pipeline.models.tokens import count_words, tokenize
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.passes.parts import PassSizes
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
    Window,
    rows_schema,
    without,
)
from pipeline.stages.chat_scoring import chat_settings
from pipeline.stages.process import earlier_rows, filed_rows
from pipeline.store.files import Store
from pipeline.store.receipts import json_digest, read_receipts

WINDOW_DOCUMENTS = 64
ENDPOINT_WINDOW = Window(4096, 1 << 23)
"""Documents that are sent to an endpoint concurrently."""

MAX_NEW_TOKENS = 1024
SCHEMA = rows_schema(("reference", pa.string()), ("continuations", pa.list_(pa.string())))
StoredDraws = dict[tuple[int, str], DrawnReplies]
"""By row number and digest of the text."""

REPLY = pa.struct([("draw", pa.int32()), ("kind", pa.string()), ("text", pa.string())])
ENDPOINT_SCHEMA = rows_schema(
    ("reference", pa.string()), ("continuations", pa.list_(pa.string())), ("replies", pa.list_(REPLY))
)
"""The same with the replies that are no plain answer; where one is no answer, the continuation is null."""


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Everything that continuations depend on."""

    model: AnyModel
    continued: Continued
    draws: int
    max_tokens: int
    device: str = "endpoint"  # `Device.mark`
    cache_positions: int = 0  # maximum at a time; 0 for an endpoint
    chat: ChatSettings | None = None  # rendering of chats by a model with weights
    compared: Literal["answer"] | None = None  # of chats the last answer; None: the rest of a text
    rules: str | None = None  # version of the rules for replies of an endpoint; None: a model with weights
    parameters: Adjustments | None = None  # of requests to an endpoint; None: it takes all of them

    @property
    def folder(self) -> str:
        """The folder of the files: samples/ratio0.5_t1_k50_p1_reference, or of chats answer_ instead of ratio0.5_."""
        c = self.continued
        beginning = self.compared or f"ratio{c.prefix_ratio:g}"
        return f"samples/{beginning}_t{c.temperature:g}_k{c.top_k or 'all'}_p{c.top_p:g}_{c.candidate_words}"

    @property
    def stage(self) -> str:
        """The name of the stage, whose receipts prove this number of draws."""
        return f"sample/{self.folder.removeprefix('samples/')}/{self.draws}"


@dataclass(frozen=True, slots=True)
class Task:
    """A document split into the prefix for the model and the reference."""

    document: Document
    prefix: str
    reference: str
    words: int | None  # number of words after which a draw ends; None: no limit
    max_new_tokens: int
    chat: AnswerPrompt | None = None  # of a conversation, what the model is given


def token_limit(reference_bytes: int, continued: Continued) -> int:
    """Maximum new tokens of a draw: 4/3 of the reference's tokens, at four bytes per token, plus 16."""
    if continued.candidate_words == "all":
        return MAX_NEW_TOKENS
    return min(MAX_NEW_TOKENS, 16 + reference_bytes // 3)


def keep_earlier_draws(stage: Stage, shard: Shard, store: Store, output: Output) -> None:
    """Add the draws of files with another number of draws to the output."""
    for row in earlier_rows(stage, shard, store, output):
        output.rows[row["row"]] = {**row, "continuations": row["continuations"] or [], "reason": None, "problem": None}


def draws_of_row(number: int, output: Output) -> list[str]:
    """The draws of a document so far, in order."""
    texts: list[str] = output.rows[number]["continuations"] if number in output.rows else []
    return texts


def make_task(stage: Stage, document: Document, kept: int, output: Output) -> Task | None:
    """The task of a document; None if it has too few words and is refused.

    Args:
        stage: stage of the continuations.
        document: document to continue.
        kept: characters of the document that max_tokens keeps.
        output: output of the shard.
    """
    settings: SampleSettings = stage.settings
    task = cut_in_two(document, kept, settings.continued)
    if task is None:
        count, ratio = count_units(document.text[:kept]), settings.continued.prefix_ratio
        noun = "character" if by_characters(document.text[:kept]) else "word"
        words = f"{count} {noun}{'' if count == 1 else 's'}"
        output.refuse(document, Reason.TOO_SHORT, f"{words}: a prefix of {ratio:g} of them leaves no two parts")
    return task


def cut_in_two(document: Document, kept: int, continued: Continued) -> Task | None:
    """Split the first `kept` characters of a document; None if it has too few words."""
    prefix, reference = prefix_and_reference(document.text[:kept], continued.prefix_ratio)
    return _task(document, prefix, reference, continued) if prefix and reference else None


def make_chat_task(document: Document, prompt: AnswerPrompt | Unreadable, stage: Stage, output: Output) -> Task | None:
    """The task of a conversation; None if nothing of it can be compared, and it is refused."""
    if isinstance(prompt, Unreadable):
        output.refuse(document, prompt.reason, prompt.message)
        return None
    return replace(_task(document, prompt.before, prompt.answer, stage.settings.continued), chat=prompt)


def _task(document: Document, prefix: str, reference: str, continued: Continued) -> Task:
    words = None if continued.candidate_words == "all" else count_units(reference)
    return Task(document, prefix, reference, words, token_limit(len(reference.encode()), continued))


def _conversations(documents: Sequence[Document]) -> list[Conversation]:
    """The conversations of documents that are chats."""
    return [document.chat for document in documents if document.chat is not None]


def keep_draws(task: Task, texts: Sequence[str], output: Output) -> None:
    """Record the draws of a document."""
    output.keep(task.document, reference=task.reference, continuations=list(texts))


def stored_draws(number: int, output: Output) -> DrawnReplies:
    """The draws of a document by an endpoint so far."""
    row = output.rows.get(number, {})
    return DrawnReplies(list(row.get("continuations") or ()), list(row.get("replies") or ()))


def keep_replies(task: Task, draws: DrawnReplies, output: Output) -> None:
    """Record the draws of a document by an endpoint."""
    output.keep(task.document, reference=task.reference, continuations=draws.texts, replies=draws.replies)


# --- by a local model


class Sampler:
    """The model of one actor. Continuations depend only on the shard."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Prepare; the model is loaded for the first missing draw."""
        self.stage = stage
        self.settings: SampleSettings = stage.settings
        placement.set_up(self.settings.device)
        self.parts = PassSizes()
        self.placement = placement
        self.window = Window(WINDOW_DOCUMENTS)
        self.batch_size: BatchSize | None = None

    @cached_property
    def lm(self) -> LanguageModel:
        """The model."""
        assert isinstance(self.settings.model, ModelConfig)
        return self.placement.open(open_model, self.settings.model)

    @cached_property
    def sampling(self) -> Sampling:
        """The sampling of tokens."""
        continued = self.settings.continued
        return Sampling(continued.temperature, continued.top_k, continued.top_p, MAX_NEW_TOKENS)

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        """Read the draws of earlier attempts."""
        keep_earlier_draws(self.stage, shard, store, output)

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        """Split documents; those with all draws are skipped, and those that are too short are refused."""
        missing = [d for d in documents if len(draws_of_row(d.row, output)) < self.settings.draws]
        if not missing:
            return []
        limit = min(self.settings.max_tokens, self.lm.max_tokens or self.settings.max_tokens)
        return [Entry(task.document, 0, task) for task in self.split(missing, limit, output) if task is not None]

    def split(self, documents: list[Document], max_tokens: int, output: Output) -> list[Task | None]:
        """The tasks of documents, of which the first `max_tokens` tokens are read; None for those that are refused."""
        tokens = tokenize(self.lm.tokenizer, [document.text for document in documents], max_tokens)
        return [
            make_task(self.stage, document, entry.kept, output)
            for document, entry in zip(documents, tokens, strict=True)
        ]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Compute the missing draws of a batch."""
        rows, known = embedding_rows(self.lm.model), []
        for entry in batch:
            before = draws_of_row(entry.document.row, output)
            prompt = self._prompt(entry.work, len(before))
            if (problem := unknown_id(prompt.ids, rows)) is not None:
                output.refuse(entry.document, Reason.MODEL_ERROR, problem)
            else:
                known.append((entry.work, before, prompt))
        drawn = continuations(
            self.lm,
            [prompt for *_, prompt in known],
            self.sampling,
            self.stage.seed,
            batch_tokens=self.settings.cache_positions,
            parts=self.parts,
        )
        task: Task
        for (task, before, _), draws in zip(known, drawn, strict=True):
            if any(draw.end == "non_finite" for draw in draws):
                output.refuse(task.document, Reason.NON_FINITE_SCORE, "the model gave no finite number to draw by")
            else:
                keep_draws(task, [*before, *(draw.text for draw in draws)], output)
            output.tokens += sum(len(draw.ids) for draw in draws)

    def _prompt(self, task: Task, first: int) -> Prompt:
        """The missing draws. The key includes the prefix ratio, so that other prefixes have other random streams.

        A character of a script without blanks may take a token a byte, so there only the words end a draw.
        """
        key = (id_key(task.document.doc_id), round(self.settings.continued.prefix_ratio * 1e6))
        chat = task.chat
        ids = self.lm.tokenizer(task.prefix, verbose=False)["input_ids"] if chat is None else chat.ids
        ends = frozenset[int]() if chat is None else chat.ends
        characters, limit = by_characters(task.reference), task.max_new_tokens
        if characters:
            limit = max(limit, min(MAX_NEW_TOKENS, 16 + len(task.reference.encode())))
        return Prompt(key, ids, range(first, self.settings.draws), task.words, limit, characters, ends)


class ChatSampler(Sampler):
    """A sampler of conversations, which the model continues behind what its template renders before the last answer."""

    @cached_property
    def template(self) -> ChatTemplate:
        """The compiled template."""
        assert self.settings.chat is not None
        return self.settings.chat.open("target", self.lm.tokenizer)

    def split(self, documents: list[Document], max_tokens: int, output: Output) -> list[Task | None]:
        """The tasks of conversations."""
        prompts = rendered_prompts(self.template, _conversations(documents), max_tokens)
        pairs = zip(documents, prompts, strict=True)
        return [make_chat_task(document, prompt, self.stage, output) for document, prompt in pairs]


# --- by an endpoint


class EndpointSampler:
    """Requests the missing draws of a shard. A draw that is no answer is not requested again."""

    def __init__(self, stage: Stage, placement: Placement, *, patient: bool = False) -> None:
        """Prepare; `patient`: whether the run goes on where the first documents have no answer."""
        self.stage = stage
        self.settings: SampleSettings = stage.settings
        assert stage.endpoint is not None
        self.model: EndpointConfig = stage.endpoint
        self.endpoint = placement.endpoint
        self.choices = (self.settings.parameters or Adjustments()).most_draws(self.model.choices)
        self._rows_of = json_digest(without(stage.fingerprint, stage.grows))[:16]  # of any shard
        if patient and self.endpoint is not None:
            self.endpoint.first_documents.passed = True
        self.window = ENDPOINT_WINDOW
        self.batch_size: BatchSize | None = None

    def open(self, shard: Shard, store: Store, output: Output) -> StoredDraws:
        """The draws in files and in answers without a file, by row number and digest of the text."""
        output.answers = self.stage.answers(shard, store)
        keep_earlier_draws(self.stage, shard, store, output)
        stored: StoredDraws = {}
        for line in output.answers.before():
            draws = stored.setdefault((line["row"], line["text"]), stored_draws(line["row"], output))
            if line["draw"] == len(draws):
                draws.extend(line["texts"], line["replies"])
        if self.endpoint is not None:
            self.endpoint.first_documents.note_earlier(partial(self._earlier, store))
        return stored

    def _earlier(self, store: Store) -> list[DrawnReplies]:
        """The draws of documents that earlier commands asked about; only one with an answer if a shard has some."""
        parent = self.stage.name.rpartition("/")[0]
        stages = [f"{parent}/{name}" for name in store.names(f"receipts/{parent}") if name.isdigit()]
        if any(receipt.n_scored for stage in stages for receipt in read_receipts(store, stage)):
            return [DrawnReplies([""])]
        documents: dict[tuple[str, int], DrawnReplies] = {}
        for receipt in read_receipts(store, self.stage.name):
            for number, row in filed_rows(store, receipt).items():
                documents[receipt.shard, number] = DrawnReplies(row["continuations"] or [], row["replies"] or [])
        for shard, line in stored_answers(store, self.stage.folder):
            draws = documents.setdefault((shard, line["row"]), DrawnReplies())
            if line["draw"] == len(draws) and line.get("rows_of") == self._rows_of:
                draws.extend(line["texts"], line["replies"])
        return [draws for draws in documents.values() if draws.answered or len(draws) >= self.settings.draws]

    def filed(self, row: Mapping[str, Any], text: str) -> Iterator[dict[str, Any]]:
        """The draws of an existing row, one answer each; the first ones may be in a file that it extends."""
        replies = row["replies"] or ()
        for draw, continuation in enumerate(row["continuations"] or ()):
            of_draw = [one for one in replies if one["draw"] == draw]
            place = {"row": row["row"], "text": text, "draw": draw, "rows_of": self._rows_of}
            yield {**place, "texts": [continuation], "replies": of_draw}

    def prepare(self, documents: list[Document], inputs: StoredDraws, output: Output) -> list[Entry]:
        """Split documents with their existing draws."""
        entries = []
        for document in documents:
            filed = stored_draws(document.row, output)
            draws = inputs.get((document.row, text_digest(document.text)), filed)
            if len(filed) >= self.settings.draws:  # additional draws may be needed later
                output.rows[document.row] |= {"continuations": draws.texts, "replies": draws.replies}
                self._refuse_unanswered(document, draws, output)
            elif (task := self.split(document, output)) is not None:
                entries.append(Entry(document, 0, (task, draws)))
        return entries

    def split(self, document: Document, output: Output) -> Task | None:
        """The task of a document, of which the first words are read; None if it is refused."""
        kept = count_words([document.text], self.settings.max_tokens)[0].kept
        return make_task(self.stage, document, kept, output)

    def work(self, batch: list[Entry], output: Output) -> None:
        """Request the missing draws."""
        assert self.endpoint is not None
        missing = [entry.work for entry in batch]
        self.endpoint.each(missing, partial(self._draw, output=output, endpoint=self.endpoint))

    async def _draw(self, missing: tuple[Task, DrawnReplies], output: Output, endpoint: SharedEndpoint) -> None:
        """Request the missing draws of a document; at the start of a run, of few documents at a time."""
        task, draws = missing
        if len(draws) >= self.settings.draws:  # noted, and nothing is asked
            await self._ask(task, draws, output, endpoint.client)
            return
        await endpoint.first_documents.enter()
        complete = False
        try:
            complete = await self._ask(task, draws, output, endpoint.client)
        finally:  # also of a shard that ends by an error or is cancelled: other shards wait in `enter`
            await endpoint.first_documents.leave(draws if complete else None)

    async def _ask(self, task: Task, draws: DrawnReplies, output: Output, endpoint: Endpoint) -> bool:
        """Request draws until the document has all: endpoints may return fewer than requested; False: one failed."""
        assert output.answers is not None
        read = partial(read_replies, api=self.model.api, prefix=task.prefix, reference=task.reference)
        while len(draws) < self.settings.draws:
            question, more = output.answers.ask(), DrawnReplies()
            number = min(self.settings.draws - len(draws), self.choices)
            path, body = self._request(task, len(draws), number)
            most = self._prompt_tokens(task) + number * (task.max_new_tokens + self.model.reasoning_tokens)
            first = len(draws)
            try:
                replies = await endpoint.ask(path, body, most, read, question.spent, question.book)
                more = draws.add(replies[:number])
            except (Fault, Refusal) as error:
                if (kind := unanswered(error)) is not None:
                    more = draws.add([Reply(kind, "")] * number)
                    continue
                if isinstance(error, Refusal):
                    parameters, bill = self.settings.parameters or Adjustments(), (question.spent, question.book)
                    await check_still_taken(endpoint, _sample_request(self.stage), parameters, error, bill)
                keep_replies(task, draws, output)
                output.refuse(task.document, Reason.MODEL_ERROR, f"endpoint: {error}")
                return False
            finally:  # the cost is known in any case
                output.tokens += question.spent.tokens
                place = {"row": task.document.row, "text": text_digest(task.document.text), "draw": first}
                drawn = {"texts": more.texts, "replies": more.replies, "rows_of": self._rows_of}
                answer = {**place, **drawn} if more.texts else {}
                question.finish(**answer)
        keep_replies(task, draws, output)
        self._refuse_unanswered(task.document, draws, output)
        return True

    def _refuse_unanswered(self, document: Document, draws: DrawnReplies, output: Output) -> None:
        """Refuse a document of which no draw is an answer."""
        if (problem := draws.problem(self.settings.draws)) is not None:
            output.refuse(document, Reason.NO_ANSWER, problem)

    def _request(self, task: Task, first: int, number: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a request. Its seed depends on the seed of the run, the document and the first draw."""
        stream = repr((self.stage.seed, id_key(task.document.doc_id), self.settings.continued.prefix_ratio, first))
        seed = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest(), "little") >> 1
        body = _drawing(self.settings, task.max_new_tokens, number, seed)
        body = (self.settings.parameters or Adjustments()).adjust(body)
        if self.model.api == "completions":
            return "/completions", {**body, "prompt": task.prefix}
        return "/chat/completions", {**body, "messages": self._messages(task)}

    def _messages(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """The messages of a request."""
        if task.chat is not None:
            return task.chat.messages
        return _instructed(self.model, task.prefix)

    def _prompt_tokens(self, task: Task) -> int:
        """Upper bound on the tokens of the prompt of a request."""
        if task.chat is not None:
            return sum(prompt_tokens(json.dumps(message, ensure_ascii=False)) for message in task.chat.messages)
        return prompt_tokens(task.prefix + self.model.instruction)


class ChatEndpointSampler(EndpointSampler):
    """Requests the last answer of conversations: the endpoint receives the messages before it."""

    def split(self, document: Document, output: Output) -> Task | None:
        """The task of a conversation."""
        (chat,) = _conversations([document])
        return make_chat_task(document, sent_prompt(chat, self.settings.max_tokens), self.stage, output)


def _drawing(settings: SampleSettings, most: int, number: int, seed: int) -> dict[str, Any]:
    """The body of a request for `number` draws of at most `most` tokens, without what they continue."""
    continued = settings.continued
    assert isinstance(settings.model, EndpointConfig)
    body: dict[str, Any] = {
        "model": settings.model.name,
        "max_tokens": most + settings.model.reasoning_tokens,
        "temperature": continued.temperature,
        "top_p": continued.top_p,
        "n": number,
        "seed": seed,
    }
    return body if continued.top_k is None else {**body, "top_k": continued.top_k}


def _instructed(model: EndpointConfig, text: str) -> list[dict[str, str]]:
    """The message that asks for the continuation of a text."""
    return [{"role": "user", "content": f"{model.instruction}\n\n{text}"}]


def _sample_request(stage: Stage) -> SampleRequest:
    """A request with the parameters of all requests of a stage, and as many draws as later runs may ask for at once."""
    settings, model = stage.settings, stage.endpoint
    assert model is not None
    body = _drawing(settings, PROBE_TOKENS, model.choices, stage.seed % 2**31)
    if model.api == "completions":
        return SampleRequest("/completions", {**body, "prompt": PROBE_TEXT})
    return SampleRequest("/chat/completions", {**body, "messages": _instructed(model, PROBE_TEXT)})


# --- requirements of a configuration


def _stages(wanted: StagePlan, earlier: Sequence[Stage]) -> list[Stage]:
    endpoint = wanted.config.model if isinstance(wanted.config.model, EndpointConfig) else None
    patient = wanted.config.error_budget >= 1
    local, asking = (Sampler, ChatSampler), (EndpointSampler, ChatEndpointSampler)
    texts, chats = local if endpoint is None else (partial(one, patient=patient) for one in asking)
    return [
        wanted.stage(
            settings.stage,
            folder=settings.folder,
            schema=SCHEMA if endpoint is None else ENDPOINT_SCHEMA,
            settings=settings,
            make=texts if settings.compared is None else chats,
            endpoint=endpoint,
            grows="draws",
        )
        for settings in _settings(wanted)
    ]


def _settings(wanted: StagePlan) -> list[SampleSettings]:
    """The continuations that the detectors read, drawn on a device or by an endpoint."""
    config, samples = wanted.config, needed_continuations(wanted.detectors)
    where: dict[str, Any] = {"compared": "answer"} if config.corpus.has_chats else {}
    if isinstance(config.model, EndpointConfig):
        where["rules"] = RULES
    if samples and not isinstance(config.model, EndpointConfig):
        where |= {"device": wanted.device.mark, "cache_positions": wanted.budget(config.model).cache}
        if config.corpus.has_chats:
            where["chat"] = replace(chat_settings(config, ()), whole=False)
    settings = [
        SampleSettings(config.model, continued, draws, config.max_tokens, **where)
        for continued, draws in samples.items()
    ]
    return [replace(one, parameters=wanted.adjustments(one.folder)) for one in settings]


def _questions(config: AuditConfig, size: DocumentSize) -> list[Questions]:
    model, questions = config.model, list[Questions]()
    if not isinstance(model, EndpointConfig):
        return questions
    instructed = model.api == "chat" and size.answer is None
    for samples in _settings(StagePlan(config)):
        requests = math.ceil(samples.draws / model.choices)
        prompt, answer = size.split(samples.continued.prefix_ratio)
        prompt += len(model.instruction) if instructed else 0
        limit = token_limit(round(answer), samples.continued) + model.reasoning_tokens
        questions.append(Questions(model, requests, requests * prompt, samples.draws * limit))
    return questions


def _cost(entry: Mapping[str, Any]) -> float:
    prompt, answer = entry["shares"] if "shares" in entry else (entry["prefix_ratio"], 1 - entry["prefix_ratio"])
    return float(prompt + entry["draws"] * answer)


KIND = StageKind("sample", "samples", _stages, questions=_questions, request=_sample_request, costs={"generate": _cost})
