"""Texts or pictures: what an audit of one kind of documents cannot ask."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.detectors.base import Detector
from pipeline.errors import UserError
from pipeline.passes.statistics import PARTS
from pipeline.report.wording.setup import listed
from pipeline.selection.calibrations import calibration_of

READING_PARTS = ("renyi", "mod_renyi", "m_entropy", "loss", "min_k", "min_k_plus_plus", "gap_k")


def check_kind(config: AuditConfig, detectors: Sequence[Detector]) -> None:
    """Check that detectors and settings are of the kind of the documents.

    Args:
        config: of the audit.
        detectors: that it scores.

    Raises:
        UserError: a detector or a setting of texts over pictures, or of pictures over texts.
    """
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
