"""Monte Carlo claims about more power at the same guarantee: lambda, known members, Storey behind learnt scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from simulation import Estimate, Setting, by, draw, error_rates, gaussian
from test_fusion_validity import TABLE_SE, Detectors, Ranked, adadetect, best_single, reconformal

from pipeline.selection.calibrations import simes_grid
from pipeline.selection.conformal import Grid, calibrate, ranks
from pipeline.selection.procedures.adadetect import fit_discriminant
from pipeline.selection.procedures.estimating import default_lambda
from pipeline.selection.procedures.record import decide
from pipeline.selection.rank_counts import RankCounts

ALPHA = Fraction(1, 10)
HALF, MOST, NEARLY_ALL = Fraction(1, 2), Fraction(4, 5), Fraction(9, 10)


def near(estimate: Estimate, figure: float, figure_se: float = TABLE_SE) -> bool:
    return abs(estimate.mean - figure) <= 4 * math.hypot(estimate.se, figure_se)


def by_lambda(
    setting: Setting, lambdas: list[Fraction | None], runs: int, seed: int, grid: Grid | None = None
) -> list[tuple[Estimate, Estimate]]:
    """(FDR, power) of `storey` at each lambda; None is `bh`."""
    rng = np.random.default_rng(seed)
    deciders = {str(cut): by("bh" if cut is None else "storey", ALPHA, lambda_=cut) for cut in lambdas}
    return list(error_rates((draw(setting, rng) for _ in range(runs)), deciders, grid).values())


@pytest.mark.parametrize(
    ("setting", "figures"),
    [
        (Setting(1_000, 1_000, 0.9, gaussian(1.0)), (0.357, 0.499, 0.687)),
        (Setting(200, 300, 0.5, gaussian(2.0)), (0.682, 0.690, 0.677)),
        (Setting(50, 300, 0.5, gaussian(2.0)), (0.601, 0.590, 0.550)),
    ],
    ids=["nine tenths", "half", "few to calibrate on"],
)
def test_the_power_by_lambda_is_that_of_the_methods_page(setting: Setting, figures: tuple[float, ...]) -> None:
    results = by_lambda(setting, [HALF, Fraction(7, 10), NEARLY_ALL], runs=400, seed=41)
    for (fdr, power), figure in zip(results, figures, strict=True):
        assert near(power, figure, 0.005), (power, figure)
        assert fdr.mean <= 0.1 + 4 * fdr.se


def test_the_default_lambda_follows_from_the_number_of_calibration_documents_alone() -> None:
    assert [default_lambda(Grid.uniform(n)) for n in (1, 199, 200, 10_000)] == [HALF, HALF, MOST, MOST]
    assert {default_lambda(simes_grid(n, ALPHA)) for n in (10, 1_000)} == {Fraction(3, 10)}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", [20, 200])
def test_storey_keeps_alpha_at_any_lambda(n: int, share: float) -> None:
    cuts: list[Fraction | None] = [Fraction(1, 20), HALF, MOST, Fraction(99, 100)]
    for fdr, _ in by_lambda(Setting(n, 100, share), cuts, runs=500, seed=42):
        assert fdr.mean <= 0.1 + 4 * fdr.se


@pytest.mark.parametrize(
    ("n", "m", "share"), [(1_000, 1_000, 0.2), (1_000, 1_000, 0.9), (200, 300, 0.5)], ids=["few", "most", "half"]
)
def test_storey_on_conditional_p_values_finds_more_than_bh(n: int, m: int, share: float) -> None:
    """At lambda .8, where nulls' conditional p-values pile up, it finds less than bh where members are few."""
    grid = simes_grid(n, ALPHA)
    plain, default, high = by_lambda(
        Setting(n, m, share), [None, default_lambda(grid), MOST], runs=500, seed=43, grid=grid
    )
    assert default[1].mean > plain[1].mean + 4 * math.hypot(default[1].se, plain[1].se)
    assert default[1].mean > high[1].mean
    assert high[1].mean < plain[1].mean or share > 0.2
    for fdr, _ in (plain, default, high):
        assert fdr.mean <= 0.1 + 4 * fdr.se


