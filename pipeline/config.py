"""The one description of an audit. Unknown keys are refused, with the nearest known name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from pipeline.errors import UserError, nearest
from pipeline.settings import Section, build, read_mapping

if TYPE_CHECKING:
    from pipeline.detectors import Detector

Role = Literal["audit", "unseen", "seen"]
Direction = Literal["members", "clean"]
ROLES: tuple[Role, ...] = ("audit", "unseen", "seen")
NULL_ROLE: dict[Direction, Role] = {"members": "unseen", "clean": "seen"}
SOUGHT_ROLE: dict[Direction, Role] = {"members": "seen", "clean": "unseen"}


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DEFAULT_ADAPTER = "default"


class ModelConfig(Section):
    """A causal language model and how to load it."""

    path: str = Field(description="Hub id, local folder, or a .gguf file.")
    revision: str | None = Field(None, description="Hub revision: a commit, tag or branch.")
    gguf_file: str | None = Field(None, description="Name of the GGUF file inside `path`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Arithmetic of the weights; auto takes the checkpoint's own (GGUF: float32)."
    )
    quantization: Literal["8bit", "4bit"] | None = Field(None, description="Load through bitsandbytes.")
    adapter: str | None = Field(None, description="A PEFT adapter of this model, merged into it at load.")
    trust_remote_code: bool = Field(False, description="Run model code that ships with the checkpoint.")
    allow_pickle: bool = Field(False, description="Load weights that are not safetensors or GGUF.")


def _base_url(value: Any) -> str:
    """The address that `/completions` is added to."""
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        given = "one with a user" if "@" in str(value) else repr(value)  # which may be a key
        raise ValueError(f"must be an address such as https://host/v1, got {given}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"must have a port from 0 to 65535, got {value!r}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must be a bare address, got one with a user or a query: keys come from the environment alone")
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


class BudgetConfig(Section):
    """What may be asked of an endpoint in all, by every call of the run together."""

    requests: Annotated[int, Field(ge=1)] | None = Field(None, description="Most requests, repeated ones included.")
    tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Most tokens, of prompts and of answers.")


class PriceConfig(Section):
    """What a million tokens cost, in any currency, for the estimate of `seenset plan`."""

    prompt: float = Field(0.0, ge=0, description="Of a million tokens of prompts.")
    answer: float = Field(0.0, ge=0, description="Of a million new tokens.")


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible interface. The key is read from the environment and kept nowhere."""

    endpoint: Annotated[str, BeforeValidator(_base_url)] = Field(description="Address, such as https://host/v1.")
    name: str = Field(min_length=1, description="The model as the endpoint calls it.")
    api: Literal["completions", "chat"] = Field("completions", description="Which of the two interfaces to ask.")
    instruction: str = Field(
        "Continue the following text as it goes on. Write nothing but the continuation.",
        description="chat: what stands above the text.",
    )
    log_probs: Literal["auto", "prompt_logprobs", "echo", "none"] = Field(
        "auto", description="How the endpoint tells log-probabilities of a prompt, if it does; auto tries both ways."
    )
    key_variable: str = Field(
        "SEENSET_API_KEY", min_length=1, description="Environment variable that holds the key; unset: none is sent."
    )
    concurrency: int = Field(16, ge=1, le=1024, description="Most requests under way at a time.")
    requests_per_minute: float | None = Field(None, gt=0, description="Most requests begun in a minute.")
    timeout: float = Field(120.0, gt=0, description="Seconds that an answer may take.")
    attempts: int = Field(6, ge=1, description="Times that a request is made before its document is given up.")
    backoff: float = Field(1.0, gt=0, description="Seconds before the second attempt, about; doubled for each more.")
    choices: int = Field(16, ge=1, description="Most draws asked for in one request, whose prompt is then paid once.")
    budget: BudgetConfig = BudgetConfig()
    price: PriceConfig = PriceConfig()


def _kind_of_model(value: Any) -> str:
    given = isinstance(value, EndpointConfig) or (isinstance(value, dict) and "endpoint" in value)
    return "model[EndpointConfig]" if given else "model[ModelConfig]"


AnyModel = Annotated[
    Annotated[ModelConfig, Tag("model[ModelConfig]")] | Annotated[EndpointConfig, Tag("model[EndpointConfig]")],
    Discriminator(_kind_of_model),
]
"""Weights, or an endpoint where the key `endpoint` is given."""


