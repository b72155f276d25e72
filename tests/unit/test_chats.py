"""Documents that are chats: which tokens are scored under each template, and what goes to quarantine."""

import json
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.small_model import WORDS
from pipeline.config.kinds import CHATS
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.detectors.registry import detectors_for
from pipeline.errors import UserError
from pipeline.models import chat_rendering, chat_templates
from pipeline.models.chat_templates import ChatSettings, ChatTemplate, ReadChat
from pipeline.plan.description import build_config, load_config
from pipeline.plan.forecast import forecast
from pipeline.plan.starter import audit_starter
from pipeline.results.summary import read_summary
from pipeline.run.plan import make_plan
from pipeline.stages.registry import check_stages
from pipeline.store.files import Store
from tests.helpers import chat_templates as templates
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.commands import ended, user_error
from tests.helpers.finished import rows as rows_scored
from tests.helpers.made_up import sentence, write_corpus

HERE = {"cluster": "local", "shard_bytes": 1 << 20}  # scores depend on what shares a batch
SELECTIONS = [{"name": "bh", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}]
THOUGHT = "<think>\nLet me see\n</think>\n\n"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is it?\n"},
    {"role": "assistant", "content": f"{THOUGHT} It is this. "},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": f"{THOUGHT}assistant"},
]
PLAIN = [{**message, "content": message["content"].removeprefix(THOUGHT)} for message in TALK]


