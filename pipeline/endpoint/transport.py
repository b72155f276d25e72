"""One HTTP request to an endpoint and its whole answer, through a proxy where the environment names one.

Requests to this machine (localhost, 127.0.0.0/8, ::1) never go through a proxy. Elsewhere HTTP_PROXY, HTTPS_PROXY,
ALL_PROXY and NO_PROXY count as httpx2 reads them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx2

from pipeline.errors import UserError, error_line

PLAIN_BYTES, TOKEN_BYTES, MOST_BYTES = 1 << 20, 1 << 12, 1 << 26
"""Maximum bytes of an answer without its tokens; per token, with its alternatives; of any answer."""

_UNPACK_ANY = 47  # zlib or gzip, recognised by the first bytes
_PACKINGS = "gzip, deflate"


def open_client(url: str, headers: Mapping[str, str], seconds: float, connections: int = 1) -> httpx2.AsyncClient:
    """A client for requests to one host.

    Args:
        url: URL of a request.
        headers: headers of every request.
        seconds: longest time without a byte.
        connections: maximum number of connections.

    Raises:
        UserError: the proxy that the environment names cannot be used.
    """
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    timeout = httpx2.Timeout(seconds)
    if is_loopback(url):  # with a transport of its own a client reads no proxies
        direct = httpx2.AsyncHTTPTransport(limits=limits)
        return httpx2.AsyncClient(headers=headers, timeout=timeout, transport=direct)
    try:
        return httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        names = " and ".join(name for one in ("http", "https", "all") if (name := _set_variable(f"{one}_proxy")))
        raise UserError(f"the proxy of {names} cannot be used: {error_line(error)}") from None


def is_loopback(url: str) -> bool:
    """Whether a URL is one of this machine: localhost, or an address in 127.0.0.0/8, or ::1."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


def proxy_note(client: httpx2.AsyncClient, url: str) -> str:
    """A clause that names the proxy variable by which requests to a URL go through a proxy; empty if they do not."""
    if client._transport_for_url(httpx2.URL(url)) is client._transport:
        return ""
    variable = _set_variable(f"{urlsplit(url).scheme}_proxy") or _set_variable("all_proxy")
    return f" (through the proxy of {variable}; NO_PROXY excepts hosts)"


def _set_variable(name: str) -> str | None:
    """An environment variable that is set, in lower case before capitals, as they are read."""
    return next((one for one in (name, name.upper()) if os.environ.get(one)), None)


class TooLongError(Exception):
    """An answer exceeds the limit of its request, or has a compression that was not offered."""


@dataclass(frozen=True, slots=True)
class Received:
    """The complete answer to a request."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    proxy: str = ""  # clause that names the proxy variable

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The content as a JSON value.

        Raises:
            ValueError: it is not JSON.
        """
        return json.loads(self.content)


def longest_answer(tokens: int) -> int:
    """Maximum bytes of an answer with `tokens` tokens of the prompt and the continuations."""
    return min(MOST_BYTES, PLAIN_BYTES + TOKEN_BYTES * tokens)


async def exchange(
    client: httpx2.AsyncClient, method: str, url: str, most: int, body: Mapping[str, Any] | None = None
) -> Received:
    """Send a request and read its answer.

    Args:
        client: HTTP client.
        method: GET or POST.
        url: URL of the request.
        most: maximum bytes of the answer, compressed and decompressed.
        body: JSON values; None for no body.

    Raises:
        TooLongError: the answer is longer; the connection is closed.
        httpx2.HTTPError: there is no answer.
    """
    headers = {"Accept-Encoding": _PACKINGS}
    async with client.stream(method, url, json=body, headers=headers) as response:
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_raw():
            parts.append(part)
            size += len(part)
            if size > most:
                raise TooLongError(f"answer is longer than {most:,} bytes")
        packing = response.headers.get("content-encoding", "identity").strip().lower()
        return Received(response.status_code, response.headers, _unpacked(b"".join(parts), packing, most))


def get_answer(url: str, headers: Mapping[str, str], seconds: float, most: int = MOST_BYTES) -> Received:
    """The answer to a GET request, callable inside and outside of an event loop.

    Args:
        url: URL of the request.
        headers: headers of the request.
        seconds: maximum total time.
        most: maximum bytes of the answer.

    Raises:
        TimeoutError: there was no answer in time.
        TooLongError: the answer is longer.
        httpx2.HTTPError: there is no answer.
    """

    async def ask() -> Received:
        try:
            async with asyncio.timeout(seconds), open_client(url, headers, seconds) as client:
                note = proxy_note(client, url)
                try:
                    return replace(await exchange(client, "GET", url, most), proxy=note)
                except httpx2.TransportError as error:
                    raise type(error)(f"{str(error) or type(error).__name__}{note}") from None
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()


def _unpacked(data: bytes, packing: str, most: int) -> bytes:
    if packing in ("identity", ""):
        return data
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise TooLongError(f"answer is packed as {packing[:20]!r}; {_PACKINGS} were offered")
    unpacking = zlib.decompressobj(_UNPACK_ANY)
    try:
        content = unpacking.decompress(data, most + 1)
    except zlib.error:
        raise TooLongError(f"answer is not the {packing} that it says") from None
    if len(content) > most:
        raise TooLongError(f"answer is longer than {most:,} bytes")
    return content
