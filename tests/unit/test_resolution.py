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
from made_up import write_corpus
from test_fused_selections import verdict_of

import seenset
from pipeline.audit.description import build_config
from pipeline.audit.diagnostics import diagnose_scores
from pipeline.audit.forecast import forecast
from pipeline.audit.plan import describe_model, make_plan
from pipeline.config.models import ModelConfig
from pipeline.selection.calibrations import simes_grid, smallest_simes
from pipeline.selection.conformal import Grid
from pipeline.selection.evalues import dependence_factor
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.record import Rule, decide
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.ranked import factor_at, fewest_at_best, fewest_selectable, known_needed
from pipeline.selection.step_up import minimum_selectable
from ray_jobs.terminal import print_plan

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
@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.sampled_from(ALPHAS),
    st.sampled_from([None, DELTA]),
    st.booleans(),
    st.fractions(Fraction(1, 20), Fraction(3, 2), max_denominator=40),
)
def test_the_documents_that_suffice_are_the_first_that_do(
    m: int, selectable: int, alpha: Fraction, delta: Fraction | None, halved: bool, pi0: Fraction
) -> None:
    for procedure in ("bh", "storey"):
        rule = Rule(PROCEDURES[procedure], alpha, delta, halved)

        def fewest(known: int, rule: Rule = rule) -> int:
            n = known - known // 2 if rule.halved else known
            grid = Grid.uniform(n) if rule.delta is None else simes_grid(n, rule.delta)
            return minimum_selectable(grid, m, rule.alpha, pi0)

        first = next(known for known in itertools.count(1) if fewest(known) <= selectable)
        assert known_needed(rule, m, selectable, pi0) == first


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


# --- what a plan states


def outlook(tmp_path: Path, known: int | None = 100, audited: int = 200, **selection: Any) -> dict[str, Any]:
    rows = {
        role: [{"text": f"{role} {i}", "group": "a"} for i in range(count)]
        for role, count in (("audit", audited), ("unseen", known))
        if count is not None
    }
    corpus = write_corpus(tmp_path, rows, group="group")
    signed = selection.get("procedure") == "ktd"
    asked = {"name": "a", "detectors": ["min_k_plus_plus" if signed else "loss"], "alpha": 0.1, **selection}
    config = build_config({"run": "run", "model": {"path": "m"}, "corpus": corpus, "selections": [asked]})
    found: dict[str, Any] = forecast(make_plan(config), {"dtype": "float32"})["selections"][0]
    return found


@pytest.mark.parametrize(
    ("selection", "fewest"),
    [
        ({"procedure": "bh"}, 20),  # 200 / (.1 * 101) = 19.8
        ({"procedure": "by"}, 117),  # times 1 + 1/2 + ... + 1/200 = 5.878
        ({"procedure": "adadetect", "detectors": ["loss", "zlib"]}, 40),  # 50 of the 100 calibrate
        ({"procedure": "ktd"}, 10),  # 1 / q
    ],
)
def test_the_fewest_that_can_be_selected_are_those_of_the_procedure(
    tmp_path: Path, selection: dict[str, Any], fewest: int
) -> None:
    assert outlook(tmp_path, **selection)["minimum_selectable"] == fewest


def test_dependence_and_conditioning_cost_what_they_cost_in_the_selection(tmp_path: Path) -> None:
    plain = outlook(tmp_path, procedure="bh")["minimum_selectable"]
    ebh = outlook(tmp_path, procedure="ebh")["minimum_selectable"]
    assert plain < ebh <= outlook(tmp_path, procedure="by")["minimum_selectable"]
    assert outlook(tmp_path, calibration="conditional")["minimum_selectable"] > plain


def warnings_of(outlook: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a printed plan that warn."""
    facts = {
        "model": {"path": "m", "architecture": "LlamaForCausalLM", "dtype": "float32"},
        "roles": {},
        "limit": None,
        "passes": [],
        "adapters": [],
        "detectors": ["loss"],
        "estimated_seconds_one_worker": None,
        "endpoint": None,
        "checks": {"scope": "all 1,200 documents", "lines": []},
        "selections": [outlook],
    }
    print_plan(facts)
    return [line for line in capsys.readouterr().out.splitlines() if "warning" in line]


def test_an_ordinary_audit_is_planned_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = outlook(tmp_path, procedure="bh")
    assert usual["minimum_selectable"] == 20
    assert usual["ok"] is None, "10% of the audited documents: a number to know"
    assert "With 999 unseen documents as few as 1% of the audited documents can be selected." in usual["sentence"]
    assert warnings_of(usual, capsys) == []
    assert outlook(tmp_path, known=1000, procedure="bh")["ok"] is True


def test_an_audit_that_cannot_select_anything_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = outlook(tmp_path, known=5, procedure="bh")
    assert hopeless["ok"] is False
    (line,) = warnings_of(hopeless, capsys)
    assert (
        "warning: With 5 unseen documents to calibrate on and 200 to judge, nothing can be selected: the shortest "
        "possible list would have" in line
    )


def test_a_knockoff_selection_is_planned_without_unseen_documents(tmp_path: Path) -> None:
    found = outlook(tmp_path, known=None, procedure="ktd")
    assert found["ok"]
    assert "list of the knockoff filter has 10 documents." in found["sentence"]
    beyond = outlook(tmp_path, known=None, procedure="ktd", alpha=0.001)
    assert not beyond["ok"]
    assert "has 1,000 documents and only 200 are audited, so nothing can be selected" in beyond["sentence"]


def test_the_time_is_a_guess_from_the_number_of_parameters(tmp_path: Path, tiny_model_folder: Path) -> None:
    about = describe_model(ModelConfig(path=str(tiny_model_folder)))
    corpus = write_corpus(tmp_path, {"audit": [f"some words {i}" for i in range(50)]})
    described = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": corpus}
    plan = make_plan(build_config({**described, "detectors": ["loss"]}))
    small, large = (forecast(plan, {**about, "parameters": parameters}) for parameters in (10**6, 10**9))
    assert small["estimated_seconds_one_worker"] > 0
    assert large["estimated_seconds_one_worker"] > 20 * small["estimated_seconds_one_worker"]
    assert small["estimated_from"] == "a matrix product on it"
    unknown = forecast(plan, {**about, "parameters": None})
    assert unknown["estimated_seconds_one_worker"] is None
    assert unknown["estimated_from"] is None
