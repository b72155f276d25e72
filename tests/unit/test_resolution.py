"""What is said of how small a selection can be, held against every outcome that there is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused_selections import verdict_of
from test_plan import outlook

import seenset
from pipeline.audit.diagnostics import diagnose_scores
from pipeline.selection.calibrations import simes_grid, smallest_simes
from pipeline.selection.conformal import Grid, RankCounts, halves
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.record import Rule, decide
from pipeline.selection.ranked import factor_at, fewest_at_best, fewest_selectable, known_needed
from pipeline.selection.step_up import dependence_factor, minimum_selectable

ALPHAS = [Fraction(1, 10), Fraction(1, 4), Fraction(1, 2)]
HALF = Fraction(1, 2)
DELTA = Fraction(1, 10)
PLUGINS = {"bh", "by", "ebh", "storey", "bky", "quantile", "ptdi", "kernel"}


def outcomes(ranks: int, m: int) -> Iterator[np.ndarray]:
    """Every way in which m documents can spread over the ranks."""
    for cuts in itertools.combinations(range(m + ranks - 1), ranks - 1):
        yield np.diff([-1, *cuts, m + ranks - 1]) - 1


@pytest.mark.parametrize("alpha", ALPHAS, ids=str)
@pytest.mark.parametrize("delta", [None, DELTA], ids=["pooled", "conditional"])
@pytest.mark.parametrize("procedure", sorted(PLUGINS & set(PROCEDURES)))
def test_no_outcome_selects_fewer_than_is_said(procedure: str, delta: Fraction | None, alpha: Fraction) -> None:
    for n, m in ((4, 4), (6, 3), (3, 6), (9, 2)):
        grid = Grid.uniform(n) if delta is None else simes_grid(n, delta)
        rule = Rule(PROCEDURES[procedure], alpha, delta)
        sizes = set()
        for counts in outcomes(n + 1, m):
            decision = decide(procedure, RankCounts(counts, grid), alpha)
            share = float(decision.factor) if procedure == "storey" else decision.null_proportion
            if decision.n_selected:
                sizes.add(decision.n_selected)
                assert decision.n_selected >= fewest_selectable(rule, n, m, decision.factor)
                for at in (HALF, Fraction(1)):
                    if share >= at:
                        assert decision.n_selected >= fewest_selectable(rule, n, m, factor_at(rule, m, at))
        assert min(sizes, default=m + 1) >= min(m + 1, fewest_at_best(rule, n, m))
        if procedure in ("bh", "by", "ebh"):
            assert min(sizes, default=m + 1) == min(m + 1, fewest_selectable(rule, n, m))


def test_storey_selects_fewer_than_the_figure_of_a_share_of_1_so_that_figure_is_no_limit() -> None:
    """It was told as one: that nothing can be selected unless at least 50 stand out, where 25 were selected."""
    rule, n, m, alpha = Rule(PROCEDURES["storey"], Fraction(1, 10)), 199, 1_000, Fraction(1, 10)
    assert fewest_selectable(rule, n, m) == 50
    counts = np.zeros(n + 1, dtype=np.int64)
    counts[[0, 98, 150]] = 25, 875, 100
    decision = decide("storey", RankCounts(counts), alpha, lambda_=HALF)
    assert decision.n_selected == 25
    assert fewest_at_best(rule, n, m) == 1


@given(st.integers(1, 3_000), st.sampled_from(["0.1", "0.001", "0.9"]))
def test_the_smallest_conditional_p_value_is_that_of_the_grid(n: int, delta: str) -> None:
    assert smallest_simes(n, Fraction(delta)) == simes_grid(n, Fraction(delta)).p(1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.sampled_from(ALPHAS), st.sampled_from([None, DELTA]), st.booleans())
def test_the_documents_that_suffice_are_the_first_that_do(
    m: int, selectable: int, alpha: Fraction, delta: Fraction | None, halved: bool
) -> None:
    for procedure in ("bh", "storey"):
        rule = Rule(PROCEDURES[procedure], alpha, delta, halved)

        def fewest(known: int, rule: Rule = rule) -> int:
            n = known - known // 2 if rule.halved else known
            grid = Grid.uniform(n) if rule.delta is None else simes_grid(n, rule.delta)
            return minimum_selectable(grid, m, rule.alpha)

        first = next(known for known in itertools.count(1) if fewest(known) <= selectable)
        assert known_needed(rule, m, selectable) == first


@pytest.mark.parametrize(
    "settings", [{"calibration": "conditional", "alpha": 1e-25}, {"procedure": "ebh", "alpha": 1e-7}]
)
def test_a_very_small_alpha_gets_an_answer(settings: dict[str, Any]) -> None:
    """The search for a sufficient number of calibration documents had no end, or counted over hundreds of millions."""
    assert seenset.select([9.0, 9.0, 1.5], unseen=[1.0, 2.0, 3.0], **settings).summary.n_selected == 0


@pytest.mark.parametrize("delta", [None, DELTA], ids=["pooled", "conditional"])
def test_ebh_takes_as_many_as_its_factor_at_that_number_asks_for(delta: Fraction | None) -> None:
    """The factor grows with the calibration documents: that of the documents at hand asks for too few."""
    rule, m = Rule(PROCEDURES["ebh"], Fraction(1, 10), delta), 1_000
    known = known_needed(rule, m, 10, factor=Fraction(1))
    fewest = []
    for n in (known - 1, known):
        grid = Grid.uniform(n) if delta is None else simes_grid(n, delta)
        fewest.append(minimum_selectable(grid, m, rule.alpha, dependence_factor(grid, m, rule.alpha)))
    assert fewest == [11, 10]


def test_a_plan_with_conditional_p_values_counts_what_they_take(tmp_path: Path) -> None:
    """It said that 999 suffice."""
    planned = outlook(tmp_path, known=1_000, calibration="conditional", alpha=0.1)
    (taken,) = re.findall(r"\. With ([\d,]+) unseen documents as few", planned["sentence"])
    needed = int(taken.replace(",", ""))
    assert 4_000 < needed < 5_000
    for known, enough in ((needed, True), (needed - 1, False)):
        assert (minimum_selectable(simes_grid(known, DELTA), 200, Fraction(1, 10)) <= 2) == enough


FUSED: list[dict[str, Any]] = [
    {"procedure": "adadetect", "detectors": ["loss", "zlib"]},
    {"procedure": "td4eval", "detectors": ["loss", "zlib"], "reconformal": True},
]


@pytest.mark.parametrize("selection", FUSED, ids=["adadetect", "reconformal"])
def test_where_half_of_the_documents_calibrate_the_plan_and_the_answer_count_that_half(
    tmp_path: Path, selection: dict[str, Any]
) -> None:
    planned = outlook(tmp_path, known=100, **selection)
    assert planned["sentence"].startswith(
        "With 50 unseen documents to calibrate on, half of those that are known, and 200 to judge, the shortest "
        "possible list has 40 documents."
    )
    assert (
        "With 1,997 unseen documents, half of which calibrate, as few as 1% of the audited documents can"
        in planned["sentence"]
    )
    rng = np.random.default_rng(0)
    settings = {key: value for key, value in selection.items() if key != "detectors"}
    answer = verdict_of(rng.normal(size=(100, 2)), rng.normal(size=(200, 2)), **settings).answer
    assert diagnose_scores(answer, "unseen").resolution.sentence == planned["sentence"]


def test_with_the_documents_that_suffice_reconformal_can_select_one_in_a_hundred() -> None:
    """As few as 2 of 200 by 1,997 known documents, of which 999 calibrate; with two fewer they would have to be 3."""
    for known, selected in ((1_997, 2), (1_995, 0)):
        reference = halves(np.arange(known), 0)  # and its best are the best of all: no ties at the first rank
        values = np.stack([np.arange(known) + 1e5 * reference] * 2, axis=1)
        audit = np.full((200, 2), -1.0)
        audit[:2] = 1e6
        verdict = verdict_of(values, audit, procedure="td4eval", reconformal=True, alpha=0.1)
        assert verdict.selected.sum() == selected


@pytest.mark.parametrize("m", [10, 40, 200])
def test_with_the_documents_that_suffice_td4eval_can_select_as_few_although_its_p_values_are_rounded_up(m: int) -> None:
    fewest = max(1, m // 100)
    known = known_needed(Rule(PROCEDURES["td4eval"], Fraction(1, 10)), m, fewest)
    for detectors in (2, 3):
        values = np.stack([np.arange(known, dtype=float)] * detectors, axis=1)
        audit = np.full((m, detectors), -1.0)
        audit[:fewest] = 1e6
        verdict = verdict_of(values, audit, procedure="td4eval", alpha=0.1)
        assert verdict.selected.sum() == fewest


def test_an_answer_says_of_which_share_of_nulls_its_figures_are() -> None:
    rng = np.random.default_rng(1)
    audit = np.concatenate([rng.normal(size=(100, 1)), rng.normal(3.0, size=(100, 1))])
    answer = verdict_of(rng.normal(size=(100, 1)), audit, procedure="storey").answer
    resolution = diagnose_scores(answer, "unseen").resolution
    assert f"at an estimated null share of {answer.factor:.3g}, the shortest" in resolution.sentence
    assert resolution.minimum_selectable == minimum_selectable(100, 200, Fraction(1, 10), Fraction(repr(answer.factor)))
    plain = diagnose_scores(verdict_of(rng.normal(size=(100, 1)), audit, procedure="bh").answer, "unseen").resolution
    assert "share of nulls" not in plain.sentence


def test_the_plan_of_a_procedure_that_estimates_the_nulls_says_what_holds_at_a_share_of_1_and_at_best(
    tmp_path: Path,
) -> None:
    planned = outlook(tmp_path, procedure="storey")
    assert (
        "the length of the shortest possible list depends on the estimated null share: 20 at a share of 1, 10 at 0.5, "
        "never fewer than 1. With 999 unseen documents as few as 1% of the audited documents can be selected; fewer "
        "suffice if part of the audited documents were trained on." in planned["sentence"]
    )
    assert (planned["minimum_selectable"], planned["minimum_at_best"], planned["ok"]) == (20, 1, None)
    assert "null share" not in outlook(tmp_path, procedure="bh")["sentence"]
    few = outlook(tmp_path, known=5, procedure="storey")
    assert few["minimum_selectable"] > 200
    assert few["ok"] is None, "an estimate can be as small as it takes"


def test_a_knockoff_selection_says_nothing_of_calibration_documents() -> None:
    rng = np.random.default_rng(2)
    answer = verdict_of(rng.normal(size=(40, 1)), rng.normal(size=(120, 1)), procedure="ktd", alpha=0.2).answer
    resolution = diagnose_scores(answer, "unseen").resolution
    assert resolution.sentence == "The shortest possible list of the knockoff filter has 5 documents."
    assert resolution.calibration_for_1_percent is None


def test_one_detector_in_td4eval_takes_no_more_documents_than_bh(tmp_path: Path) -> None:
    plain, fused = (outlook(tmp_path, procedure=procedure) for procedure in ("bh", "td4eval"))
    assert fused["sentence"] == plain["sentence"]