def chat(*contents: str) -> list[dict[str, str]]:
    """A question, its answer, the next question, ..."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def conversation(value: Any) -> Conversation:
    read = read_conversation(value)
    assert isinstance(read, Conversation), read
    return read


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return chat_tokenizer(tiny_model_folder)


def answers_of(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], str, int]:
    """The rendered answers, the text of the scored tokens, and how many pieces the template left out."""
    made = ChatTemplate(template, tokenizer)
    talk = conversation(messages)
    rendered = made.rendered(talk)
    (read,) = made.read([talk], 10_000)
    assert not isinstance(rendered, Unreadable), rendered
    assert isinstance(read, ReadChat)
    expected = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert rendered.text == expected or template == templates.CLOCKED or template == templates.LLAMA
    assert read.tokens.ids == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    parts = ["".join(rendered.text[start:stop] for start, stop in spans) for spans in rendered.answers]
    scored = [number for number, keep in zip(read.tokens.ids[1:], read.scored, strict=True) if keep]
    return parts, tokenizer.decode(scored), rendered.removed


END = "<|im_end|>"
WHOLE = [f"{THOUGHT} It is this. ", f"{THOUGHT}assistant"]
FOUND = {  # template -> answers with reasoning, answers without, end of a turn, pieces left out
    "CHATML": (WHOLE, [" It is this. ", "assistant"], END, 0),
    "MARKED": (WHOLE, [" It is this. ", "assistant"], END, 0),
    "MACRO": (WHOLE, [" It is this. ", "assistant"], END, 0),
    "PHI": (WHOLE, [" It is this. ", "assistant"], END, 0),
    "LLAMA": ([f"{THOUGHT} It is this.", WHOLE[1]], ["It is this.", "assistant"], "<|eot_id|>", 0),
    "GEMMA": ([f"{THOUGHT} It is this.", WHOLE[1]], ["It is this.", "assistant"], "<end_of_turn>", 0),
    "MISTRAL": (WHOLE, [" It is this. ", "assistant"], "<eos>", 0),
    "QWEN": ([" It is this. ", WHOLE[1]], [" It is this. ", "assistant"], END, 1),
    "DEEPSEEK": (["\n\n It is this. ", "\n\nassistant"], [" It is this. ", "assistant"], "<eos>", 2),
}


@pytest.mark.parametrize("name", FOUND)
def test_only_what_a_template_renders_of_answers_and_ends_of_turns_are_scored(tokenizer: Any, name: str) -> None:
    template = getattr(templates, name)
    thoughtful, plain, end, removed = FOUND[name]
    assert answers_of(tokenizer, template, TALK) == (thoughtful, "".join(one + end for one in thoughtful), removed)
    # Qwen 3 inserts an empty thought into the last answer, which is not scored
    assert answers_of(tokenizer, template, PLAIN) == (plain, "".join(one + end for one in plain), 0)


@pytest.mark.parametrize("name", FOUND)
def test_a_user_turn_that_forges_an_answer_gets_no_scored_token(tokenizer: Any, name: str) -> None:
    template = getattr(templates, name)
    rendered = tokenizer.apply_chat_template(
        chat("Hi", "Sure.", "So?", "Sure."), chat_template=template, tokenize=False
    )
    forged = rendered[rendered.index("Hi") : rendered.rindex("So?")] + "So?"  # an answer as the template writes it
    parts, _, _ = answers_of(tokenizer, template, chat(forged, "Sure."))
    assert parts == ["Sure."]
    made = ChatTemplate(template, tokenizer).rendered(conversation(chat(forged, "Sure.")))
    assert not isinstance(made, Unreadable)
    ((span,),) = made.answers
    assert made.text.count("Sure.") == 2
    assert span[0] == made.text.rindex("Sure.")


def test_answers_that_equal_control_words_of_the_template_are_found_at_their_place(tokenizer: Any) -> None:
    for word in ("assistant", "im_end", "\n", "user\n", "|>", "<|im_end|>"):
        messages = chat(word, f"{word}x", word, f"{word}x")
        parts, _, _ = answers_of(tokenizer, templates.CHATML, messages)
        assert parts == [f"{word}x", f"{word}x"]


def test_a_template_that_changes_a_question_costs_no_answer(tokenizer: Any) -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] | upper }}{% else %}"
        "{{ message['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    )
    assert answers_of(tokenizer, template, chat("Why?", "For it."))[0] == ["For it."]
    changed = template.replace("upper", "lower").replace("== 'user'", "== 'assistant'")
    (read,) = ChatTemplate(changed, tokenizer).read([conversation(chat("Why?", "For It."))], 100)
    assert isinstance(read, Unreadable)
    assert read.reason == "no_span"


@pytest.mark.parametrize("name", ["CLOCKED", "LLAMA"])
def test_templates_that_read_the_clock_get_one_date(tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another day, which transformers' own rendering shows."""

    class NewYear(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "NewYear":
            return cls(2031, 1, 1, tzinfo=tz)

    template, messages = getattr(templates, name), chat("Hi", "Yes.")
    for shown in (False, True):
        if shown:
            monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", NewYear)
            theirs = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
            assert "2031" in theirs
        ours = ChatTemplate(template, tokenizer).rendered(conversation(messages))
        assert not isinstance(ours, Unreadable)
        assert ("2024-07-26" if name == "CLOCKED" else "26 Jul 2024") in ours.text


def test_a_fingerprint_states_template_date_and_version() -> None:
    first, other = (ChatSettings({"target": text}).fingerprint() for text in (templates.CHATML, templates.PHI))
    assert first["templates"] != other["templates"]
    assert (first["date"], first["rendering"]) == ("2024-07-26", chat_templates.RENDERING)


def test_a_long_answer_is_cut_as_its_whole_text_would_be(tokenizer: Any) -> None:
    made = ChatTemplate(templates.CHATML, tokenizer)
    talk = conversation(chat("Why?", "word " * 2_000_000))  # 10 MB
    (read,) = made.read([talk], 64)
    assert isinstance(read, ReadChat)
    (short,) = made.read([conversation(chat("Why?", "word " * 40))], 64)
    assert isinstance(short, ReadChat)
    assert read.tokens == short.tokens or read.tokens.ids == short.tokens.ids
    assert read.scored == short.scored
    assert read.tokens.truncated


def test_ten_thousand_turns_are_read_in_one_rendering_and_one_with_probes(tokenizer: Any) -> None:
    made = ChatTemplate(templates.CHATML, tokenizer)
    rendered = made.rendered(conversation(chat(*(f"turn {n}" for n in range(10_000)))))
    assert not isinstance(rendered, Unreadable)
    assert len(rendered.answers) == 5_000


BOTH = [("user", "a"), ("assistant", "b")]
PARTS = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
READ: list[tuple[Any, list[tuple[str, str]]]] = [
    (chat("a", "b"), BOTH),
    ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], BOTH),
    (json.dumps(chat("a", "b")), BOTH),
    ([{"role": "assistant", "content": PARTS}], [("assistant", "bc")]),
]


@pytest.mark.parametrize(("value", "turns"), READ)
def test_messages_are_read_in_all_their_forms(value: Any, turns: list[tuple[str, str]]) -> None:
    assert [(turn.role, turn.content) for turn in conversation(value).turns] == turns


