"""The configuration of a trial, the points of its sweep, and its audits."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from pydantic import Field, model_validator

from pipeline.config.audit import AuditConfig, DetectorEntry, Imports, ResourcesConfig
from pipeline.config.corpus import (
    LIMITS,
    NEAR_SHARE,
    ChatConfig,
    LimitsConfig,
    NearShare,
    Role,
    TrainingSource,
    TransformConfig,
)
from pipeline.config.kinds import find_kind
from pipeline.config.models import ModelConfig, ParaphraserConfig
from pipeline.config.paths import Place, check_run_folder, written
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.config.training import FinetuneConfig, FsdConfig
from pipeline.config.yaml import Section, build, read_mapping, set_at
from pipeline.errors import UserError
from pipeline.plan.combinations import MissingRoleError
from pipeline.plan.description import build_config
from pipeline.selection.procedures import procedure_of

KNOWN_SHARE = 1 / 3
"""Default share of all documents that calibrate, if a selection needs them."""

Count = Annotated[int, Field(ge=0)]
Amount = Count | Annotated[float, Field(ge=0, le=1)]


class ContaminationConfig(FinetuneConfig):
    """The training of a random part of the documents into the model."""

    share: float = Field(0.5, ge=0, le=1, description="Share of the documents outside calibration that is trained in.")


BY_WORDS = "classifier"
"""A shift along the direction in which words differ most, without a column."""


class ShiftConfig(Section):
    """The difference between calibration and audited documents."""

    by: str = Field(
        BY_WORDS,
        description="Column whose large values calibrate, such as a year; classifier: the halves that "
        "words separate most.",
    )
    strength: float = Field(
        1.0,
        allow_inf_nan=False,
        description="Odds to calibrate grow by e^strength per standard deviation; below 0: small values calibrate.",
    )


class SplitConfig(Section):
    """The documents that calibrate and those that are audited, drawn again in every repeat."""

    unseen: Amount | None = Field(
        None, description="Untrained documents that calibrate: number or share; default: a third if needed."
    )
    seen: Amount | None = Field(
        None, description="Trained documents known as such: number or share; default: a third if needed."
    )
    audited: Amount = Field(1.0, description="Number or share of the others that is audited.")
    member_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Share of the audited that was trained in; default: as it comes."
    )
    label_noise: float = Field(0.0, ge=0, lt=1, description="Share of calibration documents with a wrong label.")
    shift: ShiftConfig | None = Field(
        None, description="How calibration documents differ from the audited; default: no difference."
    )


class TrialConfig(Section):
    """The configuration of a trial."""

    model_config = AuditConfig.model_config  # `import`

    run: Annotated[str, Place.RUN] = Field(description="Folder of the trial, with local contaminated models.")
    work: Annotated[str | None, Place.RUN] = Field(
        None, description="Folder of contaminated models and audits that trials share; default: `run`."
    )
    model: ModelConfig = Field(description="A model that has not seen the documents.")
    reference_model: ModelConfig | None = Field(None, description="Model for detectors `reference`, `ez`, `wbc`.")
    paraphraser: ParaphraserConfig | None = Field(None, description="Model for the `knockoff` detector.")
    fsd: FsdConfig = Field(default=FsdConfig(), description="As in an audit.")
    text_transform: TransformConfig | None = Field(None, description="Changes of every text.")
    chat: ChatConfig | None = Field(
        None,
        exclude_if=lambda chat: chat is None,  # so that records of trials of other documents stay the same
        description="As in an audit; what it scores is what is trained in.",
    )
    documents: TrainingSource = Field(description="Documents that the model has not seen.")
    contaminate: ContaminationConfig = ContaminationConfig()
    models: int = Field(1, ge=1, description="Contaminated models, each with its random part and seed.")
    split: SplitConfig = SplitConfig()
    repeats: int = Field(100, ge=1, description="Splits of the documents, for each model.")
    verdict: bool = Field(False, description="Also judge the whole collection in each repeat (`unseen`).")
    detectors: list[DetectorEntry] = Field(
        default=["loss", "zlib", "lowercase", "min_k", "min_k_plus_plus"], min_length=1, description="As in an audit."
    )
    max_tokens: Annotated[int, Field(ge=2)] = Field(1024, description="Documents are cut to this many tokens.")
    error_budget: Annotated[float, Field(ge=0, le=1)] = Field(0.01, description="Share that may be quarantined.")
    near_copies: NearShare = Field(
        NEAR_SHARE, description="As in an audit; near-duplicates stay together in every part."
    )
    limits: LimitsConfig = LIMITS
    selections: list[SelectionConfig] = Field(min_length=1, description="As in an audit.")
    resources: ResourcesConfig = ResourcesConfig()
    import_: Imports = Field(default=[])
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of the repeats and of the audits.")
    sweep: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Place.SWEPT] = Field(
        default={}, description="Settings with lists of values, `selections.*.alpha: [.05, .1]`; several make a grid."
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrialConfig:
        if self.model.adapter is not None and self.contaminate.method != "full":
            raise ValueError("model.adapter must be null where contaminate.method is an adapter too: merge it first")
        if self.documents.image is not None and self.documents.caption is None:
            raise ValueError(
                "documents.caption is needed: pictures are trained in with their captions, name its column"
            )
        if self.verdict and all(selection.direction != "members" for selection in self.selections):
            raise ValueError("verdict needs a selection of direction members: give one, or set verdict: false")
        return self

    @property
    def work_folder(self) -> str:
        """Folder of contaminated models and their audits."""
        return self.work if self.work is not None else self.run

    def roles(self) -> dict[Role, Amount]:
        """Number or share of the calibration documents of each known role, from the trial or as a selection needs."""
        amounts: dict[Role, Amount] = {}
        for role, setting in (("unseen", self.split.unseen), ("seen", self.split.seen)):
            amount = setting if setting is not None else (KNOWN_SHARE if role in self._needed() else 0)
            if amount:
                amounts[role] = amount  # type: ignore[index]
        return amounts

    def _needed(self) -> set[str]:
        needed: set[str] = set()
        for selection in self.selections:
            needed.add(NULL_ROLE[selection.direction])
            if procedure_of(selection.procedure).needs_sought:
                needed.add(SOUGHT_ROLE[selection.direction])
        return needed


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: its settings and the trial with these settings."""

    settings: dict[str, Any]  # path -> value as written, in the order of the sweep; empty without one
    config: TrialConfig


