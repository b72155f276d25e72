"""A document's score against those of its paraphrases: how much its very words count (KTD, Hu et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.detectors.arguments import Count
from pipeline.detectors.base import Detector, Evidence, Needs, detector, parse
from pipeline.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BASE = "gradient_norm"


def base_detector(value: Any) -> Detector:
    """A detector as a config names it: one column, and of the documents themselves.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, Detector):
        return value
    try:
        detectors = parse([value])
    except UserError as error:
        raise ValueError(f"must be a detector: {error}") from None
    if len(detectors) != 1 or any(needed.draw or needed.continued for needed in detectors[0].needs):
        raise ValueError("must be one detector of the documents themselves")
    return detectors[0]


def _needs(base: Any, draws: int) -> Needs:
    needs = base_detector(base).needs
    return {replace(needed, draw=draw): names for draw in range(draws + 1) for needed, names in needs.items()}


@detector(needs=_needs, checks={"base": base_detector}, signed=True)
def knockoff(evidence: Evidence, base: Any = BASE, draws: Count = 10) -> Tensor:
    """W: the base detector's score of the document less its mean score of `draws` paraphrases (KTD, eq. 4).

    A paraphrase stands in for the document that the model might have been trained on instead; of an unseen document
    neither should score higher. With draws = 1 that is vanilla knockoff inference. Members have W > 0.
    """
    import torch

    score = base_detector(base).score
    paraphrased = torch.stack([score(evidence.of_draw(draw)) for draw in range(1, draws + 1)])
    return score(evidence) - paraphrased.mean(0)
