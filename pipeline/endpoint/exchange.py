"""One request and its answer, of bounded size and within a bounded time."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2

PLAIN_BYTES, TOKEN_BYTES, MOST_BYTES = 1 << 20, 1 << 12, 1 << 26
"""Of an answer, beside its tokens; for each token, with its alternatives; of any answer."""

_UNPACK_ANY = 47  # zlib or gzip, told by the first bytes
_PACKINGS = "gzip, deflate"


class TooLongError(Exception):
    """An answer is longer than any that was asked for can be, or packed in a way that was not offered."""


@dataclass(frozen=True, slots=True)
class Received:
    """The answer to a request, read whole."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The content as a JSON value.

        Raises:
            ValueError: it is none.
        """
        return json.loads(self.content)


def longest_answer(tokens: int) -> int:
    """Bytes that an answer about so many tokens, of the prompt and the continuations, has at most."""
    return min(MOST_BYTES, PLAIN_BYTES + TOKEN_BYTES * tokens)


async def exchange(
    client: httpx2.AsyncClient, method: str, url: str, most: int, body: Mapping[str, Any] | None = None
) -> Received:
    """Send a request and read its answer.

    Args:
        client: to send it with.
        method: GET or POST.
        url: of the request.
        most: bytes of the answer, as it is sent and unpacked.
        body: JSON values; None without one.

    Raises:
        TooLongError: the answer is longer; the connection is closed.
        httpx2.HTTPError: there is none.
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
    """The answer to a GET, from code that runs in no event loop, or in one.

    Args:
        url: of the request.
        headers: of the request.
        seconds: from first to last.
        most: bytes of the answer.

    Raises:
        TimeoutError: it was not there in time.
        TooLongError: it is longer.
        httpx2.HTTPError: there is none.
    """

    async def ask() -> Received:
        try:
            async with asyncio.timeout(seconds), httpx2.AsyncClient(headers=headers, timeout=seconds) as client:
                return await exchange(client, "GET", url, most)
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
