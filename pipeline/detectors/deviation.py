"""A document's score before and after the model has learnt from unseen ones (FSD, Zhang et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pipeline.config.training import DEFAULT_ADAPTER
from pipeline.config.yaml import NAME
from pipeline.detectors.base import Detector, Evidence, Needs, detector, variant
from pipeline.detectors.knockoff import base_detector

if TYPE_CHECKING:
    from torch import Tensor

AdapterName = Annotated[str, Field(pattern=NAME, description="a name under fsd.adapters")]


def likelihood_detector(value: Any) -> Detector:
    """A detector as a config names it, which reads forward passes of the model as it is.

    Raises:
        ValueError: anything else.
    """
    base = base_detector(value)
    if any(needed.kind != "forward" or needed.adapter for needed in base.needs):
        raise ValueError("must be a likelihood detector such as loss or min_k")
    return base


def _needs(base: Any, adapter: str) -> Needs:
    needs = likelihood_detector(base).needs
    return {variant(needed, adapter=name): names for name in ("", adapter) for needed, names in needs.items()}


@detector(needs=_needs, checks={"base": likelihood_detector}, signed=True)
def fsd(evidence: Evidence, base: Any = "loss", adapter: AdapterName = DEFAULT_ADAPTER) -> Tensor:
    """The base detector's score of the model as it is, less that with an adapter on (FSD; the sign is ours).

    The adapter was trained on unseen documents of the same kind. What the model has not seen, it learns to predict
    from them; what it was trained on moves less. The paper's scores are low for members, so its S - S' has the other
    sign: minus the rise of the base score is high for members.
    """
    score = likelihood_detector(base).score
    return score(evidence) - score(evidence.with_adapter(adapter))
