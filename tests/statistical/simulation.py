"""Simulated audits: rank counts of nulls and members by their exact law, and what procedures do to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.special import ndtr

from pipeline.config.selection import Direction
from pipeline.selection.conformal import Grid, RankCounts, calibrate, ranks
from pipeline.selection.procedures.estimating import default_lambda
from pipeline.selection.procedures.record import decide
from pipeline.selection.procedures.td4eval import statistic
from pipeline.selection.step_up import dependence_factor, harmonic_bound

Percentiles = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(shift: float) -> Percentiles:
    """Unseen ~ N(0, 1), members ~ N(shift, 1) (model A has shift 2.5), as upper-tail null percentiles."""
    return lambda rng, count: ndtr(-rng.normal(shift, 1.0, count))


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
    places = np.searchsorted(np.cumsum(gaps)[:-1], setting.members(rng, m1), side="right")
    return nulls, np.bincount(places, minlength=setting.n + 1)


def simulate(
    setting: Setting, procedures: list[str], alpha: Fraction, runs: int, seed: int
) -> dict[str, tuple[Estimate, Estimate]]:
    """(FDR, power) of each procedure on the same `runs` draws; power is 0 if there are no members."""
    rng = np.random.default_rng(seed)
    results: dict[str, tuple[list[float], list[float]]] = {procedure: ([], []) for procedure in procedures}
    for start in range(0, runs, TOGETHER):
        drawn = [draw(setting, rng) for _ in range(min(TOGETHER, runs - start))]
        nulls, members = (np.stack(kind) for kind in zip(*drawn, strict=True))
        for procedure, (wrong, power) in results.items():
            rank = last_ranks(procedure, nulls + members, alpha)
            v, s = (np.where(rank > 0, below(kind, rank), 0) for kind in (nulls, members))
            wrong.extend(v / np.maximum(1, v + s))
            power.extend(s / np.maximum(1, members.sum(axis=1)))
    return {name: (Estimate.of(wrong), Estimate.of(power)) for name, (wrong, power) in results.items()}


TOGETHER = 500
"""Draws that are decided at once."""

DECIDED = 50
"""Of them, those for which the answer must be that of the program."""


def below(counts: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Documents at ranks 1..`rank` of each row; of rank 0, those at the first."""
    return np.cumsum(counts, axis=1)[np.arange(len(rank)), np.maximum(rank, 1) - 1]


def last_ranks(procedure: str, counts: np.ndarray, alpha: Fraction) -> np.ndarray:
    """`decide(...).rank` of each row, int64; of `EXACT` for all rows at once and in integers, as `step_up` says.

    Rank k is reached where k m factor / (n + 1) <= alpha R_k, for R_k > 0 documents at ranks 1..k.
    """
    if procedure not in EXACT:
        return np.array([decide(procedure, RankCounts(row), alpha).rank for row in counts])
    grid, m = Grid.uniform(counts.shape[1] - 1), int(counts[0].sum())
    reached = np.cumsum(counts, axis=1)
    rows_of: dict[Fraction, list[int]] = {}
    for row, factor in enumerate(EXACT[procedure](grid, m, alpha, reached)):
        rows_of.setdefault(factor, []).append(row)
    rank = np.zeros(len(counts), dtype=np.int64)
    for factor, rows in rows_of.items():
        up, down = (m * factor / (alpha * grid.size)).as_integer_ratio()
        passes = reached[rows] >= np.array([max(1, -(-k * up // down)) for k in range(1, grid.size + 1)])
        rank[rows] = np.where(passes.any(axis=1), grid.size - np.argmax(passes[:, ::-1], axis=1), 0)
    for row in range(0, len(counts), max(1, len(counts) // DECIDED)):  # this is what the program decides
        assert decide(procedure, RankCounts(counts[row]), alpha).rank == rank[row]
    return rank


def storey_factors(grid: Grid, m: int, alpha: Fraction, reached: np.ndarray) -> list[Fraction]:
    """Storey's estimate: (1 + #{p >= t}) / (m (1 - t)), t the first p-value of at least lambda."""
    first = min(math.ceil(default_lambda(grid) * grid.size), grid.size - 1)
    above = m - (reached[:, first - 2] if first > 1 else np.zeros(len(reached), dtype=np.int64))
    return [Fraction(1 + int(count)) / (m * (1 - grid.p(first))) for count in above]


EXACT: dict[str, Callable[[Grid, int, Fraction, np.ndarray], list[Fraction]]] = {
    "bh": lambda grid, m, alpha, reached: [Fraction(1)] * len(reached),
    "by": lambda grid, m, alpha, reached: [harmonic_bound(m)] * len(reached),
    "ebh": lambda grid, m, alpha, reached: [dependence_factor(grid, m, alpha)] * len(reached),
    "storey": storey_factors,
}
"""What divides alpha, of each row."""


def leave_one_out(calibration: np.ndarray, direction: Direction) -> np.ndarray:
    """Rank of each calibration document among the other n - 1, by each detector.

    Args:
        calibration: scores, (n, detectors), n >= 2.
        direction: as in `ranks`.

    Returns:
        int64, (n, detectors), in 1..n.
    """
    columns = [ranks(column, calibrate(column), direction) - 1 for column in calibration.T]
    return np.stack(columns, axis=1)


def reconformal(calibration: np.ndarray, weights: np.ndarray, direction: Direction) -> np.ndarray:
    """TD4Eval's recalibration: the leave-one-out T of the calibration documents, sorted, to rank the audit's T by.

    Audit documents take `ranks(statistic(audit_ranks, n, weights), this, "members")`, for either direction.

    Guaranteed: nothing, though the paper says that this restores a finite-sample p-value. With weights that
    were fixed beforehand (`equal`, `random`) the p-values are those of full conformal ranking but for one rank, as
    audit documents are ranked among n and calibration documents among n - 1; simulated, P(p <= 4/5) is .83 with
    n = 4, no excess is visible from n = 60, and the FDR stayed within (share of nulls) alpha. With weights from this
    audit's rejections the documents that are judged chose the weights, and the calibration documents did not: TD4Eval's
    example is repaired (FDR .076, where (share of nulls) alpha is .075), but elsewhere FDR is .085 where .070 is due,
    and a single null document is selected by six independent detectors with probability .47 at alpha = .1. The
    variant with a finite-sample guarantee is `symmetric_weights` on split calibration documents.

    Returns:
        float64, (n,), ascending.
    """
    among_others = leave_one_out(calibration, direction)
    return calibrate(statistic(among_others, among_others.shape[0] - 1, weights))
