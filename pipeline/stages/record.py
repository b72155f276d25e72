"""The record of a stage: what it is called, which passes its rows answer, and what a configuration asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.models import AnyModel, EndpointConfig, ModelConfig
from pipeline.detectors.base import Detector, Pass, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.checkpoints import dtype_name, locate, read_model_config
from pipeline.models.devices import CPU, Device
from pipeline.models.load import count_parameters
from pipeline.passes.budget import CPU_BUDGET, Budget, Card, Shape, budget_of, shape_of
from pipeline.stages.base import Digest, Stage, model_digests
from pipeline.stages.judged import JudgedTexts
from pipeline.stages.prefixes import Prefixes


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
    judged: JudgedTexts | None = None  # texts whose audit documents are left out
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
        shared: dict[str, Any] = {"transform": config.text_transform, "seed": config.seed, "judged": self.judged}
        return Stage(name, digest=self.digest, **shared, **parts)


@dataclass(frozen=True, slots=True)
class StageKind:
    """A kind of stage. A module of `pipeline.stages` holds one in its variable `KIND`; nothing else names it.

    A stage that reads the rows of another finds it by a column of these rows (`Stage.reading`), whatever its name.
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
