"""Simulated audits: rank counts of nulls and members by their exact law, and what procedures do to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.stats import norm

from pipeline.selection import RankCounts, decide

Percentiles = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(shift: float) -> Percentiles:
    """Unseen ~ N(0, 1), members ~ N(shift, 1) (model A has shift 2.5), as upper-tail null percentiles."""
    return lambda rng, count: norm.sf(rng.normal(shift, 1.0, count))


def beta(a: float, b: float) -> Percentiles:
    """Members whose null percentile is Beta(a, b); its density rises near 1 if b < 1."""
    return lambda rng, count: rng.beta(a, b, count)


MODEL_A = gaussian(2.5)


@dataclass(frozen=True, slots=True)
class Setting:
    """An audit of m documents, exactly round(share * m) of them members, against n calibration documents.

    `members` draws null percentiles (0 = the most member-like). `quarantined` nulls come on top of m, at p
    = 1.
    """

    n: int
    m: int
    share: float
    members: Percentiles = MODEL_A
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A Monte Carlo mean and its standard error."""

    mean: float
    se: float

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        """Mean and standard error of independent values."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)))


def draw(setting: Setting, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rank counts of the nulls and of the members, each int64 of length n + 1.

    Given n calibration scores, the null percentiles between them are Dirichlet(1, ..., 1), so the ranks of
    m0 nulls are multinomial with those cell probabilities, and a member at null percentile u has rank 1 +
    #{calibration percentiles <= u}.
    """
    gaps = rng.standard_exponential(setting.n + 1)
    gaps /= gaps.sum()
    m1 = round(setting.share * setting.m)
    nulls = rng.multinomial(setting.m - m1, gaps)
    nulls[-1] += setting.quarantined
    found = np.searchsorted(np.cumsum(gaps)[:-1], setting.members(rng, m1), side="right")
    return nulls, np.bincount(found, minlength=setting.n + 1)


def simulate(
    setting: Setting, procedures: list[str], alpha: Fraction, runs: int, seed: int
) -> dict[str, tuple[Estimate, Estimate]]:
    """(FDR, power) of each procedure on the same `runs` draws; power is 0 if there are no members."""
    rng = np.random.default_rng(seed)
    results: dict[str, tuple[list[float], list[float]]] = {procedure: ([], []) for procedure in procedures}
    for _ in range(runs):
        nulls, members = draw(setting, rng)
        counts = RankCounts(nulls + members)
        for procedure, (wrong, power) in results.items():
            rank = decide(procedure, counts, alpha).rank
            v, s = int(nulls[:rank].sum()), int(members[:rank].sum())
            wrong.append(v / max(1, v + s))
            power.append(s / max(1, int(members.sum())))
    return {name: (Estimate.of(wrong), Estimate.of(power)) for name, (wrong, power) in results.items()}
