"""Check that the documents, models, detectors, procedures and settings of an audit go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.kinds import FROM_BEGINNING, IN_WINDOWS, Capability, InputKind, check_offered, check_same_kind
from pipeline.config.models import EndpointConfig, find_model_kind
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.detectors.base import Detector, retired_detector
from pipeline.detectors.registry import (
    detectors_for,
    needed_adapters,
    needed_capabilities,
    needed_prefixes,
    parse_detectors,
)
from pipeline.errors import UserError, nearest
from pipeline.plan.starter_text import add_role, not_given
from pipeline.selection.calibrations import CALIBRATIONS, calibration_of
from pipeline.selection.procedures import PROCEDURES, check_settings, procedure_of
from pipeline.wording import did_you_mean

NEEDS = {
    "text_transform": {Capability.TRANSFORMED},
    "chat": {Capability.ANSWERED},
    "series": {Capability.SINGLE},
    "against": {Capability.CONTENTS, Capability.SINGLE},
}
"""Setting of an audit -> what it needs of the documents."""


class MissingRoleError(UserError):
    """A detector or a selection needs documents of a role that the configuration does not give."""

    def __init__(self, need: str, role: Role) -> None:
        """`need` states what needs the documents, and why."""
        super().__init__(need, role)
        self.problem = not_given(need, role)
        self.role = role

    def __str__(self) -> str:
        return f"{self.problem}; {add_role(self.role)}"


def check_combinations(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """Check what the parts of an audit need of one another.

    Args:
        config: the audit's configuration.
        detectors: the detectors that it scores.

    Raises:
        UserError: the documents or a model do not offer what a detector, a selection or a setting needs, or a model
            or a role that it needs is not given.
    """
    kind = config.corpus.kind
    for detector in detectors:
        instead = partial(detectors_for, first=detector.name)
        check_offered(f"detector {detector.column}", needed_capabilities(detector), kind, instead)
    _check_settings(config, kind)
    for detector in detectors:
        _check_detector(config, detector)
    _check_selections(config, {detector.column: detector for detector in detectors})


def _check_settings(config: AuditConfig, kind: InputKind) -> None:
    """Check that models and settings of the whole audit fit the documents."""
    if isinstance(config.model, EndpointConfig):
        _check_endpoint(config, config.model, kind)
    if isinstance(model := config.reference_model, EndpointConfig):
        check_offered(f"endpoint {model.name}", [Capability.REFERENCE_ENDPOINT], kind, lambda _: "give weights")
    for key, needs in NEEDS.items():
        if getattr(config, key) is not None:
            check_offered(key, needs, kind, lambda _: "leave it out")
    if config.windows > 1:
        for read in (kind, *map(find_model_kind, config.models)):
            check_offered(f"windows: {config.windows}", [Capability.WINDOWS], read, lambda _: "leave it out")


def _check_endpoint(config: AuditConfig, model: EndpointConfig, kind: InputKind) -> None:
    """Check that an audited endpoint fits the documents."""
    messages = Capability.CHAT_ENDPOINT
    need, instead = Capability.ENDPOINT, "give weights"
    if model.api == "chat":
        need = messages
    elif messages in kind.offers:
        instead = "set model.api to chat, or give weights"
    check_offered(f"endpoint {model.name}", [need], kind, lambda _: instead)
    if config.chat is not None:
        raise UserError(f"chat: endpoint {model.name} renders messages by its own template: leave chat out")


def _check_detector(config: AuditConfig, detector: Detector) -> None:
    """Check that the models and training documents that a detector needs are configured."""
    if config.reference_model is None and any(needed.model == "reference" for needed in detector.needs):
        raise UserError(
            f"detector {detector.name} needs reference_model, which is not given; add reference_model: {{path: ...}}"
        )
    if config.paraphraser is None and any(needed.draw for needed in detector.needs):
        raise UserError(
            f"detector {detector.name} needs paraphraser, which is not given; add paraphraser: {{path: ...}}"
        )
    for name in needed_adapters([detector]):
        _check_own_corpus(config, name)
        for role in config.fsd.adapter(name).roles:
            if config.corpus.source(role) is None:
                raise MissingRoleError(f"detector {detector.name} fine-tunes on", role)
    for prefix in needed_prefixes([detector]):
        if config.corpus.source(prefix.role) is None:
            raise MissingRoleError(f"detector {detector.name} {prefix.use}", prefix.role)
    for model, which in ((config.model, "target"), (config.reference_model, "reference")):
        if model is not None:
            needs = needed_capabilities(detector, which)
            check_offered(f"detector {detector.column}", needs, find_model_kind(model), detectors_for)
    way = IN_WINDOWS if config.windows > 1 else FROM_BEGINNING
    check_offered(f"detector {detector.column}", needed_capabilities(detector), way, detectors_for)


def _check_own_corpus(config: AuditConfig, name: str) -> None:
    """Check that the documents of an adapter's own corpus are of the kind of the audited ones. Raises UserError."""
    corpus = config.fsd.adapter(name).corpus
    given = {config.corpus.key(role): source.stated for role, source in config.corpus.roles()}
    if corpus is not None:
        try:
            check_same_kind({**given, f"the corpus of fsd adapter {name}": corpus.stated})
        except ValueError as error:
            raise UserError(str(error)) from None


