"""Continuations of chats: a model with weights or an endpoint is given all before the last answer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.detectors.continuations import coverage_score
from pipeline.detectors.samia import samia_score
from pipeline.endpoint.answers import spent_before
from pipeline.errors import UserError
from pipeline.models import chat_rendering
from pipeline.models.chat_prompts import AnswerPrompt, rendered_prompts, sent_prompt
from pipeline.models.chat_templates import ChatTemplate
from pipeline.models.load import open_model
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.plan.description import build_config
from pipeline.plan.forecast import forecast
from pipeline.results.summary import read_summary
from pipeline.run.plan import make_plan
from pipeline.stages.registry import ANSWER_FOLDERS
from pipeline.store.files import Store
from tests.helpers import chat_templates as templates
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.commands import ended
from tests.helpers.finished import rows
from tests.helpers.made_up import sentence, write_corpus
from tests.helpers.openai_server import openai_server

STAGE = "sample/answer_t1_k50_p1_reference/3"
LIKELIEST = "sample/answer_t0_kall_p1_reference/1"
DETECTORS: list[Any] = [{name: {"draws": 3}} for name in ("samia", "samia_zlib", "coverage", "cdd")]
THOUGHT = "<think>\nLet me see\n</think>\n\n"


def chat(*contents: str) -> list[dict[str, Any]]:
    """A question, its answer, the next question, ..."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def talks(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of one or two questions, each with its answer."""
    made = []
    for number in range(count):
        some = [sentence(seed + 4 * number + turn, 4) for turn in range(2 + 2 * (number % 2))]
        made.append({"messages": chat(*some)})
    return made


def conversation(value: Any) -> Conversation:
    read = read_conversation(value)
    assert isinstance(read, Conversation), read
    return read


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return chat_tokenizer(tiny_model_folder)


