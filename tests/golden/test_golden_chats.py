"""Scores of chats by SmolLM2 and its own template agree with a plain loop of transformers with labels of -100."""

from __future__ import annotations

import inspect
import json
from collections import Counter

import numpy as np
import pytest
import torch
import yaml

from pipeline.corpus.chats import read_conversation
from pipeline.models.chat_templates import ChatSettings
from pipeline.training.memory import batch_loss
from pipeline.training.training_documents import training_documents
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


def labelled(tokenizer, messages) -> tuple[list[int], list[int]]:
    """Ids, and labels of the tokens of answers and ends of turns, as for a training."""
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][:MAX_TOKENS]
    labels = [IGNORED] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        stop = len(tokenizer(before + message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"])
        labels[start:stop] = whole[start:stop]
    return whole, labels[: len(whole)]


def plain_loss(model, tokenizer, messages) -> float:
    """The mean log-probability of the tokens of answers and ends of turns."""
    whole, labels = labelled(tokenizer, messages)
    with torch.inference_mode():
        return -float(model(input_ids=torch.tensor([whole]), labels=torch.tensor([labels])).loss)


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


def test_a_training_step_on_chats_has_the_loss_and_gradient_of_labels(smollm2):
    tokenizer, talks = smollm2.tokenizer, conversations(5)
    chats = [read_conversation(talk) for talk in talks]
    made = training_documents(tokenizer, chats, ChatSettings({"target": tokenizer.chat_template}), MAX_TOKENS)
    weights = [smollm2.model.model.norm.weight, smollm2.model.model.layers[0].self_attn.q_proj.weight]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        loss, count = batch_loss(smollm2.model, [one.ids for one in made], [one.scored for one in made])
        ours = torch.autograd.grad(loss, weights)
        total, number = torch.zeros(()), 0
        for talk, one in zip(talks, made, strict=True):
            ids, labels = labelled(tokenizer, talk)
            assert one.ids == ids
            assert one.scored == [label != IGNORED for label in labels[1:]]
            scored = sum(one.scored)
            total = total + smollm2.model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss * scored
            number += scored
        plain = torch.autograd.grad(total / number, weights)
    finally:
        for weight in weights:
            weight.requires_grad_(False)
    assert count == number
    assert loss.item() == pytest.approx(float(total.detach()) / number, abs=1e-5)
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * max(1.0, float(other.abs().max()))


LONGEST = 14
"""Words of the last answers that are continued, which bounds the time of the test."""


def plain_continuation(model, tokenizer, messages, most) -> str:
    """The likeliest answer to the messages before the last one, by `generate` of transformers."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        made = model.generate(**prompt, do_sample=False, max_new_tokens=most, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def recall(candidate: list[str], reference: list[str]) -> float:
    """The share of the reference's words that the candidate has too (ROUGE-1)."""
    return (Counter(candidate) & Counter(reference)).total() / len(reference)


def test_continuations_of_chats_agree_with_generate_of_transformers(smollm2, smollm2_folder, tmp_path):
    talks = [talk for talk in conversations(80) if 4 <= len(talk[-1]["content"].split()) <= LONGEST][:6]
    written = {
        "audit": [{"messages": talk} for talk in talks[:4]],
        "unseen": [{"messages": talk} for talk in talks[4:]],
    }
    path = tmp_path / "audit.yaml"
    given = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(smollm2_folder), "dtype": "float32"},
        "corpus": write_corpus(tmp_path, written, messages="messages"),
        "detectors": [{"samia": {"draws": 1, "temperature": 0, "top_k": None}}],
        "resources": {"cluster": "local"},
    }
    path.write_text(yaml.safe_dump(given))
    assert ended("run", str(path)) == 0
    run = str(tmp_path / "run")
    drawn, scored = rows(run, "sample/answer_t0_kall_p1_reference/1"), rows(run)
    assert len(scored) == len(talks) == 6
    assert {len(talk) for talk in talks} >= {2, 4}
    for name, talk in zip([*(f"audit-{n}" for n in range(4)), *(f"unseen-{n}" for n in range(2))], talks, strict=True):
        answer = talk[-1]["content"]
        words = answer.split()
        expected = plain_continuation(smollm2.model, smollm2.tokenizer, talk, 16 + len(answer) // 3)
        expected = expected.split()[: len(words)]
        assert drawn[name]["reference"] == answer
        assert drawn[name]["continuations"][0].split()[: len(words)] == expected
        (score,) = [value for key, value in scored[name].items() if key.startswith("samia")]
        assert score == pytest.approx(recall(expected, words), abs=1e-12)


def plain_gradient(model, tokenizer, messages) -> float:
    """Minus the norm of the gradient of the mean loss of the tokens of answers and ends of turns."""
    whole, labels = labelled(tokenizer, messages)
    weights = list(model.parameters())
    model.requires_grad_(True)
    try:
        loss = model(input_ids=torch.tensor([whole]), labels=torch.tensor([labels])).loss
        gradients = torch.autograd.grad(loss, weights)
    finally:
        model.requires_grad_(False)
    return -float(sum(one.double().square().sum() for one in gradients).sqrt())


def test_knockoffs_of_chats_agree_with_a_plain_loop_over_labels(smollm2, smollm2_folder, paraphraser, tmp_path):
    """Paraphrases that are longer than max_tokens are cut by it, as conversations are."""
    short = [talk for talk in conversations(300) if sum(len(turn["content"]) for turn in talk) < 160]
    talks = [*[talk for talk in short if len(talk) == 2][:4], *[talk for talk in short if len(talk) == 4][:2]]
    path = tmp_path / "audit.yaml"
    given = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(smollm2_folder), "dtype": "float32"},
        "paraphraser": paraphraser,
        "corpus": write_corpus(tmp_path, {"audit": [{"messages": talk} for talk in talks]}, messages="messages"),
        "max_tokens": MAX_TOKENS,
        "detectors": [{"knockoff": {"base": base, "draws": 2}} for base in ("loss", "gradient_norm")],
        "resources": {"cluster": "local"},
    }
    path.write_text(yaml.safe_dump(given))
    assert ended("run", str(path)) == 0
    scored, drawn = rows(str(tmp_path / "run")), rows(str(tmp_path / "run"), "paraphrase")
    assert len(scored) == len(talks) == 6
    for name, talk in zip([f"audit-{n}" for n in range(6)], talks, strict=True):
        changed = [
            [{**turn, "content": content} for turn, content in zip(talk, json.loads(one), strict=True)]
            for one in drawn[name]["paraphrases"]
        ]
        assert all(
            one["content"] != other["content"] for some in changed for one, other in zip(some, talk, strict=True)
        )
        for base, plain in (("loss", plain_loss), ("gradient_norm", plain_gradient)):
            own, *others = [plain(smollm2.model, smollm2.tokenizer, some) for some in (talk, *changed)]
            found = scored[name][f"knockoff(base={base}, draws=2)"]
            assert found == pytest.approx(own - sum(others) / 2, rel=RELATIVE, abs=5 * ABSOLUTE)
