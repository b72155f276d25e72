"""The client of an endpoint keeps its limits, and tells what one document brought about from what befalls all."""

import asyncio
import datetime
import email.utils
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config.models import EndpointConfig
from pipeline.corpus.reasons import Reason
from pipeline.endpoint import client
from pipeline.endpoint.client import Endpoint, Fault, Refusal, Usage, check_endpoint
from pipeline.endpoint.error_answers import error_words
from pipeline.endpoint.log_probs import PromptAnswer, Way
from pipeline.errors import ExitCode, StopError, UserError
from pipeline.models.load import fingerprint_model
from pipeline.plan.description import build_config
from pipeline.stages.ask_log_probs import STOPS, PromptRequest, ask_prompt
from pipeline.stages.base import DocumentSize, Questions
from pipeline.stages.registry import request_sizes
from tests.helpers.openai_server import openai_server

KEY = "sk-sesame-1f2e3d"


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def config(url: str, **settings: Any) -> EndpointConfig:
    quick = {"backoff": 0.01, "timeout": 60, "attempts": 4, "concurrency": 8}
    return EndpointConfig.model_validate({"endpoint": url, "name": "stub", **quick, **settings})


def ask(
    asked: EndpointConfig, prompts: list[str], most: int = 10, spent: Usage | None = None
) -> tuple[dict[str, Any], Usage]:
    """Ask for one continuation of each; answers or errors by prompt, and what was spent."""
    found: dict[str, Any] = {}

    def read(value: dict[str, Any]) -> str:
        text: str = value["choices"][0].get("text", "") if value.get("choices") else ""
        if not text:
            raise Fault("empty completion")
        return text

    async def main() -> Usage:
        async with Endpoint(asked, spent) as endpoint:

            async def one(prompt: str) -> None:
                body = {"model": "stub", "prompt": prompt, "n": 1, "seed": 3}
                try:
                    found[prompt] = await endpoint.ask("/completions", body, most, read, Usage())
                except (Fault, Refusal) as error:
                    found[prompt] = error

            await client.run_concurrently(prompts, one, asked.concurrency)
            return endpoint.spent

    return found, asyncio.run(main())


@pytest.mark.parametrize("fate", ["429", "500", "hang", "cut", "json", "empty", "503", "408"])
def test_what_goes_wrong_once_is_asked_again(fate: str) -> None:
    def behave(prompt: str, attempt: int) -> str:
        return fate if attempt == 1 else "answer"

    with openai_server(behave=behave) as server:
        found, spent = ask(config(server.url, timeout=1), ["a"])
    assert found == {"a": " word3 and some more of it"}
    assert spent.requests == server.attempts["a"] == 2


def test_what_goes_wrong_is_asked_as_often_as_attempts_says() -> None:
    with openai_server(behave=lambda prompt, attempt: "500" if prompt == "b" else "answer") as server:
        found, spent = ask(config(server.url), ["a", "b"])
    assert isinstance(found["b"], Fault)
    assert (server.attempts["b"], spent.requests) == (4, 5)


def test_nobody_is_asked_before_the_time_that_an_answer_names() -> None:
    with openai_server(behave=lambda prompt, attempt: "429" if attempt == 1 else "answer") as server:
        ask(config(server.url, concurrency=1), ["a", "b"])
    times = [when for when, prompt in server.begun]
    assert [prompt for _, prompt in server.begun] == ["a", "a", "b", "b"]
    assert times[1] - times[0] >= 0.3
    assert times[3] - times[2] >= 0.3


@pytest.mark.parametrize(
    ("fate", "code", "part"),
    [
        ("402", ExitCode.INCOMPLETE, "requires payment"),
        ("400", ExitCode.USER_ERROR, "refuses every request: 400 because of 400"),
        ("500", ExitCode.INCOMPLETE, "has not answered 16 requests in a row: 500"),
        ("json", ExitCode.INCOMPLETE, "in a row: answer is not JSON"),
    ],
)
def test_what_would_befall_all_documents_stops_at_once_in_one_line(fate: str, code: ExitCode, part: str) -> None:
    with openai_server(behave=lambda prompt, attempt: fate) as server, pytest.raises(StopError) as caught:
        ask(config(server.url, attempts=2), [str(i) for i in range(200)])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code
    assert len(server.bodies) <= 60


