"""Monte Carlo claims about one error rate over a schedule of scans.

Seeds are fixed, so a test passes always or never. A tolerance is four standard errors, estimated from the runs at hand.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy.special import ndtr, zeta
from simulation import Estimate

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.bounds import wrong_in_list
from pipeline.selection.conformal import RankCounts
from pipeline.selection.engine import refuse_uncovered
from pipeline.selection.procedures.record import decide
from pipeline.selection.schedule import ZETA, Level, Slot, alpha_share

ALPHA = Fraction(1, 10)
SCANS, M, N = 12, 80, 9_599  # alpha (N + 1) / (SCANS M) is 1: the error of spend without members is all of alpha


def percentiles(rng: np.random.Generator) -> np.ndarray:
    """Those of N calibration documents among nulls, ascending."""
    sums = np.cumsum(rng.standard_exponential(N + 1))
    return sums[:-1] / sums[-1]


def one_schedule(rng: np.random.Generator, parts: bool, share: float, shared: bool) -> tuple[float, float]:
    """False share of all selected, and power, over the schedule.

    Args:
        rng: source of the scores.
        parts: whether each scan has its part of alpha; otherwise it takes all of it.
        share: share of members.
        shared: whether one calibration set serves all scans.
    """
    wrong = right = 0
    calibration = percentiles(rng)
    members = round(share * M)
    for number in range(1, SCANS + 1):
        if not shared:
            calibration = percentiles(rng)
        scores = ndtr(-rng.normal(size=M) - 4.0 * (np.arange(M) < members))
        places = 1 + np.searchsorted(calibration, scores)
        level = Slot(number, ALPHA, alpha_share(number, SCANS)).level if parts else ALPHA
        rank = decide("bh", RankCounts.of(places, N), level).rank
        right += int((places[:members] <= rank).sum())
        wrong += int((places[members:] <= rank).sum())
    return wrong / max(1, wrong + right), right / max(1, SCANS * members)


def schedules(parts: bool, share: float, shared: bool, runs: int) -> tuple[Estimate, Estimate]:
    """The error rate and the power over the schedule."""
    rng = np.random.default_rng(19)
    rows = [one_schedule(rng, parts, share, shared) for _ in range(runs)]
    return Estimate.of([row[0] for row in rows]), Estimate.of([row[1] for row in rows])


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "changing models"])
@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("runs", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_parts_of_alpha_keep_it_over_twelve_scans(shared: bool, share: float, runs: int) -> None:
    false_share, power = schedules(True, share, shared, runs)
    assert false_share.mean <= float(ALPHA) + 4 * max(false_share.se, (0.1 * 0.9 / runs) ** 0.5 if share == 0 else 0)
    assert share == 0 or power.mean > 0.5


def test_scans_that_each_take_the_whole_of_alpha_break_it() -> None:
    estimate, _ = schedules(False, 0.0, False, 150)
    assert estimate.mean - 4 * estimate.se > 2 * float(ALPHA)
    assert abs(estimate.mean - (1 - 0.9**SCANS)) <= 4 * estimate.se


def test_shares_sum_to_at_most_one_and_use_nearly_all() -> None:
    assert zeta(1.6) < float(ZETA) < zeta(1.6) + 1e-4
    shares = [alpha_share(number, None) for number in range(1, 400)]
    assert sum(shares) < 1
    assert shares == sorted(shares, reverse=True)
    assert abs(float(shares[99]) * float(ZETA) * 100**1.6 - 1) < 1e-6
    assert sum(alpha_share(number, 52) for number in range(1, 53)) == 1


def test_bounds_of_a_slot_take_its_part_of_the_allowed_failure_and_all_hold_at_once() -> None:
    selection = SelectionConfig(name="s", detectors=["loss"])
    slot = Slot(1, ALPHA, alpha_share(1, SCANS))
    assert 0 <= Level.of(selection, slot).confidence - (1 - Fraction(1, 20) / SCANS) < Fraction(1, 10**5)
    confidence, rng, runs = Level.of(selection, slot).confidence, np.random.default_rng(8), 100
    failed = 0
    for _ in range(runs):
        weights = rng.dirichlet(np.ones(51))
        scans = [RankCounts(rng.multinomial(20, weights)) for _ in range(SCANS)]
        failed += any(wrong_in_list(counts, 5, confidence).members_at_least > 0 for counts in scans)
    assert failed / runs <= 0.05 + 4 * (0.05 * 0.95 / runs) ** 0.5


def test_a_schedule_refuses_a_calibration_that_may_fail_in_every_scan_anew() -> None:
    selection = SelectionConfig(name="s", detectors=["loss"]).model_copy(update={"calibration": "conditional"})
    with pytest.raises(UserError, match="use calibration: pooled"):
        refuse_uncovered(selection)