def named(model: ModelConfig | EndpointConfig) -> str:
    """A model as a person calls it."""
    return f"{model.name} at {model.endpoint}" if isinstance(model, EndpointConfig) else model.path


def weights_of(model: ModelConfig | EndpointConfig) -> ModelConfig:
    """A model that can be opened.

    Raises:
        UserError: it is behind an endpoint.
    """
    if isinstance(model, EndpointConfig):
        raise UserError(f"model {named(model)} is behind an endpoint: its weights are not at hand")
    return model


class ParaphraserConfig(ModelConfig):
    """A model that rewrites documents: sequence-to-sequence, or causal with a chat template."""

    path: str = Field("humarin/chatgpt_paraphraser_on_T5_base", description="Hub id, local folder, or a .gguf file.")
    temperature: float = Field(1.9, gt=0, description="Of the sampling; higher makes draws differ more.")
    top_k: int = Field(50, ge=1, description="Only the k likeliest tokens are drawn from.")
    top_p: float = Field(0.95, gt=0, le=1, description="Of those, the likeliest that have this share together.")


class SourceConfig(Section):
    """Where the documents of one role come from."""

    path: str | list[str] | None = Field(
        None,
        description="Files, globs, folders, URLs: Parquet, JSONL (.gz, .zst), CSV, .txt, saved datasets.",
    )
    dataset: str | None = Field(None, description="Name of a dataset on the hub, instead of `path`.")
    subset: str | None = Field(None, description="Configuration of the hub dataset.")
    split: str = Field("train", description="Split of the hub dataset, or of a saved dataset dictionary.")
    text: str = Field("text", description="Column that holds the text.")
    id: str | None = Field(None, description="Column that holds the id; without one ids are file#row.")
    group: str | None = Field(None, description="Column that holds the group.")

    @model_validator(mode="after")
    def _one_source(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("needs exactly one of 'path' and 'dataset'")
        return self

    @property
    def paths(self) -> list[str]:
        """The configured paths as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path or [])


class FinetuneConfig(Section):
    """How texts are trained into a model."""

    method: Literal["lora", "adalora", "ia3", "full"] = Field(
        "lora", description="An adapter of this kind, or all the weights."
    )
    target_modules: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Linear layers that an adapter reaches, by the end of their name; by default all of them."
    )
    rank: int = Field(16, ge=1, description="Rank of the update of each weight; its mean with adalora.")
    lora_alpha: int = Field(32, ge=1, description="The update is scaled by lora_alpha / rank.")
    epochs: int = Field(3, ge=1, description="Times that every text is seen.")
    copies: int = Field(1, ge=1, description="Times that every text stands in an epoch.")
    batch_size: int = Field(8, ge=1, description="Texts in a step; the last step of an epoch may hold fewer.")
    learning_rate: float = Field(1e-3, gt=0, description="Rate of the first step; a cosine takes it to zero.")
    max_tokens: int = Field(1024, ge=2, description="Texts are cut to this many tokens.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Arithmetic; trained weights are float32.")
    seed: int = Field(0, ge=0, description="Seed of an adapter's first weights and of the order of the texts.")

    @model_validator(mode="after")
    def _adapters_have_targets(self) -> FinetuneConfig:
        if self.method == "full" and self.target_modules is not None:
            raise ValueError("target_modules is for adapters, method full trains every weight")
        return self

    def settings(self) -> dict[str, Any]:
        """What decides the weights. A setting that is unset is left out, so that one added later changes no name."""
        return self.model_dump(exclude_none=True)


class AdapterConfig(FinetuneConfig):
    """An adapter of the `fsd` detector: the documents that it is trained on, and how."""

    documents: Annotated[int, Field(ge=1)] | None = Field(
        None, description="How many documents it is trained on; by default `share` of them."
    )
    share: float = Field(0.3, gt=0, lt=1, description="Share of the documents that it is trained on.")
    train_on: Literal["unseen", "seen", "mix"] = Field(
        "unseen", description="The role that these come from; mix takes half of them from each."
    )
    group: str | None = Field(None, description="Only documents of this group.")
    corpus: SourceConfig | None = Field(None, description="Other documents than a role's, of another domain say.")

    @model_validator(mode="after")
    def _switchable(self) -> AdapterConfig:
        if self.method == "full":
            raise ValueError("method full trains all the weights and leaves no adapter: use lora, adalora or ia3")
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that its documents come from; none where they have a corpus of their own."""
        if self.corpus is not None:
            return ()
        return ("unseen", "seen") if self.train_on == "mix" else (self.train_on,)

    def count(self, have: int, place: int = 0) -> int:
        """How many of a pool's documents it is trained on, at least one; the pool is at this place of `roles`."""
        if self.documents is None:
            return max(1, round(self.share * have))
        pools = max(1, len(self.roles))
        return max(1, self.documents // pools + (place < self.documents % pools))

    def training(self, max_tokens: int, texts: int) -> FinetuneConfig:
        """Its training on so many texts, cut as the audit cuts them. Few texts make a batch of their own."""
        asked = self.model_dump(include=set(FinetuneConfig.model_fields))
        asked["max_tokens"] = min(max_tokens, self.max_tokens)
        asked["batch_size"] = min(self.batch_size, max(1, texts * self.copies))
        return FinetuneConfig(**asked)


class FsdConfig(AdapterConfig):
    """The adapters of the `fsd` detector: the one of these settings, and variants of it with names."""

    adapters: dict[Annotated[str, Field(pattern=NAME)], dict[str, Any]] = Field(
        default={}, description="Name -> the settings that it changes; {fsd: {adapter: name}} scores with it."
    )

    @model_validator(mode="after")
    def _all_of_them(self) -> FsdConfig:
        for name in self.adapters:
            self.adapter(name)
        return self

    def adapter(self, name: str) -> AdapterConfig:
        """The settings of an adapter by its name.

        Raises:
            UserError: there is none of that name, or a setting of it is unknown or outside its limits.
        """
        if name not in {DEFAULT_ADAPTER, *self.adapters}:
            known = [DEFAULT_ADAPTER, *self.adapters]
            raise UserError(f"fsd.adapters: no adapter {name!r}; {nearest(name, known)}")
        changes = self.adapters.get(name, {})
        if {"documents", "share"} <= changes.keys():
            raise UserError(f"fsd.adapters.{name}: documents and share exclude each other, give one")
        settings = self.model_dump(exclude={"adapters"})
        for given, replaced in (("share", "documents"), ("train_on", "corpus")):
            if given in changes:
                settings[replaced] = None
        try:
            return build(AdapterConfig, {**settings, **changes})
        except UserError as error:
            raise UserError(f"fsd.adapters.{name}: {error}") from None


class CorpusConfig(Section):
    """The documents: those to be judged and those whose membership is known."""

    audit: SourceConfig = Field(description="Documents to be judged.")
    unseen: SourceConfig | None = Field(None, description="Documents known not to be in the training data.")
    seen: SourceConfig | None = Field(None, description="Documents known to be in the training data.")

    def roles(self) -> Iterator[tuple[Role, SourceConfig]]:
        """The roles that have documents, in a fixed order."""
        for role in ROLES:
            source = getattr(self, role)
            if source is not None:
                yield role, source


class TransformConfig(Section):
    """What is changed in every text of a run (`pipeline.transforms` lists the patterns)."""

    dates: Literal["remove", "replace_year"] = Field(
        description="Take dates and years out, or put `year` in the place of every year."
    )
    year: int | None = Field(None, ge=1000, le=9999, description="replace_year: the year that all become.")

    @model_validator(mode="after")
    def _one_year(self) -> TransformConfig:
        if (self.dates == "replace_year") != (self.year is not None):
            raise ValueError("year goes with dates: replace_year, and only with it")
        return self


def _exact_alpha(value: Any) -> float:
    try:
        alpha = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"must be a number in (0, 1), got {value!r}") from None
    if not 0 < alpha < 1:
        raise ValueError(f"must be in (0, 1), got {value}")
    return alpha


Procedure = Literal[
    "bh",
    "by",
    "ebh",
    "storey",
    "bky",
    "quantile",
    "ptdi",
    "ptdi_known_members",
    "kernel",
    "td4eval",
    "adadetect",
    "ktd",
]
FUSING = ("td4eval", "adadetect")
ESTIMATING = ("storey", "bky", "quantile", "ptdi", "ptdi_known_members", "kernel")
"""Procedures that estimate the share of nulls."""
TWO_SIDED = ("ptdi_known_members",)
"""Procedures that take known documents of both kinds."""


class SelectionConfig(Section):
    """One named question to the scores."""

    name: str = Field(pattern=NAME, description="Folder under selection/.")
    direction: Direction = Field("members", description="members: find what was trained on; clean: the reverse.")
    detectors: list[str] = Field(min_length=1, description="Score columns, as named under `detectors`.")
    procedure: Procedure = Field("bh", description="How the selected are chosen.")
    alpha: Annotated[float, BeforeValidator(_exact_alpha)] = Field(
        0.1, description="Largest share of the selected that may be wrong."
    )

    calibration: Literal["pooled", "by_group", "conditional"] = Field(
        "pooled", description="Rank among all known documents, those of the group, or for the known ones at hand."
    )
    delta: Annotated[float, BeforeValidator(_exact_alpha)] = Field(
        0.1, description="conditional: share of calibration sets for which the guarantee may fail."
    )
    ties: Literal["conservative", "random"] = Field(
        "conservative", description="Equal scores count against selection, or are ordered by a hash of the id."
    )
    weights: Literal["rejections", "equal", "random", "max"] = Field(
        "rejections", description="td4eval: how the detectors are weighted."
    )
    reconformal: bool = Field(False, description="td4eval: rank the fused statistic anew, valid in finite samples.")

    @property
    def exact_alpha(self) -> Fraction:
        """Alpha as the decimal that the user wrote, so that no tie is lost to rounding."""
        return Fraction(repr(self.alpha))


class ResourcesConfig(Section):
    """What the run may use. The number of actors never changes a result."""

    actors: Literal["auto"] | Annotated[int, Field(ge=1)] = Field("auto", description="Scoring actors.")
    gpus_per_actor: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto", description="GPUs an actor: a fraction, 1, or several for a model that needs them."
    )
    cpus_per_actor: Annotated[int, Field(ge=1)] = Field(1, description="Threads of an actor.")
    batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Padded tokens in a batch; auto is 2048 on a CPU and 16384 on a GPU."
    )
    finetune_workers: Annotated[int, Field(ge=1)] = Field(
        1, description="Workers that train one adapter together, each with cpus_per_actor threads or a GPU."
    )
    deepspeed: str | None = Field(
        None, description="DeepSpeed settings for them, if no GPU holds the model: cluster/deepspeed/zero3.json."
    )
    shard_bytes: Annotated[int, Field(ge=1)] = Field(1 << 20, description="Text bytes in a shard, about.")
    shard_documents: Annotated[int, Field(ge=1)] = Field(4096, description="Most documents in a shard.")


