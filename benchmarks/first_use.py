"""The first use, whole commands from a cold start: `seenset run` beside a script that one writes in an afternoon.

`python -m benchmarks.first_use` prints one JSON line. Both sides score the same WikiMIA texts by loss, zlib, min_k and
min_k_plus_plus with SmolLM2-135M's GGUF file on the same cores (`--cores`), in turn:

- first_float32, second_float32, bfloat16: seconds of the script over seconds of `seenset run`, medians over rounds. The
  first run of a machine unpacks the GGUF file; the second finds it unpacked; bfloat16 only where the CPU
  multiplies it natively.
- small: seconds of `seenset run` on 90 short documents with the model in safetensors: to the first score, and in all.
- steps: seconds of each command of a first use (init, plan, run, status, select, report, evaluate) on a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.small_model import WORDS, fast_type, save_small_model, smollm2_file
from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.run.manifest import versions

DETECTORS = ["loss", "zlib", "min_k", "min_k_plus_plus"]
SEENSET = [sys.executable, "-m", "ray_jobs.cli"]
WORDS_OF_A_TEXT = 32


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=776)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=["script", "small", "steps"], help="One part alone.")
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": options.cores, "texts": options.texts, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(Path(folder), options.cores)
        if options.only in (None, "script"):
            result |= bench.against_script(_wikimia(options.texts), options.rounds)
        if options.only in (None, "small"):
            result["small"] = bench.small()
        if options.only in (None, "steps"):
            result["steps"] = bench.steps()
    print(json.dumps({**result, "versions": versions()}))


def _wikimia(count: int) -> list[str]:
    """The first texts of WikiMIA of 32 words.

    Raises:
        UserError: SEENSET_SHARED does not name the folder that holds them.
    """
    path = Path(os.environ.get("SEENSET_SHARED", "../shared")) / f"data/wikimia/{WORDS_OF_A_TEXT}.jsonl"
    if not path.exists():
        raise UserError(f"no {path}; SEENSET_SHARED names the folder that holds data/wikimia")
    return [json.loads(line)["input"] for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def _write_texts(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


class _Bench:
    """Commands in one folder, on a number of cores."""

    def __init__(self, root: Path, cores: int) -> None:
        self.root = root
        self.cores = sorted(os.sched_getaffinity(0))[:cores]
        self.environment = {**os.environ, "SEENSET_CACHE": str(root / "cache"), "PYTHONPATH": os.getcwd()}
        self.environment.pop("RAY_ADDRESS", None)

    def seconds(self, command: Sequence[str], folder: Path | None = None) -> float:
        """How long a command takes, which must end well."""
        began = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder or self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=self._pin,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-2000:]}")
        return time.perf_counter() - began

    def _pin(self) -> None:
        os.sched_setaffinity(0, self.cores)

    def against_script(self, texts: list[str], rounds: int) -> dict[str, Any]:
        """`seenset run` on three fifths audited and two fifths calibrating, and the script on all of them."""
        whole = _write_texts(self.root / "texts.jsonl", texts)
        cut = len(texts) * 3 // 5
        audit = _write_texts(self.root / "audit.jsonl", texts[:cut])
        unseen = _write_texts(self.root / "unseen.jsonl", texts[cut:])
        gguf = str(smollm2_file())
        script = [sys.executable, "-m", "benchmarks.plain_script", gguf, whole]
        names = ["first_float32", "second_float32", *(["bfloat16"] if fast_type("cpu") == "bfloat16" else [])]
        runs: dict[str, list[float]] = {name: [] for name in ("script", *names)}
        for number in range(rounds):
            shutil.rmtree(self.root / "cache", ignore_errors=True)
            runs["script"].append(self.seconds([*script, str(self.root / f"script-{number}.json"), "float32"]))
            for name in names:
                folder = self.root / f"{name}-{number}"
                dtype = "bfloat16" if name == "bfloat16" else "float32"
                config = _audit(folder, {"path": gguf, "dtype": dtype}, audit, unseen)
                runs[name].append(self.seconds([*SEENSET, "run", config]))
        medians = {name: statistics.median(values) for name, values in runs.items()}
        ratios = {name: round(medians["script"] / value, 2) for name, value in medians.items() if name != "script"}
        return {**ratios, "seconds": {name: round(value, 1) for name, value in medians.items()}}

    def small(self) -> dict[str, float]:
        """90 short documents, the model in safetensors."""
        model = self.root / "safetensors"
        opened = open_model(ModelConfig(path=str(smollm2_file())))
        weights: Any = opened.model
        weights.save_pretrained(model)
        opened.tokenizer.save_pretrained(model)
        texts = _wikimia(90)
        audit = _write_texts(self.root / "small-audit.jsonl", texts[:60])
        unseen = _write_texts(self.root / "small-unseen.jsonl", texts[60:])
        config = _audit(self.root / "small", {"path": str(model)}, audit, unseen)
        began = time.time()
        total = self.seconds([*SEENSET, "run", config])
        first = min(path.stat().st_mtime for path in (self.root / "small/run/scores").glob("*.parquet"))
        return {"first_score_s": round(first - began, 1), "total_s": round(total, 1)}

    def steps(self) -> dict[str, float]:
        """Every command of a first use, on made-up text and a small random model: what is not the model's own time."""
        desk = self.root / "desk"
        desk.mkdir()
        save_small_model(desk / "model")
        rng = random.Random(0)
        texts = [" ".join(rng.choices(WORDS, k=30)) for _ in range(200)]
        for name, some in (("audit", texts[:80]), ("unseen", texts[80:140]), ("seen", texts[140:])):
            _write_texts(desk / f"{name}.jsonl", some)
        seconds = {"init": self.seconds([*SEENSET, "init"], desk)}
        for name in ("plan", "run"):
            seconds[name] = self.seconds([*SEENSET, name, "audit.yaml"], desk)
        run = str(yaml.safe_load((desk / "audit.yaml").read_text(encoding="utf-8"))["run"])
        seconds["status"] = self.seconds([*SEENSET, "status", run], desk)
        seconds["select"] = self.seconds([*SEENSET, "select", run, "--set", "selections.0.alpha=0.2"], desk)
        seconds["report"] = self.seconds([*SEENSET, "report", run], desk)
        seconds["evaluate"] = self.seconds(
            [*SEENSET, "evaluate", "audit.yaml", "--set", "run=evaluated", "--set", "corpus.audit=null"], desk
        )
        return {name: round(value, 1) for name, value in seconds.items()}


def _audit(folder: Path, model: dict[str, Any], audit: str, unseen: str) -> str:
    """Write an audit with the settings of a newcomer; the path of the YAML."""
    folder.mkdir()
    config = {
        "run": str(folder / "run"),
        "model": model,
        "corpus": {"audit": {"path": audit}, "unseen": {"path": unseen}},
        "detectors": DETECTORS,
        "selections": [{"name": "members", "detectors": ["min_k_plus_plus"], "procedure": "bh", "alpha": 0.1}],
    }
    path = folder / "audit.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    main()
