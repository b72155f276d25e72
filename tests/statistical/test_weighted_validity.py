"""Weighted p-values with known weights hold under a shift that breaks unweighted ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from simulation import Estimate

from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.procedures.record import decide
from pipeline.selection.weighted import (
    calibrate_weighted,
    least_ranks,
    ranks_by_weight,
    weight_levels,
    weighted_resolution,
)

ALPHA = Fraction(1, 10)


@dataclass(frozen=True)
class Shift:
    """Calibration topics x ~ N(0, 1), audited ones x ~ N(shift, 1); a null's score is slope x + noise of sd 1."""

    n: int
    m: int
    shift: float
    share: float = 0.2
    slope: float = 0.7
    effect: float = 3.0

    def odds(self, x: np.ndarray) -> np.ndarray:
        return np.exp(self.shift * x - self.shift**2 / 2)

    def draws(self, runs: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Scores of calibration and audit, and their weights; the first documents of an audit are members."""
        rng, members = np.random.default_rng(seed), round(self.share * self.m)
        for _ in range(runs):
            x = rng.normal(size=self.n + self.m)
            x[self.n :] += self.shift
            s = self.slope * x + rng.normal(size=x.size)
            s[self.n : self.n + members] += self.effect
            odds = self.odds(x)
            weights = weight_levels(odds, float(odds.max()))
            yield s[: self.n], s[self.n :], weights[: self.n], weights[self.n :]


@pytest.mark.parametrize("direction", ["members", "clean"])
def test_a_null_document_has_a_small_weighted_p_no_more_often_than_it_says(direction: str) -> None:
    """Given weights that are right and a calibration set drawn anew for each document, P(p <= t) <= t."""
    levels = np.array([0.02, 0.05, 0.1, 0.3, 0.6])
    sign = 1 if direction == "members" else -1
    runs, hits, pooled = 3_000, np.zeros(levels.size), np.zeros(levels.size)
    for known, audit, w, v in Shift(n=60, m=1, shift=0.8, share=0).draws(runs, seed=3):
        calibration = calibrate_weighted(sign * known, w)
        rank = ranks_by_weight(sign * audit, v, calibration, direction)
        hits += calibration.grid.values[rank[0] - 1] <= levels
        pooled += ranks(sign * audit, calibrate(sign * known), direction)[0] / (known.size + 1) <= levels
    error = 4 * np.sqrt(levels * (1 - levels) / runs)
    assert (hits / runs <= levels + error).all(), hits / runs
    assert (pooled / runs > levels + error).all(), "without weights the same documents contradict the promise"


def test_the_fewest_that_can_be_selected_are_selected_where_all_evidence_is_perfect() -> None:
    """By brute force: R documents beyond every calibration score, of the smallest weights, for R = 1, 2, ..."""
    rng = np.random.default_rng(5)
    sizes = []
    for _ in range(60):
        n, m = int(rng.integers(3, 40)), int(rng.integers(5, 60))
        calibration = calibrate_weighted(rng.normal(size=n), weight_levels(rng.lognormal(size=n), 20.0))
        weights = np.sort(weight_levels(rng.lognormal(size=m), 20.0))
        fewest = m + 1
        for size in range(m, 0, -1):
            scores = np.where(np.arange(m) < size, np.inf, -np.inf)
            rank = ranks_by_weight(scores, weights, calibration, "members")
            decision = decide("bh", RankCounts.of(rank, calibration.grid), ALPHA)
            fewest = min(fewest, decision.n_selected or m + 1)
        least = RankCounts.of(least_ranks(weights, calibration), calibration.grid)
        shown, _ = weighted_resolution(least, ALPHA, Fraction(1))
        assert (shown > m) == (fewest > m)
        assert shown > m or shown == fewest
        sizes.append(fewest <= m)
    assert min(sum(sizes), len(sizes) - sum(sizes)) > 5  # both outcomes occur


@pytest.mark.parametrize(
    "setting",
    [
        Shift(n=200, m=200, shift=0.5),
        Shift(n=1_000, m=500, shift=0.8),
        Shift(n=300, m=2_000, shift=0.5, share=0.1),
        Shift(n=500, m=20, shift=0.8, share=0.0),
    ],
    ids=str,
)
def test_bh_on_weighted_p_values_holds_with_known_weights(setting: Shift) -> None:
    members = round(setting.share * setting.m)
    wrong: dict[str, list[float]] = {"weighted": [], "pooled": []}
    for known, audit, w, v in setting.draws(400, seed=11):
        calibration = calibrate_weighted(known, w)
        places = {
            "weighted": (ranks_by_weight(audit, v, calibration, "members"), calibration.grid),
            "pooled": (ranks(audit, calibrate(known), "members"), setting.n),
        }
        for name, (rank, against) in places.items():
            selected = rank <= decide("bh", RankCounts.of(rank, against), ALPHA).rank
            wrong[name].append(selected[members:].sum() / max(1, selected.sum()))
    weighted, pooled = Estimate.of(wrong["weighted"]), Estimate.of(wrong["pooled"])
    due = float(ALPHA) * (1 - setting.share)
    assert weighted.mean <= due + 4 * weighted.se, weighted
    assert pooled.mean > float(ALPHA) + 4 * pooled.se, pooled
