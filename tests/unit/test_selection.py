"""Claims about ranks, estimators of pi0 and step-up selection that hold for every input, not on average."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from benchmarks.selection import count_procedures
from pipeline.errors import UserError
from pipeline.selection.conformal import calibrate, p_values, ranks
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.estimating import MAX_BANDWIDTH, MIN_BANDWIDTH, bandwidth, jkbb, storey, strict
from pipeline.selection.procedures.record import decide
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.step_up import EXACT_HARMONIC, harmonic_bound, minimum_selectable, step_up

GOLDEN = RankCounts.of(np.array([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 70, 80, 90, 99]), 99)
TENTH = Fraction(1, 10)


@pytest.mark.parametrize(
    ("gamma", "b", "pi0"),
    [(2.0, 0.651295193831284, 0.738858766315621), (3.0, 0.537783599642014, 0.750142983934607)],
)
def test_jkbb_gives_the_golden_values(gamma: float, b: float, pi0: float) -> None:
    estimate = jkbb(GOLDEN, gamma)
    assert estimate.c == pytest.approx(0.523853633246022, rel=1e-12)
    assert estimate.bandwidth == pytest.approx(b, rel=1e-12)
    assert estimate.pi0 == pytest.approx(pi0, rel=1e-12)
    assert estimate.unclipped == estimate.pi0


def test_bh_and_storey_decide_as_the_golden_values_say() -> None:
    decision = decide("bh", GOLDEN, Fraction("0.2"))
    assert (decision.n_selected, decision.rank, decision.threshold) == (6, 8, 0.08), "an exact tie"
    assert decide("bh", GOLDEN, Fraction("0.2") - Fraction(1, 10**30)).n_selected < 6
    assert storey(GOLDEN) == Fraction(14, 15)


def test_resolution_gives_the_figures_of_the_methods_page() -> None:
    assert minimum_selectable(1000, 10**6, TENTH) == 9_991
    assert minimum_selectable(10**5, 10**6, TENTH) == 100


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    st.lists(st.integers(-5, 5), min_size=1, max_size=30),
)
def test_ranks_count_calibration_documents_at_least_as_extreme(unseen: list[int], audit: list[int]) -> None:
    calibration = calibrate(np.array(unseen))
    members = ranks(np.array(audit), calibration, "members")
    clean = ranks(np.array(audit), calibration, "clean")
    assert members.tolist() == [1 + sum(s >= a for s in unseen) for a in audit]
    assert clean.tolist() == [1 + sum(s <= a for s in unseen) for a in audit]
    assert members.dtype == np.int64
    n = len(unseen)
    assert p_values(members, n).tolist() == [k / (n + 1) for k in members.tolist()]


def test_calibration_does_not_change_the_scores_that_it_is_given() -> None:
    scores = np.array([2.0, 1.0])
    assert calibrate(scores).tolist() == [1.0, 2.0]
    assert scores.tolist() == [2.0, 1.0]


def test_scores_that_cannot_be_ranked_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="no calibration documents"):
        calibrate(np.array([]))
    with pytest.raises(UserError, match="1 of 2 calibration scores are NaN"):
        calibrate(np.array([0.0, math.nan]))
    with pytest.raises(UserError, match="1 of 3 audit scores are NaN"):
        ranks(np.array([0.0, math.nan, 1.0]), calibrate(np.array([0.0])), "members")


# ---------------------------------------------------------------- summaries


def test_counts_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        RankCounts.empty(3) + RankCounts.empty(4)
    for outside in (0, 5):
        with pytest.raises(ValueError, match=r"1\.\.4"):
            RankCounts.of(np.array([outside]), 3)
    for bad in (np.array([1, -1]), np.array([0.5, 1.0]), np.array([1]), np.array([[1, 2]])):
        with pytest.raises(ValueError, match="counts must"):
            RankCounts(bad)
    with pytest.raises(ValueError, match="negative"):
        GOLDEN.with_quarantined(-1)


def test_counts_cannot_be_changed_from_outside() -> None:
    source = np.array([1, 2, 3])
    for counts in (RankCounts(source), pickle.loads(pickle.dumps(RankCounts(source)))):
        source[0] = 9
        assert counts.counts.tolist() == [1, 2, 3]
        source[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        RankCounts(source).counts[0] = 9


def test_quarantined_documents_are_hypotheses_at_p_one() -> None:
    more = GOLDEN.with_quarantined(7)
    assert (more.m, GOLDEN.m) == (22, 15)
    assert (more.counts - GOLDEN.counts).tolist() == [0] * 99 + [7]
    # m k <= alpha (n + 1) R_k: 22 * 8 > 20 * 6 and 22 * 5 > 20 * 5, but 22 * 3 <= 20 * 4
    assert [decide("bh", counts, Fraction("0.2")).n_selected for counts in (GOLDEN, more)] == [6, 4]


# ---------------------------------------------------------------- step-up


def test_a_tie_is_kept_and_one_document_less_is_not_where_floats_cannot_tell() -> None:
    m, tie = 10**18, 10**17  # m * 1 = alpha (n + 1) * tie at alpha = 1/10, n = 99, rank 1
    assert float(tie - 1) == float(tie)
    for selected, k in ((tie, 1), (tie - 1, 0)):
        counts = RankCounts(np.array([selected] + [0] * 98 + [m - selected]))
        assert step_up(counts, TENTH) == k


@pytest.mark.parametrize("procedure", count_procedures())
def test_nulls_at_p_one_alone_select_nothing_and_signal_alone_selects_everything(procedure: str) -> None:
    decision = decide(procedure, RankCounts.of(np.full(50, 100), 99), TENTH)
    assert (decision.rank, decision.n_selected, decision.threshold) == (0, 0, None)
    assert decision.null_proportion == 1.0
    assert decide(procedure, RankCounts.of(np.full(50, 1), 99), TENTH).n_selected == 50


# ---------------------------------------------------------------- null proportion


@given(st.integers(1, 60), st.data())
def test_jkbb_is_the_jackknife_of_its_kernel(n: int, data: st.DataObject) -> None:
    found = data.draw(st.lists(st.integers(1, n + 1), min_size=1, max_size=40))
    m, p = len(found), [k / (n + 1) for k in found]
    assume(min(found) <= n)
    estimate = jkbb(RankCounts.of(np.array(found), n))
    b = estimate.bandwidth
    f = {h: sum((1 / h + 1) * x ** (1 / h) for x in p) / m for h in (b, 2 * b)}
    assert estimate.c == pytest.approx(-m / sum(math.log(x) for x in p), rel=1e-12)
    assert estimate.unclipped == pytest.approx(2 * f[b] - f[2 * b], rel=1e-9, abs=1e-9)
    assert estimate.pi0 == min(1.0, max(1 / m, estimate.unclipped))


@pytest.mark.parametrize("gamma", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("c", [0.3, 0.6, 2.0])
def test_the_bandwidth_minimises_the_mean_squared_error_of_the_kernel_estimate(gamma: float, c: float) -> None:
    m = 10**12  # so that b is small and the error is its leading terms

    def kernel(t: float, b: float) -> float:
        return (1 / b + 1) * t ** (1 / b)

    def jackknifed(t: float, b: float) -> float:
        return (gamma * kernel(t, b) - kernel(t, gamma * b)) / (gamma - 1)

    def moment(power: int, b: float) -> float:  # of the jackknifed kernel under f(t) = c t^(c - 1), t = exp(-b u)
        def integrand(u: float) -> float:
            return jackknifed(math.exp(-b * u), b) ** power * c * math.exp(-b * u * c) * b

        return quad(integrand, 0, 60 * gamma, epsabs=0, epsrel=1e-12, limit=200)[0]

    def error(log_b: float) -> float:
        b = math.exp(log_b)
        return (moment(1, b) - c) ** 2 + moment(2, b) / m

    best = minimize_scalar(error, bounds=(math.log(1e-4), 0.0), method="bounded", options={"xatol": 1e-6})
    assert bandwidth(c, m, gamma) == pytest.approx(math.exp(best.x), rel=0.05)


def test_an_estimate_at_the_edge_of_what_it_can_be_is_clipped_and_divides_by_nothing() -> None:
    assert bandwidth(1.0, 1000, 2.0) == MAX_BANDWIDTH, "of a flat density"
    assert bandwidth(math.nextafter(1.0, 2.0), 1000, 2.0) == MAX_BANDWIDTH
    all_at_one = jkbb(RankCounts.of(np.full(20, 10), 9))
    assert (all_at_one.pi0, all_at_one.bandwidth, all_at_one.c) == (1.0, MIN_BANDWIDTH, math.inf)
    all_small = jkbb(RankCounts.of(np.full(20, 1), 999))
    assert all_small.unclipped < 1 / 20 == all_small.pi0, "one document at least"


def test_storey_is_reported_at_most_one_but_decides_uncapped() -> None:
    counts = RankCounts.of(np.array([1, 1, 9, 9, 9, 9, 10, 10]), 9)
    assert storey(counts) == Fraction(7 * 10, 8 * 5)
    decision = decide("storey", counts, Fraction(2, 5))
    assert decision.null_proportion == 1.0
    assert decision.details["null_proportion_unclipped"] == 1.75
    assert decision.n_selected == 0  # capped at 1 the two would be selected:
    assert counts.at_most(step_up(counts, Fraction(2, 5))) == 2


@pytest.mark.parametrize("m", [1, 2, 128, 129, 130, 1000, 3000])
def test_the_harmonic_bound_is_never_below_the_sum_and_never_far_above(m: int) -> None:
    exact = sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0))
    bound = harmonic_bound(m)
    assert exact <= bound <= exact * (1 + Fraction(1, 10**14))
    assert (bound == exact) == (m <= EXACT_HARMONIC)


def test_strict_is_storey_for_what_holds_only_in_the_limit_and_itself_otherwise() -> None:
    for procedure in count_procedures():
        finite = PROCEDURES[procedure].terms.guarantee == "finite-sample"
        decision = decide(procedure, GOLDEN, TENTH)
        answer = strict(decision, GOLDEN)
        assert answer.guarantee == "finite-sample"
        assert answer == (decision if finite else decide("storey", GOLDEN, TENTH))


def test_a_procedure_is_the_same_record_in_another_process() -> None:
    for procedure in PROCEDURES.values():
        assert pickle.loads(pickle.dumps(procedure)) is procedure


def test_every_procedure_says_what_it_promises() -> None:
    for procedure in (*count_procedures(), "known_members"):
        decision, terms = decide(procedure, GOLDEN, TENTH, known_members=GOLDEN), PROCEDURES[procedure].terms
        assert (decision.assumption, decision.promise) == (terms.assumption, terms.promise)
        for word in (
            "expected share of wrong documents",
            "average over repetitions",
            "exchangeable",
            "one list",
        ):
            assert word in f"{terms.promise} {terms.assumption}"


def test_what_cannot_be_decided_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="did you mean 'storey'"):
        decide("story", GOLDEN, TENTH)
    with pytest.raises(UserError, match="no audit documents"):
        decide("bh", RankCounts.empty(9), TENTH)
