"""Claims about the procedures and the exact p-values that they read, for every input."""

import math
import pickle
import re
import time
from fractions import Fraction
from functools import reduce
from itertools import combinations, pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import seenset
from benchmarks.selection import count_procedures
from pipeline.selection.calibrations import pool, simes_grid
from pipeline.selection.conformal import Grid, RankCounts, calibrate, p_values, ranks
from pipeline.selection.guarantees import adapted
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.estimating import bandwidth, default_lambda, jkbb, kernel, slope, storey, strict
from pipeline.selection.procedures.known import known_members, known_scores
from pipeline.selection.procedures.record import Rule, decide
from pipeline.selection.procedures.right_boundary import LAMBDAS, right_boundary
from pipeline.selection.step_up import dependence_factor, harmonic_bound, minimum_selectable, step_up
from pipeline.selection.thresholds import Moments
from tests.helpers.commands import user_error

TENTH = Fraction(1, 10)
alphas = st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=100)
null_proportions = st.fractions(Fraction(1, 20), Fraction(3, 2), max_denominator=40)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Uniform, calibration-conditional, or pooled over groups of few documents each, so that p-values coincide."""
    kind = draw(st.sampled_from(["uniform", "conditional", "groups"]))
    if kind == "groups":
        return pool([Grid.uniform(n) for n in draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))])[0]
    n = draw(st.integers(1, 60))
    return Grid.uniform(n) if kind == "uniform" else simes_grid(n, draw(st.sampled_from([TENTH, Fraction(1, 2)])))


@st.composite
def audits(draw: st.DrawFn) -> tuple[list[int], Grid]:
    """Ranks of an audit over a grid, few distinct, from one document to forty, with all null and all signal."""
    grid = draw(grids())
    kind = draw(st.sampled_from(["mixed", "mixed", "null", "signal"]))
    least = grid.size if kind == "null" else 1
    most = 1 if kind == "signal" else grid.size
    return draw(st.lists(st.integers(least, most), min_size=1, max_size=40)), grid


def p_of(found: list[int], grid: Grid) -> list[Fraction]:
    return sorted(grid.p(k) for k in found)


def textbook(p: list[Fraction], alpha: Fraction) -> int:
    """How many BH selects of sorted p-values in exact rationals."""
    return max((i for i in range(1, len(p) + 1) if p[i - 1] * len(p) <= alpha * i), default=0)


@given(audits(), alphas)
def test_procedures_equal_their_definitions_on_sorted_p_values(audit: tuple[list[int], Grid], alpha: Fraction) -> None:
    found, grid = audit
    counts, p, m = RankCounts.of(np.array(found), grid), p_of(found, grid), len(found)

    for cut in (Fraction(1, 2), Fraction(3, 10), Fraction(4, 5)):
        last = min(max(q for q in part if q < 1) for part in _parts(grid)) if grid.delta is None else cut
        within = min(cut, last)  # a lambda above a group's last p-value but 1 is lowered to it
        t = Fraction(math.ceil(cut * 2**62), 2**62)
        if grid.delta is None:
            t = max(min(q for q in part if q >= within) for part in _parts(grid))
        pi0_storey = Fraction(1 + sum(q >= within for q in p)) / (m * (1 - t))
        assert storey(counts, cut) == pi0_storey
        assert decide("storey", counts, alpha, lambda_=cut).n_selected == textbook(p, alpha / pi0_storey)
    assert default_lambda(grid) == (Fraction(1, 2) if grid.delta is None else Fraction(3, 10))  # these are few
    pi0_storey = storey(counts, default_lambda(grid))

    slopes = [(1 - q) / (m - i) for i, q in enumerate(p)]
    drop = next((i for i in range(1, m) if slopes[i] < slopes[i - 1]), None)
    pi0_slope = Fraction(1) if drop is None or not slopes[drop] else min(Fraction(1), 1 / (m * slopes[drop]))
    assert slope(counts) == pi0_slope

    level = alpha / (1 + alpha)
    first = textbook(p, level)
    two_stages = first if first in (0, m) else textbook(p, level * m / (m - first))
    assert decide("bky", counts, alpha).null_proportion == max(1, m - first) / m

    expected = {
        "bh": textbook(p, alpha),
        "by": textbook(p, alpha / sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0))),
        "ptdi": textbook(p, alpha / Fraction(jkbb(counts).pi0)),
        "storey": textbook(p, alpha / pi0_storey),
        "quantile": textbook(p, alpha / pi0_slope),
        "bky": two_stages,
        "kernel": textbook(p, alpha / Fraction(min(1.0, kernel(counts)))),
    }
    for procedure, selected in expected.items():
        decision = decide(procedure, counts, alpha)
        assert decision.n_selected == selected == counts.at_most(decision.rank), procedure
        assert all((j <= decision.rank) == (grid.p(j) <= decision.largest_p) for j in found), "equal ones share a fate"
        assert decision.largest_p == grid.p(decision.rank)
        assert decision.threshold == (float(decision.largest_p) if selected else None)
        assert decision.n_selected == textbook(p, alpha / decision.factor)
        assert all(math.isfinite(detail) for detail in decision.details.values())


def _parts(grid: Grid) -> list[list[Fraction]]:
    """The p-values of each group's size, without those of equal size twice."""
    sizes = {int(d) for d in np.broadcast_to(grid.denominators, grid.size)}
    return [[Fraction(k, d) for k in range(1, d + 1)] for d in sizes]


