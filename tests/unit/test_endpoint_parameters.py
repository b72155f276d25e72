"""What an endpoint refuses of the parameters of a request is found by a few requests, however it words a refusal."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Endpoint, Refusal, Usage
from pipeline.endpoint.parameters import (
    MOST_PROBES,
    PROBE_TEXT,
    PROBE_TOKENS,
    Adjustments,
    SampleRequest,
    check_still_taken,
    find_adjustments,
    named_parameter,
)
from pipeline.errors import ExitCode, StopError
from pipeline.plan.description import build_config
from pipeline.stages.base import StagePlan
from pipeline.stages.registry import STAGES, plan_stages
from tests.helpers import openai_server as server_module
from tests.helpers.openai_server import Said, openai_server

ALL: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "n": 3, "seed": 7, "top_k": 50}
BODY = {"model": "stub", "messages": [{"role": "user", "content": f"Go on.\n\n{PROBE_TEXT}"}], **ALL}
REQUEST = SampleRequest("/chat/completions", BODY)
Refuse = Callable[[dict[str, Any]], Any]


def config(url: str, **settings: Any) -> EndpointConfig:
    quick = {"backoff": 0.01, "timeout": 60, "attempts": 2}
    return EndpointConfig.model_validate({"endpoint": url, "name": "stub", "api": "chat", **quick, **settings})


def test_the_server_of_the_tests_knows_the_text_of_these_requests() -> None:
    assert server_module.PROBE_TEXT == PROBE_TEXT


def found(refuse: Refuse, request: SampleRequest = REQUEST, **settings: Any) -> tuple[dict[str, Any], Said, Usage]:
    """What is changed, what the server got, and what was spent."""
    spent = Usage()

    async def main(url: str) -> Adjustments:
        async with Endpoint(config(url, **settings)) as endpoint:
            return await find_adjustments(endpoint, request, spent)

    with openai_server(refuse=refuse) as server:
        return asyncio.run(main(server.url)).fingerprint(), server, spent


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", **more}}


def reasoning(body: dict[str, Any]) -> Any:
    """As models of OpenAI answer that reason: one parameter an answer."""
    if "max_tokens" in body:
        told = (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
        return error(told, param="max_tokens", code="unsupported_parameter")
    if body.get("temperature", 1) != 1:
        told = (
            "Unsupported value: 'temperature' does not support 0.7 with this model. Only the default (1) is supported."
        )
        return error(told, param="temperature", code="unsupported_value")
    if "top_k" in body:
        return error("Unrecognized request argument supplied: top_k")
    return error("Could not finish the message because max_tokens or model output limit was reached.")


def strict(*refused: str) -> Refuse:
    """As servers with strict models of their requests: all unknown fields in one answer, or the first 200 letters."""

    def refuse(body: dict[str, Any]) -> Any:
        entries = [
            {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted", "input": 1}
            for name in refused
            if name in body
        ]
        return {"object": "error", "message": {"detail": entries}} if entries else None

    return refuse


def unknown_names(body: dict[str, Any]) -> Any:
    """As Gemini answers: a list around the error, and a line for each name."""
    lines = [f'Unknown name "{name}": Cannot find field.' for name in ("seed", "top_k") if name in body]
    return [{"error": {"code": 400, "message": f"Invalid JSON payload. {' '.join(lines)}"}}] if lines else None


def either(body: dict[str, Any]) -> Any:
    if "temperature" in body and "top_p" in body:
        return error("`temperature` and `top_p` cannot both be specified for this model. Please use only one.")
    return None


def only_one(body: dict[str, Any]) -> Any:
    return error("'n' : number must be at most 1") if body.get("n", 1) > 1 else None


def speechless(*refused: str) -> Refuse:
    """A server that does not say what it does not take."""
    return lambda body: error("Bad Request") if {*refused} & body.keys() else None


def supporting(body: dict[str, Any]) -> Any:
    """A message that names what is taken before what is not."""
    if "top_k" not in body:
        return None
    return error("request 17: supported are temperature, top_p, n, seed and max_tokens, and not top_k")


LENGTH = {"max_tokens": "max_completion_tokens"}


@pytest.mark.parametrize(
    ("refuse", "expected", "requests"),
    [
        (lambda body: None, {}, 1),
        (reasoning, {**LENGTH, "top_k": None}, 3),
        (strict("n", "seed", "top_k"), {"n": None, "seed": None, "top_k": None}, 4),
        (unknown_names, {"seed": None, "top_k": None}, 3),
        (either, {"top_p": None}, 2),
        (only_one, {"n": None}, 2),
        (supporting, {"top_k": None}, 6),
        (speechless("top_k"), {"top_k": None}, 7),
        (speechless("n", "seed"), {"n": None, "seed": None}, 7),
        (speechless("max_tokens"), LENGTH, 8),
        (
            speechless("max_tokens", "max_completion_tokens", "temperature"),
            {"max_tokens": None, "temperature": None},
            9,
        ),
        (lambda body: error("The prompt was filtered."), {}, 4),
        (strict(*ALL), {name: None for name in ALL if name != "max_tokens"} | LENGTH, 7),
        (strict(*ALL, "max_completion_tokens"), dict.fromkeys(ALL), 8),
    ],
)
def test_refused_parameters_are_found(refuse: Refuse, expected: dict[str, Any], requests: int) -> None:
    changes, server, spent = found(refuse)
    assert changes == expected
    assert len(server.probes) == spent.requests == requests <= MOST_PROBES
    assert list(changes) == sorted(changes, key=["top_p", "top_k", "seed", "n", "temperature", "max_tokens"].index)
    adjusted = Adjustments.of(changes).adjust(BODY)
    assert adjusted.keys() == {expected.get(name, name) for name in BODY} - {None}
    assert [sentence.split()[0] for sentence in Adjustments.of(changes).sentences()] == list(changes)


def limited(words: str, most: int) -> Refuse:
    """A server that takes a few draws, and states how many."""
    return lambda body: error(words.replace("N", str(body["n"]))) if body.get("n", 1) > most else None


@pytest.mark.parametrize(
    ("words", "most", "expected", "requests"),
    [
        ("Invalid 'n': integer above maximum value. Expected a value <= 8, but got N instead.", 8, 8, 2),
        ("n must be between 1 and 4", 4, 4, 2),
        ("'n' : number must be at most 5", 5, 5, 2),
        ("n must be at most 8", 2, None, 3),
        ("'n' : number must be at most 1", 1, None, 2),
        ("'n' is N, and at most 32", 4, None, 2),
        ("Invalid 'n'", 4, None, 2),
    ],
)
def test_draws_are_limited_as_the_refusal_says(words: str, most: int, expected: int | None, requests: int) -> None:
    body = {**BODY, "n": 16}
    changes, server, _ = found(limited(words, most), SampleRequest("/chat/completions", body))
    assert changes == {"n": expected}
    assert len(server.probes) == requests
    adjusted = Adjustments.of(changes)
    assert adjusted.adjust(body).get("n") == expected
    assert adjusted.adjust({**body, "n": 2}).get("n") == (expected and 2)
    assert (adjusted.most_draws(16), adjusted.most_draws(3)) == ((expected or 1), min(3, expected or 1))
    stated = "n is refused and left out" if expected is None else f"n is refused above {expected}: more draws are"
    assert adjusted.sentences()[0].startswith(stated)


@pytest.mark.parametrize(
    ("extra", "tokens"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ({"reasoning": {"max_tokens": 2000}}, 2000),
        ({"google": {"thinking_config": {"thinking_budget": 512}}}, 512),
        ({"thinking_budget": -1, "reasoning_effort": "low", "min_p": 3, "budget_tokens": True}, 0),
    ],
)
def test_a_budget_of_reasoning_is_added_to_the_length_of_a_draw(extra: dict[str, Any], tokens: int) -> None:
    def refuse(body: dict[str, Any]) -> Any:
        words = "`max_tokens` must be greater than `thinking.budget_tokens`."
        return error(words) if body.get("max_tokens", 0) <= tokens else None

    model = config("http://127.0.0.1:9/v1", extra=extra)
    assert model.reasoning_tokens == tokens
    described = {"run": "run", "corpus": {"audit": {"path": "a"}}, "detectors": [{"samia": {"draws": 3}}]}
    stage = plan_stages(StagePlan(build_config({**described, "model": model.model_dump()})))[0]
    request = next(kind.request for kind in STAGES if kind.request is not None and kind.contains(stage))(stage)
    assert request.body["max_tokens"] == PROBE_TOKENS + tokens
    assert request.max_cost > 3 * (PROBE_TOKENS + tokens)
    changes, server, _ = found(refuse, request, extra=extra)
    assert (changes, len(server.probes)) == ({}, 1)


def test_a_largest_number_of_draws_is_kept_while_other_parameters_are_found() -> None:
    def refuse(body: dict[str, Any]) -> Any:
        if body.get("n", 1) > 8:
            return error("n must be <= 8")
        return error("Bad Request") if "top_k" in body else None

    changes, *_ = found(refuse, SampleRequest("/chat/completions", {**BODY, "n": 16}))
    assert changes == {"top_k": None, "n": 8}


@pytest.mark.parametrize("draws", [1, 2, 30])
def test_as_many_draws_are_tried_as_a_later_run_may_ask_for_at_once(draws: int) -> None:
    model = config("http://127.0.0.1:9/v1", choices=8).model_dump()
    described = {"run": "run", "corpus": {"audit": {"path": "a"}}, "detectors": [{"samia": {"draws": draws}}]}
    stage = plan_stages(StagePlan(build_config({**described, "model": model})))[0]
    request = next(kind.request for kind in STAGES if kind.request is not None and kind.contains(stage))(stage)
    assert request.body["n"] == 8


def test_a_temperature_that_is_not_taken_is_named_with_its_effect() -> None:
    body = {**BODY, "temperature": 0.7}
    changes, *_ = found(reasoning, SampleRequest("/chat/completions", body))
    assert changes == {**LENGTH, "temperature": None, "top_k": None}
    text = " ".join(Adjustments.of(changes).sentences())
    assert "max_tokens is sent as max_completion_tokens" in text
    assert "default temperature applies, which changes what the scores measure, and not the error rate" in text


def test_a_search_without_an_end_stops_in_one_line() -> None:
    """The message names all that the server takes, and not what it refuses."""
    told = "parameters are temperature, top_p, top_k, seed and max_completion_tokens"
    with pytest.raises(StopError, match=f"in {MOST_PROBES} trials, at last with: 400 {told}; detectors with") as caught:
        found(lambda body: error(told) if {"n", "max_tokens"} & body.keys() else None)
    assert "\n" not in str(caught.value)


def test_the_search_is_paid_from_the_budget() -> None:
    with pytest.raises(StopError, match=r"model\.budget\.requests of 2 is spent") as caught:
        found(reasoning, budget={"requests": 2})
    assert caught.value.exit_code == ExitCode.INCOMPLETE
    *_, spent = found(strict("seed"))
    assert spent == Usage(2, 20 + 3 * 2), "a refusal costs nothing, and the answer what it states"


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_that_does_not_answer_is_no_server_that_refuses(status: int) -> None:
    with pytest.raises(StopError, match=f"does not answer: {status} down") as caught:
        found(lambda body: (status, error("down")))
    assert caught.value.exit_code == ExitCode.INCOMPLETE


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_that_fails_on_a_parameter_is_asked_without_it(status: int) -> None:
    changes, server, _ = found(lambda body: (status, error("list index out of range")) if "top_k" in body else None)
    assert changes == {"top_k": None}
    assert len(server.probes) == 9, "two requests with top_k are made twice"


@pytest.mark.parametrize(
    "told",
    [
        lambda name: error(f"Unsupported parameter: '{name}'"),
        lambda name: {"choices": None, "base_resp": {"status_code": 2013, "status_msg": f"invalid params, {name}"}},
        lambda name: {"error": f"{name}: not permitted", "choices": []},
    ],
)
def test_a_parameter_that_is_refused_with_status_200_is_left_out(told: Callable[[str], Any]) -> None:
    changes, server, spent = found(lambda body: (200, told("seed")) if "seed" in body else None)
    assert changes == {"seed": None}
    assert len(server.probes) == 2
    assert spent == Usage(2, 20 + 3 * 2), "an error costs nothing"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            error("the engine is asleep", code="engine_off"),
            "does not answer: answer is an error: engine_off: the engine",
        ),
        ({"object": "list"}, "does not answer: answer has no choices"),
        ({"choices": []}, "does not answer: answer has no choices"),
    ],
)
def test_an_answer_without_choices_takes_no_parameters(told: dict[str, Any], words: str) -> None:
    with pytest.raises(StopError, match=words) as caught:
        found(lambda body: (200, told), attempts=1)
    assert caught.value.exit_code == ExitCode.INCOMPLETE


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("400 '[{'type': 'extra_forbidden', 'loc': ('body', 'n')", "n"),
        ('422 [{"type": "extra_forbidden", "loc": ["body", "n"]', "n"),
        ("400 n must be 1", "n"),
        ("400 Unknown parameter n", "n"),
        ("400 Unrecognized request argument supplied: n", "n"),
        ("400 Argument not supported on this model: n", "n"),
        ("400 extraneous key [n] is not permitted", "n"),
        ("400 n value of 8 exceeds the limit", "n"),
        ("400 body.n: not permitted", "n"),
        ("400 n is not supported", "n"),
        ("400 the number n is 3 in a field of n-grams", None),
        ("400 Temperature must be at most 1", "temperature"),
        ("400 body.temperature: not permitted", "temperature"),
        ("400 generation_config.top_p is unknown", "top_p"),
        ("400 thinking.temperature is unknown", None),
        ("400 n > 1 is not supported", "n"),
        ("400 Unknown parameter: 'top_k'.", "top_k"),
        ("400 property 'seed' is unsupported", "seed"),
        ("400 n-grams of a text, and its seeds, are in a rather tempered state", None),
        ("400 max_completion_tokens: Extra inputs are not permitted", "max_tokens"),
        ("400 model not loaded", None),
    ],
)
def test_a_parameter_is_found_in_a_message(message: str, expected: str | None) -> None:
    assert named_parameter(message, ["top_p", "top_k", "seed", "n", "temperature", "max_tokens"]) == expected


@pytest.mark.parametrize(
    ("message", "probes", "stopped"),
    [
        ("400 Unknown parameter: 'seed'.", 1, True),
        ("400 'max_tokens' is too large: 512. The maximum context length is 1024 tokens", 0, False),
        ("400 filtered", 0, False),
    ],
)
def test_a_parameter_that_is_refused_later_stops_the_run_and_a_document_does_not(
    message: str, probes: int, stopped: bool
) -> None:
    refused, refusal = False, Refusal(message, words=message)

    async def main(url: str) -> None:
        async with Endpoint(config(url)) as endpoint:
            await check_still_taken(endpoint, REQUEST, Adjustments(), refusal, (Usage(), lambda most: None))

    with openai_server(refuse=lambda body: error("Unknown parameter: 'seed'.") if refused else None) as server:
        asyncio.run(main(server.url))  # the message quotes a document
        assert len(server.probes) == probes
        refused = True
        if not stopped:
            return asyncio.run(main(server.url))
        with pytest.raises(
            StopError, match="refuses seed, which it took at the start of the run: 400 Unknown"
        ) as caught:
            asyncio.run(main(server.url))
    assert caught.value.exit_code == ExitCode.INCOMPLETE


@pytest.mark.parametrize("end", ["cannot be specified together", "are mutually exclusive", "cannot both be specified"])
def test_of_two_parameters_that_exclude_each_other_the_temperature_stays(end: str) -> None:
    assert named_parameter(f"`temperature` and `top_p` {end}", ["top_p", "temperature"]) == "top_p"
