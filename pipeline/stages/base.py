"""Definitions shared by all stages: stages and their fingerprints, workers, outputs and the record of a stage."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields, is_dataclass
from hashlib import sha256
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import torch
from pydantic import BaseModel

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import TransformConfig
from pipeline.config.models import AnyModel, EndpointConfig, ModelConfig, ScoredModel
from pipeline.corpus.documents import ContentDigest, Document
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.detectors.base import Detector, Pass, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Usage, run_concurrently
from pipeline.endpoint.parameters import Adjustments, SampleRequest
from pipeline.endpoint.replies import FirstDocuments
from pipeline.errors import UserError, error_line
from pipeline.models.checkpoints import dtype_name, locate, read_model_config
from pipeline.models.devices import CPU, Device, check_device, compute_as
from pipeline.models.load import count_parameters
from pipeline.models.sharing import Opened, SharedModels
from pipeline.models.unchanged import Marks, ModelDigests, check_same_files, is_a_path
from pipeline.passes.budget import CPU_BUDGET, Budget, Card, Shape, pass_budget, read_shape
from pipeline.stages.audited_texts import AGAINST, AuditedTexts
from pipeline.stages.prefixes import Prefixes
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

Digest = Callable[[AnyModel], Mapping[str, str]]

Rows = dict[int, dict[str, Any]]
"""Row number -> columns of the row."""


def rows_schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    """Columns of rows that another stage reads, including a reason for documents without a result."""
    first, last = [("doc_id", pa.string()), ("row", pa.int64())], [("reason", pa.string()), ("problem", pa.string())]
    return pa.schema([*first, *columns, *last])


@dataclass(frozen=True, slots=True)
class Placement:
    """The resources of a worker. They never change a result."""

    gpus: float = 0  # 0: the CPU
    threads: int = 1  # CPU threads for a batch
    shared: SharedModels | None = None  # with other workers of this process; None: the worker loads models itself
    endpoint: SharedEndpoint | None = None  # client shared by all workers, if the stage uses an endpoint

    def set_up(self, mark: str, gradients: bool = False) -> None:
        """Check the device of a worker, and configure it for this process.

        Args:
            mark: device, from the fingerprint of the stage.
            gradients: whether the stage computes gradients.

        Raises:
            UserError: as `check_device`.
        """
        check_device(mark, self.gpus)
        compute_as(mark, gradients)
        if self.gpus == 0:
            torch.set_num_threads(self.threads)

    def open(self, opener: Callable[..., Opened], config: ModelConfig) -> Opened:
        """Load a model for this worker, or get one with shared weights.

        Args:
            opener: `open_model` or `open_paraphraser`.
            config: configuration of the model.

        Raises:
            UserError: as the opener.
        """
        if self.shared is None:
            return opener(config, gpus=self.gpus)
        return self.shared.copy_model(opener, config, self.gpus)


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a run: what its rows depend on, and its worker.

    `fingerprint` is computed from every field of `settings`, the transform, the seed, the stages whose rows are read
    and the version of the code. Models are represented by their content (`fingerprint_model`), values with a method
    `fingerprint` by its result, and all others as JSON.
    """

    name: str  # name of its folder of receipts
    folder: str  # folder of its files
    schema: pa.Schema
    settings: Any  # a frozen dataclass; all of its fields affect rows
    transform: TransformConfig | None  # changes of every text
    seed: int
    make: Callable[[Stage, Placement], Any]  # constructs a Worker
    digest: InitVar[Digest]
    reads: tuple[Stage, ...] = ()  # stages whose rows its worker reads
    endpoint: EndpointConfig | None = None  # None: a local model
    quarantines: bool = False  # True: documents without a result are quarantined; False: they are rows with a reason
    grows: str | None = None  # setting that can be increased later and keeps existing rows
    wanted_by: tuple[str, ...] = ()  # detector columns that read its rows, for messages
    already_audited: AuditedTexts | None = None  # audit documents with these texts are left out
    fingerprint: dict[str, Any] = field(init=False)
    marks: dict[str, Marks] = field(init=False, compare=False)  # setting that is a model -> marks of its hashed files

    def __post_init__(self, digest: Digest) -> None:
        """Compute the fingerprint."""
        parts: dict[str, Any] = {}
        marks: dict[str, Marks] = {}
        for entry in fields(self.settings):
            value = getattr(self.settings, entry.name)
            if isinstance(value, (ModelConfig, EndpointConfig, ScoredModel)):
                prefix = _prefix(entry.name)
                parts.update({f"{prefix}{key}": text for key, text in digest(value).items()})
                if isinstance(value, ModelConfig) and isinstance(digest, ModelDigests):
                    marks[entry.name] = digest.marks(value)
            elif value is not None:
                parts[entry.name] = _plain(value)
        if self.transform is not None:
            parts["text_transform"] = _plain(self.transform)
        for stage in self.reads:  # without left-out documents, which do not affect other rows
            read = json.dumps(without(stage.fingerprint, AGAINST), sort_keys=True).encode()
            parts.setdefault("reads", {})[stage.name] = sha256(read).hexdigest()[:16]
        if self.already_audited is not None:
            parts[AGAINST] = self.already_audited.fingerprint()
        object.__setattr__(self, "fingerprint", {**parts, "seed": self.seed, "code": __version__})
        object.__setattr__(self, "marks", marks)

    def check_models(self, hub: bool) -> None:
        """Check that the files of the models are those of the fingerprint.

        Args:
            hub: whether models of the hub are checked too, whose files in its cache do not change.

        Raises:
            StopError: a file is another one.
            UserError: a file is missing.
        """
        for name, marks in self.marks.items():
            config = getattr(self.settings, name)
            if hub or is_a_path(config):
                digests = {key: self.fingerprint[f"{_prefix(name)}{key}"] for key in ("model", "tokenizer")}
                check_same_files(config, marks, digests)

    def reads_with(self, column: str) -> tuple[Stage, ...]:
        """The stages in `reads` whose rows have a column."""
        return tuple(stage for stage in self.reads if column in stage.schema.names)

    def fingerprint_for(self, shard: Shard) -> dict[str, Any]:
        """The fingerprint of the receipt of a shard."""
        return shard_fingerprint(self.fingerprint, shard)

    def identity(self, shard: Shard) -> dict[str, Any]:
        """Everything that affects a row of a shard, except the setting `grows`."""
        return without(self.fingerprint_for(shard), self.grows)

    def answers(self, shard: Shard, store: Store) -> Answers:
        """The endpoint's answers for a shard that are not in a receipt yet."""
        return Answers(store, self.folder, self.name, shard.id, self.identity(shard))