FILTERED = [
    (403, {"error": {"code": 403, "message": "Input was flagged", "metadata": {"reasons": ["violence"]}}}),
    (403, {"code": "no permission for it", "error": "Content violates usage guidelines. SAFETY_CHECK_TYPE_BIO"}),
    (400, {"error": {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"}}),
    (400, {"error": {"code": "content_filter", "message": "The response was cut"}}),
    (400, {"error": {"code": "invalid_prompt", "message": "Try again with another one"}}),
    (400, {"error": {"message": "Content Exists Risk", "type": "invalid_request_error"}}),
    (400, {"error": {"code": "data_inspection_failed", "message": "Input data is not taken"}}),
    (403, {"error": {"message": "Input was flagged: credentials"}}),
]


@pytest.mark.parametrize(("status", "content"), FILTERED)
def test_a_filter_stops_one_document_and_not_the_run(status: int, content: Any) -> None:
    def respond(body: dict[str, Any]) -> Any:
        return (status, content) if body["prompt"] == "b" else {"choices": [{"text": "x"}]}

    with openai_server(respond=respond) as server:
        found, spent = ask(config(server.url, concurrency=1), ["a", "b", "c"])
    assert isinstance(found["b"], Refusal)
    assert (found["b"].reason, found["a"], found["c"], spent.requests) == (Reason.NO_ANSWER, "x", "x", 3)


@pytest.mark.parametrize(
    "content",
    [
        {"error": {"code": "content_filter", "message": "The response was cut"}},
        {"error": {"message": "Content violates usage guidelines"}, "choices": []},
        {
            "choices": [
                {"error": {"code": 403, "message": "Input was flagged"}, "message": {"content": "content policy"}}
            ]
        },
    ],
)
def test_a_filter_with_status_200_is_asked_once(content: dict[str, Any]) -> None:
    def respond(body: dict[str, Any]) -> Any:
        return content if body["prompt"] == "b" else {"choices": [{"text": "x"}]}

    with openai_server(respond=respond) as server:
        found, spent = ask(config(server.url, concurrency=1), ["a", "b", "c"])
    assert (found["b"].reason, found["a"], found["c"], spent.requests) == (Reason.NO_ANSWER, "x", "x", 3)


@pytest.mark.parametrize("content", [b"<html><h1>Sorry, you have been blocked</h1></html>", error("slow down")])
def test_what_is_forbidden_without_a_cause_fails_one_document(content: Any) -> None:
    def respond(body: dict[str, Any]) -> Any:
        return (403, content) if body["prompt"] == "b" else {"choices": [{"text": "x"}]}

    with openai_server(respond=respond) as server:
        found, spent = ask(config(server.url, concurrency=1), ["a", "b", "c"])
    assert (found["b"].reason, found["a"], found["c"], spent.requests) == (Reason.MODEL_ERROR, "x", "x", 3)


@pytest.mark.parametrize("content", [one for status, one in FILTERED if status == 403])
def test_a_filter_of_the_first_document_stops_no_run(content: Any) -> None:
    with openai_server(respond=lambda body: (403, content)) as server:
        found, _ = ask(config(server.url), ["a"])
    assert found["a"].reason == Reason.NO_ANSWER


@pytest.mark.parametrize(
    ("content", "answers", "part", "code", "requests"),
    [
        ("model is blocked", 0, "forbids requests: 403 model is blocked; the key of SEENSET_API_KEY may", 2, 1),
        ("model is blocked", 2, "forbids requests: 403 model is blocked; the key of SEENSET_API_KEY may", 3, 10),
        ("Your API key was revoked", 2, "does not accept the key of SEENSET_API_KEY: 403 Your API key", 2, 3),
    ],
)
def test_a_run_that_is_forbidden_stops_without_blame_of_the_key(
    content: str, answers: int, part: str, code: int, requests: int
) -> None:
    def respond(body: dict[str, Any]) -> Any:
        return (403, error(content)) if int(body["prompt"]) >= answers else {"choices": [{"text": "x"}]}

    with openai_server(respond=respond) as server, pytest.raises(StopError) as caught:
        ask(config(server.url, concurrency=1), [str(i) for i in range(40)])
    assert part in str(caught.value)
    assert caught.value.exit_code == code
    assert len(server.bodies) == requests


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (error("Unsupported parameter: 'seed'"), "answer is an error: Unsupported parameter: 'seed'"),
        ({"choices": None, "base_resp": {"status_code": 1, "status_msg": "asleep"}}, "answer is an error: asleep"),
        ({"choices": [{"error": {"code": 502, "message": "cut off"}}]}, "answer is an error: cut off"),
        ({"error": None, "choices": []}, "answer has no choices"),
    ],
)
def test_an_error_with_status_200_is_quoted(content: Any, words: str) -> None:
    async def main(url: str) -> None:
        async with Endpoint(config(url, attempts=2)) as endpoint:
            await endpoint.ask("/completions", {"prompt": "a"}, 10, choices_of, spent)

    def choices_of(value: dict[str, Any]) -> None:
        if not value.get("choices") or "error" in value["choices"][0]:
            raise Fault("answer has no choices")

    spent = Usage()
    with openai_server(respond=lambda body: content) as server, pytest.raises(Fault, match=words):
        asyncio.run(main(server.url))
    assert spent == Usage(2, 20 if words.endswith("choices") else 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"error": {"message": "too hot", "code": "bad_value", "param": "n"}}, "bad_value: too hot ('n')"),
        ({"error": {"message": "'n' is 3", "code": 400, "param": "n"}}, "'n' is 3"),
        (
            {"error": "Bad Request", "message": "parameter 'seed' is not allowed"},
            "Bad Request: parameter 'seed' is not",
        ),
        ({"error": True, "message": "no"}, "no"),
        ({"error": None, "message": "no"}, "no"),
        ({"error": None}, '{"error": null}'),
        ({"detail": [{"loc": ["body", "n"]}]}, '[{"loc": ["body", "n"]}]'),
        (
            {
                "error": {
                    "message": "Provider returned error",
                    "code": 400,
                    "metadata": {"raw": '{"error": {"message": "Unknown parameter: top_k"}}', "provider_name": "x"},
                }
            },
            "Provider returned error: Unknown parameter: top_k",
        ),
        (
            {"error": {"message": "Provider returned error", "metadata": {"raw": "no top_k"}}},
            "Provider returned error: no",
        ),
    ],
)
def test_the_words_of_an_error_are_found_wherever_they_stand(value: Any, words: str) -> None:
    assert error_words(value).startswith(words)