BAD: list[tuple[Any, str]] = [
    (None, "no messages"),
    (7, "int, not a list of messages"),
    ("Hello", "text that is no JSON list of messages"),
    ('{"role": "user"}', "dict, not a list of messages"),
    ([], "0 turns, none of the assistant"),
    (["Hello"], "turn 1: str, not a message with role and content"),
    ([{"content": "a"}], "turn 1: no role (fields: content)"),
    ([{"role": "robot", "content": "a"}], "turn 1: unknown role 'robot' (roles: system, "),
    ([{"role": 3, "content": "a"}], "turn 1: unknown role 3 (roles: system, "),
    ([*chat("a", "b"), {"role": "user", "content": 3}], "turn 3: content is no text"),
    (
        [{"role": "user", "content": [{"type": "image"}]}],
        "turn 1: content is no text, nor a list of parts",
    ),
    (chat("a"), "1 turns, none of the assistant"),
    (chat("a", "b", "c", " \n"), "turn 4: the last answer is empty"),
    ([{"role": "assistant", "content": "b"}], "the chat template raises: Conversation roles must alternate"),
]


@pytest.fixture(scope="module")
def chat_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer that has a template, which refuses two turns of one role."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = chat_tokenizer(tiny_model_folder, templates.GEMMA)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model: Path, corpus: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    given = {"model": {"path": str(model), "dtype": "float32"}, "corpus": corpus, "resources": HERE}
    return {**given, "detectors": ["loss"], "selections": SELECTIONS, **changed}


def run(folder: Path, given: Mapping[str, Any], name: str = "run") -> Store:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run": str(folder / name), **given}))
    assert ended("run", str(path)) == 0
    return Store(str(folder / name))