def _check_selections(config: AuditConfig, columns: Mapping[str, Detector]) -> None:
    names: set[str] = set()
    for index, selection in enumerate(config.selections):
        where = f"selections.{index}"
        if selection.name in names:
            raise UserError(f"{where}: the name {selection.name!r} is used twice")
        names.add(selection.name)
        for column in selection.detectors:
            if column not in columns:
                if (line := retired_detector(column)) is not None:
                    raise UserError(f"{where}: {line}")
                named = next((scored for scored, detector in columns.items() if detector.name == column), None)
                guess = "" if named is None else did_you_mean(named)
                tail = f"{guess}scored: {', '.join(columns)}" if guess else nearest(column, columns, "scored")
                raise UserError(f"{where}: detector {column!r} is not scored; {tail}")
        _check_selection(config, selection, where)
        name, column = selection.procedure, selection.detectors[0]
        if procedure_of(name).signed and not columns[column].signed:
            raise UserError(
                f"{where}: procedure {name} needs a signed statistic such as knockoff; {column} has one sign"
            )


def _check_selection(config: AuditConfig, selection: SelectionConfig, where: str) -> None:
    """Check a selection's settings against its procedure and the corpus."""
    check_settings(selection, where)
    _check_selection_kind(selection, config.corpus.kind, where)
    chosen, calibration = procedure_of(selection.procedure), calibration_of(selection.calibration)
    if chosen.signed or config.corpus.has_versions:
        return
    role = NULL_ROLE[selection.direction]
    if getattr(config.corpus, role) is None:
        raise MissingRoleError(f"{where}: direction {selection.direction} is calibrated on", role)
    for name in needed_adapters(parse_detectors(config.detectors)):
        settings = config.fsd.adapter(name)
        if settings.group is not None and role in settings.roles and not calibration.grouped:
            raise UserError(
                f"{where}: fsd adapter {name} takes documents of group {settings.group!r} alone out of calibration, "
                f"which then has other groups than the audited documents: calibration must be by_group, got "
                f"{selection.calibration}"
            )
    other = SOUGHT_ROLE[selection.direction]
    if chosen.needs_sought and getattr(config.corpus, other) is None:
        raise MissingRoleError(f"{where}: procedure {selection.procedure} also needs", other)
    if calibration.grouped:
        for name in ("audit", role):
            if getattr(config.corpus, name).group is None:
                raise UserError(
                    f"{where}: calibration by_group needs corpus.{name}.group, which is not given; add group: COLUMN "
                    f"to corpus.{name}"
                )


def _check_selection_kind(selection: SelectionConfig, kind: InputKind, where: str) -> None:
    """Check that the documents offer what the procedure, the calibration and the direction need."""
    procedure, calibration = procedure_of(selection.procedure), calibration_of(selection.calibration)
    check_offered(f"{where}: procedure {procedure.name}", procedure.needs, kind, _procedures_for)
    check_offered(f"{where}: calibration {calibration.name}", calibration.needs, kind, _calibrations_for)
    if selection.ranks != "whole":
        check_offered(f"{where}: ranks smoothed", [Capability.SINGLE], kind, lambda _: "take ranks whole")
    if selection.direction != "members":
        needs = [Capability.SINGLE]
        check_offered(f"{where}: direction {selection.direction}", needs, kind, lambda _: "take direction members")


def _procedures_for(kind: InputKind) -> str:
    return f"take procedure {', '.join(sorted(name for name, one in PROCEDURES.items() if one.needs <= kind.offers))}"


def _calibrations_for(kind: InputKind) -> str:
    return f"take calibration {', '.join(name for name, one in CALIBRATIONS.items() if one.needs <= kind.offers)}"
