"""What every stage does: a shard of documents -> one file of rows and one receipt; and the record of a stage."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields, is_dataclass
from functools import cache
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
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.detectors.base import Detector, Pass, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Usage, run_concurrently
from pipeline.errors import UserError
from pipeline.models.checkpoints import dtype_name, locate, read_model_config
from pipeline.models.devices import CPU, Device, check_device, compute_as
from pipeline.models.load import count_parameters, fingerprint_model
from pipeline.models.sharing import Opened, SharedModels
from pipeline.passes.budget import CPU_BUDGET, Budget, Card, Shape, budget_of, shape_of
from pipeline.stages.audited_texts import AGAINST, AuditedTexts
from pipeline.stages.prefixes import Prefixes
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

Digest = Callable[[AnyModel], Mapping[str, str]]

Rows = dict[int, dict[str, Any]]
"""Columns of each row, by its number."""


def model_digests() -> Digest:
    """`fingerprint_model` with a memory: weights are read once however many stages ask the model."""
    return cache(fingerprint_model)


def rows_schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    """The columns of a stage whose rows another stage reads: a document without a result has a reason instead."""
    first, last = [("doc_id", pa.string()), ("row", pa.int64())], [("reason", pa.string()), ("problem", pa.string())]
    return pa.schema([*first, *columns, *last])


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker runs. It never changes a result."""

    gpus: float = 0  # 0: the CPU
    threads: int = 1  # on the CPU, for a batch
    shared: SharedModels | None = None  # with the other workers of this process; None: it opens models itself
    endpoint: SharedEndpoint | None = None  # of all workers, where the stage asks an endpoint

    def set_up(self, mark: str, gradients: bool = False) -> None:
        """Check the device of a worker, and set how this process computes on it.

        Args:
            mark: of the device, from the fingerprint of the stage.
            gradients: whether the stage takes gradients.

        Raises:
            UserError: as `check_device`.
        """
        check_device(mark, self.gpus)
        compute_as(mark, gradients)
        if self.gpus == 0:
            torch.set_num_threads(self.threads)

    def open(self, opener: Callable[..., Opened], config: ModelConfig) -> Opened:
        """A model, for this worker alone or with weights that it shares.

        Args:
            opener: `open_model` or `open_paraphraser`.
            config: of the model.

        Raises:
            UserError: as the opener.
        """
        if self.shared is None:
            return opener(config, gpus=self.gpus)
        return self.shared.copy_of(opener, config, self.gpus)


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: what its rows depend on, and who makes them.

    `fingerprint` is made here, of every field of `settings`, of the transform, the seed, the stages whose rows are read
    and the code's version. Models count by their content (`fingerprint_model`), values with a method `fingerprint` by
    what that returns, all others as JSON.
    """

    name: str  # of its folder of receipts
    folder: str  # of its files
    schema: pa.Schema
    settings: Any  # a frozen dataclass, all of whose fields change rows
    transform: TransformConfig | None  # of every text
    seed: int
    make: Callable[[Stage, Placement], Any]  # a Worker
    digest: InitVar[Digest]
    reads: tuple[Stage, ...] = ()  # whose rows its worker reads
    endpoint: EndpointConfig | None = None  # that is asked; None: a model at hand
    quarantines: bool = False  # documents without a result go to quarantine; else they are rows with a reason
    grows: str | None = None  # the setting of which more can be asked later, without making anew what is there
    wanted_by: tuple[str, ...] = ()  # columns of the detectors that read its rows, for messages
    already_audited: AuditedTexts | None = None  # audit documents with such a text are left out
    fingerprint: dict[str, Any] = field(init=False)

    def __post_init__(self, digest: Digest) -> None:
        """Make the fingerprint."""
        parts: dict[str, Any] = {}
        for entry in fields(self.settings):
            value = getattr(self.settings, entry.name)
            if isinstance(value, (ModelConfig, EndpointConfig, ScoredModel)):
                prefix = "" if entry.name == "model" else f"{entry.name.removesuffix('_model')}_"
                parts.update({f"{prefix}{key}": text for key, text in digest(value).items()})
            elif value is not None:
                parts[entry.name] = _plain(value)
        if self.transform is not None:
            parts["text_transform"] = _plain(self.transform)
        for stage in self.reads:  # without the documents that are left out: they change no row of the others
            read = json.dumps(without(stage.fingerprint, AGAINST), sort_keys=True).encode()
            parts.setdefault("reads", {})[stage.name] = sha256(read).hexdigest()[:16]
        if self.already_audited is not None:
            parts[AGAINST] = self.already_audited.fingerprint()
        object.__setattr__(self, "fingerprint", {**parts, "seed": self.seed, "code": __version__})

    def reads_with(self, column: str) -> tuple[Stage, ...]:
        """The stages that it reads whose rows have a column."""
        return tuple(stage for stage in self.reads if column in stage.schema.names)

    def fingerprint_of(self, shard: Shard) -> dict[str, Any]:
        """The fingerprint of the receipt of a shard."""
        return shard_fingerprint(self.fingerprint, shard)

    def identity(self, shard: Shard) -> dict[str, Any]:
        """All that could change a row of a shard, without the setting of which only more can be asked."""
        return without(self.fingerprint_of(shard), self.grows)

    def answers(self, shard: Shard, store: Store) -> Answers:
        """What an endpoint has answered about a shard, and no receipt names yet."""
        return Answers(store, self.folder, self.name, shard.id, self.identity(shard))


@dataclass(frozen=True, slots=True)
class Entry:
    """A document that is ready to be worked on."""

    document: Document  # its text may have gone
    tokens: int  # by which batches are formed
    work: Any  # what the stage's worker made of it


@dataclass(frozen=True, slots=True)
class Window:
    """How many documents a worker prepares at a time, so that it ends with the one that reaches a limit."""

    documents: int
    characters: float = math.inf  # of their texts
    kept: float = math.inf  # characters of what is worked on
    kept_of_one: int = sys.maxsize  # of that in one document, about at most


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How many documents of like length share a batch; a batch has at least one."""

    tokens: int  # at most, each document padded to the longest
    padding: int | None = None  # tokens of it, at most; None: as much as it takes