def e_value(p: Fraction, grid: Grid, m: int, alpha: Fraction) -> Fraction:
    """The e-value of a p-value, from the definitions in `dependence_factor`."""
    harmonic = sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0))
    factor = dependence_factor(grid, m, alpha)
    if factor < harmonic:
        return 1 / (p * factor) if p * factor <= alpha else Fraction(0)
    j = math.ceil(p * m * harmonic / alpha)
    return Fraction(m) / (alpha * j) if j <= m else Fraction(0)


@given(audits(), alphas)
def test_ebh_is_e_bh_with_valid_e_values_of_the_worst_null(audit: tuple[list[int], Grid], alpha: Fraction) -> None:
    found, grid = audit
    m = len(found)
    p = [grid.p(k) for k in range(grid.size + 1)]
    e = [e_value(q, grid, m, alpha) for q in p[1:]]
    assert all(before >= after for before, after in pairwise(e))
    assert sum((here - before) * value for (before, here), value in zip(pairwise(p), e, strict=True)) <= 1

    counts = RankCounts.of(np.array(found), grid)
    largest = sorted((e[k - 1] for k in found), reverse=True)
    selected = max((r for r in range(1, m + 1) if largest[r - 1] * alpha * r >= m), default=0)
    assert decide("ebh", counts, alpha).n_selected == selected >= decide("by", counts, alpha).n_selected


def test_ebh_pays_less_for_dependence_than_by_in_a_large_audit() -> None:
    factors = {m: float(dependence_factor(Grid.uniform(1_000), m, TENTH)) for m in (10, 100, 10_000, 10**8)}
    assert factors[10] == pytest.approx(sum(1 / j for j in range(1, 11)))  # that of by
    assert factors[100] == factors[10**8] == pytest.approx(sum(1 / j for j in range(1, 27)))  # by: 5.2 and 19
    assert dependence_factor(Grid.uniform(19), 10**8, TENTH) == Fraction(3, 2), "at a tie of 2/20 and alpha both count"
    for n, exact in ((6_950, True), (7_050, False), (10**5, False)):  # 128 ranks, 129 and 1,291
        total, last = Fraction(1), 1
        while (last + 1) * total <= Fraction(n + 1, 10):
            last += 1
            total += Fraction(1, last)
        factor = dependence_factor(Grid.uniform(n), 10**8, TENTH)
        assert total <= factor <= total + Fraction(1, 10**9)
        assert (factor == total) == exact
    at_one, rule = PROCEDURES["ebh"].factor.at_one, Rule(PROCEDURES["ebh"], TENTH)  # counted up to a grid of a million
    assert at_one(rule, 10**6, 10**5) < at_one(rule, 10**6 + 1, 10**5) == harmonic_bound(10**5)