def talks(seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": chat(sentence(seed + 2 * n), sentence(seed + 2 * n + 1))} for n in range(count)]


def test_a_run_over_chats_selects_and_sends_bad_rows_to_quarantine(tmp_path: Path, chat_model: Path) -> None:
    rows = {"audit": talks(0, 30), "unseen": talks(300, 30)}
    rows["audit"] += [{"id": f"bad{n}", "messages": value} for n, (value, _) in enumerate(BAD)]
    rows["audit"] += [{"id": "long", "messages": chat(" ".join(WORDS * 3), "Yes.")}]
    detectors = ["loss", "zlib", "min_k", "min_k_plus_plus"]
    corpus = write_corpus(tmp_path, rows, messages="messages")
    store = run(tmp_path, settings(chat_model, corpus, error_budget=0.5, detectors=detectors, max_tokens=100))
    refused = {row["doc_id"]: row for row in pq.read_table(f"{store.root}/quarantine").to_pylist()}
    for number, (_, message) in enumerate(BAD):
        row = refused.pop(f"bad{number}")
        assert (row["reason"], row["message"][: len(message)]) == ("not_chat", message)
    assert refused.pop("long")["reason"] == "too_short"
    assert {row["reason"] for row in refused.values()} <= {"too_short"}
    assert len(rows_scored(store.root)) == 60 - len(refused)
    summary = read_summary(store, "bh")
    assert summary is not None
    assert summary.n_quarantined == len(BAD) + 1 + sum(key.startswith("audit") for key in refused)
    assert (tmp_path / "run" / "report.html").exists() or store.names("report", "html")


def shared(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The messages as {from, value}."""
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[one["role"]], "value": one["content"]} for one in messages]


FORMS = {"lists": list, "shared": shared, "json": json.dumps, "nested": lambda messages: {"turns": messages}}


def test_chats_have_the_same_scores_in_every_form_of_a_column(tmp_path: Path, chat_model: Path) -> None:
    rows = {"audit": talks(0, 12), "unseen": talks(300, 12)}
    scores = []
    for name, form in FORMS.items():
        corpus = {}
        for role, some in rows.items():
            values = [form(one["messages"]) for one in some]
            ids = [f"{role}-{n}" for n in range(len(some))]
            pq.write_table(pa.table({"id": ids, "talk": values}), tmp_path / f"{name}-{role}.parquet")
            key = "talk.turns" if name == "nested" else "talk"
            corpus[role] = {"path": str(tmp_path / f"{name}-{role}.parquet"), "id": "id", "messages": key}
        store = run(tmp_path, settings(chat_model, corpus), name)
        scores.append({key: row["loss"] for key, row in rows_scored(store.root).items()})
    lines = run(tmp_path, settings(chat_model, write_corpus(tmp_path, rows, messages="messages")))
    scores.append({key: row["loss"] for key, row in rows_scored(lines.root).items()})
    assert len(scores[0]) == 24
    assert scores[1:] == scores[:1] * 4


def test_a_reference_model_reads_chats_by_its_own_template(tmp_path: Path, chat_model: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(chat_model, other)
    reference = {"path": str(other), "dtype": "float32"}
    corpus = write_corpus(tmp_path, {"audit": talks(0, 12), "unseen": talks(300, 12)}, messages="messages")
    detectors = ["loss", "reference", "ez", "wbc"]
    given = settings(chat_model, corpus, detectors=detectors, reference_model=reference)
    same = rows_scored(run(tmp_path, given, "same").root)
    assert {row["reference"] for row in same.values()} == {0.0}, "the model itself"
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = templates.LLAMA
    tokenizer.save_pretrained(other)
    found = rows_scored(run(tmp_path, {**given, "detectors": ["loss", "reference"]}, "differs").root)
    lone = rows_scored(run(tmp_path, settings(other, corpus), "lone").root)
    assert [found[name]["reference"] for name in found] == pytest.approx(
        [found[name]["loss"] - lone[name]["loss"] for name in found], abs=1e-6
    )
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump({"run": str(tmp_path / "no"), **given}))
    with pytest.raises(
        UserError, match="ez compares model and reference_model token by token, and their chat templates"
    ):
        check_stages(load_config(str(path)))


def as_pair(talk: list[dict[str, str]], form: str) -> dict[str, Any]:
    """A question and its answer as prompt and completion."""
    if form == "texts":
        return {"prompt": talk[0]["content"], "completion": talk[1]["content"]}
    return {"prompt": talk[:1], "completion": talk[1:]}


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_prompts_with_completions_are_scored_as_chats(tmp_path: Path, chat_model: Path, form: str) -> None:
    rows = {role: talks(seed, 12) for role, seed in (("audit", 0), ("unseen", 300))}
    stores = [run(tmp_path, settings(chat_model, write_corpus(tmp_path, rows, messages="messages")), "messages")]
    pairs = {role: [as_pair(one["messages"], form) for one in some] for role, some in rows.items()}
    corpus = write_corpus(tmp_path, pairs, prompt="prompt", completion="completion")
    stores.append(run(tmp_path, settings(chat_model, corpus), "lines"))
    for role, some in pairs.items():
        ids = [f"{role}-{n}" for n in range(12)]
        table = pa.table({"id": ids, **{key: [one[key] for one in some] for key in ("prompt", "completion")}})
        pq.write_table(table, tmp_path / f"{role}.parquet")
        corpus[role]["path"] = str(tmp_path / f"{role}.parquet")
    stores.append(run(tmp_path, settings(chat_model, corpus), "tables"))
    messages, *others = [{key: row["loss"] for key, row in rows_scored(store.root).items()} for store in stores]
    assert len(messages) == 24
    assert others == [messages] * 2


def test_only_the_completion_of_a_pair_is_scored(tokenizer: Any) -> None:
    talk = read_completion(chat("Why?", "First.", "And?"), "Second.")
    assert isinstance(talk, Conversation)
    rendered = ChatTemplate(templates.CHATML, tokenizer).rendered(talk)
    assert not isinstance(rendered, Unreadable)
    assert [[rendered.text[start:stop] for start, stop in spans] for spans in rendered.answers] == [["Second."]]
    for prompt, completion, message in (
        (None, "b", "no prompt"),
        ("a", None, "no completion"),
        ("a", " ", "turn 2: the last answer is empty"),
        (chat("a", "b"), [], "2 turns, none of the assistant behind the prompt"),
        ("a", 3, "int, not a list of messages"),
    ):
        refused = read_completion(prompt, completion)
        assert isinstance(refused, Unreadable)
        assert (refused.reason, refused.message) == ("not_chat", message)


def test_preference_pairs_are_refused_in_one_line(tmp_path: Path, chat_model: Path) -> None:
    pairs = [{"chosen": chat("a", "b"), "rejected": chat("a", "c")}] * 12
    corpus = write_corpus(tmp_path, {"audit": pairs, "unseen": pairs}, messages="messages")
    line = user_error(make_plan, build_config({"run": str(tmp_path / "no"), **settings(chat_model, corpus)}))
    assert "whose chosen and rejected are the answers of a preference pair" in line


def test_all_tokens_of_a_chat_are_those_of_its_rendered_text(tmp_path: Path, chat_model: Path) -> None:
    rows = {"audit": talks(0, 12), "unseen": talks(300, 12)}
    corpus = write_corpus(tmp_path, rows, messages="messages")
    whole = rows_scored(run(tmp_path, settings(chat_model, corpus, chat={"score": "all"}), "all").root)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    texts = {
        role: [tokenizer.apply_chat_template(one["messages"], tokenize=False) for one in some]
        for role, some in rows.items()
    }
    plain = rows_scored(run(tmp_path, settings(chat_model, write_corpus(tmp_path, texts)), "plain").root)
    assert [row["loss"] for row in whole.values()] == [row["loss"] for row in plain.values()]


def test_a_template_of_a_file_takes_the_place_of_the_models(tmp_path: Path, chat_model: Path) -> None:
    """Its path is relative to the configuration."""
    rows = {"audit": talks(0, 12), "unseen": talks(300, 12)}
    corpus = write_corpus(tmp_path, rows, messages="messages")
    (tmp_path / "own.jinja").write_text(AutoTokenizer.from_pretrained(chat_model).chat_template)
    own = rows_scored(run(tmp_path, settings(chat_model, corpus), "own").root)
    file = rows_scored(run(tmp_path, settings(chat_model, corpus, chat={"template": "own.jinja"}), "file").root)
    assert [row["loss"] for row in file.values()] == [row["loss"] for row in own.values()]
    (tmp_path / "bad.jinja").write_text("{% for")
    for name, message in (
        ("bad.jinja", "the chat template cannot be compiled: "),
        ("none.jinja", "none.jinja does not exist"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(yaml.safe_dump({"run": "no", **settings(chat_model, corpus, chat={"template": name})}))
        with pytest.raises(UserError, match=message):
            check_stages(load_config(str(path)))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_costs_a_document_and_at_the_start_the_run(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_rendering, "SECONDS", 2.5)
    slow = "{% if 'slow' in messages[0]['content'] %}" + ENDLESS + "{% endif %}" + templates.CHATML
    made = ChatTemplate(slow, tokenizer, "slow.jinja")
    read = made.read([conversation(chat(text, "Yes.")) for text in ("quick", "slow", "quick")], 100)
    refused = [one.message if isinstance(one, Unreadable) else "" for one in read]
    assert refused == ["", "the chat template slow.jinja takes more than 2.5 seconds", ""]
    made.close()
    endless = ChatTemplate(ENDLESS, tokenizer, "endless.jinja")
    with pytest.raises(UserError, match="for each of the first 5 conversations"):
        endless.read([conversation(chat("slow", "Yes."))] * 9, 100)
    endless.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited on Linux")
@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        ("{{ messages[0]['content'] * 10**10 }}", "takes more than 1 GiB of memory"),
        ("{{ 'a' * 10**10 }}", "takes more than 1 GiB of memory"),  # computed at the compilation
        ("{{ messages[0]['content'] * (3 * 10**7) }}", "renders more than 134,217,728 characters"),
        ("{% for one in range(10**9) %}a{% endfor %}", "raises: Range too big"),
    ],
)
def test_a_template_that_takes_memory_costs_a_document(tokenizer: Any, source: str, refusal: str) -> None:
    """This process takes none of that memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = "{% if 'large' in messages[0]['content'] %}" + source + "{% endif %}"
    made = ChatTemplate(large + templates.CHATML, tokenizer, "large.jinja")
    read = made.read([conversation(chat(text, "Yes.")) for text in ("small", "large", "small")], 100)
    made.close()
    refused = [one.message if isinstance(one, Unreadable) else "" for one in read]
    assert [refused[0], refused[2]] == ["", ""]
    assert refused[1].startswith(f"the chat template large.jinja {refusal}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_a_template_that_is_compiled_without_end_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_rendering, "SECONDS", 2.5)
    with pytest.raises(UserError, match=r"chat.template long.jinja takes more than 2.5 seconds to compile: correct it"):
        ChatTemplate("{{ 10 ** (10 ** 9) }}", tokenizer, "long.jinja")


def plain_gradient(model: Any, ids: list[int], scored: list[bool]) -> float:
    """The norm of the gradient of the mean over scored tokens, by labels of -100."""
    labels = [token if keep else -100 for token, keep in zip(ids, [False, *scored], strict=True)]
    model.zero_grad()
    model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.backward()
    return float(sum(parameter.grad.double().square().sum() for parameter in model.parameters()) ** 0.5)


def test_gradients_and_changed_copies_are_of_the_answers(tmp_path: Path, chat_model: Path) -> None:
    rows = {"audit": talks(0, 12), "unseen": talks(300, 12)}
    corpus = write_corpus(tmp_path, rows, messages="messages")
    detectors = ["loss", "lowercase", "gradient_norm", {"gradient_norm": {"of": "sum"}}]
    scored = rows_scored(run(tmp_path, settings(chat_model, corpus, detectors=detectors)).root)
    tokenizer, model = AutoTokenizer.from_pretrained(chat_model), AutoModelForCausalLM.from_pretrained(chat_model)
    template = ChatTemplate(templates.GEMMA, tokenizer)
    lowered = write_corpus(
        tmp_path,
        {role: [{"messages": [{**m, "content": m["content"].lower()} for m in one["messages"]]} for one in some]
         for role, some in rows.items()},
        messages="messages",
    )  # fmt: skip
    low = rows_scored(run(tmp_path, settings(chat_model, lowered), "lowered").root)
    for role, some in rows.items():
        chats = [conversation(one["messages"]) for one in some]
        for number, read in enumerate(template.read(chats, 1024)):
            assert isinstance(read, ReadChat)
            row = scored[f"{role}-{number}"]
            norm = plain_gradient(model, read.tokens.ids, read.scored)
            assert row["gradient_norm"] == pytest.approx(-norm, rel=1e-4)
            assert row["gradient_norm(of=sum)"] == pytest.approx(-norm * sum(read.scored), rel=1e-4)
            assert row["lowercase"] == pytest.approx(low[f"{role}-{number}"]["loss"] / row["loss"], rel=1e-4)


def test_a_transform_changes_contents_and_not_the_template(tmp_path: Path, chat_model: Path) -> None:
    changed = [
        {"messages": chat("When?", f"On 17 May 2023 the {word} came.")} if dated else
        {"messages": chat("When?", f"On the {word} came.")}
        for dated in (True, False) for word in WORDS[:12]
    ]  # fmt: skip
    bare = {"id": "bare", "messages": chat("When?", "17 May 2023")}
    corpus = write_corpus(tmp_path, {"audit": [*changed[:12], bare], "unseen": changed[12:]}, messages="messages")
    given = settings(chat_model, corpus, text_transform={"dates": "remove"}, selections=[], error_budget=0.5)
    store = run(tmp_path, given)
    losses = {name: row["loss"] for name, row in rows_scored(store.root).items()}
    same = [losses[f"unseen-{n}"] for n in range(12)]
    assert [losses[f"audit-{n}"] for n in range(12)] == pytest.approx(same, abs=1e-6)
    (refused,) = pq.read_table(f"{store.root}/quarantine").to_pylist()
    assert (refused["doc_id"], refused["reason"]) == ("bare", "empty")


def test_plan_states_tokens_read_and_scored_and_what_max_tokens_leaves(tmp_path: Path, chat_model: Path) -> None:
    rows = {"audit": [{"messages": chat("a", "bb")}] * 10, "unseen": [{"messages": chat("a", "b<|im_end|>")}] * 10}
    rows["unseen"] += [{"messages": chat(" ".join(WORDS), "Yes.")}] * 5
    corpus = write_corpus(tmp_path, rows, messages="messages")
    given = {"run": str(tmp_path / "no"), **settings(chat_model, corpus, max_tokens=40)}
    facts = forecast(make_plan(build_config(given)), {})["chats"]
    template = ChatTemplate(templates.GEMMA, AutoTokenizer.from_pretrained(chat_model))
    read = template.read([conversation(rows[role][0]["messages"]) for role in rows], 40)
    lengths = [len(one.tokens.ids) for one in read if isinstance(one, ReadChat)]
    scored = [sum(one.scored) for one in read if isinstance(one, ReadChat)]
    assert scored == [3, 3], "the answer, a control token in it or not, and the end of its turn"
    assert (facts["documents"], facts["read"], facts["scored"]) == (20, sum(lengths) / 2, 3)
    assert (facts["too_short"], facts["controlled"]) == (5, 10)
    assert "40, leaves no answer of 5 more" in facts["sentence"]


def test_init_recognises_chats(tmp_path: Path, chat_model: Path) -> None:
    for name, rows in (
        ("messages", talks(0, 12)),
        ("shared", [{"conversations": shared(one["messages"])} for one in talks(0, 12)]),
        ("json", [{"talk": json.dumps(one["messages"])} for one in talks(0, 12)]),
        ("pairs", [as_pair(one["messages"], "texts") for one in talks(0, 12)]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_corpus(folder, {"audit": rows, "unseen": rows})
        config = yaml.safe_load(audit_starter(str(folder)).text)
        column = {"messages": "messages", "shared": "conversations", "json": "talk"}.get(name)
        expected = {"prompt": "prompt", "completion": "completion"} if column is None else {"messages": column}
        for role in ("audit", "unseen"):
            assert {**expected, "id": "id"}.items() <= config["corpus"][role].items()
            assert "text" not in config["corpus"][role]
        build_config(config)


def test_init_recognises_instructions_with_their_outputs(tmp_path: Path, chat_model: Path) -> None:
    """The columns of Alpaca; `input` belongs to the prompt, which no setting states, so that it is said in the file."""
    asked = {"audit": ["", "", ""], "unseen": ["", " \n", "The river is long."]}
    for role, inputs in asked.items():
        made = [{"instruction": sentence(n), "input": one, "output": sentence(n + 50)} for n, one in enumerate(inputs)]
        write_corpus(tmp_path, {role: made})
    starter = audit_starter(str(tmp_path))
    config = yaml.safe_load(starter.text)
    for role in asked:
        expected = {"path": f"{role}.jsonl", "prompt": "instruction", "completion": "output", "id": "id"}
        assert config["corpus"][role] == expected
    build_config(config)
    text = " ".join(starter.text.replace("#", "").split())
    line = (
        "Warning: input is not read, which 1 of the first 3 rows have: in a training a prompt is usually instruction,"
    )
    assert text.count(line) == 1
    assert text.index(" unseen: ") - 400 < text.index(line)
    assert any("prompt: instruction, completion: output" in guess for guess in starter.guesses)


def test_what_chats_do_not_offer_is_refused_in_one_line(
    tmp_path: Path, chat_model: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path, {"audit": talks(0, 12), "unseen": talks(300, 12)}, messages="messages")

    def refusal(**changed: Any) -> str:
        path = tmp_path / "refused.yaml"
        path.write_text(yaml.safe_dump({"run": str(tmp_path / "no"), **settings(chat_model, corpus, **changed)}))
        assert ended("plan", str(path)) == 2
        return " ".join(capsys.readouterr().err.split())

    based: Any = {"knockoff": {"base": "recall"}}
    for detector, shown in (*((one, one) for one in ("recall", "dc_pdd", "camia")), (based, "knockoff(base=recall)")):
        assert f"detector {shown}" in (line := refusal(detectors=[detector]))
        assert "the documents are chats: take " in line
        assert "loss" in line
    texts = write_corpus(tmp_path, {"audit": ["A text."] * 12, "unseen": ["Another."] * 12})
    line = user_error(build_config, {"run": "r", **settings(chat_model, texts, chat={}, selections=[])})
    assert line.startswith("chat needs chats, and the documents are texts: leave it out")
    write_corpus(tmp_path, {"audit": talks(0, 12), "unseen": talks(300, 12)})
    chat_model = tiny_model_folder
    assert "its tokenizer has no chat template; chat: {template: FILE} names one" in refusal()
    both = {role: {**source, "text": "text"} for role, source in corpus.items()}
    for other in ("text", "messages"):
        half = {role: {"path": source["path"], "prompt": "prompt", other: other} for role, source in corpus.items()}
        line = f"prompt goes with completion, and only with it, and a source has .* leave out {other} or prompt"
        with pytest.raises(UserError, match=line):
            build_config({"run": "r", **settings(chat_model, half)})
    with pytest.raises(UserError, match="text and messages: a source has documents of one kind"):
        build_config({"run": "r", **settings(chat_model, both)})
    assert "loss" in detectors_for(CHATS)