@dataclass(slots=True)
class Output:
    """What a shard's documents came to so far."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # number of the row -> columns
    refused: dict[int, tuple[Document, str, str]] = field(default_factory=dict)  # document, reason, message
    unread: set[int] = field(default_factory=set)  # of the refused: no stage can read them
    n_judged: int = 0  # documents that are left out, because an earlier run has audited their text
    tokens: int = 0
    n_truncated: int = 0
    gradient: dict[str, Any] | None = None  # over what gradient norms were taken, and how
    content: ContentDigest = field(default_factory=ContentDigest)  # of the documents as they are read
    earlier: dict[str, str] = field(default_factory=dict)  # stage whose rows are read -> digest of what it read
    base: Receipt | None = None  # of the same stage with less asked for, from which its rows go on
    base_rows: Rows = field(default_factory=dict)
    answers: Answers | None = None  # of an endpoint, of which the rows are made
    filed: bool = False  # the receipt of the shard is of these rows, not of another attempt's

    def keep(self, document: Document, **columns: Any) -> None:
        """Note the row of a document."""
        self.rows[document.row] = {"doc_id": document.doc_id, "row": document.row, **columns}

    def refuse(self, document: Document, reason: str, message: str) -> None:
        """Note why a document has no result."""
        self.refused[document.row] = (document, reason, message)


class BatchWorker(Protocol):
    """What turns prepared documents into rows, a batch at a time."""

    @property
    def batch_size(self) -> BatchSize | None:
        """Of its batches; None: a window is a batch, in its order."""

    def work(self, batch: list[Entry], output: Output) -> None:
        """Note a row or a refusal of every document; an exception is the fault of one of them."""


class Worker(BatchWorker, Protocol):
    """A stage's own part, with its models loaded once. Rows depend on the shard alone."""

    window: Window

    def open(self, shard: Shard, store: Store, output: Output) -> Any:
        """What is needed of the run directory for a shard; finished rows of an earlier attempt go to the output."""

    def prepare(self, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
        """Make documents ready, in the reader's thread; those that have no result are refused."""


Item = TypeVar("Item")


class SharedEndpoint:
    """A client of an endpoint in a thread of its own: all workers of a process share its limits and its budget."""

    def __init__(self, config: EndpointConfig, spent: Usage) -> None:
        """Start the thread; `spent` is the part of the budget that earlier calls of the run used."""
        self.client = Endpoint(config, spent)
        self.way: str | None = None  # how the endpoint tells log-probabilities, once a worker knows it
        self.choosing = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="seenset-endpoint", daemon=True)
        self._thread.start()

    def each(self, items: Iterable[Item], work: Callable[[Item], Awaitable[None]]) -> None:
        """Work on items concurrently and wait for the end, in any thread. The first error cancels the rest.

        Raises:
            StopError: no document would get an answer now, or the budget is spent.
            UserError: nothing more can be written down. No document is at fault, so that none is asked about again.
        """
        waiting = run_concurrently(items, work, self.client.config.concurrency)
        try:
            asyncio.run_coroutine_threadsafe(waiting, self._loop).result()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def close(self) -> None:
        """Cancel the requests under way, whose cost is written down, and close the client."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its end cancels what is under way
            self._held = runner.get_loop().create_task(self._hold())
            self._loop.run_forever()

    async def _hold(self) -> None:
        async with self.client:
            await asyncio.Event().wait()


def _plain(value: Any) -> Any:
    """A value as a fingerprint holds it: what JSON gives back."""
    if hasattr(value, "fingerprint"):
        value = value.fingerprint()
    elif isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return json.loads(json.dumps(value))


def without(fingerprint: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """A fingerprint without one of its keys, if it has it."""
    return {name: value for name, value in fingerprint.items() if name != key}


@dataclass(frozen=True, slots=True)
class Questions:
    """What an endpoint is asked about an average document."""

    model: EndpointConfig
    requests: int
    prompt_bytes: float  # of all requests
    answer_tokens: int  # of all requests, at most


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a configuration asks of the stages of a run."""

    config: AuditConfig
    device: Device = CPU  # that the workers compute on
    digest: Digest = field(default_factory=model_digests)  # of models; reads each model's weights once
    adapters: Mapping[str, str] | None = None  # name -> key of the folder of each; None: their settings stand for them
    already_audited: AuditedTexts | None = None  # texts whose audit documents are left out
    prefixes: Prefixes | None = None  # what stands before documents; None: nothing, or their settings stand for them

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """The detectors of the run."""
        return parse_detectors(self.config.detectors)

    @property
    def passes(self) -> dict[Pass, frozenset[str]]:
        """The passes that the detectors read, with the statistics of each."""
        return plan_passes(self.detectors)

    def budget(self, *models: AnyModel | None) -> Budget:
        """The sizes of batches of a worker that holds these models: those of the largest. Endpoints take no memory.

        Raises:
            UserError: the weights leave nothing of the device.
        """
        local = [model for model in models if isinstance(model, ModelConfig)]
        if not self.device.gpus or not local:
            return CPU_BUDGET
        shapes = [model_shape(model) for model in local]
        gpus, memory = self.device.gpus, self.device.memory
        least = least_budget(shapes, Card(memory, gpus), self.config.max_tokens)
        if not least.forward:
            size = sum(shape.weights for shape in shapes) / 2**30
            raise UserError(
                f"model {local[0].shown}: {size:.1f} GiB of weights leave no room for a batch on {gpus:g} GPUs of "
                f"{memory / 2**30:.0f} GiB an actor; raise resources.gpus_per_actor, or quantise the model"
            )
        return Budget(least.forward, max(1, least.gradient), max(1, least.cache))

    def stage(self, name: str, **parts: Any) -> Stage:
        """A stage with what all stages of the run share.

        Args:
            name: of its folder of receipts.
            parts: the other fields of `Stage`.
        """
        config = self.config
        shared: dict[str, Any] = {"transform": config.text_transform, "seed": config.seed}
        return Stage(name, digest=self.digest, already_audited=self.already_audited, **shared, **parts)