def test_known_members_recovers_the_share_of_a_mixture_exactly() -> None:
    members = np.array([50] + [1] * 50 + [0] * 49)
    audit, known = RankCounts(3 + members), RankCounts(members)  # a null's ranks are uniform
    estimate = known_members(audit, known)
    assert estimate.pi0 == pytest.approx(0.75, rel=1e-12)
    mean = (50 + sum(range(2, 52))) / 100 / 100
    assert estimate.theta == pytest.approx(1 / mean - 1)
    assert decide("known_members", audit, TENTH, known).details["null_proportion_unclipped"] == pytest.approx(0.75)


def test_known_members_that_tell_nothing_give_a_null_proportion_of_one() -> None:
    audit = RankCounts.of(np.array([1, 2, 3, 9]), 9)
    for known in ([1, 9], [10], [5, 6]):  # mean p of one half or more: theta <= 1
        estimate = known_members(audit, RankCounts.of(np.array(known), 9))
        assert (estimate.theta <= 1, estimate.unclipped, estimate.pi0) == (True, 1.0, 1.0)
    below = known_members(RankCounts.of(np.array([1, 1, 1]), 9), RankCounts.of(np.array([2]), 9))
    assert below.unclipped < 0 < below.pi0 == 1.0
    at = known_members(RankCounts.of(np.array([2, 2]), 9), RankCounts.of(np.array([2]), 9))
    assert (at.unclipped, at.pi0) == (0.0, 1.0)
    above = known_members(RankCounts.of(np.array([10]), 9), RankCounts.of(np.array([2]), 9))
    assert above.unclipped > 1 == above.pi0


