"""An endpoint that answers without end, or ever so slowly, costs its document and neither memory nor hours."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import zstandard
from bounded_memory import run_within

from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Endpoint, Fault, Refusal, Usage, check_endpoint
from pipeline.endpoint.transport import MOST_BYTES, longest_answer
from pipeline.errors import UserError


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server whose every answer a function writes; its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                answer(self)
            except OSError:  # the client has gone
                self.close_connection = True

        do_GET = do_POST = reply

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    http.shutdown()
    http.server_close()


def config(url: str, **settings: Any) -> EndpointConfig:
    quick = {"backoff": 0.01, "timeout": 60, "attempts": 1, "concurrency": 2}
    return EndpointConfig.model_validate({"endpoint": url, "name": "stub", **quick, **settings})


def ask(settings: EndpointConfig, most: int = 10) -> Any:
    async def main() -> Any:
        async with Endpoint(settings) as endpoint:
            return await endpoint.ask("/completions", {"prompt": "x"}, most, lambda value: value, Usage())

    return asyncio.run(main())


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(4096):
        handler.wfile.write(b"x" * 2**20)


def test_an_answer_of_4_gigabytes_is_not_read_on() -> None:
    with server(endless) as url:
        began = time.monotonic()
        with pytest.raises(Fault, match="answer is longer than 1,089,536 bytes"):
            ask(config(url))
        with pytest.raises(UserError, match=f"does not answer: answer is longer than {MOST_BYTES:,} bytes"):
            check_endpoint(config(url))
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_endless_answers_take_a_bounded_part_of_the_memory() -> None:
    imports = """
    import asyncio
    from pipeline.config.models import EndpointConfig
    from pipeline.endpoint.client import Endpoint, Fault, Usage
    """
    with server(endless) as url:
        code = f"""
        async def main():
            settings = EndpointConfig(endpoint={url!r}, name="stub", attempts=2, backoff=0.01)
            async with Endpoint(settings) as endpoint:
                try:
                    await endpoint.ask("/completions", {{}}, 10**6, lambda value: value, Usage())
                except Fault as fault:
                    print(fault)

        asyncio.run(main())
        """
        assert run_within(500, imports, code) == "answer is longer than 67,108,864 bytes"


def dribble(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def dribble_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(200):
        handler.wfile.write(b"A: b\r\n")
        time.sleep(0.1)


@pytest.mark.parametrize("slow", [dribble, dribble_headers])
def test_a_byte_now_and_then_does_not_hold_the_time_limit(slow: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with server(slow) as url:
        began = time.monotonic()
        with pytest.raises(Fault, match=r"no answer within 0.5 s"):
            ask(config(url, timeout=0.5))
        with pytest.raises(UserError, match=r"does not answer: no answer within 0.5 s"):
            check_endpoint(config(url, timeout=0.5))
        assert time.monotonic() - began < 5


def packed(data: bytes, packing: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", packing)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def test_a_packed_answer_is_unpacked_up_to_its_bound_and_must_be_json() -> None:
    value = {"choices": [{"text": "é" * 1000}]}
    with server(packed(gzip.compress(json.dumps(value).encode()), "gzip")) as url:
        assert ask(config(url)) == value
    for data, packing, message in (
        (gzip.compress(b" " * 200_000_000, 1), "gzip", "answer is longer than 1,089,536 bytes"),
        (zstandard.compress(b"{}"), "zstd", "answer is packed as 'zstd'; gzip, deflate were offered"),
        (b"{}", "gzip", "answer is not the gzip that it says"),
        (b"[" * 200_000, "identity", "answer is not JSON"),
    ):
        with server(packed(data, packing)) as url, pytest.raises(Fault, match=message):
            ask(config(url))


def test_log_probs_of_the_longest_prompt_fit_an_answer() -> None:
    """A token with 20 alternatives, as the chat interface writes them, and one with 5, as the other one does."""
    alternative = {"token": "\\u00e9" * 4, "logprob": -12.345678901234567, "bytes": [195, 169] * 4}
    chat = {**alternative, "top_logprobs": [alternative] * 20}
    assert len(json.dumps(chat)) < longest_answer(1_000) - longest_answer(999)
    assert longest_answer(10**9) == MOST_BYTES


def plain(body: bytes, status: str = "200 OK", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer as it stands, with headers that http.server would not write."""
    lines = {"Content-Length": str(len(body)), "Connection": "close", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body)

    return answer


