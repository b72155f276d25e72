"""Claims about ranks, estimators of pi0 and step-up selection that hold for every input, not on average."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from statsmodels.stats.multitest import multipletests

from benchmarks.selection import count_procedures
from pipeline.errors import UserError
from pipeline.selection.conformal import RankCounts, calibrate, p_values, ranks
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.bh import BH
from pipeline.selection.procedures.estimating import MAX_BANDWIDTH, MIN_BANDWIDTH, bandwidth, jkbb, storey, strict
from pipeline.selection.procedures.record import Rule, decide
from pipeline.selection.ranked import known_needed
from pipeline.selection.step_up import EXACT_HARMONIC, harmonic_bound, minimum_selectable, step_up

GOLDEN = RankCounts.of(np.array([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 70, 80, 90, 99]), 99)
TENTH = Fraction(1, 10)

alphas = st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=100)
null_proportions = st.fractions(Fraction(1, 20), Fraction(3, 2), max_denominator=40)


@st.composite
def audits(draw: st.DrawFn) -> tuple[list[int], int]:
    """Ranks of an audit and n: few distinct ranks, so that ties within p and at the boundary are the rule."""
    n = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(1, n + 1), min_size=1, max_size=40)), n


def brute_force(found: list[int], n: int, alpha: Fraction, pi0: Fraction) -> int:
    """How many the textbook step-up rule selects, on sorted p-values in exact rationals."""
    p = sorted(Fraction(k, n + 1) for k in found)
    return max((i for i in range(1, len(p) + 1) if p[i - 1] * pi0 * len(p) <= alpha * i), default=0)


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


def test_bh_selects_the_golden_document_on_an_exact_tie() -> None:
    decision = decide("bh", GOLDEN, Fraction("0.2"))
    assert (decision.n_selected, decision.rank, decision.threshold) == (6, 8, 0.08)
    assert decide("bh", GOLDEN, Fraction("0.2") - Fraction(1, 10**30)).n_selected < 6


def test_storey_gives_the_golden_value_exactly() -> None:
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


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30), st.lists(st.integers(-5, 5), max_size=30))
def test_the_clean_direction_is_the_members_direction_of_negated_scores(seen: list[int], audit: list[int]) -> None:
    clean = ranks(np.array(audit, dtype=float), calibrate(np.array(seen)), "clean")
    mirrored = ranks(-np.array(audit, dtype=float), calibrate(-np.array(seen)), "members")
    assert clean.tolist() == mirrored.tolist()


def test_each_direction_selects_its_own_end_of_the_scores() -> None:
    calibration = calibrate(np.linspace(-1, 1, 99))
    audit = np.concatenate([np.full(20, 9.0), np.zeros(20), np.full(20, -9.0)])
    for direction, chosen in (("members", slice(0, 20)), ("clean", slice(40, 60))):
        found = ranks(audit, calibration, direction)  # type: ignore[arg-type]
        decision = decide("bh", RankCounts.of(found, 99), TENTH)
        assert np.flatnonzero(found <= decision.rank).tolist() == list(range(60))[chosen]


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


@given(audits(), st.randoms(use_true_random=False))
def test_counts_merge_to_the_same_in_any_order_and_grouping(audit: tuple[list[int], int], random: object) -> None:
    found, n = audit
    shards = [found[i::4] for i in range(4)]
    parts = [RankCounts.of(np.array(shard, dtype=np.int64), n) for shard in shards]
    random.shuffle(parts)  # type: ignore[attr-defined]
    whole = RankCounts.of(np.array(found), n)
    for merged in (reduce(add, parts, RankCounts.empty(n)), (parts[0] + parts[1]) + (parts[2] + parts[3])):
        assert merged.counts.tolist() == whole.counts.tolist()
        assert [decide(p, merged, TENTH) for p in count_procedures()] == [
            decide(p, whole, TENTH) for p in count_procedures()
        ]
    assert whole.counts.tolist() == [found.count(k) for k in range(1, n + 2)]
    assert (whole.n, whole.m) == (n, len(found))


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


@given(audits(), alphas)
def test_every_procedure_is_step_up_at_its_own_null_proportion(audit: tuple[list[int], int], alpha: Fraction) -> None:
    found, n = audit
    counts, m = RankCounts.of(np.array(found), n), len(found)
    start = (n + 2) // 2
    above = sum(k >= start for k in found)
    pi0 = {
        "bh": Fraction(1),
        "by": sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0)),
        "storey": Fraction((1 + above) * (n + 1), m * (n + 1 - start)),
        "ptdi": Fraction(jkbb(counts).pi0),
    }  # the others: test_procedures.py
    for procedure, value in pi0.items():
        decision = decide(procedure, counts, alpha)
        assert decision.n_selected == brute_force(found, n, alpha, value) == counts.at_most(decision.rank)
        assert decision.threshold == (decision.rank / (n + 1) if decision.n_selected else None)
        assert all(math.isfinite(detail) for detail in decision.details.values())


@given(audits(), alphas, st.sampled_from([("bh", "fdr_bh"), ("by", "fdr_by")]))
def test_bh_and_by_agree_with_statsmodels_away_from_ties(
    audit: tuple[list[int], int], alpha: Fraction, names: tuple[str, str]
) -> None:
    found, n = audit
    m = len(found)
    level = alpha if names[0] == "bh" else alpha / harmonic_bound(m)
    assume(all(level * (n + 1) * i / (m * k) != 1 for i in range(1, m + 1) for k in found))
    rejected, *_ = multipletests(p_values(np.array(found), n), float(alpha), names[1])
    assert decide(names[0], RankCounts.of(np.array(found), n), alpha).n_selected == rejected.sum()


def test_a_tie_is_kept_and_one_document_less_is_not_where_floats_cannot_tell() -> None:
    m, tie = 10**18, 10**17  # m * 1 = alpha (n + 1) * tie at alpha = 1/10, n = 99, rank 1
    assert float(tie - 1) == float(tie)
    for selected, k in ((tie, 1), (tie - 1, 0)):
        counts = RankCounts(np.array([selected] + [0] * 98 + [m - selected]))
        assert step_up(counts, TENTH) == k


@pytest.mark.parametrize("procedure", count_procedures())
def test_nothing_but_nulls_at_p_one_selects_nothing(procedure: str) -> None:
    decision = decide(procedure, RankCounts.of(np.full(50, 100), 99), TENTH)
    assert (decision.rank, decision.n_selected, decision.threshold) == (0, 0, None)
    assert decision.null_proportion == 1.0


@pytest.mark.parametrize("procedure", count_procedures())
def test_nothing_but_signal_at_the_smallest_p_selects_everything(procedure: str) -> None:
    decision = decide(procedure, RankCounts.of(np.full(50, 1), 99), TENTH)
    assert decision.n_selected == 50


def test_one_document_against_one_is_selected_only_where_its_p_allows() -> None:
    first, second = (RankCounts.of(np.array([k]), 1) for k in (1, 2))
    assert [decide("bh", c, Fraction(1, 2)).n_selected for c in (first, second)] == [1, 0]
    assert decide("bh", first, Fraction(49, 100)).n_selected == 0
    assert decide("storey", first, Fraction(99, 100)).n_selected == 0


# ---------------------------------------------------------------- null proportion


@given(audits())
def test_jkbb_is_the_jackknife_of_its_kernel(audit: tuple[list[int], int]) -> None:
    found, n = audit
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


def test_a_flat_density_takes_the_largest_bandwidth_and_divides_by_nothing() -> None:
    assert bandwidth(1.0, 1000, 2.0) == MAX_BANDWIDTH
    assert bandwidth(math.nextafter(1.0, 2.0), 1000, 2.0) == MAX_BANDWIDTH


def test_all_p_at_one_give_a_null_proportion_of_one() -> None:
    estimate = jkbb(RankCounts.of(np.full(20, 10), 9))
    assert (estimate.pi0, estimate.bandwidth, estimate.c) == (1.0, MIN_BANDWIDTH, math.inf)


def test_jkbb_is_clipped_below_at_one_document() -> None:
    estimate = jkbb(RankCounts.of(np.full(20, 1), 999))
    assert estimate.unclipped < 1 / 20 == estimate.pi0


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


@given(st.integers(1, 3000), st.integers(1, 400), alphas, null_proportions)
def test_exactly_the_minimum_can_be_selected_and_one_document_less_cannot(
    n: int, m: int, alpha: Fraction, pi0: Fraction
) -> None:
    assume(pi0 > alpha)  # otherwise documents at p = 1 are selected too
    least = minimum_selectable(n, m, alpha, pi0)
    for selected in {least - 1, least} & set(range(1, m + 1)):
        best = RankCounts.of(np.array([1] * selected + [n + 1] * (m - selected)), n)
        assert (step_up(best, alpha, pi0) > 0) == (selected == least)


@given(st.integers(1, 10**9), alphas, st.integers(1, 10**6), null_proportions)
def test_the_documents_needed_are_the_fewest_that_suffice(
    m: int, alpha: Fraction, selectable: int, pi0: Fraction
) -> None:
    n = known_needed(Rule(BH, alpha), m, selectable, pi0)
    assert n >= 1
    assert minimum_selectable(n, m, alpha, pi0) <= selectable
    assert n == 1 or minimum_selectable(n - 1, m, alpha, pi0) > selectable


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
