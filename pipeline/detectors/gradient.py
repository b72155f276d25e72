"""Detectors that read the gradient of a document's loss (docs/methods.md, section 1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.detectors.base import GRADIENT, Evidence, detector

if TYPE_CHECKING:
    from torch import Tensor


@detector(needs={GRADIENT: ["norm"]})
def gradient_norm(evidence: Evidence) -> Tensor:
    """Minus the L2 norm of the mean cross-entropy's gradient for all parameters, <= 0 (KTD, Hu et al. 2025)."""
    return -evidence.norm(GRADIENT)
