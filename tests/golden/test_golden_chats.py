"""Scores of chats by SmolLM2 and its own template agree with a plain loop of transformers with labels of -100."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import yaml

from tests.helpers.commands import ended
from tests.helpers.finished import rows
from tests.helpers.golden_values import ABSOLUTE, RELATIVE
from tests.helpers.made_up import write_corpus

pytestmark = pytest.mark.floating_point

IGNORED = -100
MAX_TOKENS = 120
"""Of which some conversations have more."""


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Questions on functions of numpy, each answered by a paragraph of its documentation; one to three in a row."""
    made = []
    for name in sorted(dir(np)):
        paragraphs = (inspect.getdoc(getattr(np, name)) or "").split("\n\n")
        prose = [" ".join(one.split()) for one in paragraphs if one[:1].isupper() and one.strip().endswith(".")]
        if name.islower() and len(prose) > 1 and len(prose[0]) > 20:
            made.append([(f"What does numpy.{name} do?", prose[0]), ("What else is there to know?", prose[1])])
    turns = [pair for several in made for pair in several[: 1 + len(several[0][1]) % 2]]
    talks, at = [], 0
    while len(talks) < count:
        some, at = turns[at : at + 1 + len(talks) % 3], at + 1 + len(talks) % 3
        roles = [[("user", question), ("assistant", answer)] for question, answer in some]
        talks.append([{"role": role, "content": content} for pair in roles for role, content in pair])
    return talks


def plain_loss(model, tokenizer, messages) -> float:
    """The mean log-probability of the tokens of answers and ends of turns, by labels as for a training."""
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][:MAX_TOKENS]
    labels = [IGNORED] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        stop = len(tokenizer(before + message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"])
        labels[start:stop] = whole[start:stop]
    ids, wanted = torch.tensor([whole]), torch.tensor([labels[: len(whole)]])
    with torch.inference_mode():
        return -float(model(input_ids=ids, labels=wanted).loss)


def test_scores_of_chats_agree_with_a_plain_loop_over_labels(smollm2, smollm2_folder, tmp_path):
    talks = conversations(20)
    written = {
        "audit": [{"messages": talk} for talk in talks[:10]],
        "unseen": [{"messages": talk} for talk in talks[10:]],
    }
    path = tmp_path / "audit.yaml"
    given = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(smollm2_folder), "dtype": "float32"},
        "corpus": write_corpus(tmp_path, written, messages="messages"),
        "max_tokens": MAX_TOKENS,
        "detectors": ["loss"],
        "resources": {"cluster": "local"},
    }
    path.write_text(yaml.safe_dump(given))
    assert ended("run", str(path)) == 0
    found = rows(str(tmp_path / "run"))
    ids = [f"{role}-{n}" for role in written for n in range(10)]
    expected = [plain_loss(smollm2.model, smollm2.tokenizer, talk) for talk in talks]
    assert [found[name]["loss"] for name in ids] == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)
    assert {found[name]["truncated"] for name in ids} == {True, False}
    assert max(len(talk) for talk in talks) == 6
