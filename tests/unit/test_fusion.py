"""Claims about p-values, fused, conditional or by group, thresholds found by counting, and splits."""

import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.selection import run_folds
from pipeline.errors import UserError
from pipeline.selection.calibrations import calibrate_by_group, ranks_by_group, simes_grid, smallest_simes
from pipeline.selection.conformal import RankCounts, Sample, calibrate, halves, hash_for, mix, ranks, tie_draws
from pipeline.selection.procedures.td4eval import find_fused_threshold as find_threshold
from pipeline.selection.procedures.td4eval import fuse, p_value_places, rounded_up, statistic, symmetric_weights
from pipeline.selection.procedures.td4eval import fusion_weights as weights
from pipeline.selection.thresholds import Threshold
from tests.helpers.commands import user_error

TENTH = Fraction(1, 10)
ONE_BITS = 0x3F800000
N = 99  # calibration documents of p-values for which their number does not matter

alphas = st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=100)
# p-values as bit patterns: anywhere, on a coarse grid (ties), at the edges of bins, zero, denormal and one
patterns = st.one_of(
    st.integers(0, ONE_BITS),
    st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x007FFFFF, 0x00800000, ONE_BITS - 1, ONE_BITS]),
    st.builds(lambda h, end: h << 16 | end, st.integers(0x3C00, 0x3F7F), st.sampled_from([0, 1, 0xFFFE, 0xFFFF])),
    st.integers(1, 20).map(lambda i: int(np.float32(i / 20).view(np.uint32))),
)


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32).astype(np.float64)


def by_counting(stream: Callable[[], Iterable[np.ndarray]], alpha: Fraction, quarantined: int = 0) -> Threshold:
    return run_folds(find_threshold(alpha, N, quarantined), lambda: (p_value_places(values, N) for values in stream()))


def by_sorting(p: list[float], alpha: Fraction) -> Threshold:
    """The textbook step-up rule on sorted values in exact rationals."""
    p = sorted(p)
    n = max((i for i in range(1, len(p) + 1) if len(p) * Fraction(p[i - 1]) <= alpha * i), default=0)
    return Threshold(p[n - 1] if n else None, n)


@settings(max_examples=150)
@given(st.lists(patterns, min_size=1, max_size=40), st.integers(0, 3), alphas, st.integers(1, 5))
def test_the_threshold_found_by_counting_equals_sorting(
    bits: list[int], quarantined: int, alpha: Fraction, shards: int
) -> None:
    values = floats(bits)
    found = by_counting(lambda: (values[i::shards] for i in range(shards)), alpha, quarantined)
    assert found == by_sorting([*values.tolist(), *[1.0] * quarantined], alpha)


def counted_passes(values: np.ndarray) -> int:
    passes: list[int] = []
    found = by_counting(lambda: passes.append(1) or [values], TENTH)  # type: ignore[func-returns-value]
    assert found == by_sorting(values.tolist(), TENTH)
    return len(passes)


def test_ordinary_p_values_take_two_or_three_passes_and_a_hidden_threshold_more() -> None:
    rng = np.random.default_rng(0)
    assert counted_passes(rounded_up(np.concatenate([rng.random(50_000), rng.random(50_000) ** 6]), N)) <= 3
    m = 4_000
    for last in (1.0, 1.001):  # the least holds, or none does
        hopeless = np.arange(1, m + 1) / m * 0.1 * 1.001  # each a hair above its level, and near enough for its bin
        hopeless[0] = 0.1 / m * last * 0.999999
        assert counted_passes(rounded_up(hopeless, N)) > 3


def test_extremes_one_document_and_nothing_at_all() -> None:
    half = np.array([0.5])
    assert by_counting(lambda: [half], Fraction(1, 2)) == Threshold(0.5, 1)
    assert by_counting(lambda: [half], Fraction(499, 1000)) == Threshold(None, 0)
    assert by_counting(lambda: [half], Fraction(1, 2), quarantined=1) == Threshold(None, 0)
    assert by_counting(lambda: iter(()), TENTH) == Threshold(None, 0)


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_p_values_are_rounded_up_to_float32_or_half_of_its_smallest_step(p: float, n: int) -> None:
    grid = 2 * (n + 1)
    up = float(rounded_up(np.array([p]), n)[0])
    lost = grid * (up - p)
    assert lost >= -min(0.25, 2.0**-46 * p * grid * (p * grid + 1)) * 1.01, "no lower than rounding errors reach"
    nearest = np.float32(p)
    next32 = float(nearest if float(nearest) >= p else np.nextafter(nearest, np.float32(2)))
    assert up == next32 or (up < next32 and up == round(up * grid) / grid)
    assert find_place_of(up, n) == Fraction(up) or Fraction(up) == pytest.approx(find_place_of(up, n), rel=1e-15)