def test_audited_documents_with_the_mean_p_of_known_ones_give_a_null_share_of_one() -> None:
    """Their estimate is 0 in exact arithmetic, and rounding must not make it a small positive number."""
    for n, low, high in ((m, *pair) for m in (9, 17, 30, 100) for pair in combinations(range(2, m // 2), 2)):
        known = RankCounts.of(np.array([low, high]), n)
        estimate = known_members(RankCounts.of(np.array([low - 1, low, high, high + 1]), n), known)
        assert (estimate.unclipped, estimate.pi0) == (0.0, 1)
    answer = seenset.select([9, 9, 9, 1.5], unseen=[1, 2, 3, 4, 5], seen=[9, 3.5], procedure="known_members", alpha=0.1)
    assert (answer.summary.null_proportion, answer.summary.n_selected) == (1.0, 0)


@pytest.mark.parametrize(("known", "audit"), [([5, 5], [6, 7]), ([1, 1], [3]), ([5, 6], [0, 1]), ([5], []), ([5], [5])])
def test_known_scores_that_tell_nothing_give_a_null_proportion_of_one(known: list[float], audit: list[float]) -> None:
    """Audited documents beyond the known ones, no difference to nulls, all like nulls, none audited, all known-like."""
    sides = (np.array(side, dtype=float) for side in ([0, 1, 2], known, audit))
    estimate = known_scores(*(Moments.of(side, 1.0) for side in sides))
    assert estimate.pi0 == 1.0
    assert (estimate.theta == 1.0) == (audit != [0, 1])
    assert estimate.unclipped == 1.0 or known != [1, 1]


def test_known_scores_are_those_of_the_published_equations() -> None:
    """PTDI, eqs. 16-17: raw = .75, its variance from three sample variances, and 1 / raw corrected by it."""
    null, known, audit = (np.array(scores, dtype=float) for scores in ([0, 1, 2, 1], [4, 6, 5, 5], [1, 1, 5, 1]))
    raw = (5 - 2) / (5 - 1)
    spread = (raw**2 * (2 / 3) / 4 + (1 - raw) ** 2 * (2 / 3) / 4 + 4 / 4) / (5 - 1) ** 2
    theta = 1 / raw - spread / raw**3
    estimate = known_scores(*(Moments.of(scores, 1.0) for scores in (null, known, audit)))
    assert estimate.unclipped == pytest.approx(raw)
    assert estimate.theta == pytest.approx(theta)
    assert estimate.pi0 == pytest.approx(1 / theta if theta > 1 else 1.0)
    tight = [np.repeat(scores, 50) for scores in (null, known, audit)]
    estimate = known_scores(*(Moments.of(scores, 1.0) for scores in tight))
    assert 0.75 < estimate.pi0 < 0.77, "the correction raises the share"
    fewer = known_scores(*(Moments.of(scores, 1.0) for scores in tight), quarantined=200)
    assert fewer.pi0 == pytest.approx((estimate.pi0 * 200 + 200) / 400), "quarantined documents count as nulls"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_pooled_grids_hold_every_p_value_of_every_group_in_exact_order(sizes: list[int]) -> None:
    grid, positions = pool([Grid.uniform(n) for n in sizes])
    p = [grid.p(k) for k in range(1, grid.size + 1)]
    assert p == sorted(Fraction(k, n + 1) for n in sizes for k in range(1, n + 2))
    for n, place in zip(sizes, positions, strict=True):
        assert [grid.p(int(k)) for k in place] == [Fraction(k, n + 1) for k in range(1, n + 2)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(1, grid.size + 1))
    assert (grid.n, grid.groups, grid.delta) == (sum(sizes), len(sizes), None)
    assert pool([simes_grid(n, TENTH) for n in sizes])[0].delta == len(sizes) * TENTH


@given(grids(), st.fractions(0, Fraction(3, 2)))
def test_at_most_counts_p_values_exactly(grid: Grid, p: Fraction) -> None:
    exact = [grid.p(k) for k in range(1, grid.size + 1)]
    for level in (p, exact[0], exact[len(exact) // 2]):
        assert grid.at_most(level) == sum(q <= level for q in exact)
    assert grid.values.tolist() == [float(q) for q in exact]
    assert (exact == sorted(exact), exact[-1]) == (True, 1)


@given(audits(), st.randoms(use_true_random=False))
def test_counts_over_any_grid_merge_to_the_same_in_any_order(audit: tuple[list[int], Grid], random: object) -> None:
    found, grid = audit
    parts = [RankCounts.of(np.array(found[i::3], dtype=np.int64), grid) for i in range(3)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    whole = RankCounts.of(np.array(found), grid)
    assert whole.counts.tolist() == [found.count(k) for k in range(1, grid.size + 1)]
    whole = whole.with_quarantined(2)
    parts.append(pickle.loads(pickle.dumps(RankCounts.empty(grid))).with_quarantined(2))  # as from another process
    for merged in (reduce(add, parts), (parts[0] + parts[1]) + (parts[2] + parts[3])):
        assert merged.counts.tolist() == whole.counts.tolist()
        for procedure in count_procedures():
            assert decide(procedure, merged, TENTH) == decide(procedure, whole, TENTH)
    assert whole.m == len(found) + 2
    assert whole.at_most(grid.size - 1) <= len(found)


@given(st.integers(1, 400), st.booleans(), st.integers(1, 100), alphas, null_proportions)
def test_exactly_the_minimum_can_be_selected(n: int, conditional: bool, m: int, alpha: Fraction, pi0: Fraction) -> None:
    assume(pi0 > alpha)  # otherwise documents at p = 1 are selected too
    grid = simes_grid(n, TENTH) if conditional else Grid.uniform(n)
    least = minimum_selectable(grid, m, alpha, pi0)
    for selected in {least - 1, least} & set(range(1, m + 1)):
        best = RankCounts.of(np.array([1] * selected + [grid.size] * (m - selected)), grid)
        assert (step_up(best, alpha, pi0) > 0) == (selected == least)
    of_the_methods_page = [minimum_selectable(calibration, 10**6, TENTH) for calibration in (1000, 10**5)]
    assert of_the_methods_page == [9_991, 100]


def test_every_procedure_decides_a_hundred_million_documents_at_once() -> None:
    rng = np.random.default_rng(1)
    grid, _ = pool([Grid.uniform(60_000), Grid.uniform(39_999)])
    members = np.exp(-np.arange(grid.size) / 10)
    counts = RankCounts(rng.multinomial(10**8, (0.7 / grid.size + 0.3 * members / members.sum())), grid)
    began = time.process_time()
    for procedure in count_procedures():
        assert decide(procedure, counts, TENTH).n_selected > 10**6
    assert time.process_time() - began < 10  # about .2 s on one core


def test_the_terms_say_what_the_calibration_changes() -> None:
    plain, conditional = Grid.uniform(9), simes_grid(9, Fraction(1, 20))
    grouped = pool([Grid.uniform(4), Grid.uniform(5)])[0]
    calibrated = {name: one for name, one in PROCEDURES.items() if not one.only_versions}
    by_ranks = [name for name, one in calibrated.items() if one.answer is None or one.needs_sought]
    for procedure in by_ranks:
        terms = PROCEDURES[procedure].terms
        assert adapted(PROCEDURES[procedure].terms, plain) == terms
        by_group = adapted(PROCEDURES[procedure].terms, grouped)
        assert by_group.assumption.startswith("Within each of the 2 groups")
        assert (by_group.promise, by_group.guarantee) == (terms.promise, terms.guarantee)
        held = adapted(PROCEDURES[procedure].terms, conditional)
        if terms.guarantee == "finite-sample":
            assert held.promise.startswith(
                "With probability at least 0.95 over the choice of the calibration documents"
            )
            assert "these same calibration documents" in held.promise
            assert "whole audit" not in held.promise
            assert "independent draws" in held.assumption
        else:
            assert held == terms
            assert "nothing is guaranteed" in terms.promise
    said = {"0.01": "0.99", "1e-7": "1 - 1e-07", "1e-9": "1 - 1e-09", "0.123456789": "1 - 0.123456789"}
    for delta, probability in said.items():
        held = adapted(PROCEDURES["bh"].terms, simes_grid(9, Fraction(delta)))
        given = re.match(r"With probability at least (.+?) over", held.promise)
        assert given
        assert given[1] == probability
        assert sum(map(Fraction, given[1].replace("- ", "-").split())) == 1 - Fraction(delta), "never rounded up to 1"
    counts = RankCounts.empty(9).with_quarantined(1).over(conditional)
    assert decide("bh", counts, TENTH).promise == adapted(PROCEDURES["bh"].terms, conditional).promise
    assert {"known_members", "ptdi_known_members"} <= set(by_ranks)


def test_it_stops_where_the_estimate_first_does_not_fall() -> None:
    """Estimates at .05, .10, .15, .20 are 21/19, 11/18, 9/17 and 9/16; later ones are not looked at."""
    counts = RankCounts(np.array([10, 2, 0, 8, *[0] * 16]))
    assert right_boundary(counts) == (Fraction(9, 16), Fraction(1, 5))
    assert storey(counts, Fraction(1, 4)) == Fraction(1, 15)
    decision = decide("right_boundary", counts, Fraction(1, 4))
    assert (decision.factor, decision.details["lambda"]) == (Fraction(9, 16), 0.2)
    assert decision.rank == step_up(counts, Fraction(1, 4), Fraction(9, 16))
    assert right_boundary(RankCounts(100 * np.arange(100)[::-1]))[1] == Fraction(19, 20)  # never rises


@given(audits())
def test_estimates_are_their_formulas_over_any_grid(audit: tuple[list[int], Grid]) -> None:
    found, grid = audit
    counts, m = RankCounts.of(np.array(found), grid), len(found)
    f = sum(11 * float(grid.p(k)) ** 10 for k in found) / m
    assert kernel(counts) == pytest.approx(f + 11 * (1 / m + f / (grid.n + 1)), rel=1e-9)
    assert known_members(counts, counts).theta == float(1 / (sum(p_of(found, grid)) / m) - 1)
    estimates = [storey(counts, lambda_) for lambda_ in LAMBDAS]
    stops = [i for i in range(1, len(LAMBDAS)) if estimates[i] >= estimates[i - 1]]
    place = stops[0] if stops else len(LAMBDAS) - 1
    assert right_boundary(counts) == (estimates[place], LAMBDAS[place])
    assert decide("right_boundary", counts, TENTH).rank == decide("storey", counts, TENTH, lambda_=LAMBDAS[place]).rank


GOLDEN = RankCounts.of(np.array([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 70, 80, 90, 99]), 99)


def test_bh_storey_and_jkbb_give_the_golden_values() -> None:
    decision = decide("bh", GOLDEN, Fraction("0.2"))
    assert (decision.n_selected, decision.rank, decision.threshold) == (6, 8, 0.08), "an exact tie"
    assert decide("bh", GOLDEN, Fraction("0.2") - Fraction(1, 10**30)).n_selected < 6
    assert storey(GOLDEN) == Fraction(14, 15)
    assert slope(RankCounts.of(np.array([2, 3, 5]), pool([Grid.uniform(3), Grid.uniform(7)])[0])) == 1  # 1/4, 1/4, 1/2
    for gamma, b, pi0 in ((2.0, 0.651295193831284, 0.738858766315621), (3.0, 0.537783599642014, 0.750142983934607)):
        estimate = jkbb(GOLDEN, gamma)
        assert estimate.c == pytest.approx(0.523853633246022, rel=1e-12)
        assert estimate.bandwidth == pytest.approx(b, rel=1e-12)
        assert estimate.unclipped == estimate.pi0 == pytest.approx(pi0, rel=1e-12)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30), st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_ranks_count_calibration_documents_at_least_as_extreme(unseen: list[int], audit: list[int]) -> None:
    calibration = calibrate(np.array(unseen))
    members = ranks(np.array(audit), calibration, "members")
    clean = ranks(np.array(audit), calibration, "clean")
    assert members.tolist() == [1 + sum(s >= a for s in unseen) for a in audit]
    assert clean.tolist() == [1 + sum(s <= a for s in unseen) for a in audit]
    assert members.dtype == np.int64
    n = len(unseen)
    assert p_values(members, n).tolist() == [k / (n + 1) for k in members.tolist()]


def test_scores_are_sorted_aside_and_what_cannot_be_ranked_is_refused_in_one_line() -> None:
    scores = np.array([2.0, 1.0])
    calibration = calibrate(scores)
    assert (calibration.tolist(), scores.tolist()) == ([1.0, 2.0], [2.0, 1.0])
    assert "no calibration documents" in user_error(calibrate, np.array([]))
    assert "1 of 2 calibration scores are NaN" in user_error(calibrate, np.array([0.0, math.nan]))
    assert "1 of 3 audit scores are NaN" in user_error(ranks, np.array([0.0, math.nan, 1.0]), calibration, "members")


def test_counts_refuse_what_they_cannot_hold_and_to_be_changed_from_outside() -> None:
    counts = RankCounts.empty(9)
    assert ((counts + RankCounts.empty(Grid.uniform(9))).m, step_up(counts, TENTH)) == (0, 0)
    for other in (8, simes_grid(9, TENTH), pool([Grid.uniform(4), Grid.uniform(5)])[0]):
        with pytest.raises(ValueError, match="cannot merge counts"):
            counts + RankCounts.empty(other)
    with pytest.raises(ValueError, match="one a rank, got 10 for 11"):
        RankCounts(counts.counts, Grid.uniform(10))
    for outside in (0, 5):
        with pytest.raises(ValueError, match=r"1\.\.4"):
            RankCounts.of(np.array([outside]), 3)
    for bad in (np.array([1, -1]), np.array([0.5, 1.0]), np.array([1]), np.array([[1, 2]])):
        with pytest.raises(ValueError, match="counts must"):
            RankCounts(bad)
    with pytest.raises(ValueError, match="negative"):
        GOLDEN.with_quarantined(-1)
    source = np.array([1, 2, 3])
    held = RankCounts(source)
    source[:] = 9
    assert [one.counts.tolist() for one in (held, pickle.loads(pickle.dumps(held)))] == [[1, 2, 3]] * 2
    with pytest.raises(ValueError, match="read-only"):
        held.counts[0] = 9


def test_quarantined_documents_are_hypotheses_at_p_one() -> None:
    more = GOLDEN.with_quarantined(7)
    assert (more.m, GOLDEN.m) == (22, 15)
    assert (more.counts - GOLDEN.counts).tolist() == [0] * 99 + [7]
    # m k <= alpha (n + 1) R_k: 22 * 8 > 20 * 6 and 22 * 5 > 20 * 5, but 22 * 3 <= 20 * 4
    assert [decide("bh", counts, Fraction("0.2")).n_selected for counts in (GOLDEN, more)] == [6, 4]


def test_ties_and_orders_are_exact_where_floats_cannot_tell() -> None:
    a = Grid(np.array([(1 << 61) - 1, 1 << 62]), np.array(1 << 62), 1)
    b = Grid(np.array([(1 << 60) - 1, 1 << 61]), np.array(1 << 61), 1)
    grid, (first, second) = pool([a, b])
    assert a.values[0] == b.values[0] == 0.5
    assert (first[0], second[0], grid.at_most(grid.p(1))) == (2, 1, 1)
    assert grid.p(1) < grid.p(2)
    many = RankCounts(np.array([1 << 32, 0]), Grid(np.array([(1 << 32) - 1, 1 << 62]), np.array(1 << 62), 1))
    assert known_members(many, many).theta == float(Fraction(1 << 62, (1 << 32) - 1) - 1)
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


def test_an_estimate_at_the_edge_of_what_it_can_be_is_clipped_and_divides_by_nothing() -> None:
    assert bandwidth(1.0, 1000, 2.0) == 1.0, "of a flat density"
    assert bandwidth(math.nextafter(1.0, 2.0), 1000, 2.0) == 1.0
    all_at_one = jkbb(RankCounts.of(np.full(20, 10), 9))
    assert (all_at_one.pi0, all_at_one.bandwidth, all_at_one.c) == (1.0, 0.001, math.inf)
    all_small = jkbb(RankCounts.of(np.full(20, 1), 999))
    assert all_small.unclipped < 1 / 20 == all_small.pi0, "one document at least"


def test_storey_is_reported_at_most_one_but_decides_uncapped() -> None:
    counts = RankCounts.of(np.array([1, 1, 9, 9, 9, 9, 10, 10]), 9)
    assert storey(counts) == Fraction(7 * 10, 8 * 5)
    assert [default_lambda(Grid.uniform(n)) for n in (199, 200)] == [Fraction(1, 2), Fraction(4, 5)]
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
    assert (bound == exact) == (m <= 128)


def test_strict_is_storey_for_what_holds_only_in_the_limit_and_itself_otherwise() -> None:
    for procedure in count_procedures():
        finite = PROCEDURES[procedure].terms.guarantee == "finite-sample"
        decision = decide(procedure, GOLDEN, TENTH)
        answer = strict(decision, GOLDEN)
        assert answer.guarantee == "finite-sample"
        assert answer == (decision if finite else decide("storey", GOLDEN, TENTH))


def test_every_procedure_says_what_it_guarantees() -> None:
    for procedure in (*count_procedures(), "known_members"):
        decision, terms = decide(procedure, GOLDEN, TENTH, known_members=GOLDEN), PROCEDURES[procedure].terms
        assert (decision.assumption, decision.promise) == (terms.assumption, terms.promise)
        for word in ("expected share of wrong documents", "average over repetitions", "exchangeable", "one list"):
            assert word in f"{terms.promise} {terms.assumption}"
    for record in PROCEDURES.values():
        assert pickle.loads(pickle.dumps(record)) is record, "in another process"


def test_what_cannot_be_decided_is_refused_in_one_line() -> None:
    assert "did you mean 'storey'" in user_error(decide, "story", GOLDEN, TENTH)
    assert "no audit documents" in user_error(decide, "bh", RankCounts.empty(9), TENTH)
    for known in (None, RankCounts.empty(99)):
        line = user_error(decide, "known_members", GOLDEN, TENTH, known)
        assert line.startswith("procedure known_members needs documents ")
        assert "corpus.seen" in line
