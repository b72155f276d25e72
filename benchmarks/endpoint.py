"""Speed of the endpoint client with a local stub that answers after a delay. Prints one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil

from pipeline.config.models import EndpointConfig
from pipeline.endpoint.client import Endpoint, Usage, run_concurrently

CONCURRENCY = 64
LATENCY = 0.2
WORDS = 64


def stub(port: Connection) -> None:
    """Serve until killed: an answer of 64 words, 200 ms after each request."""
    answer = json.dumps(
        {"choices": [{"text": " word" * WORDS}], "usage": {"prompt_tokens": 64, "completion_tokens": 64}}
    )
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
    reply = (head + answer).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(request.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                await asyncio.sleep(LATENCY)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=256)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def measure_client(requests: int) -> dict[str, Any]:
    """Send so many requests to the stub, 64 at a time: share of the possible rate, and growth of memory in MB."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=stub, args=(theirs,), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/v1"
        return asyncio.run(_measure(EndpointConfig(endpoint=url, name="stub", concurrency=CONCURRENCY), requests))
    finally:
        server.terminate()
        server.join()


async def _measure(config: EndpointConfig, requests: int) -> dict[str, Any]:
    body = {"model": "stub", "prompt": "word " * WORDS, "max_tokens": WORDS, "n": 1}
    process, sizes = psutil.Process(), []

    async with Endpoint(config) as endpoint:

        async def ask(number: int) -> None:
            await endpoint.ask("/completions", body, 2 * WORDS, lambda value: value["choices"][0]["text"], Usage())
            if number in (requests // 5, requests - 1):
                sizes.append(process.memory_info().rss)

        await run_concurrently(range(CONCURRENCY), ask, CONCURRENCY)  # connections are made
        sizes.clear()
        began, busy = time.perf_counter(), time.process_time()
        await run_concurrently(range(requests), ask, CONCURRENCY)
        seconds, cpu = time.perf_counter() - began, time.process_time() - busy
    possible = CONCURRENCY / LATENCY
    return {
        "requests": requests,
        "requests_per_s": round(requests / seconds, 1),
        "share_of_possible": round(requests / seconds / possible, 3),
        "cpu_ms_a_request": round(1e3 * cpu / requests, 3),
        "memory_growth_mb": round((sizes[-1] - sizes[0]) / 1e6, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=6400)
    print(json.dumps({"benchmark": "endpoint", **measure_client(parser.parse_args().requests)}))