def find_place_of(value: float, n: int) -> Fraction:
    """The exact number that a p-value stands for: with one document at level 1 it is the threshold."""
    found = run_folds(find_threshold(Fraction(1), n), lambda: [p_value_places(np.array([value]), n)])
    assert found.n_selected == 1
    return Fraction(found.value or 0.0)


@pytest.mark.parametrize("n", [1, 2, 9, 98, 99, 199, 999, 12_345, 10**6])
def test_a_rank_that_all_detectors_give_is_the_p_value_exactly(n: int) -> None:
    rng = np.random.default_rng(n)
    k = np.unique(np.r_[1, n, rng.integers(1, n + 1, 200)])
    for d in (2, 3, 7):
        shares = rng.integers(1, 50, d)
        for w in (weights(shares.tolist(), "rejections"), weights([1] * d, "equal"), weights([1] * d, "random", n)):
            assert fuse(np.repeat(k[:, None], d, axis=1), n, w).tolist() == (k / (n + 1)).tolist()


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_equally_spaced_p_values_are_fused_to_the_multiple_that_they_give(order: int) -> None:
    """The mean of cot(x + pi j / d) over j < d is cot(d x); and opposite p-values cancel, in any order."""
    n = 60 * order - 1
    k = np.arange(1, 60)
    spaced = np.stack([k + 60 * j for j in range(order)], axis=1)
    assert fuse(spaced, n, weights([1] * order, "equal")).tolist() == (order * k / (n + 1)).tolist()
    opposite = np.stack([k, np.full(59, 7), n + 1 - k], axis=1)
    assert (
        len({fuse(opposite[:, list(o)], n, weights([1] * 3, "equal"))[5] for o in ((0, 1, 2), (2, 1, 0), (1, 0, 2))})
        == 1
    )
    assert fuse(opposite[:, [0, 2]], n, weights([1] * 2, "equal")).tolist() == [0.5] * 59


def test_equal_ranks_in_another_order_of_equal_detectors_tie_also_when_ranked_anew() -> None:
    """`reconformal` ranks the statistic, of which a tie counts against selection."""
    rng = np.random.default_rng(0)
    for n, d in ((49, 3), (1_000, 4), (10**6, 3)):
        k, w = rng.integers(1, n + 2, (200, d)), weights([1] * d, "equal")
        values = [statistic(k[:, list(order)], n, w).tolist() for order in itertools.permutations(range(d))]
        assert all(value == values[0] for value in values)


def test_weights_are_those_of_the_paper_and_its_ablations() -> None:
    assert weights([30, 10, 0], "rejections").tolist() == [0.75, 0.25, 0.0]
    assert weights([30, 10, 0], "max").tolist() == [1.0, 0.0, 0.0]
    assert weights([3, 1], "equal").tolist() == [0.5, 0.5]
    drawn = weights([3, 1, 7], "random", seed=5)
    assert drawn.tolist() == weights([9, 9, 9], "random", seed=5).tolist() != weights([3, 1, 7], "random", 6).tolist()
    assert drawn.sum() == pytest.approx(1)
    for kind in ("rejections", "equal", "random", "max"):
        assert not weights([0, 0], kind).any()  # type: ignore[arg-type]


@given(st.integers(1, 50), st.data())
def test_fused_p_values_follow_the_definition(n: int, data: st.DataObject) -> None:
    rows = st.lists(st.integers(1, n + 1), min_size=3, max_size=3)
    k = np.array(data.draw(st.lists(rows, min_size=1, max_size=10)))
    w = weights(data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)), "rejections")
    p = np.clip(k / (n + 1), 1 / (2 * (n + 1)), 1 - 1 / (2 * (n + 1)))
    t = (w * np.tan(np.pi * (0.5 - p))).sum(axis=1)
    assert statistic(k, n, w) == pytest.approx(t, rel=1e-9, abs=1e-9)
    fused = fuse(k, n, w)
    assert fused == pytest.approx(np.arctan2(1, t) / np.pi, rel=1e-6)
    assert ((fused > 0) & (fused <= 1)).all()
    assert np.array_equal(np.concatenate([fuse(row[None], n, w) for row in k.astype(np.int32)]), fused)


