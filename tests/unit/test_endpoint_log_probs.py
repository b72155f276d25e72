"""Log-probabilities of an endpoint are read as each kind of server writes them, and believed only if they can be."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import endpoint_dialects as dialects
import pytest
from endpoint_dialects import GOOD, Respond, adapter_tokens, echo, refused

from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Endpoint, Fault, Refusal, Usage
from pipeline.endpoint.log_probs import PROBES, read_log_probs
from pipeline.endpoint.token_texts import fold
from pipeline.errors import StopError
from pipeline.plan.description import build_config
from pipeline.stages.ask_log_probs import PromptRequest, ask_prompt, find_form
from pipeline.stages.base import StagePlan
from pipeline.stages.registry import check_stages, plan_stages
from tests.helpers.openai_server import openai_server

TEXTS = (
    "The harbour office wrote letters about ropes and tar.",
    "An old café \N{EN DASH} «naïve» \N{EN DASH} sells 天地玄黃 🙂 tea; it was 12,50 €.\n\n\tTwo lines\nfollow  it.",
    "天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏",
    "def f(x):\n    return x[1:] # a comment with <b>tags</b> and [brackets] and <unk> in it",
    " ".join(f"word{number} and more" for number in range(150)),
)


def audit(url: str, **settings: Any) -> dict[str, Any]:
    endpoint = {"endpoint": url, "name": "stub", "backoff": 0.01, "attempts": 6, "concurrency": 4, **settings}
    return {"corpus": {"audit": {"path": "a"}}, "detectors": ["loss"], "run": "run", "model": endpoint}


def read(url: str, *texts: str, **settings: Any) -> dict[str, Any]:
    """Values of texts as a run reads them, or the error of each."""
    config = build_config(audit(url, **settings))
    assert isinstance(config.model, EndpointConfig)
    found: dict[str, Any] = {}

    async def main() -> None:
        async with Endpoint(config.model) as endpoint:  # type: ignore[arg-type]
            form, generated = await find_form(plan_stages(StagePlan(config))[0], endpoint, Usage())
            for text in texts:
                request = PromptRequest(text, form.way, generated)
                try:
                    found[text] = await ask_prompt(
                        endpoint, request, lambda one, text=text: read_log_probs(one, text, form), Usage()
                    )
                except (Fault, Refusal) as error:
                    found[text] = error

    asyncio.run(main())
    return found


@pytest.mark.parametrize("name", GOOD)
def test_each_kind_of_server_is_read_with_the_values_of_its_tokens(name: str) -> None:
    respond, expected = GOOD[name]
    with openai_server(respond=respond) as server:
        found = read(server.url, *TEXTS)
        lines = check_stages(build_config(audit(server.url)))
    assert found == {text: expected(text) for text in TEXTS}
    uncompared = name in ("vLLM, ids for tokens", "numbers alone")
    assert ["no texts to compare" in line for line in lines] == [uncompared]
    assert server.bodies[0]["prompt"] in PROBES


def changed(respond: Respond, change: Callable[[dict[str, Any], list[Any]], Any]) -> Respond:
    """A server of echoes whose logprobs and values a function changes in place, or replaces the answer."""

    def act(body: dict[str, Any]) -> Any:
        answer = respond(body)
        if isinstance(answer, tuple):
            return answer
        listed = answer["choices"][0]["logprobs"]
        return change(answer, listed["token_logprobs"]) or answer

    return act


def templated(body: dict[str, Any], before: str, behind: str) -> Any:
    """A server that puts a prompt into a chat template, and counts and lists the whole."""
    if not dialects.echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(before + body["prompt"] + behind)
    return echo(tokens.decoded, [None, *tokens.expected], body["prompt"])


def special_tokens(body: dict[str, Any]) -> Any:
    if not dialects.echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"])
    values = [None, -0.1, *tokens.values, -0.2, -0.1, -0.3]
    return echo(["<|user|>", "\n", *tokens.decoded, "<|end|>", "\n", "<|assistant|>"], values, body["prompt"])


def cut_to(limit: int, counted: bool = True, texts: bool = True, left: bool = False) -> Respond:
    """A server that cuts prompts."""

    def act(body: dict[str, Any]) -> Any:
        if not dialects.echoing(body):
            return refused(body, "echo")
        tokens = adapter_tokens(body["prompt"])
        part = slice(-limit, None) if left else slice(limit)
        kept, values = tokens.decoded[part], tokens.values[part]
        answer = echo(kept, [None, *values[1:]], body["prompt"], counted=len(tokens.ids) if counted else None)
        if not texts:
            del answer["choices"][0]["logprobs"]["tokens"]
        return answer

    return act


def only_generated(body: dict[str, Any]) -> Any:
    """llama.cpp: `echo` is ignored, and the log-probabilities are of generated tokens."""
    if not dialects.echoing(body):
        return {"choices": [{"text": " x"}], "usage": {"prompt_tokens": 60, "completion_tokens": 1}}
    content = [{"token": f" w{n}", "logprob": -0.1 * n} for n in range(1, 40)]
    counted = len(adapter_tokens(body["prompt"]).ids)
    choice = {"text": "".join(one["token"] for one in content), "logprobs": {"content": content}}
    return {"choices": [choice], "usage": dialects.usage(counted, 39)}


def likeliest_alone(body: dict[str, Any]) -> Any:
    """Lists the likeliest token of each place, and its value, in the place of the prompt's."""
    if dialects.echoing(body):
        return refused(body, "prompt_logprobs")
    answer = dialects.vllm(body)
    entries = answer["choices"][0]["prompt_logprobs"]
    for place, entry in enumerate(entries):
        if entry is not None and place % 2:
            entries[place] = {"99999": {"logprob": -0.01 - place / 1000, "rank": 1, "decoded_token": " likely"}}
    return answer


