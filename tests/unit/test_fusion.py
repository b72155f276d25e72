"""Claims about fused p-values, thresholds found by counting, and splits, that hold for every input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.selection import run_passes
from pipeline.selection.conformal import RankCounts, Sample, halves, shuffled
from pipeline.selection.procedures.td4eval import (
    find_fused_threshold,
    fuse,
    fusion_weights,
    rounded_up,
    statistic,
    symmetric_weights,
)
from pipeline.selection.ranked import ROUNDED_UP
from pipeline.selection.thresholds import Threshold

TENTH = Fraction(1, 10)
ONE_BITS = 0x3F800000

alphas = st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=100)
# p-values as bit patterns: anywhere, on a coarse grid (ties), at the edges of bins, zero, denormal and one
patterns = st.one_of(
    st.integers(0, ONE_BITS),
    st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x007FFFFF, 0x00800000, ONE_BITS - 1, ONE_BITS]),
    st.builds(lambda h, end: h << 16 | end, st.integers(0x3C00, 0x3F7F), st.sampled_from([0, 1, 0xFFFE, 0xFFFF])),
    st.integers(1, 20).map(lambda i: int(np.float32(i / 20).view(np.uint32))),
)


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def by_counting(stream: Callable[[], Iterable[np.ndarray]], alpha: Fraction, quarantined: int = 0) -> Threshold:
    return run_passes(find_fused_threshold(alpha, quarantined), stream)


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


def test_ordinary_p_values_take_two_passes() -> None:
    rng = np.random.default_rng(0)
    values = rounded_up(np.concatenate([rng.random(50_000), rng.random(50_000) ** 6]))
    passes: list[int] = []
    found = by_counting(lambda: passes.append(1) or [values], TENTH)  # type: ignore[func-returns-value]
    assert found == by_sorting(values.tolist(), TENTH)
    assert len(passes) == 2


@pytest.mark.parametrize("last", [1.0, 1.001], ids=["the least holds", "none holds"])
def test_a_threshold_that_hides_from_many_bins_takes_more_passes_and_is_found(last: float) -> None:
    m = 4_000
    hopeless = np.arange(1, m + 1) / m * 0.1 * 1.001  # each a hair above its level, and near enough for its bin
    hopeless[0] = 0.1 / m * last * 0.999999
    values = rounded_up(hopeless)
    passes: list[int] = []
    found = by_counting(lambda: passes.append(1) or [values], TENTH)  # type: ignore[func-returns-value]
    assert found == by_sorting(values.tolist(), TENTH)
    assert len(passes) > 3


def test_extremes_all_null_all_signal_one_document_nothing_at_all() -> None:
    ones, tiny = np.ones(50, dtype=np.float32), np.full(50, 1e-30, dtype=np.float32)
    assert by_counting(lambda: [ones], TENTH) == Threshold(None, 0)
    assert by_counting(lambda: [tiny], TENTH) == Threshold(float(np.float32(1e-30)), 50)
    half = np.array([0.5], dtype=np.float32)
    assert by_counting(lambda: [half], Fraction(1, 2)) == Threshold(0.5, 1)
    assert by_counting(lambda: [half], Fraction(499, 1000)) == Threshold(None, 0)
    assert by_counting(lambda: [half], Fraction(1, 2), quarantined=1) == Threshold(None, 0)
    assert by_counting(lambda: iter(()), TENTH) == Threshold(None, 0)
    infinite = np.array([np.inf, 1e-3], dtype=np.float32)
    assert by_counting(lambda: [infinite], TENTH).n_selected == 1


@given(st.floats(0, 1))
def test_rounding_to_float32_goes_up_and_no_further_than_it_must(value: float) -> None:
    up = rounded_up(np.array([value]))[0]
    assert up.dtype == np.float32
    assert float(up) >= value
    assert up == 0 or float(np.nextafter(up, np.float32(-1))) < value


# ---------------------------------------------------------------- fusion


def test_the_least_number_of_known_documents_allows_for_rounding_and_little_more() -> None:
    p = 0.5 + 2.0**-40  # one of the p-values that lose most: the next float32 is nearly a whole step above it
    lost = float(rounded_up(np.array([p]))[0]) / p - 1
    assert lost <= ROUNDED_UP - 1 <= 2.01 * lost


def test_weights_are_those_of_the_paper_and_its_ablations() -> None:
    assert fusion_weights([30, 10, 0], "rejections").tolist() == [0.75, 0.25, 0.0]
    assert fusion_weights([30, 10, 0], "max").tolist() == [1.0, 0.0, 0.0]
    assert fusion_weights([3, 1], "equal").tolist() == [0.5, 0.5]
    drawn = fusion_weights([3, 1, 7], "random", seed=5)
    assert drawn.tolist() == fusion_weights([9, 9, 9], "random", seed=5).tolist()
    assert drawn.tolist() != fusion_weights([3, 1, 7], "random", 6).tolist()
    assert drawn.sum() == pytest.approx(1)
    for kind in ("rejections", "equal", "random", "max"):
        assert not fusion_weights([0, 0], kind).any()  # type: ignore[arg-type]


@given(st.integers(1, 50), st.data())
def test_fused_p_values_follow_the_definition(n: int, data: st.DataObject) -> None:
    rows = st.lists(st.integers(1, n + 1), min_size=3, max_size=3)
    k = np.array(data.draw(st.lists(rows, min_size=1, max_size=10)))
    w = fusion_weights(data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)), "rejections")
    p = np.clip(k / (n + 1), 1 / (2 * (n + 1)), 1 - 1 / (2 * (n + 1)))
    t = (w * np.tan(np.pi * (0.5 - p))).sum(axis=1)
    assert statistic(k, n, w) == pytest.approx(t, rel=1e-9, abs=1e-9)
    fused = fuse(k, n, w)
    assert fused == pytest.approx(np.arctan2(1, t) / np.pi, rel=1e-6)
    assert fused.dtype == np.float32
    assert ((fused > 0) & (fused <= 1)).all()
    assert np.array_equal(np.concatenate([fuse(row[None], n, w) for row in k.astype(np.int32)]), fused)


def test_one_detector_alone_keeps_its_p_values_to_the_last_bits_and_far_into_the_tail() -> None:
    n = 10**7
    k = np.array([[1], [2], [1000], [n // 2], [n]])
    p = k[:, 0] / (n + 1)
    assert fuse(k, n, np.ones(1)) == pytest.approx(p, rel=2e-7)


def test_no_rejections_by_any_detector_select_nothing() -> None:
    k = np.ones((5, 2), dtype=np.int64)
    assert fuse(k, 99, np.zeros(2)).tolist() == [1.0] * 5


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


# ---------------------------------------------------------------- splits


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40, unique=True), st.integers(0, 9))
def test_halves_depend_on_ids_and_seed_alone(keys: list[int], seed: int) -> None:
    chosen = halves(np.array(keys), seed)
    assert chosen.sum() == len(keys) // 2
    assert np.array_equal(halves(np.array(keys)[::-1], seed)[::-1], chosen)
    assert len(set(shuffled(np.array(keys), seed, 1).tolist())) == len(keys)


def test_another_seed_gives_another_half() -> None:
    keys = np.arange(1000)
    both = halves(keys, 0) & halves(keys, 1)
    assert 200 < both.sum() < 300


def test_a_sample_takes_no_notice_of_halves_of_the_same_seed() -> None:
    keys = np.arange(10_000)
    chosen = halves(keys, 4)
    sampled = Sample.of(keys, chosen[:, None].astype(float), 4, size=2_500).rows
    assert abs(sampled.mean() - 0.5) < 4 * 0.5 / 50


@given(st.integers(1, 60), st.integers(1, 5))
def test_a_sample_does_not_depend_on_shards(size: int, shards: int) -> None:
    keys = np.arange(50) * 7919
    rows = np.stack([keys, -keys], axis=1).astype(float)
    whole = Sample.of(keys, rows, 3, size)
    parts = [Sample.of(keys[i::shards], rows[i::shards], 3, size) for i in range(shards)]
    merged = reduce(add, reversed(parts))
    assert np.array_equal(merged.rows, whole.rows)
    assert np.array_equal(merged.hashes, whole.hashes)
    assert len(whole.rows) == min(size, 50)
