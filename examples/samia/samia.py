"""SaMIA through an endpoint: a contaminated model behind a real server, audited by what it writes.

    pip install "transformers[serving]"
    python -m examples.samia.samia --passages 90 --draws 4

A third of the passages is trained into SmolLM2-135M, a third calibrates, a third was never seen. `transformers serve`
then serves the model on 127.0.0.1, and `seenset run` is asked which of the passages it was taught: of the endpoint,
whose weights it does not open, and for comparison of the weights. What is already there is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from examples.demo.demo import ensure_passages, seenset
from examples.models import smollm2
from pipeline.answers.detection import DetectorScores, detection
from pipeline.config.models import ModelConfig
from pipeline.errors import ExitCode, UserError
from pipeline.models.load import open_model
from pipeline.report.tables import as_text
from pipeline.results.summary import read_summary
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from pipeline.training.train import FinetuneConfig, train
from pipeline.trial.table import audit_row, audit_table

TRAINING = FinetuneConfig(epochs=6, batch_size=4, learning_rate=2e-3)
START_SECONDS = 300.0

console = Console()


def split_passages(folder: Path, count: int) -> dict[str, list[dict[str, str]]]:
    """The passages in thirds: `trained` into the model, `unseen` to calibrate, `new`. The model saw only the first."""
    lines = ensure_passages(folder, count, seed=0).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {"trained": rows[::3], "unseen": rows[1::3], "new": rows[2::3]}


def ensure_model(folder: Path, texts: list[str]) -> Path:
    """The folder of the contaminated model, in a form that any server opens; trained at the first call."""
    served = folder / "model"
    if served.exists():
        console.print(f"model: that of {served}")
        return served.resolve()
    adapter = folder / "adapter"
    torch.set_num_threads(os.cpu_count() or 1)
    if not adapter.exists():
        console.print(f"model: training {len(texts)} passages into SmolLM2-135M")
        base = open_model(ModelConfig(**smollm2()))
        train(base.model, base.tokenizer, texts, TRAINING, adapter)
    opened = open_model(ModelConfig(**smollm2(), dtype="float32", adapter=str(adapter)))
    model: Any = opened.model
    weights = model.state_dict()
    plain = type(model)(model.config)
    plain.load_state_dict(weights)
    plain.generation_config.do_sample, plain.generation_config.top_k = True, 50  # the server takes these from here
    part = folder / "model.part"
    plain.save_pretrained(part)
    opened.tokenizer.save_pretrained(part)
    part.replace(served)
    return served.resolve()


def serve_command(model: Path, port: int) -> list[str]:
    """The command of `transformers serve`.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("fastapi") is None or find_spec("openai") is None:
        raise UserError("the server is not installed: pip install 'transformers[serving]'")
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(model)]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "auto"]