@pytest.fixture(scope="module")
def chat_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer that has a template."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = chat_tokenizer(tiny_model_folder, templates.CHATML)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model: Any, corpus: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """An audit; `model` is a folder or the mapping of an endpoint."""
    given = {"path": str(model), "dtype": "float32"} if isinstance(model, Path) else model
    shared = {"error_budget": 0.5, "resources": {"cluster": "local", "shard_bytes": 3000}}
    return {"model": given, "corpus": corpus, "detectors": DETECTORS, "selections": [], **shared, **changed}


def run(folder: Path, given: Mapping[str, Any], name: str = "run") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run": str(folder / name), **given}))
    assert ended("run", str(path)) == 0
    return str(folder / name)


# --- what a model is given


def prompt_of(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]], most: int = 1000) -> AnswerPrompt:
    (made,) = rendered_prompts(ChatTemplate(template, tokenizer), [conversation(messages)], most)
    assert isinstance(made, AnswerPrompt), made
    return made


BEFORE = {  # template -> what stands before the answer "It is this." to the question "Why so?"
    "CHATML": "<|im_start|>user\nWhy so?<|im_end|>\n<|im_start|>assistant\n",
    "MARKED": "<|im_start|>user\nWhy so?<|im_end|>\n<|im_start|>assistant\n",
    "GEMMA": "<bos><start_of_turn>user\nWhy so?<end_of_turn>\n<start_of_turn>model\n",
    "MISTRAL": "<bos> [INST] Why so? [/INST] ",
    "QWEN": "<|im_start|>user\nWhy so?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "DEEPSEEK": "<bos><|User|>Why so?<|Assistant|>",
    "PHI": "<|im_start|>user<|im_sep|>Why so?<|im_end|><|im_start|>assistant<|im_sep|>",
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_model_continues_what_its_template_renders_before_the_answer(tokenizer: Any, name: str) -> None:
    template = getattr(templates, name)
    made = prompt_of(tokenizer, template, chat("Why so?", "It is this."))
    begin = tokenizer.bos_token or ""
    assert made.before == BEFORE[name].replace("<bos>", begin)
    assert made.answer == "It is this."
    whole = tokenizer(made.before + "It is this.", add_special_tokens=False)["input_ids"]
    assert list(made.ids) == whole[: len(made.ids)], "the tokens of the training"
    assert tokenizer.decode(made.ids) in (made.before, made.before.rstrip(" ")), "a blank may belong to the answer"
    assert {tokenizer.convert_ids_to_tokens(one) for one in made.ends} <= {"<|im_end|>", "<end_of_turn>", "<eos>"}
    assert made.ends


def test_the_last_answer_is_compared_whatever_follows_it(tokenizer: Any) -> None:
    messages = [*chat("Why?", "First one.", "And?", f"{THOUGHT}Second one."), {"role": "user", "content": "Thanks!"}]
    made = prompt_of(tokenizer, templates.CHATML, messages)
    assert made.answer == f"{THOUGHT}Second one.", "reasoning that the template renders belongs to the answer"
    assert made.before.endswith("And?<|im_end|>\n<|im_start|>assistant\n")
    assert "First one." in made.before
    assert prompt_of(tokenizer, templates.DEEPSEEK, messages).answer == "Second one."


def test_a_token_that_reaches_into_the_answer_is_not_given(tokenizer: Any) -> None:
    """Else the model would be asked to continue behind a blank that it has never seen alone."""
    template = templates.CHATML.replace("\\n' + message['content']", "\\n ' + message['content']")
    made = prompt_of(tokenizer, template, chat("Why?", "science and history"))
    assert made.before.endswith("assistant\n ")
    text = made.before + made.answer
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    assert list(made.ids) == encoded["input_ids"][: sum(end <= len(made.before) for end in ends)]


def test_a_tool_call_and_its_result_stand_before_the_answer(tokenizer: Any) -> None:
    calls = [{"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": None, "tool_calls": calls, "weight": 0.5},
        {"role": "tool", "content": "3", "tool_call_id": "x1"},
        {"role": "assistant", "content": "There are three."},
    ]
    made = prompt_of(tokenizer, templates.CHATML, messages)
    assert made.before.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    sent = sent_prompt(conversation(messages), 100)
    assert isinstance(sent, AnswerPrompt)
    assert list(sent.messages) == [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": calls},
        messages[2],
    ], "without fields that the interface does not know"


MANY = " ".join(["word"] * 60)
REFUSED: list[tuple[Any, str, str | None, str | None]] = [  # messages, reason, of a model with weights, of an endpoint
    (chat("Why?", "Yes"), "too_short", "1 word of the last answer within", "1 word of the last answer within"),
    (chat("\u4e3a\u4ec0\u4e48", "\u662f"), "too_short", "1 character of the last answer", "1 character of the last"),
    (chat(MANY, "It is this."), "too_short", "which is 40 here, ends before the last", "last answer behind 60 words"),
    ([{"role": "assistant", "content": "It is this."}], "too_short", None, "0 messages before the last answer"),
    (chat("", "It is this."), "", None, None),
]


@pytest.mark.parametrize(("messages", "reason", "local", "served"), REFUSED)
def test_a_chat_of_which_nothing_can_be_compared_is_refused_with_numbers(
    tokenizer: Any, messages: Any, reason: str, local: str | None, served: str | None
) -> None:
    talk = conversation(messages)
    (first,) = rendered_prompts(ChatTemplate(templates.CHATML, tokenizer), [talk], 40)
    for made, message in ((first, local), (sent_prompt(talk, 40), served)):
        if message is None:
            assert isinstance(made, AnswerPrompt)
        else:
            assert isinstance(made, Unreadable)
            assert made.reason == reason
            assert message in made.message


def test_templates_that_leave_out_the_last_answer_or_all_before_it_are_refused(tokenizer: Any) -> None:
    bare = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    alone = conversation([{"role": "assistant", "content": "It is this."}])
    (made,) = rendered_prompts(ChatTemplate(bare, tokenizer), [alone], 40)
    assert isinstance(made, Unreadable)
    assert (made.reason, made.message) == (
        "too_short",
        "0 tokens before the last answer; a model continues at least 1",
    )
    short = "{% for message in messages[:2] %}{{ message['content'] }}{% endfor %}"
    (made,) = rendered_prompts(ChatTemplate(short, tokenizer), [conversation(chat("a", "b c", "d", "e f"))], 40)
    assert isinstance(made, Unreadable)
    assert (made.reason, made.message) == ("no_span", "the chat template leaves out the last answer")


@pytest.mark.parametrize("value", [float("nan"), "\ud800", b"bytes"])
def test_a_message_that_json_does_not_have_goes_to_quarantine(value: Any) -> None:
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_calls": [{"arguments": value}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "There are three."},
    ]
    made = sent_prompt(conversation(messages), 100)
    assert isinstance(made, Unreadable)
    assert made.reason == "not_chat"
    assert "cannot be sent as JSON" in made.message


def test_only_the_completion_is_compared_and_max_tokens_cuts_it() -> None:
    talk = read_completion(chat("Why?", "First.", "And?"), "Second and third and fourth.")
    assert isinstance(talk, Conversation)
    made = sent_prompt(talk, 6)
    assert isinstance(made, AnswerPrompt)
    assert made.answer == "Second and third"
    assert [one["content"] for one in made.messages] == ["Why?", "First.", "And?"]


def test_a_draw_ends_with_the_turn(tiny_model_folder: Path) -> None:
    """Also if the model's configuration names another token as the end of a text."""
    tiny_model = open_model(ModelConfig(path=str(tiny_model_folder)))
    ids, sampling = [5, 6, 7], Sampling(max_new_tokens=40)
    ((free,),) = continuations(tiny_model, [Prompt((1,), ids, range(1))], sampling, 3)
    stop = free.ids[4]
    ((ended_draw,),) = continuations(tiny_model, [Prompt((1,), ids, range(1), ends=frozenset({stop}))], sampling, 3)
    assert ended_draw.end == "eos"
    assert ended_draw.ids == free.ids[: free.ids.index(stop)]


