from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from examples.demo import demo
from examples.demo.passages import Passage, clean_passage, distinct, gather_passages, ngrams
from pipeline.config import load_config
from pipeline.errors import UserError

PACKAGES = ("numpy", "click", "fsspec", "networkx")
WORDS = "The quick brown fox jumps over the lazy dog while seven others watch it from afar and wonder"
PROSE = f"{WORDS} {WORDS.lower()} until night."


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    return gather_passages(60, seed=0, packages=PACKAGES)


def test_every_passage_is_plain_prose_of_30_to_50_words(passages: list[Passage]) -> None:
    assert len(passages) == 60
    for passage in passages:
        words = passage.text.split(" ")
        assert 30 <= len(words) <= 50
        assert words[0][0].isupper()
        assert passage.text.endswith(".") or len(words) == 50
        assert not any(mark in passage.text for mark in (">>>", "```", "http", "<", "|", "::", "{", "=", "\n"))


def test_no_two_passages_share_five_words_in_a_row(passages: list[Passage]) -> None:
    seen: set[tuple[str, ...]] = set()
    for passage in passages:
        assert seen.isdisjoint(ngrams(passage.text))
        seen |= ngrams(passage.text)


def test_the_seed_decides_which_passages_and_nothing_else_does(passages: list[Passage]) -> None:
    assert gather_passages(60, seed=0, packages=reversed(PACKAGES)) == passages
    assert gather_passages(60, seed=1, packages=PACKAGES) != passages


def test_too_few_passages_are_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(UserError, match=r"hold \d passages, 500 were asked for"):
        gather_passages(500, seed=0, packages=["six"])


def test_plain_prose_is_kept_on_one_line() -> None:
    assert clean_passage(PROSE.replace(" over ", "\n    over ")) == PROSE


def test_prose_of_more_than_50_words_is_cut() -> None:
    long = f"{WORDS} {PROSE.lower()} {WORDS.lower()}."
    text = clean_passage(long)
    assert text is not None
    assert text.split() == long.split()[:50]


@pytest.mark.parametrize(
    "paragraph",
    [
        pytest.param(WORDS + " today.", id="too short"),
        pytest.param(" ".join([WORDS] * 6) + ".", id="too long"),
        pytest.param(PROSE.lower(), id="no capital"),
        pytest.param(PROSE[:-1], id="no full stop"),
        pytest.param(PROSE.replace("fox", "fox=1"), id="assignment"),
        pytest.param(PROSE.replace("fox", ">>> fox"), id="prompt"),
        pytest.param(PROSE.replace("fox", "https://fox"), id="address"),
        pytest.param(PROSE.replace("fox", "foo::bar"), id="path"),
        pytest.param(PROSE.replace("The", "Returns:", 1), id="list"),
        pytest.param(PROSE.replace("the", "x_1").replace("it", "f(2)").replace("and", "a.b"), id="not plain"),
    ],
)
def test_what_is_no_plain_prose_is_left_out(paragraph: str) -> None:
    assert clean_passage(paragraph) is None


def test_of_two_passages_with_five_words_in_common_the_first_is_kept() -> None:
    first = Passage("One, two three four five six", "a")
    second = Passage("zero ONE two three (four) five", "b")
    third = Passage("one two three four six", "c")
    assert list(distinct([first, second, third])) == [first, third]


def test_the_parts_are_equal_disjoint_and_together_everything() -> None:
    texts = [f"text {i}" for i in range(30)]
    split = demo.split_passages(texts, seed=3)
    assert len(split.trained) == len(split.unseen) == len(split.never_seen) == 10
    assert sorted(split.trained + split.unseen + split.never_seen) == sorted(texts)
    assert demo.split_passages(texts, seed=3) == split
    assert demo.split_passages(texts, seed=4) != split
    with pytest.raises(UserError, match="multiple of 3, got 31"):
        demo.split_passages([*texts, "one more"], seed=3)


def test_the_audited_files_hold_no_labels_and_the_truth_names_the_trained(tmp_path: Path) -> None:
    split = demo.split_passages([f"text {i}" for i in range(30)], seed=0)
    demo.write_corpus(tmp_path, split, seed=0)
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    unseen = [json.loads(line) for line in (tmp_path / "unseen.jsonl").read_text().splitlines()]
    truth = json.loads((tmp_path / "truth.json").read_text())["trained"]
    assert all(set(row) == {"id", "text"} for row in audit + unseen)
    assert len({row["id"] for row in audit + unseen}) == 30
    assert {row["text"] for row in unseen} == set(split.unseen)
    assert {row["text"] for row in audit if row["id"] in truth} == set(split.trained)
    assert {row["text"] for row in audit if row["id"] not in truth} == set(split.never_seen)
    assert truth != [row["id"] for row in audit][: len(truth)]  # neither is the order a label


def test_the_written_configuration_is_a_valid_audit_that_names_no_label(tmp_path: Path) -> None:
    model = {"path": "folder", "gguf_file": "model.gguf"}
    path = demo.write_audit(tmp_path, model, tmp_path / "adapters" / "a", seed=7)
    config = load_config(str(path))
    assert config.seed == 7
    assert [selection.procedure for selection in config.selections] == ["ptdi", "bh"]
    assert config.model.adapter == str(tmp_path / "adapters" / "a")
    assert "truth" not in yaml.safe_dump(yaml.safe_load(path.read_text()))


def test_a_verdict_counts_the_true_and_the_false() -> None:
    verdict = demo.judge(["a", "b", "x"], ["a", "b", "c", "d", "x", "y"], ["a", "b", "c", "d"])
    assert (verdict.selected, verdict.true) == (3, 2)
    assert verdict.share_false == pytest.approx(1 / 3)
    assert verdict.power == 0.5
    nothing = demo.judge([], ["a"], ["a"])
    assert (nothing.share_false, nothing.power) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("selected", "truth", "message"),
    [
        (["z"], ["a"], "1 selected ids are not in the audit, first 'z'"),
        (["a"], ["a", "z"], "1 trained ids are not in the audit, first 'z'"),
        (["a", "a"], ["a"], "1 ids are selected more than once"),
        (["a"], [], "names no trained passage"),
    ],
)
def test_ids_that_do_not_match_the_truth_are_an_error(selected: list[str], truth: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        demo.judge(selected, ["a", "b"], truth)


def test_a_number_of_passages_that_cannot_work_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--passages", "100", "--work", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "demo: passages must be a multiple of 3 and at least 90, got 100\n"


def test_passages_of_an_earlier_run_are_used_again(tmp_path: Path) -> None:
    stored = [{"text": "kept", "source": "elsewhere"}] * 3
    (tmp_path / "passages.json").write_text(json.dumps(stored))
    assert demo.ensure_passages(tmp_path, 3, seed=0) == ["kept"] * 3
    with pytest.raises(UserError, match="holds 3 passages instead of 6"):
        demo.ensure_passages(tmp_path, 6, seed=0)
