"""Bounds fail in at most a share 1 - confidence of audits, at any threshold, and their means are those of the pages."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from simulation import MODEL_A, Setting, beta, draw

from pipeline.config.selection import SelectionConfig
from pipeline.selection.bounds import bounds_of_lists, wrong_in_list
from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.engine import Scores, answer_all
from pipeline.selection.step_up import step_up

SURE = Fraction(95, 100)
DELTA = 0.05
RUNS = 2_000
TENTH = Fraction(1, 10)


def most_failures(runs: int, delta: float = DELTA) -> float:
    """Four standard errors above delta: a bound that fails in a share delta stays below but for one test in 30,000."""
    return delta * runs + 4 * math.sqrt(delta * (1 - delta) * runs)


def fails_somewhere(counts: RankCounts, nulls: np.ndarray) -> bool:
    """Whether any list, or the count of all, is claimed to be better than it is."""
    lists = bounds_of_lists(counts, SURE)
    return bool((np.cumsum(nulls) > lists.wrong).any() or int(nulls.sum()) > lists.nulls)


@pytest.mark.parametrize("n", [20, 200, 2_000])
@pytest.mark.parametrize("m", [5, 100, 5_000])
def test_without_members_some_bound_fails_in_at_most_a_share_delta_of_audits(n: int, m: int) -> None:
    rng = np.random.default_rng([n, m])
    failures = 0
    for _ in range(RUNS):
        nulls, _ = draw(Setting(n, m, 0), rng)
        failures += fails_somewhere(RankCounts(nulls), nulls)
    assert failures <= most_failures(RUNS)
    if m >= 100:
        assert failures >= 0.5 * DELTA * RUNS  # the level is used up, and not by luck kept


@pytest.mark.parametrize("quarantined", [0, 10])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("members", [MODEL_A, beta(0.7, 5.0), beta(5.0, 1.0)], ids=["strong", "shoulder", "like clean"])
def test_with_members_anywhere_no_more_bounds_fail(members: object, share: float, quarantined: int) -> None:
    rng = np.random.default_rng(7)
    failures, runs = 0, 600
    for _ in range(runs):
        nulls, others = draw(Setting(100, 200, share, members, quarantined), rng)  # type: ignore[arg-type]
        failures += fails_somewhere(RankCounts(nulls + others), nulls)
    assert failures <= most_failures(runs)


@pytest.mark.parametrize("values", [1, 2, 5, 30])
def test_tied_scores_make_bounds_fail_less_often(values: int) -> None:
    rng = np.random.default_rng(values)
    failures, runs, n, m = 0, 1_000, 60, 120
    for _ in range(runs):
        known, nulls = rng.integers(values, size=n), rng.integers(values, size=m // 2)
        members = rng.integers(values, size=m // 2) + (rng.random(m // 2) < 0.5)
        calibration = calibrate(known)
        null_ranks, member_ranks = (ranks(part, calibration, "members") for part in (nulls, members))
        null_counts = RankCounts.of(null_ranks, n)
        failures += fails_somewhere(null_counts + RankCounts.of(member_ranks, n), null_counts.counts)
    assert failures <= most_failures(runs)


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize(
    "settings",
    [
        {"procedure": "adadetect", "learn": "pool"},
        {"procedure": "adadetect", "learn": "split"},
        {"procedure": "td4eval", "reconformal": True},
    ],
)
def test_bounds_hold_for_scores_learnt_from_the_audit_itself(settings: dict, share: float) -> None:
    selection = SelectionConfig(name="one", detectors=["a", "b", "c"], **settings)
    rng = np.random.default_rng(11)
    failures, runs, n, m = 0, 250, 80, 100
    for run in range(runs):
        members = round(share * m)
        common = rng.normal(size=n + m)
        columns = {name: np.sqrt(0.5) * (common + rng.normal(size=n + m)) for name in "abc"}
        for column in columns.values():
            column[n : n + members] += 2
        scores = Scores(columns, rng.permutation(10 * (n + m))[: n + m].astype(np.int64))
        roles = {"unseen": np.arange(n), "audit": np.arange(n, n + m)}
        (verdict,) = answer_all([selection], scores, roles, 0, run)  # type: ignore[arg-type]
        counts = verdict.answer.counts
        assert counts is not None
        assert verdict.answer.bound is not None
        null_ranks = np.rint(verdict.p[members:] * (counts.n + 1)).astype(np.int64)
        failures += fails_somewhere(counts, RankCounts.of(null_ranks, counts.n).counts)
    assert failures <= most_failures(runs)


def test_a_list_of_procedure_bound_exceeds_alpha_in_at_most_a_share_delta_of_audits() -> None:
    for n, m, share in ((50, 300, 0.8), (200, 300, 0.5), (200, 300, 0.9)):
        rng = np.random.default_rng([n, m])
        failures = selected = 0
        for _ in range(1_000):
            nulls, members = draw(Setting(n, m, share), rng)
            counts = RankCounts(nulls + members)
            rank = bounds_of_lists(counts, SURE).longest(TENTH)
            size, wrong = counts.at_most(rank), int(nulls[:rank].sum())
            selected += bool(size)
            failures += wrong > TENTH * size
        assert failures <= most_failures(1_000)
        assert selected > 100  # of lists that are there


FIGURES = {
    # n, m, share of members: published bound, the bound, wrong in truth, each as a share of the list; members at least
    (200, 300, 0.5): (0.207, 0.136, 0.048, 122),
    (1_000, 1_000, 0.5): (0.158, 0.097, 0.050, 437),
    (200, 300, 0.9): (0.174, 0.041, 0.010, 250),
}


@pytest.mark.parametrize(("n", "m", "share"), list(FIGURES))
def test_mean_bounds_are_those_of_the_methods_page(n: int, m: int, share: float) -> None:
    rng = np.random.default_rng([n, m, 1])
    rows = []
    for _ in range(800):
        nulls, members = draw(Setting(n, m, share), rng)
        counts = RankCounts(nulls + members)
        rank = step_up(counts, TENTH)
        size = max(1, counts.at_most(rank))
        bound = wrong_in_list(counts, rank, SURE)
        wrong = int(nulls[:rank].sum())
        shares = (bound.published_wrong_at_most / size, bound.wrong_at_most / size, wrong / size)
        rows.append((*shares, bound.members_at_least))
    table = np.array(rows)
    errors = table.std(axis=0, ddof=1) / math.sqrt(len(table))
    rounding = np.array([0.0005, 0.0005, 0.0005, 0.5])
    assert (np.abs(table.mean(axis=0) - FIGURES[n, m, share]) <= 4 * errors + rounding).all()
