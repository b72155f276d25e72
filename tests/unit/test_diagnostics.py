"""A blind classifier finds what should not be there, and nothing where nothing is."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from pipeline.checks import blind as wording
from pipeline.checks.blind import after_blind, blind_diagnostic, blind_test, blocks_of_documents
from pipeline.checks.classifier import blind, blind_result
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.checks.held_out_auc import Blind, Compared, held_out
from pipeline.corpus.documents import Document
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from tests.helpers.made_up import write_audit, write_corpus
from tests.helpers.mean_classifier import Means

WORDS = [f"word{i}" for i in range(400)]


def texts(seed: int, count: int, words: list[str] = WORDS) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=40)) for _ in range(count)]


@pytest.mark.parametrize(
    ("low", "high", "outcome", "words"),
    [
        (0.52, 0.66, "inconclusive", "too few documents to determine whether the words"),
        (0.54, 0.66, "failed", "above 0.53 at 99% confidence"),
        (0.45, 0.55, "passed", "at most 0.55 at 99% confidence"),
        (0.45, 0.551, "inconclusive", "too few documents to determine whether the words"),
        (0.535, 0.545, "failed", "not supported"),
        (0.53, 0.545, "passed", "It does not prove them alike."),
    ],
)
def test_the_blind_test_passes_or_fails_only_clearly(low: float, high: float, outcome: str, words: str) -> None:
    shown = blind_diagnostic(Blind(0.54, low, high, 100, 100), "unseen")
    assert shown.outcome == outcome
    assert words in shown.sentence
    digits = 2, 3 if high in (0.545, 0.551) else 2  # which 0.55 would hide
    assert f"(AUC 0.54, 99% interval {low:.{digits[0]}f} to {high:.{digits[1]}f}; 0.50 is chance)" in shown.sentence
    assert ("It does not prove them alike." in shown.sentence) == (outcome == "passed")
    assert (shown.n_to_settle is not None) == (outcome == "inconclusive")
    assert outcome != "inconclusive" or len(shown.sentence.split()) < 40, (
        "what decides it is stated once, and what to do next apart"
    )


@pytest.mark.parametrize(
    ("auc", "low", "high", "outcome", "words"),
    [
        (0.35, 0.17, 0.53, "inconclusive", "too few documents to determine whether the words"),
        (0.48, 0.43, 0.53, "passed", "hardly tells"),
        (0.48, 0.429, 0.531, "inconclusive", "too few documents to determine whether the words"),
        (0.46, 0.42, 0.5, "passed", "hardly tells"),
        (
            0.459,
            0.42,
            0.498,
            "inconclusive",
            "below 0.50 than chance explains (AUC 0.46, 99% interval 0.42 to 0.498;",
        ),
    ],
)
def test_an_auc_below_one_half_is_one_half_and_an_interval_below_it_decides_nothing(
    auc: float, low: float, high: float, outcome: str, words: str
) -> None:
    shown = blind_diagnostic(Blind(auc, low, high, 100, 100), "unseen")
    assert shown.outcome == outcome
    assert words in shown.sentence
    below = high < 0.5
    assert (shown.n_to_settle is None) == (below or outcome == "passed")
    step = after_blind(shown, "unseen")
    assert (step is None) == (outcome == "passed")
    assert step is None or ("at random, not each beside an audited one" in step) == below


def paired(seed: int, count: int, share: float) -> tuple[list[str], list[str]]:
    """Unseen and audited texts, one of each about a topic; a share of the audited ones state a year."""
    rng = np.random.default_rng([seed, count])

    def about(topic: int, dated: bool) -> str:
        own = rng.random(60) < 0.5
        words = np.where(own, topic * 20 + rng.integers(0, 20, 60), rng.integers(10**6, 10**6 + 800, 60))
        return " ".join([*(f"word{word}" for word in words[1:]), "2025" if dated else f"word{words[0]}"])

    return [about(i, False) for i in range(count)], [about(i, rng.random() < share) for i in range(count)]


@pytest.mark.parametrize("count", [60, 200])
def test_pairs_of_one_document_of_each_role_do_not_hide_a_difference(count: int) -> None:
    """Four of ten audited documents state a year; the test had passed with every one of these draws."""
    tests = [blind(*paired(seed, count, 0.4), seed) for seed in range(4)]
    assert all(test.auc < 0.45 for test in tests)
    assert all(test.outcome == "inconclusive" for test in tests)


def alike(size: int, seed: int) -> Blind:
    """A test of two kinds that are alike: 20 features, and a classifier that goes by the difference of the means."""
    features = np.random.default_rng([seed, size]).normal(size=(2 * size, 20))
    held = held_out(features, Compared.of(np.arange(2 * size) >= size), seed, Means())
    return blind_result(held)


def test_as_many_documents_as_stated_decide_nine_of_ten_tests_and_fewer_do_not() -> None:
    """Drawn, not computed: the halved test of two kinds that are alike."""
    count = blind_diagnostic(None, "seen").n_to_settle
    assert count == 1_600
    assert "With about 1,600 documents of each kind nine of ten tests pass" in wording.how_decided(wording.WORDS, False)
    runs = 80

    def passing(size: int) -> float:
        return float(np.mean([alike(size, seed).outcome == "passed" for seed in range(runs)]))

    noise = 3 * math.sqrt(0.9 * 0.1 / runs)
    assert passing(count) > 0.9 - noise
    assert passing(count // 2) < 0.9 - noise


def test_too_few_documents_are_no_evidence_either_way() -> None:
    assert blind(texts(1, 3), texts(2, 300), 0) is None
    shown = blind_diagnostic(None, "seen")
    assert (shown.outcome, shown.auc) == ("inconclusive", None)
    few = blind(texts(1, 4), texts(2, 4), 0)
    assert few.outcome == "inconclusive"


def test_near_duplicates_and_groups_are_one_block_and_a_group_of_both_roles_is_none() -> None:
    copies = [f"{texts(9, 1)[0]} {number}" for number in range(3)]
    documents = [Document(0, "", text, None) for text in [*copies, *texts(3, 5)]]
    documents += [Document(0, "", text, group) for text, group in zip(texts(4, 4), "xxyy", strict=True)]
    audited = np.array([*[True] * 11, False])
    block = blocks_of_documents(documents, audited, 0.8)
    assert len(set(block[:3].tolist())) == 1, "near-duplicates"
    assert block[8] == block[9], "a group of one role"
    assert block[10] != block[11], "a group of both roles"
    assert np.unique(block).size == 1 + 5 + 1 + 2


def test_a_run_compares_groups_and_not_their_documents(tmp_path: Path) -> None:
    """40 authors with words of their own, each wholly in one role: by document they differ, by author they do not."""
    rng = np.random.default_rng(0)
    authors_of = np.split(rng.permutation(40), 2)
    rows = {
        role: [
            {"text": " ".join(f"w{author}x{word}" for word in line), "author": str(author)}
            for author in authors
            for line in rng.integers(0, 30, (8, 24))
        ]
        for role, authors in zip(("unseen", "audit"), authors_of, strict=True)
    }

    def tested(**columns: str) -> BlindDiagnostic:
        path = write_audit(tmp_path, tmp_path, corpus=write_corpus(tmp_path, rows, **columns))
        plan = make_plan(load_config(str(path)))
        return blind_test(plan.shards, "unseen", plan.config)

    assert tested().outcome == "failed"
    grouped = tested(group="author")
    assert grouped.outcome == "inconclusive"
    assert (grouped.n_calibration, grouped.n_calibration_blocks) == (160, 20)
    assert (grouped.n_audit, grouped.n_audit_blocks) == (160, 20)
    assert "documents of each kind (documents of one group and near-duplicates count once)" in wording.how_decided(
        wording.WORDS, True
    )
    step = after_blind(grouped, "unseen")
    assert step is not None
    assert "where documents of one group and near-duplicates count once" in step


def test_a_test_of_too_few_blocks_counts_them_and_asks_for_more_of_these(tmp_path: Path) -> None:
    rows = {
        role: [{"text": one, "author": f"{role} {number % blocks}"} for number, one in enumerate(texts(blocks, 40))]
        for role, blocks in (("unseen", 8), ("audit", 2))
    }
    path = write_audit(tmp_path, tmp_path, corpus=write_corpus(tmp_path, rows, group="author"))
    plan = make_plan(load_config(str(path)))
    test = blind_test(plan.shards, "unseen", plan.config)
    assert (test.outcome, test.auc, test.n_audit, test.n_audit_blocks) == ("inconclusive", None, 40, 2)
    step = after_blind(test, "unseen")
    assert step is not None
    assert "of each, where documents of one group and near-duplicates count once, decide" in step
