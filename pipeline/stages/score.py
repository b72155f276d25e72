"""One shard of documents -> one file of scores, one of quarantined documents, one receipt."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, named
from pipeline.corpus.documents import Document, id_key, read_shard, text_keys
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.detectors.base import FORWARD, Continuations, Continued, Detector, Evidence, Pass
from pipeline.detectors.registry import adapters_of, draws_of, parse_detectors, plan_passes, sampled_of
from pipeline.models.load import LanguageModel, fingerprint_model, open_model
from pipeline.models.switching import Adapters
from pipeline.models.tokens import count_words, open_tokenizer, tokenize
from pipeline.passes.forward import TokenStatistics, forward, told
from pipeline.passes.gradient import coverage, gradient_norms
from pipeline.stages.ask_log_probs import LogProbs, endpoint_passes, read_log_probs
from pipeline.stages.continuations import read_samples, sample_sets
from pipeline.stages.paraphrase import Paraphrases, paraphrase_fingerprint, read_paraphrases
from pipeline.store.attempts import Journal
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt, write_receipt

STAGE = "score"
WINDOW_DOCUMENTS = 4096
WINDOW_BYTES = 1 << 23
QUARANTINE_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("role", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("id_key", pa.int64()),
    ]
)

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Padded tokens in a batch, where the config does not say."""


