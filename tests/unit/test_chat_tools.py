"""Claims about tools of chats: templates receive them, whatever the form of their column, and no call is scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.config.kinds import CHATS
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatTemplate, ReadChat, RenderedChat
from pipeline.plan.description import build_config
from pipeline.trial.trial_documents import Documents
from tests.helpers import chat_templates as templates
from tests.helpers.chat_runs import chat_audit, run_chats, save_chat_model
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.finished import rows as rows_scored
from tests.helpers.made_up import sentence

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return chat_tokenizer(tiny_model_folder)


def rendered(tokenizer: Any, tools: Any, messages: Any = TALK) -> str:
    talk = read_conversation(messages, tools)
    assert isinstance(talk, Conversation), talk
    made = ChatTemplate(templates.TOOLS, tokenizer)
    text = made.rendered(talk)
    assert isinstance(text, RenderedChat)
    (read,) = made.read([talk], 10_000)
    assert isinstance(read, ReadChat)
    assert [text.text[start:stop] for spans in text.answers for start, stop in spans] == ["It rains."]
    scored = [number for number, keep in zip(read.tokens.ids[1:], read.scored, strict=True) if keep]
    assert tokenizer.decode(scored) == "It rains.<|im_end|>"
    return text.text


def test_a_template_receives_tools_and_calls_and_only_answers_are_scored(tokenizer: Any) -> None:
    expected = tokenizer.apply_chat_template(TALK, [WEATHER, CLOCK], chat_template=templates.TOOLS, tokenize=False)
    assert rendered(tokenizer, [WEATHER, CLOCK]) == expected
    assert '"name": "clock"' in expected
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>' in expected
    without = tokenizer.apply_chat_template(TALK, chat_template=templates.TOOLS, tokenize=False)
    assert rendered(tokenizer, None) == rendered(tokenizer, []) == rendered(tokenizer, " ") == without
    pair = read_completion(TALK[:3], "It rains.", [WEATHER])
    assert isinstance(pair, Conversation)
    assert pair.tools == (WEATHER,)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "weather"}, "tools are dict, not a list of schemas of functions"),
        ([WEATHER, "clock"], "tool 2 of 2 is str, not the schema of a function"),
        ([WEATHER, None], "tool 2 of 2 is null, not the schema of a function"),
        ("[{", "tools are a text that is no JSON list"),
        ("3", "tools are int, not a list of schemas of functions"),
    ],
)
def test_tools_that_are_none_are_quarantined_with_the_reason(tools: Any, message: str) -> None:
    read = read_conversation(TALK, tools)
    assert not isinstance(read, Conversation)
    assert (read.reason, read.message) == ("not_chat", message)


def documents(path: Path, **source: Any) -> list[Document]:
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path), "id": "id", **source}})
    shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_documents=1))
    return [document for shard in shards for document in read_shard(shard)]


def test_every_form_of_a_column_gives_the_same_rendering(tokenizer: Any, tmp_path: Path) -> None:
    expected = rendered(tokenizer, [WEATHER, CLOCK])
    rows = [{"id": "a", "talk": TALK, "tools": [WEATHER, CLOCK]}, {"id": "b", "talk": TALK[:1], "tools": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "lists.parquet")  # objects get nulls for missing fields
    assert pq.read_table(tmp_path / "lists.parquet").to_pylist()[0]["tools"][0] != WEATHER
    texts = [{**row, "talk": json.dumps(row["talk"]), "tools": json.dumps(row["tools"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ChatTemplate(templates.TOOLS, tokenizer)
    for file in ("lists.parquet", "texts.parquet", "lines.jsonl"):
        first, second = documents(tmp_path / file, messages="talk", tools="tools")
        assert first.chat is not None
        assert first.chat.tools == (WEATHER, CLOCK)
        text = made.rendered(first.chat)
        assert isinstance(text, RenderedChat)
        assert text.text == expected
        assert second.problem is not None
        (plain, _) = documents(tmp_path / file, messages="talk")
        assert plain.chat is not None
        assert plain.chat.tools == ()


def test_tools_that_are_nested_too_deeply_cost_a_document(tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    rows = [{"id": "a", "talk": TALK, "tools": f'[{{"a": {deep}}}]'}, {"id": "b", "talk": TALK, "tools": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = documents(tmp_path / "a.jsonl", messages="talk", tools="tools")
    assert first.problem == ("not_chat", "its messages or tools are nested too deeply")
    assert second.chat is not None


def test_tools_without_chats_and_missing_columns_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a", "text": "b", "talk": TALK}) + "\n")
    for source, line in (({"text": "text"}, "tools are of chats: name their messages too"),):
        given = {"run": "r", "model": {"path": "x"}, "detectors": ["loss"]}
        corpus = {"audit": {"path": str(tmp_path / "a.jsonl"), "tools": "tools", **source}}
        with pytest.raises(UserError, match=line):
            build_config({**given, "corpus": corpus})
    with pytest.raises(UserError, match="no column 'tols' in"):
        documents(tmp_path / "a.jsonl", messages="talk", tools="tols")


def test_documents_of_a_trial_keep_their_tools() -> None:
    talk = read_conversation(TALK, [WEATHER])
    plain = read_conversation(TALK)
    assert isinstance(talk, Conversation)
    assert isinstance(plain, Conversation)
    made = [
        Documents(["a", "b"], [one.text, plain.text], [None] * 2, np.arange(2), {}, None, [one, plain], CHATS)
        for one in (talk, plain)
    ]
    rows = made[0].table(np.arange(2)).to_pylist()
    assert [read_conversation(row["messages"], row["tools"]) for row in rows] == [talk, plain]
    assert made[0].digest != made[1].digest


def test_tools_change_scores_of_a_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    model = save_chat_model(tiny_model_folder, tmp_path / "model", templates.TOOLS)
    sources: dict[str, dict[str, Any]] = {}
    for role, seed in (("audit", 0), ("unseen", 100)):
        rows = [
            {
                "id": f"{role}{n}",
                "messages": [{**TALK[0], "content": sentence(seed + n)}, *TALK[1:]],
                "tools": [WEATHER] if n % 2 else None,
            }
            for n in range(20)
        ]
        (tmp_path / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources[role] = {"path": str(tmp_path / f"{role}.jsonl"), "id": "id", "messages": "messages"}
    without = run_chats(tmp_path, chat_audit(model, sources), "without")
    given = {role: {**source, "tools": "tools"} for role, source in sources.items()}
    scores, plain = (
        {name: row["loss"] for name, row in rows_scored(store.root).items()}
        for store in (run_chats(tmp_path, chat_audit(model, given), "with"), without)
    )
    assert len(scores) == len(plain) == 40
    for name, score in scores.items():
        assert (abs(score - plain[name]) > 2e-6) == (int(name[-1]) % 2 == 1)
