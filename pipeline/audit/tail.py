"""The tail check: is a small part of the audited documents of a kind that calibration lacks?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from pipeline.audit.halvings import HALVINGS, HeldOut
from pipeline.audit.records import Record

SHARES = (0.005, 0.01, 0.02, 0.05)
LEAST_TAIL = 5
"""Blocks of a tail, at least."""

LEVEL = 0.01
_LEAST_P, _MOST_P = 1e-15, 0.99  # one p-value of .999 would cancel one of .001


class TailTest(Record):
    """The tail check of a role, and where its documents stand: the texts may be gone when an answer is checked."""

    p_value: float = Field(description="Of all tails together; small ones contradict that both groups are alike.")
    share: float | None = Field(
        None, description="Share of the compared documents in the tail; null where p is above 0.01."
    )
    compared: dict[str, int] = Field(
        {}, description="Rows at the beginning of each audited shard that were compared; empty where p is above 0.01."
    )
    documents: list[tuple[str, int, float]] = Field(
        [],
        description="Audited documents in the tail, the highest first: shard, row in it from 0, and mean percentile "
        "rank in [0, 1].",
    )

    @property
    def significant(self) -> bool:
        """Whether more of the tail is audited than chance allows."""
        return self.p_value <= LEVEL


def tail_test(held: HeldOut, places: Sequence[tuple[str, int]]) -> TailTest:
    """The tail check of held-out scores.

    Args:
        held: scores of documents by classifiers that were trained on the other half.
        places: shard, and row in it from 0, of each document.
    """
    tail = blind_tail(held)
    if tail.p_value > LEVEL:
        return TailTest(p_value=tail.p_value)
    compared: dict[str, int] = {}
    for place in np.flatnonzero(held.compared.audited).tolist():
        shard, row = places[place]
        compared[shard] = max(compared.get(shard, 0), row + 1)
    inside = np.flatnonzero(tail.inside & held.compared.audited)
    order = inside[np.argsort(-tail.ranks[inside], kind="stable")].tolist()
    return TailTest(
        p_value=tail.p_value,
        share=tail.share,
        compared=compared,
        documents=[(*places[place], round(float(tail.ranks[place]), 6)) for place in order],
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlindTail:
    """The documents that look most like audited ones, and whether more of them are audited than chance allows."""

    p_value: float  # of all tails together
    inside: np.ndarray  # bool, (documents,): in the tail with the least p-value
    ranks: np.ndarray  # float64, (documents,): mean of the held-out percentile ranks, in [0, 1]

    @property
    def share(self) -> float:
        """The share of the compared documents that lie in the tail."""
        return float(self.inside.mean())


def blind_tail(held: HeldOut) -> BlindTail:
    """Test the tails of held-out scores.

    In each half blocks are ordered by their mean score. If the roles are exchangeable, the number of audited blocks at
    the top is hypergeometric. The p-values of the top 0.5, 1, 2 and 5% of all halves make one by Cauchy combination.

    Args:
        held: scores of documents by classifiers that were trained on the other half.
    """
    halves = [_tails(held, places, scores) for places, scores in held.halves()]
    distinct = [p for half in halves for p in {tail.size: tail.p_value for tail in half}.values()]
    together = [cauchy([half[place].p_value for half in halves]) for place in range(len(SHARES))]
    best = int(np.argmin(together))
    share = min(1.0, max(SHARES[best], float(np.mean([LEAST_TAIL / half[best].blocks for half in halves]))))
    ranks = _ranks(held)
    least = np.sort(ranks)[::-1][max(1, round(share * ranks.size)) - 1]
    return BlindTail(cauchy(distinct), ranks >= least, ranks)


@dataclass(frozen=True, slots=True)
class _HalfTail:
    """The top of one half."""

    size: int  # blocks in the tail, ties included
    blocks: int  # of the half
    p_value: float


def _tails(held: HeldOut, places: np.ndarray, scores: np.ndarray) -> list[_HalfTail]:
    """The tails of one half, one for each of SHARES. Blocks of both roles are left out."""
    from scipy.stats import hypergeom

    kinds = held.compared.kinds
    block = held.compared.block[places]
    sums, counts = np.bincount(block, scores, kinds.size), np.bincount(block, minlength=kinds.size)
    inside = np.flatnonzero((counts > 0) & (kinds != 3))
    means, audited = sums[inside] / counts[inside], kinds[inside] == 2
    ordered = np.sort(means)[::-1]
    tails = []
    for share in SHARES:
        least = ordered[min(max(LEAST_TAIL, round(share * inside.size)), inside.size) - 1]
        top = means >= least
        n_audited = int(np.count_nonzero(audited & top))
        size = int(np.count_nonzero(top))
        p_value = hypergeom.sf(n_audited - 1, inside.size, int(np.count_nonzero(audited)), size)
        tails.append(_HalfTail(size, inside.size, float(p_value)))
    return tails


def cauchy(p_values: Sequence[float]) -> float:
    """The Cauchy combination of p-values, each clipped to [1e-15, 0.99] before (Liu & Xie 2020)."""
    clipped = np.clip(np.asarray(p_values, dtype=np.float64), _LEAST_P, _MOST_P)
    statistic = np.mean(1 / np.tan(np.pi * clipped))
    return float(np.arctan2(1.0, statistic) / np.pi)


def _ranks(held: HeldOut) -> np.ndarray:
    """The mean, over the halvings, of the percentile rank of each document in its half; ties have their middle."""
    from scipy.stats import rankdata

    total = np.zeros(held.compared.audited.size)
    for places, scores in held.halves():
        total[places] += (rankdata(scores) - 0.5) / scores.size
    return total / HALVINGS
