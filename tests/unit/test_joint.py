"""Claims about the decision under several models: it is e-BH on the smallest of valid e-values, exactly."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.selection import joint
from pipeline.selection.joint import JointEvidence, joint_resolution, joint_select

TENTH = Fraction(1, 10)
alphas = st.integers(1, 19).map(lambda twentieth: Fraction(twentieth, 20))


@st.composite
def several(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Calibration documents of each model, and its ranks of the same documents."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    m = draw(st.integers(1, 12))
    return sizes, [draw(st.lists(st.integers(1, n + 1), min_size=m, max_size=m)) for n in sizes]


def p_values_of(sizes: list[int], places: list[list[int]]) -> np.ndarray:
    return np.array([np.array(row) / (n + 1) for n, row in zip(sizes, places, strict=True)])


def e_value(p: Fraction, evidence: JointEvidence) -> Fraction:
    """From the definition: the smaller factor's own function."""
    m, alpha = evidence.m, evidence.alpha
    if evidence.factor < sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0)):
        return 1 / (p * evidence.factor) if p * evidence.factor <= alpha else Fraction(0)
    j = math.ceil(p * m * evidence.factor / alpha)
    return Fraction(m) / (alpha * j) if j <= m else Fraction(0)


@settings(max_examples=40)
@given(several(), alphas)
def test_the_joint_selection_is_e_bh_on_the_smallest_e_value(
    audit: tuple[list[int], list[list[int]]], alpha: Fraction
) -> None:
    sizes, places = audit
    m = len(places[0])
    evidence = [JointEvidence.of(n, m, alpha) for n in sizes]
    smallest = [
        min(e_value(Fraction(row[i], n + 1), one) for n, row, one in zip(sizes, places, evidence, strict=True))
        for i in range(m)
    ]
    ordered = sorted(smallest, reverse=True)
    size = max((r for r in range(1, m + 1) if ordered[r - 1] * alpha * r >= m), default=0)
    selected = joint_select(evidence, p_values_of(sizes, places))
    assert selected.sum() == size
    assert selected.tolist() == [bool(size) and e * alpha * size >= m for e in smallest]
    shown = joint.e_values(joint.joint_levels(evidence, p_values_of(sizes, places)), m, alpha)
    reached = [Fraction(m) / (alpha * math.ceil(m / (alpha * e))) if alpha * e >= 1 else 0 for e in smallest]
    assert shown.tolist() == pytest.approx([float(one) for one in reached])