DIGITS = "9" * 400
TEXT = b'{"choices": [{"text": "x"}]}'


@pytest.mark.parametrize(
    "count", [DIGITS, "1e999", "Infinity", "NaN", "-5", "true", '"7"', "2147483648", "1.5", "null", "[]"]
)
def test_a_number_of_tokens_that_is_none_costs_the_most_that_a_request_can(count: str) -> None:
    spent = Usage()

    async def main(url: str) -> Any:
        async with Endpoint(config(url)) as endpoint:
            return await endpoint.ask("/completions", {}, 10, lambda value: value["choices"], spent)

    usage = f', "usage": {{"prompt_tokens": {count}, "completion_tokens": 1}}}}'.encode()
    with server(plain(TEXT[:-1] + usage)) as url:
        assert asyncio.run(main(url)) == [{"text": "x"}]
    assert spent == Usage(1, 10)


@pytest.mark.parametrize(
    "value",
    [
        DIGITS,
        "9" * 5000,
        "inf",
        "nan",
        "1e999",
        "-1e308",
        "Wed, 21 Oct 2015 07:28:00 GMT",
        "Wed, 21 Oct 2015 07:28:00 -99999999999999999999",
        "Wed, 21 Oct 2015 07:28:00 +9999999999",
        f"Wed, {DIGITS} Oct 2015 07:28:00 GMT",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Fri, 31 Dec 10000 23:59:59 GMT",
    ],
)
def test_a_retry_after_that_names_no_time_to_come_is_none(value: str) -> None:
    with server(plain(b'{"error": "slow"}', "429 Slow", Retry_After=value)) as url:
        began = time.monotonic()
        with pytest.raises(Fault, match=r"^429 slow$"):
            ask(config(url, attempts=2))
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (plain(TEXT, Content_Length=DIGITS), "connection broken: bad Content-Length"),
        (plain(TEXT, Content_Length="-5"), "connection broken: bad Content-Length"),
        (plain(TEXT, f"{DIGITS} OK"), "connection broken: illegal status line"),
        (plain(b"f" * 400 + b"\r\n{}", Content_Length="2", Transfer_Encoding="chunked"), "connection broken: "),
        (plain(b'{"usage": ' + b"9" * 5000 + b"}"), "answer is not JSON"),
        (plain(b'{"a": ' + b"[" * 960 + b"]" * 960 + b', "choices": []}'), "answer is not JSON"),
        (plain(b'{"a": ' + b'{"b":' * 960 + b"1" + b"}" * 960 + b"}"), "answer is not JSON"),
        (plain(b"1e999"), "answer is no JSON object"),
    ],
    ids=["length", "negative length", "status", "chunk", "5,000 digits", "lists", "mappings", "a number"],
)
def test_absurd_numbers_and_nesting_cost_their_document(
    answer: Callable[[BaseHTTPRequestHandler], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", "sk-that-is-masked")  # in all texts of an answer
    with server(answer) as url:
        with pytest.raises(Fault, match=message) as caught:
            ask(config(url))
        assert len(str(caught.value)) < 300
        if "connection broken" in message:
            with pytest.raises(UserError, match="does not answer"):
                check_endpoint(config(url))
        else:
            assert check_endpoint(config(url))["architecture"] == "endpoint"


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "\\ud800 and \\u0000\\u202e"}}', b'{"error": ' + b"[" * 960 + b"]" * 960 + b"}"]
)
def test_an_error_message_is_one_short_line_that_files_can_hold(body: bytes) -> None:
    with server(plain(body, "400 Bad Request")) as url, pytest.raises(Refusal) as caught:
        ask(config(url))
    assert str(caught.value).encode().decode().isprintable()
    assert len(str(caught.value)) < 300