@dataclass(frozen=True, slots=True)
class Entry:
    """A prepared document."""

    document: Document  # its text may have been dropped
    tokens: int  # length for batching
    work: Any  # prepared by the stage's worker


@dataclass(frozen=True, slots=True)
class Window:
    """Limits of the documents that a worker prepares together; a window ends with the document that reaches one."""

    documents: int
    characters: float = math.inf  # characters of their texts
    kept: float = math.inf  # characters of the kept parts
    kept_of_one: int = sys.maxsize  # approximate maximum of the kept part of one document


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Maximum size of a batch of documents of similar length; a batch has at least one document."""

    tokens: int  # maximum, with each document padded to the longest
    padding: int | None = None  # maximum padding tokens; None: no limit


@dataclass(slots=True)
class Output:
    """The results for the documents of a shard so far."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # row number -> columns
    refused: dict[int, tuple[Document, str, str]] = field(default_factory=dict)  # document, reason, message
    unread: set[int] = field(default_factory=set)  # refused documents that no stage can read
    n_judged: int = 0  # documents left out because an earlier run audited their text
    notes: Notes = field(default_factory=Notes)  # of the reader of the shard
    tokens: int = 0
    n_truncated: int = 0
    gradient: dict[str, Any] | None = None  # weights and method of gradient norms
    content: ContentDigest = field(default_factory=ContentDigest)  # digest of the documents
    earlier: dict[str, str] = field(default_factory=dict)  # stage whose rows are read -> digest of its documents
    base: Receipt | None = None  # receipt of the same stage with a smaller `grows`, which its rows extend
    base_rows: Rows = field(default_factory=dict)
    answers: Answers | None = None  # answers of an endpoint, from which rows are made
    filed: bool = False  # the receipt of the shard belongs to these rows, not to another attempt

    def keep(self, document: Document, **columns: Any) -> None:
        """Record the row of a document."""
        self.rows[document.row] = {"doc_id": document.doc_id, "row": document.row, **columns}

    def refuse(self, document: Document, reason: str, message: str) -> None:
        """Record why a document has no result."""
        self.refused[document.row] = (document, reason, message)