def known_members(calibration: np.ndarray, audit: np.ndarray, alpha: Fraction, seen: np.ndarray) -> Ranked:
    learnt = fit_discriminant(seen, np.concatenate([calibration, audit]))
    return ranks(learnt.score(audit), calibrate(learnt.score(calibration)), "members"), len(calibration)


def compared(
    setting: Detectors, learners: list[Callable[..., Ranked]], runs: int, seed: int, known: int = 100, like: float = 1.0
) -> list[dict[str, tuple[Estimate, Estimate]]]:
    """(FDR, power) of bh and storey behind each learner, on the same documents; `like` scales the known members."""
    rng, m1 = np.random.default_rng(seed), setting.members
    shown = Detectors(1, known, 1.0, setting.alpha, tuple(like * s for s in setting.shifts), setting.correlation)
    values: list[dict[str, list[tuple[float, float]]]] = [{"bh": [], "storey": []} for _ in learners]
    for _ in range(runs):
        calibration, audit = setting.draw(rng)
        seen = shown.draw(rng)[1]
        for learner, kept in zip(learners, values, strict=True):
            k, n = learner(calibration, audit, ALPHA, *([seen] if learner is known_members else []))
            for procedure, pairs in kept.items():
                chosen = k <= decide(procedure, RankCounts.of(k, n), setting.level).rank
                pairs.append((chosen[m1:].sum() / max(1, chosen.sum()), chosen[:m1].sum() / max(1, m1)))
    return [{p: (Estimate.of([a for a, _ in v]), Estimate.of([b for _, b in v])) for p, v in k.items()} for k in values]


FEW = Detectors(200, 300, 0.1, "0.1", (2.5, 2.0, 1.5, 1.0, 0.5))
MANY = Detectors(200, 300, 0.5, "0.1", (2.0, 1.7, 1.4, 1.1, 0.8))


def apart(better: Estimate, worse: Estimate) -> bool:
    return better.mean > worse.mean + 4 * math.hypot(better.se, worse.se)


def test_known_members_let_adadetect_find_more_than_the_best_detector_and_than_half_of_the_documents() -> None:
    """Figures of 500 other audits, with a standard error of .015 for the rarer members and .012 else."""
    single, known = compared(FEW, [best_single, known_members], runs=200, seed=44)
    assert near(known["bh"][1], 0.485, 0.015)
    assert near(known["storey"][1], 0.500, 0.015)
    assert near(single["bh"][1], 0.254, 0.015)
    assert apart(known["bh"][1], single["bh"][1])
    (halves,) = compared(FEW, [adadetect], runs=12, seed=44)
    assert apart(known["bh"][1], halves["bh"][1])
    (thirty,) = compared(FEW, [known_members], runs=150, seed=45, known=30)
    assert near(thirty["bh"][1], 0.458, 0.015)
    assert apart(thirty["bh"][1], single["bh"][1])
    for fdr, _ in (known["bh"], thirty["bh"]):
        assert fdr.mean <= FEW.bound + 4 * fdr.se


def test_storey_behind_a_learnt_score_finds_more_and_keeps_alpha() -> None:
    """Figures of 500 other audits, with a standard error of at most .011."""
    results = compared(MANY, [adadetect, reconformal, known_members], runs=60, seed=46)
    for result, (plain, storey) in zip(results, [(0.387, 0.588), (0.375, 0.616), (0.595, 0.764)], strict=True):
        assert near(result["bh"][1], plain, 0.011)
        assert near(result["storey"][1], storey, 0.011)
        assert apart(result["storey"][1], result["bh"][1])
        assert result["bh"][0].mean <= MANY.bound + 4 * result["bh"][0].se
        assert result["storey"][0].mean <= 0.1 + 4 * result["storey"][0].se


@pytest.mark.parametrize(
    ("known", "like"), [(100, 1.0), (100, -1.0), (1, 0.0)], ids=["like the hidden", "the other way", "one like nulls"]
)
def test_adadetect_keeps_alpha_without_any_member_whatever_the_known_members_are(known: int, like: float) -> None:
    setting = Detectors(100, 60, 0.0, "0.2", MANY.shifts)
    (result,) = compared(setting, [known_members], runs=250, seed=47, known=known, like=like)
    for fdr, _ in result.values():
        assert fdr.mean <= 0.2 + 4 * fdr.se