@pytest.mark.parametrize("choose", [lambda n: {"requests": n}, lambda n: {"tokens": 7 * n}])
def test_the_budget_stops_before_it_is_exceeded(choose: Callable[[int], dict[str, int]]) -> None:
    spent = Usage()
    with openai_server() as server:  # an answer takes 1 token of prompt and 6 of continuation
        asked = config(server.url, budget=choose(20))
        with pytest.raises(StopError, match=r"model\.budget\..* answers are kept") as caught:
            ask(asked, [str(i) for i in range(50)], 10, spent)
        assert caught.value.exit_code == ExitCode.INCOMPLETE
        assert 19 <= spent.requests == len(server.bodies) <= 20
        assert spent.tokens == 7 * spent.requests
        with pytest.raises(StopError, match=r"is spent|may cost"):
            ask(asked, ["more"], 10, spent)
        assert len(server.bodies) <= 20


def test_limits_on_requests_at_a_time_and_a_minute_are_kept() -> None:
    with openai_server(seconds=0.05) as server:
        ask(config(server.url, concurrency=3), [str(i) for i in range(12)])
        assert server.busiest == 3
    with openai_server() as server:
        ask(config(server.url, requests_per_minute=600), [str(i) for i in range(11)])
        times = [when for when, _ in server.begun]
        assert times[-1] - times[0] >= 0.6, "1 s, less what the first one took to arrive"


def test_a_date_or_nonsense_in_retry_after_is_understood() -> None:
    assert client.retry_after(None) == client.retry_after("soon") == client.retry_after("-3") == 0
    assert client.retry_after("2.5") == 2.5
    assert 8 < client.retry_after(email.utils.formatdate(time.time() + 10, usegmt=True)) <= 10


def test_the_list_of_models_is_asked_with_a_key_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    with openai_server(models=["stab", "other"], key=KEY) as server:
        assert check_endpoint(config(server.url, name="other"))["architecture"] == "endpoint"
        assert client.headers(config(server.url, key_variable="NOT_SET_ANYWHERE")) == {}
        monkeypatch.setenv("SEENSET_API_KEY", "sk-two\nlines")
        with pytest.raises(UserError, match="a line break") as shown:
            check_endpoint(config(server.url))
        assert "sk-two" not in str(shown.value)
    monkeypatch.delenv("SEENSET_API_KEY")
    with openai_server(models=None) as server:
        assert check_endpoint(config(server.url))  # a server without a list is taken at its word


