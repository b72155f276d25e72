"""Continuations of documents by an endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.models import EndpointConfig
from pipeline.corpus.content import text_digest
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.shard import Shard
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Fault, Refusal, prompt_tokens
from pipeline.models.tokens import count_words
from pipeline.stages.base import Output, Placement, Stage
from pipeline.stages.continuations import (
    SampleSettings,
    Task,
    draws_of_row,
    keep_draws,
    keep_earlier_draws,
    task_of,
)
from pipeline.store.files import Store


class EndpointSampler:
    """Asks for what is missing of a shard's draws. An empty answer is asked for again: it continues nothing."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Prepare."""
        self.stage = stage
        self.settings: SampleSettings = stage.settings
        assert stage.endpoint is not None
        self.model: EndpointConfig = stage.endpoint

    async def begin(self, endpoint: Endpoint, answers: Answers) -> None:
        """Nothing must be known before the first document."""

    def open(self, shard: Shard, store: Store, output: Output, answers: Answers) -> dict[tuple[int, str], list[str]]:
        """The draws of files and of answers that no file holds yet, by number of the row and digest of the text."""
        keep_earlier_draws(self.stage, shard, store, output)
        draws: dict[tuple[int, str], list[str]] = {}
        for line in answers.before():
            texts = draws.setdefault((line["row"], line["text"]), list(draws_of_row(line["row"], output)))
            if line["draw"] == len(texts):
                texts += line["texts"]
        return draws

    def filed(self, row: Mapping[str, Any], text: str) -> Iterator[dict[str, Any]]:
        """The draws of a filed row, an answer each: a file that it goes on from may hold the first of them."""
        for draw, continuation in enumerate(row["continuations"] or ()):
            yield {"row": row["row"], "text": text, "draw": draw, "texts": [continuation]}

    def prepare(
        self, document: Document, inputs: dict[tuple[int, str], list[str]], output: Output
    ) -> tuple[Task, list[str]] | None:
        """A document cut in two, and the draws that there are."""
        kept = count_words([document.text], self.settings.max_tokens)[0].kept
        filed = draws_of_row(document.row, output)
        texts = inputs.get((document.row, text_digest(document.text))) or filed
        if len(filed) >= self.settings.draws:  # more than is wanted now may be wanted later
            output.rows[document.row]["continuations"] = texts
        task = task_of(self.stage, document, kept, output)
        return None if task is None else (task, texts)

    async def ask(self, missing: tuple[Task, list[str]], output: Output, answers: Answers, endpoint: Endpoint) -> None:
        """Ask until the document has its draws: endpoints may give fewer than were asked for."""
        task, texts = missing
        while len(texts) < self.settings.draws:
            question, more = answers.ask(), list[str]()
            number = min(self.settings.draws - len(texts), self.model.choices)
            path, body = self._request(task, len(texts), number)
            most = prompt_tokens(task.prefix + self.model.instruction) + number * task.max_new_tokens
            try:
                texts_of = self._texts
                more = (await endpoint.ask(path, body, most, texts_of, question.spent, question.book))[:number]
            except (Fault, Refusal) as error:
                keep_draws(task, texts, output)
                output.refuse(task.document, "model_error", f"endpoint: {error}")
                return
            finally:  # whatever ends it: what it cost is known
                output.tokens += question.spent.tokens
                place = {"row": task.document.row, "text": text_digest(task.document.text), "draw": len(texts)}
                question.settle(**({**place, "texts": more} if more else {}))
            texts = [*texts, *more]
        keep_draws(task, texts, output)

    def _request(self, task: Task, first: int, number: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a request. Its seed follows from that of the run, the document and the first draw."""
        continued = self.settings.continued
        stream = repr((self.stage.seed, id_key(task.document.doc_id), continued.prefix_ratio, first))
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": task.max_new_tokens,
            "temperature": continued.temperature,
            "top_p": continued.top_p,
            "n": number,
            "seed": int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest(), "little") >> 1,
        }
        if continued.top_k is not None:
            body["top_k"] = continued.top_k
        if self.model.api == "completions":
            return "/completions", {**body, "prompt": task.prefix}
        content = f"{self.model.instruction}\n\n{task.prefix}"
        return "/chat/completions", {**body, "messages": [{"role": "user", "content": content}]}

    def _texts(self, value: dict[str, Any]) -> list[str]:
        """The usable texts of an answer, at least one.

        Raises:
            Fault: it has none.
        """
        choices = value.get("choices")
        if not isinstance(choices, list):
            raise Fault("answer has no choices")
        texts = []
        for choice in choices:
            choice = choice if isinstance(choice, dict) else {}
            holder = choice if self.model.api == "completions" else choice.get("message") or {}
            text = holder.get("text" if self.model.api == "completions" else "content")
            if choice.get("finish_reason") != "content_filter" and isinstance(text, str) and text.strip():
                texts.append(text.encode("utf-8", "replace").decode())
        if not texts:
            filtered = any(isinstance(c, dict) and c.get("finish_reason") == "content_filter" for c in choices)
            raise Fault("its filter lets nothing through" if filtered else "empty completion")
        return texts
