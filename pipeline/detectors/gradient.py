"""Detectors that read the gradient of a document's loss (docs/methods.md, section 1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.detectors.base import GRADIENT, Evidence, detector

if TYPE_CHECKING:
    from torch import Tensor


@detector(needs=lambda of: {GRADIENT: ["norm"] if of == "mean" else ["norm", "tokens"]})
def gradient_norm(evidence: Evidence, of: Literal["mean", "sum"] = "mean") -> Tensor:
    """Minus the L2 norm of the gradient for all parameters, <= 0 (KTD, Hu et al. 2025).

    With of = sum it is that of the sum of the tokens' cross-entropies (eq. 6), which grows with the length of a
    document: the norm for their mean, which KTD's program takes, times the number of predicted tokens, exactly.
    """
    norms = evidence.norm(GRADIENT)
    return -norms if of == "mean" else -norms * evidence.predicted_tokens(GRADIENT).to(norms.device)
