"""Stages, which process a shard of documents into one file of rows and one receipt.

A stage is a module of this package with its record (`base.StageKind`) and its worker; `registry` collects the records.
This file is imported by packages that must not load torch.
"""

SCORING = "score"
"""The last stage, which computes the scores; its receipts state which documents are scored."""

SCORE_FOLDER = "scores"


def is_scoring(stage: str) -> bool:
    """Whether the stage of this name computes the scores."""
    return stage == SCORING
