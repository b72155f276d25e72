"""A blind classifier finds what should not be there, and nothing where nothing is."""

from __future__ import annotations

import random

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
    assert found.ok
    assert found.low < 0.5


def test_documents_of_another_year_are_told_apart() -> None:
    dated = [f"{text} 2025" if i % 2 else text for i, text in enumerate(texts(7, 300))]
    found = blind(texts(1, 300), dated, 0)
    assert found is not None
    assert not found.ok
    shown = blind_diagnostic(found, "unseen")
    assert shown.ok is False
    assert "not supported" in shown.sentence


@pytest.mark.parametrize("low", [0.52, 0.54])
def test_the_sentence_of_the_blind_test_says_what_it_was_held_against(low: float) -> None:
    shown = blind_diagnostic(Blind(0.59, low, 0.66, 100, 100), "unseen")
    assert shown.ok is (low == 0.52)
    assert "above 0.53 at 99% confidence" in shown.sentence
    assert f"(AUC 0.59, 99% interval {low:.2f} to 0.66; 0.50 is chance)" in shown.sentence
    assert ("It does not prove them alike." in shown.sentence) == shown.ok


def test_too_few_documents_are_no_evidence_either_way() -> None:
    assert blind(texts(1, 19), texts(2, 300), 0) is None
    assert blind_diagnostic(None, "seen").ok is None


def test_the_same_documents_and_seed_give_the_same_answer() -> None:
    assert blind(texts(1, 60), texts(2, 90), 3) == blind(texts(1, 60), texts(2, 90), 3)


def test_the_false_alarm_rate_is_small() -> None:
    alarms = sum(not blind(texts(i, 80), texts(1000 + i, 80), i).ok for i in range(30))  # type: ignore[union-attr]
    assert alarms <= 2, "P(> 2 of 30) is below 1e-3 at 0.5% each"
