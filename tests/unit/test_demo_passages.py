import json
from pathlib import Path

import pytest

from examples.demo import demo
from examples.demo.passages import Passage, clean_passage, dependencies, distinct, gather_passages
from pipeline.errors import UserError
from pipeline.trial.config import load_trial
from tests.helpers.commands import user_error

PACKAGES = ("numpy", "click", "fsspec", "networkx")
WORDS = "The quick brown fox jumps over the lazy dog while seven others watch it from afar and wonder"
PROSE = f"{WORDS} {WORDS.lower()} until night."


def test_every_passage_is_prose_of_30_to_50_words_and_the_seed_decides_which() -> None:
    passages = gather_passages(60, seed=0, packages=PACKAGES)
    assert gather_passages(60, seed=0, packages=reversed(PACKAGES)) == passages
    assert gather_passages(60, seed=1, packages=PACKAGES) != passages
    assert len(passages) == 60
    for passage in passages:
        words = passage.text.split(" ")
        assert 30 <= len(words) <= 50
        assert words[0][0].isupper()
        assert passage.text.endswith(".") or len(words) == 50
        assert not any(mark in passage.text for mark in (">>>", "```", "http", "<", "|", "::", "{", "=", "\n"))


def test_numbers_of_passages_that_cannot_be_had_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--passages", "80", "--work", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "demo: passages must be at least 90, got 80\n"
    with pytest.raises(UserError, match=r"hold \d passages, 500 were asked for"):
        gather_passages(500, seed=0, packages=["six"])


def test_plain_prose_is_kept_on_one_line_and_cut_after_50_words() -> None:
    assert clean_passage(PROSE.replace(" over ", "\n    over ")) == PROSE
    long = f"{WORDS} {PROSE.lower()} {WORDS.lower()}."
    assert clean_passage(long) == " ".join(long.split()[:50])
    for other in (f"{WORDS} today.", PROSE.lower(), PROSE[:-1], PROSE.replace("fox", ">>> fox")):
        assert clean_passage(other) is None, "too short, without a capital or a full stop, or no prose"


def test_of_two_passages_with_five_words_in_common_the_first_is_kept() -> None:
    first = Passage("One, two three four five six", "a")
    second = Passage("zero ONE two three (four) five", "b")
    third = Passage("one two three four six", "c")
    assert list(distinct([first, second, third])) == [first, third]


def test_the_written_configuration_is_a_valid_trial_of_two_selections(tmp_path: Path) -> None:
    config, points = load_trial(str(demo.write_trial(tmp_path, tmp_path / "passages.jsonl", seed=7)))
    assert (config.seed, config.contaminate.seed, len(points)) == (7, 7, 1)
    assert [selection.procedure for selection in config.selections] == ["storey"]


def test_passages_of_an_earlier_run_are_used_again(tmp_path: Path) -> None:
    stored = json.dumps({"id": "a", "text": "kept", "source": "elsewhere"}) + "\n"
    (tmp_path / "passages.jsonl").write_text(stored * 3)
    assert demo.ensure_passages(tmp_path, 3, seed=0).read_text() == stored * 3
    assert "holds 3 passages instead of 6" in user_error(demo.ensure_passages, tmp_path, 6, seed=0)


def test_the_demo_reads_what_the_command_needs_whatever_else_is_installed() -> None:
    needed = dependencies("seenset")
    assert {"torch", "transformers", "ray", "pyarrow", "pandas"} <= needed  # pandas by way of others
    assert not needed & {"seenset", "pytest", "mypy", "sphinx", "deepspeed"}