DetectorEntry = str | dict[str, dict[str, Any]]


class AuditConfig(Section):
    """The one description of an audit."""

    run: str = Field(description="Run directory: a local path or an fsspec URL.")
    model: AnyModel = Field(description="The audited model: weights, or an endpoint.")
    reference_model: AnyModel | None = Field(None, description="Model for the `reference` detector.")
    paraphraser: ParaphraserConfig | None = Field(None, description="Model for the `knockoff` detector.")
    corpus: CorpusConfig
    detectors: list[DetectorEntry] = Field(
        default=["loss", "zlib", "lowercase", "min_k", "min_k_plus_plus"],
        min_length=1,
        description="Detectors, by name or as {name: {argument: value or list of values}}.",
    )
    fsd: FsdConfig = Field(default=FsdConfig(), description="Adapters of the `fsd` detector.")
    text_transform: TransformConfig | None = Field(None, description="What is changed in every text before any use.")
    max_tokens: Annotated[int, Field(ge=2)] = Field(1024, description="Documents are cut to this many tokens.")
    overlap: Literal["error", "drop"] = Field(
        "error",
        description="Calibration documents that are also audited: stop, or leave them out of calibration.",
    )
    error_budget: Annotated[float, Field(ge=0, le=1)] = Field(0.01, description="Share that may be quarantined.")
    selections: list[SelectionConfig] = Field(default=[], description="Questions to the scores.")
    resources: ResourcesConfig = ResourcesConfig()
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of all that is random.")


