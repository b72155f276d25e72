"""A blind classifier finds what should not be there, and nothing where nothing is."""

from __future__ import annotations

import random

import pytest

from pipeline.audit.blind import blind, blind_diagnostic

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


def test_too_few_documents_are_no_evidence_either_way() -> None:
    assert blind(texts(1, 19), texts(2, 300), 0) is None
    assert blind_diagnostic(None, "seen").ok is None


def test_the_same_documents_and_seed_give_the_same_answer() -> None:
    assert blind(texts(1, 60), texts(2, 90), 3) == blind(texts(1, 60), texts(2, 90), 3)


def test_the_false_alarm_rate_is_small() -> None:
    alarms = sum(not blind(texts(i, 80), texts(1000 + i, 80), i).ok for i in range(30))  # type: ignore[union-attr]
    assert alarms <= 2, "P(> 2 of 30) is below 1e-3 at 0.5% each"
