"""Run the trials of this folder: prepare what they name, then `seenset trial`.

    python -m examples.trials.run alpha procedures      # or: all

Everything goes to examples/trials/work and is used again by the next trial and the next call.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.demo.demo import ensure_passages, seenset
from examples.models import HUB_NAME, smollm2
from examples.trials.benchmark import PUPILS, answer_all, make_benchmark, read_items
from examples.trials.detectors import run_detectors
from examples.trials.edited import NAME as EDITED
from examples.trials.edited import run_edited
from examples.trials.family import make_family
from examples.trials.negative_control import NAME as CONTROL
from examples.trials.negative_control import SPLITS, run_negative_control
from examples.trials.pictures import make_model, make_pictures
from examples.trials.systems import run_systems
from examples.trials.versions import TRIALS, run_trial_of_versions
from examples.trials.wikimia import make_wikimia
from pipeline.errors import ExitCode, UserError
from pipeline.trial.config import TrialConfig, load_trial

FOLDER = Path("examples/trials")
WORK = FOLDER / "work"
SYSTEMS = "all_systems"
DETECTORS = "detectors"
NAMES = (
    "alpha",
    "procedures",
    "among_others",
    "known_members",
    "share",
    "calibration_size",
    "label_noise",
    "fusion",
    "model_size",
    "ranking",
    "knockoffs",
    "fsd",
    "samia",
    "verdict",
    "shift",
    "pictures",
    SYSTEMS,
)
EVERY_NAME = (*NAMES, *TRIALS, CONTROL, DETECTORS, EDITED)
PASSAGES = 600
DOCUMENTS = 100  # of a trial of documents with versions
PICTURES = 96

console = Console()


def prepare(config: TrialConfig) -> None:
    """Make the missing inputs of a trial: passages, pictures, benchmark, WikiMIA, models trained from scratch.

    Raises:
        UserError: too few passages in the installed packages.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    if "benchmark.jsonl" in config.documents.paths[0]:
        make_benchmark(WORK / "benchmark.jsonl", WORK / "pupils")
        return
    if Path(config.documents.paths[0]).name == "wikimia.jsonl":
        make_wikimia(WORK / "wikimia.jsonl")
        return
    if config.documents.image is not None:
        make_pictures(Path(config.documents.paths[0]), PICTURES)
        make_model(Path(config.model.path))
        return
    passages = ensure_passages(WORK, PASSAGES, seed=0)
    if few := re.fullmatch(r"passages_(\d+)\.jsonl", Path(config.documents.paths[0]).name):
        lines = passages.read_text(encoding="utf-8").splitlines(keepends=True)
        (WORK / few[0]).write_text("".join(lines[: int(few[1])]), encoding="utf-8")
        return
    if Path(config.model.path).parent == (WORK / "family").resolve():
        texts = [json.loads(line)["text"] for line in passages.read_text(encoding="utf-8").splitlines()]
        make_family(WORK / "family", texts)


def run_trial(name: str) -> int:
    """Run one trial as a user would; the exit code of the first command that fails, or 0.

    Raises:
        UserError: as `prepare`, or the trial's configuration is wrong.
    """
    path = FOLDER / f"{name}.yaml"
    config, _ = load_trial(str(path))
    prepare(config)
    models: list[str] = []
    for role in ("model", "reference_model", "paraphraser"):
        if getattr(getattr(config, role), "path", None) == HUB_NAME:
            for key, value in smollm2().items():
                models += ["--set", f"{role}.{key}={value}"]
    if name == SYSTEMS:
        return run_systems(path, models)
    arguments = ["trial", str(path), *models]
    code = seenset(*arguments)
    if name != "ranking" or code:
        return code
    return seenset(*arguments, "--ranking", str(answer(config)))


def answer(config: TrialConfig) -> Path:
    """Let every model answer the benchmark, the contaminated one instead of its base; returns the file of results."""
    models = json.loads((Path(config.run) / "trial.json").read_text(encoding="utf-8"))["models"]
    folders = {name: WORK / "pupils" / name for name in PUPILS}
    folders[Path(config.model.path).name] = Path(models[0]["path"])
    path = WORK / "results.parquet"
    shares = answer_all(read_items(WORK / "benchmark.jsonl"), folders, path)
    summary = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    console.print(f"right answers, contaminated model included: {summary}", highlight=False)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.trials.run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", metavar="NAME", choices=[*EVERY_NAME, "all"], help=f"all, {', '.join(EVERY_NAME)}"
    )
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of the trials versions and options")
    parser.add_argument("--minutes", type=float, help="of the trial detectors: then it prints what it has")
    control = parser.add_argument_group(CONTROL)
    control.add_argument("--unseen", metavar="FILE", help="your own unseen documents, instead of passages")
    control.add_argument("--id", default="id", metavar="COLUMN", help="of their ids (default: %(default)s)")
    control.add_argument("--text", default="text", metavar="COLUMN", help="of their texts (default: %(default)s)")
    control.add_argument("--model", metavar="PATH", help="that has not seen them, instead of SmolLM2-135M")
    control.add_argument("--splits", type=int, default=SPLITS, help="of each size (default: %(default)s)")
    given = parser.parse_args(arguments)
    for name in EVERY_NAME if "all" in given.names else given.names:
        start = time.monotonic()
        try:
            if name == CONTROL:
                source = given.unseen and {"path": given.unseen, "id": given.id, "text": given.text}
                model = {"path": given.model} if given.model else smollm2()
                folder = WORK / (f"{CONTROL}-own" if given.unseen else CONTROL)
                code = run_negative_control(folder, model, PASSAGES, source, given.splits)
            elif name in TRIALS:
                code = run_trial_of_versions(name, WORK, smollm2(), given.documents)
            elif name == EDITED:
                code = run_edited(WORK / name, {**smollm2(), "dtype": "bfloat16"})
            elif name == DETECTORS:
                code = run_detectors(WORK / name, smollm2(), minutes=given.minutes)
            else:
                code = run_trial(name)
        except UserError as error:
            print(f"trials: {error}", file=sys.stderr)
            return int(ExitCode.USER_ERROR)
        except KeyboardInterrupt:  # where the command was running, it has printed its line
            return int(ExitCode.INTERRUPTED)
        if code:
            return code
        console.print(f"{name}: {time.monotonic() - start:.0f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
