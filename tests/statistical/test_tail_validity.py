"""The tail check keeps its level, also for grouped documents, and finds a small part that calibration lacks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from pipeline.checks.classifier import blind_result, word_model
from pipeline.checks.dependent_documents import LARGE
from pipeline.checks.families import one_role_p
from pipeline.checks.held_out_auc import Compared, HeldOut, held_out
from pipeline.checks.held_out_tail import TAIL_LEVEL, blind_tail, cauchy
from pipeline.checks.words import word_counts
from pipeline.corpus.near_duplicates import near_families, sketches_of_texts
from tests.helpers.mean_classifier import Means

RUNS = 200
FEATURES = 20
VOCABULARY = np.array([f"word{number}" for number in range(2_000)])
SHARES = 1 / np.arange(10, 2_010) / (1 / np.arange(10, 2_010)).sum()


def alarms(counts: tuple[int, int], size: int, runs: int = RUNS) -> int:
    """Runs in which documents that are alike have a tail; groups of a size have features that correlate by 0.3."""
    audited = np.arange(sum(counts)) >= counts[0]
    group = np.arange(sum(counts)) // size
    rho = 0.3 if size > 1 else 0.0
    found = 0
    for run in range(runs):
        rng = np.random.default_rng([run, *counts, size, 2])
        common = rng.normal(size=(group[-1] + 1, FEATURES))[group]
        features = np.sqrt(rho) * common + np.sqrt(1 - rho) * rng.normal(size=(group.size, FEATURES))
        held = held_out(features, Compared.of(audited, group), run, Means())
        assert held is not None
        found += blind_tail(held)[0] <= TAIL_LEVEL
    return found


@pytest.mark.parametrize(("counts", "size"), [((60, 60), 1), ((200, 200), 1), ((400, 100), 1), ((400, 400), 10)])
def test_documents_that_are_alike_have_a_tail_in_at_most_one_of_a_hundred_runs(
    counts: tuple[int, int], size: int
) -> None:
    assert alarms(counts, size) <= binom.ppf(0.999, RUNS, TAIL_LEVEL)


def texts(rng: np.random.Generator, count: int, words: int = 80) -> list[str]:
    return [" ".join(rng.choice(VOCABULARY, words, p=SHARES)) for _ in range(count)]


def halved(n: int, unlike: list[str], seed: int, block: np.ndarray | None = None) -> HeldOut:
    """Held-out scores of n documents of each role, of which some audited ones are of a kind of their own."""
    rng = np.random.default_rng([seed, n])
    documents = [*texts(rng, 2 * n - len(unlike)), *unlike]
    held = held_out(word_counts(documents), Compared.of(np.arange(2 * n) >= n, block), seed, word_model())
    assert held is not None
    return held


def test_a_tail_of_eight_documents_holds_at_most_all_of_them() -> None:
    assert all(blind_tail(halved(4, [], seed))[1].any() for seed in range(5))


def genre(rng: np.random.Generator, count: int) -> list[str]:
    """Texts of another kind, all different: nearly all words are of a vocabulary of their own."""
    own = [" ".join(rng.choice([f"genre{number}" for number in range(60)], 80)) for _ in range(count)]
    return [f"{some} {other}" for some, other in zip(own, texts(rng, count, 5), strict=True)]


def test_two_percent_of_another_genre_is_found_where_the_blind_test_sees_nothing() -> None:
    n = 1_200
    for seed in range(1):
        held = halved(n, genre(np.random.default_rng(seed), n // 50), seed)
        p_value, tail, _ = blind_tail(held)
        assert blind_result(held).outcome != "failed"
        assert p_value <= TAIL_LEVEL
        assert tail[-n // 50 :].mean() > 0.8
        assert tail.mean() < 0.06
        assert tail[:n].mean() < 0.05


@pytest.mark.parametrize(("kinds", "copies"), [(10, 3), (1, 30)])
def test_repeated_texts_are_blocks_and_families_only_from_five_documents(kinds: int, copies: int) -> None:
    """2% boilerplate. Near-duplicates stand in one half together, so that no classifier has read the one it scores."""
    n = 1_500
    found = 0
    for seed in range(4):
        unlike = [text for text in texts(np.random.default_rng([seed, 5]), kinds) for _ in range(copies)]
        families = near_families(np.array([np.frombuffer(one, np.uint8) for one in sketches_of_texts(unlike)]))
        assert np.bincount(families).tolist() == [copies] * kinds
        block = np.concatenate([np.arange(2 * n - len(unlike)), 2 * n + families])
        found += blind_tail(halved(n, unlike, seed, block))[0] <= TAIL_LEVEL
    assert found <= 1
    assert (copies >= LARGE and one_role_p(copies, n, n, kinds) <= TAIL_LEVEL) is (copies == 30)


def test_one_large_p_value_cancels_no_small_one_and_equal_ones_combine_to_themselves() -> None:
    assert cauchy([0.001, 0.999]) < 0.01
    assert cauchy([0.02] * 40) == pytest.approx(0.02)
    assert cauchy([0.0] * 40) == pytest.approx(1e-15)
    assert cauchy([1.0] * 40) == pytest.approx(0.99)
