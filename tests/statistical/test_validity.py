"""Monte Carlo claims about the false discovery rate.

Seeds are fixed, so a test passes always or never. Every tolerance is four standard errors of the difference
that is tested (under a true claim one comparison in 16,000 would be off by more): ours is estimated from
the runs at hand, and the methods page's table, itself a simulation of 2,000 runs, has one of at most .002.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from simulation import Estimate, Percentiles, Setting, beta, draw, gaussian, last_ranks, simulate

from benchmarks.selection import count_procedures
from pipeline.config.selection import Direction
from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.estimating import strict
from pipeline.selection.procedures.record import decide

ALPHA = Fraction(1, 10)
TABLE_SE = 0.002
FINITE = [name for name in count_procedures() if PROCEDURES[name].terms.guarantee == "finite-sample"]


def tolerance(estimate: Estimate) -> float:
    return 4 * math.hypot(estimate.se, TABLE_SE)


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        (Setting(200, 1_000, 0.5), {"bh": (0.048, 0.75), "storey": (0.097, 0.88), "ptdi": (0.101, 0.88)}),
        (Setting(1_000, 10_000, 0.1), {"bh": (0.084, 0.44), "storey": (0.094, 0.47), "ptdi": (0.094, 0.47)}),
        (Setting(1_000, 1_000, 0.9), {"bh": (0.010, 0.86), "storey": (0.088, 1.0), "ptdi": (0.098, 1.0)}),
    ],
    ids=["half", "tenth", "nine tenths"],
)
def test_fdr_and_power_are_those_of_the_methods_page(setting: Setting, table: dict[str, tuple[float, float]]) -> None:
    for procedure, (fdr, power) in simulate(setting, list(table), ALPHA, runs=4_000, seed=1).items():
        wanted_fdr, wanted_power = table[procedure]
        assert abs(fdr.mean - wanted_fdr) <= tolerance(fdr), (procedure, fdr)
        assert abs(power.mean - wanted_power) <= tolerance(power), (procedure, power)


@pytest.mark.parametrize(("n", "m", "share"), [(999, 100, 0.0), (999, 50, 0.3), (499, 50, 0.7), (199, 20, 0.5)])
def test_bh_has_an_fdr_of_alpha_times_the_null_share_when_levels_are_ranks(n: int, m: int, share: float) -> None:
    assert (ALPHA * (n + 1) / m).denominator == 1
    fdr, _ = simulate(Setting(n, m, share), ["bh"], ALPHA, runs=8_000, seed=2)["bh"]
    assert abs(fdr.mean - (1 - share) * float(ALPHA)) <= 4 * fdr.se


def test_a_level_that_falls_between_ranks_costs_bh_some_of_its_fdr() -> None:
    """So the test above notices a rule that loses exact ties: its FDR is well below alpha."""
    fdr, _ = simulate(Setting(998, 100, 0.0), ["bh"], ALPHA, runs=8_000, seed=2)["bh"]
    assert fdr.mean < float(ALPHA) - 4 * fdr.se


HARD: dict[str, tuple[float, Percentiles]] = {
    "no members": (0.0, gaussian(2.5)),
    "shifted": (0.5, gaussian(2.5)),
    "nearly all members": (0.95, gaussian(3.0)),
    "U-shaped, rising near p = 1": (0.6, beta(0.3, 0.5)),
    "mostly near p = 1": (0.3, beta(2.0, 0.7)),
    "heavy shoulder": (0.8, beta(0.7, 5.0)),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(("n", "m", "alpha"), [(20, 20, 0.5), (50, 100, 0.2), (200, 50, 0.05), (300, 300, 0.1)])
def test_finite_sample_procedures_never_exceed_alpha(n: int, m: int, alpha: float, kind: str) -> None:
    share, members = HARD[kind]
    level = Fraction(str(alpha))
    null_share = 1 - round(share * m) / m
    for procedure, (fdr, _) in simulate(Setting(n, m, share, members), FINITE, level, runs=2_000, seed=3).items():
        promised = alpha if procedure == "storey" else alpha * null_share
        assert fdr.mean <= promised + 4 * fdr.se, (procedure, fdr)


def test_storey_spends_nearly_all_of_alpha_on_few_nulls_and_no_more() -> None:
    """With m0 nulls and n large its FDR is alpha (1 - lambda^m0), with lambda = .8 for as many documents as these.

    Rounding the level down to a rank costs a little of it.
    """
    fdr, _ = simulate(Setting(999, 10, 0.2, gaussian(8.0)), ["storey"], ALPHA, runs=5_000, seed=8)["storey"]
    assert 0.095 * (1 - 0.8**8) - 4 * fdr.se <= fdr.mean <= 0.1 * (1 - 0.8**8) + 4 * fdr.se


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_quarantined_nulls_do_not_break_finite_sample_procedures(share: float) -> None:
    setting = Setting(200, 200, share, gaussian(3.0), quarantined=20)
    for procedure, (fdr, _) in simulate(setting, FINITE, Fraction(1, 5), runs=2_000, seed=4).items():
        assert fdr.mean <= 0.2 + 4 * fdr.se, (procedure, fdr)


def test_ptdi_exceeds_alpha_on_a_heavy_shoulder_and_the_strict_answer_does_not() -> None:
    setting = Setting(1_000, 1_000, 0.8, beta(0.7, 5.0))
    results = simulate(setting, ["ptdi", "storey"], ALPHA, runs=4_000, seed=5)
    fdr = {procedure: result[0] for procedure, result in results.items()}
    assert fdr["ptdi"].mean > 0.1 + 4 * fdr["ptdi"].se
    assert fdr["storey"].mean <= 0.1 + 4 * fdr["storey"].se
    assert abs(fdr["ptdi"].mean - 0.131) <= tolerance(fdr["ptdi"])
    assert abs(fdr["storey"].mean - 0.100) <= tolerance(fdr["storey"])

    nulls, members = draw(setting, np.random.default_rng(5))
    counts = RankCounts(nulls + members)
    assert strict(decide("ptdi", counts, ALPHA), counts) == decide("storey", counts, ALPHA)


@pytest.mark.parametrize("grid", [None, 0.5, 2.0], ids=["no ties", "ties", "hardly any distinct scores"])
@pytest.mark.parametrize("direction", ["members", "clean"])
def test_the_way_from_scores_to_selection_holds_alpha_in_both_directions(
    direction: Direction, grid: float | None
) -> None:
    n, m, share, runs, alpha = 200, 100, 0.4, 3_000, Fraction(1, 5)
    sign = 1.0 if direction == "members" else -1.0
    rng = np.random.default_rng(6)
    m1 = round(share * m)
    placed = np.zeros((runs, m), dtype=np.int64)
    for run in range(runs):
        scores = rng.normal(size=n + m)
        scores[n : n + m1] += 2.5  # the documents for which the null does not hold come first
        if grid is not None:
            scores = np.round(scores / grid) * grid
        placed[run] = ranks(sign * scores[n:], calibrate(sign * scores[:n]), direction)
    counts = np.stack([RankCounts.of(k, n).counts for k in placed])
    fdr = {}
    for procedure in FINITE:
        selected = placed <= last_ranks(procedure, counts, alpha)[:, None]
        wrong = selected[:, m1:].sum(axis=1) / np.maximum(1, selected.sum(axis=1))
        fdr[procedure] = Estimate.of(wrong.tolist())
        promised = float(alpha) * (1 if procedure == "storey" else 1 - share)
        assert fdr[procedure].mean <= promised + 4 * fdr[procedure].se, (procedure, fdr)
        assert selected[:, :m1].sum() > (0.1 if grid == 2.0 else 0.25) * m1 * runs
    if grid is None:  # and the simulated counts of this file follow the same law
        simulated, _ = simulate(Setting(n, m, share), ["bh"], alpha, runs, seed=7)["bh"]
        assert abs(simulated.mean - fdr["bh"].mean) <= 4 * math.hypot(simulated.se, fdr["bh"].se)


def test_each_of_several_answers_keeps_the_promise_that_the_best_of_them_breaks() -> None:
    """Five independent detectors of documents none of which was trained on: whatever is selected is wrong."""
    rng = np.random.default_rng(11)
    n, m, runs, questions = 199, 20, 1_500, 5

    def selects() -> bool:
        rank = ranks(rng.normal(size=m), calibrate(rng.normal(size=n)), "members")
        return decide("bh", RankCounts.of(rank, n), ALPHA).n_selected > 0

    wrong = np.array([[selects() for _ in range(questions)] for _ in range(runs)], dtype=float)
    for answers in wrong.T:
        assert abs((one := Estimate.of(list(answers))).mean - float(ALPHA)) <= 4 * one.se, "alpha (n + 1) / m = 1"
    best = Estimate.of(list(wrong.max(axis=1)))  # the longest list is not empty if one of them is not
    assert abs(best.mean - (1 - (1 - float(ALPHA)) ** questions)) <= 4 * best.se
    assert best.mean > 3 * float(ALPHA)
