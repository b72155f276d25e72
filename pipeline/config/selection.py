"""A named selection, and a schedule of scans under one error rate."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from pipeline.config.corpus import Role
from pipeline.config.paths import Place
from pipeline.config.yaml import NAME, Section

Direction = Literal["members", "clean"]
CalibrationName = Literal["pooled", "by_group", "conditional"]
NULL_ROLE: dict[Direction, Role] = {"members": "unseen", "clean": "seen"}
SOUGHT_ROLE: dict[Direction, Role] = {"members": "seen", "clean": "unseen"}


def checked_alpha(value: Any) -> float:
    """A number in (0, 1).

    Raises:
        ValueError: another value.
    """
    try:
        alpha = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"must be a number in (0, 1), got {value!r}") from None
    if not 0 < alpha < 1:
        raise ValueError(f"must be in (0, 1), got {value}")
    return alpha


Share = Annotated[float, BeforeValidator(checked_alpha)]
"""A number in (0, 1)."""

HISTORY = "history.jsonl"
"""File next to the folders of the selections that records every requested selection (`pipeline.results.history`)."""


LEARN = {"adadetect": "pool"}
"""Procedure that learns its score -> what it learns from, where a selection does not state it (`learn`)."""


class SelectionConfig(Section):
    """A named selection of documents by their scores."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)  # `lambda` is a keyword in Python

    name: str = Field(pattern=NAME, description="Folder under selection/.")
    direction: Direction = Field("members", description="Select what the model was trained on, or the reverse.")
    detectors: list[str] = Field(min_length=1, description="Score columns, as under `detectors`.")
    procedure: str = Field("bh", description="A procedure of docs/procedures.md, or of a plugin.")
    alpha: Share = Field(0.1, description="Largest expected share of wrong documents among the selected.")

    calibration: CalibrationName = Field(
        "pooled",
        description="Rank among all known documents, those of the group, or conditional on the known documents.",
    )
    calibrate: Literal["all", "one_per_block"] = Field(
        "all",
        exclude_if=lambda kind: kind == "all",  # so that questions of earlier versions stay the same
        description="Calibrate on all known documents, or on one of each group or family of near-duplicates, which "
        "depend on one another.",
    )
    boost: Literal["group"] | None = Field(
        None,
        exclude_if=lambda kind: kind is None,  # so that questions of earlier versions stay the same
        description="With calibration by_group: divide p-values by weights, larger for groups with more high scores.",
    )
    delta: Share = Field(0.1, description="Share of calibration sets for which the guarantee of conditional may fail.")
    lambda_: Share | None = Field(
        None,
        alias="lambda",
        description="Storey's lambda; null: .5 below 200 calibration documents, else .8, .3 with "
        "calibration conditional.",
    )
    ties: Literal["conservative", "random"] = Field(
        "conservative", description="Equal scores count against selection, or are ordered by a hash of the id."
    )
    ranks: Literal["whole", "smoothed"] = Field(
        "whole",
        exclude_if=lambda kind: kind == "whole",  # so that questions of earlier versions stay the same
        description="Smoothed: p-values take all values below those of whole ranks, by a number drawn from the model "
        "and the id; short lists of few calibration documents gain most.",
    )
    weights: Literal["rejections", "equal", "random", "max"] = Field(
        "rejections", description="How td4eval weighs the detectors."
    )
    step_up: Literal["bh", "storey"] = Field(
        "bh", description="For adadetect and td4eval reconformal: the share of nulls is 1, or estimated."
    )
    learn: Literal["pool", "split"] | None = Field(
        None,
        exclude_if=lambda source: source is None,  # so that questions of earlier versions stay the same
        description="For adadetect without known members: learn from the unordered pool of all calibration and audited "
        "documents, or from half of the calibration documents; null: pool.",
    )
    reconformal: bool = Field(False, description="Rank the fused statistic of td4eval again, valid in finite samples.")
    confidence: Share = Field(0.95, description="Confidence of the bounds on the list and on all audited documents.")

    @model_validator(mode="before")
    @classmethod
    def _state_learn(cls, data: Any) -> Any:
        """What a score is learnt from is stated in every selection that learns one, so that a record needs no rule."""
        if isinstance(data, dict) and data.get("learn") is None and data.get("procedure") in tuple(LEARN):
            return {**data, "learn": LEARN[data["procedure"]]}
        return data

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == HISTORY:
            raise ValueError(f"must not be {HISTORY}, which is a file of every run")
        return name

    @property
    def exact_alpha(self) -> Fraction:
        """Alpha as the decimal that the user wrote, so that no tie is lost to rounding."""
        return Fraction(repr(self.alpha))

    @property
    def exact_lambda(self) -> Fraction | None:
        """Lambda as the decimal that the user wrote; None: by the number of calibration documents."""
        return None if self.lambda_ is None else Fraction(repr(self.lambda_))

    @property
    def exact_confidence(self) -> Fraction:
        """The confidence as the decimal that the user wrote."""
        return Fraction(repr(self.confidence))


def recorded(settings: Any) -> Any:
    """A selection as a file of a run has it; without `learn`, which earlier versions left out there, of a split."""
    if isinstance(settings, dict) and settings.get("learn") is None and settings.get("procedure") in tuple(LEARN):
        return {**settings, "learn": "split"}
    return settings


RecordedSelection = Annotated[SelectionConfig, BeforeValidator(recorded)]
"""A selection in a file of a run."""


class SeriesConfig(Section):
    """One error rate over all scans of a schedule; this run is one of them."""

    ledger: Annotated[str, Place.RUN] = Field(
        description="Folder of the schedule: a local path or an fsspec URL, the same for every scan."
    )
    alpha: Share = Field(0.1, description="Largest expected share of wrong documents among all that the scans select.")
    horizon: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of scans with equal parts of alpha; null: unlimited, with decreasing parts."
    )
