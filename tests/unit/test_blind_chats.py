"""The blind test of chats: which part gives the roles away, and what follows from it."""

from pathlib import Path
from statistics import NormalDist

import pytest

from pipeline.checks.blind import OF_CHATS, BlindTest, after_blind, blind_test
from pipeline.checks.classifier import BLOCKS
from pipeline.checks.held_out_auc import Blind, BlindBlock, documents_to_decide, interval_errors
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.plan.description import build_config
from pipeline.plan.matching import check_matched
from pipeline.run.plan import make_plan
from pipeline.selection.guarantees import Outcome
from tests.helpers.chat_runs import chat, chat_audit
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence, write_corpus

COUNT = 150
NEW = " lately, the council of elders considered a newer question about harbours"


def blind_of(folder: Path, new_questions: bool, new_answers: bool) -> BlindTest:
    """The test of chats whose audited questions or answers are of another kind."""
    rows = {}
    for role, start in (("audit", 0), ("unseen", 5_000)):
        marks = [NEW if new and role == "audit" else "" for new in (new_questions, new_answers)]
        parts = [[sentence(start + 2 * n + part) + marks[part] for part in (0, 1)] for n in range(COUNT)]
        rows[role] = [{"messages": chat(*some)} for some in parts]
    corpus = write_corpus(folder, rows, messages="messages")
    config = build_config({"run": str(folder / "run"), **chat_audit(folder / "none", corpus)})
    return blind_test(make_plan(config).shards, "unseen", config)


@pytest.mark.parametrize(("questions", "answers"), [(True, False), (False, True), (True, True)])
def test_the_part_that_gives_the_roles_away_is_named(tmp_path: Path, questions: bool, answers: bool) -> None:
    test = blind_of(tmp_path, questions, answers)
    assert (test.outcome, test.by) == (Outcome.FAILED, OF_CHATS)
    assert [one.by for one in test.blocks] == [*BLOCKS]
    for named, differs, one in zip(BLOCKS, (questions, answers), test.blocks, strict=False):
        assert (one.low > 0.9) == differs
        assert (f"the {named} differ (AUC 1.00)" in test.sentence) == differs
        assert (named in str(after_blind(test, "unseen"))) == differs
    assert test.low == max(one.low for one in test.blocks)


def test_chats_of_one_kind_are_told_apart_by_no_part(tmp_path: Path) -> None:
    test = blind_of(tmp_path, False, False)
    assert test.outcome == Outcome.INCONCLUSIVE
    assert test.n_to_settle == documents_to_decide(3) > documents_to_decide()
    assert all(one.low < 0.5 < one.high for one in test.blocks)


def test_chats_are_not_matched_by_the_words_of_both_parts(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, {"audit": [{"messages": chat("a", "b")}]}, messages="messages")
    config = build_config({"run": str(tmp_path / "run"), **chat_audit(tmp_path / "none", corpus, selections=[])})
    line = user_error(check_matched, config, str(tmp_path / "matched"))
    assert line.startswith(
        "--matched needs words or tokens of the documents, and the documents are chats: choose others"
    )


def test_intervals_of_three_parts_miss_together_as_often_as_one() -> None:
    """One interval misses in 1% of runs; by the union bound three of 1 - 0.01 / 3 do in at most 1%."""
    missed = 2 * (1 - NormalDist().cdf(interval_errors(3)))
    assert 3 * missed == pytest.approx(2 * (1 - NormalDist().cdf(interval_errors())), rel=1e-9)


@pytest.mark.parametrize(
    ("highs", "lows", "outcome", "decisive"),
    [
        ((0.54, 0.54, 0.54), (0.49, 0.49, 0.49), Outcome.PASSED, 0.54),
        ((0.54, 0.56, 0.54), (0.49, 0.49, 0.49), Outcome.INCONCLUSIVE, 0.56),
        ((0.54, 0.48, 0.54), (0.49, 0.30, 0.49), Outcome.INCONCLUSIVE, 0.48),
        ((0.54, 0.48, 0.60), (0.49, 0.30, 0.49), Outcome.INCONCLUSIVE, 0.60),
        ((0.54, 0.99, 0.70), (0.49, 0.52, 0.54), Outcome.FAILED, 0.70),
    ],
)
def test_all_parts_pass_and_one_fails(
    highs: tuple[float, ...], lows: tuple[float, ...], outcome: Outcome, decisive: float
) -> None:
    blocks = [BlindBlock(by, (low + high) / 2, low, high) for by, low, high in zip(BLOCKS, lows, highs, strict=True)]
    chosen = max(blocks, key=BlindBlock.decides)
    blind = Blind(chosen.auc, chosen.low, chosen.high, 900, 900, shared=99.0, blocks=tuple(blocks))
    assert (blind.outcome, blind.high) == (outcome, decisive)


def test_answers_of_a_prompt_and_system_turns_are_of_the_questions() -> None:
    talk = read_conversation([{"role": "system", "content": "Be brief."}, *chat("Why?", "So.", "And?", "Yes.")])
    pair = read_completion(chat("Why?", "So.", "And?"), "Yes.")
    assert isinstance(talk, Conversation)
    assert isinstance(pair, Conversation)
    assert talk.sides == ("Be brief.\n\nWhy?\n\nAnd?", "So.\n\nYes.")
    assert pair.sides == ("Why?\n\nSo.\n\nAnd?", "Yes.")