@dataclass(frozen=True, slots=True)
class StageKind:
    """A kind of stage. A module of `pipeline.stages` holds one in its variable `KIND`; nothing else names it.

    A stage that reads the rows of another finds it by a column of these rows (`Stage.reads_with`), whatever its name.
    """

    name: str  # of its stages, or what that begins with, before a slash
    folder: str  # of their files, or what that begins with
    serves: Callable[[Pass, AuditConfig], bool]  # whether its rows hold a pass, or what a pass reads
    stages: Callable[[Wanted, Sequence[Stage]], Sequence[Stage]]  # wanted stages, of which it may read the earlier ones
    check: Callable[[AuditConfig], None] = lambda config: None  # before weights are read; raises UserError
    questions: Callable[[AuditConfig, float], Sequence[Questions]] = (
        lambda config, text_bytes: ()
    )  # for texts of so many bytes
    asks: bool = False  # whether endpoints may be asked, so that answers lie in the folder
    costs: Mapping[str, Callable[[Mapping[str, Any]], float]] = field(default_factory=dict)
    """Kind of pass -> the cost of a pass of `Plan.passes`, in forward passes over the whole text."""


def least_budget(shapes: Sequence[Shape], card: Card, length: int) -> Budget:
    """The budget that holds for each of the models that share a card, beside the others; 0 where there is no room."""
    budgets = [
        budget_of(shape, card, length, [*shapes[:index], *shapes[index + 1 :]]) for index, shape in enumerate(shapes)
    ]
    return Budget(*(min(getattr(each, name) for each in budgets) for name in ("forward", "gradient", "cache")))


def model_shape(model: ModelConfig) -> Shape:
    """The shape of a model, from its configuration; no weights are read.

    Raises:
        UserError: a file is missing or damaged.
    """
    source = locate(model, weights=False)
    loaded = read_model_config(model, source, "any")
    return shape_of(loaded, dtype_name(model, source, loaded), count_parameters(model), model.quantization)
