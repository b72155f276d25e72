"""Replies that are no answer are left out by one rule in every role, and paid once."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from scipy.stats import binom

from pipeline.checks.answered import LEVEL, difference_p
from pipeline.detectors.continuations import cdd_score, coverage_score
from pipeline.detectors.samia import prefix_and_reference, samia_score
from pipeline.endpoint.answers import spent_before
from pipeline.endpoint.client import Fault
from pipeline.endpoint.replies import Reply, ReplyKind, cut_reasoning, read_replies
from pipeline.errors import ExitCode, StopError
from pipeline.results.summary import read_summary
from pipeline.stages.registry import ANSWER_FOLDERS
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.clusters import until
from tests.helpers.commands import ended
from tests.helpers.finished import rows, run
from tests.helpers.made_up import MakeAudit, sentence, write_corpus
from tests.helpers.openai_server import openai_server, prompt_of

DOCUMENT = "The river flows through the town\nand under the old bridge."
GOES_ON = "and under the old bridge"
REFUSED = "I can't continue copyrighted text."
STAGE = "sample/ratio0.5_t1_k50_p1_reference/4"


def said(content: Any, api: str = "chat", finish: str | None = "stop", **beside: Any) -> dict[str, Any]:
    """A response with one choice."""
    choice: dict[str, Any] = {"finish_reason": finish} if finish is not None else {}
    if api == "completions":
        return {"choices": [{**choice, "text": content, **beside}]}
    return {"choices": [{**choice, "message": {"role": "assistant", "content": content, **beside}}]}


def read(value: Mapping[str, Any], api: Any = "chat", document: str = DOCUMENT) -> Reply:
    (reply,) = read_replies(value, api, *document.split("\n", 1))
    return reply


ANSWERS = [  # content, whether reasoning was cut
    (GOES_ON, False),
    (f"<think>\nWhat next?\n</think>\n\n{GOES_ON}", True),
    (f"  <THINK >What next?</think >{GOES_ON}", True),
    (f'<think budget="5">What next?</think>{GOES_ON}', True),
    (f"<thinking>What next?</thinking>\n{GOES_ON}", True),
    (f"<reasoning>What next?</reasoning>\n{GOES_ON}", True),
    (f"<seed:think>What next?</seed:think>{GOES_ON}", True),
    (f"[THINK]What next?[/THINK]{GOES_ON}", True),
    (f"\u25c1think\u25b7What next?\u25c1/think\u25b7{GOES_ON}", True),
    (f"<|START_THINKING|>What next?<|END_THINKING|><|START_RESPONSE|>{GOES_ON}<|END_RESPONSE|>", True),
    (f"<|begin_of_thought|>What next?<|end_of_thought|>\n{GOES_ON}", True),
    (f"<think></think>\n\n<think>Again?</think>{GOES_ON}", True),
    (f"Okay, what comes next here?\n</think>\n\n{GOES_ON}", True),
    (
        "<|channel|>analysis<|message|>What next?<|end|><|start|>assistant<|channel|>final<|message|>"
        f"{GOES_ON}<|return|>",
        True,
    ),
    (f"<|channel|>final<|message|>{GOES_ON}", True),
    (f"analysisWe go on with the text.assistantfinal{GOES_ON}", True),
    (f"analysis of the water: {GOES_ON}", False),
    (f"They said: <think>, and no more. {GOES_ON}", False),
    (f"[analysis] {GOES_ON}", False),
    (f"Okay, what comes next here?</think>\n{GOES_ON}", True),
    (f"Okay, what comes next here?\n  </think>{GOES_ON}", True),
    (f"text = reply.split('</think>')[-1].strip() # {GOES_ON}", False),
    (f"The end is `</think>`\n{GOES_ON}", False),
    (f"\u201c</think>\u201d is its end: {GOES_ON}", False),
    (f"It wrote so:\n```\nWhat next?\n</think>\n```\n{GOES_ON}", False),
    (f"It wrote so:\n```\nx = 1\n```\nWhat next?\n</think>\n{GOES_ON}", True),
    (f"analysisResult = run(data) # {GOES_ON}", False),
    (f"analysisThe user asks to go on {GOES_ON}", False),
    (f"commentaryThe boat was old {GOES_ON}", False),
    (f"commentaryWe go on.\nSo.assistantfinal{GOES_ON}", True),
    (f"<thoughts on the sea> were many {GOES_ON}", False),
    (f"<Think Different> was on the wall {GOES_ON}", False),
    (f"<think mode='long' budget=5>What next?</think>{GOES_ON}", True),
]


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize(("content", "cut"), ANSWERS)
def test_reasoning_that_ends_is_cut_from_an_answer(content: str, cut: bool, api: str) -> None:
    reply = read(said(content, api), api)
    assert reply == Reply(ReplyKind.CUT if cut else ReplyKind.ANSWER, GOES_ON if cut else content)
    assert reply.answer == reply.text


NONE: list[tuple[Any, dict[str, Any], ReplyKind]] = [  # content, what stands beside it, kind
    (None, {"finish": "length", "reasoning_content": "What next?"}, ReplyKind.REASONING),
    ("", {"finish": "length", "reasoning": "What next?"}, ReplyKind.REASONING),
    ("", {"finish": "length"}, ReplyKind.REASONING),
    ("", {"finish": "MAX_TOKENS"}, ReplyKind.REASONING),
    ("Let me look it up", {"finish": "tool_use"}, ReplyKind.EMPTY),
    ("\n", {"finish": "stop", "reasoning_details": [{"type": "reasoning.text"}]}, ReplyKind.REASONING),
    ("<think>What next? The text goes on, so", {"finish": "length"}, ReplyKind.REASONING),
    ("<think>What next?</think>", {}, ReplyKind.REASONING),
    ("\n <Thinking mode='long'> What next?", {"finish": "length"}, ReplyKind.REASONING),
    ("[THINK]What next?", {}, ReplyKind.REASONING),
    ("<|channel|>analysis<|message|>What next?", {"finish": "length"}, ReplyKind.REASONING),
    ("<think>And?</think><think>What next?", {"finish": "length"}, ReplyKind.REASONING),
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "What next?"}]}], {}, ReplyKind.REASONING),
    ("", {"finish": "stop"}, ReplyKind.EMPTY),
    (None, {"finish": "tool_calls"}, ReplyKind.EMPTY),
    (" ", {"finish": None}, ReplyKind.EMPTY),
    (GOES_ON, {"finish": "content_filter"}, ReplyKind.FILTERED),
    (None, {"finish": "SAFETY"}, ReplyKind.FILTERED),
    (None, {"finish": "content_filter: RECITATION"}, ReplyKind.FILTERED),
    (None, {"refusal": "No."}, ReplyKind.REFUSAL),
    ([{"type": "refusal", "refusal": "No."}], {}, ReplyKind.REFUSAL),
    ("Let me look that up.", {"finish": "tool_calls"}, ReplyKind.EMPTY),
    ("Let me look that up.", {"finish": "function_call"}, ReplyKind.EMPTY),
    (GOES_ON, {"finish": "SPII"}, ReplyKind.FILTERED),
    (GOES_ON, {"finish": "BLOCKED"}, ReplyKind.FILTERED),
    ("", {"finish": "ERROR_TOXIC"}, ReplyKind.FILTERED),
    (GOES_ON, {"finish": "guardrail_intervened"}, ReplyKind.FILTERED),
]


@pytest.mark.parametrize(("content", "beside", "kind"), NONE)
def test_a_reply_that_is_no_answer_has_a_kind(content: Any, beside: dict[str, Any], kind: ReplyKind) -> None:
    for api in ("chat", "completions"):
        reply = read(said(content, api, **beside), api)
        assert (reply.kind, reply.answer) == (kind, None)
        assert not reply.text or kind == ReplyKind.REFUSAL


def test_a_refusal_in_words_is_one_only_of_a_model_that_is_instructed() -> None:
    for content in (REFUSED, f"<think>May I?</think>\n{REFUSED}", [{"type": "text", "text": REFUSED}]):
        assert read(said(content)) == Reply(ReplyKind.REFUSAL, REFUSED)
        assert read(said(content, "completions"), "completions").text == REFUSED
        assert read(said(content, "completions"), "completions").kind.answers
    marked = read(said(None, "completions", refusal=REFUSED), "completions")
    assert marked == Reply(ReplyKind.REFUSAL, REFUSED), "a server that marks it is believed"


@pytest.mark.parametrize(
    ("prefix", "reference", "said_instead"),
    [
        ("How do I pick the lock of my neighbour's door?", "I can't help with that.", None),
        ("How do I pick it?", "I can't help with that.", "I can\u2019t help with that. Is there anything else?"),
        ("How do I pick it?", "I can't help with that request. Ask a locksmith.", "I can't help with that request."),
        ("How do I pick it?", "Sorry, but I cannot assist with that.", "I can't help with that request."),
        (
            "\u600e\u4e48\u505a\uff1f",
            "\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u63d0\u4f9b\u8fd9\u4e9b\u5185\u5bb9\u3002",
            None,
        ),
    ],
)
def test_a_refusal_that_the_document_has_itself_is_an_answer(
    prefix: str, reference: str, said_instead: str | None
) -> None:
    text = said_instead or reference
    (reply,) = read_replies(said(text), "chat", prefix, reference)
    assert reply == Reply(ReplyKind.ANSWER, text)
    (reply,) = read_replies(said(text), "chat", prefix, "Turn the key twice.")
    assert reply.kind == ReplyKind.REFUSAL


def test_a_refusal_that_quotes_what_the_model_was_given_is_one() -> None:
    prefix = "It was in the harbour that the two brothers of the miller met again after the war"
    text = f"I can't continue the text \u201c{prefix}\u201d because it is copyrighted."
    (reply,) = read_replies(said(text), "chat", prefix, "and neither of them spoke.")
    assert reply.kind == ReplyKind.REFUSAL


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "and under "}, {"type": "text", "text": "the old bridge"}],
        [{"type": "output_text", "text": GOES_ON}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}, {"type": "text", "text": GOES_ON}],
        [{"type": "reasoning", "text": "Hm"}, {"type": "text", "text": GOES_ON}],
        [GOES_ON],
        [{"text": GOES_ON}, {"type": "image_url", "image_url": {"url": "x"}}, 3],
        {"text": GOES_ON},
    ],
)
def test_content_in_parts_is_joined_without_its_reasoning(parts: Any) -> None:
    assert read(said(parts)) == Reply(ReplyKind.ANSWER, GOES_ON)


def test_hidden_reasoning_is_recognised_by_its_tokens() -> None:
    for name in ("completion", "output"):
        usage = {"completion_tokens": 64, f"{name}_tokens_details": {"reasoning_tokens": 64}}
        assert read({**said("", finish="stop"), "usage": usage}).kind == ReplyKind.REASONING
        assert read({**said(GOES_ON), "usage": usage}).kind == ReplyKind.ANSWER
    for usage in (
        None,
        [],
        {"completion_tokens_details": None},
        {"completion_tokens_details": {"reasoning_tokens": "x"}},
    ):
        assert read({**said("", finish="stop"), "usage": usage}).kind == ReplyKind.EMPTY


def test_tags_that_a_document_has_too_are_text() -> None:
    document = "Write <think> first, then your thoughts,\nand </think> behind them. <|channel|>analysis is its name."
    for reply in ("<think> first, then", "your thoughts, and </think> behind them", "<|channel|>analysis is"):
        assert cut_reasoning(reply, document) == (reply, False)
        assert read(said(reply), document=document).kind == ReplyKind.ANSWER


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>a</think>" * 600_000 + " so it is", "so it is"),
        ("```\n" + "</think>\n" * 300_000, None),
        ("```\n" + "</think>\n" * 300_000 + "```\n</think>\nso it is", "so it is"),
    ],
    ids=["pairs", "tags in code", "tags behind code"],
)
def test_many_tags_take_seconds(text: str, rest: str | None) -> None:
    """In time quadratic in their number each case takes a multiple of the limit."""
    began = time.process_time()
    assert cut_reasoning(text, DOCUMENT) == ((text, False) if rest is None else (rest, True))
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    "value",
    [{}, {"choices": {}}, {"choices": []}, {"choices": ["x"]}, {"choices": [{}]}, {"choices": [{"message": 3}]}],
)
def test_a_response_without_text_or_end_is_nonsense(value: dict[str, Any]) -> None:
    for api in ("chat", "completions"):
        with pytest.raises(Fault, match="answer has no"):
            read(value, api)


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("error", [{"code": "content_filter"}, {"code": 403, "message": "Output was flagged"}])
def test_a_choice_with_the_error_of_a_filter_is_filtered(api: Any, error: dict[str, Any]) -> None:
    (choice,), (sound,) = (said(text, api)["choices"] for text in ("", GOES_ON))
    value = {"choices": [sound, {**choice, "error": error}]}
    kinds = [reply.kind for reply in read_replies(value, api, "The river", "flows")]
    assert kinds == [ReplyKind.ANSWER, ReplyKind.FILTERED]


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize(
    ("content", "finish", "error", "message"),
    [
        ("", "error", {"code": 502, "message": "Upstream  failed"}, "answer has an error: Upstream failed"),
        (GOES_ON, "stop", {"code": 502}, "answer has an error: 502"),
        (GOES_ON, "stop", "overloaded", "answer has an error: overloaded"),
        (GOES_ON, "error", None, "answer ended by error"),
        (GOES_ON, "abort", None, "answer ended by abort"),
        (GOES_ON, "insufficient_system_resource", None, "answer ended by insufficient_system_resource"),
    ],
)
def test_half_a_reply_of_a_server_that_failed_is_asked_for_again(
    content: str, finish: str, error: Any, message: str, api: Any
) -> None:
    (failed,) = said(content, api, finish)["choices"]
    failed = {**failed, "error": error}
    with pytest.raises(Fault) as caught:
        read({"choices": [failed, failed]}, api)
    assert str(caught.value) == message
    sound = said(GOES_ON, api)["choices"]
    assert read({"choices": [failed, *sound]}, api) == Reply(ReplyKind.ANSWER, GOES_ON), "the others are not lost"


def test_a_reply_of_the_other_interface_is_named() -> None:
    for api, other in (("chat", "completions"), ("completions", "chat")):
        with pytest.raises(Fault, match=f"answer has no text where api: {api} has it, but .* as of api: {other}$"):
            read(said(GOES_ON, other), api)


def test_choices_come_in_the_order_of_their_indices() -> None:
    def made(*indices: Any) -> list[str]:
        choices = [{"index": index, **choice(f"text {n}", "chat")} for n, index in enumerate(indices)]
        return [reply.text for reply in read_replies({"choices": choices}, "chat", "The river", "flows")]

    assert made(2, 0, 1) == ["text 1", "text 2", "text 0"]
    for unordered in ((2, None, 1), ("2", "0", "1"), (True, 0, 1), (0, 0, 0)):
        assert made(*unordered) == ["text 0", "text 1", "text 2"]


def test_a_filter_that_only_the_server_behind_another_names_is_one() -> None:
    value = said(GOES_ON)
    value["choices"][0]["native_finish_reason"] = "RECITATION"
    assert read(value).kind == ReplyKind.FILTERED
    value["choices"][0]["native_finish_reason"] = "STOP"
    assert read(value).kind == ReplyKind.ANSWER


# --- whole runs

AUDIT = [sentence(i) for i in range(14)]
UNSEEN = [sentence(1000 + i) for i in range(14)]
PREFIXES = [prefix_and_reference(text)[0] for text in [*AUDIT, *UNSEEN]]
SETTINGS: dict[str, Any] = {
    "detectors": [{name: {"draws": 4}} for name in ("samia", "samia_zlib", "coverage", "cdd")],
    "selections": [{"name": "members", "detectors": ["samia(draws=4)"], "procedure": "bh", "alpha": 0.5}],
    "error_budget": 0.0,
    "resources": {"cluster": "local", "shard_bytes": 700},
}
FATES = {1: "reasoning", 3: "refusal", 5: "filter", 7: "empty", 9: "mixed", 11: "likeliest", 16: "refusal", 18: "mixed"}
"""Number of a prefix -> what comes; mixed: of each request one answer, one behind reasoning and one refusal."""


def choice(content: str | None, api: str, finish: str = "stop", **beside: Any) -> dict[str, Any]:
    (made,) = said(content, api, finish, **beside)["choices"]
    return dict(made)


def refused(api: str) -> dict[str, Any]:
    """A refusal: of a chat in words, of a completion as a server marks it."""
    return choice(REFUSED, api) if api == "chat" else choice(None, api, refusal=REFUSED)


def respond(body: dict[str, Any]) -> dict[str, Any]:
    """At most three choices, by the number of the prefix."""
    api = "chat" if "messages" in body else "completions"
    number, seed = PREFIXES.index(prompt_of(body)), body["seed"]
    texts = [f"some words number {seed % 97} and {seed % 89 + n}" for n in range(3)]
    fate = FATES.get(number, "answer")
    if fate == "likeliest":
        fate = "refusal" if body["temperature"] == 0 else "answer"
    made = {
        "answer": [choice(text, api) for text in texts],
        "reasoning": [choice("<think>What next?", api, "length")] * 3,
        "refusal": [refused(api)] * 3,
        "filter": [choice(None, api, "content_filter")] * 3,
        "empty": [choice("", api)] * 3,
        "mixed": [refused(api), choice(f"<think>So</think>{texts[1]}", api), choice(texts[2], api)],
    }[fate]
    if body["temperature"] == 0 and fate == "mixed":
        made = [choice(texts[0], api)]
    return {"choices": made[: body["n"]], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}


def model(url: str, api: str = "chat", **settings: Any) -> dict[str, Any]:
    quick = {"backoff": 0.01, "timeout": 60, "attempts": 6, "concurrency": 4}
    return {"endpoint": url, "name": "stub", "api": api, **quick, **settings}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_draws_that_are_no_answer_are_left_out_in_every_role_and_never_asked_again(
    make_audit: MakeAudit, tmp_path: Path, api: str
) -> None:
    with openai_server(respond=respond, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, api), **SETTINGS)
        assert ended("run", str(path)) == 0, "an error budget of 0 is kept: they are no errors"
        asked = len(server.bodies)
        assert asked == 28 * 3, "two requests for four draws, one for the likeliest; none is asked again"
        assert ended("run", str(path)) == 0
        assert ended("run", str(path), "--retry", "all") == 0
        assert len(server.bodies) == asked
    folder = tmp_path / "run"
    drawn, scored = rows(folder, STAGE), rows(folder)
    likeliest = rows(folder, "sample/ratio0.5_t0_kall_p1_reference/1")
    none = {
        "audit-1": "reasoning",
        "audit-3": "refusal",
        "audit-5": "filtered",
        "audit-7": "empty",
        "unseen-2": "refusal",
    }
    bad = {row["doc_id"]: row for row in pq.read_table(folder / "quarantine").to_pylist()}
    assert {name: row["reason"] for name, row in bad.items()} == dict.fromkeys([*none, "audit-11"], "no_answer")
    for name, kind in none.items():
        assert drawn[name]["continuations"] == [None] * 4
        assert [(one["draw"], one["kind"]) for one in drawn[name]["replies"]] == [(n, kind) for n in range(4)]
    assert bad["audit-3"]["message"] == f"none of its 4 draws is an answer: 4 refusals; the first: {REFUSED}"
    assert bad["audit-11"]["message"] == f"its only draw is no answer: 1 refusal; the first: {REFUSED}"
    for name in ("audit-9", "unseen-4"):
        row = drawn[name]
        kinds = [(0, "refusal", REFUSED), (1, "reasoning_cut", ""), (3, "refusal", REFUSED)]
        assert [(one["draw"], one["kind"], one["text"]) for one in row["replies"]] == kinds
        texts = [text for text in row["continuations"] if text is not None]
        assert (len(texts), row["continuations"][0], row["continuations"][3]) == (2, None, None)
        assert not any("think" in text for text in texts)
        greedy = likeliest[name]["continuations"][0].split()
        assert scored[name]["samia(draws=4)"] == samia_score(texts, row["reference"])
        assert scored[name]["samia_zlib(draws=4)"] == samia_score(texts, row["reference"], compressed=True)
        assert scored[name]["coverage(draws=4)"] == coverage_score(texts, row["reference"])
        assert scored[name]["cdd(draws=4)"] == cdd_score([text.split() for text in texts], greedy)
    assert scored.keys() == drawn.keys() - bad.keys()
    page = (folder / "report/report.html").read_text()
    assert "no_answer" in page


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes_and_pays_nothing_twice(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    with openai_server(respond=respond, models=["stub"]) as server:
        whole = {"cluster": "local", "shard_bytes": 100_000}
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **{**SETTINGS, "resources": whole})
        with pytest.raises(StopError, match=r"model\.budget\.requests"):
            run(path, "model.budget.requests=25")
        stored = [
            json.loads(line)
            for file in (tmp_path / "run/samples").rglob("*.jsonl")
            for line in filter(None, file.read_text().splitlines())
        ]
        assert any(one["kind"] == "refusal" for line in stored for one in line.get("replies", ()))
        with pytest.raises(StopError, match=r"model\.budget\.requests"):
            run(path, "model.budget.requests=40")
        run(path)
        assert len(server.bodies) == 28 * 3
        store = Store(str(tmp_path / "run"))
        assert spent_before(store, STAGE, ANSWER_FOLDERS).requests == server.requests
        run(path, f"run={tmp_path / 'again'}", "model.concurrency=1")
    for stage in (STAGE, "score"):
        assert rows(tmp_path / "run", stage) == rows(tmp_path / "again", stage)
        one, two = (
            {r.shard: r.files[r.data].sha256 for r in read_receipts(Store(str(tmp_path / n)), stage)}
            for n in ("run", "again")
        )
        assert one == two


def test_a_run_that_was_killed_pays_only_for_what_was_under_way_again(make_audit: MakeAudit, tmp_path: Path) -> None:
    with openai_server(respond=respond, models=["stub"], seconds=0.2) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, concurrency=2), **SETTINGS)
        command = [sys.executable, "-m", "ray_jobs.cli", "run", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: len(server.bodies) >= 16)
        process.kill()
        process.wait()
        run(path)
        assert len(server.bodies) <= 28 * 3 + 2
        run(path, f"run={tmp_path / 'again'}", "model.concurrency=16")
    for stage in (STAGE, "score"):
        assert rows(tmp_path / "run", stage) == rows(tmp_path / "again", stage)


def test_more_draws_ask_for_those_alone_and_fewer_for_none(make_audit: MakeAudit, tmp_path: Path) -> None:
    few, more = "detectors=[{samia: {draws: 3}}]", "detectors=[{samia: {draws: 6}}]"
    with openai_server(respond=respond, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **SETTINGS)
        run(path, few, "selections=[]")
        first, asked = rows(tmp_path / "run"), len(server.bodies)
        run(path, more, "selections=[]")
        assert len(server.bodies) == 2 * asked
        drawn = rows(tmp_path / "run", "sample/ratio0.5_t1_k50_p1_reference/6")
        assert [one["draw"] for one in drawn["audit-9"]["replies"]] == [0, 1, 3, 4]
        run(path, few, "selections=[]")
        assert len(server.bodies) == 2 * asked
        assert rows(tmp_path / "run") == first, "draws that another setting needed change nothing"
        run(path, more, f"run={tmp_path / 'again'}", "selections=[]")
        whole = rows(tmp_path / "again", "sample/ratio0.5_t1_k50_p1_reference/6")
        texts = {name: [one["kind"] for one in row["replies"]] for name, row in whole.items()}
        assert texts == {name: [one["kind"] for one in row["replies"]] for name, row in drawn.items()}


@pytest.mark.parametrize(
    "error",
    [
        {"code": "content_filter", "message": "The response was filtered"},
        {"code": "400", "innererror": {"code": "ResponsibleAIPolicyViolation"}},
        {"type": "content_policy_violation"},
    ],
)
def test_a_prompt_that_a_filter_stops_is_asked_about_once(
    make_audit: MakeAudit, tmp_path: Path, error: dict[str, Any]
) -> None:
    def refuse(body: dict[str, Any]) -> Any:
        return {"error": error} if prompt_of(body) in PREFIXES[:4] else None

    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": []}
    with openai_server(respond=respond, refuse=refuse, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **given)
        run(path)
        run(path, "error_budget=0.5")
        assert {server.attempts[prefix] for prefix in PREFIXES[:4]} == {1}
        assert len(server.probes) == 1
    bad = {row["doc_id"]: row for row in pq.read_table(tmp_path / "run/quarantine").to_pylist()}
    for number in range(4):
        row = bad[f"audit-{number}"]
        assert (row["reason"], row["message"]) == (
            "no_answer",
            "none of its 4 draws is an answer: 4 stopped by a filter",
        )


def test_a_prompt_about_which_reasoning_takes_all_tokens_is_no_error(make_audit: MakeAudit, tmp_path: Path) -> None:
    limit = "Could not finish the message because max_tokens or model output limit was reached. Please try again."

    def respond(body: dict[str, Any]) -> Any:
        if prompt_of(body) in PREFIXES[:4]:
            return 400, {"error": {"message": limit, "type": "invalid_request_error", "param": None, "code": None}}
        return {"choices": [choice("some words of it", "chat")] * body["n"], "usage": {}}

    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": []}
    with openai_server(respond=respond, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **given)
        run(path)
        assert len(server.bodies) == 28
    bad = {row["doc_id"]: row for row in pq.read_table(tmp_path / "run/quarantine").to_pylist()}
    message = "none of its 4 draws is an answer: 4 reasoning without an answer"
    assert {name: (row["reason"], row["message"]) for name, row in bad.items()} == {
        f"audit-{number}": ("no_answer", message) for number in range(4)
    }


@pytest.mark.parametrize("end", ["abort", "error", "insufficient_system_resource", "network_error", "timeout"])
def test_half_a_text_of_a_server_that_failed_has_no_score(make_audit: MakeAudit, tmp_path: Path, end: str) -> None:
    """Where every attempt fails, the document is an error; where the second one does not, it has its draws."""
    often: Counter[str] = Counter()

    def respond(body: dict[str, Any]) -> Any:
        prompt = prompt_of(body)
        often[prompt] += 1
        fails = prompt == PREFIXES[0] or (prompt == PREFIXES[1] and often[prompt] == 1)
        made = choice("some words", "chat", end) if fails else choice("some words of it", "chat")
        return {"choices": [made] * body["n"], "usage": {}}

    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": [], "error_budget": 0.5}
    with openai_server(respond=respond, models=["stub"]) as server:
        run(make_audit(AUDIT, UNSEEN, model=model(server.url, attempts=3), **given))
    (bad,) = pq.read_table(tmp_path / "run/quarantine").to_pylist()
    assert (bad["doc_id"], bad["reason"], bad["message"]) == (
        "audit-0",
        "model_error",
        f"endpoint: answer ended by {end}",
    )
    assert (often[PREFIXES[0]], often[PREFIXES[1]], often[PREFIXES[2]]) == (3, 2, 1)
    assert rows(tmp_path / "run", STAGE)["audit-1"]["continuations"] == ["some words of it"] * 4


def test_the_last_answer_of_a_chat_follows_the_same_rule(tmp_path: Path) -> None:
    def talk(number: int) -> dict[str, Any]:
        question, answer = sentence(number, 4), sentence(number + 500, 4)
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    corpus = write_corpus(
        tmp_path,
        {"audit": [talk(n) for n in range(8)], "unseen": [talk(n + 50) for n in range(8)]},
        messages="messages",
    )
    refused = {sentence(2, 4), sentence(53, 4)}

    def respond(body: dict[str, Any]) -> dict[str, Any]:
        text = REFUSED if body["messages"][-1]["content"] in refused else f"<think>So</think>words {body['seed'] % 9}"
        made = [choice(text, "chat")] * body["n"]
        return {"choices": made, "usage": {"prompt_tokens": 9, "completion_tokens": 5}}

    with openai_server(respond=respond, models=["stub"]) as server:
        given = {**SETTINGS, "model": model(server.url, "chat"), "corpus": corpus, "run": str(tmp_path / "run")}
        path = tmp_path / "chats.yaml"
        path.write_text(yaml.safe_dump({**given, "selections": []}))
        assert ended("run", str(path)) == 0
    bad = pq.read_table(tmp_path / "run/quarantine").to_pylist()
    assert {(row["doc_id"], row["reason"]) for row in bad} == {("audit-2", "no_answer"), ("unseen-3", "no_answer")}
    drawn = rows(tmp_path / "run", "sample/answer_t1_k50_p1_reference/4")
    assert drawn["audit-0"]["continuations"][0].startswith("words ")
    assert {one["kind"] for one in drawn["audit-0"]["replies"]} == {"reasoning_cut"}


# --- the start of a run


@pytest.mark.parametrize(
    ("content", "finish", "api", "kind", "remedy"),
    [
        ("<think>What next?", "length", "chat", "20 reasoning without an answer", "spends its tokens on reasoning"),
        (REFUSED, "stop", "chat", f"20 refusals, the first: {REFUSED}", "change instruction"),
        (None, "content_filter", "completions", "20 stopped by a filter", "switch it off there"),
        ("", "stop", "completions", "20 without text", "check api and name"),
    ],
)
def test_five_documents_without_an_answer_stop_a_run_that_pays_for_no_other(
    make_audit: MakeAudit, tmp_path: Path, content: str | None, finish: str, api: str, kind: str, remedy: str
) -> None:
    def respond(body: dict[str, Any]) -> dict[str, Any]:
        made = [choice(content, api, finish)] * body["n"]
        return {"choices": made, "usage": {"prompt_tokens": 9, "completion_tokens": 5}}

    one_worker = {"cluster": "local", "shard_bytes": 700, "actors": 1}
    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": [], "resources": one_worker}
    with openai_server(respond=respond, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, api, concurrency=16), **given)
        for _ in range(2):
            with pytest.raises(StopError) as caught:
                run(path)
            assert f"none of the first 5 documents has an answer ({kind}); " in str(caught.value)
            assert remedy in str(caught.value)
            assert "\n" not in str(caught.value)
            assert caught.value.exit_code == ExitCode.INCOMPLETE
            assert len(server.bodies) == 5, "one request each; the second run asks for nothing"
        spent = spent_before(Store(str(tmp_path / "run")), STAGE, ANSWER_FOLDERS)
        assert (spent.requests, len(server.probes)) == (server.requests, 1)
        outcome = run(path, "error_budget=1")
        assert (outcome.status.scored, outcome.status.quarantined) == (0, 28)
        assert len(server.bodies) == 28


def test_a_run_goes_on_where_an_earlier_command_had_an_answer(make_audit: MakeAudit, tmp_path: Path) -> None:
    refusing = False

    def respond(body: dict[str, Any]) -> dict[str, Any]:
        made = [choice(REFUSED if refusing else "some words of it", "chat")] * body["n"]
        return {"choices": made, "usage": {"prompt_tokens": 9, "completion_tokens": 5}}

    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": []}
    with openai_server(respond=respond, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **given)
        with pytest.raises(StopError, match=r"model\.budget\.requests"):
            run(path, "model.budget.requests=20")
        refusing = True
        outcome = run(path)
        assert (outcome.status.scored, outcome.status.quarantined) == (19, 9), "one request found refused parameters"
        assert len(server.bodies) == 28


def test_a_document_that_an_endpoint_fails_counts_neither_way(make_audit: MakeAudit) -> None:
    def respond(body: dict[str, Any]) -> Any:
        if PREFIXES.index(prompt_of(body)) % 2 == 0:
            return 400, {"error": {"message": "not this"}}
        return {"choices": [choice(REFUSED, "chat")] * body["n"], "usage": {}}

    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": []}
    with openai_server(respond=respond, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, concurrency=2), **given)
        with pytest.raises(StopError, match="none of the first 5 documents has an answer"):
            run(path)
        refused = [body for body in server.bodies if PREFIXES.index(prompt_of(body)) % 2]
        assert len(refused) == 5


def test_a_run_whose_answers_cannot_be_recorded_ends_where_other_documents_wait(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    """The first five documents are of one shard, and those of other shards wait until one of them has an answer."""

    def respond(body: dict[str, Any]) -> dict[str, Any]:
        for path in (tmp_path / "run/samples").rglob("*.jsonl"):
            if path.is_file():
                path.unlink()
                path.mkdir()  # nothing can be appended to a folder
        return {"choices": [choice(REFUSED, "chat")] * body["n"], "usage": {}}

    given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}], "selections": []}
    with openai_server(respond=respond, models=["stub"], seconds=0.5) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, concurrency=16), **given)
        command = [sys.executable, "-m", "ray_jobs.cli", "run", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_difference_between_the_shares_of_both_roles_is_named(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {role: [sentence(first + i) for i in range(30)] for role, first in (("audit", 0), ("unseen", 500))}
    prefixes = {role: [prefix_and_reference(text)[0] for text in some] for role, some in texts.items()}

    def summary(name: str, refused: set[str]) -> Any:
        def respond(body: dict[str, Any]) -> dict[str, Any]:
            text = REFUSED if prompt_of(body) in refused else f"<think>So</think>some words of {body['seed'] % 9}"
            made = [choice(text, "chat")] * body["n"]
            return {"choices": made, "usage": {"prompt_tokens": 9, "completion_tokens": 5}}

        with openai_server(respond=respond, models=["stub"]) as server:
            given = {**SETTINGS, "detectors": [{"samia": {"draws": 4}}]}
            run(make_audit(texts["audit"], texts["unseen"], model=model(server.url), **given), f"run={tmp_path / name}")
        return read_summary(Store(str(tmp_path / name)), "members")

    more = summary("more", set(prefixes["audit"][15:27]))
    assert more.n_quarantined == 12
    check = more.diagnostics.answered
    numbers = (check.n_audit, check.n_audit_unanswered, check.n_calibration, check.n_calibration_unanswered)
    assert numbers == (30, 12, 30, 0)
    assert check.outcome == "inconclusive"
    assert 1e-5 < check.p < 1e-3
    assert "Audited documents lack an answer more often than chance explains" in check.sentence
    assert more.conclusion != "contradicted", "by this check"
    assert ended("status", str(tmp_path / "more")) == 0
    assert check.sentence in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "more/report/report.html").read_text()
    assert "48 draws are no answer of the endpoint" in page
    assert "draws begin with reasoning of the model" in page
    assert "Documents without an answer" in page
    alike = summary("alike", {*prefixes["audit"][3:6], *prefixes["unseen"][8:10]}).diagnostics.answered
    assert (alike.outcome, alike.n_audit_unanswered, alike.n_calibration_unanswered) == ("passed", 3, 2)
    assert "Chance explains the difference" in alike.sentence
    none = summary("none", set())
    assert none.diagnostics.answered is None
    assert "answered" not in none.model_dump(mode="json")["diagnostics"]


def test_the_exact_test_of_two_shares_keeps_its_level() -> None:
    """All pairs of counts at a common share, weighted by their probabilities."""
    for total, other, share in ((30, 20, 0.3), (50, 50, 0.05), (12, 40, 0.5)):
        wrong = sum(
            binom.pmf(ones, total, share) * binom.pmf(others, other, share)
            for ones in range(total + 1)
            for others in range(other + 1)
            if difference_p(ones, total, others, other) <= LEVEL
        )
        assert 0 < wrong <= LEVEL