def unnamed_candidates(body: dict[str, Any]) -> Any:
    if dialects.echoing(body):
        return refused(body, "prompt_logprobs")
    answer = dialects.likeliest_first(body)
    for entry in answer["choices"][0]["prompt_logprobs"]:
        for candidate in (entry or {}).values():
            del candidate["rank"], candidate["decoded_token"]
    return answer


def of_openai(change: Callable[[dict[str, Any], list[Any]], Any]) -> Respond:
    return changed(dialects.openai_legacy, change)


def fill(value: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(answer: dict[str, Any], values: list[Any]) -> None:
        values[1:] = [value] * (len(values) - 1)

    return change


def put(place: int, value: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(answer: dict[str, Any], values: list[Any]) -> None:
        values[place] = value

    return change


def count(value: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(answer: dict[str, Any], values: list[Any]) -> None:
        answer["usage"]["prompt_tokens"] = value

    return change


def shifted(answer: dict[str, Any], values: list[Any]) -> None:
    answer["choices"][0]["logprobs"]["tokens"].reverse()


def early(answer: dict[str, Any], values: list[Any]) -> None:
    """Each value stands beside the token before its own; the last token has none."""
    values[:] = [*values[1:], None]


def early_with_a_last(answer: dict[str, Any], values: list[Any]) -> None:
    """As `early`, but the last value is that of a generated token; the likeliest tokens are listed too."""
    listed = answer["choices"][0]["logprobs"]
    values[:] = [*values[1:], -0.7]
    listed["top_logprobs"] = [
        {text: value} if place % 3 == 0 else {" likely": value / 2}
        for place, (text, value) in enumerate(zip([*listed["tokens"][1:], " so"], values, strict=True))
    ]


def early_values(answer: dict[str, Any], values: list[Any]) -> None:
    """As `early_with_a_last`, with the likeliest tokens in their own places."""
    listed = answer["choices"][0]["logprobs"]
    listed["top_logprobs"] = [None if value is None else {text: value, " likely": -0.01} for text, value in
                              zip(listed["tokens"], values, strict=True)]  # fmt: skip
    values[:] = [None, *values[2:], -0.7]


def likelier_than_the_likeliest(answer: dict[str, Any], values: list[Any]) -> None:
    answer["choices"][0]["logprobs"]["top_logprobs"] = [None if value is None else {" likely": value - 1}
                                                        for value in values]  # fmt: skip


def sums(answer: dict[str, Any], values: list[Any]) -> None:
    values[1:] = itertools.accumulate(value / 100 for value in values[1:])


def predicting(body: dict[str, Any]) -> list[str]:
    """The token that a language model holds for the likeliest behind each token: the one that followed it before."""
    following, likeliest = dict[str, str](), list[str]()
    texts = adapter_tokens(body["prompt"]).decoded
    for place, text in enumerate(texts):
        if place:
            following[texts[place - 1]] = text
        likeliest.append(following.get(text, ""))
    return likeliest


def by_a_model(early: bool) -> Respond:
    """The values of a model that has learnt to repeat; if early, taken from the prediction behind each token."""

    def act(body: dict[str, Any]) -> Any:
        if not dialects.echoing(body):
            return refused(body, "echo")
        texts, likeliest = adapter_tokens(body["prompt"]).decoded, predicting(body)
        values: list[Any] = [None]
        for place, text in enumerate(texts[1:], 1):
            predicted = likeliest[place if early else place - 1]
            noise = -(place % 7) / 3
            values.append(noise - (0.1 if predicted == text else 12 if predicted else 8))
        answer = echo(texts, values, body["prompt"], body["max_tokens"])
        answer["choices"][0]["logprobs"]["top_logprobs"] = [
            None if value is None else {text: value} for text, value in zip(texts, values, strict=False)
        ]
        return answer

    return act


def shorter(answer: dict[str, Any], values: list[Any]) -> None:
    del values[-3:]


def no_texts(answer: dict[str, Any], values: list[Any]) -> None:
    del answer["choices"][0]["logprobs"]["tokens"]


def three_without_texts(answer: dict[str, Any], values: list[Any]) -> None:
    no_texts(answer, values)
    answer["usage"]["prompt_tokens"] = 3


def no_count_and_more(answer: dict[str, Any], values: list[Any]) -> None:
    no_texts(answer, values)
    del answer["usage"]
    answer["choices"][0]["text"] += " and more"


SHORT = len(adapter_tokens(PROBES[0]).ids)
"""Tokens of the shorter probe, which differ by one between trainings: ties of the tokenizer are broken at random."""

BAD: dict[str, tuple[Respond, str]] = {
    "zeros": (of_openai(fill(0.0)), "all log-probabilities of a probe are 0"),
    "one value": (of_openai(fill(-1.25)), "all log-probabilities of a probe are -1.25"),
    "stand-in for -inf": (of_openai(put(7, -9999.0)), f"log-probability 7 of {SHORT - 1} is -9999, outside"),
    "lowest float": (of_openai(put(7, -3.4e38)), "is -3.4e+38, outside"),
    "positive": (of_openai(put(3, 0.5)), f"log-probability 3 of {SHORT - 1} is 0.5, outside (-1000, 0]"),
    "probabilities": (of_openai(lambda answer, values: fill(0.25)(answer, values)), "is 0.25, outside"),
    "not a number": (of_openai(put(2, float("nan"))), f"log-probability 2 of {SHORT - 1} is nan"),
    "400 digits": (of_openai(put(2, -(10**400))), f"log-probability 2 of {SHORT - 1} is -inf"),
    "null within": (of_openai(put(9, None)), f"log-probability 9 of {SHORT - 1} is missing"),
    "text": (of_openai(put(9, "-1.5")), "is no number: '-1.5'"),
    "true": (of_openai(put(9, True)), "is no number: 'True'"),
    "cut": (cut_to(70), "do not give the text that was sent"),
    "cut on the left": (cut_to(70, left=True), "do not give the text that was sent"),
    "cut, no texts": (cut_to(70, texts=False), "tokens in the prompt, and its answer lists 70"),
    "cut, counted after it": (cut_to(70, False), "do not give the text that was sent"),
    "cut, counted after it, no texts": (cut_to(70, False, False), "the endpoint cuts prompts"),
    "cut at 32": (cut_to(32, texts=False), f"counts {SHORT} tokens in the prompt, and its answer lists 32"),
    "count of 3": (of_openai(count(3)), f"counts 3 tokens in the prompt, and its answer lists {SHORT}"),
    "count of 3, no texts": (
        of_openai(three_without_texts),
        f"counts 3 tokens in the prompt, and its answer lists {SHORT}",
    ),
    "count of words": (of_openai(count(20)), f"counts 20 tokens in the prompt, and its answer lists {SHORT}"),
    "template": (
        lambda body: templated(body, "USER: ", "\nASSISTANT:"),
        "do not give the text that was sent, but 'USER",
    ),
    "template of special tokens": (special_tokens, "adds <|user|>, <|end|>, <|assistant|> to a prompt"),
    "generated alone": (only_generated, "do not give the text that was sent, but ' w1 w2"),
    "likeliest alone": (likeliest_alone, "do not give the text that was sent"),
    "candidates without names": (unnamed_candidates, "up to 2 candidates for a token and does not name"),
    "one token early, and none for the last": (of_openai(early), "the list is shifted by one"),
    "one token early": (of_openai(early_with_a_last), "are those of the next tokens: the list is shifted by one"),
    "values one token early": (of_openai(early_values), "are not those of the likeliest tokens beside them"),
    "of predictions one token late": (by_a_model(early=True), "are not those of the tokens beside them"),
    "of other tokens": (of_openai(likelier_than_the_likeliest), "are not those of the likeliest tokens beside them"),
    "sums": (of_openai(sums), "they are sums over all tokens before"),
    "order": (of_openai(shifted), "do not give the text that was sent"),
    "lists of two lengths": (of_openai(shorter), f"the answer has {SHORT} tokens and {SHORT - 3} log-probabilities"),
    "no count, no texts, more text": (of_openai(no_count_and_more), "neither texts nor a number"),
    "none": (lambda body: {"choices": [{"text": " x"}]}, "no log-probabilities of the prompt in the answer"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_probability_of_the_prompt_stops_before_the_first_document(name: str) -> None:
    respond, reason = BAD[name]
    with openai_server(respond=respond) as server:
        with pytest.raises(StopError) as caught:
            check_stages(build_config(audit(server.url)))
        assert len(server.bodies) <= 6, "nothing is asked six times"
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert len(message) < 1000


def listing(top: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """The likeliest tokens of each place."""

    def change(answer: dict[str, Any], values: list[Any]) -> None:
        answer["choices"][0]["logprobs"]["top_logprobs"] = [top] * len(values)

    return change


def nearly_certain(answer: dict[str, Any], values: list[Any]) -> None:
    """Of a model that knows both probes by heart: values of the longer one are lower by their rounding."""
    del answer["choices"][0]["logprobs"]["top_logprobs"]
    values[2:] = [-1e-4 - 1e-7 * (len(values) > 2 * SHORT)] * (len(values) - 2)


@pytest.mark.parametrize(
    "change",
    [
        listing({" x": -(10**400)}),
        listing([{"token": ["a"], "logprob": 1}, {"token": {}, "logprob": None}, "x"]),
        nearly_certain,
    ],
)
def test_what_stands_beside_log_probabilities_stops_no_run(change: Callable[[dict[str, Any], list[Any]], Any]) -> None:
    with openai_server(respond=of_openai(change)) as server:
        assert check_stages(build_config(audit(server.url)))


def at_last(respond: Respond, spoilt: Respond) -> Respond:
    """A server whose answers to documents, and not to probes, are spoilt."""
    return lambda body: (respond if body["prompt"] in PROBES else spoilt)(body)


TEXT = TEXTS[4]
NUMBER = len(adapter_tokens(TEXT).ids)


def of_another(text: str) -> Respond:
    """A server that answers to another prompt, as a cache or a proxy that mixes up its answers."""
    return lambda body: dialects.openai_legacy({**body, "prompt": text})


OTHER = "A river froze over, boys skated home, and lamps burned blue under every bridge in town. " * 35
SPOILT: dict[str, tuple[Respond, str, str]] = {
    "another text": (
        of_another(OTHER[: len(TEXT)]),
        "model_error",
        "the endpoint answers to another text",
    ),
    "the same words in another order": (
        of_another(" ".join(sorted(TEXT.split()))),
        "model_error",
        "the endpoint answers to another text",
    ),
    "a text behind another": (of_another(f"{OTHER}{TEXT}"), "model_error", "the endpoint adds to prompts"),
    "stand-in": (of_openai(put(7, -9999.0)), "non_finite_score", f"log-probability 7 of {NUMBER - 1} is -9999"),
    "-inf": (of_openai(put(7, -float("inf"))), "non_finite_score", "is -inf"),
    "overflow": (lambda body: json.dumps(dialects.openai_legacy(body)).replace("-0.", "-1e999").encode(), *("",) * 2),
    "NaN": (of_openai(put(7, float("nan"))), "non_finite_score", "is nan"),
    "null": (of_openai(put(-1, None)), "non_finite_score", f"log-probability {NUMBER - 1} of {NUMBER - 1} is missing"),
    "positive": (of_openai(put(7, 0.002)), "non_finite_score", "is 0.002, outside"),
    "-1000": (of_openai(put(7, -1000)), "non_finite_score", "is -1000, outside"),
    "400 digits": (of_openai(put(7, 10**400)), "non_finite_score", "is inf"),
    "text": (of_openai(put(7, "a")), "non_finite_score", "is no number"),
    "cut": (cut_to(32), "model_error", f"counts {NUMBER} tokens in the prompt, and its answer lists 32"),
    "cut, counted after it": (cut_to(32, False), "model_error", "the 32 tokens of the answer hold"),
    "cut on the left": (cut_to(99, False, left=True), "model_error", "the 99 tokens of the answer hold"),
    "count of 3": (of_openai(count(3)), "model_error", f"counts 3 tokens in the prompt, and its answer lists {NUMBER}"),
    "lists of two lengths": (of_openai(shorter), "model_error", "tokens and"),
    "no list": (lambda body: {"choices": [{"text": "x"}]}, "model_error", "no log-probabilities"),
}
SPOILT["overflow"] = (SPOILT["overflow"][0], "non_finite_score", "is -inf")


@pytest.mark.parametrize("name", SPOILT)
def test_an_answer_that_is_not_believed_costs_one_request_and_one_document(name: str) -> None:
    spoilt, reason, message = SPOILT[name]
    with openai_server(respond=at_last(dialects.openai_legacy, spoilt)) as server:
        found = read(server.url, TEXT)[TEXT]
        assert server.attempts[TEXT] == 1
    assert isinstance(found, Refusal)
    assert message in str(found)
    assert found.reason == reason


def test_runs_of_zeros_and_rounding_above_zero_are_read() -> None:
    def known_by_heart(answer: dict[str, Any], values: list[Any]) -> None:
        values[1:] = [0, 0.0, 1e-3, -0.0, *[0] * (len(values) - 5)]

    with openai_server(respond=at_last(dialects.openai_legacy, of_openai(known_by_heart))) as server:
        assert read(server.url, TEXT)[TEXT] == [0.0] * (NUMBER - 1)


@pytest.mark.parametrize("value", [10**400, -1, "31", None, True, float("inf"), 1e300, 31.5, [], {}])
def test_a_count_that_is_none_is_no_count(value: Any) -> None:
    """The texts of tokens show where the prompt ends."""
    with openai_server(respond=of_openai(count(value))) as server:
        assert read(server.url, *TEXTS[:2]) == {text: adapter_tokens(text).expected for text in TEXTS[:2]}


def test_a_document_of_one_token_has_no_values() -> None:
    with openai_server(respond=dialects.openai_legacy) as server:
        assert read(server.url, "a") == {"a": []}


def test_both_ways_are_tried_and_a_configured_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(body: dict[str, Any]) -> Any:
        return dialects.openai_legacy(body) if dialects.echoing(body) else dialects.vllm(body)

    ways: list[set[bool]] = []
    for way in ("auto", "echo", "prompt_logprobs"):
        with openai_server(respond=both) as server:
            read(server.url, TEXT, log_probs=way)
            ways.append({dialects.echoing(body) for body in server.bodies})
    assert ways == [{False}, {True}, {False}]


def test_llama_cpp_python_is_asked_for_one_token_behind_an_echo_and_not_for_all() -> None:
    with openai_server(respond=dialects.llama_cpp_python) as server:
        read(server.url, TEXT)
    assert server.bodies[-1] == {
        "model": "stub", "prompt": TEXT, "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1
    }  # fmt: skip


def test_a_model_that_repeats_what_it_reads_is_believed() -> None:
    with openai_server(respond=by_a_model(early=False)) as server:
        assert check_stages(build_config(audit(server.url)))


def test_a_continuation_is_stopped_where_no_token_is_to_be_generated() -> None:
    with openai_server(respond=dialects.openai_legacy) as server:
        read(server.url, TEXT)
    assert all(body["stop"] for body in server.bodies if body["max_tokens"] == 0)
    assert {body["max_tokens"] for body in server.bodies if dialects.echoing(body)} == {0}


def test_texts_are_compared_without_blanks_case_and_compatibility_forms() -> None:
    assert fold("▁Hello Ġworld\n\tﬁn") == fold("hello worldfin") == "helloworldfin"
