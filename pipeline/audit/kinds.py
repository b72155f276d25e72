"""Texts, pictures or texts with versions: what an audit of one kind of documents cannot ask."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.config.selection import SelectionConfig
from pipeline.detectors.base import Detector
from pipeline.errors import UserError
from pipeline.passes.statistics import PARTS
from pipeline.report.wording.setup import listed
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.procedures import PROCEDURES, procedure_of

READING_PARTS = ("renyi", "mod_renyi", "m_entropy", "loss", "min_k", "min_k_plus_plus", "gap_k")


def check_kind(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """Check that detectors and settings are of the kind of the documents.

    Args:
        config: of the audit.
        detectors: that it scores.

    Raises:
        UserError: a detector or a setting of texts over pictures, or of pictures over texts; a detector, a setting or
            a procedure that does not take documents with versions, or takes no others.
    """
    _check_versions(config, detectors)
    for detector in detectors:
        _check_reads(config, detector)
    if not config.corpus.has_pictures:
        return
    if isinstance(config.model, EndpointConfig):
        raise UserError(f"model {config.model.name} is an endpoint, and the documents are pictures: give weights")
    if config.text_transform is not None:
        raise UserError("text_transform changes texts, and the documents are pictures: set text_transform: null")
    for index, selection in enumerate(config.selections):
        if calibration_of(selection.calibration).weighted:
            raise UserError(
                f"selections.{index}: calibration weighted weighs documents by their words, and these are pictures: "
                "take calibration pooled"
            )


def _check_reads(config: AuditConfig, detector: Detector) -> None:
    """What a detector reads must be what the documents are."""
    parts = {needed.part for needed in detector.needs}
    if not config.corpus.has_pictures:
        if parts != {""}:
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
            f"{listed(READING_PARTS)}"
        )
    if any(needed.kind != "forward" or needed.draw or needed.adapter for needed in detector.needs):
        raise UserError(
            f"detector {detector.column} changes texts or the model, and the documents are pictures; of pictures "
            f"there are {listed(READING_PARTS)}"
        )
    if any(needed.caption == "given" for needed in detector.needs) and not config.corpus.has_captions:
        raise UserError(
            f"detector {detector.column} reads captions, and a role has none: give corpus.*.caption, or take caption: "
            "generated"
        )


def _check_versions(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """An audit of documents with versions asks only what they can answer, and no other has a procedure for them."""
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
        if any(needed.draw or needed.continued is not None or needed.adapter for needed in detector.needs):
            raise UserError(
                f"detector {detector.column} does not take documents with versions: a score of them comes from a "
                "version and the models alone, without paraphrases, continuations or what other documents trained"
            )
        if config.corpus.versions.differing and any((p.kind, p.text) != ("forward", "plain") for p in detector.needs):
            raise UserError(
                f"detector {detector.column} reads more than the probabilities of tokens, of which versions.differing "
                "takes some: take another detector, or leave differing out"
            )
    for index, selection in enumerate(config.selections):
        _check_selection(selection, f"selections.{index}")


def _check_selection(selection: SelectionConfig, where: str) -> None:
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