def score_schema(columns: Sequence[str]) -> pa.Schema:
    """Columns of a score file: what selection reads, one float64 a detector last."""
    fixed = [
        ("doc_id", pa.string()),
        ("role", pa.string()),
        ("group", pa.string()),
        ("row", pa.int64()),
        ("n_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("id_key", pa.int64()),
        ("text_key", pa.int64()),
        ("prefix_key", pa.int64()),
    ]
    return pa.schema([*fixed, *((column, pa.float64()) for column in columns)])


def fingerprint_of(config: AuditConfig) -> dict[str, Any]:
    """All that could change a score, and nothing else: not the number of workers, nor the kind of cluster.

    Of adapters it holds the settings; a run, which has read what they are trained on, puts their keys in the place.
    """
    fingerprint: dict[str, Any] = fingerprint_model(config.model)
    detectors = parse_detectors(config.detectors)
    if any(p.model == "reference" for p in plan_passes(detectors)) and config.reference_model is not None:
        reference = fingerprint_model(config.reference_model)
        fingerprint.update({f"reference_{key}": value for key, value in reference.items()})
    if draws_of(detectors):
        fingerprint.update(paraphrase_fingerprint(config))
    if names := adapters_of(detectors):
        fingerprint["adapters"] = {
            name: [config.fsd.adapter(name).model_dump(mode="json"), config.seed] for name in names
        }
    if config.text_transform is not None:
        fingerprint["text_transform"] = config.text_transform.model_dump()
    if sampled_of(detectors):
        fingerprint["seed"] = config.seed
    fingerprint["detectors"] = [detector.column for detector in detectors]
    fingerprint["max_tokens"] = config.max_tokens
    fingerprint["batch_tokens"] = config.resources.batch_tokens
    fingerprint["code"] = __version__
    return fingerprint


def adapter_folder(run: str, key: str) -> Path:
    """Where an adapter of a run lies, on storage that all nodes see as a local path."""
    return Path(Store(run).path(f"adapters/{key}"))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document that passed its checks, tokenised for every pass."""

    document: Document  # without its text
    keys: tuple[int, int]  # of its text and of its first words
    texts: tuple[str, ...]  # the parts that max_tokens keeps: of the text, and of each of its paraphrases
    truncated: bool
    ids: Mapping[Pass, list[int]]
    continued: Mapping[Continued, Continuations]
    told: Mapping[Pass, Sequence[float]]  # log-probabilities that an endpoint gave


@dataclass(slots=True)
class _Output:
    """What a shard's documents came to."""

    scored: list[tuple[_Prepared, list[float]]] = field(default_factory=list)
    quarantined: list[tuple[Document, str, str]] = field(default_factory=list)

    def refuse(self, document: Document, reason: str, message: str) -> None:
        self.quarantined.append((document, reason, message))


class Scorer:
    """The models of one actor and what is asked of them. Results depend on the shard alone."""

    def __init__(self, config: AuditConfig, fingerprint: Mapping[str, Any], gpus: float = 0) -> None:
        """Load the models, on the CPU for gpus = 0."""
        self.config = config
        self.fingerprint = fingerprint
        self.detectors: tuple[Detector, ...] = parse_detectors(config.detectors)
        planned = plan_passes(self.detectors)
        self.answered = endpoint_passes(config)
        stored = {*self.answered, *(needed for needed in planned if needed.continued)}
        self.passes = {needed: read for needed, read in planned.items() if needed not in stored}
        self.sample_sets = sample_sets(config)
        self.draws = draws_of(self.detectors)
        if gpus == 0:
            torch.set_num_threads(config.resources.cpus_per_actor)
        self.models: dict[str, LanguageModel] = {}
        self.tokenizer: Any = None  # of an endpoint nobody knows it
        if isinstance(config.model, ModelConfig):
            if any(p.model == "target" for p in self.passes):
                self.models["target"] = open_model(config.model, gpus=gpus)
            found = self.models.get("target")
            self.tokenizer = found.tokenizer if found is not None else open_tokenizer(config.model)
        if any(p.model == "reference" for p in self.passes):
            assert isinstance(config.reference_model, ModelConfig)
            self.models["reference"] = open_model(config.reference_model, gpus=gpus)
        folders = {name: adapter_folder(config.run, key) for name, key in fingerprint.get("adapters", {}).items()}
        self.adapters = Adapters(self.models.get("target"), folders, fingerprint.get("model", ""), named(config.model))
        gradient = any(p.kind == "gradient" for p in self.passes)
        self.gradient = asdict(coverage(self.models["target"].model)) if gradient else None
        limits = [m.max_tokens for m in self.models.values() if m.max_tokens is not None]
        self.max_tokens = min([config.max_tokens, *limits])
        wanted = config.resources.batch_tokens
        self.batch_tokens = wanted if wanted != "auto" else BATCH_TOKENS["cuda" if gpus else "cpu"]

    def process(self, shard: Shard, store: Store, driver: str = "") -> Receipt:
        """Score a shard and file its receipt; an already filed receipt is returned as it is.

        Raises:
            UserError: the shard's file is damaged.
        """
        if done := read_receipt(store, STAGE, shard.id):
            return done
        began = time.monotonic()
        journal = Journal(store, STAGE, shard, driver)
        output = _Output()
        for window in _in_background(lambda: self._windows(shard, store, output)):
            for batch in _batches(window, self.batch_tokens):
                self._score_guarded(batch, journal, output)
        receipt = self._file(shard, store, output, time.monotonic() - began)
        journal.close()
        return receipt

    def _windows(self, shard: Shard, store: Store, output: _Output) -> Iterator[list[_Prepared]]:
        """Checked and tokenised documents, a bounded number at a time; the bad go to the output."""
        seen: set[str] = set()
        window: list[Document] = []
        size = 0
        paraphrased = read_paraphrases(store, shard) if self.draws else {}
        sampled = {asked.continued: read_samples(store, asked, shard) for asked in self.sample_sets}
        answered = {needed: read_log_probs(store, needed, shard) for needed in self.answered}
        for document in read_shard(shard):
            if document.doc_id in seen:
                output.refuse(document, "duplicate_id", "the id stands earlier in the shard")
                continue
            seen.add(document.doc_id)
            if document.problem is not None:
                output.refuse(document, *document.problem)
                continue
            drawn = paraphrased.get(document.row)
            if drawn is not None and drawn.problem is not None:
                output.refuse(document, "model_error", drawn.problem)
                continue
            if (lacking := _lacking(document, sampled, answered)) is not None:
                output.refuse(document, *lacking)
                continue
            window.append(document)
            size += len(document.text) * (1 + self.draws)
            if len(window) >= WINDOW_DOCUMENTS or size >= WINDOW_BYTES:
                yield self._prepare(window, paraphrased, sampled, answered, output)
                window, size = [], 0
        if window:
            yield self._prepare(window, paraphrased, sampled, answered, output)

    def _prepare(
        self,
        documents: list[Document],
        paraphrased: Mapping[int, Paraphrases],
        sampled: Mapping[Continued, Mapping[int, Any]],
        answered: Mapping[Pass, Mapping[int, LogProbs]],
        output: _Output,
    ) -> list[_Prepared]:
        read = count_words if self.tokenizer is None else partial(tokenize, self.tokenizer)
        target = read([d.text for d in documents], self.max_tokens)
        kept = [[d.text[: tokens.kept] for d, tokens in zip(documents, target, strict=True)]]
        ids: dict[Pass, list[list[int]]] = {FORWARD: [tokens.ids for tokens in target]}
        for draw in range(1, self.draws + 1):
            texts = [paraphrased[d.row].texts[draw - 1] for d in documents]
            tokens = tokenize(self.tokenizer, texts, self.max_tokens)
            kept.append([text[: entry.kept] for text, entry in zip(texts, tokens, strict=True)])
            ids[replace(FORWARD, draw=draw)] = [entry.ids for entry in tokens]
        for needed in self.passes:
            same = replace(needed, kind="forward", adapter="")
            if same not in ids:
                texts = kept[needed.draw]
                texts = [text.lower() for text in texts] if needed.text == "lowercase" else texts
                tokens = tokenize(self.models[needed.model].tokenizer, texts, self.max_tokens)
                ids[same] = [entry.ids for entry in tokens]
            ids[needed] = ids[same]
        for needed, values in answered.items():  # all that is known of these tokens is how many there are
            ids[needed] = [[0] * (1 + len(values[d.row].values)) for d in documents]
        prepared = []
        for index, document in enumerate(documents):
            shortest = min(len(sequences[index]) for sequences in ids.values())
            if shortest < 2:
                output.refuse(document, "too_short", f"{shortest} tokens; a score needs 2")
                continue
            each = {needed: sequences[index] for needed, sequences in ids.items()}
            texts_of_one = tuple(variant[index] for variant in kept)
            own = {continued: found[document.row] for continued, found in sampled.items()}
            told = {needed: values[document.row].values for needed, values in answered.items()}
            keys, bare = text_keys(document.text), replace(document, text="")  # of all of the text, cut or not
            prepared.append(_Prepared(bare, keys, texts_of_one, target[index].truncated, each, own, told))
        return prepared

    def _score_guarded(self, batch: list[_Prepared], journal: Journal, output: _Output) -> None:
        """Score a batch; one that killed its worker twice goes one document at a time, and so finds the culprit."""
        if not journal.deadly(_batch_key(batch)):
            journal.enter(_batch_key(batch))
            self._score_batch(batch, output)
            return
        for entry in batch:
            if journal.deadly(_batch_key([entry])):
                output.refuse(entry.document, "model_error", "its worker died twice while this was scored")
                continue
            journal.enter(_batch_key([entry]))
            self._score_batch([entry], output)

    def _score_batch(self, batch: list[_Prepared], output: _Output) -> None:
        try:
            scores = self._scores(batch)
        except Exception as error:  # whatever a model raises on a text is that text's fault until it stands alone
            reason = "out_of_memory" if out_of_memory(error) else "model_error"
            if len(batch) == 1:
                output.refuse(batch[0].document, reason, " ".join(str(error).split())[:300] or type(error).__name__)
                return
            del error
        else:
            for entry, row in zip(batch, scores.tolist(), strict=True):
                bad = [d.column for d, value in zip(self.detectors, row, strict=True) if not _finite(value)]
                if bad:
                    output.refuse(entry.document, "non_finite_score", f"not a finite number: {', '.join(bad)}")
                else:
                    output.scored.append((entry, row))
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(batch) // 2
        self._score_batch(batch[:half], output)
        self._score_batch(batch[half:], output)

    def _scores(self, batch: list[_Prepared]) -> torch.Tensor:
        """Scores of a batch: float64, (documents, detectors)."""
        found: dict[Pass, TokenStatistics] = {}
        norms: dict[Pass, torch.Tensor] = {}
        for needed in self.answered:
            device = next((model.device for model in self.models.values()), "cpu")  # where the other model is
            found[needed] = told([entry.told[needed] for entry in batch], device)
        for needed, statistics in self.passes.items():
            model, ids = self.models[needed.model], [entry.ids[needed] for entry in batch]
            with self.adapters.on(needed.adapter):
                if needed.kind == "gradient":
                    norms[needed] = gradient_norms(model, ids)
                else:
                    found[needed] = forward(model, ids, statistics)
        texts, *paraphrases = ([entry.texts[draw] for entry in batch] for draw in range(self.draws + 1))
        continued = {asked.continued: [e.continued[asked.continued] for e in batch] for asked in self.sample_sets}
        evidence = Evidence(texts, found, norms, paraphrases, continuations=continued)
        return torch.stack([detector.score(evidence).double().cpu() for detector in self.detectors], dim=1)

    def _file(self, shard: Shard, store: Store, output: _Output, seconds: float) -> Receipt:
        output.scored.sort(key=lambda entry: entry[0].document.row)
        output.quarantined.sort(key=lambda entry: entry[0].row)
        attempt = uuid.uuid4().hex[:8]
        data = f"scores/{shard.id}-{attempt}.parquet"
        store.write_table(data, _score_table(shard, output, [d.column for d in self.detectors]))
        quarantine = None
        if output.quarantined:
            quarantine = f"quarantine/{shard.id}-{attempt}.parquet"
            store.write_table(quarantine, _quarantine_table(shard, output))
        receipt = Receipt(
            shard=shard.id,
            role=shard.role,
            n_in=len(output.scored) + len(output.quarantined),
            n_scored=len(output.scored),
            n_quarantined=len(output.quarantined),
            data=data,
            quarantine=quarantine,
            reasons=dict(sorted(Counter(reason for _, reason, _ in output.quarantined).items())),
            fingerprint=shard_fingerprint(self.fingerprint, shard),
            tokens=sum(len(entry.ids[FORWARD]) for entry, _ in output.scored),
            n_truncated=sum(entry.truncated for entry, _ in output.scored),
            seconds=round(seconds, 3),
            gradient=self.gradient,
        )
        return write_receipt(store, STAGE, receipt)


def _lacking(
    document: Document,
    sampled: Mapping[Continued, Mapping[int, Any]],
    answered: Mapping[Pass, Mapping[int, LogProbs]],
) -> tuple[str, str] | None:
    """Reason and message why a document was not continued or not read, if so."""
    for found in sampled.values():
        own = found[document.row]
        if isinstance(own, tuple):
            return own
    for values in answered.values():
        if (problem := values[document.row].problem) is not None:
            return problem
    return None


def _batch_key(batch: Sequence[_Prepared]) -> str:
    return f"{batch[0].document.row}+{len(batch)}"


def _batches(window: list[_Prepared], budget: int) -> Iterator[list[_Prepared]]:
    """Documents of like length together, as many as fit the budget of padded tokens; at least one."""
    batch: list[_Prepared] = []
    for entry in sorted(window, key=lambda entry: (len(entry.ids[FORWARD]), entry.document.row)):
        if batch and len(entry.ids[FORWARD]) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _in_background(produce: Callable[[], Iterator[list[_Prepared]]]) -> Iterator[list[_Prepared]]:
    """Run the producer in a thread, at most one window ahead; its error is raised here."""
    waiting: queue.Queue[list[_Prepared] | BaseException | None] = queue.Queue(maxsize=1)
    stop = threading.Event()

    def put(entry: list[_Prepared] | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                waiting.put(entry, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for window in produce():
                if not put(window):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="seenset-reader", daemon=True)
    thread.start()
    try:
        while (entry := waiting.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry
    finally:
        stop.set()
        thread.join()


def _finite(value: float) -> bool:
    return value - value == 0.0


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that there was too little memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _score_table(shard: Shard, output: _Output, columns: Sequence[str]) -> pa.Table:
    entries = [entry for entry, _ in output.scored]
    data: dict[str, list[Any]] = {
        "doc_id": [entry.document.doc_id for entry in entries],
        "role": [shard.role] * len(entries),
        "group": [entry.document.group for entry in entries],
        "row": [entry.document.row for entry in entries],
        "n_tokens": [len(entry.ids[FORWARD]) for entry in entries],
        "truncated": [entry.truncated for entry in entries],
        "id_key": [id_key(entry.document.doc_id) for entry in entries],
        "text_key": [entry.keys[0] for entry in entries],
        "prefix_key": [entry.keys[1] for entry in entries],
    }
    for index, column in enumerate(columns):
        data[column] = [row[index] for _, row in output.scored]
    return pa.table(data, schema=score_schema(columns))


def _quarantine_table(shard: Shard, output: _Output) -> pa.Table:
    rows = output.quarantined
    data: dict[str, list[Any]] = {
        "doc_id": [document.doc_id for document, _, _ in rows],
        "role": [shard.role] * len(rows),
        "source": [shard.name] * len(rows),
        "row": [document.row for document, _, _ in rows],
        "stage": [STAGE] * len(rows),
        "reason": [reason for _, reason, _ in rows],
        "message": [message for _, _, message in rows],
        "id_key": [id_key(document.doc_id) for document, _, _ in rows],
    }
    return pa.table(data, schema=QUARANTINE_SCHEMA)
