"""Detectors that compare two models token by token (docs/methods.md, section 1.2): the target and its reference.

They read the passes of `loss` and `reference` and add none. Both models must read the same tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.detectors.base import FORWARD, REFERENCE, Evidence, detector

if TYPE_CHECKING:
    from torch import Tensor

WINDOWS = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)


@detector(needs={FORWARD: ["log_prob", "renyi_inf"], REFERENCE: ["log_prob"]}, same_tokens=True, windows=True)
def ez(evidence: Evidence) -> Tensor:
    """Share of gains in the changes of log-probability at tokens that are not the target's likeliest, in [0, 1].

    With d = ln p_target - ln p_reference at these positions: sum of d+ / (sum of d+ + sum of d-), which orders
    documents like the paper's ratio of the sums (arXiv 2601.12104), but is bounded as d- vanishes. Without such a
    position, or without a negative d, it is 1 (the paper's program: 0). A token as likely as the likeliest, in float32,
    counts as the likeliest.
    NaN for a document with a log-probability that is not finite, or without tokens.
    """
    difference, mask = token_differences(evidence)
    target = evidence[FORWARD]
    missed = mask & (target.log_prob < -target.renyi["inf"])
    gains = difference.clamp_min(0).where(missed, 0.0).sum(1)
    losses = -difference.clamp_max(0).where(missed, 0.0).sum(1)
    scores = (gains / (gains + losses)).masked_fill(losses == 0, 1.0)
    return _of_finite(scores, difference + target.renyi["inf"].where(mask, 0.0), mask)


@detector(needs={FORWARD: ["log_prob"], REFERENCE: ["log_prob"]}, same_tokens=True)
def wbc(evidence: Evidence) -> Tensor:
    """Mean over ten window lengths of the share of windows that the target finds likelier, in [0, 1] (2601.02751).

    A window counts if its sum of ln p_target exceeds its sum of ln p_reference. A window that is longer than the text
    is the text. NaN as in `ez`.
    """
    import torch

    difference, mask = token_differences(evidence)
    counts = mask.sum(1, keepdim=True)
    sums = torch.nn.functional.pad(difference.cumsum(1), (1, 0))
    starts = torch.arange(mask.shape[1], device=mask.device)
    shares = []
    for window in WINDOWS:
        lengths = counts.clamp_max(window)
        ends = (starts + lengths).clamp_max(mask.shape[1])
        likelier = (sums.gather(1, ends) > sums[:, :-1]) & (starts <= counts - lengths)
        shares.append(likelier.sum(1).double() / (counts - lengths + 1)[:, 0])
    return _of_finite(torch.stack(shares).mean(0), difference, mask)


def token_differences(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Differences ln p_target - ln p_reference, (documents, tokens - 1) float64, 0 outside the mask; and the mask.

    Raises:
        ValueError: the passes read different numbers of tokens.
    """
    import torch

    target, other = evidence[FORWARD], evidence[REFERENCE]
    mask = target.mask
    if not torch.equal(mask, other.mask.to(mask.device)):
        raise ValueError("the target and its reference read different numbers of tokens")
    return (target.log_prob.double() - other.log_prob.to(mask.device).double()).where(mask, 0.0), mask


def _of_finite(scores: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The scores; NaN if a value of the document is not finite or the mask is empty."""
    return scores.masked_fill(~values.isfinite().all(1) | ~mask.any(1), math.nan)