# --- a model with weights


def test_chats_are_continued_and_compared_whatever_the_number_of_workers(tmp_path: Path, chat_model: Path) -> None:
    some = {"audit": talks(0, 12), "unseen": talks(300, 12)}
    some["audit"] += [{"id": "one", "messages": chat("Why?", "Yes")}]
    some["audit"] += [{"id": "empty", "messages": chat("", "It is this.")}]
    some["audit"] += [{"id": "alone", "messages": [{"role": "assistant", "content": "It is this."}]}]
    corpus = write_corpus(tmp_path, some, messages="messages")
    given = {"detectors": ["loss", *DETECTORS]}
    given["selections"] = [{"name": "bh", "detectors": ["samia(draws=3)"], "procedure": "bh", "alpha": 0.9}]
    one, two = (
        run(tmp_path, settings(chat_model, corpus, **given, resources=place), name)
        for name, place in (
            ("one", {"cluster": "local", "shard_bytes": 2000, "actors": 1}),
            ("two", {"cluster": "local", "shard_bytes": 2000, "actors": 2}),
        )
    )
    drawn, likeliest, scored = rows(one, STAGE), rows(one, LIKELIEST), rows(one)
    assert (rows(two, STAGE), rows(two, LIKELIEST), rows(two)) == (drawn, likeliest, scored)
    (refused,) = pq.read_table(f"{one}/quarantine").to_pylist()
    assert (refused["doc_id"], refused["reason"]) == ("one", "too_short")
    assert len(scored) == 26
    for role, each in some.items():
        for number, row in enumerate(each):
            name = row.get("id", f"{role}-{number}")
            if name == "one":
                continue
            texts, reference = drawn[name]["continuations"], drawn[name]["reference"]
            assert reference == row["messages"][-1]["content"]
            assert len(texts) == 3
            assert scored[name]["samia(draws=3)"] == samia_score(texts, reference)
            assert scored[name]["samia_zlib(draws=3)"] == samia_score(texts, reference, compressed=True)
            assert scored[name]["coverage(draws=3)"] == coverage_score(texts, reference)
            assert len(likeliest[name]["continuations"]) == 1


