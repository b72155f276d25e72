"""Read an audit's configuration and check it as a whole, with the dependencies between its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import AnyModel, EndpointConfig
from pipeline.config.paths import check_run_folder
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.config.yaml import build, read_mapping
from pipeline.detectors.base import Detector, Pass
from pipeline.detectors.plugins import load_installed, load_plugins, read_plugins
from pipeline.detectors.registry import check_workers_know, needed_adapters, needed_prefixes, parse_detectors
from pipeline.errors import UserError, nearest
from pipeline.passes.statistics import PARTS
from pipeline.plan.starter_text import add_role, not_given
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.engine import refuse_uncovered
from pipeline.selection.procedures import PROCEDURES, check_known, procedure_of, why_unbounded
from pipeline.selection.procedures.record import estimates_share
from pipeline.wording import did_you_mean, listed


class MissingRoleError(UserError):
    """A detector or a selection needs documents of a role that the configuration does not give."""

    def __init__(self, need: str, role: Role) -> None:
        """`need` states what needs the documents, and why."""
        super().__init__(need, role)
        self.problem = not_given(need, role)
        self.role = role

    def __str__(self) -> str:
        return f"{self.problem}; {add_role(self.role)}"


def load_config(path: str, overrides: Sequence[str] = (), labelled: bool = False) -> AuditConfig:
    """Read the configuration of an audit, or of `seenset evaluate` where documents are labelled, from a YAML file.

    Args:
        path: path of the file.
        overrides: settings as `a.b=c`.
        labelled: whether the membership of the documents is known, as for `build_evaluation`.

    Raises:
        UserError: no such file, not YAML, or a value outside its limits (one line, with the near miss).
    """
    data = read_mapping(path, AuditConfig)
    if "documents" in data and "corpus" not in data:
        raise UserError(f"{path} describes a trial (documents): seenset trial {quote(path)}")
    config = build_evaluation(data, overrides) if labelled else _built(data, overrides, written=True)
    check_run_folder(config.run, {os.path.dirname(path): path})
    return config


def build_config(data: dict[str, Any], overrides: Sequence[str] = ()) -> AuditConfig:
    """Check a plain mapping (and `a.b=c` overrides), load its plugins and return the audit that it describes.

    Raises:
        UserError: an unknown key, a value outside its limits, no audited documents, or a plugin that cannot be loaded.
    """
    return _built(data, overrides, written=False)


def _built(data: dict[str, Any], overrides: Sequence[str], written: bool) -> AuditConfig:
    """As `build_config`; `written` states whether every value is from the user and none is a default."""
    config = build(AuditConfig, data, overrides)
    _check_alphas(config, written)
    if config.corpus.audit is None:
        given = ", ".join(f"corpus.{name}" for name in type(config.corpus).model_fields if getattr(config.corpus, name))
        raise UserError(
            f"missing key 'corpus.audit', the documents to judge (given: {given or 'nothing'}): add corpus.audit: "
            "{path: ...}, or compare documents of known membership with seenset evaluate"
        )
    return _checked(config)


def build_evaluation(data: dict[str, Any], overrides: Sequence[str] = ()) -> AuditConfig:
    """Check a plain mapping (and `a.b=c` overrides) of documents of known membership; audited documents are optional.

    Without audited documents, the selections of the mapping are left out.

    Raises:
        UserError: as `build_config`, or a corpus without seen or without unseen documents.
    """
    config = build(AuditConfig, data, overrides)
    for key in ("series", "against"):
        if getattr(config, key) is not None:
            raise UserError(f"{key} is of a scan that selects, and evaluate selects nothing: --set {key}=null")
    for role in SOUGHT_ROLE.values():
        if config.corpus.source(role) is None:
            raise UserError(
                f"evaluate compares documents of known membership, and corpus.{role} is not given: add corpus.{role}: "
                "{path: ...}, or name both kinds as corpus.labelled: {path: ..., label: COLUMN}"
            )
    if config.corpus.audit is None:
        config = config.model_copy(update={"selections": []})
    return _checked(config)


def _checked(config: AuditConfig) -> AuditConfig:
    """The audit, its plugins loaded and its parts checked against one another."""
    load_plugins(read_plugins(config.import_))
    detectors = parse_detectors(config.detectors)
    check_workers_know(config.import_, detectors)
    check_kind(config, detectors)
    for detector in detectors:
        _check_detector(config, detector)
    _check_selections(config, {detector.column: detector for detector in detectors})
    return _with_alpha_of_series(config)


def _check_alphas(config: AuditConfig, written: bool) -> None:
    """Check that no selection in a schedule of scans states alpha: the ledger gives each scan its part of alpha.

    Raises:
        UserError: a selection states alpha, there is no selection, or a schedule does not cover it.
    """
    if config.series is None:
        return
    if not config.selections:
        raise UserError("series: a scan without selections cannot use its part of alpha; add selections")
    for index, selection in enumerate(config.selections):
        if "alpha" in selection.model_fields_set and (written or selection.alpha != config.series.alpha):
            raise UserError(
                f"selections.{index}.alpha is {selection.alpha:g}, and in a series the ledger sets the level of each "
                f"scan: leave it out (series.alpha, {config.series.alpha:g}, is of all scans together)"
            )
        refuse_uncovered(selection)


def _with_alpha_of_series(config: AuditConfig) -> AuditConfig:
    """The audit, with the alpha of the schedule in the selections of a scan; the ledger gives each scan its part."""
    if config.series is None:
        return config
    selections = [selection.model_copy(update={"alpha": config.series.alpha}) for selection in config.selections]
    return config.model_copy(update={"selections": selections})


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
        for role in config.fsd.adapter(name).roles:
            if config.corpus.source(role) is None:
                raise MissingRoleError(f"detector {detector.name} fine-tunes on", role)
    for prefix in needed_prefixes([detector]):
        if config.corpus.source(prefix.role) is None:
            raise MissingRoleError(f"detector {detector.name} {prefix.use}", prefix.role)
    _check_endpoint(config, detector)


def _check_selections(config: AuditConfig, columns: Mapping[str, Detector]) -> None:
    names: set[str] = set()
    for index, selection in enumerate(config.selections):
        where = f"selections.{index}"
        if selection.name in names:
            raise UserError(f"{where}: the name {selection.name!r} is used twice")
        names.add(selection.name)
        for column in selection.detectors:
            if column not in columns:
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


FROM_TEXT = ("samia", "samia_zlib", "coverage", "cdd")
FROM_LOG_PROBS = ("loss", "perplexity", "zlib", "lowercase", "reference", "min_k", "pac")


def _check_endpoint(config: AuditConfig, detector: Detector) -> None:
    """Check that an endpoint returns what a detector reads of it."""
    for model in (config.model, config.reference_model):
        if detector.same_tokens and isinstance(model, EndpointConfig):
            raise UserError(
                f"detector {detector.column} compares two models token by token, and {model.name} is an endpoint, "
                "whose tokens and their ranks are not read: give weights of both models, or take detector reference"
            )
    for needed, statistics in detector.needs.items():
        model = config.model if needed.model == "target" else config.reference_model
        if not isinstance(model, EndpointConfig) or needed.kind == "generate":
            continue
        other = needed.draw or needed.adapter or needed.prefix or needed.text == "repeated"
        if needed.kind == "gradient" or other or statistics - {"log_prob"}:
            raise UserError(
                f"detector {detector.column} needs the weights of a model, and {model.name} is an endpoint: there are "
                f"{listed(FROM_TEXT)}, and where it returns prompt log-probabilities {listed(FROM_LOG_PROBS)}"
            )
        if model.log_probs == "none" or model.api == "chat":
            key, value = ("api", "chat") if model.api == "chat" else ("log_probs", "none")
            raise UserError(
                f"detector {detector.column} needs prompt log-probabilities, and endpoint {model.name} with {key}: "
                f"{value} does not return them; {listed(FROM_TEXT)} work without them"
            )


def check_settings(selection: SelectionConfig, where: str) -> None:
    """Check a selection's settings against its procedure.

    Args:
        selection: the selection to check.
        where: its key in the configuration, for errors.

    Raises:
        UserError: an unknown procedure, or settings that it does not support.
    """
    if selection.procedure not in PROCEDURES:
        load_installed()
    check_known(selection.procedure, f"{where}: ")
    chosen, fusing = procedure_of(selection.procedure), [name for name, one in PROCEDURES.items() if one.several]
    first, *others = selection.detectors
    beside = chosen.beside(first) if chosen.beside else None
    if others and others != [beside] and not (chosen.several or chosen.only_versions):
        scaled = f" and {beside!r} behind it" if beside else ""
        count = len(selection.detectors)
        raise UserError(f"{where}: procedure {selection.procedure} takes 1 detector{scaled}, got {count}")
    if (refused := chosen.refuses.get(selection.calibration)) is not None:
        raise UserError(f"{where}: procedure {selection.procedure} {refused}")
    estimates, step_up = estimates_share(selection), procedure_of(selection.step_up)
    if step_up.estimates and not chosen.several:
        raise UserError(
            f"{where}: step_up {selection.step_up} is for procedures {' and '.join(fusing)}; "
            f"got procedure {selection.procedure}" + (", which estimates by itself" if estimates else "")
        )
    if selection.lambda_ is not None and not (estimates or step_up.estimates):
        raise UserError(
            f"{where}: lambda is of Storey's estimate, and procedure {selection.procedure} makes none; take procedure "
            "storey" + (" or step_up storey" if chosen.several else "")
        )
    if chosen.signed and selection.direction != "members":
        raise UserError(f"{where}: procedure {selection.procedure} takes direction members, got {selection.direction}")
    _check_bound(selection, where)


def _check_bound(selection: SelectionConfig, where: str) -> None:
    """Check that a requested bound has a proof."""
    why = why_unbounded(selection)
    if why is None:
        return
    if procedure_of(selection.procedure).per_list:
        raise UserError(f"{where}: procedure {selection.procedure} is not available, because {why}")
    if selection.confidence != SelectionConfig.model_fields["confidence"].default:
        raise UserError(f"{where}: no bound at confidence {selection.confidence:g} is available, because {why}")


def _check_selection(config: AuditConfig, selection: SelectionConfig, where: str) -> None:
    """Check a selection's settings against its procedure and the corpus."""
    check_settings(selection, where)
    chosen, calibration = procedure_of(selection.procedure), calibration_of(selection.calibration)
    if chosen.signed or config.corpus.versions is not None:
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


