"""A real HTTP server on 127.0.0.1 that speaks the OpenAI interface, and misbehaves when asked to."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROBE_TEXT = "The harbour office of Vellmark keeps one book for ropes and another for lamps, and the clerk"
"""Text of the requests that find refused parameters."""

Behave = Callable[[str, int], str]
"""(prompt, attempt from 1) -> "answer" or what goes wrong: 429, 500, hang, cut, json, empty, filter, 400, 401, 402."""


@dataclass
class Said:
    """What a server was asked and what it answered."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)  # requests that find refused parameters
    begun: list[tuple[float, str]] = field(default_factory=list)  # when, prompt
    attempts: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)  # choices, by prompt
    keys: set[str | None] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    url: str = ""

    @property
    def requests(self) -> int:
        """All requests so far."""
        return len(self.bodies) + len(self.probes)


def prompt_of(body: dict[str, Any]) -> str:
    """The text to continue, behind the instruction of a chat; of other messages the last one."""
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"].split("\n\n", 1)[-1]


@contextmanager
def openai_server(
    continue_text: Callable[[str, int], str] = lambda prompt, seed: f" word{seed} and some more of it",
    behave: Behave = lambda prompt, attempt: "answer",
    key: str | None = None,
    models: list[str] | None = None,
    log_probs: Callable[[str], list[float]] | None = None,
    way: str = "prompt_logprobs",
    most_choices: int = 100,
    seconds: float = 0.0,
    hang: float = 2.0,
    respond: Callable[[dict[str, Any]], Any] | None = None,
    refuse: Callable[[dict[str, Any]], Any] = lambda body: None,
) -> Iterator[Said]:
    """Serve until the block ends. `models` None answers 500 for the list, as some servers do.

    `respond` gives the whole answer to a body: a JSON value, bytes, or a pair of a status and one of these.
    `refuse` gives the error that a body gets for its parameters, if any, with status 400 or as a pair with its status.
    """
    said, lock = Said(), threading.Lock()
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, status: int, value: Any, **headers: str) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, content in headers.items():
                self.send_header(name.replace("_", "-"), content)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def allowed(self) -> bool:
            said.keys.add(self.headers.get("Authorization"))
            said.paths.add(self.path)
            said.headers.append({name.lower(): value for name, value in self.headers.items()})
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                self.reply(401, {"error": {"message": f"Incorrect API key: {self.headers.get('Authorization')}"}})
                return False
            return True

        def do_GET(self) -> None:
            if not self.allowed():
                return
            if models is None:
                self.reply(500, b"no cache")
            else:
                self.reply(200, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            prompt = prompt_of(body)
            if prompt == PROBE_TEXT:
                with lock:
                    said.probes.append(body)
                refused = refuse(body)
                texts = [" a bell"] * body.get("n", 1)
                usage = {"prompt_tokens": 20, "completion_tokens": 2 * len(texts)}
                choices = [{"text": text, "message": {"content": text}} for text in texts]
                status, refused = refused if isinstance(refused, tuple) else (400, refused)
                self.reply(status if refused else 200, refused or {"choices": choices, "usage": usage})
                return
            with lock:
                said.bodies.append(body)
                said.begun.append((time.monotonic(), prompt))
                said.attempts[prompt] += 1
                attempt = said.attempts[prompt]
                said.busy += 1
                said.busiest = max(said.busiest, said.busy)
            over.wait(seconds)
            try:
                if refused := refuse(body):
                    self.reply(400, refused)
                else:
                    self.act(behave(prompt, attempt), prompt, body)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with lock:
                    said.busy -= 1

        def act(self, fate: str, prompt: str, body: dict[str, Any]) -> None:
            if fate == "429":
                self.reply(429, {"error": {"message": "slow down"}}, Retry_After="0.3")
            elif fate == "500":  # some servers tell in their errors what they were sent
                self.reply(500, {"error": {"message": f"failed with {self.headers.get('Authorization')}"}})
            elif fate == "hang":
                over.wait(hang)
                self.close_connection = True
            elif fate == "cut":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            elif fate == "json":
                self.reply(200, b'{"choices": [{"text": ')
            elif fate in ("empty", "filter"):
                end = "stop" if fate == "empty" else "content_filter"
                self.reply(200, {"choices": [{"text": "" if fate == "empty" else "xx", "finish_reason": end}]})
            elif fate.startswith("{"):
                self.reply(200, fate.encode())
            elif fate.isdigit():
                self.reply(int(fate), {"error": {"message": f"because of {fate}"}})
            elif respond is not None:
                value = respond(body)
                self.reply(*value if isinstance(value, tuple) else (200, value))
            else:
                self.reply(200, self.answer(prompt, body))

        def answer(self, prompt: str, body: dict[str, Any]) -> dict[str, Any]:
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": 0}
            if body.get("prompt_logprobs") is not None and way == "prompt_logprobs" and log_probs is not None:
                told = [None, *({str(i): {"logprob": p}} for i, p in enumerate(log_probs(prompt)))]
                usage["prompt_tokens"] = len(told)
                return {"choices": [{"text": " x", "prompt_logprobs": told}], "usage": usage}
            if body.get("echo") and way == "echo" and log_probs is not None:
                told_of = {"token_logprobs": [None, *log_probs(prompt)]}
                usage = {"prompt_tokens": len(told_of["token_logprobs"]), "completion_tokens": 1}  # vLLM hides it
                return {"choices": [{"text": prompt, "logprobs": told_of}], "usage": usage}
            number = min(body.get("n", 1), most_choices)
            with lock:
                said.answered[prompt] += number
            texts = [continue_text(prompt, body.get("seed", 0) + i) for i in range(number)]
            usage["completion_tokens"] = sum(len(text.split()) for text in texts)
            chat = "messages" in body
            choices = [{"message": {"content": text}} if chat else {"text": text} for text in texts]
            return {"choices": choices, "usage": usage}

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 256

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    said.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield said
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
