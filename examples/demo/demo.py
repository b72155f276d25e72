"""A trial of Seenset on a real model: train some passages into it, then let Seenset find which.

    python -m examples.demo.demo --passages 180 --seed 0 --work examples/demo/work

Half of the passages that do not calibrate are trained into SmolLM2-135M. The demo gathers the passages and writes
`trial.yaml`; the rest is `seenset trial`, which contaminates the model, audits it with `seenset run` and holds the
answer against the truth. All that is already there for the same settings is used again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from examples.demo.passages import dependencies, gather_passages
from examples.models import smollm2
from pipeline.errors import ExitCode, UserError
from ray_jobs.terminal import heartbeat

TRIAL: dict[str, Any] = {
    "contaminate": {"share": 0.5, "epochs": 4, "batch_size": 4, "learning_rate": 2e-3},
    "repeats": 100,
    "detectors": ["loss", "zlib", "min_k", "min_k_plus_plus"],
    "selections": [
        {"name": "members", "detectors": ["min_k_plus_plus"], "procedure": "storey", "ranks": "smoothed", "alpha": 0.1},
    ],
}
MIN_PASSAGES = 90
"""With fewer than 30 passages to calibrate, alpha = 0.1 could hardly ever select anything."""

console = Console()


def ensure_passages(folder: Path, count: int, seed: int, packages: Iterable[str] | None = None) -> Path:
    """The file of passages of an earlier run in this folder; without one, gather passages and write it.

    They are taken from these packages; by default from all that are installed.

    Raises:
        UserError: the file of an earlier run holds another number of passages.
    """
    path = folder / "passages.jsonl"
    if path.exists():
        console.print(f"passages: those of {path}")
        existing = len(path.read_text(encoding="utf-8").splitlines())
        if existing != count:
            raise UserError(f"{path} holds {existing} passages instead of {count}; delete {folder} and start again")
        return path
    gathered = gather_passages(count, seed, packages)
    console.print(f"passages: {count} out of the documentation of installed packages")
    rows = [{"id": f"passage-{i:04d}", "text": p.text, "source": p.source} for i, p in enumerate(gathered)]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)
    return path


def write_trial(folder: Path, passages: Path, seed: int) -> Path:
    """Write trial.yaml, the configuration that a user would write, and return its path."""
    trial = {
        "run": "./trial",  # beside the file
        "model": smollm2(),
        "documents": {"path": os.path.relpath(passages, folder), "id": "id"},
        **TRIAL,
        "seed": seed,
    }
    trial["contaminate"] = {**trial["contaminate"], "seed": seed}
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(trial, sort_keys=False), encoding="utf-8")
    return path


def seenset(*arguments: str) -> int:
    """Run the command as a user would, with the output on the terminal; its exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the command, which gets the signal too, has printed its line and ended.
    """
    console.print(f"\n[bold]$ seenset {' '.join(arguments)}[/bold]", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    command = subprocess.Popen([sys.executable, "-m", "ray_jobs.cli", *arguments])
    try:
        return command.wait()
    except KeyboardInterrupt:
        while command.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):
                command.wait()
        raise


def run_demo(count: int, seed: int, work: Path) -> int:
    """Run the demo in the folder work/<count> (with the seed in its name unless it is 0); the exit code.

    Raises:
        UserError: too few passages.
    """
    if count < MIN_PASSAGES:
        raise UserError(f"passages must be at least {MIN_PASSAGES}, got {count}")
    folder = work / (str(count) if seed == 0 else f"{count}-seed{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    heartbeat.begin(sys.stdout, "gathering passages")
    passages = ensure_passages(folder, count, seed, dependencies("seenset"))
    trial = write_trial(folder, passages, seed)
    heartbeat.stop()
    return seenset("trial", str(trial))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=180, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is random (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("examples/demo/work"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        return run_demo(options.passages, options.seed, options.work)
    except UserError as error:
        print(f"demo: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    except KeyboardInterrupt:  # where the command was running, it has printed its line
        return int(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
