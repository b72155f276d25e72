"""This machine is asked without a proxy, other hosts as the environment states, and errors name the variable."""

import asyncio
from typing import Any

import pytest

from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Endpoint, Fault, Usage, check_endpoint
from pipeline.endpoint.transport import is_loopback
from pipeline.errors import StopError, UserError
from tests.helpers.openai_server import openai_server

DEAD = "http://127.0.0.1:9"
FAR = "http://models.example/v1"
VARIABLES = [spelled for one in ("http", "https", "all", "no") for spelled in (f"{one}_proxy", f"{one}_PROXY".upper())]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def config(url: str, **settings: Any) -> EndpointConfig:
    return EndpointConfig.model_validate({"endpoint": url, "name": "stub", "attempts": 1, "timeout": 30, **settings})


def ask(asked: EndpointConfig) -> str:
    async def main() -> str:
        async with Endpoint(asked) as endpoint:
            body = {"model": "stub", "prompt": "a", "seed": 3}
            return await endpoint.ask("/completions", body, 9, lambda value: value["choices"][0]["text"], Usage())

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_this_machine_is_asked_without_the_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, DEAD)
    with openai_server(models=["stub"]) as server:
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            assert check_endpoint(config(url))
            assert ask(config(url)) == " word3 and some more of it"


def test_other_hosts_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with openai_server(models=["stub"]) as proxy:  # it receives whole URLs
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        assert check_endpoint(config(FAR))
        assert ask(config(FAR)) == " word3 and some more of it"
    assert proxy.paths == {f"{FAR}/models", f"{FAR}/completions"}


@pytest.mark.parametrize(
    ("name", "url"), [("HTTP_PROXY", FAR), ("https_proxy", FAR.replace("http", "https")), ("ALL_PROXY", FAR)]
)
def test_an_error_of_a_proxy_names_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, url: str) -> None:
    monkeypatch.setenv(name, DEAD)
    clause = rf"\(through the proxy of {name}; NO_PROXY excepts hosts\)"
    with pytest.raises(UserError, match=f"does not answer: .*{clause}"):
        check_endpoint(config(url))
    with pytest.raises(Fault, match=f"no connection: .*{clause}"):
        ask(config(url))
    monkeypatch.setenv("NO_PROXY", "models.example")
    with pytest.raises(UserError) as caught:
        check_endpoint(config(url, timeout=5))
    assert "proxy" not in str(caught.value)


@pytest.mark.parametrize(("status", "kind"), [("403", StopError), ("502", Fault)])
def test_an_answer_of_a_proxy_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, status: str, kind: type[Exception]
) -> None:
    with openai_server(behave=lambda prompt, attempt: status) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        with pytest.raises(kind, match=f"{status} because of {status}.*through the proxy of HTTP_PROXY"):
            ask(config(FAR))


def test_a_proxy_that_cannot_be_used_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the proxy of ALL_PROXY cannot be used: .*gopher") as caught:
        check_endpoint(config(FAR))
    assert "\n" not in str(caught.value)
    with openai_server(models=["stub"]) as server:
        assert check_endpoint(config(server.url)), "it is not looked at for this machine"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("[::1]", True),
        ("128.0.0.1", False),
        ("localhost.example.com", False),
        ("[::2]", False),
    ],
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(f"http://{host}:8000/v1") is expected