def test_a_model_whose_name_has_the_value_of_a_header_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGION", "eu-west-1")
    with openai_server(models=["mistral-eu-west-1"]) as server:
        asked = config(server.url, headers={"X-Region": "REGION"}, name="mistral-eu-west-1")
        assert check_endpoint(asked)["architecture"] == "endpoint"
        with pytest.raises(UserError, match=r"has no model 'mistral-eu-west-2'; .*mistral-\*\*\*"):
            check_endpoint(asked.model_copy(update={"name": "mistral-eu-west-2"}))


AZURE = {
    "headers": {"api-key": "AZURE_KEY", "X-Project": "PROJECT"},
    "query": {"api-version": datetime.date(2024, 10, 21), "page": 2},
    "extra": {"reasoning_effort": "minimal", "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}},
    "key_variable": "NOT_SET_ANYWHERE",
}


def test_headers_query_and_extra_are_sent_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_KEY", KEY)
    monkeypatch.setenv("PROJECT", "harbour")
    with openai_server(models=["stub"]) as server:
        asked = config(server.url, **AZURE)
        check_endpoint(asked)
        ask(asked, ["a"])
    assert server.paths == {f"/v1/{name}?api-version=2024-10-21&page=2" for name in ("models", "completions")}
    assert [(sent["api-key"], sent["x-project"]) for sent in server.headers] == [(KEY, "harbour")] * 2
    assert server.keys == {None}
    assert server.bodies == [{"model": "stub", "prompt": "a", "n": 1, "seed": 3, **asked.extra}]
    assert hash(asked) == hash(config(server.url, **AZURE))
    monkeypatch.delenv("PROJECT")
    with pytest.raises(UserError, match="environment variable PROJECT is not set: the value of header X-Project comes"):
        check_endpoint(asked)


def test_values_of_headers_alone_are_not_in_the_fingerprint() -> None:
    url = "http://127.0.0.1:9/v1"
    plain = fingerprint_model(config(url))
    others = [
        config(url, headers={"api-key": "AZURE_KEY"}),
        config(url, query={"api-version": "1"}),
        config(url, query={"api-version": "2"}),
        config(url, extra={"min_p": 0.1}),
        config(url, extra={"min_p": 0.2}),
    ]
    assert len({one["model"] for one in (plain, *map(fingerprint_model, others))}) == 6
    again = config(url, headers={"api-key": "OTHER_KEY"})
    assert fingerprint_model(again) == fingerprint_model(others[0])
    assert plain["model"] == f"stub at {url}, completions"


def test_keys_of_an_endpoint_without_a_value_are_empty() -> None:
    asked = config("http://127.0.0.1:9/v1", headers=None, query=None, extra=None)
    assert (asked.headers, asked.query, asked.extra) == ({}, {}, {})


def test_names_of_a_query_that_hold_no_secret_are_taken() -> None:
    names = (
        "api-version",
        "author",
        "country_code",
        "max_tokens",
        "keyword",
        "region",
        "tokenizer",
        "turkey",
        "n_tokens",
    )
    assert config("http://127.0.0.1:9/v1", query=dict.fromkeys(names, "1")).query.keys() == {*names}
    extra = {"prompt_cache_key": "harbour-run-2", "metadata": {"trial": HEXADECIMAL}, "api_key": None, "keys": [3]}
    assert config("http://127.0.0.1:9/v1", extra=extra).extra == extra
    assert config("http://127.0.0.1:9/v1", key_variable="my_key_2", headers={"X": "TEAM_2024_KEY"})


HEXADECIMAL = "ABCDEF0123456789ABCDEF0123456789"
SECRET_NAMES = (
    *("api_key", "x-api-key", "auth", "X-Goog-Api-Key", "apikey", "accessToken", "client_secret", "X-Amz-Signature"),
    *("password", "sig", "code", "subscription-key", "authToken", "apiKeys", "accesstoken", "secrets", "jwt", "sas"),
    *("bearer", "session", "access_tokens", "X-API-KEY1", "password2", "privatekey", "userToken2", "APIKey"),
)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            {"headers": {"api-key": "sk-sesame"}},
            "header api-key must have the name of an environment variable in capitals",
        ),
        (
            {"headers": {"Authorization": "KEY"}},
            "header Authorization is set with every request: the key of key_variable",
        ),
        ({"headers": {"Content-Type": "KEY"}}, "header Content-Type is set with every request"),
        ({"headers": {"a b": "KEY"}}, "'a b' is no name of a header"),
        ({"headers": {"api-key": HEXADECIMAL}}, "header api-key must have the name of an environment variable"),
        ({"headers": {"Api-Key": "A", "api-key": "B"}}, "has header Api-Key twice: capitals make no difference"),
        *(
            ({"headers": {name: "KEY"}}, f"header {name} is set with every request")
            for name in ("Transfer-Encoding", "Content-Length", "Host", "Accept")
        ),
        *(
            ({"key_variable": key}, "must be the name of an environment variable, such as OPENAI_API_KEY")
            for key in ("sk-sesame", HEXADECIMAL)
        ),
        *(
            ({"query": {name: "sk-sesame"}}, f"may not have {name}: keys come from the environment alone")
            for name in SECRET_NAMES
        ),
        ({"extra": {"temperature": 0.3}}, "may not have temperature, which requests set themselves"),
        ({"extra": {"stream": True}}, "may not have stream"),
        (
            {"extra": {"api_key": f"sk-sesame-{HEXADECIMAL}"}},
            "may not have a key in api_key: extra is written to files",
        ),
        ({"extra": {"proxies": [{"auth": {"value": f"Bearer {HEXADECIMAL}"}}]}}, "may not have a key in value"),
        ({"extra": {"tokens": {"access_tokens": ["x", HEXADECIMAL]}}}, "may not have a key in access_tokens"),
        ({"extra_body": {"min_p": 0.3}}, "did you mean 'extra'?"),
        ({"api_version": "1"}, "did you mean 'query'?"),
    ],
)
def test_what_requests_may_not_have_is_refused_by_name(given: dict[str, Any], part: str) -> None:
    model = {"endpoint": "http://127.0.0.1:9/v1", "name": "stub", **given}
    described = {"run": "run", "model": model, "corpus": {"audit": {"path": "a"}}, "detectors": ["samia"]}
    with pytest.raises(UserError) as caught:
        build_config(described)
    assert part in str(caught.value)
    assert "sk-sesame" not in str(caught.value)
    assert HEXADECIMAL not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wanted",
    [{"max_tokens": 1, "prompt_logprobs": 0}, {"max_tokens": 0, "echo": True, "logprobs": 1, "stop": [*STOPS]}],
)
def test_log_probabilities_are_requested_of_the_tokens_of_the_prompt_alone(wanted: dict[str, Any]) -> None:
    way: Way = "echo" if "echo" in wanted else "prompt_logprobs"
    prompt = "one two three four"

    async def main(url: str, **budget: int) -> PromptAnswer:
        async with Endpoint(config(url, budget=budget), None) as endpoint:
            return await ask_prompt(endpoint, PromptRequest(prompt, way), lambda answer: answer, Usage())

    with openai_server(log_probs=lambda text: [-0.5, -2.0], way=way) as server:
        assert asyncio.run(main(server.url)).values == (None, -0.5, -2.0)
        assert server.bodies[-1] == {"model": "stub", "prompt": prompt, "temperature": 0, **wanted}
        with pytest.raises(StopError, match=f"has 9 left, and the next request may cost {18 + 64 + 1};"):
            asyncio.run(main(server.url, tokens=9))
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (Refusal, "in the answer", {"continue_text": lambda prompt, seed: f"{prompt} and no log-probabilities"})
    ]
    for answer in ('{"choices": []}', '{"choices": {}}', '{"choices": ["x"]}', "{}"):
        refused.append((Fault, "answer has no choices", {"behave": lambda *_, answer=answer: answer}))
    for kind, message, behaviour in refused:
        with openai_server(**behaviour) as server, pytest.raises(kind, match=message):
            asyncio.run(main(server.url))


@pytest.mark.parametrize(("api", "prompt", "others"), [("completions", 300, ["loss"]), ("chat", 340, [])])
def test_what_is_asked_about_a_document_is_counted_before(api: str, prompt: int, others: list[Any]) -> None:
    model = config("http://127.0.0.1:9/v1", api=api, instruction=40 * "i", choices=3)
    detectors = [*others, {"samia": {"draws": 7, "prefix_ratio": 0.3}}]
    described = {"run": "run", "model": model.model_dump(), "corpus": {"audit": {"path": "a"}}, "detectors": detectors}
    drawn = Questions(model, 3, 3.0 * prompt, 7 * (16 + 700 // 3))  # three requests with the prefix
    size = DocumentSize(1000.0)
    assert request_sizes(build_config(described), size) == [*(Questions(model, 1, 1000.0, 1) for _ in others), drawn]