class BatchWorker(Protocol):
    """Computes the rows of prepared documents by batches."""

    @property
    def batch_size(self) -> BatchSize | None:
        """The size of its batches; None: a window is one batch, in order."""

    def work(self, batch: list[Entry], output: Output) -> None:
        """Record a row or a refusal for every document; an exception means that one of them is invalid."""


class Worker(BatchWorker, Protocol):
    """The worker of a stage, which loads its models once. Rows depend only on the shard."""

    window: Window

    def open(self, shard: Shard, store: Store, output: Output) -> Any:
        """Read the inputs for a shard from the run directory; existing rows of earlier attempts go to the output."""

    def prepare(self, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
        """Prepare documents, in the reader's thread; those that cannot have a result are refused."""


Item = TypeVar("Item")


class SharedEndpoint:
    """A client of an endpoint in a separate thread; all workers of a process share its limits and its budget."""

    def __init__(self, config: EndpointConfig, spent: Usage) -> None:
        """Start the thread; `spent` is the usage of earlier calls of the run."""
        self.client = Endpoint(config, spent)
        self.form: Any = None  # how the endpoint returns log-probabilities, once known
        self.choosing = asyncio.Lock()
        self.first_documents = FirstDocuments(config.endpoint)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="seenset-endpoint", daemon=True)
        self._thread.start()

    def each(self, items: Iterable[Item], work: Callable[[Item], Awaitable[None]]) -> None:
        """Process items concurrently and wait for the end, in any thread. The first error cancels the rest.

        Raises:
            StopError: no document would get an answer, or the budget is exhausted.
            UserError: answers cannot be recorded. This concerns no single document, so that none is retried.
        """
        waiting = run_concurrently(items, work, self.client.config.concurrency)
        try:
            asyncio.run_coroutine_threadsafe(waiting, self._loop).result()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{type(error).__name__}: {error_line(error)}") from error

    def close(self) -> None:
        """Cancel requests in flight, whose cost is recorded, and close the client."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its end cancels requests in flight
            self._held = runner.get_loop().create_task(self._hold())
            self._loop.run_forever()

    async def _hold(self) -> None:
        async with self.client:
            await asyncio.Event().wait()


def _prefix(setting: str) -> str:
    """The start of the keys of a model's digests in a fingerprint."""
    return "" if setting == "model" else f"{setting.removesuffix('_model')}_"


def _plain(value: Any) -> Any:
    """A value as in a fingerprint, after a round trip through JSON."""
    if hasattr(value, "fingerprint"):
        value = value.fingerprint()
    elif isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return json.loads(json.dumps(value))


