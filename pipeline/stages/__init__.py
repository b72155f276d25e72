"""Stages: a shard of documents -> one file of rows and one receipt.

A stage is a module here with a record of it (`record.StageKind`) and its worker; `registry` finds the records. What
stands in this file is read by packages that must not load torch.
"""

SCORING = "score"
"""The stage that all others precede: it makes the scores, and its receipts state what is scored."""

SCORE_FOLDER = "scores"


def is_scoring(stage: str) -> bool:
    """Whether a stage, given by its name, makes the scores."""
    return stage == SCORING
