"""Precomputed scores: a column of a file, read as a detector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.detectors.base import Evidence, detector

if TYPE_CHECKING:
    from torch import Tensor


@detector(needs={}, names_column="column")
def from_column(evidence: Evidence, column: str = "score", higher: Literal["member", "nonmember"] = "member") -> Tensor:
    """The scores of a column of `SourceConfig.scores`, with the sign changed if `higher` is `nonmember`."""
    import torch

    scores = torch.tensor(evidence.columns[column], dtype=torch.float64)
    return scores if higher == "member" else -scores
