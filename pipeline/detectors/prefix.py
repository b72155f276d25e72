"""A document's likelihood after known documents, compared to its likelihood alone (docs/methods.md, section 1.8).

All documents are read after the same known documents, which neither calibrate nor are audited: given these, a score is
the same function of the document for every role, so that audited null documents and calibration documents stay
exchangeable. Means are over the tokens from the second on in both passes. Natural logarithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.detectors.arguments import Count
from pipeline.detectors.base import FORWARD, Evidence, Pass, Prefix, detector
from pipeline.detectors.likelihood import loss, mean_of_all

if TYPE_CHECKING:
    from torch import Tensor

SHOTS = 10
_FIELDS = frozenset({"log_prob"})


def behind(prefix: Prefix) -> Pass:
    """The forward pass over texts after known documents."""
    return Pass("forward", prefix=prefix)


def _mean_behind(evidence: Evidence, prefix: Prefix) -> Tensor:
    t = evidence[behind(prefix)]
    return mean_of_all(t.log_prob, t.mask)


@detector(needs=lambda shots: dict.fromkeys((FORWARD, behind(Prefix("unseen", shots))), _FIELDS))
def recall(evidence: Evidence, shots: Count = SHOTS) -> Tensor:
    """Ratio of mean token log-probability after unseen documents and without, > 0 (ReCaLL, Xie et al. 2024, eq. 1).

    New documents become likelier after documents of their kind; members gain less.
    """
    return _mean_behind(evidence, Prefix("unseen", shots)) / loss(evidence)


@detector(
    needs=lambda shots: dict.fromkeys((FORWARD, *(behind(Prefix(role, shots)) for role in ("unseen", "seen"))), _FIELDS)
)
def con_recall(evidence: Evidence, shots: Count = SHOTS, gamma: Annotated[float, Field(ge=0, le=1)] = 0.5) -> Tensor:
    """Mean log-probability after unseen minus gamma times that after seen documents, divided by that without any.

    Con-ReCall (Wang et al. 2025, arXiv 2409.03363, eq. 3): preceding unseen documents change members least, preceding
    seen documents new ones.
    """
    unseen, seen = (_mean_behind(evidence, Prefix(role, shots)) for role in ("unseen", "seen"))
    return (unseen - gamma * seen) / loss(evidence)


@detector(needs=lambda shots: dict.fromkeys((FORWARD, behind(Prefix("unseen", shots, joined=False))), _FIELDS))
def codec(evidence: Evidence, shots: Count = SHOTS) -> Tensor:
    """Mean token log-probability minus that after one other document (CoDeC, arXiv 2510.27055).

    Context improves the prediction of new documents and disturbs that of members. The paper uses another document of
    the tested list. Null documents would not be exchangeable if some follow audited and others unseen documents; here
    all follow one of the same `shots` unseen documents, chosen only by the seed and the document's id, and not a
    near-duplicate of it.
    """
    return loss(evidence) - _mean_behind(evidence, Prefix("unseen", shots, joined=False))