@pytest.mark.parametrize("grouped", [False, True])
@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 40), alphas)
def test_each_e_value_has_a_mean_of_at_most_one_for_every_null(grouped: bool, n: int, m: int, alpha: Fraction) -> None:
    """The worst null has mass v_k - v_(k-1) at each value; of groups, at each value of any group's grid."""
    evidence = JointEvidence.of(n, m, alpha, grouped)
    grid = sorted(
        {Fraction(k, d) for d in ({n + 1, (n + 1) // 2 + 1} if grouped else {n + 1}) for k in range(1, d + 1)}
    )
    worst = sum((here - before) * e_value(here, evidence) for before, here in pairwise([Fraction(0), *grid]))
    assert worst <= 1


@settings(max_examples=40)
@given(several(), alphas)
def test_bh_on_the_largest_p_value_is_bh_on_it_and_holds_the_proved_list(
    audit: tuple[list[int], list[list[int]]], alpha: Fraction
) -> None:
    sizes, places = audit
    m = len(places[0])
    p = p_values_of(sizes, places)
    largest = [max(Fraction(row[i], n + 1) for n, row in zip(sizes, places, strict=True)) for i in range(m)]
    ordered = sorted(largest)
    size = max((r for r in range(1, m + 1) if ordered[r - 1] * m <= alpha * r), default=0)
    evidence = [JointEvidence.of(n, m, alpha) for n in sizes]
    by_p = joint_select([one.plain() for one in evidence], p)
    assert by_p.sum() == size
    assert not (joint_select(evidence, p) & ~by_p).any()


def test_a_level_is_the_fewest_documents_at_which_one_counts_and_parts_add_up() -> None:
    found = JointEvidence(999, 100, TENTH, Fraction(2)).levels(np.arange(1, 1001) / 1000)
    assert found.tolist() == [min(2 * k, 101) for k in range(1, 1001)]
    levels = np.array([3, 1, 9, 1, 2, 9, 12])
    parts = joint.count_levels(levels[:3]) + joint.count_levels(levels[3:])
    assert parts == joint.count_levels(levels)
    assert joint.joint_cut(parts, 7) == joint.JointCut(3, 4)
    assert joint.joint_cut({3: 2}, 7) == joint.JointCut(0, 0)


@given(st.integers(1, 1 << 20), st.data())
def test_a_p_value_is_read_back_as_the_fraction_that_it_was(n: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, n + 1))
    k = data.draw(st.integers(1, size))
    assert joint.exact_p(float(Fraction(k, size)), n) == Fraction(k, size)


def test_a_p_value_that_cannot_be_told_for_certain_is_never_taken_for_less() -> None:
    assert joint.exact_p(0.1, (1 << 25) - 1) == Fraction(1, 10)
    assert joint.exact_p(0.1, 1 << 25) == Fraction(0.1) * (1 + Fraction(1, 1 << 50)) > Fraction(1, 10)


def test_no_fewer_than_the_resolution_says_are_selected_and_as_many_can_be() -> None:
    m = 50
    for n in (20, 99, 400):
        evidence = [JointEvidence.of(n, m, TENTH), JointEvidence.of(500, m, TENTH)]
        small = joint_resolution(evidence)
        for count in range(1, m + 1):
            p = np.ones((2, m))
            p[0, :count], p[1, :count] = 1 / (n + 1), 1 / 501
            assert joint_select(evidence, p).sum() == (count if count >= small.fewest else 0)


def test_the_smallest_alpha_and_needed_documents_of_each_group_are_the_stated_limits() -> None:
    m = 200
    evidence = [JointEvidence.of(n, m, Fraction(1, 1000)) for n in (99, 300)]
    small = joint_resolution(evidence)
    assert small.fewest > m
    assert small.smallest_alpha == 1 / 100
    p = np.array([np.full(m, 1 / 100), np.full(m, 1 / 301)])
    for alpha, some in ((Fraction(1, 100), True), (Fraction(1, 101), False)):
        assert joint_select([JointEvidence.of(n, m, alpha) for n in (99, 300)], p).any() == some
    for n, some in ((small.needed_for_any, True), (small.needed_for_any - 1, False)):
        alike = [JointEvidence.of(n, m, Fraction(1, 1000))]
        assert joint_select(alike, np.full((1, m), 1 / (n + 1))).any() == some
    small = joint_resolution([JointEvidence.of(5_000, 150, TENTH)])  # a list of one document is a hundredth of few
    for n, some in ((small.needed_for_1_percent, True), (small.needed_for_1_percent - 1, False)):
        assert (JointEvidence.of(n, 150, TENTH).fewest == 1) == some
    small = joint_resolution([JointEvidence.of(5_000, m, TENTH, grouped=True)])
    assert small.fewest >= math.ceil(m / (TENTH * 5_001))
    for n, some in ((small.needed_for_1_percent, True), (small.needed_for_1_percent - 1, False)):
        evidence = [JointEvidence.of(2 * n, m, TENTH, grouped=True)]  # two groups of n
        p = np.ones((1, m))
        p[0, : m // 100] = 1 / (n + 1)
        assert joint_select(evidence, p).any() == some


@pytest.mark.parametrize("alpha", [0, 1, 1.5, -0.1])
def test_alpha_is_in_its_limits(alpha: float) -> None:
    with pytest.raises(UserError, match=r"alpha must be in \(0, 1\), got"):
        joint.exact_level(alpha)
