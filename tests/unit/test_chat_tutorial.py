"""The tutorial on chats: its conversations are of documented functions, and its divisions keep what they state."""

from pathlib import Path

import numpy as np
import pytest

from examples.tutorials import questions
from examples.tutorials.divide import divide

PROSE = " ".join(
    f"Plain words of one sentence follow, {word}." for word in ("one", "two", "three", "four", "five", "six")
)
SOURCE = f'''
def documented(a):
    """Do one thing.

    {PROSE}

    Args:
        a: a number.
    """


def _hidden():
    """Do another thing.

    {PROSE}
    """


def undocumented():
    pass


class Brief:
    """A class with a summary alone."""
'''


def test_a_conversation_asks_for_a_function_and_is_answered_by_its_prose(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    (one,) = questions._of_file(tmp_path / "module.py", "package.module")
    assert (one.name, one.summary, one.prose) == ("package.module.documented", "Do one thing.", PROSE)
    row = questions._row(7, one)
    assert row["id"] == "chat-0007"
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["text"] == f"{one.question}\n\n{PROSE}"
    assert len(list(questions._distinct([one, one]))) == 1


def test_the_same_seed_gives_the_same_distinct_conversations() -> None:
    rows = questions.conversations(4, 3)
    assert rows == questions.conversations(4, 3)
    assert len({row["messages"][1]["content"] for row in rows}) == 4
    assert all(30 <= len(row["messages"][1]["content"].split()) <= 50 for row in rows)


@pytest.mark.parametrize("effect", [0.0, 6.0])
def test_divisions_keep_the_rate_and_find_what_stands_out(effect: float) -> None:
    """Scores of 20 trained and 80 others, 40 audited: without an effect power is at most alpha plus its interval."""
    rng = np.random.default_rng(4)
    rows = {f"d{n}": {"score": float(rng.normal() + effect * (n < 20))} for n in range(100)}
    line = divide(rows, {f"d{n}" for n in range(20)}, "score", divisions=60, audited=40)
    mean, low = (float(line["fdr"].split(" [")[0]), float(line["fdr"].split("[")[1].split(",")[0]))
    power = float(line["power"].split(" ")[0])
    assert low <= 0.1
    assert low <= mean
    assert power > 0.95 if effect else power < 0.2
