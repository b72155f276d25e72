"""The tails of held-out scores of a classifier: are some audited documents of a kind that calibration lacks?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from pipeline.checks.held_out_auc import HALVINGS, HeldOut
from pipeline.run.records import Record

SHARES = (0.005, 0.01, 0.02, 0.05)
LEAST_TAIL = 5
"""Minimum number of blocks in a tail."""

TAIL_LEVEL = 0.01
_LEAST_P, _MOST_P = 1e-15, 0.99  # one p-value of .999 would cancel one of .001


class TailTest(Record):
    """The tail check of a role and the places of its documents, whose texts may be gone when an answer is checked."""

    p_value: float = Field(description="P-value of all tails; a small one contradicts that both groups are alike.")
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
        """Whether the tail has more audited documents than chance allows."""
        return self.p_value <= TAIL_LEVEL


def tail_test(held: HeldOut, places: Sequence[tuple[str, int]]) -> TailTest:
    """The tail check of held-out scores.

    Args:
        held: scores of documents by classifiers that were trained on the other half.
        places: shard, and row in it from 0, of each document.
    """
    p_value, tail, ranks = blind_tail(held)
    if p_value > TAIL_LEVEL:
        return TailTest(p_value=p_value)
    compared: dict[str, int] = {}
    for place in np.flatnonzero(held.compared.audited).tolist():
        shard, row = places[place]
        compared[shard] = max(compared.get(shard, 0), row + 1)
    inside = np.flatnonzero(tail & held.compared.audited)
    order = inside[np.argsort(-ranks[inside], kind="stable")].tolist()
    return TailTest(
        p_value=p_value,
        share=float(tail.mean()),
        compared=compared,
        documents=[(*places[place], round(float(ranks[place]), 6)) for place in order],
    )


def blind_tail(held: HeldOut) -> tuple[float, np.ndarray, np.ndarray]:
    """Test the tails of held-out scores: the documents that look most like audited ones.

    In each half blocks are ordered by their mean score. If the roles are exchangeable, the number of audited blocks at
    the top is hypergeometric. The p-values of the top 0.5, 1, 2 and 5% of all halves make one by Cauchy combination.

    Args:
        held: scores of documents by classifiers that were trained on the other half.

    Returns:
        the p-value of all tails together; bool, (documents,), which are in the tail with the least p-value; float64,
        (documents,), the means of their held-out percentile ranks, in [0, 1].
    """
    halves = [_tails(held, places, scores) for places, scores in held.halves()]
    distinct = [p for sizes, p_values, _ in halves for p in dict(zip(sizes, p_values, strict=True)).values()]
    together = [cauchy([p_values[place] for _, p_values, _ in halves]) for place in range(len(SHARES))]
    fewest = float(np.mean([LEAST_TAIL / blocks for *_, blocks in halves]))
    share = min(1.0, max(SHARES[int(np.argmin(together))], fewest))
    ranks = _ranks(held)
    least = np.sort(ranks)[::-1][max(1, round(share * ranks.size)) - 1]
    return cauchy(distinct), ranks >= least, ranks


def _tails(held: HeldOut, places: np.ndarray, scores: np.ndarray) -> tuple[list[int], list[float], int]:
    """Blocks and p-value of the top of one half, ties included, for each of SHARES, and the blocks of the half.

    Blocks of both roles are left out.
    """
    from scipy.stats import hypergeom

    kinds = held.compared.kinds
    block = held.compared.block[places]
    sums, counts = np.bincount(block, scores, kinds.size), np.bincount(block, minlength=kinds.size)
    inside = np.flatnonzero((counts > 0) & (kinds != 3))
    means, audited = sums[inside] / counts[inside], kinds[inside] == 2
    ordered, number = np.sort(means)[::-1], inside.size
    tops = [means >= ordered[min(max(LEAST_TAIL, round(share * number)), number) - 1] for share in SHARES]
    sizes, n_audited = ([int(np.count_nonzero(top & of)) for top in tops] for of in (True, audited))
    total = int(np.count_nonzero(audited))
    p_values = [float(hypergeom.sf(k - 1, number, total, size)) for k, size in zip(n_audited, sizes, strict=True)]
    return sizes, p_values, number


def cauchy(p_values: Sequence[float]) -> float:
    """The Cauchy combination of p-values, each clipped to [1e-15, 0.99] before (Liu & Xie 2020)."""
    clipped = np.clip(np.asarray(p_values, dtype=np.float64), _LEAST_P, _MOST_P)
    statistic = np.mean(1 / np.tan(np.pi * clipped))
    return float(np.arctan2(1.0, statistic) / np.pi)


def _ranks(held: HeldOut) -> np.ndarray:
    """The mean, over the halvings, of the percentile rank of each document in its half; ties get their mid-rank."""
    from scipy.stats import rankdata

    total = np.zeros(held.compared.audited.size)
    for places, scores in held.halves():
        total[places] += (rankdata(scores) - 0.5) / scores.size
    return total / HALVINGS