PART_DETECTORS = ("renyi", "mod_renyi", "m_entropy", "loss", "perplexity", "min_k", "min_k_plus_plus", "gap_k")


def check_kind(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """Check that detectors and settings fit the kind of the documents.

    Args:
        config: the audit's configuration.
        detectors: the detectors that it scores.

    Raises:
        UserError: a detector or setting for texts with pictures, or for pictures with texts; a detector, setting or
            procedure that does not support documents with versions, or supports no others.
    """
    _check_versions(config, detectors)
    for detector in detectors:
        _check_reads(config, detector)
    if not config.corpus.has_text:
        _check_textless(config)
    if config.corpus.has_ids:
        _check_ids(config, detectors)
    if not config.corpus.has_pictures:
        return
    _check_plain(config, [config.model], "pictures")


def _check_textless(config: AuditConfig) -> None:
    """Check that scores without texts have no setting that reads texts."""
    given = {"against": config.against, "text_transform": config.text_transform}
    if refused := [key for key, value in given.items() if value]:
        raise UserError(
            f"{refused[0]} reads texts, and no text is given: leave it out, or add text: COLUMN to every role"
        )


def _check_ids(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """Check that token ids are scored by local models, in no pass that changes or continues a text."""
    _check_plain(config, config.models, "token ids")
    for detector in detectors:
        for needed in detector.needs:
            plain = replace(needed, prefix=None) == Pass(needed.kind, needed.model, needed.text)
            if not plain or needed.kind == "generate" or needed.text not in ("plain", "repeated"):
                raise UserError(
                    f"detector {detector.column} changes texts, continues them or is trained on them, and these are "
                    "token ids: give detectors without it, or text in the place of tokens"
                )


def _check_plain(config: AuditConfig, models: Sequence[AnyModel], kind: str) -> None:
    """Check that documents other than texts are read by local models, without a text transformation."""
    for model in models:
        if isinstance(model, EndpointConfig):
            raise UserError(f"model {model.name} is an endpoint, and the documents are {kind}: give weights")
    if config.text_transform is not None:
        raise UserError(f"text_transform changes texts, and the documents are {kind}: set text_transform: null")


def _check_reads(config: AuditConfig, detector: Detector) -> None:
    """Check that the documents have what a detector reads."""
    parts = {needed.part for needed in detector.needs}
    if not config.corpus.has_pictures:
        if parts - {""}:
            raise UserError(
                f"detector {detector.column} reads part {max(parts)} of a picture, and the documents are texts: leave "
                "out part, or name the column of the pictures as corpus.audit.image"
            )
        return
    if "" in parts:
        if "part" in detector.arguments:
            example = f"{{{detector.name}: {{part: description}}}}"
            raise UserError(
                f"detector {detector.column} reads texts, and the documents are pictures: say which part, as in "
                f"{example}; parts: {', '.join(PARTS)}"
            )
        raise UserError(
            f"detector {detector.column} reads texts, and the documents are pictures; of pictures there are "
            f"{listed(PART_DETECTORS)}"
        )
    if any(needed.kind != "forward" or needed.draw or needed.adapter for needed in detector.needs):
        raise UserError(
            f"detector {detector.column} changes texts or the model, and the documents are pictures; of pictures "
            f"there are {listed(PART_DETECTORS)}"
        )
    if any(needed.caption == "given" for needed in detector.needs) and not config.corpus.has_captions:
        raise UserError(
            f"detector {detector.column} reads captions, and a role has none: give corpus.*.caption, or take caption: "
            "generated"
        )


def _check_versions(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """Check that the settings of an audit fit its documents with versions, or their absence."""
    if config.corpus.versions is None:
        for index, selection in enumerate(config.selections):
            if procedure_of(selection.procedure).only_versions:
                raise UserError(
                    f"selections.{index}: procedure {selection.procedure} takes documents with versions: give "
                    "corpus.audit.versions, or take another procedure"
                )
        return
    for model in config.models:
        if isinstance(model, EndpointConfig):
            raise UserError(f"model {model.name} is an endpoint, and documents with versions need weights")
    for key, value in (("series", config.series), ("against", config.against)):
        if value is not None:
            raise UserError(f"{key} does not take documents with versions: leave it out")
    for detector in detectors:
        if any(p.draw or p.continued is not None or p.adapter or p.prefix is not None for p in detector.needs):
            raise UserError(
                f"detector {detector.column} does not take documents with versions: a score of them comes from a "
                "version and the models alone, without paraphrases, continuations or other documents"
            )
        if config.corpus.versions.differing and any((p.kind, p.text) != ("forward", "plain") for p in detector.needs):
            raise UserError(
                f"detector {detector.column} reads more than the probabilities of tokens, of which versions.differing "
                "takes some: take another detector, or leave differing out"
            )
    for index, selection in enumerate(config.selections):
        _check_versioned(selection, f"selections.{index}")


def _check_versioned(selection: SelectionConfig, where: str) -> None:
    if procedure_of(selection.procedure).versions is None:
        names = " or ".join(sorted(name for name, one in PROCEDURES.items() if one.versions is not None))
        raise UserError(
            f"{where}: procedure {selection.procedure} does not take documents with versions; take procedure {names}"
        )
    if selection.direction != "members":
        raise UserError(f"{where}: documents with versions take direction members, got {selection.direction}")
    calibration = calibration_of(selection.calibration)
    if not calibration.plain:
        raise UserError(f"{where}: documents with versions take calibration pooled, got {selection.calibration}")
