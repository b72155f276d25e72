"""An S3 server of moto's that counts its requests, is slow, and fails now and then."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import pytest

SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
BUCKET = "bucket"
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class ObjectStore:
    """The server, what it was asked, and how it behaves from now on."""

    endpoint: str = ""
    delay: float = 0.0  # seconds before each answer
    failures: float = 0.0  # the share of requests that are answered 503; of half of these nothing is done before
    requests: list[tuple[str, str]] = field(default_factory=list)  # kind, key
    at_once: int = 0  # the most requests that were under way together
    whole: threading.Lock = field(default_factory=threading.Lock)  # one write at a time
    _under_way: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the store."""
        return {**_CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def kinds(self) -> Counter[str]:
        """How many requests there were of each kind."""
        return Counter(kind for kind, _ in self.requests)

    def forget(self) -> None:
        """Count from nothing again."""
        with self._lock:
            self.requests.clear()
            self.at_once = 0

    def begin(self, kind: str, key: str) -> float:
        """Note a request, and draw what becomes of it."""
        with self._lock:
            self.requests.append((kind, key))
            self._under_way += 1
            self.at_once = max(self.at_once, self._under_way)
            return self._random.random()

    def end(self) -> None:
        """The request has its answer."""
        with self._lock:
            self._under_way -= 1


def _kind(environ: dict[str, Any]) -> tuple[str, str]:
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    key = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").lstrip("/")
    if method == "GET" and "list-type" in query:
        return "LIST", query.get("prefix", [""])[0]
    return ("DELETE many" if method == "POST" and "delete" in query else method), key


def _between(store: ObjectStore, application: Callable[..., Any]) -> Callable[..., list[bytes]]:
    """A WSGI application that counts, waits and fails before it asks another one."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        drawn = store.begin(*_kind(environ))
        try:
            time.sleep(store.delay)
            if drawn < store.failures / 2:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            else:
                headers: list[Any] = []
                # moto looks whether a key is there and then writes it, in two steps; S3 does both in one
                with store.whole if environ["REQUEST_METHOD"] == "PUT" else nullcontext():
                    body = b"".join(application(environ, lambda *head, **_: headers.extend(head)))
                if drawn >= store.failures:
                    start_response(*headers[:2])
                    return [body]
            body = b"" if environ["REQUEST_METHOD"] == "HEAD" else SLOW_DOWN
            start_response("503 Slow Down", [("Content-Length", str(len(body))), ("Connection", "close")])
            return [body]
        finally:
            store.end()

    return answer


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with one empty bucket, which this process reaches too."""
    from fsspec import filesystem
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def log(self, *_: Any) -> None: ...

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = ObjectStore()
    application = _between(store, DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in store.environment.items():
                environment.setenv(name, value)
            filesystem("s3").clear_instance_cache()  # of another server's address
            filesystem("s3").mkdir(BUCKET)
            store.forget()
            yield store
    finally:
        filesystem("s3").clear_instance_cache()
        server.shutdown()
        thread.join()
        get_backend("s3").reset()
