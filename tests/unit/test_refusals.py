"""Refusals are recognised by one table in ten languages, and texts that quote or tell of one are not."""

import json
import time
from pathlib import Path

import pytest

from pipeline.endpoint.refusals import LONGEST, is_refusal, languages, repeats_reference

DOCUMENT = "The river flows through the town and under the old bridge, where the boys used to fish in summer."

_CASES = json.loads(Path(__file__).with_name("refusals.json").read_text(encoding="utf-8"))
REFUSALS: list[str] = _CASES["refusals"]
OTHERS: list[str] = _CASES["others"]
"""Texts that only quote a refusal, tell of one, or begin alike."""


@pytest.mark.parametrize("reply", REFUSALS)
def test_a_refusal_is_recognised(reply: str) -> None:
    assert is_refusal(reply, DOCUMENT)
    assert is_refusal(f"\n{reply}\n", DOCUMENT)


@pytest.mark.parametrize("reply", OTHERS)
def test_a_text_that_quotes_a_refusal_or_begins_alike_is_none(reply: str) -> None:
    assert not is_refusal(reply, DOCUMENT)


def test_each_language_of_the_table_recognises_some_of_them() -> None:
    names = {language.name for language in languages() if any(map(language.refuses, map(str.casefold, REFUSALS)))}
    assert names == {language.name for language in languages()}
    assert {"English", "German", "French", "Spanish", "Chinese"} < names


@pytest.mark.parametrize("reply", REFUSALS)
def test_a_refusal_behind_a_text_is_none(reply: str) -> None:
    """A model that recites before it stops has continued the text."""
    assert not is_refusal(f"The mill stood empty for a year. {reply}", DOCUMENT)
    assert not is_refusal(f"\u201c{reply}\u201d", DOCUMENT)


def test_a_reply_that_repeats_a_run_of_its_document_is_an_answer() -> None:
    refusal = "I can't continue this text, she said no more, and the lamp went out in the hall."
    assert not is_refusal(refusal, f"It was late. {refusal} Then he left.")
    assert not is_refusal("I can't help with that.", "I can't help with that."), "a short one, whole"
    bare = "I'm sorry, but I can't continue this copyrighted text for you today."
    assert is_refusal(bare, DOCUMENT)
    assert not is_refusal(bare, f"The page said: \u201c{bare}\u201d That was all.")
    assert repeats_reference("where the boys used to fish in summer", DOCUMENT)
    assert not repeats_reference("where the boys used to swim in summer and to fish", DOCUMENT)
    chinese = _CASES["chinese"]
    assert is_refusal(chinese["refusal"], chinese["document"])
    assert not is_refusal(chinese["refusal"], chinese["quoting"].format(chinese["refusal"]))


def test_an_object_that_other_texts_have_needs_an_apology_or_an_offer() -> None:
    assert not is_refusal("I can't share the document.", DOCUMENT)
    assert is_refusal("Sorry, I can't share the document.", DOCUMENT)
    assert is_refusal("I can't share the document. I can summarize it.", DOCUMENT)
    assert is_refusal("I can't share this document.", DOCUMENT)


def test_a_long_text_is_no_refusal_and_none_takes_long_to_read() -> None:
    assert not is_refusal(f"I can't continue copyrighted text. {'And so on it went. ' * 80}", DOCUMENT)
    for part in (
        "i see, ",
        "i understand but ",
        "thanks for ",
        "sorry, no, but, and ",
        "\uc8c4\uc1a1\ud558\uc9c0\ub9cc ",
        "\u7d9a\u3051",
    ):
        began = time.perf_counter()
        assert not is_refusal((part * LONGEST)[:LONGEST], DOCUMENT)
        assert time.perf_counter() - began < 5
