"""The density ratio by words, of calibration documents that differ from the audited ones."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.checks.classifier import blind
from pipeline.checks.held_out_auc import TOLERANCE, Compared
from pipeline.checks.words import word_counts
from pipeline.plan.density_ratio import effective_number, fit_ratio, weighted_auc

WORDS = [f"word{i}" for i in range(300)]


def texts(seed: int, count: int, topic: float, common: int = 60, words: int = 300) -> list[str]:
    """Texts of 30 words; a share `topic` of them comes from the first `common` of 300 words, or as many."""
    rng = random.Random(seed)
    return [
        " ".join(rng.choice(WORDS[: common if rng.random() < topic else words]) for _ in range(30)) + f" {seed}x{i}"
        for i in range(count)
    ]


def sample(known: Sequence[str], audit: Sequence[str]) -> tuple[Any, np.ndarray, np.ndarray]:
    audited = np.r_[np.zeros(len(known), dtype=bool), np.ones(len(audit), dtype=bool)]
    return word_counts([*known, *audit]), audited, np.random.default_rng(1).integers(-(2**62), 2**62, audited.size)


def test_the_odds_repair_a_shift_that_words_show_and_nothing_repairs_a_gap() -> None:
    known, audit = texts(1, 400, 0.0, 8, 40), texts(2, 400, 0.12, 8, 40)
    before = blind(known, audit, 0)
    words, audited, keys = sample(known, audit)
    odds = fit_ratio(words, audited, keys, 0).odds(words, keys)
    after = weighted_auc(words, Compared.of(audited), odds, 0)
    assert before is not None
    assert after is not None
    assert before.outcome == "failed"
    assert after < before.auc - 0.1
    assert 50 < effective_number(odds[~audited]) < 350
    known, audit = texts(1, 300, 0.0), [f"{text} zzz yyy xxx" for text in texts(2, 300, 0.9)]
    words, audited, keys = sample(known, audit)
    odds = fit_ratio(words, audited, keys, 0).odds(words, keys)
    after = weighted_auc(words, Compared.of(audited), odds, 0)
    assert after is not None
    assert after > 0.5 + TOLERANCE


def test_equal_weights_give_the_auc_of_the_blind_test() -> None:
    known, audit = texts(1, 100, 0.0), texts(2, 100, 0.35)
    words, audited, _ = sample(known, audit)
    plain = blind(known, audit, 0)
    assert plain is not None
    assert weighted_auc(words, Compared.of(audited), np.full(200, 3.0), 0) == plain.auc
    assert weighted_auc(words, Compared.of(audited, audited.astype(np.int64)), np.ones(200), 0) is None


def test_words_that_tell_nothing_weigh_nothing() -> None:
    effective = []
    for seed in range(6):
        words, audited, keys = sample(texts(10 + seed, 200, 0.2), texts(50 + seed, 200, 0.2))
        ratio = fit_ratio(words, audited, keys, seed)
        effective.append(effective_number(ratio.odds(words, keys)[~audited]) / 200)
    assert np.mean(effective) > 0.9


def test_no_document_is_weighed_by_a_classifier_that_read_it() -> None:
    known, audit = texts(1, 100, 0.2), texts(2, 100, 0.2)
    words, audited, keys = sample(known, audit)
    ratio = fit_ratio(words, audited, keys, 3)
    odds = ratio.odds(words, keys)
    for place in (0, 5, 150):
        swapped = audited.copy()
        swapped[place] = ~swapped[place]  # had it been taught, its other label would change its weight
        again = fit_ratio(words, swapped, keys, 3).odds(words, keys)
        assert again[place] == odds[place]
        assert (again != odds).any()