def test_one_detector_alone_keeps_its_p_values_to_the_last_bits_and_into_the_tail() -> None:
    n = 10**7
    k = np.array([[1], [2], [1000], [n // 2], [n]])
    p = k[:, 0] / (n + 1)
    assert fuse(k, n, np.ones(1)).tolist() == p.tolist()
    assert fuse(np.ones((5, 2), dtype=np.int64), 99, np.zeros(2)).tolist() == [1.0] * 5, "no detector rejects any"


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(1, 10), min_size=12, max_size=12), min_size=2, max_size=2), st.permutations(range(12))
)
def test_symmetric_weights_do_not_see_which_documents_are_audited(rows: list[list[int]], order: list[int]) -> None:
    def of(documents: list[int]) -> list[np.ndarray]:
        detectors = [np.array(row)[documents] for row in rows]
        audit = [RankCounts.of(k[:5], 9).with_quarantined(1) for k in detectors]
        return [symmetric_weights(audit, [RankCounts.of(k[5:], 9) for k in detectors], TENTH, "rejections")]

    assert np.array_equal(of(order), of(list(range(12))))
    assert of(order)[0].sum() == pytest.approx(1)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40, unique=True), st.integers(0, 9))
def test_halves_depend_on_ids_and_seed_alone(keys: list[int], seed: int) -> None:
    chosen = halves(np.array(keys), seed)
    assert chosen.sum() == len(keys) // 2
    assert np.array_equal(halves(np.array(keys)[::-1], seed)[::-1], chosen)
    assert len(set(hash_for(np.array(keys), seed, 1).tolist())) == len(keys)


def test_another_seed_gives_another_half_and_a_sample_takes_no_notice_of_halves() -> None:
    keys = np.arange(10_000)
    chosen = halves(keys, 4)
    assert 2_000 < (chosen & halves(keys, 1)).sum() < 3_000
    sampled = Sample.draw(keys, chosen[:, None].astype(float), 4, size=2_500).rows
    assert abs(sampled.mean() - 0.5) < 4 * 0.5 / 50
    rows = Sample.draw(np.arange(20_001), np.arange(20_001)[:, None], 0).rows
    assert (len(rows), rows[0]) == (20_000, 13_575), "the same document on every machine"


@given(st.integers(1, 60), st.integers(1, 5))
def test_a_sample_does_not_depend_on_shards(size: int, shards: int) -> None:
    keys = np.arange(50) * 7919
    rows = np.stack([keys, -keys], axis=1).astype(float)
    whole = Sample.draw(keys, rows, 3, size)
    parts = [Sample.draw(keys[i::shards], rows[i::shards], 3, size) for i in range(shards)]
    merged = reduce(add, reversed(parts))
    assert np.array_equal(merged.rows, whole.rows)
    assert np.array_equal(merged.hashes, whole.hashes)
    assert len(whole.rows) == min(size, 50)


def test_simes_p_values_of_many_calibration_documents_stay_sharp_and_at_most_one() -> None:
    assert float(simes_grid(100_000, TENTH).p(1)) == pytest.approx(-math.expm1(math.log(0.1) / 50_000), rel=1e-12)
    # 1 - delta is 1 in float64, and the margin for rounding would lift it above
    assert smallest_simes(1, Fraction(1, 10**18)) == 1
    assert simes_grid(1, Fraction(1, 10**18)).numerators.tolist() == [1 << 62] * 2