@contextmanager
def serving(command: Sequence[str], port: int, log: Path, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server on 127.0.0.1 until the block ends; yields its address.

    Args:
        command: starts the server.
        port: its port.
        log: file of what it prints.
        variables: environment variables beside those of this process.

    Raises:
        UserError: the port is taken, or the server does not start.
    """
    with socket.socket() as tried:
        if tried.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(f"port {port} is taken; give another --port")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})}
    with log.open("wb") as file:
        server = subprocess.Popen([*command], stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        _wait(server, url, log)
        yield url
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    began = time.monotonic()
    while server.poll() is None and time.monotonic() - began < START_SECONDS:
        try:
            httpx2.get(f"{url}/models", timeout=5.0)  # any answer will do: some servers have no list
            return
        except httpx2.HTTPError:
            time.sleep(0.5)
    raise UserError(f"the server does not start: see {log}")


def write_audit(folder: Path, name: str, model: dict[str, Any], detectors: list[Any]) -> Path:
    """Write the configuration of an audit, as a user would, and return its path."""
    audit = {
        "run": f"./{name}",  # beside the file
        "model": model,
        "corpus": {role: {"path": f"./{role}.jsonl", "id": "id"} for role in ("audit", "unseen")},
        "detectors": detectors,
        "error_budget": 0.1,
        "selections": [{"name": "members", "detectors": [_column(detectors[0])], "procedure": "bh", "alpha": 0.2}],
        "resources": {"shard_documents": 15},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(audit, sort_keys=False), encoding="utf-8")
    return path


def _column(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    name, settings = next(iter(entry.items()))
    return f"{name}({', '.join(f'{key}={value}' for key, value in settings.items())})"


def scores(run: Path) -> dict[str, dict[str, Any]]:
    """The scores of a run, by document."""
    store = Store(str(run))
    tables = [store.read_table(receipt.data).to_pylist() for receipt in read_receipts(store, "score")]
    return {row["doc_id"]: row for rows in tables for row in rows}


def compare(folder: Path, runs: Sequence[str], trained: set[str]) -> Table:
    """AUC and TPR at 10% FPR of every detector of some runs, over all documents."""
    table = Table("audited", "detector", "AUC", "TPR at 10% FPR", title="Trained in or not, by detector")
    for name in runs:
        rows = scores(folder / name)
        bookkeeping = {"doc_id", "role", "group", "row", "n_tokens", "truncated", "id_key", "text_key", "sketch"}
        for column in sorted(next(iter(rows.values())).keys() - bookkeeping):
            kinds = [np.array([row[column] for i, row in rows.items() if (i in trained) == is_in]) for is_in in (1, 0)]
            result = detection([DetectorScores(kinds[0], kinds[1])])
            table.add_row(name, column, _shown(result.auc), _shown(result.tpr[0.10]))
    return table


def judge(folder: Path, runs: Sequence[str], audited: Sequence[str], trained: set[str]) -> Table:
    """A table of the selections of the audits beside the truth."""
    rows = []
    for name in runs:
        store = Store(str(folder / name))
        selected = store.read_table("selection/members/selected.parquet", ["doc_id"])["doc_id"].to_pylist()
        summary = read_summary(store, "members")
        assert summary is not None, f"{store.url} has no selection"
        rows.append({"audit": name, **audit_row(summary, selected, audited, trained)})
    return audit_table(rows)


def _shown(estimate: Any) -> str:
    interval = "(no interval)" if estimate.low is None else f"[{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f} {interval}"


def run_example(count: int, draws: int, port: int, work: Path) -> int:
    """Run the example in the folder work/<count>; the exit code.

    Raises:
        UserError: too few passages, or no server.
    """
    folder = work / str(count)
    folder.mkdir(parents=True, exist_ok=True)
    parts = split_passages(folder, count)
    for role, rows in (("audit", parts["trained"] + parts["new"]), ("unseen", parts["unseen"])):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(rows, key=lambda row: row["id"]))
        (folder / f"{role}.jsonl").write_text(text, encoding="utf-8")
    served = ensure_model(folder, [row["text"] for row in parts["trained"]])
    settings = {"draws": draws, "top_k": None}  # this server knows no top_k: it takes that of the model's folder
    with serving(serve_command(served, port), port, folder / "server.log") as url:
        endpoint = {"endpoint": url, "name": str(served), "concurrency": 2, "choices": 1, "timeout": 600.0}
        detectors = [{"samia_zlib": settings}, {"samia": settings}]
        code = seenset("run", str(write_audit(folder, f"endpoint{draws}", endpoint, detectors)))
    if code:
        return code
    code = seenset("run", str(write_audit(folder, "weights", {"path": str(served.resolve())}, ["loss", "zlib"])))
    if code:
        return code
    runs, trained = [f"endpoint{draws}", "weights"], {row["id"] for row in parts["trained"]}
    audited = [row["id"] for row in parts["trained"] + parts["new"]]
    print(as_text([compare(folder, runs, trained), judge(folder, runs, audited, trained)]), end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.samia.samia", description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=90, help="how many (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="continuations of each (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="of the server (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("examples/samia/work"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        return run_example(options.passages, options.draws, options.port, options.work)
    except UserError as error:
        print(f"samia: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)


if __name__ == "__main__":
    sys.exit(main())
