"""Monte Carlo claims about one error rate over a schedule of scans.

Seeds are fixed, so a test passes always or never. A tolerance is four standard errors, estimated from the runs at hand.
"""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from scipy.special import ndtr, zeta
from simulation import Estimate

from pipeline.config.selection import Rule, SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.bounds import wrong_in_list
from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.engine import refuse_uncovered
from pipeline.selection.procedures.record import decide
from pipeline.selection.ranked import decide_in_slot
from pipeline.selection.schedule import ZETA, Level, Slot, fewest_in_slot, known_in_slot, share_of
from pipeline.selection.step_up import dependence_factor, largest_e_rank

ALPHA = Fraction(1, 10)
SCANS, M, N = 12, 80, 9_599  # alpha (N + 1) / (SCANS M) is 1: the error of spend without members is all of alpha


def percentiles(rng: np.random.Generator) -> np.ndarray:
    """Those of N calibration documents among nulls, ascending."""
    sums = np.cumsum(rng.standard_exponential(N + 1))
    return sums[:-1] / sums[-1]


def one_schedule(rng: np.random.Generator, rule: Rule | None, share: float, shared: bool) -> tuple[float, float]:
    """False share of all selected, and power, over the schedule; `shared`: one calibration set serves all scans."""
    wrong = right = 0
    calibration = percentiles(rng)
    members = round(share * M)
    for number in range(1, SCANS + 1):
        if not shared:
            calibration = percentiles(rng)
        scores = ndtr(-rng.normal(size=M) - 4.0 * (np.arange(M) < members))
        places = 1 + np.searchsorted(calibration, scores)
        counts = RankCounts.of(places, N)
        if rule is None:
            rank = decide("bh", counts, ALPHA).rank
        else:
            slot = Slot(number, rule, ALPHA, share_of(number, SCANS), wrong + right)
            rank = decide("bh", counts, slot.level).rank if rule == "spend" else decide_in_slot(counts, slot).rank
        right += int((places[:members] <= rank).sum())
        wrong += int((places[members:] <= rank).sum())
    return wrong / max(1, wrong + right), right / max(1, SCANS * members)


def schedules(rule: Rule | None, share: float, shared: bool, runs: int) -> tuple[Estimate, Estimate]:
    """The error rate and the power over the schedule."""
    rng = np.random.default_rng(19)
    rows = [one_schedule(rng, rule, share, shared) for _ in range(runs)]
    return Estimate.of([row[0] for row in rows]), Estimate.of([row[1] for row in rows])


