"""A blind classifier finds what should not be there, and nothing where nothing is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pipeline.audit.blind import Blind, blind, blind_diagnostic

WORDS = [f"word{i}" for i in range(400)]


def texts(seed: int, count: int, words: list[str] = WORDS) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=40)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_documents_of_one_kind_cannot_be_told_apart(seed: int) -> None:
    found = blind(texts(seed, 300), texts(100 + seed, 300), seed)
    assert found is not None
    assert found.outcome in ("passed", "inconclusive")
    assert (found.outcome == "passed") == (found.high <= 0.55)
    assert found.low < 0.5


def test_documents_of_another_year_are_told_apart() -> None:
    dated = [f"{text} 2025" if i % 2 else text for i, text in enumerate(texts(7, 300))]
    found = blind(texts(1, 300), dated, 0)
    assert found is not None
    assert found.outcome == "failed"
    shown = blind_diagnostic(found, "unseen")
    assert shown.ok is False
    assert "not supported" in shown.sentence


@pytest.mark.parametrize(
    ("low", "high", "outcome", "ok", "words"),
    [
        (0.52, 0.66, "inconclusive", None, "above 0.53 or at most 0.55 at 99% confidence"),
        (0.54, 0.66, "failed", False, "above 0.53 at 99% confidence"),
        (0.45, 0.55, "passed", True, "at most 0.55 at 99% confidence"),
        (0.45, 0.551, "inconclusive", None, "cannot be said from so few"),
        (0.535, 0.545, "failed", False, "not supported"),
        (0.53, 0.545, "passed", True, "It does not prove them alike."),
    ],
)
def test_the_blind_test_passes_or_fails_only_clearly(
    low: float, high: float, outcome: str, ok: bool | None, words: str
) -> None:
    shown = blind_diagnostic(Blind(0.54, low, high, 100, 100), "unseen")
    assert (shown.outcome, shown.ok) == (outcome, ok)
    assert words in shown.sentence
    digits = 2, 3 if high in (0.545, 0.551) else 2  # which 0.55 would hide
    assert f"(AUC 0.54, 99% interval {low:.{digits[0]}f} to {high:.{digits[1]}f}; 0.50 is chance)" in shown.sentence
    assert ("It does not prove them alike." in shown.sentence) == (ok is True)
    assert (shown.n_to_settle is not None) == (ok is None) == ("would settle it" in shown.sentence)


def test_as_many_documents_as_the_sentence_says_settle_nine_of_ten_tests_and_fewer_do_not() -> None:
    """Drawn, not computed: scores of two kinds that are alike, their AUC, and the interval that `blind` makes of it."""
    count = blind_diagnostic(None, "seen").n_to_settle
    assert count is not None
    assert f"About {count:,} seen and as many audited documents would settle it" in (
        blind_diagnostic(Blind(0.5, 0.3, 0.7, 40, 40), "seen").sentence
    )
    runs, rng = 2_000, np.random.default_rng(0)

    def passing(size: int) -> float:
        ranks = rng.random((runs, 2 * size)).argsort(axis=1).argsort(axis=1)[:, :size] + 1.0
        auc = (ranks.sum(axis=1) - size * (size + 1) / 2) / size**2
        q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
        spread = auc * (1 - auc) + (size - 1) * (q1 - auc**2) + (size - 1) * (q2 - auc**2)
        return float((auc + 2.5758293 * np.sqrt(spread) / size <= 0.55).mean())

    noise = 4 * math.sqrt(0.9 * 0.1 / runs)
    assert passing(count) == pytest.approx(0.9, abs=noise)
    assert passing(count * 3 // 4) < 0.9 - noise
    assert passing(count * 4 // 3) > 0.9 + noise


def test_the_interval_is_as_wide_as_it_says_and_twenty_documents_settle_nothing() -> None:
    for size, width in ((20, 0.24), (50, 0.15), (100, 0.11), (200, 0.07)):
        few = blind(texts(size, size), texts(1_000 + size, size), 0)
        assert few is not None
        assert (few.high - few.low) / 2 == pytest.approx(width, rel=0.15)
        assert few.outcome != "passed" or few.auc <= 0.55 - 0.8 * width


def test_too_few_documents_are_no_evidence_either_way() -> None:
    assert blind(texts(1, 19), texts(2, 300), 0) is None
    shown = blind_diagnostic(None, "seen")
    assert (shown.ok, shown.outcome) == (None, "not tested")


def test_the_same_documents_and_seed_give_the_same_answer() -> None:
    assert blind(texts(1, 60), texts(2, 90), 3) == blind(texts(1, 60), texts(2, 90), 3)


def test_the_false_alarm_rate_is_small() -> None:
    outcomes = [blind(texts(i, 80), texts(1000 + i, 80), i).outcome for i in range(30)]  # type: ignore[union-attr]
    alarms = outcomes.count("failed")
    assert alarms <= 2, "P(> 2 of 30) is below 1e-3 at 0.5% each"
