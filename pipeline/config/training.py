"""Settings of fine-tuning, and of the adapters of the `fsd` detector."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.corpus import Role, TrainingSource
from pipeline.config.paths import Named
from pipeline.config.yaml import NAME, Section, build
from pipeline.errors import UserError, nearest

DEFAULT_ADAPTER = "default"


class FinetuneConfig(Section):
    """How texts are trained into a model."""

    method: Literal["lora", "adalora", "ia3", "full"] = Field("lora", description="A kind of adapter, or all weights.")
    target_modules: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Linear layers, by the end of their name; default: all."
    )
    rank: int = Field(16, ge=1, description="Rank of each update; with adalora its mean.")
    lora_alpha: int = Field(32, ge=1, description="Updates are scaled by lora_alpha / rank.")
    epochs: int = Field(3, ge=1, description="Passes over the texts.")
    copies: int = Field(1, ge=1, description="Copies of each text in an epoch.")
    batch_size: int = Field(8, ge=1, description="Texts in a step.")
    learning_rate: float = Field(1e-3, gt=0, description="Rate of the first step; a cosine takes it to zero.")
    max_tokens: int = Field(1024, ge=2, description="Texts are cut to this many tokens.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Type of products; auto: bfloat16 where native, else float32. Trained weights are float32."
    )
    pass_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Most padded tokens in a pass. Default: 256 on a CPU, else what keeps 8 GiB, at most "
        "16384; with deepspeed those of a step.",
    )
    recompute: bool | None = Field(
        None,
        description="Recompute activations for gradients: a third more time, far less memory. Default: "
        "where one text would keep more than 8 GiB of a GPU.",
    )
    seed: int = Field(0, ge=0, description="Seed of an adapter's first weights and of the order of texts.")

    @model_validator(mode="after")
    def _adapters_have_targets(self) -> FinetuneConfig:
        if self.method == "full" and self.target_modules is not None:
            raise ValueError("target_modules is for adapters, method full trains every weight")
        return self

    def settings(self) -> dict[str, Any]:
        """The settings that determine the weights. Unset ones are omitted, so that a new setting changes no digest."""
        return self.model_dump(exclude_none=True)


class AdapterConfig(FinetuneConfig):
    """An adapter of the `fsd` detector: its training documents and settings."""

    documents: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Documents to train on; default: `share` of them."
    )
    share: float = Field(0.3, gt=0, lt=1, description="Share of the documents to train on.")
    train_on: Literal["unseen", "seen", "mix"] = Field(
        "unseen", description="Role of the documents; mix: half from each."
    )
    group: str | None = Field(None, description="Only documents of this group.")
    corpus: TrainingSource | None = Field(None, description="Other documents than a role's.")

    @model_validator(mode="after")
    def _switchable(self) -> AdapterConfig:
        if self.method == "full":
            raise ValueError("method full trains all the weights and leaves no adapter: use lora, adalora or ia3")
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that its documents come from; empty if they come from a separate corpus."""
        if self.corpus is not None:
            return ()
        return ("unseen", "seen") if self.train_on == "mix" else (self.train_on,)

    def count(self, available: int, place: int = 0) -> int:
        """Number of a pool's `available` documents for its training, >= 1; `place`: index of the pool in `roles`."""
        if self.documents is None:
            return max(1, round(self.share * available))
        pools = max(1, len(self.roles))
        return max(1, self.documents // pools + (place < self.documents % pools))

    def training(self, max_tokens: int, texts: int) -> FinetuneConfig:
        """The settings of its training: `max_tokens` is applied, and a batch holds at most all `texts`."""
        settings = self.model_dump(include=set(FinetuneConfig.model_fields))
        settings["max_tokens"] = min(max_tokens, self.max_tokens)
        settings["batch_size"] = min(self.batch_size, max(1, texts * self.copies))
        return FinetuneConfig(**settings)


class FsdConfig(AdapterConfig):
    """The adapters of the `fsd` detector: the default one, and named variants of it."""

    adapters: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], dict[str, Any]],
        Named(AdapterConfig),
    ] = Field(default={}, description="Name -> changed settings; {fsd: {adapter: name}} scores with it.")

    @model_validator(mode="after")
    def _all_of_them(self) -> FsdConfig:
        for name in self.adapters:
            self.adapter(name)
        return self

    def adapter(self, name: str) -> AdapterConfig:
        """The settings of an adapter by its name.

        Raises:
            UserError: no adapter has that name, or a setting of it is unknown or outside its limits.
        """
        if name not in {DEFAULT_ADAPTER, *self.adapters}:
            names = [DEFAULT_ADAPTER, *self.adapters]
            raise UserError(f"fsd.adapters: no adapter {name!r}; {nearest(name, names)}")
        changes = self.adapters.get(name, {})
        if {"documents", "share"} <= changes.keys():
            raise UserError(f"fsd.adapters.{name}: documents and share exclude each other, give one")
        settings = self.model_dump(exclude={"adapters"})
        for setting, replaced in (("share", "documents"), ("train_on", "corpus")):
            if setting in changes:
                settings[replaced] = None
        try:
            return build(AdapterConfig, {**settings, **changes})
        except UserError as error:
            raise UserError(f"fsd.adapters.{name}: {error}") from None
