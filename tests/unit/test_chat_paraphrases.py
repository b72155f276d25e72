"""Knockoffs of chats: contents are paraphrased and nothing else, and a paraphrase ends where its conversation does."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import Conversation, read_conversation
from pipeline.models.chat_templates import ChatEnd, ChatTemplate, ReadChat
from pipeline.models.load import open_model
from tests.helpers import chat_templates as templates
from tests.helpers.chat_runs import chat, chat_audit, run_chats, save_chat_model, talks
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.finished import rows
from tests.helpers.made_up import sentence, write_corpus
from tests.helpers.tiny_t5 import save_tiny_t5

THOUGHT = "<think>\nLet me see\n</think>\n\n"
CALL = {"function": {"name": "look", "arguments": {"at": "it"}}}
TALK = [
    {"role": "system", "content": "Be brief. Be kind."},
    {"role": "user", "content": " What is it?\n"},
    {"role": "assistant", "content": f"{THOUGHT}It is this. ", "tool_calls": [CALL]},
    {"role": "tool", "content": "Nothing was found."},
    {"role": "user", "content": "And what is that?"},
    {"role": "assistant", "content": f"{THOUGHT}That is it, and more of it."},
]
PLAIN = [{**message, "content": message["content"].removeprefix(THOUGHT)} for message in TALK if "tool" not in message]
NAMES = ("CHATML", "MARKED", "MACRO", "LLAMA", "QWEN", "DEEPSEEK", "PHI", "HARMONY", "BETWEEN", "IN_PARTS", "OWN_TAGS")
KNOCKOFFS = [{"knockoff": {"base": base, "draws": 2}} for base in ("loss", "zlib", "lowercase", "gradient_norm")]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return chat_tokenizer(tiny_model_folder)


@pytest.fixture(scope="module")
def chat_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tiny_model_folder, tmp_path_factory.mktemp("models") / "chat")


def conversation(value: Any) -> Conversation:
    read = read_conversation(value)
    assert isinstance(read, Conversation), read
    return read


def read_whole(made: ChatTemplate, talk: Conversation, most: int, *ends: ChatEnd) -> ReadChat | None:
    (read,) = made.read([talk], most, ends)
    return read if isinstance(read, ReadChat) else None


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_as_its_own_paraphrase_is_read_to_the_same_character(
    tokenizer: Any, name: str, whole: bool
) -> None:
    """At every limit, so that it ends in contents, in tags, before and behind ends of turns."""
    made, talk = ChatTemplate(getattr(templates, name), tokenizer, whole=whole), conversation(TALK)
    full = read_whole(made, talk, 10_000)
    assert full is not None
    assert full.end.behind is None
    endings = set()
    for most in range(2, len(full.tokens.ids) + 1):
        read = read_whole(made, talk, most)
        if read is None:
            continue
        again = read_whole(made, talk, 10_000, read.end)
        assert again is not None
        assert (again.tokens.kept, again.answers) == (read.tokens.kept, read.answers)
        if again.tokens.ids == read.tokens.ids:  # else the end of a word has other tokens when it stands alone
            assert again.scored == read.scored
        endings.add((read.end.turn, (read.end.behind or 0) >= 0))
    assert {(5, False), (5, True)} <= endings


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_answer_has_no_end_of_its_turn_however_short_its_paraphrase_is(tokenizer: Any, name: str) -> None:
    made, talk = ChatTemplate(getattr(templates, name), tokenizer), conversation(TALK)
    full = read_whole(made, talk, 10_000)
    assert full is not None
    for most in range(2, len(full.tokens.ids) + 1):
        read = read_whole(made, talk, most)
        if read is None:
            continue
        end, content = read.end, talk.turns[read.end.turn].content
        assert end.turn in (2, 5)
        if not content[: end.kept].removeprefix(THOUGHT).strip() or not content.startswith(THOUGHT, 0, end.kept):
            continue  # in its reasoning, which no paraphrase changes
        contents = [turn.content for turn in talk.turns[: end.turn]]
        short = talk.replaced([*contents, f"{THOUGHT}So{content[end.kept :]}"])
        again = read_whole(made, short, 10_000, end)
        assert again is not None

        def ends(one: ReadChat) -> int:
            scored = [number for number, keep in zip(one.tokens.ids[1:], one.scored, strict=True) if keep]
            return sum(number in made.ends for number in scored)

        assert ends(again) == ends(read)
        assert again.answers.endswith("So") or end.behind is None or end.behind >= 0


@pytest.mark.parametrize(
    ("content", "stays"),
    [
        ("One. <b>Two</b>", []),
        ("<think>One</think> Two", ["<think>One</think>"]),
        ("One</think> Two", ["One</think>"]),
        ("One <think>Two", ["<think>Two"]),
        ("A <tool_call>{}</tool_call> B <think>x</think> C", ["<tool_call>{}</tool_call>", "<think>x</think>"]),
        ("<think>A <tool_call>", ["<think>A <tool_call>"]),
    ],
)
def test_reasoning_and_calls_are_what_stands_between_tags_that_a_template_names(
    tokenizer: Any, content: str, stays: list[str]
) -> None:
    spans = ChatTemplate(templates.TOOLS + "{# '</tool_call>' #}", tokenizer).wrapped(content)
    assert [content[start:stop] for start, stop in spans] == stays


def drawn_of(
    folder: Path, model: Path, paraphraser: dict[str, str], written: Sequence[Any], **changed: Any
) -> dict[str, Any]:
    """The rows of the paraphrases of some conversations."""
    corpus = write_corpus(folder, {"audit": [{"messages": one} for one in written]}, messages="messages")
    given = chat_audit(model, corpus, detectors=KNOCKOFFS[:1], paraphraser=paraphraser, selections=[], **changed)
    run_chats(folder, {**given, "error_budget": 1.0})
    return rows(folder / "run", "paraphrase")


def test_contents_of_users_and_of_the_assistant_change_and_nothing_else(
    tmp_path: Path, chat_model: Path, paraphraser: dict[str, str]
) -> None:
    row = drawn_of(tmp_path, chat_model, paraphraser, [TALK])["audit-0"]
    assert row["reason"] is None
    for drawn in row["paraphrases"]:
        contents = json.loads(drawn)
        assert len(contents) == len(TALK)
        given = [str(message["content"]) for message in TALK]
        assert [contents[0], contents[3]] == [given[0], given[3]]
        for place in (2, 5):
            assert contents[place].startswith(THOUGHT)
        assert all(contents[place] != given[place] for place in (1, 2, 4, 5))
        assert contents[1][0] == " "
        assert contents[1][-1] == "\n"


def test_what_lies_behind_max_tokens_is_not_paraphrased(
    tmp_path: Path, chat_model: Path, paraphraser: dict[str, str]
) -> None:
    talk = chat("Why?", sentence(3, 12), "And then?", sentence(4, 400))
    tokenizer = chat_tokenizer(chat_model, templates.CHATML)
    made = ChatTemplate(templates.CHATML, tokenizer)
    for most in (24, 60):
        folder = tmp_path / str(most)
        folder.mkdir()
        read = read_whole(made, conversation(talk), most)
        assert read is not None
        row = drawn_of(folder, chat_model, paraphraser, [talk], max_tokens=most)["audit-0"]
        for drawn in row["paraphrases"]:
            contents = json.loads(drawn)
            assert len(contents) == read.end.turn + 1
            assert len(contents[-1]) < len(talk[-1]["content"]) / 2


def plain_evidence(model: Any, read: ReadChat) -> tuple[float, float]:
    """The mean log-probability of the scored tokens, and minus the norm of its gradient, by labels of -100."""
    labels = [-100, *(number if keep else -100 for number, keep in zip(read.tokens.ids[1:], read.scored, strict=True))]
    model.zero_grad()
    loss = model(input_ids=torch.tensor([read.tokens.ids]), labels=torch.tensor([labels])).loss
    loss.backward()
    loss = loss.detach()
    squares = [one.grad.double().square().sum() for one in model.parameters() if one.grad is not None]
    return -float(loss), -float(sum(squares) ** 0.5)


def test_w_is_the_score_of_answers_less_the_mean_of_those_of_paraphrases(
    tmp_path: Path, chat_model: Path, paraphraser: dict[str, str]
) -> None:
    """With one worker and with two the same to the byte."""
    corpus = write_corpus(tmp_path, {"audit": talks(0, 14), "unseen": talks(300, 12)}, messages="messages")
    given = chat_audit(chat_model, corpus, detectors=["loss", "gradient_norm", *KNOCKOFFS], paraphraser=paraphraser)
    given = {**given, "error_budget": 1.0, "max_tokens": 40}
    resources = {"cluster": "local", "shard_bytes": 1000}
    scored, drawn = {}, {}
    for workers in (1, 2):
        run_chats(tmp_path, {**given, "resources": {**resources, "actors": workers}}, f"run{workers}")
        folder = tmp_path / f"run{workers}"
        scored[workers], drawn[workers] = rows(folder), rows(folder, "paraphrase")
    assert scored[1] == scored[2]
    assert drawn[1] == drawn[2]
    lm = open_model(ModelConfig(path=str(chat_model), dtype="float32"))
    lm.model.requires_grad_(True)
    made = ChatTemplate(templates.CHATML, lm.tokenizer)
    written = {"audit": talks(0, 14), "unseen": talks(300, 12)}
    talked = {f"{role}-{n}": one["messages"] for role, some in written.items() for n, one in enumerate(some)}
    cut = 0
    for name, row in list(scored[1].items())[:10]:
        talk = conversation(talked[name])
        read = read_whole(made, talk, 40)
        assert read is not None
        cut += read.end.behind is not None
        each = []
        for text in drawn[1][name]["paraphrases"]:
            contents = json.loads(text)
            rest = talk.turns[read.end.turn].content[read.end.kept :]
            other = read_whole(made, talk.replaced([*contents[:-1], contents[-1] + rest]), 40, read.end)
            assert other is not None
            each.append(plain_evidence(lm.model, other))
        own = plain_evidence(lm.model, read)
        for place, base in enumerate(("loss", "gradient_norm")):
            assert row[base] == pytest.approx(own[place], abs=1e-4)
            difference = own[place] - sum(one[place] for one in each) / 2
            assert row[f"knockoff(base={base}, draws=2)"] == pytest.approx(difference, abs=2e-4)
    assert 0 < cut < 10, "some are cut by max_tokens, and some are not"
    refused = pq.read_table(tmp_path / "run1/quarantine").to_pylist()
    longer = [row for row in refused if row["message"].startswith("paraphrase ")]
    assert longer
    for row in longer:
        assert row["reason"] == "too_short"
        numbers = re.fullmatch(
            r"paraphrase [12]: max_tokens, which is 40 here, ends before the first answer at token (\d+)",
            row["message"],
        )
        assert numbers is not None
        assert int(numbers[1]) > 40


def test_a_conversation_without_a_usable_paraphrase_is_quarantined_with_its_reason(
    tmp_path: Path, chat_model: Path
) -> None:
    save_tiny_t5(tmp_path / "mute", mute=True)
    drawn = drawn_of(tmp_path, chat_model, {"path": str(tmp_path / "mute")}, [chat("Why?", "For it."), chat("", "")])
    assert {row["reason"] for row in drawn.values()} == {"model_error"}
    refused = {row["doc_id"]: row for row in pq.read_table(tmp_path / "run/quarantine").to_pylist()}
    assert (refused["audit-0"]["reason"], refused["audit-1"]["reason"]) == ("model_error", "not_chat")
    assert refused["audit-0"]["message"] == "a paraphrase is empty, after 3 redraws"


def test_a_reference_with_the_same_weights_and_template_leaves_no_difference(
    tmp_path: Path, chat_model: Path, paraphraser: dict[str, str]
) -> None:
    """Both models end to read a paraphrase at the same character, wherever max_tokens cut the conversation."""
    shutil.copytree(chat_model, tmp_path / "same")
    corpus = write_corpus(tmp_path, {"audit": talks(0, 14)}, messages="messages")
    detectors = [{"knockoff": {"base": base, "draws": 2}} for base in ("reference", "loss")]
    for score in ("answers", "all"):
        given = chat_audit(chat_model, corpus, detectors=detectors, paraphraser=paraphraser, selections=[])
        given = {**given, "reference_model": {"path": str(tmp_path / "same"), "dtype": "float32"}}
        run_chats(tmp_path, {**given, "chat": {"score": score}, "error_budget": 1.0, "max_tokens": 60}, score)
        found = list(rows(tmp_path / score).values())
        assert {row["truncated"] for row in found} == {True, False}
        assert max(abs(row["knockoff(base=reference, draws=2)"]) for row in found) < 1e-6
        assert min(abs(row["knockoff(base=loss, draws=2)"]) for row in found) > 1e-4


def test_a_model_with_fewer_positions_than_max_tokens_ends_its_paraphrases_there(
    tmp_path: Path, chat_model: Path, paraphraser: dict[str, str]
) -> None:
    shutil.copytree(chat_model, tmp_path / "short")
    path = tmp_path / "short" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 60}))
    corpus = write_corpus(tmp_path, {"audit": talks(0, 14)}, messages="messages")
    drawn, scored = [], []
    for model, most in ((chat_model, 60), (tmp_path / "short", 1024)):
        given = chat_audit(model, corpus, detectors=KNOCKOFFS[:1], paraphraser=paraphraser, selections=[])
        run_chats(tmp_path, {**given, "error_budget": 1.0, "max_tokens": most}, str(most))
        drawn.append(rows(tmp_path / str(most), "paraphrase"))
        scored.append(rows(tmp_path / str(most)))
    assert drawn[0] == drawn[1]
    assert scored[0] == scored[1]
    assert {row["truncated"] for row in scored[0].values()} == {True, False}