def load_trial(path: str, overrides: Sequence[str] = ()) -> tuple[TrialConfig, list[Point]]:
    """Read a trial and the points of its sweep from a YAML file, with `a.b=c` overrides.

    Raises:
        UserError: no such file, not YAML, an unknown key or sweep setting, a value outside its limits.
    """
    data = read_mapping(path, TrialConfig)
    if "corpus" in data and "documents" not in data:
        raise UserError(
            f"{path} describes an audit (corpus): seenset run {quote(path)}; seenset init --trial writes a trial"
        )
    config, points = build_trial(data, overrides)
    check_run_folder(config.run, {os.path.dirname(path): path})
    return config, points


def build_trial(data: dict[str, Any], overrides: Sequence[str] = ()) -> tuple[TrialConfig, list[Point]]:
    """Check a plain mapping and return the trial and its points; a trial without a sweep is one point.

    Raises:
        UserError: an unknown key or sweep setting, or a value outside its limits.
    """
    config = build(TrialConfig, data, overrides)
    points = []
    for values in itertools.product(*config.sweep.values()):
        settings = dict(zip(config.sweep, values, strict=True))
        shown = {path: written(value) if isinstance(value, str) else value for path, value in settings.items()}
        points.append(Point(shown, _config_at(data, settings) if settings else config))
    for point in points:
        trial_audit(
            point.config, point.config.model, {role: f"{role}.parquet" for role in ("audit", *point.config.roles())}
        )
    return config, points


def _config_at(data: Mapping[str, Any], settings: Mapping[str, Any]) -> TrialConfig:
    changed = copy.deepcopy(dict(data))
    del changed["sweep"]
    for path, value in settings.items():
        if path.split(".")[0] in ("run", "work", "sweep"):
            raise UserError(f"sweep {path}: a sweep cannot change {path.split('.')[0]}")
        set_at(changed, path, copy.deepcopy(value), "sweep")
    shown = ", ".join(f"{path}={value}" for path, value in settings.items())
    try:
        return build(TrialConfig, changed)
    except UserError as error:
        raise UserError(f"sweep {shown}: {error}") from None


def trial_audit(config: TrialConfig, model: ModelConfig, files: Mapping[str, str], run: str = "run") -> AuditConfig:
    """The audit of a contaminated model, as a user would configure it, without the knowledge of its training data.

    Its single documents are not shown, so none is read again for attributions.

    Args:
        config: configuration of the trial.
        model: the contaminated model.
        files: role -> Parquet file with the columns of `Documents.table`.
        run: the audit's run directory.

    Raises:
        UserError: a selection that does not fit the detectors or the roles.
    """
    group = "group" if config.documents.group is not None else None
    tools = [] if config.documents.tools is None else ["tools"]
    content = {key: key for key in (*find_kind(config.documents.stated).keys, *tools)}
    corpus = {role: {"path": path, **content, "id": "id", "group": group} for role, path in files.items()}
    shared = config.model_dump(include={*TrialConfig.model_fields} & {*AuditConfig.model_fields} - {"run", "model"})
    try:
        return build_config({"run": run, "model": model.model_dump(), "corpus": corpus, "evidence": 0, **shared})
    except MissingRoleError as error:
        raise UserError(f"{error.problem}; set split.{error.role} above 0") from None