def without(fingerprint: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """A fingerprint without a key, if it has it."""
    return {name: value for name, value in fingerprint.items() if name != key}


@dataclass(frozen=True, slots=True)
class DocumentSize:
    """Mean size of documents, in bytes."""

    text: float
    prompt: float | None = None  # of a chat: before its last answer
    answer: float | None = None  # of a chat: its last answer

    def split(self, ratio: float) -> tuple[float, float]:
        """Bytes before and behind the place at which a document is split: the last answer, or a share of a text."""
        if self.prompt is None or self.answer is None:
            return ratio * self.text, (1 - ratio) * self.text
        return self.prompt, self.answer


@dataclass(frozen=True, slots=True)
class Questions:
    """Size of the requests to an endpoint for an average document."""

    model: EndpointConfig
    requests: int
    prompt_bytes: float  # total of all requests
    answer_tokens: int  # maximum total of all requests


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The requirements of a run for its stages, from the configuration."""

    config: AuditConfig
    device: Device = CPU  # device of the workers
    digest: Digest = field(default_factory=ModelDigests)  # fingerprints of models; reads each model's weights once
    adapters: Mapping[str, str] | None = None  # name -> key of its folder; None: their settings are used instead
    already_audited: AuditedTexts | None = None  # texts whose audit documents are left out
    prefixes: Prefixes | None = None  # prefixes of documents; None: none, or their settings are used instead
    shape: Callable[[ModelConfig], Shape] = field(default_factory=lambda: model_shape)  # shapes of models
    parameters: Mapping[str, Adjustments] = field(default_factory=dict)  # folder of a stage -> changes of its requests

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """The detectors of the run."""
        return parse_detectors(self.config.detectors)

    @property
    def passes(self) -> dict[Pass, frozenset[str]]:
        """Pass -> statistics that the detectors read."""
        return plan_passes(self.detectors)

    def adjustments(self, folder: str) -> Adjustments | None:
        """The changes of the requests of the stage with this folder; None if there are none."""
        changes = self.parameters.get(folder)
        return changes if changes is not None and changes.names else None

    def budget(self, *models: AnyModel | None) -> Budget:
        """Batch sizes of a worker with these models, for the largest of them. Endpoints take no memory.

        Raises:
            UserError: the weights leave no memory for a batch.
        """
        local = [model for model in models if isinstance(model, ModelConfig)]
        if not self.device.gpus or not local:
            return CPU_BUDGET
        shapes = [self.shape(model) for model in local]
        gpus, memory = self.device.gpus, self.device.memory
        least = least_budget(shapes, Card(memory, gpus), self.config.max_tokens)
        if not least.forward:
            size = sum(shape.weights for shape in shapes) / 2**30
            raise UserError(
                f"model {local[0].shown}: {size:.1f} GiB of weights leave no memory for a batch on {gpus:g} GPUs of "
                f"{memory / 2**30:.0f} GiB an actor; raise resources.gpus_per_actor, or quantise the model"
            )
        return Budget(least.forward, max(1, least.gradient), max(1, least.cache))

    def stage(self, name: str, **parts: Any) -> Stage:
        """Construct a stage with the values shared by all stages of the run.

        Args:
            name: name of its folder of receipts.
            parts: other fields of `Stage`.
        """
        config = self.config
        shared: dict[str, Any] = {"transform": config.text_transform, "seed": config.seed}
        return Stage(name, digest=self.digest, already_audited=self.already_audited, **shared, **parts)


@dataclass(frozen=True, slots=True)
class StageKind:
    """A kind of stage, in the variable `KIND` of a module of `pipeline.stages`; no other code refers to it.

    A stage that reads the rows of another identifies it by a column of these rows (`Stage.reads_with`), not by name.
    """

    name: str  # name of its stages, or their prefix before a slash
    folder: str  # folder of their files, or its prefix
    stages: Callable[[StagePlan, Sequence[Stage]], Sequence[Stage]]  # required stages; they may read earlier ones
    check: Callable[[AuditConfig], Sequence[str]] = (
        lambda config: ()
    )  # called before weights are read; returns lines for the user; raises UserError
    questions: Callable[[AuditConfig, DocumentSize], Sequence[Questions]] = (
        lambda config, size: ()
    )  # about a document of mean size
    request: Callable[[Stage], SampleRequest] | None = (
        None  # of a stage with an endpoint, whose answers are in the folder; None: no stage of this kind has one
    )
    costs: Mapping[str, Callable[[Mapping[str, Any]], float]] = field(default_factory=dict)
    """Kind of pass -> cost of an entry of `Plan.passes`, in forward passes over the whole text."""

    def contains(self, stage: Stage) -> bool:
        """Whether a stage is of this kind, by its name."""
        return stage.name.split("/")[0] == self.name


def least_budget(shapes: Sequence[Shape], card: Card, length: int) -> Budget:
    """The budget that fits for each of the models that share a GPU; 0 if there is no memory for a batch."""
    budgets = [
        pass_budget(shape, card, length, [*shapes[:index], *shapes[index + 1 :]]) for index, shape in enumerate(shapes)
    ]
    return Budget(*(min(getattr(each, name) for each in budgets) for name in ("forward", "gradient", "cache")))


def model_shape(model: ModelConfig) -> Shape:
    """The shape of a model, from its configuration; no weights are read.

    Raises:
        UserError: a file is missing or damaged.
    """
    source = locate(model, weights=False)
    loaded = read_model_config(model, source, "any")
    return read_shape(loaded, dtype_name(model, source, loaded), count_parameters(model), model.quantization)
