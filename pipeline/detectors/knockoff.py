"""A document's score compared to those of its paraphrases (KTD, Hu et al. 2025)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.detectors.arguments import Count
from pipeline.detectors.base import Detector, Evidence, Needs, detector, parse
from pipeline.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BASE = "gradient_norm"
DRAWS = 10
Combine = Literal["mean", "simultaneous"]


def base_detector(value: Any) -> Detector:
    """A detector, as in a configuration, with one column that does not read paraphrases.

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
    """W: the base detector's score of the document compared to its scores of `draws` paraphrases.

    A paraphrase represents a document that the model might have been trained on instead; for an unseen document neither
    should score higher. Members have W > 0. With combine = mean the mean score of the paraphrases is subtracted (KTD,
    eq. 8); with simultaneous each paraphrase competes with the document (`compete`). With draws = 1 both are vanilla
    knockoff inference.
    """
    everyone = _all_scores(evidence, base, draws)
    text, paraphrased = everyone[0], everyone[1:]
    return compete(text, paraphrased) if combine == "simultaneous" else text - paraphrased.mean(0)


@detector(needs=_needs, checks={"base": base_detector})
def knockoff_spread(evidence: Evidence, base: Any = BASE, draws: Annotated[int, Field(ge=3)] = DRAWS) -> Tensor:
    """Variance of the base detector's scores of a document and its paraphrases, without the largest.

    It is no membership statistic: procedure `ktd` divides simultaneous W by it, after shrinkage. It does not depend on
    which score is the document's.
    """
    everyone = _all_scores(evidence, base, draws)
    return everyone.sort(dim=0).values[:-1].var(0)


def _all_scores(evidence: Evidence, base: Any, draws: int) -> Tensor:
    """Scores of the documents, followed by each draw of their paraphrases: (1 + draws, documents)."""
    import torch

    score = base_detector(base).score
    return torch.stack([score(evidence), *(score(evidence.of_draw(draw)) for draw in range(1, draws + 1))])


def compete(text: Tensor, paraphrased: Tensor) -> Tensor:
    """The statistic W of simultaneous knockoffs (Gimenez & Zou 2019).

    |W| is the largest of all scores minus the median of the others; W > 0 if only the text has the largest. If the
    scores of an unseen text and its paraphrases are exchangeable, this has probability at most 1 / (draws + 1) given
    |W|, for any distribution of the scores; the filter relies on it. The difference to the mean of the paraphrases has
    no such property: its terms share the text's score, so that W is as skewed as the scores.

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
    """Number of paraphrases of a score column with the statistic of `compete`; None for other columns."""
    if not re.fullmatch(r"knockoff\((.+, )?combine=simultaneous\)", column):
        return None
    given = re.search(r"\bdraws=(\d+), combine=simultaneous\)$", column)
    return int(given[1]) if given else DRAWS


def spread_column(column: str) -> str | None:
    """The score column that scales a column with the statistic of `compete`; None for other columns."""
    if simultaneous_draws(column) is None:
        return None
    settings = column.removeprefix("knockoff(").removesuffix("combine=simultaneous)").removesuffix(", ")
    return f"knockoff_spread({settings})" if settings else "knockoff_spread"
