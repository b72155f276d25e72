"""The configuration of an audit. Unknown keys are refused, with the nearest known name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from pipeline.config.corpus import (
    LIMITS,
    NEAR_SHARE,
    ChatConfig,
    CorpusConfig,
    LimitsConfig,
    NearShare,
    TransformConfig,
)
from pipeline.config.models import AnyModel, ParaphraserConfig, ScoredModel
from pipeline.config.paths import Place
from pipeline.config.selection import SelectionConfig, SeriesConfig
from pipeline.config.training import FsdConfig
from pipeline.config.yaml import Section, Size

LEAST_SHARE = 1e-4
"""Smallest share of a GPU: the resolution of Ray's resources."""

MOST_ATTRIBUTIONS = 50
"""Maximum number of documents of a selection whose tokens are kept: memory holds them together."""


def _whole_or_share(gpus: float) -> float:
    """The number of GPUs, if a cluster can place it: a share of one GPU, or a whole number.

    Raises:
        ValueError: it is neither.
    """
    if 0 < gpus < LEAST_SHARE or (gpus > 1 and gpus != int(gpus)):
        raise ValueError(
            f"input should be 0, a share of a GPU from {LEAST_SHARE:g} to 1, or a whole number, got {gpus:g}"
        )
    return gpus


class ActorsConfig(Section):
    """Minimum and maximum number of actors of a run on a cluster."""

    min: Annotated[int, Field(ge=1)] = Field(
        1, description="Actors that Ray keeps, also on a cluster that must grow for them."
    )
    max: Annotated[int, Field(ge=1)] = Field(description="Most actors.")

    @model_validator(mode="after")
    def _ordered(self) -> ActorsConfig:
        if self.max < self.min:
            raise ValueError(f"max must be at least min, {self.min}, got {self.max}")
        return self


class ResourcesConfig(Section):
    """Resources of a run. The cluster and the number of actors never change a result."""

    cluster: Literal["auto", "local", "ray"] = Field(
        "auto",
        description="Threads on this machine, or the cluster of RAY_ADDRESS (else one started here); "
        "auto: by GPUs and work.",
    )
    actors: Literal["auto"] | Annotated[int, Field(ge=1)] | ActorsConfig = Field(
        "auto", description="Most scoring actors or local threads; auto: as many as there are places."
    )
    gpus_per_actor: Literal["auto"] | Annotated[float, Field(ge=0), AfterValidator(_whole_or_share)] = Field(
        "auto", description="A share of one GPU and of its memory, 1, or several for one model."
    )
    cpus_per_actor: Annotated[int, Field(ge=1)] = Field(1, description="Threads of an actor.")
    batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Most padded tokens in a batch; auto: 2048 on a CPU, else what the memory of a GPU holds."
    )
    gpu_memory: Literal["auto"] | Annotated[Size, Field(ge=1 << 30)] = Field(
        "auto",
        description="Memory of one GPU, such as 80 GiB, from which batch sizes follow; auto: the least at the start.",
    )
    deterministic: bool = Field(False, description="The same bits each time on GPUs, with one model of GPU.")
    finetune_workers: Annotated[int, Field(ge=1)] = Field(
        1, description="Workers that share one training, each with cpus_per_actor threads or a GPU."
    )
    deepspeed: Annotated[str | None, Place.SETTINGS_FILE] = Field(
        None, description="zero2, zero3, or a JSON file, if no GPU holds the model."
    )
    shard_bytes: Literal["auto"] | Annotated[Size, Field(ge=1)] = Field(
        "auto", description="Text bytes in a shard, about, such as 256 KiB; auto: at most 1 MiB."
    )
    shard_documents: Annotated[int, Field(ge=1)] = Field(4096, description="Most documents in a shard.")

    def actors_between(self, places: int, growth: int) -> tuple[int, int]:
        """The number of actors at the start, and the maximum number.

        Args:
            places: number of actors that the cluster has resources for.
            growth: maximum number of actors if the configuration sets none, >= places.
        """
        if isinstance(self.actors, ActorsConfig):
            return max(self.actors.min, min(places, self.actors.max)), self.actors.max
        most = growth if self.actors == "auto" else self.actors
        return min(places, most), most


DetectorEntry = str | dict[str, Any]
"""A detector's name, or {name: {argument: value}}; `pipeline.detectors` checks it."""
Imports = Annotated[
    list[str],
    Place.CODE,
    Field(
        alias="import",
        description="Python files, which go to every worker, or installed modules, with detectors and procedures.",
    ),
]


