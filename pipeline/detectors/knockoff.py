"""A document's score against those of its paraphrases: how much its very words count (KTD, Hu et al. 2025)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.detectors.base import Count, Detector, Evidence, Needs, detector, parse
from pipeline.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BASE = "gradient_norm"
DRAWS = 10
Combine = Literal["mean", "simultaneous"]


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
def knockoff(evidence: Evidence, base: Any = BASE, draws: Count = DRAWS, combine: Combine = "mean") -> Tensor:
    """W: the base detector's score of the document against its scores of `draws` paraphrases.

    A paraphrase stands in for the document that the model might have been trained on instead; of an unseen document
    neither should score higher. Members have W > 0. With combine = mean the mean score of the paraphrases is
    subtracted (KTD, eq. 4); with simultaneous they compete with the document one by one (`compete`). With draws = 1
    both are vanilla knockoff inference.
    """
    everyone = _all_scores(evidence, base, draws)
    text, paraphrased = everyone[0], everyone[1:]
    return compete(text, paraphrased) if combine == "simultaneous" else text - paraphrased.mean(0)


@detector(needs=_needs, checks={"base": base_detector})
def knockoff_spread(evidence: Evidence, base: Any = BASE, draws: Annotated[int, Field(ge=3)] = DRAWS) -> Tensor:
    """Variance of the base detector's scores of a document and its paraphrases, the largest left out.

    No statistic of membership: procedure `ktd` divides simultaneous W by it, shrunk. It never reads which score is the
    document's.
    """
    everyone = _all_scores(evidence, base, draws)
    return everyone.sort(dim=0).values[:-1].var(0)


def _all_scores(evidence: Evidence, base: Any, draws: int) -> Tensor:
    """Scores of the documents and then of each draw of their paraphrases: (1 + draws, documents)."""
    import torch

    score = base_detector(base).score
    return torch.stack([score(evidence), *(score(evidence.of_draw(draw)) for draw in range(1, draws + 1))])


def compete(text: Tensor, paraphrased: Tensor) -> Tensor:
    """The statistic of simultaneous knockoffs (Gimenez & Zou 2019): who of the text and its paraphrases scores highest?

    |W| is the largest of all scores less the median of the others; W > 0 where the text alone has the largest. If the
    scores of an unseen text and its paraphrases are exchangeable, that has a chance of at most 1 / (draws + 1) given
    |W|, whatever the law of the scores, and the filter counts on it. The mean of paraphrases has no such sign: the
    differences share the text's own score, so that W is as skewed as the scores.

    Args:
        text: (documents,).
        paraphrased: (draws, documents).
    """
    import torch

    everyone = torch.cat([text.unsqueeze(0), paraphrased]).sort(dim=0).values
    others, draws = everyone[:-1], paraphrased.shape[0]
    margin = everyone[-1] - (others[(draws - 1) // 2] + others[draws // 2]) / 2
    return torch.where(text > paraphrased.max(0).values, margin, -margin)


def simultaneous_draws(column: str) -> int | None:
    """Of how many paraphrases a score column holds the statistic of `compete`; None where it holds another."""
    if not re.fullmatch(r"knockoff\((.+, )?combine=simultaneous\)", column):
        return None
    given = re.search(r"\bdraws=(\d+), combine=simultaneous\)$", column)
    return int(given[1]) if given else DRAWS


def spread_column(column: str) -> str | None:
    """The score column by which the statistic of `compete` in another is scaled; None where it holds another."""
    if simultaneous_draws(column) is None:
        return None
    settings = column.removeprefix("knockoff(").removesuffix("combine=simultaneous)").removesuffix(", ")
    return f"knockoff_spread({settings})" if settings else "knockoff_spread"
