"""A document's likelihood behind known documents against that by itself (docs/methods.md, section 1.8).

All documents are read behind the same known ones, which neither calibrate nor are audited: given these, a score is one
function of the document, whatever its role, so that audited null documents and those that calibrate stay exchangeable.
Means are over the tokens from the second on in both readings. Natural logarithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.detectors.base import FORWARD, Count, Evidence, Pass, Prefix, detector
from pipeline.detectors.likelihood import loss, mean_of_all

if TYPE_CHECKING:
    from torch import Tensor

SHOTS = 10
_READ = frozenset({"log_prob"})


def behind(prefix: Prefix) -> Pass:
    """The forward pass over texts behind known documents."""
    return Pass("forward", prefix=prefix)


def _mean_behind(evidence: Evidence, prefix: Prefix) -> Tensor:
    t = evidence[behind(prefix)]
    return mean_of_all(t.log_prob, t.mask)


@detector(needs=lambda shots: dict.fromkeys((FORWARD, behind(Prefix("unseen", shots))), _READ))
def recall(evidence: Evidence, shots: Count = SHOTS) -> Tensor:
    """Mean token log-probability behind unseen documents over that without, > 0 (ReCaLL, Xie et al. 2024, eq. 1).

    What is new becomes likelier behind documents of its kind; what was trained on has less to gain.
    """
    return _mean_behind(evidence, Prefix("unseen", shots)) / loss(evidence)


@detector(
    needs=lambda shots: dict.fromkeys((FORWARD, *(behind(Prefix(role, shots)) for role in ("unseen", "seen"))), _READ)
)
def con_recall(evidence: Evidence, shots: Count = SHOTS, gamma: Annotated[float, Field(ge=0, le=1)] = 0.5) -> Tensor:
    """Mean log-probability behind unseen less gamma times that behind seen documents, over that without any.

    Con-ReCall (Wang et al. 2025, arXiv 2409.03363, eq. 3): unseen documents before it change a member least, seen ones
    a document that is new.
    """
    unseen, seen = (_mean_behind(evidence, Prefix(role, shots)) for role in ("unseen", "seen"))
    return (unseen - gamma * seen) / loss(evidence)


@detector(needs=lambda shots: dict.fromkeys((FORWARD, behind(Prefix("unseen", shots, joined=False))), _READ))
def codec(evidence: Evidence, shots: Count = SHOTS) -> Tensor:
    """Mean token log-probability less that behind one other document (CoDeC, arXiv 2510.27055).

    Context helps what is new and disturbs what is known. The paper takes another document of the list that is tested.
    Behind audited documents for some and unseen ones for others, null documents would not be exchangeable; so here
    all take one of the same `shots` unseen documents, chosen by the seed and the document's id alone, and no
    near-duplicate of it.
    """
    return loss(evidence) - _mean_behind(evidence, Prefix("unseen", shots, joined=False))