def load_config(path: str, overrides: Sequence[str] = ()) -> AuditConfig:
    """Read an audit from a YAML file, with `a.b=c` overrides.

    Raises:
        UserError: no such file, not YAML, or a value outside its limits (one line, with the near miss).
    """
    return build_config(read_mapping(path, AuditConfig), overrides)


def build_config(data: dict[str, Any], overrides: Sequence[str] = ()) -> AuditConfig:
    """Check a plain mapping (and `a.b=c` overrides) and return the audit that it describes.

    Raises:
        UserError: an unknown key or a value outside its limits.
    """
    config = build(AuditConfig, data, overrides)
    _check_selections(config)
    return config


def _check_selections(config: AuditConfig) -> None:
    from pipeline.detectors import parse_detectors

    detectors = parse_detectors(config.detectors)
    for detector in detectors:
        if config.reference_model is None and any(needed.model == "reference" for needed in detector.needs):
            raise UserError(f"detector {detector.name} needs reference_model, which is not given")
        if config.paraphraser is None and any(needed.draw for needed in detector.needs):
            raise UserError(f"detector {detector.name} needs paraphraser, which is not given")
        for name in sorted({needed.adapter for needed in detector.needs} - {""}):
            for role in config.fsd.adapter(name).roles:
                if getattr(config.corpus, role) is None:
                    raise UserError(f"detector {detector.name} fine-tunes on corpus.{role}, which is not given")
        _check_endpoint(config, detector)
    columns = {detector.column: detector for detector in detectors}
    names: set[str] = set()
    for index, selection in enumerate(config.selections):
        where = f"selections.{index}"
        if selection.name in names:
            raise UserError(f"{where}: the name {selection.name!r} is used twice")
        names.add(selection.name)
        for column in selection.detectors:
            if column not in columns:
                raise UserError(f"{where}: detector {column!r} is not scored; {nearest(column, columns, 'scored')}")
        _check_selection(config, selection, where)
        if selection.procedure == "ktd" and not columns[selection.detectors[0]].signed:
            column = selection.detectors[0]
            raise UserError(f"{where}: procedure ktd needs a signed statistic such as knockoff; {column} has one sign")


