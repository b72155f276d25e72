"""Change of a document's score after fine-tuning on unseen documents (FSD, Zhang et al. 2025)."""

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
    """A detector, as in a configuration, that only reads forward passes of the unchanged model.

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
    """The base detector's score of the model minus that with an active adapter (FSD, eq. 5; the sign is ours).

    The adapter was trained on unseen documents of the same kind, which improves the prediction of unseen documents
    more than that of members. The paper's scores are low for members, so its S - S' has the other sign: minus the
    increase of the base score is high for members. The paper's deviation of perplexity is that of base = perplexity.
    """
    score = likelihood_detector(base).score
    return score(evidence) - score(evidence.with_adapter(adapter))