@pytest.mark.parametrize("rule", get_args(Rule))
@pytest.mark.parametrize("shared", [True, False], ids=["one model", "changing models"])
@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("runs", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_every_rule_keeps_alpha_over_twelve_scans(rule: Rule, shared: bool, share: float, runs: int) -> None:
    false_share, power = schedules(rule, share, shared, runs)
    assert false_share.mean <= float(ALPHA) + 4 * max(false_share.se, (0.1 * 0.9 / runs) ** 0.5 if share == 0 else 0)
    assert share == 0 or power.mean > 0.5


def test_scans_that_each_take_the_whole_of_alpha_break_it() -> None:
    estimate, _ = schedules(None, 0.0, False, 150)
    assert estimate.mean - 4 * estimate.se > 2 * float(ALPHA)
    assert abs(estimate.mean - (1 - 0.9**SCANS)) <= 4 * estimate.se


def test_shares_sum_to_at_most_one_and_use_nearly_all() -> None:
    assert zeta(1.6) < float(ZETA) < zeta(1.6) + 1e-4
    shares = [share_of(number, None) for number in range(1, 400)]
    assert sum(shares) < 1
    assert shares == sorted(shares, reverse=True)
    assert abs(float(shares[99]) * float(ZETA) * 100**1.6 - 1) < 1e-6
    assert sum(share_of(number, 52) for number in range(1, 53)) == 1


def test_e_lond_is_what_its_definition_says_and_e_bh_without_a_history() -> None:
    rng = np.random.default_rng(5)
    for n, m, before in [(50, 8, 0), (50, 8, 5), (400, 30, 0), (400, 30, 200), (999, 80, 9)]:
        level = ALPHA / 3
        for _ in range(20):
            grid = Grid.uniform(n)
            counts = RankCounts.of(1 + (rng.random(m) ** 4 * n).astype(int), n)
            factor, rank = largest_e_rank(counts, level, before)
            assert factor == dependence_factor(grid, m, level)
            last = grid.at_most(level / factor)
            passing = [
                k
                for k in range(1, last + 1)
                if counts.at_most(k) and m * grid.p(k) * factor <= level * (counts.at_most(k) + before)
            ]
            assert counts.at_most(rank) == counts.at_most(max(passing, default=0))
            if before == 0:
                assert counts.at_most(rank) == decide("ebh", counts, level).n_selected
    mean = sum(1 / (grid.p(k) * factor) for k in range(1, last + 1)) / grid.size
    assert mean <= 1


@pytest.mark.parametrize("rule", get_args(Rule))
@pytest.mark.parametrize("before", [0, 40])
def test_the_fewest_of_a_slot_are_selected_and_one_fewer_are_not(rule: Rule, before: int) -> None:
    n, m = 1_999, 80
    slot = Slot(3, rule, ALPHA, share_of(3, SCANS), before)
    factor = dependence_factor(Grid.uniform(n), m, slot.level) if rule == "e-lond" else Fraction(1)
    fewest = fewest_in_slot(Fraction(1, n + 1), factor, m, slot)

    def selected(strongest: int) -> int:
        counts = RankCounts.of(np.repeat([1, n + 1], [strongest, m - strongest]), n)
        return (decide("bh", counts, slot.level) if rule == "spend" else decide_in_slot(counts, slot)).n_selected

    assert selected(fewest) == fewest
    assert selected(fewest - 1) == 0
    known = known_in_slot(m, fewest, slot, factor)
    assert fewest_in_slot(Fraction(1, known + 1), factor, m, slot) <= fewest


def test_bounds_of_a_slot_take_its_part_of_the_allowed_failure_and_all_hold_at_once() -> None:
    selection = SelectionConfig(name="s", detectors=["loss"])
    slot = Slot(1, "spend", ALPHA, share_of(1, SCANS), 0)
    assert 0 <= Level.of(selection, slot).confidence - (1 - Fraction(1, 20) / SCANS) < Fraction(1, 10**5)
    confidence, rng, runs = Level.of(selection, slot).confidence, np.random.default_rng(8), 100
    failed = 0
    for _ in range(runs):
        weights = rng.dirichlet(np.ones(51))
        scans = [RankCounts(rng.multinomial(20, weights)) for _ in range(SCANS)]
        failed += any(wrong_in_list(counts, 5, confidence).members_at_least > 0 for counts in scans)
    assert failed / runs <= 0.05 + 4 * (0.05 * 0.95 / runs) ** 0.5


@pytest.mark.parametrize(
    ("rule", "changes", "line"),
    [
        ("prds", {"procedure": "storey"}, "use procedure: bh"),
        ("e-lond", {"procedure": "bh"}, "use procedure: ebh"),
        ("prds", {"calibration": "weighted"}, "use calibration: pooled"),
        ("spend", {"calibration": "conditional"}, "use calibration: pooled"),
    ],
)
def test_a_rule_refuses_what_it_is_not_proved_for(rule: Rule, changes: dict[str, str], line: str) -> None:
    selection = SelectionConfig(name="s", detectors=["loss"]).model_copy(update=changes)
    with pytest.raises(UserError, match=line):
        refuse_uncovered(selection, rule)


def test_the_levels_of_prds_are_those_of_an_independent_implementation() -> None:
    batching = pytest.importorskip("online_fdr.p_values.batching.prds", reason="online-fdr is not installed")
    oracle, before, rng = batching.BatchPRDS(alpha=0.1), 0, np.random.default_rng(2)
    for number in range(1, SCANS + 1):
        ranks = np.concatenate([np.ones(8, dtype=int), rng.integers(2, N + 2, size=M - 8)])
        slot = Slot(number, "prds", ALPHA, share_of(number, None), before)
        selected = decide_in_slot(RankCounts.of(ranks, N), slot).n_selected
        assert sum(oracle.test_batch((ranks / (N + 1)).tolist())) == selected
        before += selected
    assert before > SCANS


def test_e_lond_of_one_document_a_scan_is_that_of_an_independent_implementation() -> None:
    sequential = pytest.importorskip("online_fdr.e_values.sequential", reason="online-fdr is not installed")

    class Shares:
        def calc_gamma(self, index: int) -> float:
            return float(share_of(index, SCANS))

    rng, agreed = np.random.default_rng(4), 0
    for _ in range(20):
        oracle, before = sequential.ELond(alpha=0.1, gamma_seq=Shares()), 0
        for number in range(1, SCANS + 1):
            k = int(rng.integers(1, 12))
            level = ALPHA * share_of(number, SCANS)
            factor, rank = largest_e_rank(RankCounts.of(np.array([k]), N), level, before)
            inside = k <= Grid.uniform(N).at_most(level / factor)
            e_value = float((N + 1) / (k * factor)) if inside else 0.0
            assert oracle.test_one(e_value) == (k <= rank)
            before += k <= rank
        agreed += before
    assert agreed > 20