@given(st.integers(1, 80), st.fractions(Fraction(1, 1000), Fraction(999, 1000)))
@example(1, Fraction(91907, 92000))  # near 1 a logarithm of the rounded delta is too far off
def test_simes_p_values_are_the_formula_rounded_up(n: int, delta: Fraction) -> None:
    grid, s = simes_grid(n, delta), max(1, n // 2)
    for k in range(1, n + 1):
        i = n + 1 - k
        ratio = delta * math.comb(i, s) / Fraction(math.comb(n, s))  # (1 - b)^s, exact
        assert (1 - grid.p(k)) ** s <= ratio
        if ratio:
            assert float(grid.p(k)) == pytest.approx(1 - float(ratio) ** (1 / s), rel=1e-9)
    assert (grid.p(1), grid.p(n + 1)) == (smallest_simes(n, delta), 1)


def test_a_document_is_ranked_within_its_group_and_no_other() -> None:
    rng = np.random.default_rng(2)
    names = np.array(["b", "a", "c"])
    known, audit = names[rng.integers(0, 3, 40)], names[rng.integers(0, 3, 60)]
    seen, scores = rng.integers(0, 9, 40).astype(float), rng.integers(-1, 10, 60).astype(float)
    calibration = calibrate_by_group(seen, known.tolist())
    for groups in (
        audit.tolist(),
        audit,
        pa.array(audit.tolist()),
        pa.chunked_array([audit[:10].tolist(), audit[10:].tolist()]),
    ):
        found = ranks_by_group(scores, groups, calibration, "members")
        for k, score, group in zip(found.tolist(), scores, audit, strict=True):
            own = seen[known == group]
            assert calibration.grid.p(k) == Fraction(1 + int((own >= score).sum()), own.size + 1)
    one = calibrate_by_group(seen, ["x"] * 40)
    assert ranks_by_group(scores, ["x"] * 60, one, "clean").tolist() == ranks(scores, calibrate(seen), "clean").tolist()
    assert ranks_by_group(np.empty(0), [], one, "clean").size == 0


def test_a_document_whose_group_cannot_be_calibrated_is_refused_in_one_line() -> None:
    calibration = calibrate_by_group(np.array([1.0, 2.0]), ["a", "b"])
    with pytest.raises(UserError, match="group 'z' has audit documents and no calibration documents"):
        ranks_by_group(np.array([0.0, 1.0]), ["a", "z"], calibration, "members")
    with pytest.raises(UserError, match="1 of 2 audit documents have no group"):
        ranks_by_group(np.array([0.0, 1.0]), ["a", None], calibration, "members")
    assert "1 of 1 calibration documents have no group" in user_error(calibrate_by_group, np.array([1.0]), [None])
    assert "no calibration documents" in user_error(calibrate_by_group, np.empty(0), [])
    assert "NaN" in user_error(calibrate_by_group, np.array([1.0, math.nan]), ["a", "b"])


@settings(max_examples=50)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=20),
    st.lists(st.integers(-4, 4), min_size=1, max_size=20),
    st.sampled_from(["members", "clean"]),
    st.integers(0, 5),
)
def test_random_ties_stay_between_the_best_and_the_worst_place_and_repeat(
    unseen: list[int], audit: list[int], direction: str, seed: int
) -> None:
    calibration, scores = calibrate(np.array(unseen)), np.array(audit)
    keys = np.random.default_rng(len(audit)).integers(-(2**63), 2**63, len(audit))
    worst = ranks(scores, calibration, direction)  # type: ignore[arg-type]
    found = ranks(scores, calibration, direction, tie_draws(keys, seed))  # type: ignore[arg-type]
    tied = np.array([sum(s == a for s in unseen) for a in audit])
    assert ((worst - tied <= found) & (found <= worst)).all()
    order = np.arange(len(audit))[::-1]
    again = ranks(scores[order], calibration, direction, tie_draws(keys[order], seed))  # type: ignore[arg-type]
    assert again[order].tolist() == found.tolist()


def test_random_ties_take_every_place_equally_often_and_differ_by_seed() -> None:
    calibration, count = calibrate(np.zeros(9)), 100_000
    keys = np.arange(count)  # keys that are as regular as can be
    first, second = (ranks(np.zeros(count), calibration, "members", tie_draws(keys, seed)) for seed in (0, 1))
    for found in (first, second):
        assert np.abs(np.bincount(found, minlength=11)[1:] - count / 10).max() < 4.5 * math.sqrt(count * 0.09)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(count)


def test_the_hash_of_keys_has_the_published_values_of_splitmix64() -> None:
    """The first outputs of the reference implementation (Vigna 2015) from the state 1234567."""
    states = (1234567 + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
