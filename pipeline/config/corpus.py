"""Where documents come from, in which role, and how their text is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.paths import Place
from pipeline.config.yaml import Section

Role = Literal["audit", "unseen", "seen"]
ROLES: tuple[Role, ...] = ("audit", "unseen", "seen")
ROLE_DOCUMENTS: dict[Role, str] = {
    "audit": "documents to be judged",
    "unseen": "documents of the same kind that are known not to be in the training data",
    "seen": "documents of the same kind that are known to be in the training data",
}
"""What the documents of each role are, for messages."""


class SourceConfig(Section):
    """Where the documents of one role come from."""

    path: Annotated[str | list[str] | None, Place.INPUT] = Field(
        None,
        description="Files, globs, folders, URLs: Parquet, JSONL (.gz, .zst), CSV, .txt, saved datasets.",
    )
    dataset: str | None = Field(None, description="Name of a dataset on the hub, instead of `path`.")
    subset: str | None = Field(None, description="Configuration of the hub dataset.")
    split: str | None = Field(
        None,
        description="Split of the hub dataset, by default train, or of a saved dataset dictionary that has several.",
    )
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
    """How every text of a run is changed (`pipeline.corpus.transforms` lists the patterns)."""

    dates: Literal["remove", "replace_year"] = Field(
        description="Take dates and years out, or put `year` in the place of every year."
    )
    year: int | None = Field(None, ge=1000, le=9999, description="replace_year: the year that all become.")

    @model_validator(mode="after")
    def _one_year(self) -> TransformConfig:
        if (self.dates == "replace_year") != (self.year is not None):
            raise ValueError("year goes with dates: replace_year, and only with it")
        return self
