"""Precomputed scores: a column of a file, read as a detector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pipeline.detectors.arguments import NamesColumn
from pipeline.detectors.base import Evidence, detector

if TYPE_CHECKING:
    from torch import Tensor


@detector(needs={})
def from_column(
    evidence: Evidence,
    column: Annotated[str, NamesColumn()] = "score",
    higher: Literal["member", "nonmember"] = "member",
) -> Tensor:
    """The scores of a column of `SourceConfig.scores`, with the sign changed if `higher` is `nonmember`."""
    import torch

    scores = torch.tensor(evidence.columns[column], dtype=torch.float64)
    return scores if higher == "member" else -scores