class AuditConfig(Section):
    """The configuration of an audit.

    Example:
        >>> config = seenset.AuditConfig(
        ...     run="runs/notes",
        ...     model={"path": "my-model"},
        ...     corpus={"audit": {"path": "audited.jsonl"}, "unseen": {"path": "unseen.jsonl"}},
        ...     detectors=["loss"],
        ...     selections=[{"name": "members", "detectors": ["loss"], "procedure": "storey", "alpha": 0.1}],
        ... )
        >>> config.max_tokens, config.selections[0].confidence
        (1024, 0.95)
    """

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)  # `import` is no name in Python

    run: Annotated[str, Place.RUN] = Field(description="Run directory: a local path or an fsspec URL.")
    model: AnyModel = Field(description="The audited model; with `scores` its name, or nothing.")
    reference_model: AnyModel | None = Field(None, description="Model for detectors `reference`, `ez`, `wbc`.")
    paraphraser: ParaphraserConfig | None = Field(None, description="Model for the `knockoff` detector.")
    corpus: CorpusConfig
    detectors: list[DetectorEntry] = Field(
        default=["loss", "zlib", "lowercase", "min_k", "min_k_plus_plus"],
        min_length=1,
        description="Names, or {name: {argument: value or list of values}}.",
    )
    fsd: FsdConfig = Field(default=FsdConfig(), description="Adapters of the `fsd` detector.")
    text_transform: TransformConfig | None = Field(None, description="Changes of every text.")
    chat: ChatConfig | None = Field(None, description="Rendering of chats; default: answers, by the model's template.")
    max_tokens: Annotated[int, Field(ge=2)] = Field(
        1024, description="Documents are cut to this many tokens; of books and other long ones `windows` reads more."
    )
    windows: Annotated[int, Field(ge=1)] = Field(
        1,
        description="Most pieces of max_tokens that are read of a long text, spread over it; 1: its beginning.",
    )
    overlap: Literal["error", "drop"] = Field(
        "error", description="Near-duplicates of audited documents in calibration: stop, or leave them out."
    )
    near_copies: NearShare = Field(
        NEAR_SHARE,
        description="Share of common runs of five words (eight characters in scripts without blanks) from which two "
        "documents are near-duplicates.",
    )
    limits: LimitsConfig = LIMITS
    error_budget: Annotated[float, Field(ge=0, le=1)] = Field(0.01, description="Share that may be quarantined.")
    selections: list[SelectionConfig] = Field(default=[], description="Selections of documents by their scores.")
    evidence: Annotated[int, Field(ge=0, le=MOST_ATTRIBUTIONS)] = Field(
        MOST_ATTRIBUTIONS, description="Selected documents whose token attributions are kept; 0: none."
    )
    series: SeriesConfig | None = Field(None, description="The schedule that this run is a scan of.")
    against: Annotated[str | None, Place.RUN] = Field(
        None, description="A run or ledger whose audited documents are left out."
    )
    resources: ResourcesConfig = ResourcesConfig()
    import_: Imports = Field(default=[])
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of all random numbers.")

    @model_validator(mode="before")
    @classmethod
    def _scores_are_detectors(cls, value: Any) -> Any:
        """Fill in the model and the detectors for documents with precomputed scores."""
        corpus = value.get("corpus") if isinstance(value, dict) else None
        sources = corpus.values() if isinstance(corpus, dict) else ()
        scores = next((source["scores"] for source in sources if isinstance(source, dict) and "scores" in source), None)
        if not isinstance(scores, list):  # another type is refused by the validation of the field
            return value if scores is None else {"model": {"name": "the model"}, "detectors": ["from_column"], **value}
        detectors = [{"from_column": {"column": entry} if isinstance(entry, str) else entry} for entry in scores]
        given = value.get("detectors", [])
        if not isinstance(given, list) or not all("from_column" in str(entry) for entry in given):
            return {"model": {"name": "the model"}, **value}
        return {"model": {"name": "the model"}, **value, "detectors": detectors}

    @model_validator(mode="after")
    def _consistent(self) -> AuditConfig:
        given_scores = ["from_column" in entry for entry in self.detectors]
        if self.corpus.scores is None:
            if any(given_scores) or any(isinstance(model, ScoredModel) for model in self.models):
                raise ValueError(
                    "a model by its name alone, and from_column, need scores: add corpus.*.scores, or name weights as "
                    "model: {path: ...}"
                )
            return self
        others = [key for key in ("reference_model", "paraphraser") if getattr(self, key) is not None]
        others += [] if isinstance(self.model, ScoredModel) else ["model"]
        others += [] if all(given_scores) else ["detectors"]
        if others:
            raise ValueError(
                f"corpus.*.scores come from a file, their columns are the detectors and no model is asked: leave out "
                f"{', '.join(others)}; model: {{name: NAME}} names the model"
            )
        return self

    @property
    def models(self) -> tuple[AnyModel, ...]:
        """The audited model, and the model that it is compared with."""
        return (self.model,) if self.reference_model is None else (self.model, self.reference_model)
