"""One shard of documents -> their continuations by the model at hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.shard import Shard
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.stages.continuations import MAX_NEW_TOKENS, Sampled, SampleSet, Task, cut, file_samples, stored, too_short
from pipeline.stages.paraphrase import windows
from pipeline.stages.score import out_of_memory
from pipeline.store.attempts import Journal
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt


class Sampler:
    """The model of one actor. Results depend on the shard alone."""

    def __init__(self, asked: SampleSet, config: AuditConfig, fingerprint: Mapping[str, Any], gpus: float = 0) -> None:
        """Prepare; the model is loaded, on the CPU for gpus = 0, when a draw is missing."""
        if gpus == 0:
            torch.set_num_threads(config.resources.cpus_per_actor)
        self.asked = asked
        self.config = config
        self.fingerprint = fingerprint
        self.gpus = gpus

    @cached_property
    def lm(self) -> LanguageModel:
        """The model."""
        assert isinstance(self.config.model, ModelConfig)
        return open_model(self.config.model, gpus=self.gpus)

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        continued = self.asked.continued
        return Sampling(continued.temperature, continued.top_k, continued.top_p, MAX_NEW_TOKENS)

    def process(self, shard: Shard, store: Store, driver: str = "") -> Receipt:
        """Continue a shard's documents and file the receipt; an already filed receipt is returned as it is.

        Documents that scoring will quarantine anyway are passed over.

        Raises:
            UserError: the shard's file is damaged.
        """
        if done := read_receipt(store, self.asked.stage, shard.id):
            return done
        began = time.monotonic()
        journal = Journal(store, self.asked.stage, shard, driver)
        sampled = stored(store, self.asked, shard, self.fingerprint)
        for documents in windows(shard):
            self._sample_guarded([d for d in documents if not sampled.done(d.row, self.asked.draws)], journal, sampled)
        filed = file_samples(store, self.asked, shard, self.fingerprint, sampled, time.monotonic() - began)
        journal.close()
        return filed

    def _sample_guarded(self, documents: list[Document], journal: Journal, sampled: Sampled) -> None:
        """Continue a window; one that killed its worker twice goes one document at a time."""
        if not documents:
            return
        name = f"{documents[0].row}+{len(documents)}"
        if not journal.deadly(name):
            journal.enter(name)
            self._sample(documents, sampled)
        elif len(documents) > 1:
            for document in documents:
                self._sample_guarded([document], journal, sampled)
        else:
            sampled.refuse(documents[0], "model_error", "its worker died twice while this was continued")

    def _sample(self, documents: list[Document], sampled: Sampled) -> None:
        """Continue documents; where that fails, in halves, so that only the culprit has nothing."""
        tasks = self._tasks(documents, sampled)
        prompts = [self._prompt(task, len(sampled.texts(task.document.row))) for task in tasks]
        try:
            found = continuations(self.lm, prompts, self.sampling, self.config.seed)
        except Exception as error:  # whatever a model raises on a text is that text's fault until it stands alone
            reason = "out_of_memory" if out_of_memory(error) else "model_error"
            if len(tasks) == 1:
                message = " ".join(str(error).split())[:300] or type(error).__name__
                sampled.refuse(tasks[0].document, reason, message)
                return
            del error
        else:
            for task, draws in zip(tasks, found, strict=True):
                if any(draw.end == "non_finite" for draw in draws):
                    sampled.refuse(task.document, "non_finite_score", "the model gave no finite number to draw by")
                else:
                    texts = [*sampled.texts(task.document.row), *(draw.text for draw in draws)]
                    sampled.keep(task.document, task.reference, texts)
                sampled.tokens += sum(len(draw.ids) for draw in draws)
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(tasks) // 2
        for part in (tasks[:half], tasks[half:]):
            self._sample([task.document for task in part], sampled)

    def _tasks(self, documents: list[Document], sampled: Sampled) -> list[Task]:
        """The documents cut in two; those that are too short are refused."""
        limit = min(self.config.max_tokens, self.lm.max_tokens or self.config.max_tokens)
        tokens = tokenize(self.lm.tokenizer, [document.text for document in documents], limit)
        tasks = []
        for document, own in zip(documents, tokens, strict=True):
            task = cut(document, own.kept, self.asked.continued)
            if task is None:
                sampled.refuse(document, "too_short", too_short(document, self.asked.continued))
            else:
                tasks.append(task)
        return tasks

    def _prompt(self, task: Task, first: int) -> Prompt:
        """The draws that are missing. Streams of other prefixes of a document are others: the ratio is in the key."""
        key = (id_key(task.document.doc_id), round(self.asked.continued.prefix_ratio * 1e6))
        ids = self.lm.tokenizer(task.prefix, verbose=False)["input_ids"]
        return Prompt(key, ids, range(first, self.asked.draws), task.words, task.max_new_tokens)