def test_max_tokens_and_a_template_of_a_file_hold_for_continuations_too(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_rendering, "SECONDS", 100.0)  # no time is tested here
    some = {"audit": talks(0, 6), "unseen": talks(300, 6)}
    corpus = write_corpus(tmp_path, some, messages="messages")
    (tmp_path / "phi.jinja").write_text(templates.PHI)
    given = settings(chat_model, corpus, chat={"template": "phi.jinja"}, max_tokens=60)
    drawn = rows(run(tmp_path, given, "file"), STAGE)
    template = ChatTemplate(templates.PHI, AutoTokenizer.from_pretrained(chat_model))
    for role, each in some.items():
        made = rendered_prompts(template, [conversation(row["messages"]) for row in each], 60)
        for number, one in enumerate(made):
            row = drawn[f"{role}-{number}"]
            expected = one.answer if isinstance(one, AnswerPrompt) else None
            assert row["reference"] == expected
            assert (row["reason"] is None) == isinstance(one, AnswerPrompt)
    assert {row["reason"] for row in drawn.values()} == {None, "too_short"}


# --- an endpoint


@pytest.fixture
def known(tmp_path: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Conversations, and the corpus of them."""
    some = {"audit": talks(0, 12), "unseen": talks(300, 12)}
    some["audit"][3]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    some["audit"] += [{"id": "alone", "messages": [{"role": "assistant", "content": "It is this."}]}]
    some["audit"] += [{"id": "hopeless", "messages": chat("Refuse me", "It is this.")}]
    return some, write_corpus(tmp_path, some, messages="messages")


def served(url: str, **changed: Any) -> dict[str, Any]:
    quick = {"backoff": 0.01, "timeout": 60, "attempts": 3, "concurrency": 8}
    return {"endpoint": url, "name": "stub", "api": "chat", **quick, **changed}


def test_an_endpoint_receives_the_messages_before_the_answer_as_they_are(
    tmp_path: Path, known: tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]
) -> None:
    some, corpus = known
    answers = {json.dumps(row["messages"][:-1]): row["messages"][-1]["content"] for row in some["audit"]}

    def respond(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] == "Refuse me":
            return 400, {"error": {"message": "not this"}}
        known_by_heart = answers.get(json.dumps(body["messages"]))
        texts = [known_by_heart or f"guess {body['seed']} {n}" for n in range(min(body["n"], 2))]
        usage = {"prompt_tokens": 9, "completion_tokens": 5}
        return {"choices": [{"message": {"role": "assistant", "content": text}} for text in texts], "usage": usage}

    with openai_server(respond=respond, models=["stub"]) as server:
        members = {"name": "members", "detectors": ["samia(draws=3)"], "procedure": "bh", "alpha": 0.2}
        folder = run(tmp_path, settings(served(server.url), corpus, selections=[members]))
    summary = read_summary(Store(folder), "members")
    assert summary is not None
    assert summary.n_selected == 12, "it knows the audited answers"
    drawn, scored = rows(folder, STAGE), rows(folder)
    sent = {json.dumps(body["messages"]) for body in server.bodies}
    every = [row["messages"] for each in some.values() for row in each]
    assert sent == {json.dumps(messages[:-1]) for messages in every if len(messages) > 1}
    assert all(scored[f"audit-{n}"]["samia(draws=3)"] == 1.0 for n in range(12))
    assert all(scored[f"unseen-{n}"]["samia(draws=3)"] < 0.3 for n in range(12))
    assert all(scored[f"audit-{n}"]["cdd(draws=3)"] == 1.0 for n in range(12))
    assert drawn["unseen-1"]["reference"] == some["unseen"][1]["messages"][-1]["content"]
    refused = {row["doc_id"]: row for row in pq.read_table(f"{folder}/quarantine").to_pylist()}
    assert {name: row["reason"] for name, row in refused.items()} == {"alone": "too_short", "hopeless": "model_error"}
    assert "not this" in refused["hopeless"]["message"]
    assert spent_before(Store(folder), STAGE, ANSWER_FOLDERS).requests == server.requests
    assert {body["max_tokens"] for body in server.bodies} == {
        16 + len(messages[-1]["content"].encode()) // 3 for messages in every if len(messages) > 1
    }


def test_plan_states_calls_and_tokens_of_an_endpoint_and_what_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = {role: [{"messages": chat("a b c", "d e f g")}] * 8 for role in ("audit", "unseen")}
    some["unseen"] += [{"messages": chat("Why?", "Yes")}] * 4
    corpus = write_corpus(tmp_path, some, messages="messages")
    with openai_server(models=["stub"]) as server:
        path = tmp_path / "plan.yaml"
        given = settings(served(server.url, choices=2), corpus)
        path.write_text(yaml.safe_dump({"run": str(tmp_path / "no"), **given}))
        assert ended("plan", str(path)) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ended("plan", str(path), "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        assert not server.bodies
    assert facts["endpoint"]["requests"] == 16 * (2 + 1), "3 draws in two requests, and the likeliest one"
    assert facts["endpoint"]["answer_tokens"] == 16 * (3 + 1) * (16 + len("d e f g") // 3)
    assert facts["endpoint"]["prompt_tokens"] == pytest.approx(16 * 3 * len("a b c\n\n") / 4, rel=0.3)
    assert (facts["continued"]["before"], facts["continued"]["answer"]) == (3, 4)
    assert facts["continued"]["refused"] == {"too_short": 4}
    assert "a model continues 3 words on average, and 4 of the last answer are compared" in said
    assert "4 more cannot be asked (too_short 4)" in said
    assert "3 continuations of a chat before its last answer" in said


def test_plan_states_the_tokens_that_a_model_continues_and_writes(tmp_path: Path, chat_model: Path) -> None:
    some = {role: [{"messages": chat("a b c", "d e f g")}] * 8 for role in ("audit", "unseen")}
    corpus = write_corpus(tmp_path, some, messages="messages")
    facts = forecast(make_plan(build_config({"run": str(tmp_path / "no"), **settings(chat_model, corpus)})), {})
    made = prompt_of(AutoTokenizer.from_pretrained(chat_model), templates.CHATML, chat("a b c", "d e f g"))
    assert facts["continued"]["before"] == len(made.ids)
    whole = facts["chats"]["read"]
    shares = [entry["shares"] for entry in facts["passes"] if entry["kind"] == "generate"]
    assert shares == [(len(made.ids) / whole, facts["continued"]["answer"] / whole)] * 2


def test_what_does_not_go_together_is_refused_in_one_line(tmp_path: Path, chat_model: Path) -> None:
    corpus = write_corpus(tmp_path, {"audit": talks(0, 3), "unseen": talks(9, 3)}, messages="messages")

    def refusal(model: Any, **changed: Any) -> str:
        with pytest.raises(UserError) as caught:
            build_config({"run": "r", **settings(model, corpus, **changed)})
        return str(caught.value)

    url = "http://127.0.0.1:9/v1"
    line = refusal(chat_model, detectors=[{"samia": {"prefix_ratio": 0.3}}])
    assert line.startswith("detector samia(prefix_ratio=0.3) needs texts that are split at prefix_ratio")
    assert "take samia, " in line
    line = refusal(served(url, api="completions"))
    assert line.startswith("endpoint stub needs texts to send, and the documents are chats: set model.api to chat")
    assert "renders messages by its own template: leave chat out" in refusal(served(url), chat={"score": "all"})
    assert "detector loss needs log-probabilities" in refusal(served(url), detectors=["loss"])