FROM_LOG_PROBS = "loss, zlib, lowercase, reference and min_k"


def _check_endpoint(config: AuditConfig, detector: Detector) -> None:
    """What a detector reads of an endpoint must be something that an endpoint can say."""
    for needed, statistics in detector.needs.items():
        model = config.model if needed.model == "target" else config.reference_model
        if not isinstance(model, EndpointConfig) or needed.kind == "generate":
            continue
        if needed.kind == "gradient" or needed.draw or needed.adapter or statistics - {"log_prob"}:
            raise UserError(
                f"detector {detector.column} needs the weights of a model, and {model.name} is an endpoint: there are "
                f"samia and samia_zlib, and where it tells prompt log-probabilities {FROM_LOG_PROBS}"
            )
        if model.log_probs == "none" or model.api == "chat":
            why = "api chat has none" if model.api == "chat" else "log_probs is none"
            raise UserError(
                f"detector {detector.column} needs prompt log-probabilities of endpoint {model.name}, and {why}; "
                "without them there are samia and samia_zlib"
            )


def _check_selection(config: AuditConfig, selection: SelectionConfig, where: str) -> None:
    """What a selection's procedure needs of its own settings and of the corpus."""
    from pipeline.detectors import adapters_of, parse_detectors

    if len(selection.detectors) != 1 and selection.procedure not in FUSING:
        raise UserError(f"{where}: procedure {selection.procedure} takes 1 detector, got {len(selection.detectors)}")
    if selection.calibration != "pooled" and selection.procedure in (*FUSING, "ktd"):
        raise UserError(
            f"{where}: procedure {selection.procedure} takes calibration pooled, got {selection.calibration}"
        )
    if selection.procedure == "ktd":
        if selection.direction != "members":
            raise UserError(f"{where}: procedure ktd takes direction members, got {selection.direction}")
        return
    role = NULL_ROLE[selection.direction]
    if getattr(config.corpus, role) is None:
        raise UserError(f"{where}: direction {selection.direction} is calibrated on corpus.{role}, which is not given")
    for name in adapters_of(parse_detectors(config.detectors)):
        settings = config.fsd.adapter(name)
        if settings.group is not None and role in settings.roles and selection.calibration != "by_group":
            raise UserError(
                f"{where}: fsd adapter {name} takes documents of group {settings.group!r} alone out of calibration, "
                f"which then is of other groups than what it judges: calibration must be by_group, got "
                f"{selection.calibration}"
            )
    other = SOUGHT_ROLE[selection.direction]
    if selection.procedure in TWO_SIDED and getattr(config.corpus, other) is None:
        raise UserError(f"{where}: procedure {selection.procedure} needs corpus.{other} too, which is not given")
    if selection.calibration == "by_group":
        for name in ("audit", role):
            if getattr(config.corpus, name).group is None:
                raise UserError(f"{where}: calibration by_group needs corpus.{name}.group, which is not given")


def expand_user(path: str) -> str:
    """A local path with `~` expanded; URLs are left alone."""
    return path if "://" in path else os.path.expanduser(path)
