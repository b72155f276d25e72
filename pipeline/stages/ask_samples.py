"""One shard of documents -> their continuations by an endpoint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.corpus.documents import id_key, read_shard
from pipeline.corpus.shard import Shard
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Fault, Refused, Spent, prompt_tokens, side_by_side
from pipeline.models.tokens import count_words
from pipeline.stages.continuations import FOLDER, Sampled, SampleSet, Task, cut, file_samples, said, stored, too_short
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt


class EndpointSampler:
    """Asks for what is missing of a shard's draws. An empty answer is asked for again: it continues nothing."""

    def __init__(self, asked: SampleSet, config: AuditConfig, fingerprint: Mapping[str, Any]) -> None:
        assert isinstance(config.model, EndpointConfig)
        self.asked = asked
        self.config = config
        self.model = config.model
        self.fingerprint = fingerprint

    async def process(self, shard: Shard, store: Store, endpoint: Endpoint) -> Receipt:
        """Continue a shard's documents and file the receipt; an already filed receipt is returned as it is.

        Raises:
            StopError: no document would get an answer now, or the budget is spent; answers are kept.
            UserError: the shard's file is damaged.
        """
        if done := read_receipt(store, self.asked.stage, shard.id):
            return done
        began = time.monotonic()
        sampled = stored(store, self.asked, shard, self.fingerprint)
        folder = f"{FOLDER}/{self.asked.name}"
        answers = Answers(store, folder, self.asked.stage, shard, said(self.fingerprint, shard))
        before: dict[int, list[str]] = {}
        for line in answers.found():
            texts = before.setdefault(line["row"], list(sampled.texts(line["row"])))
            if line["draw"] == len(texts):
                texts += line["texts"]
        for row, texts in before.items():
            if sampled.done(row, self.asked.draws):  # and more are here, which a larger number may want again
                sampled.rows[row]["continuations"] = texts

        async def work(task: Task) -> None:
            await self._continue(task, before.get(task.document.row, []), sampled, answers, endpoint)

        await side_by_side(self._tasks(shard, sampled), work, self.model.concurrency)
        seconds = time.monotonic() - began
        filed = file_samples(store, self.asked, shard, self.fingerprint, sampled, seconds, answers.spent.to_dict())
        answers.close()
        return filed

    def _tasks(self, shard: Shard, sampled: Sampled) -> Iterator[Task]:
        """The documents that are to be continued; those that are too short are refused, and bad ones passed over."""
        ids: set[str] = set()
        for document in read_shard(shard):
            if document.problem is not None or document.doc_id in ids:
                continue
            ids.add(document.doc_id)
            if sampled.done(document.row, self.asked.draws):
                continue
            kept = count_words([document.text], self.config.max_tokens)[0].kept
            task = cut(document, kept, self.asked.continued)
            if task is None:
                sampled.refuse(document, "too_short", too_short(document, self.asked.continued))
            else:
                yield task

    async def _continue(
        self, task: Task, before: list[str], sampled: Sampled, answers: Answers, endpoint: Endpoint
    ) -> None:
        """Ask until the document has its draws: endpoints may give fewer than were asked for."""
        texts = before or list(sampled.texts(task.document.row))
        while len(texts) < self.asked.draws:
            spent, got = Spent(), []
            number = min(self.asked.draws - len(texts), self.model.choices)
            path, body = self._request(task, len(texts), number)
            most = prompt_tokens(task.prefix + self.model.instruction) + number * task.max_new_tokens
            try:
                got = (await endpoint.ask(path, body, most, self._texts, spent))[:number]
            except (Fault, Refused) as error:
                sampled.keep(task.document, task.reference, texts)
                sampled.refuse(task.document, "model_error", f"endpoint: {error}")
                return
            finally:  # whatever ends it: what it cost is known
                answers.add(spent, **({"row": task.document.row, "draw": len(texts), "texts": got} if got else {}))
            texts = [*texts, *got]
        sampled.keep(task.document, task.reference, texts)

    def _request(self, task: Task, first: int, number: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a request. Its seed follows from that of the run, the document and the first draw."""
        continued = self.asked.continued
        name = repr((self.config.seed, id_key(task.document.doc_id), continued.prefix_ratio, first))
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": task.max_new_tokens,
            "temperature": continued.temperature,
            "top_p": continued.top_p,
            "n": number,
            "seed": int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") >> 1,
        }
        if continued.top_k is not None:
            body["top_k"] = continued.top_k
        if self.model.api == "completions":
            return "/completions", {**body, "prompt": task.prefix}
        content = f"{self.model.instruction}\n\n{task.prefix}"
        return "/chat/completions", {**body, "messages": [{"role": "user", "content": content}]}

    def _texts(self, value: dict[str, Any]) -> list[str]:
        """The usable texts of an answer, at least one."""
        choices = value.get("choices")
        if not isinstance(choices, list):
            raise Fault("answer has no choices")
        found = []
        for choice in choices:
            choice = choice if isinstance(choice, dict) else {}
            holder = choice if self.model.api == "completions" else choice.get("message") or {}
            text = holder.get("text" if self.model.api == "completions" else "content")
            if choice.get("finish_reason") != "content_filter" and isinstance(text, str) and text.strip():
                found.append(text.encode("utf-8", "replace").decode())
        if not found:
            filtered = any(isinstance(c, dict) and c.get("finish_reason") == "content_filter" for c in choices)
            raise Fault("its filter lets nothing through" if filtered else "empty completion")
        return found
