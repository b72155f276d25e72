"""Monte Carlo claims about clusters of near-duplicates: what they take from adaptive procedures, and what bh bears.

Seeds are fixed. Tolerances are four standard errors of the difference; a recorded figure is of 2,000 runs.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from simulation import Estimate

from pipeline.checks.dependent_documents import breaks_bounds
from pipeline.checks.diagnostic import NearDuplicates
from pipeline.selection.blocks import EXCESS, INFLATION, Blocks, Related, Sizes
from pipeline.selection.bounds import bounds_of_lists
from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.procedures.estimating import storey_cut
from pipeline.selection.procedures.record import decide

ALPHA = Fraction(1, 10)
SURE = Fraction(95, 100)
RUNS, RECORDED_RUNS = 1_000, 2_000
LAMBDAS = {"storey": None, "storey at .5": Fraction(1, 2), "ptdi": None, "bh": None, "storey by blocks": None}
"""All but the last decide as if all documents were independent."""


@cache
def fdr(n: int, m: int, share: float, copies: int, calibrating: int = 1, runs: int = RUNS) -> dict[str, Estimate]:
    """FDR with model A where `copies` audited and `calibrating` calibration documents always have one score."""
    rng = np.random.default_rng([7, n, m, copies, calibrating])
    n_members = round(share * m)
    part = families(m, copies).part(storey_cut(Grid.uniform(n), None)[0])
    place = np.concatenate([np.arange(count) % copies for count in (m - n_members, n_members)])
    wrong: dict[str, list[float]] = {name: [] for name in LAMBDAS}
    for _ in range(runs):
        calibration = np.sort(np.repeat(rng.normal(size=n // calibrating), calibrating))
        kinds, ranks = [], []
        for count, shift in ((m - n_members, 0.0), (n_members, 2.5)):
            scores = np.repeat(rng.normal(shift, 1, -(-count // copies)), copies)[:count]
            ranks.append(1 + n - np.searchsorted(calibration, scores))
            kinds.append(np.bincount(ranks[-1] - 1, minlength=n + 1))
        counts, by_blocks = RankCounts(kinds[0] + kinds[1]), RankCounts.of(np.concatenate(ranks), n, place, part)
        for name, shares in wrong.items():
            held = by_blocks if name == "storey by blocks" else counts
            rank = decide(name.split()[0], held, ALPHA, lambda_=LAMBDAS[name]).rank
            nulls, members = (int(kind[:rank].sum()) for kind in kinds)
            shares.append(nulls / max(1, nulls + members))
    return {name: Estimate.of(shares) for name, shares in wrong.items()}


def families(documents: int, copies: int) -> Sizes:
    return Sizes.of(np.arange(documents) // copies)


def inflation(documents: int, copies: int) -> Fraction:
    """The factor by which families of calibration documents shrink p-values."""
    related = Related.of(np.arange(documents), np.arange(documents) // copies)
    found = Blocks.of(Related.of(np.arange(9)), related, False).dependence()
    return Fraction(1) if found is None else found.factor


def record(documents: int, copies: int) -> NearDuplicates:
    families = documents // copies
    return NearDuplicates(
        n_documents=documents,
        whole=True,
        n_copies=documents if copies > 1 else 0,
        n_families=families if copies > 1 else 0,
        largest=copies,
        n_distinct=families,
        effective=float(families),
        families=[],
    )


@pytest.mark.parametrize(
    ("copies", "figures"),
    [
        (5, {"storey": 0.145, "storey at .5": 0.111, "ptdi": 0.125, "bh": 0.046, "storey by blocks": 0.089}),
        (10, {"storey": 0.213, "storey at .5": 0.126, "ptdi": 0.148, "bh": 0.048, "storey by blocks": 0.068}),
        (25, {"storey": 0.321, "storey at .5": 0.163, "ptdi": 0.189, "bh": 0.044, "storey by blocks": 0.049}),
    ],
)
def test_clusters_in_the_audit_have_the_figures_of_the_methods_page(copies: int, figures: dict[str, float]) -> None:
    """100 documents, half of them members, 1,000 that calibrate."""
    measured = fdr(1_000, 100, 0.5, copies)
    for name, figure in figures.items():
        noise = measured[name].se * math.sqrt(1 + RUNS / RECORDED_RUNS)
        assert abs(measured[name].mean - figure) <= 4 * noise, (name, measured[name])
    for name in ("bh", "storey by blocks"):
        assert measured[name].mean <= 0.1 + 4 * measured[name].se
    assert families(100, copies).excess(Fraction(4, 5), Fraction(50)) > EXCESS, "ptdi is not supported"


@pytest.mark.parametrize(("m", "copies"), [(320, 2), (960, 4), (2_560, 9)])
def test_clusters_with_which_other_estimates_are_supported_cost_little(m: int, copies: int) -> None:
    """The excess of estimates that ignore blocks is at most 10% of alpha, within noise."""
    assert families(m, copies).excess(Fraction(4, 5), Fraction(m, 2)) <= EXCESS
    measured = fdr(1_000, m, 0.5, copies, runs=400)
    for name in ("storey", "ptdi"):
        assert measured[name].mean <= 1.1 * float(ALPHA) + 4 * measured[name].se


@pytest.mark.parametrize("copies", [2, 5])
def test_near_copies_that_calibrate_break_bh_and_the_factor_bounds_by_how_much(copies: int) -> None:
    """No members: FDR is the probability that anything is selected. METHODS has no figure for this."""
    plain, repeated = (fdr(1_000, 100, 0.0, 1, each)["bh"] for each in (1, copies))
    assert plain.mean <= float(ALPHA) + 4 * plain.se
    assert repeated.mean > float(ALPHA) + 4 * repeated.se, "so it must not be called supported"
    factor = float(inflation(1_000, copies))
    assert factor == pytest.approx(copies, rel=0.01)
    assert factor > INFLATION
    assert repeated.mean <= factor * float(ALPHA) + 4 * repeated.se


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_p_values_are_too_small_by_at_most_the_factor(copies: int) -> None:
    n, runs = 200, 40_000
    rng = np.random.default_rng(copies)
    families = rng.random((runs, n // copies))
    p = (1 + copies * (families >= rng.random((runs, 1))).sum(axis=1)) / (n + 1)
    factor = float(inflation(n, copies))
    for t in (1 / (n + 1), 0.02, 0.1, 0.5):
        bound = min(1.0, factor * t)
        assert (p <= t + 1e-12).mean() <= bound + 4 * math.sqrt(bound * (1 - bound) / runs)


def falsely_counted(n: int, m: int, copies: int, runs: int = RUNS) -> float:
    """The share of collections without a member of which a bound says that at least one is; one family calibrates."""
    rng = np.random.default_rng([11, n, m, copies])
    count = 0
    for _ in range(runs):
        calibration = np.sort(np.concatenate([rng.normal(size=n), np.repeat(rng.normal(), copies)]))
        kinds = np.bincount(
            calibration.size - np.searchsorted(calibration, rng.normal(size=m)), minlength=n + copies + 1
        )
        count += bounds_of_lists(RankCounts(kinds), SURE).nulls < m
    return count / runs


@pytest.mark.parametrize(
    ("n", "m", "copies", "stated"), [(500, 500, 5, True), (160, 130, 3, True), (500, 500, 49, False)]
)
def test_a_bound_is_stated_only_with_few_near_copies_that_calibrate(n: int, m: int, copies: int, stated: bool) -> None:
    """The largest families that leave a bound, and the one with which it failed in 28% of collections."""
    assert breaks_bounds(record(m, 1), with_one_family(n, copies)) is not stated
    assert breaks_bounds(with_one_family(n, copies), record(m, 1)) is not stated, "of either role"
    noise = 4 * math.sqrt(0.05 * 0.95 / RUNS)
    assert (falsely_counted(n, m, copies) <= 0.05 + noise) is stated


def with_one_family(n: int, copies: int) -> NearDuplicates:
    effective = (n + copies) ** 2 / (n + copies**2)
    return record(n + copies, 1).model_copy(update={"n_distinct": n + 1, "effective": effective, "largest": copies})
